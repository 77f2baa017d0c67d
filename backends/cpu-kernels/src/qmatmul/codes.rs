//! Expansion of packed codes of any width to bytes.

use crate::simd::Simd;

/// Expands `out.len()` codes (a multiple of 8) of `bits` bits. Eight codes are `bits` whole bytes.
///
/// # Safety
/// `out.len() * bits / 8` bytes are readable at `from`, and the CPU has the instruction set.
#[inline(always)]
pub(crate) unsafe fn expand<S: Simd>(from: *const u8, bits: usize, out: &mut [u8]) {
    let ones = u64::MAX >> (64 - bits);
    let mask = (0..8).fold(0u64, |mask, i| mask | (ones << (8 * i)));
    let eights = out.len() / 8;
    for i in 0..eights {
        // SAFETY: in the middle of a row eight bytes are there; at its end only `bits` are read.
        let packed = unsafe {
            let at = from.add(i * bits);
            if (i + 1) * bits + 8 <= eights * bits {
                at.cast::<u64>().read_unaligned()
            } else {
                let mut bytes = [0u8; 8];
                core::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bits);
                u64::from_ne_bytes(bytes)
            }
        };
        // SAFETY: the caller vouches for the instruction set.
        let codes = unsafe { S::deposit(u64::from_le(packed), mask) };
        out[i * 8..i * 8 + 8].copy_from_slice(&codes.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_out_in_order_for_every_width() {
        for bits in 2..=8usize {
            let codes: Vec<u8> = (0..64u32).map(|i| (i * 37 % (1 << bits)) as u8).collect();
            let mut packed = vec![0u8; 64 * bits / 8];
            for (i, code) in codes.iter().enumerate() {
                for b in 0..bits {
                    packed[(i * bits + b) / 8] |= ((code >> b) & 1) << ((i * bits + b) % 8);
                }
            }
            let mut out = vec![0; 64];
            // SAFETY: the packed bytes are all there.
            unsafe { expand::<crate::simd::scalar::Scalar8>(packed.as_ptr(), bits, &mut out) };
            assert_eq!(out, codes, "{bits}");
        }
    }
}
