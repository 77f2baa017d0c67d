//! Kernels over rows: norms, rotary embedding, gated activations, sums.

use crate::isa::dispatch;
use crate::simd::Simd;

/// Slices of equal length: `out = f(a, b)`.
#[derive(Clone, Copy)]
struct Pairwise {
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    n: usize,
}

/// Activation of [`gated`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU, tanh approximation (Hendrycks and Gimpel 2016).
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// Logistic function.
    Sigmoid,
}

/// A function of two vectors. A trait and not a closure: closures do not inherit the instruction set
/// of the function they are in, and are then called instead of inlined.
trait Map2 {
    unsafe fn apply<S: Simd>(a: S, b: S) -> S;
}

#[inline(always)]
unsafe fn map2<S: Simd, F: Map2>(p: Pairwise) {
    let mut i = 0;
    // SAFETY: the caller vouches for n elements behind each pointer.
    unsafe {
        while i + S::LANES <= p.n {
            F::apply(S::load(p.a.add(i)), S::load(p.b.add(i))).store(p.out.add(i));
            i += S::LANES;
        }
        if i < p.n {
            let n = p.n - i;
            let (a, b) = (S::load_first(p.a.add(i), n), S::load_first(p.b.add(i), n));
            F::apply(a, b).store_first(p.out.add(i), n);
        }
    }
}

#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: S) -> S {
    // SAFETY: the caller upholds the trait's contract.
    unsafe {
        let one = S::splat(1.0);
        one.div(one.add(S::zero().sub(x).exp()))
    }
}

/// Defines a [`Map2`].
macro_rules! map2 {
    ($name:ident, |$a:ident, $b:ident| $body:expr) => {
        struct $name;
        impl Map2 for $name {
            #[inline(always)]
            unsafe fn apply<S: Simd>($a: S, $b: S) -> S {
                // SAFETY: the caller upholds the contract of `Simd`.
                unsafe { $body }
            }
        }
    };
}

map2!(Add, |a, b| a.add(b));
map2!(Mul, |a, b| a.mul(b));
map2!(Silu, |g, u| g.mul(sigmoid(g)).mul(u));
map2!(Sigmoid, |g, u| sigmoid(g).mul(u));
// The maximum takes its second operand when the first is NaN, so NaN must be second.
map2!(Relu, |g, u| S::zero().max(g).mul(u));
map2!(GeluTanh, |g, u| {
    // x * (1 + tanh(z)) / 2 = x * sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
    let cube = g.mul(g).mul(g);
    let z2 = cube
        .mul_add(S::splat(0.044_715), g)
        .mul(S::splat(1.595_769));
    g.mul(sigmoid(z2)).mul(u)
});

#[inline(always)]
unsafe fn add_kernel<S: Simd>(p: Pairwise) {
    // SAFETY: forwarded to the caller.
    unsafe { map2::<S, Add>(p) }
}

#[inline(always)]
unsafe fn mul_kernel<S: Simd>(p: Pairwise) {
    // SAFETY: forwarded to the caller.
    unsafe { map2::<S, Mul>(p) }
}

#[inline(always)]
unsafe fn gated_kernel<S: Simd>(p: Pairwise, gate: Gate) {
    // SAFETY: forwarded to the caller.
    unsafe {
        match gate {
            Gate::Silu => map2::<S, Silu>(p),
            Gate::Sigmoid => map2::<S, Sigmoid>(p),
            Gate::Relu => map2::<S, Relu>(p),
            Gate::GeluTanh => map2::<S, GeluTanh>(p),
        }
    }
}

dispatch! {
    unsafe fn run_add(p: Pairwise) = add_kernel
}
dispatch! {
    unsafe fn run_mul(p: Pairwise) = mul_kernel
}
dispatch! {
    unsafe fn run_gated(p: Pairwise, gate: Gate) = gated_kernel
}

fn pairwise(a: &[f32], b: &[f32], out: &mut [f32]) -> Pairwise {
    assert!(a.len() == out.len() && b.len() == out.len());
    Pairwise {
        a: a.as_ptr(),
        b: b.as_ptr(),
        out: out.as_mut_ptr(),
        n: out.len(),
    }
}

/// `a + b`.
///
/// # Panics
/// When lengths differ, as all functions of this module.
pub fn add(isa: crate::Isa, a: &[f32], b: &[f32], out: &mut [f32]) {
    // SAFETY: `isa` was detected, lengths are equal.
    unsafe { run_add(isa, pairwise(a, b, out)) }
}

/// `a * b`.
///
/// # Panics
/// When lengths differ.
pub fn mul(isa: crate::Isa, a: &[f32], b: &[f32], out: &mut [f32]) {
    // SAFETY: `isa` was detected, lengths are equal.
    unsafe { run_mul(isa, pairwise(a, b, out)) }
}

/// `f(gate) * up`.
///
/// # Panics
/// When lengths differ.
pub fn gated(isa: crate::Isa, kind: Gate, gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: `isa` was detected, lengths are equal.
    unsafe { run_gated(isa, pairwise(gate, up, out), kind) }
}

/// Rows of a norm.
#[derive(Clone, Copy)]
struct Norm {
    x: *const f32,
    weight: *const f32,
    out: *mut f32,
    rows: usize,
    width: usize,
    eps: f32,
}

#[inline(always)]
unsafe fn rms_kernel<S: Simd>(n: Norm) {
    // SAFETY: the caller vouches for `rows * width` elements and for `width` weights or null.
    unsafe {
        for row in 0..n.rows {
            let (x, out) = (n.x.add(row * n.width), n.out.add(row * n.width));
            let mut acc = [S::zero(); 2];
            let mut i = 0;
            while i + 2 * S::LANES <= n.width {
                let (a, b) = (S::load(x.add(i)), S::load(x.add(i + S::LANES)));
                acc = [a.mul_add(a, acc[0]), b.mul_add(b, acc[1])];
                i += 2 * S::LANES;
            }
            while i < n.width {
                let a = S::load_first(x.add(i), (n.width - i).min(S::LANES));
                acc[0] = a.mul_add(a, acc[0]);
                i += S::LANES;
            }
            let mean = acc[0].add(acc[1]).sum() / n.width as f32;
            let scale = S::splat((mean + n.eps).sqrt().recip());
            let mut i = 0;
            while i < n.width {
                let left = (n.width - i).min(S::LANES);
                let mut y = S::load_first(x.add(i), left).mul(scale);
                if !n.weight.is_null() {
                    y = y.mul(S::load_first(n.weight.add(i), left));
                }
                y.store_first(out.add(i), left);
                i += S::LANES;
            }
        }
    }
}

dispatch! {
    unsafe fn run_rms(n: Norm) = rms_kernel
}

/// RMS norm of every row of `width` elements.
///
/// # Panics
/// When lengths do not fit.
pub fn rms_norm(
    isa: crate::Isa,
    x: &[f32],
    weight: Option<&[f32]>,
    eps: f32,
    width: usize,
    out: &mut [f32],
) {
    assert!(
        x.len() == out.len()
            && x.len().is_multiple_of(width.max(1))
            && weight.is_none_or(|w| w.len() == width)
    );
    let rows = x.len() / width.max(1);
    let weight = weight.map_or(core::ptr::null(), <[f32]>::as_ptr);
    // SAFETY: `isa` was detected, lengths were checked.
    unsafe {
        run_rms(
            isa,
            Norm {
                x: x.as_ptr(),
                weight,
                out: out.as_mut_ptr(),
                rows,
                width,
                eps,
            },
        )
    }
}

/// Cosines and sines of a step's positions, `[rows, dims / 2]` each.
#[derive(Debug, Default)]
pub struct RopeTable {
    positions: Vec<i32>,
    periods: Vec<f32>,
    /// Bits of the base and features that the periods are of, where they are of a base.
    plain: Option<(u32, u32)>,
    scale: f32,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Makes the table hold these positions; does nothing when it already does, as it does for all
    /// layers of a step but the first. Angle = scale * position / period.
    pub fn prepare(&mut self, positions: &[i32], periods: &[f32], scale: f32) {
        if self.positions == positions && self.periods == periods && self.scale == scale {
            return;
        }
        self.plain = None;
        self.positions = positions.to_vec();
        self.periods = periods.to_vec();
        self.scale = scale;
        self.cos.clear();
        self.sin.clear();
        for position in positions {
            for period in periods {
                // In f32, as the reference implementations compute it.
                let (sin, cos) = (*position as f32 * scale / period).sin_cos();
                self.cos.push(cos);
                self.sin.push(sin);
            }
        }
    }
}

impl RopeTable {
    /// As [`RopeTable::prepare`] for the periods of a plain base, `base ^ (2 i / dims)`, which are not
    /// computed again where the table has them.
    pub fn prepare_plain(&mut self, positions: &[i32], base: f32, dims: u32, scale: f32) {
        let plain = Some((base.to_bits(), dims));
        if self.plain == plain && self.positions == positions && self.scale == scale {
            return;
        }
        let step = f64::from(base).ln() * 2.0 / f64::from(dims);
        let periods = (0..dims / 2).map(|i| (step * f64::from(i)).exp() as f32);
        self.prepare(positions, &periods.collect::<Vec<_>>(), scale);
        self.plain = plain;
    }
}

/// Rotates rows `first..` of `[rows, heads, width]` at the table's positions.
///
/// # Panics
/// When lengths do not fit.
pub fn rope(
    table: &RopeTable,
    first: usize,
    x: &[f32],
    heads: usize,
    width: usize,
    interleaved: bool,
    out: &mut [f32],
) {
    let half = table.periods.len();
    assert!(x.len() == out.len() && 2 * half <= width);
    let rows = x
        .chunks_exact(heads * width)
        .zip(out.chunks_exact_mut(heads * width));
    for (row, (x, out)) in rows.enumerate() {
        let at = (first + row) * half;
        let (cos, sin) = (&table.cos[at..at + half], &table.sin[at..at + half]);
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            out[2 * half..].copy_from_slice(&x[2 * half..]);
            if interleaved {
                for ((x, out), (c, s)) in x
                    .chunks_exact(2)
                    .zip(out.chunks_exact_mut(2))
                    .zip(cos.iter().zip(sin))
                {
                    out[0] = x[0] * c - x[1] * s;
                    out[1] = x[0] * s + x[1] * c;
                }
            } else {
                let (a, b) = (&x[..half], &x[half..2 * half]);
                let (low, high) = out[..2 * half].split_at_mut(half);
                for i in 0..half {
                    low[i] = a[i] * cos[i] - b[i] * sin[i];
                    high[i] = a[i] * sin[i] + b[i] * cos[i];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::quantized::testing::Numbers;

    fn close(got: f32, want: f64, tolerance: f64) {
        assert!(
            (f64::from(got) - want).abs() <= tolerance * want.abs().max(1.0),
            "{got} {want}"
        );
    }

    #[test]
    fn elementwise_kernels_match_f64_on_ragged_lengths() {
        let mut numbers = Numbers(5);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for n in [0usize, 1, 7, 16, 33, 100] {
                let a: Vec<f32> = numbers.floats(n).iter().map(|x| x * 20.0).collect();
                let b = numbers.floats(n);
                let mut out = vec![0.0; n];
                add(isa, &a, &b, &mut out);
                (0..n).for_each(|i| close(out[i], f64::from(a[i]) + f64::from(b[i]), 1e-6));
                mul(isa, &a, &b, &mut out);
                (0..n).for_each(|i| close(out[i], f64::from(a[i]) * f64::from(b[i]), 1e-6));
                for gate in [Gate::Silu, Gate::GeluTanh, Gate::Relu, Gate::Sigmoid] {
                    gated(isa, gate, &a, &b, &mut out);
                    for i in 0..n {
                        let x = f64::from(a[i]);
                        let sigmoid = 1.0 / (1.0 + (-x).exp());
                        let f = match gate {
                            Gate::Silu => x * sigmoid,
                            Gate::Sigmoid => sigmoid,
                            Gate::Relu => x.max(0.0),
                            Gate::GeluTanh => {
                                0.5 * x
                                    * (1.0 + (0.797_884_560_8 * (x + 0.044715 * x.powi(3))).tanh())
                            }
                        };
                        close(out[i], f * f64::from(b[i]), 2e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn extremes_behave_as_the_functions_do() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let x = [
                f32::NEG_INFINITY,
                -1e30,
                -100.0,
                100.0,
                1e30,
                f32::INFINITY,
                f32::NAN,
            ];
            let mut out = [0.0f32; 7];
            gated(isa, Gate::Sigmoid, &x, &[1.0; 7], &mut out);
            assert!(
                out[..3].iter().all(|y| y.abs() < 1e-37) && out[3..6].iter().all(|y| *y == 1.0),
                "{out:?}"
            );
            gated(isa, Gate::Silu, &x, &[1.0; 7], &mut out);
            assert!(
                out[3] == 100.0 && out[4] == 1e30 && out[6].is_nan(),
                "{} {out:?}",
                isa.name()
            );
        }
    }

    #[test]
    fn rms_norm_matches_f64() {
        let mut numbers = Numbers(6);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for width in [1usize, 5, 64, 576, 77] {
                let (x, w) = (numbers.floats(3 * width), numbers.floats(width));
                let mut out = vec![0.0; 3 * width];
                rms_norm(isa, &x, Some(&w), 1e-5, width, &mut out);
                for row in 0..3 {
                    let row = &x[row * width..(row + 1) * width];
                    let mean =
                        row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                    let scale = 1.0 / (mean + 1e-5).sqrt();
                    let at = row.as_ptr() as usize - x.as_ptr() as usize;
                    (0..width).for_each(|i| {
                        close(
                            out[at / 4 + i],
                            f64::from(row[i]) * scale * f64::from(w[i]),
                            3e-6,
                        )
                    });
                }
            }
        }
    }

    #[test]
    fn rotation_keeps_length_and_is_undone_by_the_negative_angle() {
        let mut numbers = Numbers(7);
        let x = numbers.floats(2 * 3 * 10);
        for interleaved in [false, true] {
            let mut table = RopeTable::default();
            let (mut y, mut z) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            table.prepare(&[5, 900], &[1.0, 10.0, 100.0, 1000.0], 1.0);
            rope(&table, 0, &x, 3, 10, interleaved, &mut y);
            table.prepare(&[-5, -900], &[1.0, 10.0, 100.0, 1000.0], 1.0);
            rope(&table, 0, &y, 3, 10, interleaved, &mut z);
            assert!(x.iter().zip(&z).all(|(a, b)| (a - b).abs() < 1e-5));
            assert_eq!(&x[8..10], &y[8..10]);
            assert!((x[0] - y[0]).abs() > 1e-3);
        }
    }
}
