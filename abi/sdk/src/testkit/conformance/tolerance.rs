//! How far a result may lie from the reference, per operation and dtype.
//!
//! An error is measured in units of the result type's epsilon (2^-23 for f32, 2^-10 for f16, 2^-7
//! for bf16), times the expected magnitude or a floor, whichever is larger. The floor stands for the
//! magnitude of the terms that cancelled on the way; it is never below the type's smallest normal
//! number, so devices may flush subnormal results. What a backend rounds on purpose comes on top of that (see `rounding`).

use mlxcel_abi::DType;
use mlxcel_abi::kinds::unary;

/// Allowed error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tolerance {
    /// Units of epsilon for f32 and c64 results.
    single: f64,
    /// Units of epsilon for f16 and bf16 results.
    half: f64,
    /// Smallest magnitude the error is relative to.
    floor: f64,
    /// What rounded activations add to it, in numbers.
    rounding: f64,
}

/// For every result of a case.
impl From<Tolerance> for Vec<Tolerance> {
    fn from(one: Tolerance) -> Self {
        vec![one]
    }
}

impl Tolerance {
    /// Equal.
    pub(super) const EXACT: Self = Self {
        single: 0.0,
        half: 0.0,
        floor: 0.0,
        rounding: 0.0,
    };

    /// One rounding of an exact result, or one rounding of an f32 result.
    pub(super) const ROUNDED: Self = Self {
        single: 1.0,
        half: 1.0,
        floor: 0.0,
        rounding: 0.0,
    };

    /// So many units in f32 and in half types.
    pub(super) const fn units(single: f64, half: f64) -> Self {
        Self {
            single,
            half,
            floor: 0.0,
            rounding: 0.0,
        }
    }

    /// Relative to at least `floor`.
    pub(super) const fn floor(self, floor: f64) -> Self {
        Self { floor, ..self }
    }

    /// And an error of so much besides, for results of rounded activations.
    pub(super) const fn rounding(self, rounding: f64) -> Self {
        Self { rounding, ..self }
    }

    /// For sums of `terms` products of numbers up to `magnitude`, accumulated in f32 and rounded
    /// once: the error grows with the root of the number of terms, and the sum may cancel.
    pub(super) fn accumulated(terms: usize, magnitude: f64) -> Self {
        let root = (terms.max(1) as f64).sqrt();
        Self {
            single: 4.0 + root,
            half: 2.0,
            floor: 0.5 * root * magnitude,
            rounding: 0.0,
        }
    }

    /// Largest allowed distance from `want` for a result of `dtype`.
    pub(super) fn allowed(&self, dtype: DType, want: f64) -> f64 {
        let (units, epsilon, smallest) = match dtype {
            DType::F16 => (self.half, 2f64.powi(-10), 2f64.powi(-14)),
            DType::BF16 => (self.half, 2f64.powi(-7), 2f64.powi(-126)),
            DType::F64 => (self.single, 2f64.powi(-52), 2f64.powi(-1022)),
            _ => (self.single, 2f64.powi(-23), 2f64.powi(-126)),
        };
        if !want.is_finite() {
            return 0.0;
        }
        units * epsilon * want.abs().max(self.floor).max(smallest) + self.rounding
    }
}

/// Tolerance of an elementwise function on the range of numbers that the suite gives it.
pub(super) fn of_unary(kind: u32) -> Tolerance {
    match kind {
        unary::NEG
        | unary::ABS
        | unary::SIGN
        | unary::FLOOR
        | unary::CEIL
        | unary::ROUND
        | unary::LOGICAL_NOT
        | unary::BIT_NOT
        | unary::IS_NAN
        | unary::IS_INF
        | unary::IS_FINITE
        | unary::REAL
        | unary::IMAG
        | unary::CONJ
        | unary::RELU => Tolerance::EXACT,
        unary::SQUARE | unary::RECIPROCAL | unary::SQRT | unary::RELU_SQUARED => Tolerance::ROUNDED,
        // Vector code reduces arguments and cancels near the zeros of these.
        unary::SIN
        | unary::COS
        | unary::TAN
        | unary::LOG
        | unary::LOG2
        | unary::LOG10
        | unary::LOG1P
        | unary::ASIN
        | unary::ACOS
        | unary::ATAN
        | unary::SINH
        | unary::ASINH
        | unary::ACOSH
        | unary::ATANH
        | unary::EXPM1
        | unary::ERF
        | unary::TANH => Tolerance::units(8.0, 2.0).floor(0.5),
        unary::ERFINV => Tolerance::units(64.0, 2.0).floor(0.5),
        // Often composed in the activation's own type.
        unary::SIGMOID
        | unary::SILU
        | unary::GELU
        | unary::GELU_TANH
        | unary::GELU_QUICK
        | unary::SOFTPLUS
        | unary::LOG_SIGMOID => Tolerance::units(8.0, 4.0).floor(0.5),
        // Exp, rsqrt, cosh.
        _ => Tolerance::units(8.0, 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_scale_with_the_type_and_the_floor() {
        let two = Tolerance::units(2.0, 1.0).floor(0.5);
        assert_eq!(two.allowed(DType::F32, 4.0), 8.0 * 2f64.powi(-23));
        assert_eq!(two.allowed(DType::F32, 0.0), 2f64.powi(-23));
        assert_eq!(two.allowed(DType::BF16, -4.0), 4.0 * 2f64.powi(-7));
        assert_eq!(Tolerance::EXACT.allowed(DType::F16, 1e9), 0.0);
        let rounded = two.rounding(0.25);
        assert_eq!(
            rounded.allowed(DType::F32, 4.0),
            0.25 + 8.0 * 2f64.powi(-23)
        );
        assert_eq!(
            rounded.allowed(DType::F16, 4.0),
            0.25 + two.allowed(DType::F16, 4.0)
        );
        assert_eq!(rounded.allowed(DType::F32, f64::INFINITY), 0.0);
    }
}
