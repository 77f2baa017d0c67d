//! Discrete Fourier transforms, by their definition.

use core::f64::consts::TAU;

use mlxcel_abi::kinds::fft as kind;
use mlxcel_abi::{AbiError, DType, Result};

use super::shape;
use super::value::{Data, Mode, Value};

type C = [f64; 2];

/// One of [`mlxcel_abi::kinds::fft`] over `axes`; `n[i]` crops or pads axis `axes[i]` first, 0
/// keeps its size.
pub(super) fn fft(mode: Mode, code: u32, a: &Value, n: &[i64], axes: &[i32]) -> Result<Value> {
    if !kind::ALL.iter().any(|(known, _)| *known == code) {
        return Err(AbiError::unimplemented(format!(
            "Fourier transform {code} is not known to this backend"
        )));
    }
    let axes = shape::axes(axes, a.shape.len())?;
    let Some(&last) = axes.last() else {
        return Err(AbiError::invalid("a Fourier transform needs an axis"));
    };
    if code == kind::RFFT && a.dtype == DType::C64 {
        return Err(AbiError::invalid(
            "the real transform takes real numbers, found c64",
        ));
    }
    // Length of the signal along every axis, and of the spectrum or result along the last one.
    let mut sizes = Vec::new();
    for (i, &axis) in axes.iter().enumerate() {
        let default = match code {
            kind::IRFFT if axis == last => 2 * (a.shape[axis].max(1) - 1),
            _ => a.shape[axis],
        };
        let size = match n.get(i) {
            Some(&0) | None => default,
            Some(&size) => usize::try_from(size).map_err(|_| {
                AbiError::invalid(format!("a transform of {size} elements does not exist"))
            })?,
        };
        if size == 0 {
            return Err(AbiError::invalid(format!(
                "axis {axis} of shape {:?} is empty",
                a.shape
            )));
        }
        sizes.push(size);
    }
    let mut out = a.shape.clone();
    for (&axis, &size) in axes.iter().zip(&sizes) {
        out[axis] = if code == kind::RFFT && axis == last {
            size / 2 + 1
        } else {
            size
        };
    }
    let dtype = if code == kind::IRFFT {
        DType::F32
    } else {
        DType::C64
    };
    mode.value(dtype, out, || {
        let mut signal = (a.shape.clone(), a.complexes().into_owned());
        let inverse = matches!(code, kind::IFFT | kind::IRFFT);
        let real_axis = matches!(code, kind::RFFT | kind::IRFFT);
        // The real side of a real transform comes first going forward and last going back.
        let mut order: Vec<usize> = (0..axes.len()).collect();
        if code == kind::RFFT {
            order.rotate_right(1);
        }
        for i in order {
            let (axis, size) = (axes[i], sizes[i]);
            let line: &dyn Fn(&[C]) -> Vec<C> = match (real_axis && axis == last, inverse) {
                (true, false) => &move |x| dft(&resized(x, size), -1.0)[..size / 2 + 1].to_vec(),
                (true, true) => &move |x| hermitian_inverse(x, size),
                (false, false) => &move |x| dft(&resized(x, size), -1.0),
                (false, true) => &move |x| {
                    let scale = |c: C| [c[0] / size as f64, c[1] / size as f64];
                    dft(&resized(x, size), 1.0).into_iter().map(scale).collect()
                },
            };
            signal = along(&signal.0, &signal.1, axis, line);
        }
        Ok(if code == kind::IRFFT {
            Data::Real(signal.1.iter().map(|c| c[0]).collect())
        } else {
            Data::Complex(signal.1)
        })
    })
}

/// Applies `f` to every line along `axis`.
fn along(
    dims: &[usize],
    data: &[C],
    axis: usize,
    f: &dyn Fn(&[C]) -> Vec<C>,
) -> (Vec<usize>, Vec<C>) {
    let (outer, size, inner) = shape::around(dims, axis);
    let mut lines = Vec::with_capacity(outer * inner);
    for block in 0..outer {
        for column in 0..inner {
            let line: Vec<C> = (0..size)
                .map(|i| data[(block * size + i) * inner + column])
                .collect();
            lines.push(f(&line));
        }
    }
    let length = lines.first().map_or(size, Vec::len);
    let mut out = vec![[0.0; 2]; outer * length * inner];
    for (index, line) in lines.iter().enumerate() {
        let (block, column) = (index / inner, index % inner);
        for (i, &x) in line.iter().enumerate() {
            out[(block * length + i) * inner + column] = x;
        }
    }
    let mut shape = dims.to_vec();
    shape[axis] = length;
    (shape, out)
}

fn resized(x: &[C], size: usize) -> Vec<C> {
    let mut out = x.to_vec();
    out.resize(size, [0.0; 2]);
    out
}

/// `X[k] = sum over t of x[t] * e^(sign * 2 pi i k t / n)`.
fn dft(x: &[C], sign: f64) -> Vec<C> {
    let n = x.len();
    // The angle depends on k * t modulo n alone, which keeps it exact.
    let roots: Vec<C> = (0..n)
        .map(|i| {
            let (sin, cos) = (sign * TAU * i as f64 / n as f64).sin_cos();
            [cos, sin]
        })
        .collect();
    (0..n)
        .map(|k| {
            let mut sum = [0.0; 2];
            for (t, x) in x.iter().enumerate() {
                let root = roots[k * t % n];
                sum[0] += x[0] * root[0] - x[1] * root[1];
                sum[1] += x[0] * root[1] + x[1] * root[0];
            }
            sum
        })
        .collect()
}

/// Inverse of the real transform: `half` holds the first `size / 2 + 1` values of a spectrum whose
/// rest is their mirrored conjugates. Imaginary parts of the first and the middle value drop out.
fn hermitian_inverse(half: &[C], size: usize) -> Vec<C> {
    let half = resized(half, size / 2 + 1);
    let full: Vec<C> = (0..size)
        .map(|k| match k {
            0 => [half[0][0], 0.0],
            k if 2 * k == size => [half[k][0], 0.0],
            k if 2 * k < size => half[k],
            k => [half[size - k][0], -half[size - k][1]],
        })
        .collect();
    dft(&full, 1.0)
        .into_iter()
        .map(|c| [c[0] / size as f64, 0.0])
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
    fn transforms_undo_each_other() {
        let a = real(
            &[2, 5],
            &[1.0, -2.0, 3.5, 0.0, 4.0, 2.0, 2.0, -1.0, 7.0, 0.5],
        );
        for size in [4, 5, 7] {
            let half = fft(MODE, kind::RFFT, &a, &[size], &[1]).unwrap();
            assert_eq!(half.shape, [2, size as usize / 2 + 1]);
            let back = fft(MODE, kind::IRFFT, &half, &[size], &[1]).unwrap();
            for t in 0..size.min(5) as usize {
                assert!((back.reals()[t] - a.reals()[t]).abs() < 1e-6);
            }
        }
        let both = fft(MODE, kind::FFT, &a, &[0, 0], &[0, 1]).unwrap();
        let back = fft(MODE, kind::IFFT, &both, &[0, 0], &[0, 1]).unwrap();
        for (x, y) in back.complexes().iter().zip(a.reals().iter()) {
            assert!((x[0] - y).abs() < 1e-6 && x[1].abs() < 1e-6);
        }
    }

    #[test]
    fn the_real_transform_is_half_of_the_full_one() {
        let a = real(
            &[4, 3],
            &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 1.0, 0.0, -1.0, 2.0, 2.5],
        );
        let full = fft(MODE, kind::FFT, &a, &[0, 0], &[1, 0]).unwrap();
        let half = fft(MODE, kind::RFFT, &a, &[0, 0], &[1, 0]).unwrap();
        assert_eq!(half.shape, [3, 3]);
        for (x, y) in half.complexes().iter().zip(full.complexes().iter()) {
            assert!((x[0] - y[0]).abs() < 1e-5 && (x[1] - y[1]).abs() < 1e-5);
        }
    }
}
