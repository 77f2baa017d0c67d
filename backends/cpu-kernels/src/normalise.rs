//! Rows that are brought to a common scale: softmax and layer norm.

use crate::Isa;
use crate::isa::dispatch;
use crate::simd::Simd;

/// Rows of one width.
#[derive(Clone, Copy)]
struct Rows {
    x: *const f32,
    weight: *const f32,
    bias: *const f32,
    out: *mut f32,
    rows: usize,
    width: usize,
    eps: f32,
}

/// `exp(x - max) / sum`, as its definition says, for rows that have something which is not finite.
///
/// # Safety
/// `width` elements behind both pointers.
unsafe fn plainly(x: *const f32, out: *mut f32, width: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut largest = f32::NEG_INFINITY;
        for i in 0..width {
            let x = *x.add(i);
            largest = if x > largest || x.is_nan() {
                x
            } else {
                largest
            };
        }
        let mut sum = 0.0;
        for i in 0..width {
            let e = (*x.add(i) - largest).exp();
            *out.add(i) = e;
            sum += e;
        }
        for i in 0..width {
            *out.add(i) /= sum;
        }
    }
}

#[inline(always)]
unsafe fn softmax_kernel<S: Simd>(r: Rows) {
    // SAFETY: the caller vouches for `rows * width` elements.
    unsafe {
        for row in 0..r.rows {
            let (x, out) = (r.x.add(row * r.width), r.out.add(row * r.width));
            let (mut largest, mut finite) = (S::splat(f32::NEG_INFINITY), S::zero());
            let mut i = 0;
            while i + S::LANES <= r.width {
                let v = S::load(x.add(i));
                largest = v.max(largest);
                finite = v.mul_add(S::zero(), finite);
                i += S::LANES;
            }
            let (mut largest, mut finite) = (largest.max_lane(), finite.sum());
            for i in i..r.width {
                let v = *x.add(i);
                largest = largest.max(v);
                finite += v * 0.0;
            }
            if finite != 0.0 {
                plainly(x, out, r.width);
                continue;
            }
            let shift = S::splat(-largest);
            let mut sum = S::zero();
            let mut i = 0;
            while i < r.width {
                let n = (r.width - i).min(S::LANES);
                let e = S::load_first(x.add(i), n).add(shift).exp();
                e.store_first(out.add(i), n);
                sum = sum.add(S::load_first(out.add(i), n));
                i += S::LANES;
            }
            let scale = S::splat(sum.sum().recip());
            let mut i = 0;
            while i < r.width {
                let n = (r.width - i).min(S::LANES);
                let y = S::load_first(out.add(i), n).mul(scale);
                y.store_first(out.add(i), n);
                i += S::LANES;
            }
        }
    }
}

#[inline(always)]
unsafe fn layer_norm_kernel<S: Simd>(r: Rows) {
    // SAFETY: the caller vouches for `rows * width` elements, and for `width` weights and biases or null.
    unsafe {
        for row in 0..r.rows {
            let (x, out) = (r.x.add(row * r.width), r.out.add(row * r.width));
            let mut sum = S::zero();
            let mut i = 0;
            while i < r.width {
                let n = (r.width - i).min(S::LANES);
                sum = sum.add(S::load_first(x.add(i), n));
                i += S::LANES;
            }
            let mean = sum.sum() / r.width as f32;
            let mut squares = S::zero();
            let mut i = 0;
            while i + S::LANES <= r.width {
                let d = S::load(x.add(i)).sub(S::splat(mean));
                squares = d.mul_add(d, squares);
                i += S::LANES;
            }
            let mut variance = squares.sum();
            for i in i..r.width {
                let d = *x.add(i) - mean;
                variance += d * d;
            }
            let scale = (variance / r.width as f32 + r.eps).sqrt().recip();
            let mut i = 0;
            while i < r.width {
                let n = (r.width - i).min(S::LANES);
                let d = S::load_first(x.add(i), n).sub(S::splat(mean));
                let mut y = d.mul(S::splat(scale));
                if !r.weight.is_null() {
                    y = y.mul(S::load_first(r.weight.add(i), n));
                }
                if !r.bias.is_null() {
                    y = y.add(S::load_first(r.bias.add(i), n));
                }
                y.store_first(out.add(i), n);
                i += S::LANES;
            }
        }
    }
}

dispatch! {
    unsafe fn run_softmax(r: Rows) = softmax_kernel
}
dispatch! {
    unsafe fn run_layer_norm(r: Rows) = layer_norm_kernel
}

/// Softmax of every row of `width` elements.
///
/// # Panics
/// When lengths do not fit.
pub fn softmax(isa: Isa, x: &[f32], width: usize, out: &mut [f32]) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(width.max(1)));
    let rows = Rows {
        x: x.as_ptr(),
        weight: core::ptr::null(),
        bias: core::ptr::null(),
        out: out.as_mut_ptr(),
        rows: x.len() / width.max(1),
        width,
        eps: 0.0,
    };
    // SAFETY: `isa` was detected, lengths were checked.
    unsafe { run_softmax(isa, rows) }
}

/// Layer norm of every row of `width` elements (Ba et al. 2016).
///
/// # Panics
/// When lengths do not fit.
pub fn layer_norm(
    isa: Isa,
    x: &[f32],
    weight: Option<&[f32]>,
    bias: Option<&[f32]>,
    eps: f32,
    width: usize,
    out: &mut [f32],
) {
    let fits = |of: Option<&[f32]>| of.is_none_or(|of| of.len() == width);
    assert!(x.len() == out.len() && x.len().is_multiple_of(width.max(1)));
    assert!(fits(weight) && fits(bias));
    let pointer = |of: Option<&[f32]>| of.map_or(core::ptr::null(), <[f32]>::as_ptr);
    let rows = Rows {
        x: x.as_ptr(),
        weight: pointer(weight),
        bias: pointer(bias),
        out: out.as_mut_ptr(),
        rows: x.len() / width.max(1),
        width,
        eps,
    };
    // SAFETY: `isa` was detected, lengths were checked.
    unsafe { run_layer_norm(isa, rows) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::testing::Numbers;

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    #[test]
    fn softmax_matches_f64() {
        for (isa, width) in isas().flat_map(|isa| [1, 5, 16, 33, 200].map(|width| (isa, width))) {
            let mut numbers = Numbers(width as u64);
            let x: Vec<f32> = numbers.floats(3 * width).iter().map(|x| x * 30.0).collect();
            let mut out = vec![f32::NAN; x.len()];
            softmax(isa, &x, width, &mut out);
            for (x, out) in x.chunks(width).zip(out.chunks(width)) {
                let largest = x.iter().fold(f64::MIN, |m, x| m.max(f64::from(*x)));
                let e: Vec<f64> = x.iter().map(|x| (f64::from(*x) - largest).exp()).collect();
                let sum: f64 = e.iter().sum();
                for (got, want) in out.iter().zip(e.iter().map(|e| e / sum)) {
                    assert!((f64::from(*got) - want).abs() < 1e-6, "{isa:?} {width}");
                }
            }
        }
    }

    #[test]
    fn softmax_of_extremes_is_what_the_definition_gives() {
        for isa in isas() {
            let mut x = vec![0.5f32; 40];
            let mut out = vec![0.0; 40];
            x[3] = f32::NEG_INFINITY;
            x[37] = f32::NEG_INFINITY;
            softmax(isa, &x, 40, &mut out);
            assert_eq!((out[3], out[37]), (0.0, 0.0));
            assert!((out[0] - 1.0 / 38.0).abs() < 1e-7);
            x[20] = f32::NAN;
            softmax(isa, &x, 40, &mut out);
            assert!(out.iter().all(|x| x.is_nan()));
            softmax(isa, &[f32::NEG_INFINITY; 40], 40, &mut out);
            assert!(out.iter().all(|x| x.is_nan()));
            let mut far = vec![-3.0e38f32; 40];
            far[7] = 3.0e38;
            softmax(isa, &far, 40, &mut out);
            assert!((out[7] - 1.0).abs() < 1e-6 && out[8] < 1e-30);
        }
    }

    #[test]
    fn layer_norm_matches_f64() {
        for (isa, width) in isas().flat_map(|isa| [1, 7, 16, 45, 300].map(|width| (isa, width))) {
            let mut numbers = Numbers(width as u64 + 9);
            let (x, w, b) = (
                numbers.floats(2 * width),
                numbers.floats(width),
                numbers.floats(width),
            );
            let mut out = vec![f32::NAN; x.len()];
            layer_norm(isa, &x, Some(&w), Some(&b), 1e-5, width, &mut out);
            for (x, out) in x.chunks(width).zip(out.chunks(width)) {
                let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
                let squares = x.iter().map(|x| (f64::from(*x) - mean).powi(2));
                let scale = (squares.sum::<f64>() / width as f64 + 1e-5).sqrt().recip();
                for i in 0..width {
                    let want = (f64::from(x[i]) - mean) * scale * f64::from(w[i]) + f64::from(b[i]);
                    assert!((f64::from(out[i]) - want).abs() < 2e-5, "{isa:?} {width}");
                }
            }
        }
    }
}
