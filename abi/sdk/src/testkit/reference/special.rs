//! Functions of one real number that the standard library lacks, to f64 accuracy.

use core::f64::consts::{FRAC_2_SQRT_PI, SQRT_2};

/// Error function: the series of Abramowitz and Stegun 7.1.6, whose terms all have one sign.
pub(super) fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.0 {
        return 1f64.copysign(x);
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// Inverse error function: Winitzki's estimate, then Newton's method.
pub(super) fn erfinv(y: f64) -> f64 {
    if y.is_nan() || y.abs() > 1.0 {
        return f64::NAN;
    }
    if y.abs() == 1.0 {
        return f64::INFINITY.copysign(y);
    }
    if y == 0.0 {
        return y;
    }
    let a = 0.147;
    let log = (1.0 - y * y).ln();
    let b = 2.0 / (core::f64::consts::PI * a) + log / 2.0;
    let mut x = ((b * b - log / a).sqrt() - b).sqrt().copysign(y);
    for _ in 0..6 {
        x -= (erf(x) - y) / (FRAC_2_SQRT_PI * (-x * x).exp());
    }
    x
}

/// Logistic function, without overflow on either side.
pub(super) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

/// `log(1 + e^x)`.
pub(super) fn softplus(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `log(e^a + e^b)`.
pub(super) fn logaddexp(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    let high = a.max(b);
    if high.is_infinite() {
        return high;
    }
    high + (-(a - b).abs()).exp().ln_1p()
}

/// GELU with the error function.
pub(super) fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / SQRT_2))
}

/// GELU, tanh approximation (Hendrycks and Gimpel 2016).
pub(super) fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / core::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// Larger of two; NaN wins over everything.
pub(super) fn max_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else {
        a.max(b)
    }
}

/// Smaller of two; NaN wins over everything.
pub(super) fn min_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else {
        a.min(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_has_its_tabulated_values() {
        // Abramowitz and Stegun, table 7.1.
        for (x, y) in [
            (0.1, 0.112_462_916_0),
            (0.5, 0.520_499_877_8),
            (1.0, 0.842_700_792_9),
            (2.0, 0.995_322_265_0),
        ] {
            assert!((erf(x) - y).abs() < 1e-10);
            assert!((erf(-x) + y).abs() < 1e-10);
        }
        assert_eq!(erf(f64::INFINITY), 1.0);
        assert_eq!(erf(0.0), 0.0);
    }

    #[test]
    fn erfinv_undoes_erf() {
        for i in -30..=30 {
            let x = f64::from(i) / 10.0;
            assert!((erfinv(erf(x)) - x).abs() < 1e-9, "{x}");
        }
        assert_eq!(erfinv(-1.0), f64::NEG_INFINITY);
        assert!(erfinv(1.5).is_nan());
    }

    #[test]
    fn extremes_do_not_overflow() {
        assert_eq!(sigmoid(-1e4), 0.0);
        assert_eq!(sigmoid(f64::INFINITY), 1.0);
        assert_eq!(softplus(1e4), 1e4);
        assert_eq!(
            logaddexp(f64::NEG_INFINITY, f64::NEG_INFINITY),
            f64::NEG_INFINITY
        );
        assert!(max_nan(f64::NAN, 1.0).is_nan() && min_nan(1.0, f64::NAN).is_nan());
    }
}
