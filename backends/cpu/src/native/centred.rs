//! Centred weights: affine codes without biases, `scale * (code - 2^(bits - 1))`.
//!
//! They come from types of GGUF that have groups of 16, which MLX's forms lack, or a bias that says nothing (see
//! `centred_forms` in the probe). Kernels take them like any other affine weight. What a kernel does not take cannot go to MLX as it
//! is, so the weight is expanded first.

use core::ffi::c_void;
use core::ptr::null_mut;

use mlxcel_abi::kinds::quant;
use mlxcel_abi::ops_args::{QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{AbiError, DType, Result, Status, Tensor, status};
use mlxcel_backend_mlx::native::Native;
use mlxcel_backend_mlx::serde_json::{Value, json};

use super::State;

/// Bits and group sizes that are taken.
const FORMS: [(u32, u32); 4] = [(6, 16), (8, 32), (5, 32), (4, 32)];

/// The forms that the kernels take beside f32 activations, for the probe.
pub(crate) fn centred_forms() -> Value {
    let form = |(bits, group_size)| json!({"bits": bits, "group_size": group_size});
    FORMS.into_iter().map(form).collect()
}

/// Whether a weight is centred and of a form that the probe lists. By the name of `affine` only where nothing else has such groups:
/// without its biases any other affine weight is a damaged one.
pub(super) fn is_centred(w: &QuantizedWeight) -> bool {
    /// What is `affine` with groups of 16 and no biases.
    const UNNAMED: (u32, u32) = (6, 16);
    let form = (w.spec.bits, w.spec.group_size);
    let is_named = w.spec.mode == quant::CENTRED && FORMS.contains(&form);
    w.biases.is_none() && (is_named || (w.spec.mode == quant::AFFINE && form == UNNAMED))
}

/// Tensors of ours that go away together.
struct Steps<'a> {
    native: Native<'a>,
    made: Vec<Tensor>,
}

impl Steps<'_> {
    /// Runs a slot of MLX, whose errors are told by their code alone.
    fn run(&mut self, what: &str, call: impl FnOnce(*mut Tensor) -> Status) -> Result<Tensor> {
        let mut out = Tensor::NONE;
        match call(&raw mut out) {
            status::OK => {
                self.made.push(out);
                Ok(out)
            }
            code => Err(AbiError::new(
                code,
                format!("{what} of an expanded weight failed"),
            )),
        }
    }

    /// Lets everything go but the result.
    fn finish(self, result: Result<Tensor>) -> Result<Tensor> {
        let kept = result.as_ref().ok().copied();
        for t in self.made.into_iter().filter(|t| Some(*t) != kept) {
            self.native.release(t)?;
        }
        result
    }
}

/// A product with a centred weight in the ways that the kernels lack: the weight is expanded to f32, and MLX
/// multiplies. `gathered` says that the call chooses matrices.
pub(super) fn expanded_product(
    native: Native<'_>,
    state: &State,
    args: &QuantizedMatmulArgs,
    gathered: bool,
) -> Result<Option<Tensor>> {
    let Some(wide) = super::products::expand(native, &args.w, DType::F32)? else {
        return Ok(None);
    };
    let (mlx, ctx) = (state.mlx.clone(), state.ctx as *mut c_void);
    let mut steps = Steps {
        native,
        made: vec![wide],
    };
    let product = |steps: &mut Steps<'_>| -> Result<Tensor> {
        let rank = native.view(wide)?.shape().len();
        let mut w = wide;
        if args.transpose == 1 {
            let mut axes: Vec<i32> = (0..rank as i32).collect();
            axes.swap(rank - 2, rank - 1);
            // SAFETY: slots of the table of this context, with tensors that are held; nobody asks for texts.
            w = steps.run("transpose", |out| unsafe {
                (mlx.transpose)(ctx, wide, axes.as_ptr(), rank as u32, out, null_mut())
            })?;
        }
        // SAFETY: as above.
        let y = steps.run("matmul", |out| unsafe {
            match gathered {
                true => (mlx.gather_matmul)(
                    ctx,
                    args.x,
                    w,
                    args.lhs_indices,
                    args.rhs_indices,
                    args.sorted_indices,
                    out,
                    null_mut(),
                ),
                false => (mlx.matmul)(ctx, args.x, w, out, null_mut()),
            }
        })?;
        let dtype = native.view(args.x)?.dtype;
        // SAFETY: as above.
        steps.run("cast", |out| unsafe {
            (mlx.cast)(ctx, y, dtype, out, null_mut())
        })
    };
    let made = product(&mut steps);
    steps.finish(made).map(Some)
}
