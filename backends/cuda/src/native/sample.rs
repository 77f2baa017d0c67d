//! A token for every row of logits, chosen on the device.

use mlxcel_abi::fused_args::SampleArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::{State, is_half, is_plain, slot, small};
use crate::driver::{Arguments, Shape};
use crate::kernels::Text;

pub(super) fn install(table: &mut BackendOps) {
    table.sample = sample;
}

slot!(sample(args: *const SampleArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    choose(device, state, &unsafe { SampleArgs::read(args) }?)
});

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
    let shape = Shape::line(rows as u32, 1024);
    // SAFETY: a block a row of `columns` logits; the others have a number for each row.
    unsafe { state.launch(text, logits.dtype, "sample_rows", &shape, 0, arguments) }?;
    Ok(Some(t))
}
