//! Products, plain and quantised.

use mlxcel_abi::ops_args::{QuantSpec, QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, Tensor as Handle};

use crate::backend::Fused;
use crate::{Error, Result, Tensor};

/// A quantised weight `[.., N, K]` with its scales and, when affine, biases. An affine one without is centred, which only
/// a backend that says so takes.
#[derive(Clone)]
pub struct QuantizedTensor {
    /// Packed values.
    pub weight: Tensor,
    /// Scale per group.
    pub scales: Tensor,
    /// Bias per group.
    pub biases: Option<Tensor>,
    /// Mode, bits and group size.
    pub spec: QuantSpec,
}

impl core::fmt::Debug for QuantizedTensor {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let QuantSpec {
            mode,
            bits,
            group_size,
            ..
        } = self.spec;
        let mode = mlxcel_abi::kinds::quant::name(mode);
        write!(
            f,
            "QuantizedTensor({mode} {bits} bits, groups of {group_size}, {:?})",
            self.weight
        )
    }
}

impl QuantizedTensor {
    pub(crate) fn raw(&self) -> QuantizedWeight {
        QuantizedWeight {
            weight: self.weight.handle(),
            scales: self.scales.handle(),
            biases: Tensor::handle_of(self.biases.as_ref()),
            spec: self.spec,
            ..QuantizedWeight::default()
        }
    }

    /// Expands to `dtype`.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        let raw = self.raw();
        op!(self.weight.backend(), dequantize, &raw, dtype)
    }

    /// Rows of the weight (for embeddings): gathers packed rows, then expands only those.
    pub fn take_rows(&self, indices: &Tensor, dtype: DType) -> Result<Tensor> {
        let rows = QuantizedTensor {
            weight: self.weight.take(indices, 0)?,
            scales: self.scales.take(indices, 0)?,
            biases: self
                .biases
                .as_ref()
                .map(|b| b.take(indices, 0))
                .transpose()?,
            spec: self.spec,
        };
        rows.dequantize(dtype)
    }

    /// `x @ w.T` in x's dtype.
    pub fn matmul_t(&self, x: &Tensor) -> Result<Tensor> {
        let args = QuantizedMatmulArgs {
            x: x.handle(),
            w: self.raw(),
            transpose: 1,
            ..QuantizedMatmulArgs::default()
        };
        op!(x.backend(), quantized_matmul, &args)
    }

    /// `x @ w` in x's dtype.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        let args = QuantizedMatmulArgs {
            x: x.handle(),
            w: self.raw(),
            transpose: 0,
            ..QuantizedMatmulArgs::default()
        };
        op!(x.backend(), quantized_matmul, &args)
    }

    /// `x[lhs] @ w[rhs].T` for experts; `sorted` when `rhs` ascends.
    pub fn gather_matmul_t(
        &self,
        x: &Tensor,
        lhs: Option<&Tensor>,
        rhs: &Tensor,
        sorted: bool,
    ) -> Result<Tensor> {
        let args = QuantizedMatmulArgs {
            x: x.handle(),
            w: self.raw(),
            transpose: 1,
            sorted_indices: u32::from(sorted),
            lhs_indices: Tensor::handle_of(lhs),
            rhs_indices: rhs.handle(),
            ..QuantizedMatmulArgs::default()
        };
        x.backend().fused_or(
            Fused::GatherQuantizedMatmul,
            x,
            || op!(x.backend(), gather_quantized_matmul, &args),
            || x.gather_matmul(&self.dequantize(x.dtype()?)?.t()?, lhs, Some(rhs), sorted),
        )
    }
}

impl Tensor {
    /// Batched matrix product.
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        op!(self.backend(), matmul, self.handle(), other.handle())
    }

    /// `alpha * self @ b + beta * c`.
    pub fn addmm(&self, b: &Tensor, c: &Tensor, alpha: f32, beta: f32) -> Result<Tensor> {
        op!(
            self.backend(),
            addmm,
            c.handle(),
            self.handle(),
            b.handle(),
            alpha,
            beta
        )
    }

    /// `self[lhs] @ other[rhs]`.
    pub fn gather_matmul(
        &self,
        other: &Tensor,
        lhs: Option<&Tensor>,
        rhs: Option<&Tensor>,
        sorted: bool,
    ) -> Result<Tensor> {
        op!(
            self.backend(),
            gather_matmul,
            self.handle(),
            other.handle(),
            Tensor::handle_of(lhs),
            Tensor::handle_of(rhs),
            u32::from(sorted)
        )
    }

    /// Quantises the last axis.
    pub fn quantize(&self, spec: QuantSpec) -> Result<QuantizedTensor> {
        let mut out = [Handle::NONE; 3];
        command!(
            self.backend().table(),
            quantize,
            self.handle(),
            &spec,
            &mut out
        )?;
        let [weight, scales, biases] = out;
        if weight.is_none() || scales.is_none() {
            return Err(Error::Other(
                "quantize gave no weight or no scales".to_owned(),
            ));
        }
        Ok(QuantizedTensor {
            weight: Tensor::from_handle(self.backend(), weight),
            scales: Tensor::from_handle(self.backend(), scales),
            biases: (!biases.is_none()).then(|| Tensor::from_handle(self.backend(), biases)),
            spec,
        })
    }
}
