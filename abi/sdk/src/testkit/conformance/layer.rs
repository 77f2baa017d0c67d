//! Linear layers of the fused operations' cases: plain or quantised, with or without a bias.

use mlxcel_abi::DType;
use mlxcel_abi::fused_args::LinearWeight;
use mlxcel_abi::ops_args::QuantSpec;

use super::array::Array;
use super::quantization::Packed;
use super::rounding::Weight;
use crate::quant::QuantizedTensor;
use crate::{Backend, Result, Tensor};

/// One linear layer on the host.
pub(super) struct Layer {
    pub(super) plain: Option<Array>,
    pub(super) packed: Option<Packed>,
    bias: Option<Array>,
}

impl Layer {
    /// `[columns]` to `[rows]`; plain where there is no form of quantisation.
    pub(super) fn new(
        form: Option<QuantSpec>,
        dtype: DType,
        [rows, columns]: [i64; 2],
        bias: bool,
        seed: u64,
    ) -> Self {
        // Sums of about unit size, as models have them.
        let size = 2.0 / (columns as f64).sqrt();
        Self {
            plain: form
                .is_none()
                .then(|| Array::spread(dtype, &[rows, columns], -size, size, seed)),
            packed: form.map(|form| Packed::new(form, dtype, &[], rows, columns, seed)),
            bias: bias.then(|| Array::usual(dtype, &[rows], seed + 7)),
        }
    }

    /// Rows and columns of the weight.
    pub(super) fn shape(&self) -> [i64; 2] {
        let plain = self.plain.as_ref().map(|w| [w.dims()[0], w.dims()[1]]);
        let packed = self.packed.as_ref().map(|w| [w.rows(), w.columns()]);
        plain.or(packed).unwrap_or_default()
    }

    pub(super) fn on(&self, b: &Backend) -> Result<Loaded> {
        Ok(Loaded {
            plain: match &self.plain {
                Some(weight) => Some(weight.on(b)?.t()?),
                None => None,
            },
            packed: self.packed.as_ref().map(|w| w.on(b)).transpose()?,
            bias: self.bias.as_ref().map(|bias| bias.on(b)).transpose()?,
        })
    }

    /// What its rows measure, by the reference.
    pub(super) fn measured(&self, reference: &Backend) -> Result<Weight> {
        match (&self.plain, &self.packed) {
            (_, Some(packed)) => packed.measured(reference),
            (Some(plain), None) => Weight::plain(&plain.on(reference)?),
            (None, None) => Ok(Weight::default()),
        }
    }
}

/// One linear layer on a backend.
pub(super) struct Loaded {
    plain: Option<Tensor>,
    packed: Option<QuantizedTensor>,
    bias: Option<Tensor>,
}

impl Loaded {
    pub(super) fn raw(&self) -> LinearWeight {
        LinearWeight {
            plain: Tensor::handle_of(self.plain.as_ref()),
            quantized: self
                .packed
                .as_ref()
                .map(QuantizedTensor::raw)
                .unwrap_or_default(),
            bias: Tensor::handle_of(self.bias.as_ref()),
            ..LinearWeight::default()
        }
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match (&self.plain, &self.packed) {
            (Some(weight), _) => x.matmul(weight)?,
            (None, Some(weight)) => weight.matmul_t(x)?,
            (None, None) => x.clone(),
        };
        match &self.bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }
}
