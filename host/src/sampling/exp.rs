//! The exponential function of whole rows.
//!
//! In plain arithmetic that the compiler turns into wide instructions, and equal on every machine, which a library's
//! function is not.

/// `e^x` for `x` up to 0, exact to 2e-7 of itself. What is below `e^-87` counts as nothing.
///
/// `x = n ln 2 + r` with a whole `n`: the power of two is written into the exponent, `e^r` is its Taylor series.
pub(super) fn exp(x: f32) -> f32 {
    /// Adding it leaves the nearest whole number in the last bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first short enough to be multiplied without rounding.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const COEFFICIENTS: [f32; 8] = [
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let is_something = x > -87.0;
    let x = if is_something { x } else { 0.0 };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let series = COEFFICIENTS.iter().fold(0.0, |sum, c| sum * r + c);
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let power = f32::from_bits(exponent.wrapping_add(127) << 23);
    if is_something { series * power } else { 0.0 }
}

/// The sum of `e^((logit - max) * scale)`. `max` is the largest logit.
pub(super) fn sum(logits: &[f32], max: f32, scale: f32) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0f64; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(exp((logit - max) * scale));
        }
    }
    let rest = rest
        .iter()
        .map(|logit| f64::from(exp((logit - max) * scale)));
    lanes.iter().sum::<f64>() + rest.sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_exponential_function() {
        assert_eq!((exp(0.0), exp(-0.0)), (1.0, 1.0));
        for step in 0..86_900 {
            let x = -(step as f32) * 1e-3;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) / exact - 1.0).abs();
            assert!(error < 2e-7, "{x}: {error}");
        }
        assert_eq!((exp(f32::NEG_INFINITY), exp(-87.5)), (0.0, 0.0));
        let logits = [
            1.0,
            -2.0,
            f32::NEG_INFINITY,
            0.5,
            1.0,
            -7.0,
            0.0,
            -1.0,
            0.25,
            -90.0,
        ];
        let slow: f64 = logits
            .iter()
            .map(|logit| ((f64::from(*logit) - 1.0) * 0.5).exp())
            .sum();
        assert!((sum(&logits, 1.0, 0.5) - slow).abs() < 1e-6);
    }
}
