//! Activations of 16 bits: widened before a kernel, rounded once after it.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

/// A float of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// Five bits of exponent, ten of mantissa.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl Half {
    /// The number that bits stand for.
    pub fn value(self, bits: u16) -> f32 {
        match self {
            Self::F16 => f16::from_bits(bits).to_f32(),
            Self::Bf16 => bf16::from_bits(bits).to_f32(),
        }
    }

    /// The nearest number of this type.
    pub fn rounded(self, x: f32) -> f32 {
        match self {
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// The numbers that bits stand for, exactly. Both have the same length.
    pub fn widen(self, bits: &[u16], to: &mut [f32]) {
        match self {
            Self::F16 => bits.reinterpret_cast::<f16>().convert_to_f32_slice(to),
            Self::Bf16 => bits.reinterpret_cast::<bf16>().convert_to_f32_slice(to),
        }
    }

    /// The nearest numbers, the even one of two that are as near; beyond the largest is infinity. Both have the same length.
    pub fn narrow(self, numbers: &[f32], to: &mut [u16]) {
        match self {
            Self::F16 => (to.reinterpret_cast_mut::<f16>()).convert_from_f32_slice(numbers),
            Self::Bf16 => (to.reinterpret_cast_mut::<bf16>()).convert_from_f32_slice(numbers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [Half; 2] = [Half::F16, Half::Bf16];

    #[test]
    fn every_number_comes_back_as_itself() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for half in BOTH {
            let (mut wide, mut back) = (vec![0.0; all.len()], vec![0; all.len()]);
            half.widen(&all, &mut wide);
            half.narrow(&wide, &mut back);
            for ((bits, x), back) in all.iter().zip(&wide).zip(&back) {
                assert_eq!(
                    half.value(*bits).to_bits(),
                    x.to_bits(),
                    "{half:?} {bits:04x}"
                );
                // What is no number stays none; which one is the processor's to say.
                assert!(
                    bits == back || (x.is_nan() && half.value(*back).is_nan()),
                    "{half:?} {bits:04x}"
                );
            }
        }
    }

    #[test]
    fn what_lies_between_goes_to_the_nearer_and_halfway_to_the_even_one() {
        let given = [
            1.0 + 0.5f32.powi(11),
            1.0 + 3.0 * 0.5f32.powi(11),
            65_520.0,
            1e-8,
        ];
        let mut to = [0; 4];
        Half::F16.narrow(&given, &mut to);
        assert_eq!(
            to.map(|x| Half::F16.value(x)),
            [1.0, 1.0 + 0.5f32.powi(9), f32::INFINITY, 0.0]
        );
        let given = [
            1.0 + 0.5f32.powi(8),
            1.0 + 3.0 * 0.5f32.powi(8),
            f32::MAX,
            -1e-45,
        ];
        Half::Bf16.narrow(&given, &mut to);
        assert_eq!(
            to.map(|x| Half::Bf16.value(x)),
            [1.0, 1.0 + 0.5f32.powi(6), f32::INFINITY, 0.0]
        );
    }
}
