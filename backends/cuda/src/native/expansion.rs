//! Quantised weights written out in full: for products of many rows, and for rows of an embedding.

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, Result, Tensor, status};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::products::{FEW_ROWS, Weight, weight, with_last};
use super::{State, is_half, slot};
use crate::driver::{Arguments, Shape};

/// Most bytes of an expanded weight.
const MOST_EXPANDED_BYTES: usize = 1 << 30;

pub(super) fn install(table: &mut BackendOps) {
    table.dequantize = dequantize;
}

slot!(dequantize(w: *const QuantizedWeight, dtype: DType) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    expand(device, state, &unsafe { QuantizedWeight::read(w) }?, dtype)
});

/// The weight in full, in memory that all such products share, or none where it is too large. For the very next product alone.
pub(super) fn in_full(state: &mut State, w: &Weight, dtype: DType) -> Result<Option<Weight>> {
    let bytes = w.rows * w.columns * dtype.size_bytes();
    if bytes > MOST_EXPANDED_BYTES {
        return Ok(None);
    }
    let words = state.expanded(bytes)?;
    write_expanded(state, w, dtype, words)?;
    Ok(Some(Weight {
        words,
        scales: 0,
        biases: 0,
        bits: 16,
        ..*w
    }))
}

/// Expands the weight for NVIDIA's product, or for MLX's where there is none.
pub(super) fn through_expansion(
    device: Device<'_>,
    state: &mut State,
    (t, x): (Tensor, &View),
    w: &Weight,
) -> Result<Option<Tensor>> {
    let Some(full) = in_full(state, w, x.dtype)? else {
        return Ok(None);
    };
    if let Some(made) = state.multiply_dense(&device, x, &full, 0)? {
        return Ok(Some(made));
    }
    let (rows, columns) = (full.rows, full.columns);
    let block = state
        .pool
        .borrowed(full.words, rows * columns * x.dtype.size_bytes());
    let expanded = device.wrap(&block, x.dtype, &[rows as i64, columns as i64])?;
    let made = multiply_by(state, t, expanded);
    device.release(expanded)?;
    let made = made?;
    // Submitted now, because the next such product writes the same memory.
    if let Some(made) = made {
        device.view(made)?;
    }
    Ok(made)
}

/// As [`through_expansion`] with MLX's own expansion, for the forms that no kernel of ours takes. MLX compiles its product for each
/// of them at run time, for half a minute, and for f32 it needs headers that only a toolkit has. Its products of few rows are compiled
/// ahead, and stay.
pub(super) fn through_mlx_expansion(
    device: &Device<'_>,
    state: &mut State,
    args: &QuantizedMatmulArgs,
) -> Result<Option<Tensor>> {
    let (x, _) = device.view(args.x)?;
    let (words, _) = device.view(args.w.weight)?;
    let (&[rows, packed], Some(&last)) = (words.shape(), x.shape().last()) else {
        return Ok(None);
    };
    let columns = packed * 32 / i64::from(args.w.spec.bits).max(1);
    let m = x.len() as i64 / last.max(1);
    let bytes = (rows * columns) as usize * x.dtype.size_bytes();
    let is_compiled = args.transpose == 1 && m <= FEW_ROWS as i64;
    if state.keeps_rows_apart || is_compiled || bytes > MOST_EXPANDED_BYTES || x.shape().len() < 2 {
        return Ok(None);
    }
    state.flush(device)?;
    let ctx = state.ctx as *mut core::ffi::c_void;
    let mut expanded = Tensor::NONE;
    let silent = core::ptr::null_mut();
    // SAFETY: a slot of this backend's own table, called on its thread with the caller's weight. An error is found again by the slot
    // that this falls back to.
    let code = unsafe {
        (state.mlx.dequantize)(ctx, &raw const args.w, x.dtype, &raw mut expanded, silent)
    };
    if code != status::OK {
        return Ok(None);
    }
    let made = if args.transpose == 1 {
        multiply_by(state, args.x, expanded)
    } else {
        multiply_plain(state, args.x, expanded)
    };
    device.release(expanded)?;
    made
}

/// MLX's product of `x` and the transpose of `w`, or none when it refuses.
fn multiply_by(state: &State, x: Tensor, w: Tensor) -> Result<Option<Tensor>> {
    let ctx = state.ctx as *mut core::ffi::c_void;
    let (mut turned, mut made) = (Tensor::NONE, Tensor::NONE);
    let axes = [1_i32, 0];
    let silent = core::ptr::null_mut();
    // SAFETY: slots of this backend's own table, called on its thread. An error is found again by the slot that this falls
    // back to.
    let code = unsafe {
        let turned_to = (state.mlx.transpose)(ctx, w, axes.as_ptr(), 2, &raw mut turned, silent);
        if turned_to != status::OK {
            return Ok(None);
        }
        let code = (state.mlx.matmul)(ctx, x, turned, &raw mut made, silent);
        (state.mlx.release)(ctx, turned, silent);
        code
    };
    Ok((code == status::OK).then_some(made))
}

/// MLX's product, or none when it refuses.
pub(super) fn multiply_plain(state: &State, x: Tensor, w: Tensor) -> Result<Option<Tensor>> {
    let mut made = Tensor::NONE;
    let ctx = state.ctx as *mut core::ffi::c_void;
    // SAFETY: a slot of this backend's own table, called on its thread with the caller's handles.
    let code = unsafe { (state.mlx.matmul)(ctx, x, w, &raw mut made, core::ptr::null_mut()) };
    Ok((code == status::OK).then_some(made))
}

fn write_expanded(state: &mut State, w: &Weight, dtype: DType, out: usize) -> Result<()> {
    let words = w.rows * w.columns * w.bits as usize / 32;
    let arguments = Arguments::new()
        .wide(w.words)
        .wide(w.scales)
        .wide(w.biases)
        .wide(out)
        .wide(words);
    let shape = Shape::line(
        words.div_ceil(256).min(16 * state.processors as usize) as u32,
        256,
    );
    // SAFETY: the result has a value for each of the weight's.
    unsafe { state.launch(w.text(), dtype, "expand_all", &shape, 0, arguments) }
}

fn expand(
    device: Device<'_>,
    state: &mut State,
    w: &QuantizedWeight,
    dtype: DType,
) -> Result<Option<Tensor>> {
    if !is_half(dtype) {
        return Ok(None);
    }
    let Some((found, words)) = weight(&device, state, w, dtype)? else {
        return Ok(None);
    };
    let (t, out) = state.output(&device, dtype, &with_last(words.shape(), found.columns))?;
    write_expanded(state, &found, dtype, out)?;
    Ok(Some(t))
}
