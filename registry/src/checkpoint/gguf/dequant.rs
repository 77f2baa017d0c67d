//! From ggml blocks to `f32`: the exact meaning of each type, and the oracle of the repacking.
//!
//! Written after the block structs and `dequantize_row_*` of ggml (`ggml-common.h`, `ggml-quants.c`).
//! Every product below is exact in single precision; only adding a minimum rounds, once.
//! Owns arithmetic. Must not know tensors or files.

use half::{bf16, f16};

use super::ggml_type::GgmlType;

/// A half stored as two little-endian bytes.
pub(super) fn half(low: u8, high: u8) -> f32 {
    f16::from_le_bytes([low, high]).to_f32()
}

/// Decodes whole blocks. `out` must have room for exactly the elements of `blocks`; what does not
/// fill a block is left alone.
pub fn dequantize(ty: GgmlType, blocks: &[u8], out: &mut [f32]) {
    match ty {
        GgmlType::F32 => each(blocks, out, |b: &[u8; 4], o: &mut [f32; 1]| {
            *o = [f32::from_le_bytes(*b)]
        }),
        GgmlType::F16 => each(blocks, out, |b: &[u8; 2], o: &mut [f32; 1]| {
            *o = [f16::from_le_bytes(*b).to_f32()]
        }),
        GgmlType::BF16 => each(blocks, out, |b: &[u8; 2], o: &mut [f32; 1]| {
            *o = [bf16::from_le_bytes(*b).to_f32()]
        }),
        GgmlType::Q4_0 => each(blocks, out, q4_0),
        GgmlType::Q4_1 => each(blocks, out, q4_1),
        GgmlType::Q5_0 => each(blocks, out, q5_0),
        GgmlType::Q5_1 => each(blocks, out, q5_1),
        GgmlType::Q8_0 => each(blocks, out, q8_0),
        GgmlType::Q2_K => each(blocks, out, super::dequant_k::q2_k),
        GgmlType::Q3_K => each(blocks, out, super::dequant_k::q3_k),
        GgmlType::Q4_K => each(blocks, out, super::dequant_k::q4_k),
        GgmlType::Q5_K => each(blocks, out, super::dequant_k::q5_k),
        GgmlType::Q6_K => each(blocks, out, super::dequant_k::q6_k),
    }
}

fn each<const BYTES: usize, const ELEMENTS: usize>(
    blocks: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (block, out) in blocks.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}

/// Element `i` is the low nibble of byte `i` and element `i + 16` its high nibble.
fn nibbles(qs: &[u8; 16], out: &mut [f32; 32], decode: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for ((q, low), high) in qs.iter().zip(low).zip(high) {
        *low = decode(q & 0x0f);
        *high = decode(q >> 4);
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let [d0, d1, qs @ ..] = block;
    let d = half(*d0, *d1);
    nibbles(qs, out, |q| d * (f32::from(q) - 8.0));
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let [d0, d1, m0, m1, qs @ ..] = block;
    let (d, m) = (half(*d0, *d1), half(*m0, *m1));
    nibbles(qs, out, |q| d * f32::from(q) + m);
}

/// As [`nibbles`], with bit `i` of `high_bits` as the fifth bit of element `i`.
fn five_bits(high_bits: u32, qs: &[u8; 16], out: &mut [f32; 32], decode: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (i, ((q, low), high)) in qs.iter().zip(low).zip(high).enumerate() {
        let fifth = |bit: usize| ((high_bits >> bit & 1) << 4) as u8;
        *low = decode(q & 0x0f | fifth(i));
        *high = decode(q >> 4 | fifth(i + 16));
    }
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let [d0, d1, h0, h1, h2, h3, qs @ ..] = block;
    let d = half(*d0, *d1);
    let high_bits = u32::from_le_bytes([*h0, *h1, *h2, *h3]);
    five_bits(high_bits, qs, out, |q| d * (f32::from(q) - 16.0));
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let [d0, d1, m0, m1, h0, h1, h2, h3, qs @ ..] = block;
    let (d, m) = (half(*d0, *d1), half(*m0, *m1));
    let high_bits = u32::from_le_bytes([*h0, *h1, *h2, *h3]);
    five_bits(high_bits, qs, out, |q| d * f32::from(q) + m);
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let [d0, d1, qs @ ..] = block;
    let d = half(*d0, *d1);
    for (q, out) in qs.iter().zip(out) {
        *out = d * f32::from(q.cast_signed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One half in a block: 1.5 is 0x3e00, 0.5 is 0x3800.
    const D: [u8; 2] = [0x00, 0x3e];
    const M: [u8; 2] = [0x00, 0x38];

    fn decode(ty: GgmlType, block: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; block.len() / ty.block_bytes() * ty.block_elements()];
        dequantize(ty, block, &mut out);
        out
    }

    #[test]
    fn four_bit_nibbles_are_sixteen_apart() {
        // Byte i holds i (low) and 15 - i (high).
        let qs: Vec<u8> = (0u8..16).map(|i| (15 - i) << 4 | i).collect();
        let codes: Vec<f32> = (0..16).chain((0..16).rev()).map(|q| q as f32).collect();

        let q4_0 = decode(GgmlType::Q4_0, &[&D[..], &qs].concat());
        let expected: Vec<f32> = codes.iter().map(|q| 1.5 * (q - 8.0)).collect();
        assert_eq!(q4_0, expected);

        let q4_1 = decode(GgmlType::Q4_1, &[&D[..], &M, &qs].concat());
        let expected: Vec<f32> = codes.iter().map(|q| 1.5 * q + 0.5).collect();
        assert_eq!(q4_1, expected);
    }

    #[test]
    fn the_fifth_bits_are_a_word_of_their_own() {
        // Elements 0 and 31 have the fifth bit; their nibbles are 1 and 2, all others 0.
        let mut qs = [0u8; 16];
        qs[0] = 0x01;
        qs[15] = 0x20;
        let high = 0x8000_0001u32.to_le_bytes();

        let mut codes = [0.0f32; 32];
        codes[0] = 17.0;
        codes[31] = 18.0;
        let q5_0 = decode(GgmlType::Q5_0, &[&D[..], &high, &qs].concat());
        assert_eq!(q5_0, codes.map(|q| 1.5 * (q - 16.0)));
        let q5_1 = decode(GgmlType::Q5_1, &[&D[..], &M, &high, &qs].concat());
        assert_eq!(q5_1, codes.map(|q| 1.5 * q + 0.5));
    }

    #[test]
    fn eight_bit_codes_are_signed() {
        let mut qs = [0u8; 32];
        qs[1] = 0x7f;
        qs[2] = 0x80;
        let mut expected = [0.0f32; 32];
        expected[1] = 1.5 * 127.0;
        expected[2] = 1.5 * -128.0;
        assert_eq!(decode(GgmlType::Q8_0, &[&D[..], &qs].concat()), expected);
    }

    #[test]
    fn plain_types_are_converted() {
        assert_eq!(decode(GgmlType::F16, &[D, M].concat()), [1.5, 0.5]);
        assert_eq!(decode(GgmlType::BF16, &[0xc0, 0x3f]), [1.5]);
        assert_eq!(decode(GgmlType::F32, &1.5f32.to_le_bytes()), [1.5]);
    }
}
