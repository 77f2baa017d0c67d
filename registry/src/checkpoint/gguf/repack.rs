//! From ggml blocks to MLX's affine form, without loss.
//!
//! MLX's affine form is `scale * code + bias` with one scale and bias per group of consecutive elements
//! of a row, and the codes of a row as a little-endian bit stream: code `i` occupies the bits from
//! `i * bits`. (MLX says so for widths that divide 32; for 5 bits it follows from its `pack_factor` of 8
//! codes in 5 bytes, and the golden vectors confirm it with MLX itself.)
//! The types here have one scale, and a minimum or a fixed offset, per 32 elements, which is the same
//! arithmetic. `Q2_K`, `Q3_K` and `Q6_K` have groups of 16, which MLX's affine form lacks. `Q6_K` has a centred form,
//! `scale * (code - 32)`, for who takes that, and so have the types with a fixed offset (see `centred`).
//! Owns arithmetic. Must not know tensors or files.

use half::f16;

use super::dequant::half;
use super::dequant_k::{factors, split};
use super::ggml_type::GgmlType;

/// Elements that share a scale, in every type that is repacked.
pub const GROUP_SIZE: usize = 32;

/// Bits per code of a type that has MLX's arithmetic; `None` for the types that do not.
pub const fn packed_bits(ty: GgmlType) -> Option<u32> {
    match ty {
        GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q4_K => Some(4),
        GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5_K => Some(5),
        GgmlType::Q8_0 => Some(8),
        GgmlType::F32
        | GgmlType::F16
        | GgmlType::BF16
        | GgmlType::Q2_K
        | GgmlType::Q3_K
        | GgmlType::Q6_K => None,
    }
}

/// The codes of whole blocks as a bit stream: `out` holds `bits / 8` bytes an element.
pub fn pack_codes(ty: GgmlType, blocks: &[u8], out: &mut [u8]) {
    match ty {
        GgmlType::Q4_0 => each(blocks, out, |block: &[u8; 18], out: &mut [u8; 16]| {
            let [_, _, qs @ ..] = block;
            pack_16(qs, out);
        }),
        GgmlType::Q4_1 => each(blocks, out, |block: &[u8; 20], out: &mut [u8; 16]| {
            let [_, _, _, _, qs @ ..] = block;
            pack_16(qs, out);
        }),
        GgmlType::Q5_0 => each(blocks, out, |block: &[u8; 22], out: &mut [u8; 20]| {
            let [_, _, h0, h1, h2, h3, qs @ ..] = block;
            pack_fives(&[*h0, *h1, *h2, *h3], qs, out);
        }),
        GgmlType::Q5_1 => each(blocks, out, |block: &[u8; 24], out: &mut [u8; 20]| {
            let [_, _, _, _, h0, h1, h2, h3, qs @ ..] = block;
            pack_fives(&[*h0, *h1, *h2, *h3], qs, out);
        }),
        GgmlType::Q8_0 => each(blocks, out, |block: &[u8; 34], out: &mut [u8; 32]| {
            let [_, _, qs @ ..] = block;
            // Plus 128, which turns two's complement into an unsigned code.
            *out = qs.map(|q| q ^ 0x80);
        }),
        GgmlType::Q4_K => each(blocks, out, |block: &[u8; 144], out: &mut [u8; 128]| {
            let (_, qs) = split::<16, 128, 144>(block);
            for (qs, out) in qs
                .as_chunks::<32>()
                .0
                .iter()
                .zip(out.as_chunks_mut::<32>().0)
            {
                let (low, high) = out.split_at_mut(16);
                pack_nibbles(qs, 0, low);
                pack_nibbles(qs, 4, high);
            }
        }),
        GgmlType::Q5_K => each(blocks, out, |block: &[u8; 176], out: &mut [u8; 160]| {
            let (_, rest) = split::<16, 160, 176>(block);
            let (qh, qs) = split::<32, 128, 160>(rest);
            let groups = qs
                .as_chunks::<32>()
                .0
                .iter()
                .zip(out.as_chunks_mut::<40>().0);
            for (i, (qs, out)) in groups.enumerate() {
                let (low, high) = out.split_at_mut(20);
                pack_five_bits_k(qh, 2 * i, qs, 0, low);
                pack_five_bits_k(qh, 2 * i + 1, qs, 4, high);
            }
        }),
        GgmlType::Q6_K => each(blocks, out, super::centred::pack_q6_k),
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 | GgmlType::Q2_K | GgmlType::Q3_K => {}
    }
}

/// Scale and bias of every group of whole blocks; each of `scales` and `biases` has one place a group.
pub fn affine_factors(ty: GgmlType, blocks: &[u8], scales: &mut [f32], biases: &mut [f32]) {
    let mut groups = scales.iter_mut().zip(biases);
    let mut put = |scale: f32, bias: f32| {
        if let Some((s, b)) = groups.next() {
            *s = scale;
            *b = bias;
        }
    };
    // A fixed offset is a power of two, so the bias is as exact as the scale.
    let mut offset = |size: usize, offset: f32| {
        for block in blocks.chunks_exact(size) {
            if let [d0, d1, ..] = block {
                let d = half(*d0, *d1);
                put(d, -offset * d);
            }
        }
    };
    match ty {
        GgmlType::Q4_0 => offset(18, 8.0),
        GgmlType::Q5_0 => offset(22, 16.0),
        GgmlType::Q8_0 => offset(34, 128.0),
        GgmlType::Q4_1 | GgmlType::Q5_1 => {
            for block in blocks.chunks_exact(ty.block_bytes()) {
                if let [d0, d1, m0, m1, ..] = block {
                    put(half(*d0, *d1), half(*m0, *m1));
                }
            }
        }
        GgmlType::Q4_K | GgmlType::Q5_K => {
            for block in blocks.chunks_exact(ty.block_bytes()) {
                let Some((head, _)) = block.split_first_chunk::<16>() else {
                    continue;
                };
                let [d0, d1, m0, m1, packed @ ..] = head;
                for (scale, min) in factors(half(*d0, *d1), half(*m0, *m1), packed) {
                    put(scale, -min);
                }
            }
        }
        GgmlType::F32
        | GgmlType::F16
        | GgmlType::BF16
        | GgmlType::Q2_K
        | GgmlType::Q3_K
        | GgmlType::Q6_K => {}
    }
}

/// Scale of a block of one group as bits of a half. `None` when it is no finite one.
pub(super) fn half_scale(block: &[u8]) -> Option<u16> {
    let [d0, d1, ..] = block else {
        return None;
    };
    let scale = u16::from_le_bytes([*d0, *d1]);
    is_finite(scale).then_some(scale)
}

/// As [`half_scale`], with the bias. `None` for types whose factors are no halves, too.
pub(super) fn half_factors(ty: GgmlType, block: &[u8]) -> Option<(u16, u16)> {
    let [d0, d1, m0, m1, ..] = block else {
        return None;
    };
    let scale = u16::from_le_bytes([*d0, *d1]);
    let bias = match ty {
        GgmlType::Q4_1 | GgmlType::Q5_1 => u16::from_le_bytes([*m0, *m1]),
        GgmlType::Q4_0 => minus_times_power(scale, 3),
        GgmlType::Q5_0 => minus_times_power(scale, 4),
        GgmlType::Q8_0 => minus_times_power(scale, 7),
        _ => return None,
    };
    (is_finite(scale) && is_finite(bias)).then_some((scale, bias))
}

fn is_finite(half: u16) -> bool {
    half & 0x7c00 != 0x7c00
}

/// Minus a half times two to the `log2`, infinite when beyond the range.
fn minus_times_power(half: u16, log2: u16) -> u16 {
    let exponent = half >> 10 & 0x1f;
    if exponent == 0 {
        // Zero or subnormal; the product of a number so small is in the range.
        let product = -f16::from_bits(half).to_f32() * f32::from(1u16 << log2);
        return f16::from_f32(product).to_bits();
    }
    match exponent + log2 {
        ..=0x1e => (half ^ 0x8000) + (log2 << 10),
        _ => f16::INFINITY.to_bits(),
    }
}

pub(super) fn each<const BYTES: usize, const OUT: usize>(
    blocks: &[u8],
    out: &mut [u8],
    pack: impl Fn(&[u8; BYTES], &mut [u8; OUT]),
) {
    for (block, out) in blocks.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        pack(block, out);
    }
}

/// A group of 32: elements 0-15 are the low nibbles, 16-31 the high ones.
fn pack_16(qs: &[u8; 16], out: &mut [u8; 16]) {
    let (low, high) = out.split_at_mut(8);
    pack_nibbles(qs, 0, low);
    pack_nibbles(qs, 4, high);
}

/// The nibbles at bit `shift` of each byte, two to a byte.
fn pack_nibbles(qs: &[u8], shift: u32, out: &mut [u8]) {
    for (qs, out) in qs.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<4>().0) {
        let x = u64::from_le_bytes(*qs) >> shift & 0x0f0f_0f0f_0f0f_0f0f;
        let x = (x | x >> 4) & 0x00ff_00ff_00ff_00ff;
        let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
        let x = (x | x >> 16) as u32;
        *out = x.to_le_bytes();
    }
}

fn pack_fives(qh: &[u8; 4], qs: &[u8; 16], out: &mut [u8; 20]) {
    let (low, high) = out.split_at_mut(10);
    let (low_bits, high_bits) = split::<2, 2, 4>(qh);
    for (shift, bits, out) in [(0, low_bits, low), (4, high_bits, high)] {
        let halves = qs
            .as_chunks::<8>()
            .0
            .iter()
            .zip(bits)
            .zip(out.as_chunks_mut::<5>().0);
        for ((qs, bits), out) in halves {
            let nibbles = u64::from_le_bytes(*qs) >> shift & 0x0f0f_0f0f_0f0f_0f0f;
            *out = fives(nibbles | spread(*bits) << 4);
        }
    }
}

/// A group of 32 whose fifth bits are bit `group` of the bytes of `qh`.
fn pack_five_bits_k(qh: &[u8; 32], group: usize, qs: &[u8; 32], shift: u32, out: &mut [u8]) {
    let eights = qs.as_chunks::<8>().0.iter().zip(qh.as_chunks::<8>().0);
    for ((qs, qh), out) in eights.zip(out.as_chunks_mut::<5>().0) {
        let nibbles = u64::from_le_bytes(*qs) >> shift & 0x0f0f_0f0f_0f0f_0f0f;
        let fifth = u64::from_le_bytes(*qh) >> group & 0x0101_0101_0101_0101;
        *out = fives(nibbles | fifth << 4);
    }
}

/// Bit `i` of `bits` as byte `i`, 0 or 1.
fn spread(bits: u8) -> u64 {
    let copies = u64::from(bits) * 0x0101_0101_0101_0101;
    let picked = copies & 0x8040_2010_0804_0201;
    // Any bit set in a byte carries into its bit 7, and no further.
    (picked + 0x7f7f_7f7f_7f7f_7f7f) >> 7 & 0x0101_0101_0101_0101
}

/// Eight bytes of five bits each as forty bits.
fn fives(x: u64) -> [u8; 5] {
    let x = x & 0x001f_001f_001f_001f | x >> 3 & 0x03e0_03e0_03e0_03e0;
    let x = x & 0x0000_03ff_0000_03ff | x >> 6 & 0x000f_fc00_000f_fc00;
    let x = x & 0x0000_0000_000f_ffff | x >> 12 & 0x0000_00ff_fff0_0000;
    let [a, b, c, d, e, ..] = x.to_le_bytes();
    [a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    use super::super::dequant::dequantize;
    use super::*;
    use proptest::prelude::*;

    const PACKED: [GgmlType; 7] = [
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
    ];

    /// Code `i` of a bit stream, one bit at a time.
    fn code(stream: &[u8], bits: usize, i: usize) -> u32 {
        (0..bits)
            .map(|b| i * bits + b)
            .enumerate()
            .fold(0, |code, (place, bit)| {
                code | u32::from(stream[bit / 8] >> (bit % 8) & 1) << place
            })
    }

    /// MLX's affine arithmetic on a packed row.
    fn affine(ty: GgmlType, blocks: &[u8]) -> Vec<f32> {
        let bits = packed_bits(ty).unwrap() as usize;
        let elements = blocks.len() / ty.block_bytes() * ty.block_elements();
        let mut stream = vec![0u8; elements * bits / 8];
        pack_codes(ty, blocks, &mut stream);
        let (mut scales, mut biases) = (vec![0f32; elements / 32], vec![0f32; elements / 32]);
        affine_factors(ty, blocks, &mut scales, &mut biases);
        (0..elements)
            .map(|i| scales[i / 32] * code(&stream, bits, i) as f32 + biases[i / 32])
            .collect()
    }

    fn exact(ty: GgmlType, blocks: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; blocks.len() / ty.block_bytes() * ty.block_elements()];
        dequantize(ty, blocks, &mut out);
        out
    }

    /// Random blocks whose halves are finite, with a share of extreme ones.
    fn blocks(ty: GgmlType) -> impl Strategy<Value = Vec<u8>> {
        let extreme = prop::sample::select(vec![
            0x0000u16, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x3c00,
        ]);
        let finite = any::<u16>().prop_map(|h| if h & 0x7c00 == 0x7c00 { h & !0x4000 } else { h });
        let half = prop_oneof![1 => extreme, 3 => finite];
        let bytes = prop::collection::vec(any::<u8>(), ty.block_bytes());
        let block = (bytes, half.clone(), half).prop_map(move |(mut bytes, d, m)| {
            bytes[..2].copy_from_slice(&d.to_le_bytes());
            if !matches!(ty, GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0) {
                bytes[2..4].copy_from_slice(&m.to_le_bytes());
            }
            bytes
        });
        prop::collection::vec(block, 1..5).prop_map(|blocks| blocks.concat())
    }

    #[test]
    fn repacking_is_exact_for_every_block() {
        for ty in PACKED {
            let mut runner = proptest::test_runner::TestRunner::deterministic();
            runner
                .run(&blocks(ty), |blocks| {
                    prop_assert_eq!(affine(ty, &blocks), exact(ty, &blocks), "{}", ty);
                    Ok(())
                })
                .unwrap();
        }
    }

    #[test]
    fn half_factors_equal_single_ones() {
        for bits in 0..=u16::MAX {
            for (log2, factor) in [(3, -8.0f32), (4, -16.0), (7, -128.0)] {
                let d = f16::from_bits(bits);
                if !d.is_finite() {
                    assert!(!is_finite(minus_times_power(bits, log2)));
                    continue;
                }
                let product = f16::from_bits(minus_times_power(bits, log2));
                let exact = factor * d.to_f32();
                match exact.abs() <= 65504.0 {
                    true => assert_eq!(product.to_f32().to_bits(), exact.to_bits(), "{bits:#x}"),
                    false => assert!(!product.is_finite(), "{bits:#x}"),
                }
            }
        }
    }

    #[test]
    fn five_bit_words_by_hand() {
        // Codes 0..8 in forty bits, least significant first.
        let bits: u64 = (0u64..8).fold(0, |bits, code| bits | code << (5 * code));
        assert_eq!(fives(0x0706_0504_0302_0100), bits.to_le_bytes()[..5]);
        assert_eq!(fives(0x1f1f_1f1f_1f1f_1f1f), [0xff; 5]);
        assert_eq!(spread(0b1000_0101), 0x0100_0000_0001_0001);
        assert_eq!(spread(0xff), 0x0101_0101_0101_0101);
    }

    #[test]
    fn four_bit_words_by_hand() {
        // Element i has code i % 16: words 0x76543210 and 0xfedcba98, twice.
        let qs: Vec<u8> = (0u8..16).map(|i| i << 4 | i).collect();
        let mut out = [0u8; 16];
        pack_codes(GgmlType::Q4_0, &[&[0, 0x3c][..], &qs].concat(), &mut out);
        let words: Vec<u32> = out
            .as_chunks()
            .0
            .iter()
            .map(|w| u32::from_le_bytes(*w))
            .collect();
        assert_eq!(words, [0x7654_3210, 0xfedc_ba98, 0x7654_3210, 0xfedc_ba98]);
    }
}
