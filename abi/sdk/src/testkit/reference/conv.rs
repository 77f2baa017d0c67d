//! Convolutions in 1 to 3 spatial dimensions, plain and transposed, channels last.

use mlxcel_abi::ops_args::ConvArgs;
use mlxcel_abi::{AbiError, Result};

use super::number::{need_float, promote};
use super::product::dot;
use super::shape;
use super::value::{Data, Mode, Value};

/// Sizes of a convolution with three spatial axes; absent ones have size 1.
struct Plan {
    images: usize,
    input: [usize; 3],
    kernel: [usize; 3],
    output: [usize; 3],
    channels: usize,
    filters: usize,
    groups: usize,
    stride: [i64; 3],
    padding: [i64; 3],
    dilation: [i64; 3],
}

fn plan(args: &ConvArgs, x: &[usize], w: &[usize]) -> Result<Plan> {
    let n = args.n_spatial as usize;
    if !(1..=3).contains(&n) {
        return Err(AbiError::invalid(format!(
            "a convolution has 1 to 3 spatial axes, found {n}"
        )));
    }
    shape::need_ndim("the input", x, n + 2)?;
    shape::need_ndim("the kernel", w, n + 2)?;
    let groups = args.groups as usize;
    let (channels, filters) = (x[n + 1], w[0]);
    if groups == 0 || !channels.is_multiple_of(groups) || !filters.is_multiple_of(groups) {
        return Err(AbiError::invalid(format!(
            "{groups} groups do not divide {channels} channels and {filters} filters"
        )));
    }
    if w[n + 1] != channels / groups {
        return Err(AbiError::invalid(format!(
            "the kernel {w:?} must have {} channels for input {x:?} in {groups} group(s)",
            channels / groups
        )));
    }
    let mut plan = Plan {
        images: x[0],
        input: [1; 3],
        kernel: [1; 3],
        output: [1; 3],
        channels,
        filters,
        groups,
        stride: [1; 3],
        padding: [0; 3],
        dilation: [1; 3],
    };
    for i in 0..n {
        let (stride, dilation) = (args.stride[i], args.dilation[i]);
        let (low, high, extra) = (
            args.padding_low[i],
            args.padding_high[i],
            args.output_padding[i],
        );
        if stride < 1 || dilation < 1 || low < 0 || high < 0 || extra < 0 {
            return Err(AbiError::invalid(format!(
                "axis {i}: stride {stride}, dilation {dilation} must be at least 1, padding {low}, {high}, {extra} at least 0"
            )));
        }
        let (input, kernel) = (x[i + 1] as i64, w[i + 1] as i64);
        let reach = dilation * (kernel - 1) + 1;
        let output = if args.transposed == 1 {
            (input - 1) * stride + reach - low - high + extra
        } else {
            let room = input + low + high - reach;
            if room < 0 { -1 } else { room / stride + 1 }
        };
        let output = usize::try_from(output).map_err(|_| {
            AbiError::invalid(format!(
                "axis {i}: a kernel of {kernel} with dilation {dilation} does not fit {input} elements padded by {low} and {high}"
            ))
        })?;
        plan.input[i] = x[i + 1];
        plan.kernel[i] = w[i + 1];
        plan.output[i] = output;
        plan.stride[i] = stride;
        plan.padding[i] = low;
        plan.dilation[i] = dilation;
    }
    Ok(plan)
}

fn index3(dims: &[usize; 3], at: [usize; 3]) -> usize {
    (at[0] * dims[1] + at[1]) * dims[2] + at[2]
}

fn each3(dims: &[usize; 3]) -> impl Iterator<Item = [usize; 3]> + use<> {
    let [a, b, c] = *dims;
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k])))
}

impl Plan {
    /// Calls `f(input position, kernel position, output position)` for every triple that meets.
    fn meet(&self, transposed: bool, mut f: impl FnMut(usize, usize, usize)) {
        // Both forms pair a position `i` of one side with `i * stride + k * dilation - padding` of
        // the other: the output walks for a plain convolution, the input for a transposed one.
        let (walker, other) = if transposed {
            (&self.input, &self.output)
        } else {
            (&self.output, &self.input)
        };
        for i in each3(walker) {
            for k in each3(&self.kernel) {
                let mut at = [0usize; 3];
                let inside = (0..3).all(|axis| {
                    let position = i[axis] as i64 * self.stride[axis]
                        + k[axis] as i64 * self.dilation[axis]
                        - self.padding[axis];
                    at[axis] = position as usize;
                    position >= 0 && position < other[axis] as i64
                });
                if inside {
                    let (walk, meet) = (index3(walker, i), index3(other, at));
                    let kernel = index3(&self.kernel, k);
                    if transposed {
                        f(walk, kernel, meet)
                    } else {
                        f(meet, kernel, walk)
                    }
                }
            }
        }
    }
}

/// A convolution; see [`ConvArgs`].
pub(super) fn conv(mode: Mode, args: &ConvArgs, x: &Value, w: &Value) -> Result<Value> {
    need_float("the input", x.dtype)?;
    need_float("the kernel", w.dtype)?;
    let plan = plan(args, &x.shape, &w.shape)?;
    let n = args.n_spatial as usize;
    let out = [&[plan.images], &plan.output[..n], &[plan.filters]].concat();
    let total = shape::count(&out)?;
    mode.value(promote(x.dtype, w.dtype), out, || {
        let (xs, ws) = (x.reals(), w.reals());
        let mut data = vec![0.0; total];
        let [inputs, kernels, outputs] =
            [plan.input, plan.kernel, plan.output].map(|d| d.iter().product::<usize>());
        let per_group = plan.channels / plan.groups;
        let filters_per_group = plan.filters / plan.groups;
        for image in 0..plan.images {
            plan.meet(args.transposed == 1, |i, k, o| {
                for filter in 0..plan.filters {
                    let first = filter / filters_per_group.max(1) * per_group;
                    let x_at = (image * inputs + i) * plan.channels + first;
                    let w_at = (filter * kernels + k) * per_group;
                    data[(image * outputs + o) * plan.filters + filter] +=
                        dot(&xs[x_at..x_at + per_group], &ws[w_at..w_at + per_group]);
                }
            });
        }
        Ok(Data::Real(data))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlxcel_abi::DType;

    const MODE: Mode = Mode { shapes_only: false };

    fn real(shape: &[usize], v: &[f64]) -> Value {
        Value {
            dtype: DType::F32,
            shape: shape.to_vec(),
            data: Data::Real(v.to_vec()),
        }
    }

    #[test]
    fn one_dimension_by_hand() {
        let x = real(&[1, 4, 1], &[1.0, 2.0, 3.0, 4.0]);
        let w = real(&[1, 2, 1], &[10.0, 1.0]);
        let mut args = ConvArgs {
            n_spatial: 1,
            ..ConvArgs::default()
        };
        assert_eq!(
            *conv(MODE, &args, &x, &w).unwrap().reals(),
            [12.0, 23.0, 34.0]
        );
        args.padding_low[0] = 1;
        args.stride[0] = 2;
        assert_eq!(*conv(MODE, &args, &x, &w).unwrap().reals(), [1.0, 23.0]);
        let args = ConvArgs {
            n_spatial: 1,
            transposed: 1,
            stride: [2, 1, 1],
            ..ConvArgs::default()
        };
        let up = conv(MODE, &args, &x, &w).unwrap();
        assert_eq!(*up.reals(), [10.0, 1.0, 20.0, 2.0, 30.0, 3.0, 40.0, 4.0]);
    }

    #[test]
    fn groups_keep_their_channels_apart() {
        let x = real(&[1, 1, 1, 2], &[3.0, 5.0]);
        let w = real(&[2, 1, 1, 1], &[10.0, 100.0]);
        let args = ConvArgs {
            n_spatial: 2,
            groups: 2,
            ..ConvArgs::default()
        };
        assert_eq!(*conv(MODE, &args, &x, &w).unwrap().reals(), [30.0, 500.0]);
        let wrong = ConvArgs {
            n_spatial: 2,
            groups: 1,
            ..ConvArgs::default()
        };
        assert!(conv(MODE, &wrong, &x, &w).is_err());
        let large = real(&[2, 3, 1, 1], &[0.0; 6]);
        assert!(conv(MODE, &args, &x, &large).is_err());
    }
}
