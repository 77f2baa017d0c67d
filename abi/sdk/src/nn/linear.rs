//! Linear layer, plain or quantised as the checkpoint has it.

use mlxcel_abi::fused_args::LinearWeight;

use crate::backend::FusedSite;
use crate::nn::projection;
use crate::ops::QuantizedTensor;
use crate::ranks::{Ranks, Share};
use crate::{Error, Result, Tensor, Weights, quant};

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
    /// The layer has a part of its inputs: results are summed over the ranks.
    summed: Option<Ranks>,
}

/// Axis of the outputs in a weight, from the end.
const OUTPUTS: i32 = -2;
/// Axis of the inputs.
const INPUTS: i32 = -1;

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
            summed: None,
        })
    }

    /// As `load`, with this rank's part of the outputs where the model is split over ranks: the layer gives `outputs`
    /// divided by the ranks.
    pub fn load_outputs(
        weights: &Weights,
        inputs: usize,
        outputs: usize,
        bias: bool,
    ) -> Result<Self> {
        match weights.ranks() {
            None => Self::load(weights, inputs, outputs, bias),
            Some(ranks) => {
                let what = format!("outputs of \"{}\"", weights.path());
                let share = ranks.share(outputs, &what)?;
                Self::load_share(weights, inputs, outputs, bias, share)
            }
        }
    }

    /// As `load`, with one of equal parts of the outputs.
    pub fn load_share(
        weights: &Weights,
        inputs: usize,
        outputs: usize,
        bias: bool,
        share: Share,
    ) -> Result<Self> {
        let mut layer = Self::load(&weights.cut(OUTPUTS, share), inputs, outputs, false)?;
        if bias {
            // Its only axis is that of the outputs.
            let part = weights.cut(INPUTS, share);
            layer.bias = Some(part.tensor("bias", &[outputs as i64])?);
        }
        Ok(layer)
    }

    /// As `load`, with this rank's part of the inputs where the model is split over ranks: the layer takes `inputs`
    /// divided by the ranks, and gives the sum over them.
    pub fn load_inputs(
        weights: &Weights,
        inputs: usize,
        outputs: usize,
        bias: bool,
    ) -> Result<Self> {
        let Some(ranks) = weights.ranks() else {
            return Self::load(weights, inputs, outputs, bias);
        };
        let share = ranks.share(inputs, &format!("inputs of \"{}\"", weights.path()))?;
        if let Some(spec) = weights.quant()? {
            let part = inputs / share.count;
            let (group, bits) = (spec.group_size.max(1) as usize, spec.bits as usize);
            if !part.is_multiple_of(group) || !(part * bits).is_multiple_of(32) {
                return Err(Error::Unsupported {
                    what: format!(
                        "splitting \"{}\", {inputs} inputs in groups of {group} at {bits} bits, over {} ranks",
                        weights.path(),
                        share.count
                    ),
                    supported: "a rank has to have whole groups".to_owned(),
                });
            }
        }
        let mut layer = Self::load(&weights.cut(INPUTS, share), inputs, outputs, false)?;
        if bias {
            let bias = weights.tensor("bias", &[outputs as i64])?;
            // Once in the sum.
            layer.bias = (share.index == 0).then_some(bias);
        }
        layer.summed = Some(ranks.clone());
        Ok(layer)
    }

    /// A layer over a weight `[outputs, inputs]` that is there already (tied heads).
    pub(crate) fn from_weight(weight: &Tensor) -> Result<Self> {
        Ok(Self {
            kernel: Kernel::Plain(weight.t()?),
            bias: None,
            site: FusedSite::default(),
            summed: None,
        })
    }

    /// A layer over a quantised weight that is there already.
    pub(crate) fn from_quantized(weight: QuantizedTensor) -> Self {
        Self {
            kernel: Kernel::Quantized(weight),
            bias: None,
            site: FusedSite::default(),
            summed: None,
        }
    }

    /// `[.., inputs]` to `[.., outputs]`, in x's dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.forward_here(x)?;
        match &self.summed {
            None => Ok(y),
            Some(ranks) => ranks.all_sum(&y),
        }
    }

    /// As `forward`, without the sum over ranks.
    pub(crate) fn forward_here(&self, x: &Tensor) -> Result<Tensor> {
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
        match &self.summed {
            None => projection::onto(x, self, residual),
            Some(ranks) => {
                let [y] = projection::here(x, None, [self])?;
                residual.add(&ranks.all_sum(&y)?)
            }
        }
    }

    /// The ranks over which results are summed, where they are.
    pub(crate) fn summed(&self) -> Option<&Ranks> {
        self.summed.as_ref()
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
