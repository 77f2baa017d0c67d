//! Reductions, running reductions, softmax and order along an axis.

use core::cmp::Ordering;

use mlxcel_abi::kinds::{arg_reduce, cumulative, order, reduce as kind};
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{at_least_float, int_range};
use super::shape;
use super::special::{logaddexp, max_nan, min_nan};
use super::value::{Data, Mode, Value};

/// Sums of narrow integers are taken in 32 bits and counts of bools in i32, as MLX has it; floats
/// keep their type.
fn sum_dtype(a: DType) -> DType {
    match a {
        DType::BOOL | DType::I8 | DType::I16 => DType::I32,
        DType::U8 | DType::U16 => DType::U32,
        other => other,
    }
}

fn result_dtype(code: u32, a: DType) -> Result<DType> {
    match code {
        kind::SUM | kind::PROD => Ok(sum_dtype(a)),
        kind::MEAN | kind::VAR | kind::LOGSUMEXP => Ok(at_least_float(a)),
        kind::MAX | kind::MIN => Ok(a),
        kind::ALL_OF | kind::ANY_OF => Ok(DType::BOOL),
        code => Err(AbiError::unimplemented(format!(
            "reduction {code} is not known to this backend"
        ))),
    }
}

fn no_complex(what: &str, dtype: DType) -> Result<()> {
    if dtype != DType::C64 {
        return Ok(());
    }
    Err(AbiError::unimplemented(format!(
        "{what} of complex numbers is not in this backend"
    )))
}

/// One of [`mlxcel_abi::kinds::reduce`]; no axes means all.
pub(super) fn reduce(mode: Mode, code: u32, a: &Value, axes: &[i32], keep: bool) -> Result<Value> {
    let dtype = result_dtype(code, a.dtype)?;
    if a.dtype == DType::C64 && code != kind::SUM {
        no_complex(kind::name(code), a.dtype)?;
    }
    let reduced = match axes {
        [] => (0..a.shape.len()).collect(),
        axes => shape::axes(axes, a.shape.len())?,
    };
    let size: usize = reduced.iter().map(|&axis| a.shape[axis]).product();
    let kept: Vec<usize> = (0..a.shape.len())
        .filter(|axis| !reduced.contains(axis))
        .collect();
    if size == 0 && matches!(code, kind::MAX | kind::MIN | kind::LOGSUMEXP) {
        return Err(AbiError::invalid(format!(
            "{} over no elements is not defined, the shape is {:?}",
            kind::name(code),
            a.shape
        )));
    }
    let out = if keep {
        a.shape
            .iter()
            .enumerate()
            .map(|(i, &dim)| if reduced.contains(&i) { 1 } else { dim })
            .collect()
    } else {
        kept.iter().map(|&axis| a.shape[axis]).collect()
    };
    mode.value(dtype, out, || {
        let order: Vec<usize> = kept.iter().chain(&reduced).copied().collect();
        let grouped = a.data.pick(&shape::permuted_positions(&a.shape, &order));
        let groups: usize = kept.iter().map(|&axis| a.shape[axis]).product();
        let rows = |i: usize| i * size..(i + 1) * size;
        Ok(match &grouped {
            Data::Complex(v) => Data::Complex(
                (0..groups)
                    .map(|i| {
                        v[rows(i)]
                            .iter()
                            .fold([0.0; 2], |sum, x| [sum[0] + x[0], sum[1] + x[1]])
                    })
                    .collect(),
            ),
            Data::Int(v) if !dtype.is_float() => Data::Int(
                (0..groups)
                    .map(|i| reduce_ints(code, &v[rows(i)]))
                    .collect(),
            ),
            _ => {
                let floats = Value {
                    dtype,
                    shape: vec![groups, size],
                    data: grouped,
                };
                let floats = floats.reals();
                let results = (0..groups).map(|i| reduce_floats(code, &floats[rows(i)]));
                if dtype == DType::BOOL {
                    Data::Int(results.map(|x| i128::from(x != 0.0)).collect())
                } else {
                    Data::Real(results.collect())
                }
            }
        })
    })
}

fn reduce_ints(code: u32, row: &[i128]) -> i128 {
    match code {
        kind::SUM => row.iter().fold(0, |a, &b| a.wrapping_add(b)),
        kind::PROD => row.iter().fold(1, |a, &b| a.wrapping_mul(b)),
        kind::MAX => row.iter().copied().max().unwrap_or(0),
        kind::MIN => row.iter().copied().min().unwrap_or(0),
        kind::ALL_OF => i128::from(row.iter().all(|&x| x != 0)),
        _ => i128::from(row.iter().any(|&x| x != 0)),
    }
}

fn reduce_floats(code: u32, row: &[f64]) -> f64 {
    let mean = |row: &[f64]| row.iter().sum::<f64>() / row.len() as f64;
    match code {
        // An iterator's sum starts at -0.0, which an empty sum must not show.
        kind::SUM => row.iter().fold(0.0, |a, b| a + b),
        kind::PROD => row.iter().product(),
        kind::MEAN => mean(row),
        kind::VAR => {
            let centre = mean(row);
            row.iter().map(|x| (x - centre).powi(2)).sum::<f64>() / row.len() as f64
        }
        kind::MAX => row.iter().copied().fold(f64::NEG_INFINITY, max_nan),
        kind::MIN => row.iter().copied().fold(f64::INFINITY, min_nan),
        kind::LOGSUMEXP => logsumexp(row),
        kind::ALL_OF => f64::from(u8::from(row.iter().all(|&x| x != 0.0))),
        _ => f64::from(u8::from(row.iter().any(|&x| x != 0.0))),
    }
}

/// `log(sum(exp(row)))` around the largest element.
pub(super) fn logsumexp(row: &[f64]) -> f64 {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, max_nan);
    if !top.is_finite() {
        return top;
    }
    top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln()
}

/// The tensor's elements as rows along `axis`: positions, row by row.
fn lanes(a: &Value, axis: usize) -> Vec<usize> {
    let order: Vec<usize> = (0..a.shape.len())
        .filter(|&i| i != axis)
        .chain([axis])
        .collect();
    shape::permuted_positions(&a.shape, &order)
}

/// Index of the largest or smallest element, the lowest of equals; NaN counts as extreme.
pub(super) fn arg_reduce(mode: Mode, code: u32, a: &Value, axis: i32, keep: bool) -> Result<Value> {
    if !matches!(code, arg_reduce::ARGMAX | arg_reduce::ARGMIN) {
        return Err(AbiError::unimplemented(format!(
            "index reduction {code} is not known to this backend"
        )));
    }
    no_complex(arg_reduce::name(code), a.dtype)?;
    let axis = shape::axis(axis, a.shape.len())?;
    let size = a.shape[axis];
    if size == 0 {
        return Err(AbiError::invalid(format!(
            "{} over no elements is not defined, the shape is {:?}",
            arg_reduce::name(code),
            a.shape
        )));
    }
    let mut out = a.shape.clone();
    if keep {
        out[axis] = 1;
    } else {
        out.remove(axis);
    }
    mode.value(DType::U32, out, || {
        let better = |x: usize, best: usize| match (&a.data, code) {
            (Data::Int(v), arg_reduce::ARGMAX) => v[x] > v[best],
            (Data::Int(v), _) => v[x] < v[best],
            (Data::Real(v), _) if v[best].is_nan() => false,
            (Data::Real(v), arg_reduce::ARGMAX) => v[x].is_nan() || v[x] > v[best],
            (Data::Real(v), _) => v[x].is_nan() || v[x] < v[best],
            _ => false,
        };
        let extremes = lanes(a, axis)
            .chunks_exact(size)
            .map(|lane| {
                (1..size).fold(
                    0,
                    |best, i| if better(lane[i], lane[best]) { i } else { best },
                ) as i128
            })
            .collect();
        Ok(Data::Int(extremes))
    })
}

/// One of [`mlxcel_abi::kinds::cumulative`].
pub(super) fn cumulative(
    mode: Mode,
    code: u32,
    a: &Value,
    axis: i32,
    reverse: bool,
    inclusive: bool,
) -> Result<Value> {
    let dtype = match code {
        cumulative::CUMSUM if a.dtype == DType::BOOL => DType::I32,
        cumulative::CUMSUM | cumulative::CUMPROD | cumulative::CUMMAX | cumulative::CUMMIN => {
            a.dtype
        }
        cumulative::LOGCUMSUMEXP => at_least_float(a.dtype),
        code => {
            return Err(AbiError::unimplemented(format!(
                "running reduction {code} is not known to this backend"
            )));
        }
    };
    no_complex(cumulative::name(code), a.dtype)?;
    let axis = shape::axis(axis, a.shape.len())?;
    mode.value(dtype, a.shape.clone(), || {
        let lanes = lanes(a, axis);
        let mut steps: Vec<&[usize]> = lanes.chunks_exact(a.shape[axis].max(1)).collect();
        let reversed: Vec<Vec<usize>> = steps
            .iter()
            .map(|lane| lane.iter().rev().copied().collect())
            .collect();
        if reverse {
            steps = reversed.iter().map(Vec::as_slice).collect();
        }
        Ok(match &a.data {
            Data::Int(v) if !dtype.is_float() => {
                let (start, f): (i128, fn(i128, i128) -> i128) = match code {
                    cumulative::CUMSUM => (0, |a, b| a.wrapping_add(b)),
                    cumulative::CUMPROD => (1, |a, b| a.wrapping_mul(b)),
                    cumulative::CUMMAX => (int_range(dtype).0, i128::max),
                    _ => (int_range(dtype).1, i128::min),
                };
                Data::Int(scan(v, &steps, start, f, inclusive))
            }
            _ => {
                let (start, f): (f64, fn(f64, f64) -> f64) = match code {
                    cumulative::CUMSUM => (0.0, |a, b| a + b),
                    cumulative::CUMPROD => (1.0, |a, b| a * b),
                    cumulative::CUMMAX => (f64::NEG_INFINITY, max_nan),
                    cumulative::CUMMIN => (f64::INFINITY, min_nan),
                    _ => (f64::NEG_INFINITY, logaddexp),
                };
                Data::Real(scan(&a.reals(), &steps, start, f, inclusive))
            }
        })
    })
}

fn scan<T: Copy>(
    v: &[T],
    lanes: &[&[usize]],
    start: T,
    f: fn(T, T) -> T,
    inclusive: bool,
) -> Vec<T> {
    let mut out = v.to_vec();
    for lane in lanes {
        let mut running = start;
        for &i in *lane {
            let next = f(running, v[i]);
            out[i] = if inclusive { next } else { running };
            running = next;
        }
    }
    out
}

/// Softmax along one axis.
pub(super) fn softmax(mode: Mode, a: &Value, axis: i32) -> Result<Value> {
    no_complex("softmax", a.dtype)?;
    let axis = shape::axis(axis, a.shape.len())?;
    mode.value(at_least_float(a.dtype), a.shape.clone(), || {
        let v = a.reals();
        let mut out = v.to_vec();
        for lane in lanes(a, axis).chunks_exact(a.shape[axis].max(1)) {
            let top = lane.iter().map(|&i| v[i]).fold(f64::NEG_INFINITY, max_nan);
            let total: f64 = lane.iter().map(|&i| (v[i] - top).exp()).sum();
            for &i in lane {
                out[i] = (v[i] - top).exp() / total;
            }
        }
        Ok(Data::Real(out))
    })
}

/// One of [`mlxcel_abi::kinds::order`]. Partitions are given fully sorted, which is one of the
/// orders allowed. NaN sorts last.
pub(super) fn order(mode: Mode, code: u32, a: &Value, k: i64, axis: i32) -> Result<Value> {
    no_complex(order::name(code), a.dtype)?;
    let axis = shape::axis(axis, a.shape.len())?;
    let size = a.shape[axis];
    let mut out = a.shape.clone();
    let indices = matches!(code, order::ARGSORT | order::ARGPARTITION);
    match code {
        order::SORT | order::ARGSORT => {}
        order::PARTITION | order::ARGPARTITION => {
            let at = if k < 0 { k + size as i64 } else { k };
            if at < 0 || at >= size as i64 {
                return Err(AbiError::invalid(format!(
                    "position {k} is outside an axis of {size} elements"
                )));
            }
        }
        order::TOPK => {
            out[axis] = usize::try_from(k)
                .ok()
                .filter(|&k| k <= size)
                .ok_or_else(|| {
                    AbiError::invalid(format!("the {k} largest of {size} elements do not exist"))
                })?;
        }
        code => {
            return Err(AbiError::unimplemented(format!(
                "order {code} is not known to this backend"
            )));
        }
    }
    let first = size - out[axis];
    mode.value(
        if indices { DType::U32 } else { a.dtype },
        out.clone(),
        || {
            let ranks = sorted_ranks(a, axis);
            let kept = |lane: &[usize]| lane[first..].to_vec();
            let chosen: Vec<usize> = ranks.iter().flat_map(|lane| kept(lane)).collect();
            let source = if indices {
                Data::Int(chosen.iter().map(|&i| i as i128).collect())
            } else {
                let lanes = lanes(a, axis);
                let positions = ranks.iter().zip(lanes.chunks_exact(size.max(1)));
                let chosen: Vec<usize> = positions
                    .flat_map(|(ranks, lane)| kept(ranks).into_iter().map(|i| lane[i]))
                    .collect();
                a.data.pick(&chosen)
            };
            // Back from lane order to row-major order.
            let mut result = source.clone();
            let target = Value {
                dtype: DType::U32,
                shape: out,
                data: Data::Absent,
            };
            result.put(&lanes(&target, axis), &source)?;
            Ok(result)
        },
    )
}

/// For every lane, its indices in ascending order of the elements; stable.
fn sorted_ranks(a: &Value, axis: usize) -> Vec<Vec<usize>> {
    let compare = |x: usize, y: usize| match &a.data {
        Data::Int(v) => v[x].cmp(&v[y]),
        Data::Real(v) => v[x]
            .partial_cmp(&v[y])
            .unwrap_or_else(|| v[x].is_nan().cmp(&v[y].is_nan())),
        _ => Ordering::Equal,
    };
    lanes(a, axis)
        .chunks_exact(a.shape[axis].max(1))
        .map(|lane| {
            let mut ranks: Vec<usize> = (0..lane.len()).collect();
            ranks.sort_by(|&i, &j| compare(lane[i], lane[j]));
            ranks
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    fn real(shape: &[usize], v: &[f64]) -> Value {
        Value {
            dtype: DType::F32,
            shape: shape.to_vec(),
            data: Data::Real(v.to_vec()),
        }
    }

    #[test]
    fn order_works_along_an_inner_axis() {
        let a = real(&[3, 2], &[3.0, 10.0, 1.0, f64::NAN, 2.0, 5.0]);
        let sorted = order(MODE, order::SORT, &a, 0, 0).unwrap();
        let v = sorted.reals();
        assert_eq!(v[..5], [1.0, 5.0, 2.0, 10.0, 3.0]);
        assert!(v[5].is_nan());
        let top = order(MODE, order::TOPK, &a, 2, 0).unwrap();
        assert_eq!(top.shape, [2, 2]);
        assert_eq!(top.reals()[2], 3.0);
        let ranks = order(MODE, order::ARGSORT, &a, 0, 0).unwrap();
        assert_eq!(ranks.ints().unwrap(), [1, 2, 2, 0, 0, 1]);
        assert!(order(MODE, order::PARTITION, &a, 3, 0).is_err());
    }

    #[test]
    fn reductions_over_several_axes() {
        let a = real(&[2, 2, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let sum = reduce(MODE, kind::SUM, &a, &[0, -1], false).unwrap();
        assert_eq!(*sum.reals(), [14.0, 22.0]);
        let all = reduce(MODE, kind::VAR, &a, &[], true).unwrap();
        assert_eq!(
            (all.shape.as_slice(), all.reals()[0]),
            ([1, 1, 1].as_slice(), 5.25)
        );
    }

    #[test]
    fn exclusive_reverse_scan() {
        let a = real(&[4], &[1.0, 2.0, 3.0, 4.0]);
        let scan = |reverse, inclusive| {
            cumulative(MODE, cumulative::CUMSUM, &a, 0, reverse, inclusive)
                .unwrap()
                .reals()
                .to_vec()
        };
        assert_eq!(scan(false, true), [1.0, 3.0, 6.0, 10.0]);
        assert_eq!(scan(true, false), [9.0, 7.0, 4.0, 0.0]);
    }
}
