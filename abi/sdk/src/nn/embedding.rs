//! Token embedding and the head that gives logits.

use mlxcel_abi::DType;

use crate::nn::{Linear, RmsNorm, project};
use crate::ops::QuantizedTensor;
use crate::{Result, Tensor, Weights, quant};

#[derive(Debug, Clone)]
enum Table {
    Plain(Tensor),
    Quantized(QuantizedTensor),
}

/// Rows of a table by token id.
#[derive(Debug, Clone)]
pub struct Embedding {
    table: Table,
    dtype: DType,
}

impl Embedding {
    /// Loads `weight` `[rows, width]`.
    pub fn load(weights: &Weights, rows: usize, width: usize) -> Result<Self> {
        let table = match weights.quant()? {
            Some(spec) => Table::Quantized(quant::load(weights, spec, &[], rows, width)?),
            None => Table::Plain(weights.tensor("weight", &[rows as i64, width as i64])?),
        };
        Ok(Self {
            table,
            dtype: weights.compute_dtype(),
        })
    }

    /// `[T]` ids to `[T, width]`.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        match &self.table {
            Table::Plain(table) => table.take(tokens, 0),
            Table::Quantized(table) => table.take_rows(tokens, self.dtype),
        }
    }

    /// The table as a linear layer, for tied heads.
    pub fn as_linear(&self) -> Result<Linear> {
        match &self.table {
            Table::Plain(table) => Linear::from_weight(table),
            Table::Quantized(table) => Ok(Linear::from_quantized(table.clone())),
        }
    }
}

/// The layer from hidden states to logits: its own weight, or the embedding's.
#[derive(Debug, Clone)]
pub struct LmHead(Linear);

impl LmHead {
    /// Loads `lm_head` at `weights`, or ties it to `embedding`. A head that the checkpoint holds is used
    /// although the configuration ties it: it is the embedding's copy, or the configuration is wrong, as
    /// transformers 5 has it (`tie_weights`), and then it is what the model was trained with.
    pub fn load(
        weights: &Weights,
        embedding: &Embedding,
        tied: bool,
        rows: usize,
        width: usize,
    ) -> Result<Self> {
        if tied && !weights.contains("weight") {
            return Ok(Self(embedding.as_linear()?));
        }
        Ok(Self(Linear::load(weights, width, rows, false)?))
    }

    /// `[R, width]` to `[R, vocabulary]`.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        self.0.forward(hidden)
    }

    /// As `forward`, of the norm of `hidden`.
    pub fn forward_normed(&self, hidden: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        let [logits] = project(hidden, Some(norm), [&self.0])?;
        Ok(logits)
    }
}
