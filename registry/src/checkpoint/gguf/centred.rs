//! The centred form: `scale * (code - 2^(bits - 1))`, a scale per group and no bias.
//!
//! For types whose offset is fixed and that MLX's affine form lacks or holds only with a bias that says nothing. `Q6_K`
//! has a scale of 8 bits per 16 elements and one of 16 bits per 256; their product is exact in `F32`, and not in
//! a half: 8 bits an element in all, where expansion takes 16 and rounds. `Q4_0`, `Q5_0` and `Q8_0` have a half per 32
//! elements, so that half a bit an element is saved. Only for who says that it takes the form.
//! Owns arithmetic. Must not know tensors or files.

use super::dequant::half;
use super::dequant_k::split;
use super::ggml_type::GgmlType;
use super::repack::{GROUP_SIZE, packed_bits};

/// A centred form that somebody takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CentredForm {
    /// Bits per code.
    pub bits: u32,
    /// Consecutive elements of a row that share a scale.
    pub group_size: u32,
}

/// The centred form of a type.
pub const fn centred_form(ty: GgmlType) -> Option<CentredForm> {
    match ty {
        GgmlType::Q6_K => Some(CentredForm {
            bits: 6,
            group_size: 16,
        }),
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => match packed_bits(ty) {
            Some(bits) => Some(CentredForm {
                bits,
                group_size: GROUP_SIZE as u32,
            }),
            None => None,
        },
        _ => None,
    }
}

/// Scales of whole blocks, in the order of their groups.
pub(super) fn centred_scales(ty: GgmlType, blocks: &[u8], out: &mut [f32]) {
    if ty != GgmlType::Q6_K {
        // One half in front of every group.
        for (block, out) in blocks.chunks_exact(ty.block_bytes()).zip(out) {
            if let [d0, d1, ..] = block {
                *out = half(*d0, *d1);
            }
        }
        return;
    }
    let blocks = blocks.as_chunks::<210>().0;
    for (block, out) in blocks.iter().zip(out.as_chunks_mut::<16>().0) {
        let (_, rest) = split::<192, 18, 210>(block);
        let (scales, [d0, d1]) = split::<16, 2, 18>(rest);
        let d = half(*d0, *d1);
        for (scale, out) in scales.iter().zip(out) {
            *out = d * f32::from(scale.cast_signed());
        }
    }
}

/// The codes of a block as a bit stream, in the order of its elements (see `dequant_k::q6_k` for where they lie).
pub(super) fn pack_q6_k(block: &[u8; 210], out: &mut [u8; 192]) {
    let (low, rest) = split::<128, 82, 210>(block);
    let (high, _) = split::<64, 18, 82>(rest);
    // A half block of 128 elements is four runs of 32: low nibbles of its first and second 32 bytes, then the high ones;
    // run r has its upper two bits at bits 2 * r of the half block's 32 bytes of them.
    let halves = low.as_chunks::<64>().0.iter().zip(high.as_chunks::<32>().0);
    for ((low, high), out) in halves.zip(out.as_chunks_mut::<96>().0) {
        let (first, second) = split::<32, 32, 64>(low);
        let runs = [(first, 0), (second, 0), (first, 4), (second, 4)];
        for (r, ((low, shift), out)) in runs.iter().zip(out.as_chunks_mut::<24>().0).enumerate() {
            let eights = low.as_chunks::<8>().0.iter().zip(high.as_chunks::<8>().0);
            for ((low, high), out) in eights.zip(out.as_chunks_mut::<6>().0) {
                let nibbles = u64::from_le_bytes(*low) >> shift & 0x0f0f_0f0f_0f0f_0f0f;
                let upper = u64::from_le_bytes(*high) >> (2 * r) & 0x0303_0303_0303_0303;
                *out = sixes(nibbles | upper << 4);
            }
        }
    }
}

/// Eight bytes of six bits each as 48 bits.
fn sixes(x: u64) -> [u8; 6] {
    let x = x & 0x003f_003f_003f_003f | x >> 2 & 0x0fc0_0fc0_0fc0_0fc0;
    let x = x & 0x0000_0fff_0000_0fff | x >> 4 & 0x00ff_f000_00ff_f000;
    let x = x & 0x0000_0000_00ff_ffff | x >> 8 & 0x0000_ffff_ff00_0000;
    let [a, b, c, d, e, f, ..] = x.to_le_bytes();
    [a, b, c, d, e, f]
}

#[cfg(test)]
mod tests {
    use super::super::dequant::dequantize;
    use super::super::repack::pack_codes;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn six_bit_words_by_hand() {
        let bits: u64 = (0u64..8).fold(0, |bits, code| bits | (code + 50) << (6 * code));
        assert_eq!(sixes(0x3938_3736_3534_3332), bits.to_le_bytes()[..6]);
        assert_eq!(sixes(0x3f3f_3f3f_3f3f_3f3f), [0xff; 6]);
    }

    fn code(stream: &[u8], bits: usize, i: usize) -> u32 {
        (0..bits).fold(0, |code, place| {
            let bit = bits * i + place;
            code | u32::from(stream[bit / 8] >> (bit % 8) & 1) << place
        })
    }

    proptest! {
        /// Random blocks come back to the last bit of the single that the definition gives.
        #[test]
        fn repacking_is_exact(
            blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 208), 1..4),
            d in any::<u16>(),
        ) {
            let d = if d & 0x7c00 == 0x7c00 { d & !0x4000 } else { d };
            let blocks: Vec<u8> = blocks
                .into_iter()
                .flat_map(|block| [block, d.to_le_bytes().to_vec()].concat())
                .collect();
            let n = blocks.len() / 210 * 256;
            let (mut codes, mut scales) = (vec![0; n / 8 * 6], vec![0.0; n / 16]);
            pack_codes(GgmlType::Q6_K, &blocks, &mut codes);
            centred_scales(GgmlType::Q6_K, &blocks, &mut scales);
            let mut exact = vec![f32::NAN; n];
            dequantize(GgmlType::Q6_K, &blocks, &mut exact);
            for (i, exact) in exact.iter().enumerate() {
                let found = scales[i / 16] * (code(&codes, 6, i) as f32 - 32.0);
                prop_assert_eq!(found, *exact, "{}", i);
            }
        }

        #[test]
        fn groups_with_a_scale_in_front_are_exact(
            ty in prop::sample::select(vec![GgmlType::Q4_0, GgmlType::Q5_0, GgmlType::Q8_0]),
            bytes in prop::collection::vec(any::<u8>(), 34 * 3),
            d in any::<u16>(),
        ) {
            let d = if d & 0x7c00 == 0x7c00 { d & !0x4000 } else { d };
            let mut blocks = bytes[..3 * ty.block_bytes()].to_vec();
            for block in blocks.chunks_exact_mut(ty.block_bytes()) {
                block[..2].copy_from_slice(&d.to_le_bytes());
            }
            let bits = centred_form(ty).unwrap().bits as usize;
            let (mut codes, mut scales) = (vec![0; 96 / 8 * bits], vec![0.0; 3]);
            pack_codes(ty, &blocks, &mut codes);
            centred_scales(ty, &blocks, &mut scales);
            let mut exact = vec![f32::NAN; 96];
            dequantize(ty, &blocks, &mut exact);
            let middle = (1u32 << (bits - 1)) as f32;
            for (i, exact) in exact.iter().enumerate() {
                let found = scales[i / 32] * (code(&codes, bits, i) as f32 - middle);
                prop_assert_eq!(found, *exact, "{} {}", ty, i);
            }
        }
    }
}
