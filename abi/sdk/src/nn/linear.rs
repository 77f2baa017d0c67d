//! Linear layer, plain or quantised as the checkpoint has it.

use mlxcel_abi::fused_args::LinearWeight;

use crate::backend::FusedSite;
use crate::nn::projection;
use crate::ops::QuantizedTensor;
use crate::{Result, Tensor, Weights, quant};

#[derive(Debug, Clone)]
enum Kernel {
    /// Transposed view `[in, out]`.
    Plain(Tensor),
    Quantized(QuantizedTensor),
}

/// `x @ w.T + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    kernel: Kernel,
    bias: Option<Tensor>,
    site: FusedSite,
}

impl Linear {
    /// Loads `weight` `[outputs, inputs]` and, when `bias` says so, `bias` `[outputs]`.
    pub fn load(weights: &Weights, inputs: usize, outputs: usize, bias: bool) -> Result<Self> {
        let kernel = match weights.quant()? {
            Some(spec) => Kernel::Quantized(quant::load(weights, spec, &[], outputs, inputs)?),
            None => Kernel::Plain(
                weights
                    .product_weight("weight", &[outputs as i64, inputs as i64])?
                    .t()?,
            ),
        };
        let bias = bias
            .then(|| weights.tensor("bias", &[outputs as i64]))
            .transpose()?;
        Ok(Self {
            kernel,
            bias,
            site: FusedSite::default(),
        })
    }

    /// A layer over a weight `[outputs, inputs]` that is there already (tied heads).
    pub(crate) fn from_weight(weight: &Tensor) -> Result<Self> {
        Ok(Self {
            kernel: Kernel::Plain(weight.t()?),
            bias: None,
            site: FusedSite::default(),
        })
    }

    /// A layer over a quantised weight that is there already.
    pub(crate) fn from_quantized(weight: QuantizedTensor) -> Self {
        Self {
            kernel: Kernel::Quantized(weight),
            bias: None,
            site: FusedSite::default(),
        }
    }

    /// `[.., inputs]` to `[.., outputs]`, in x's dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.kernel {
            Kernel::Plain(weight) => x.matmul(weight)?,
            Kernel::Quantized(weight) => weight.matmul_t(x)?,
        };
        match &self.bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }

    /// `residual` plus the layer's result for `x` `[T, inputs]`.
    pub fn forward_onto(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        projection::onto(x, self, residual)
    }

    /// The layer as part of a fused operation.
    pub(crate) fn raw(&self) -> LinearWeight {
        let mut raw = LinearWeight {
            bias: Tensor::handle_of(self.bias.as_ref()),
            ..LinearWeight::default()
        };
        match &self.kernel {
            Kernel::Plain(weight) => raw.plain = weight.handle(),
            Kernel::Quantized(weight) => raw.quantized = weight.raw(),
        }
        raw
    }

    /// Where the layer, first of those that go together, stands with `project`.
    pub(crate) fn site(&self) -> &FusedSite {
        &self.site
    }
}
