//! Layer-sized operations: norms, rotary embedding, attention, convolution, Fourier transform.

use mlxcel_abi::DType;
use mlxcel_abi::kinds::{mask, reduce};
use mlxcel_abi::ops_args::{AttentionArgs, ConvArgs, RopeArgs};

use crate::backend::Fused;
use crate::{Result, Tensor};

/// Parameters of a rotary embedding that do not vary between steps.
#[derive(Debug, Clone)]
pub struct RopeSpec {
    /// Features rotated.
    pub dims: u32,
    /// Pairs are neighbours instead of halves.
    pub interleaved: bool,
    /// Base of the frequencies; unused with `freqs`.
    pub base: f32,
    /// Multiplies positions.
    pub scale: f32,
    /// f32 `[dims / 2]`: `angle = scale * position / freqs[i]`.
    pub freqs: Option<Tensor>,
}

/// Options of dense attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attention<'a> {
    /// Multiplies the scores.
    pub scale: f32,
    /// Soft cap of the scores; 0 is none.
    pub softcap: f32,
    /// Causal, the last query on the last key.
    pub causal: bool,
    /// Causal only: most keys a query sees; 0 is no limit.
    pub window: u32,
    /// Bool or additive mask.
    pub mask: Option<&'a Tensor>,
    /// Sink logit per head.
    pub sinks: Option<&'a Tensor>,
}

/// Options of a convolution, one entry per spatial axis.
#[derive(Debug, Clone, Copy)]
pub struct Conv {
    /// Spatial axes, 1 to 3.
    pub n_spatial: u32,
    /// Stride.
    pub stride: [i64; 3],
    /// Padding on both sides.
    pub padding: [i64; 3],
    /// Kernel dilation.
    pub dilation: [i64; 3],
    /// Transposed only: rows added to the end.
    pub output_padding: [i64; 3],
    /// Groups.
    pub groups: u32,
    /// Transposed convolution.
    pub transposed: bool,
}

impl Conv {
    /// Stride 1, no padding.
    pub const fn plain(n_spatial: u32) -> Self {
        Self {
            n_spatial,
            stride: [1; 3],
            padding: [0; 3],
            dilation: [1; 3],
            output_padding: [0; 3],
            groups: 1,
            transposed: false,
        }
    }
}

impl Tensor {
    /// `x / rms(x) * w` over the last axis.
    pub fn rms_norm(&self, weight: Option<&Tensor>, eps: f32) -> Result<Tensor> {
        self.backend().fused_or(
            Fused::RmsNorm,
            self,
            || {
                op!(
                    self.backend(),
                    rms_norm,
                    self.handle(),
                    Tensor::handle_of(weight),
                    eps
                )
            },
            || {
                let dtype = self.dtype()?;
                let x = self.cast(DType::F32)?;
                let mean = x.square()?.reduce(reduce::MEAN, &[-1], true)?;
                let mut y = x.mul(&mean.add_scalar(f64::from(eps))?.rsqrt()?)?;
                if let Some(weight) = weight {
                    y = y.mul(&weight.cast(DType::F32)?)?;
                }
                y.cast(dtype)
            },
        )
    }

    /// Layer norm over the last axis.
    pub fn layer_norm(
        &self,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f32,
    ) -> Result<Tensor> {
        self.backend().fused_or(
            Fused::LayerNorm,
            self,
            || {
                op!(
                    self.backend(),
                    layer_norm,
                    self.handle(),
                    Tensor::handle_of(weight),
                    Tensor::handle_of(bias),
                    eps
                )
            },
            || {
                let dtype = self.dtype()?;
                let x = self.cast(DType::F32)?;
                let centred = x.sub(&x.mean(&[-1], true)?)?;
                let var = centred.square()?.mean(&[-1], true)?;
                let mut y = centred.mul(&var.add_scalar(f64::from(eps))?.rsqrt()?)?;
                if let Some(weight) = weight {
                    y = y.mul(&weight.cast(DType::F32)?)?;
                }
                if let Some(bias) = bias {
                    y = y.add(&bias.cast(DType::F32)?)?;
                }
                y.cast(dtype)
            },
        )
    }

    /// Rotary embedding of `[T, H, D]` at `positions` `[T]`.
    pub fn rope(&self, positions: &Tensor, spec: &RopeSpec) -> Result<Tensor> {
        let args = RopeArgs {
            x: self.handle(),
            positions: positions.handle(),
            dims: spec.dims,
            interleaved: u32::from(spec.interleaved),
            base: spec.base,
            scale: spec.scale,
            freqs: Tensor::handle_of(spec.freqs.as_ref()),
            ..RopeArgs::default()
        };
        self.backend().fused_or(
            Fused::Rope,
            self,
            || op!(self.backend(), rope, &args),
            || self.rope_composed(positions, spec),
        )
    }

    fn rope_composed(&self, positions: &Tensor, spec: &RopeSpec) -> Result<Tensor> {
        let half = i64::from(spec.dims / 2);
        let periods = match &spec.freqs {
            Some(freqs) => freqs.cast(DType::F32)?,
            None => Tensor::arange(self.backend(), 0.0, half as f64, 1.0, DType::F32)?
                .mul_scalar(f64::from(spec.base).ln() * 2.0 / f64::from(spec.dims))?
                .exp()?,
        };
        let angles = positions
            .cast(DType::F32)?
            .mul_scalar(f64::from(spec.scale))?
            .reshape(&[-1, 1])?
            .div(&periods)?;
        self.rotate(&angles.cos()?, &angles.sin()?, spec.interleaved)
    }

    /// Rotates the first `2 * n` features of `[T, H, D]` by `cos` and `sin` of shape `[T, n]`.
    pub fn rotate(&self, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Tensor> {
        let dtype = self.dtype()?;
        let (rows, heads, width) = (self.dim(0)?, self.dim(1)?, self.dim(2)?);
        let half = cos.dim(1)?;
        let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
        let head = self.narrow(2, 0, 2 * half)?.cast(DType::F32)?;
        let (a, b) = if interleaved {
            let pairs = head.reshape(&[rows, heads, half, 2])?;
            let part = |i| pairs.narrow(3, i, 1)?.reshape(&[rows, heads, half]);
            (part(0)?, part(1)?)
        } else {
            (head.narrow(2, 0, half)?, head.narrow(2, half, half)?)
        };
        let first = a.mul(&cos)?.sub(&b.mul(&sin)?)?;
        let second = a.mul(&sin)?.add(&b.mul(&cos)?)?;
        let rotated = if interleaved {
            let (first, second) = (first.unsqueeze(3)?, second.unsqueeze(3)?);
            Tensor::concat(self.backend(), &[&first, &second], 3)?.reshape(&[
                rows,
                heads,
                2 * half,
            ])?
        } else {
            Tensor::concat(self.backend(), &[&first, &second], 2)?
        };
        let rotated = rotated.cast(dtype)?;
        if width == 2 * half {
            return Ok(rotated);
        }
        let rest = self.narrow(2, 2 * half, width - 2 * half)?;
        Tensor::concat(self.backend(), &[&rotated, &rest], 2)
    }

    /// Dense attention of queries `[B, H, Tq, D]` over `k` and `v`.
    pub fn attention(&self, k: &Tensor, v: &Tensor, options: &Attention<'_>) -> Result<Tensor> {
        let mask_kind = match (options.mask, options.causal) {
            (Some(_), _) => mask::TENSOR,
            (None, true) => mask::CAUSAL,
            (None, false) => mask::NONE,
        };
        let args = AttentionArgs {
            q: self.handle(),
            k: k.handle(),
            v: v.handle(),
            scale: options.scale,
            softcap: options.softcap,
            mask_kind,
            window: options.window,
            mask: Tensor::handle_of(options.mask),
            sinks: Tensor::handle_of(options.sinks),
            ..AttentionArgs::default()
        };
        op!(self.backend(), attention, &args)
    }

    /// Convolution, channels last.
    pub fn conv(&self, weight: &Tensor, options: &Conv) -> Result<Tensor> {
        let args = ConvArgs {
            x: self.handle(),
            w: weight.handle(),
            n_spatial: options.n_spatial,
            groups: options.groups,
            transposed: u32::from(options.transposed),
            stride: options.stride,
            padding_low: options.padding,
            padding_high: options.padding,
            dilation: options.dilation,
            output_padding: options.output_padding,
            ..ConvArgs::default()
        };
        op!(self.backend(), conv, &args)
    }

    /// One of [`mlxcel_abi::kinds::fft`] over `axes`; `n` resizes them first (0 keeps).
    pub fn fft(&self, kind: u32, n: &[i64], axes: &[i32]) -> Result<Tensor> {
        if n.len() != axes.len() {
            return Err(crate::Error::Other(format!(
                "a transform needs one size per axis, found {} sizes and {} axes",
                n.len(),
                axes.len()
            )));
        }
        op!(
            self.backend(),
            fft,
            kind,
            self.handle(),
            n.as_ptr(),
            axes.as_ptr(),
            axes.len() as u32
        )
    }
}
