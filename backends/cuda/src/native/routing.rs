//! Which experts of a mixture rows go to.

use core::ffi::c_void;

use mlxcel_abi::fused_args::RouteArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::{Outcome, State, attempt, is_half, is_plain, small};
use crate::driver::{Arguments, Shape};
use crate::kernels::Text;

/// What the kernels have room for: experts, and how many of them are chosen.
pub(super) const MOST_EXPERTS: i64 = 1024;
const MOST_CHOSEN: u32 = 32;

pub(super) fn install(table: &mut BackendOps) {
    table.route = route;
}

unsafe extern "C" fn route(
    ctx: *mut c_void,
    args: *const RouteArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        // SAFETY: the slot's contract: a live argument struct.
        let read = unsafe { RouteArgs::read(args) }?;
        match routed(device, state, &read)? {
            Some(made) if !out.is_null() => {
                // SAFETY: not null, and the caller's to write.
                unsafe { out.write(made) };
                Ok(Outcome::Done)
            }
            _ => Ok(Outcome::Pass),
        }
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, false, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.route)(ctx, args, out, err),
        }
    }
}

fn routed(device: Device<'_>, state: &mut State, args: &RouteArgs) -> Result<Option<[Tensor; 2]>> {
    /// Rows of a block.
    const ROWS: u32 = 8;
    let logits = state.input(&device, args.logits)?;
    let is_full = logits.dtype == DType::F32;
    let &[rows, n] = logits.shape() else {
        return Ok(None);
    };
    let fits = (is_full || is_half(logits.dtype))
        && is_plain(&logits, logits.dtype.size_bytes())
        && n <= MOST_EXPERTS
        && (1..=MOST_CHOSEN.min(n as u32)).contains(&args.top_k)
        && args.renormalised <= 1;
    let (Some(count), true) = (small(rows), fits) else {
        return Ok(None);
    };
    let shape = [rows, i64::from(args.top_k)];
    let (experts, ids) = state.output(&device, DType::U32, &shape)?;
    let (weights, shares) = state.output(&device, logits.dtype, &shape)?;
    let arguments = Arguments::new()
        .wide(logits.data as usize)
        .wide(ids)
        .wide(shares)
        .int(count)
        .int(n as i32)
        .int(args.top_k as i32)
        .int(args.renormalised as i32);
    let launch = Shape::line((count as u32).div_ceil(ROWS), 32 * ROWS);
    // The text for f32 has no half type in it.
    let dtype = if is_full { DType::BF16 } else { logits.dtype };
    let text = Text::Choice { is_full };
    // As few values a thread as it takes.
    let name = match n {
        ..=128 => "route_4",
        129..=256 => "route_8",
        _ => "route_32",
    };
    // SAFETY: `rows` rows of `n` logits, and results of as many rows of `top_k`.
    unsafe { state.launch(text, dtype, name, &launch, 0, arguments) }?;
    Ok(Some([experts, weights]))
}
