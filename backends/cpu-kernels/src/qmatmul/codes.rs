//! Expansion of packed codes of any width to bytes.

use crate::Isa;
use crate::isa::dispatch;
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

/// How codes of a width come out of 64-bit lanes: eight codes are `bits` bytes, a permutation brings them
/// into a lane, and one instruction shifts every byte of a lane to its code.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "other processors have no such instruction")
)]
pub struct Unpacker {
    pub(crate) bits: usize,
    pub(crate) places: [u8; 64],
    /// As `places`, for the two vectors of a block of 128 codes (see `pairs`). Bytes from 64 on are those of the block's
    /// last 64.
    pub(crate) block_places: [[u8; 64]; 2],
    pub(crate) shifts: [u8; 64],
    /// The bits of a code.
    pub(crate) ones: u8,
}

#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "other processors have no such instruction")
)]
impl Unpacker {
    /// For codes of up to 8 bits.
    const fn new(bits: usize) -> Self {
        let mut of = Self {
            bits,
            block_places: [[0; 64]; 2],
            places: [0; 64],
            shifts: [0; 64],
            ones: 0xff >> (8 - bits),
        };
        let mut i = 0;
        while i < 64 {
            of.block_places[0][i] = Self::block_place(bits, 0, i);
            of.block_places[1][i] = Self::block_place(bits, 1, i);
            let place = (i / 8) * bits + i % 8;
            of.places[i] = if place < 63 { place } else { 63 } as u8;
            of.shifts[i] = ((i % 8) * bits) as u8;
            i += 1;
        }
        of
    }

    const fn block_place(bits: usize, vector: usize, i: usize) -> u8 {
        let all = 16 * bits;
        // A quarter of a vector is 16 codes of a run of 32.
        let eight = i / 16 * 4 + vector * 2 + i % 16 / 8;
        let byte = eight * bits + i % 8;
        let byte = if byte < all { byte } else { all - 1 };
        if byte < 64 {
            byte as u8
        } else {
            (byte + 128 - all) as u8
        }
    }

    /// The one of a width from 1 to 8.
    fn of(bits: usize) -> &'static Self {
        static ALL: [Unpacker; 8] = [
            Unpacker::new(1),
            Unpacker::new(2),
            Unpacker::new(3),
            Unpacker::new(4),
            Unpacker::new(5),
            Unpacker::new(6),
            Unpacker::new(7),
            Unpacker::new(8),
        ];
        &ALL[bits.clamp(1, 8) - 1]
    }

    /// Bytes of a block of 128 codes.
    pub(crate) fn block_bytes(&self) -> usize {
        16 * self.bits
    }

    /// None where the processor lacks the instructions, so that codes are better expanded to memory.
    pub(crate) fn in_registers(isa: Isa, bits: usize) -> Option<&'static Self> {
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Avx512Vnni && std::arch::is_x86_feature_detected!("avx512vbmi") {
            return Some(Self::of(bits));
        }
        let _ = (isa, bits);
        None
    }
}

/// Expands a row as [`expand`] does, 64 codes at a time where the processor shifts bytes by
/// different amounts (AVX-512 VBMI).
///
/// # Safety
/// As for [`expand`], for `isa`.
pub(crate) unsafe fn expand_row(isa: Isa, from: *const u8, bits: usize, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 && std::arch::is_x86_feature_detected!("avx512vbmi") {
        // SAFETY: the features are there; the codes are the caller's promise.
        unsafe { expand_by_shifts(from, bits, out) };
        return;
    }
    // SAFETY: forwarded to the caller.
    unsafe { run_expand(isa, from, bits, out) }
}

dispatch! {
    unsafe fn run_expand(from: *const u8, bits: usize, out: &mut [u8]) = expand
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,bmi2")]
unsafe fn expand_by_shifts(from: *const u8, bits: usize, out: &mut [u8]) {
    use core::arch::x86_64::*;
    let unpacker = Unpacker::of(bits);
    // SAFETY: 64 codes are `8 * bits` bytes, at most 64, and no others are loaded.
    unsafe {
        let places = _mm512_loadu_si512(unpacker.places.as_ptr().cast());
        let shifts = _mm512_loadu_si512(unpacker.shifts.as_ptr().cast());
        let ones = _mm512_set1_epi8(unpacker.ones as i8);
        let mut at = from;
        for out in out.chunks_mut(64) {
            let bytes = out.len() * bits / 8;
            let packed = _mm512_maskz_loadu_epi8(u64::MAX >> (64 - bytes), at.cast());
            let lanes = _mm512_permutexvar_epi8(places, packed);
            let codes = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, lanes), ones);
            _mm512_mask_storeu_epi8(out.as_mut_ptr().cast(), u64::MAX >> (64 - out.len()), codes);
            at = at.add(bytes);
        }
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
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                for n in [64usize, 32, 8] {
                    let mut out = vec![0; n];
                    // SAFETY: the packed bytes are all there.
                    unsafe { expand_row(isa, packed.as_ptr(), bits, &mut out) };
                    assert_eq!(out, codes[..n], "{bits} {n} {}", isa.name());
                }
            }
        }
    }
}
