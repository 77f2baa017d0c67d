//! Matrix products, convolutions and Fourier transforms.

use mlxcel_abi::Tensor;
use mlxcel_abi::ops_args::ConvArgs;

use crate::args::{self, Result, flag, per_axis, small};
use crate::bridge::{self, ConvSpec};
use crate::fault::Fault;
use crate::slot::{get, optional, tensor_slots};

/// The entries of the spatial axes in use, each at least `least`.
fn spatial<'a>(values: &'a [i64; 3], n: usize, least: i64, what: &str) -> Result<&'a [i64]> {
    let used = values
        .get(..n)
        .filter(|used| !used.is_empty())
        .ok_or_else(|| {
            Fault::invalid(format!("a convolution has 1 to 3 spatial axes, found {n}"))
        })?;
    if let Some(value) = used
        .iter()
        .find(|&&value| value < least || value > i64::from(i32::MAX))
    {
        return Err(Fault::invalid(format!(
            "{what} {value} is outside {least} to {}",
            i32::MAX
        )));
    }
    Ok(used)
}

fn conv_spec(args: &ConvArgs) -> Result<ConvSpec<'_>> {
    let n = args.n_spatial as usize;
    let transposed = flag(args.transposed, "transposed")?;
    if args.groups == 0 {
        return Err(Fault::invalid("groups is at least 1"));
    }
    let output_padding = spatial(&args.output_padding, n, 0, "output_padding")?;
    if !transposed && output_padding.iter().any(|&padding| padding != 0) {
        return Err(Fault::invalid(
            "output_padding is for transposed convolutions alone",
        ));
    }
    Ok(ConvSpec {
        groups: small(args.groups, "groups")?,
        transposed,
        stride: spatial(&args.stride, n, 1, "stride")?,
        padding_low: spatial(&args.padding_low, n, 0, "padding_low")?,
        padding_high: spatial(&args.padding_high, n, 0, "padding_high")?,
        dilation: spatial(&args.dilation, n, 1, "dilation")?,
        output_padding,
    })
}

tensor_slots! {
    fn matmul(_context, tensors; a: Tensor, b: Tensor) {
        Ok(bridge::matmul(get(tensors, a)?, get(tensors, b)?)?)
    }

    fn addmm(_context, tensors; c: Tensor, a: Tensor, b: Tensor, alpha: f32, beta: f32) {
        Ok(bridge::addmm(get(tensors, c)?, get(tensors, a)?, get(tensors, b)?, alpha, beta)?)
    }

    fn gather_matmul(_context, tensors; a: Tensor, b: Tensor, lhs: Tensor, rhs: Tensor, sorted: u32) {
        let (lhs, rhs) = (optional(tensors, lhs)?, optional(tensors, rhs)?);
        let sorted = flag(sorted, "sorted")?;
        Ok(bridge::gather_matmul(get(tensors, a)?, get(tensors, b)?, lhs.as_slice(), rhs.as_slice(), sorted)?)
    }

    fn conv(_context, tensors; args: *const ConvArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { ConvArgs::read(args) }?;
        Ok(bridge::conv(get(tensors, args.x)?, get(tensors, args.w)?, &conv_spec(&args)?)?)
    }

    fn fft(_context, tensors; kind: u32, a: Tensor, n: *const i64, axes: *const i32, n_axes: u32) {
        // SAFETY: the slot's contract.
        let (sizes, axes) = unsafe { (args::shape(n, n_axes)?, per_axis(axes, n_axes, "axes")?) };
        Ok(bridge::fft(kind, get(tensors, a)?, sizes, axes)?)
    }
}
