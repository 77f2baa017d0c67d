//! Inputs of single layers (gemma3n and gemma4): each token has, beside its embedding, a narrow one
//! for every layer. The table of these is most of a checkpoint and only some of its rows are read,
//! so it stays as it is stored, and rows are converted after they were taken.

use mlxcel_sdk::nn::{Linear, RmsNorm};
use mlxcel_sdk::prelude::*;
use mlxcel_sdk::quant::{self, QuantizedTensor};

/// Sizes of the inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Rows of the table.
    pub rows: usize,
    /// Width of one layer's input.
    pub width: usize,
    pub n_layers: usize,
    pub hidden: usize,
    pub eps: f32,
    /// Tokens from here on read row 0, as they have none of their own.
    pub first_foreign: Option<usize>,
}

enum Table {
    Plain(Tensor),
    Quantized(QuantizedTensor),
}

/// The table, and a projection of the token's embedding.
pub(crate) struct PerLayerInputs {
    shape: Shape,
    table: Table,
    projection: Linear,
    norm: RmsNorm,
    dtype: DType,
}

impl PerLayerInputs {
    /// Loads what lies beside the layers at `root`.
    pub(crate) fn load(root: &Weights, shape: Shape) -> Result<Self> {
        let all = shape.n_layers * shape.width;
        let at = root.at("embed_tokens_per_layer");
        let table = match at.quant()? {
            Some(spec) => Table::Quantized(quant::load(&at, spec, &[], shape.rows, all)?),
            None => {
                let table = at.stored("weight", &[shape.rows as i64, all as i64])?;
                let dtype = table.dtype()?;
                if !dtype.is_float() {
                    return Err(Error::Quantization {
                        name: format!("{}.weight", at.path()),
                        message: format!("stored as {}, a float type is needed", dtype.name()),
                    });
                }
                Table::Plain(table)
            }
        };
        let projection = root.at("per_layer_model_projection");
        let norm = root.at("per_layer_projection_norm");
        Ok(Self {
            table,
            projection: Linear::load(&projection, shape.hidden, all, false)?,
            norm: RmsNorm::load(&norm, shape.width, shape.eps)?,
            dtype: root.compute_dtype(),
            shape,
        })
    }

    /// Inputs `[T, layers, width]` from token ids and their scaled embeddings `[T, hidden]`.
    pub(crate) fn forward(&self, tokens: &Tensor, embedded: &Tensor) -> Result<Tensor> {
        let split =
            |t: Tensor| t.reshape(&[-1, self.shape.n_layers as i64, self.shape.width as i64]);
        let ids = match self.shape.first_foreign {
            Some(first) => {
                let zero = tokens.mul_scalar(0.0)?;
                tokens.lt_scalar(first as f64)?.select(tokens, &zero)?
            }
            None => tokens.clone(),
        };
        let rows = match &self.table {
            Table::Plain(table) => table.take(&ids, 0)?.cast(self.dtype)?,
            Table::Quantized(table) => table.take_rows(&ids, self.dtype)?,
        };
        let own = split(rows.mul_scalar((self.shape.width as f64).sqrt())?)?;
        let projected = self.projection.forward(embedded)?;
        let projected = projected.mul_scalar((self.shape.hidden as f64).sqrt().recip())?;
        let projected = self.norm.forward(&split(projected)?)?;
        projected
            .add(&own)?
            .mul_scalar(core::f64::consts::FRAC_1_SQRT_2)
    }

    /// One layer's input `[T, width]`.
    pub(crate) fn of_layer(&self, inputs: &Tensor, layer: usize) -> Result<Tensor> {
        inputs
            .narrow(1, layer as i64, 1)?
            .reshape(&[-1, self.shape.width as i64])
    }
}

/// What a layer does with its input: a gate from the stream, a product, and back to the stream's width.
pub(crate) struct Gate {
    gate: Linear,
    projection: Linear,
    norm: RmsNorm,
    glu_kind: u32,
}

impl Gate {
    pub(crate) fn load(
        at: &Weights,
        hidden: usize,
        width: usize,
        eps: f32,
        glu_kind: u32,
    ) -> Result<Self> {
        Ok(Self {
            gate: Linear::load(&at.at("per_layer_input_gate"), hidden, width, false)?,
            projection: Linear::load(&at.at("per_layer_projection"), width, hidden, false)?,
            norm: RmsNorm::load(&at.at("post_per_layer_input_norm"), hidden, eps)?,
            glu_kind,
        })
    }

    /// `[T, hidden]` and `[T, width]` to `[T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor, input: &Tensor) -> Result<Tensor> {
        let gated = self.gate.forward(x)?.glu(self.glu_kind, input)?;
        self.norm.forward(&self.projection.forward(&gated)?)
    }
}
