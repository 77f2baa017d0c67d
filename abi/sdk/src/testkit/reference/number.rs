//! Dtypes as sets of numbers: rounding, wrapping and promotion.

use mlxcel_abi::{AbiError, DType, Result};

/// How the elements of a dtype are computed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::testkit) enum Class {
    /// Bool: 0 or 1.
    Bool,
    /// Any integer.
    Int,
    /// Any real float.
    Float,
    /// Complex of two f32.
    Complex,
}

/// The class of `dtype`; foreign codes are refused.
pub(in crate::testkit) fn class(dtype: DType) -> Result<Class> {
    match dtype {
        DType::BOOL => Ok(Class::Bool),
        DType::C64 => Ok(Class::Complex),
        dtype if dtype.is_float() => Ok(Class::Float),
        dtype if dtype.size_bytes() > 0 => Ok(Class::Int),
        DType(code) => Err(AbiError::unimplemented(format!(
            "dtype code {code} is not known to this backend"
        ))),
    }
}

/// Whether `dtype` is an integer type (bool is not).
pub(in crate::testkit) fn is_int(dtype: DType) -> bool {
    class(dtype) == Ok(Class::Int)
}

fn is_signed(dtype: DType) -> bool {
    dtype.0 >= DType::I8.0 && dtype.0 <= DType::I64.0
}

/// Rounds `x` to a binary float of `fraction` stored mantissa bits, smallest normal exponent
/// `min_exponent` and largest finite value `max`; ties to even, as IEEE 754 has it.
fn round_binary(x: f64, fraction: i32, min_exponent: i32, max: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = (((x.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(min_exponent);
    // The quantum is a power of two well inside f64's range: both products are exact.
    let quantum = f64::from_bits(((exponent - fraction + 1023) as u64) << 52);
    let rounded = (x / quantum).round_ties_even() * quantum;
    if rounded.abs() > max {
        f64::INFINITY.copysign(x)
    } else {
        rounded
    }
}

/// `x` as an element of the float type `dtype` would hold it.
pub(in crate::testkit) fn round_float(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F16 => round_binary(x, 10, -14, 65504.0),
        DType::BF16 => round_binary(x, 7, -126, f64::from(half::bf16::MAX)),
        DType::F32 | DType::C64 => f64::from(x as f32),
        _ => x,
    }
}

/// Largest element of the float type below the finite `x`.
pub(in crate::testkit) fn next_below(dtype: DType, x: f64) -> f64 {
    let mut step = x.abs().max(2f64.powi(-200)) * 2f64.powi(-60);
    loop {
        let below = round_float(dtype, x - step);
        if below < x {
            return below;
        }
        step *= 2.0;
    }
}

/// `x` modulo the integer type's range; bool becomes `x != 0`.
pub(in crate::testkit) fn wrap_int(dtype: DType, x: i128) -> i128 {
    match dtype {
        DType::BOOL => i128::from(x != 0),
        DType::U8 => i128::from(x as u8),
        DType::U16 => i128::from(x as u16),
        DType::U32 => i128::from(x as u32),
        DType::U64 => i128::from(x as u64),
        DType::I8 => i128::from(x as i8),
        DType::I16 => i128::from(x as i16),
        DType::I32 => i128::from(x as i32),
        DType::I64 => i128::from(x as i64),
        _ => x,
    }
}

/// Smallest and largest value of an integer type.
pub(in crate::testkit) fn int_range(dtype: DType) -> (i128, i128) {
    let bits = 8 * dtype.size_bytes() as u32;
    if dtype == DType::BOOL {
        (0, 1)
    } else if is_signed(dtype) {
        (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1)
    } else {
        (0, (1i128 << bits) - 1)
    }
}

/// Float to integer: towards zero, NaN to 0, out of range to the nearest end (a case that the
/// interface leaves open).
pub(in crate::testkit) fn float_to_int(dtype: DType, x: f64) -> i128 {
    if dtype == DType::BOOL {
        return i128::from(x != 0.0);
    }
    let (low, high) = int_range(dtype);
    (x as i128).clamp(low, high)
}

/// Common type of two operands, by MLX's table (mlx/dtype.cpp), which is JAX's: any integer with a
/// float gives the float, f16 with bf16 gives f32, u64 with a signed integer gives f32.
pub(in crate::testkit) fn promote(a: DType, b: DType) -> DType {
    if a == b {
        return a;
    }
    let either = |dtype| a == dtype || b == dtype;
    if either(DType::C64) {
        return DType::C64;
    }
    match (a.is_float(), b.is_float()) {
        (true, true) if either(DType::F64) => DType::F64,
        (true, true) => DType::F32,
        (true, false) => a,
        (false, true) => b,
        (false, false) if a == DType::BOOL => b,
        (false, false) if b == DType::BOOL => a,
        (false, false) => promote_ints(a, b),
    }
}

fn promote_ints(a: DType, b: DType) -> DType {
    let (a_bytes, b_bytes) = (a.size_bytes(), b.size_bytes());
    if is_signed(a) == is_signed(b) {
        return if a_bytes > b_bytes { a } else { b };
    }
    let (signed, unsigned) = if is_signed(a) { (a, b) } else { (b, a) };
    if signed.size_bytes() > unsigned.size_bytes() {
        return signed;
    }
    match unsigned {
        DType::U8 => DType::I16,
        DType::U16 => DType::I32,
        DType::U32 => DType::I64,
        _ => DType::F32,
    }
}

/// `dtype` itself when it is a float or complex type, else f32.
pub(in crate::testkit) fn at_least_float(dtype: DType) -> DType {
    if dtype.is_float() || dtype == DType::C64 {
        dtype
    } else {
        DType::F32
    }
}

/// Refuses everything but real floats, naming `what`.
pub(in crate::testkit) fn need_float(what: &str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "{what} must be f16, bf16, f32 or f64, found {}",
        dtype.name()
    )))
}

/// Refuses everything but integers, naming `what`.
pub(in crate::testkit) fn need_int(what: &str, dtype: DType) -> Result<()> {
    if is_int(dtype) {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "{what} must be of an integer type, found {}",
        dtype.name()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_half_value_is_its_own_rounding() {
        for bits in 0..=u16::MAX {
            let (f, b) = (
                f16::from_bits(bits).to_f64(),
                bf16::from_bits(bits).to_f64(),
            );
            for (dtype, x) in [(DType::F16, f), (DType::BF16, b)] {
                let rounded = round_float(dtype, x);
                assert!(
                    rounded == x || (rounded.is_nan() && x.is_nan()),
                    "{bits:#x}"
                );
            }
        }
    }

    #[test]
    fn halfway_cases_go_to_even_and_the_largest_overflows() {
        assert_eq!(round_float(DType::F16, 2049.0), 2048.0);
        assert_eq!(round_float(DType::F16, 2051.0), 2052.0);
        assert_eq!(round_float(DType::F16, 65519.99), 65504.0);
        assert_eq!(round_float(DType::F16, -65520.0), f64::NEG_INFINITY);
        assert_eq!(round_float(DType::F16, 2f64.powi(-25)), 0.0);
        assert_eq!(
            round_float(DType::F16, 1.5 * 2f64.powi(-25)),
            2f64.powi(-24)
        );
        assert_eq!(round_float(DType::BF16, 257.0), 256.0);
        assert_eq!(round_float(DType::BF16, 3.5e38), f64::INFINITY);
    }

    #[test]
    fn rounding_agrees_with_the_half_crate_from_f32() {
        let mut state = 1u32;
        for _ in 0..20_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(state);
            if x.is_nan() {
                continue;
            }
            assert_eq!(
                round_float(DType::F16, x.into()),
                f16::from_f32(x).to_f64(),
                "{x}"
            );
            assert_eq!(
                round_float(DType::BF16, x.into()),
                bf16::from_f32(x).to_f64(),
                "{x}"
            );
        }
    }

    #[test]
    fn promotion_is_symmetric_and_half_types_meet_in_f32() {
        for &a in DType::ALL {
            for &b in DType::ALL {
                assert_eq!(promote(a, b), promote(b, a));
            }
        }
        assert_eq!(promote(DType::F16, DType::BF16), DType::F32);
        assert_eq!(promote(DType::I64, DType::F16), DType::F16);
        assert_eq!(promote(DType::U8, DType::I8), DType::I16);
        assert_eq!(promote(DType::U32, DType::I32), DType::I64);
        assert_eq!(promote(DType::U64, DType::I8), DType::F32);
        assert_eq!(promote(DType::BOOL, DType::U8), DType::U8);
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(wrap_int(DType::U8, 300), 44);
        assert_eq!(wrap_int(DType::I8, 200), -56);
        assert_eq!(wrap_int(DType::U32, -1), i128::from(u32::MAX));
        assert_eq!(int_range(DType::I16), (-32768, 32767));
        assert_eq!(float_to_int(DType::I32, -1.9), -1);
    }
}
