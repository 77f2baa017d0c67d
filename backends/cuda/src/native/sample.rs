//! A token for every row of logits, chosen on the device.

use core::ffi::c_void;

use mlxcel_abi::error::report;
use mlxcel_abi::fused_args::SampleArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::{Outcome, State, attempt, is_half, is_plain, small};
use crate::driver::{Arguments, Shape};
use crate::kernels::{ENGINE_ARCHITECTURE, Text};

/// Blocks of a cluster that share the first look at a row, in `sample_rows_8`.
const SHARING_BLOCKS: u32 = 8;
/// Rows up to which sharing was measured to pay.
const MOST_SHARED_ROWS: u32 = 32;

/// What a refused call is told.
const EXPECTED: &str = "sample: expected logits [R, V] of a float type without gaps, top_k [R] of i32, and \
    top_p, min_p, temperature and uniform [R] of f32";

pub(super) fn install(table: &mut BackendOps) {
    table.sample = sample;
}

unsafe extern "C" fn sample(
    ctx: *mut c_void,
    args: *const SampleArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        if out.is_null() {
            return Ok(Outcome::Pass);
        }
        // SAFETY: the slot's contract: a live argument struct.
        let args = unsafe { SampleArgs::read(args) }?;
        let Some(made) = choose(device, state, &args)? else {
            return Ok(Outcome::Pass);
        };
        // SAFETY: not null, and the caller's to write.
        unsafe { out.write(made) };
        Ok(Outcome::Done)
    };
    // SAFETY: the slot's contract. There is no other way to sample that this could fall back to.
    unsafe {
        match attempt(ctx, err, false, kernel) {
            Ok(status) => status,
            Err(_) => report(err, AbiError::invalid(EXPECTED)),
        }
    }
}

fn choose(device: Device<'_>, state: &mut State, args: &SampleArgs) -> Result<Option<Tensor>> {
    let logits = state.input(&device, args.logits)?;
    let &[rows, width] = logits.shape() else {
        return Ok(None);
    };
    let is_full = logits.dtype == DType::F32;
    let (Some(_), Some(columns)) = (small(rows), small(width)) else {
        return Ok(None);
    };
    if !(is_full || is_half(logits.dtype)) || !is_plain(&logits, logits.dtype.size_bytes()) {
        return Ok(None);
    }
    let mut arguments = Arguments::new().wide(logits.data as usize);
    let of_rows = [
        (args.top_k, DType::I32),
        (args.top_p, DType::F32),
        (args.min_p, DType::F32),
        (args.temperature, DType::F32),
        (args.uniform, DType::F32),
    ];
    for (t, dtype) in of_rows {
        let view = state.input(&device, t)?;
        if view.dtype != dtype || view.shape() != [rows] || !is_plain(&view, 4) {
            return Ok(None);
        }
        arguments = arguments.wide(view.data as usize);
    }
    let (t, out) = state.output(&device, DType::U32, &[rows])?;
    let arguments = arguments.wide(out).int(columns);
    let text = Text::Sample { is_full };
    let (name, blocks) = kernel(rows as u32, state.architecture, state.keeps_rows_apart);
    let shape = Shape::line(blocks, 1024);
    // SAFETY: as many blocks a row of `columns` logits as the kernel has; the others have a number for each row.
    unsafe { state.launch(text, logits.dtype, name, &shape, 0, arguments) }?;
    Ok(Some(t))
}

/// The kernel for so many rows, and its blocks; the same one for any number where a row's sums may not depend on it.
fn kernel(rows: u32, architecture: i32, keeps_rows_apart: bool) -> (&'static str, u32) {
    let pays = rows <= MOST_SHARED_ROWS || keeps_rows_apart;
    if architecture >= ENGINE_ARCHITECTURE && pays {
        ("sample_rows_8", SHARING_BLOCKS * rows)
    } else {
        ("sample_rows", rows)
    }
}

#[cfg(test)]
mod tests {
    use super::kernel;

    #[test]
    fn blocks_share_rows_where_there_are_clusters_and_few_rows() {
        assert_eq!(kernel(1, 90, false), ("sample_rows_8", 8));
        assert_eq!(kernel(32, 90, false), ("sample_rows_8", 256));
        assert_eq!(kernel(33, 90, false), ("sample_rows", 33));
        assert_eq!(kernel(33, 90, true), ("sample_rows_8", 264));
        assert_eq!(kernel(1, 80, false), ("sample_rows", 1));
        assert_eq!(kernel(33, 80, true), ("sample_rows", 33));
    }
}
