//! Convolutions, plain and transposed, in one to three spatial dimensions.

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::ConvArgs;
use mlxcel_abi::{Result, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::conv::{self as kernel, Operands, Shape};

use super::{State, filled, floats, joint, slot};

pub(super) fn install(table: &mut BackendOps) {
    table.conv = conv;
}

slot!(conv(args: *const ConvArgs) |native, state| {
    // SAFETY: the slot's contract: a live argument struct.
    compute(native, state, &unsafe { ConvArgs::read(args) }?)
});

/// Sizes along the spatial axes, with axes of size 1 before them.
fn three(sizes: &[i64]) -> Option<[usize; 3]> {
    let mut out = [1; 3];
    for (to, size) in out.iter_mut().rev().zip(sizes.iter().rev()) {
        *to = usize::try_from(*size).ok()?;
    }
    (sizes.len() <= 3).then_some(out)
}

/// The same of an argument, whose axes that do not exist take `missing`. What MLX could not say with its
/// 32 bits is not for the kernels either.
fn argument(values: &[i64; 3], n: usize, missing: usize) -> Option<[usize; 3]> {
    let mut out = [missing; 3];
    for (to, value) in out.iter_mut().skip(3 - n).zip(values) {
        *to = i32::try_from(*value).ok()?.try_into().ok()?;
    }
    Some(out)
}

/// The shape of a call, if it is one for the kernels: what is wrong with another is MLX's to say.
fn shape(args: &ConvArgs, x: &[i64], w: &[i64]) -> Option<Shape> {
    let n = args.n_spatial as usize;
    if !(1..=3).contains(&n) || x.len() != n + 2 || w.len() != n + 2 {
        return None;
    }
    let [batch, spatial @ .., channels] = x else {
        return None;
    };
    let [outputs, taps @ .., group_channels] = w else {
        return None;
    };
    let (input, kernel) = (three(spatial)?, three(taps)?);
    let (stride, dilation) = (
        argument(&args.stride, n, 1)?,
        argument(&args.dilation, n, 1)?,
    );
    let (low, high) = (
        argument(&args.padding_low, n, 0)?,
        argument(&args.padding_high, n, 0)?,
    );
    let more = argument(&args.output_padding, n, 0)?;
    let mut output = [0; 3];
    for axis in 0..3 {
        let reach = kernel[axis].checked_sub(1)?.checked_mul(dilation[axis])?;
        output[axis] = if args.transposed == 1 {
            let wide = input[axis].checked_sub(1)?.checked_mul(stride[axis])?;
            let wide = wide.checked_add(reach + 1 + more[axis])?;
            wide.checked_sub(low[axis])?.checked_sub(high[axis])?
        } else {
            let padded = input[axis]
                .checked_add(low[axis])?
                .checked_add(high[axis])?;
            padded.checked_sub(reach + 1)?.checked_div(stride[axis])? + 1
        };
    }
    let (groups, channels) = (args.groups as usize, usize::try_from(*channels).ok()?);
    let outputs = usize::try_from(*outputs).ok()?;
    let fits = args.transposed <= 1
        && groups > 0
        && channels.is_multiple_of(groups)
        && outputs.is_multiple_of(groups)
        && usize::try_from(*group_channels).ok()? == channels / groups
        && stride.iter().chain(&dilation).all(|n| *n > 0)
        && output.iter().all(|n| *n > 0)
        && (args.transposed == 1 || more == [0; 3]);
    fits.then_some(Shape {
        batch: usize::try_from(*batch).ok()?,
        input,
        channels,
        kernel,
        output,
        outputs,
        groups,
        stride,
        padding: low,
        dilation,
    })
}

fn compute(native: Native<'_>, state: &mut State, args: &ConvArgs) -> Result<Option<Tensor>> {
    let (Some(x), Some(w)) = (floats(&native, args.x)?, floats(&native, args.w)?) else {
        return Ok(None);
    };
    let Some(shape) = shape(args, x.shape(), w.shape()) else {
        return Ok(None);
    };
    let n = args.n_spatial as usize;
    let sizes = shape.output.iter().skip(3 - n).map(|size| *size as i64);
    let dims: Vec<i64> = [shape.batch as i64]
        .into_iter()
        .chain(sizes)
        .chain([shape.outputs as i64])
        .collect();
    let dtype = joint(x.given, w.given);
    // SAFETY: contiguous f32 views of tensors that the caller holds during the call.
    let (x, w) = unsafe { (x.as_slice::<f32>(), w.as_slice::<f32>()) };
    filled(&native, dtype, &dims, "conv", |y| {
        let run = if args.transposed == 1 {
            kernel::transposed
        } else {
            kernel::conv
        };
        let State {
            isa,
            pool,
            patches,
            panels,
            ..
        } = state;
        run(*isa, pool, &shape, Operands { x, w, y }, patches, panels)
    })
}
