//! From ggml's blocks of 256 ("K" types) to `f32`.
//!
//! Written after the block structs and `dequantize_row_q*_K` of ggml. A block is cut into groups of 16
//! or 32, whose scales are small integers times one half.

use super::dequant::half;

/// Scales and minima of the eight groups of 32, six bits each, in twelve bytes: bytes 0-3 and 4-7
/// hold scales and minima of the groups 0-3 in their low six bits; bytes 8-11 hold the low nibbles of
/// those of the groups 4-7, whose upper two bits are the upper two of bytes 0-3 and 4-7.
pub(super) fn scales_and_minima(packed: &[u8; 12]) -> [(u8, u8); 8] {
    let [s0, s1, s2, s3, m0, m1, m2, m3, r0, r1, r2, r3] = *packed;
    let first = |s: u8, m: u8| (s & 63, m & 63);
    let last = |s: u8, m: u8, rest: u8| (rest & 0x0f | (s >> 6) << 4, rest >> 4 | (m >> 6) << 4);
    [
        first(s0, m0),
        first(s1, m1),
        first(s2, m2),
        first(s3, m3),
        last(s0, m0, r0),
        last(s1, m1, r1),
        last(s2, m2, r2),
        last(s3, m3, r3),
    ]
}

/// `d * scale` and `dmin * minimum` of the eight groups of a `Q4_K` or `Q5_K` block.
pub(super) fn factors(d: f32, dmin: f32, packed: &[u8; 12]) -> [(f32, f32); 8] {
    scales_and_minima(packed).map(|(scale, min)| (d * f32::from(scale), dmin * f32::from(min)))
}

pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let [d0, d1, m0, m1, rest @ ..] = block;
    let (packed, qs) = split::<12, 128, 140>(rest);
    let factors = factors(half(*d0, *d1), half(*m0, *m1), packed);
    // Byte i of 32 holds element i of an even group (low) and of the odd group after it (high).
    let pairs = factors.as_chunks::<2>().0.iter();
    for ((pair, qs), out) in pairs
        .zip(qs.chunks_exact(32))
        .zip(out.as_chunks_mut::<64>().0)
    {
        let [(low_d, low_m), (high_d, high_m)] = *pair;
        let (low, high) = out.split_at_mut(32);
        for ((q, low), high) in qs.iter().zip(low).zip(high) {
            *low = low_d * f32::from(q & 0x0f) - low_m;
            *high = high_d * f32::from(q >> 4) - high_m;
        }
    }
}

pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let [d0, d1, m0, m1, rest @ ..] = block;
    let (packed, rest) = split::<12, 160, 172>(rest);
    let (qh, qs) = split::<32, 128, 160>(rest);
    let factors = factors(half(*d0, *d1), half(*m0, *m1), packed);
    let pairs = factors.as_chunks::<2>().0.iter();
    let groups = pairs
        .zip(qs.chunks_exact(32))
        .zip(out.as_chunks_mut::<64>().0);
    for (i, ((pair, qs), out)) in groups.enumerate() {
        let [(low_d, low_m), (high_d, high_m)] = *pair;
        let (low, high) = out.split_at_mut(32);
        for (((q, h), low), high) in qs.iter().zip(qh).zip(low).zip(high) {
            // Bit g of byte i of `qh` is the fifth bit of element i of group g.
            let h = h >> (2 * i);
            *low = low_d * f32::from(q & 0x0f | (h & 1) << 4) - low_m;
            *high = high_d * f32::from(q >> 4 | (h & 2) << 3) - high_m;
        }
    }
}

pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, rest) = split::<16, 68, 84>(block);
    let (qs, rest) = split::<64, 4, 68>(rest);
    let [d0, d1, m0, m1] = *rest;
    let (d, dmin) = (half(d0, d1), half(m0, m1));
    for (group, (scale, out)) in scales.iter().zip(out.as_chunks_mut::<16>().0).enumerate() {
        let (scale, min) = (d * f32::from(scale & 0x0f), dmin * f32::from(scale >> 4));
        for (q, out) in crumbs(qs, group).zip(out) {
            *out = scale * f32::from(q) - min;
        }
    }
}

pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (mask, rest) = split::<32, 78, 110>(block);
    let (qs, rest) = split::<64, 14, 78>(rest);
    let (packed, rest) = split::<12, 2, 14>(rest);
    let [d0, d1] = *rest;
    let d = half(d0, d1);
    let scales = q3_scales(packed);
    for (group, (scale, out)) in scales.iter().zip(out.as_chunks_mut::<16>().0).enumerate() {
        let scale = d * f32::from(*scale);
        // Bit g of byte i of the mask belongs to element i of the g-th 32; clear means minus 4.
        let half_of_mask = mask.iter().skip(group % 2 * 16);
        for ((q, bits), out) in crumbs(qs, group).zip(half_of_mask).zip(out) {
            let minus = if bits >> (group / 2) & 1 == 0 {
                4.0
            } else {
                0.0
            };
            *out = scale * (f32::from(q) - minus);
        }
    }
}

/// Sixteen scales of six bits in twelve bytes: bytes 0-7 hold the low nibbles of scales 0-7 (low) and
/// 8-15 (high); bytes 8-11 hold the upper two bits, scale `i` at bits `2 * (i / 4)` of byte `i % 4`.
/// They are stored plus 32.
fn q3_scales(packed: &[u8; 12]) -> [i8; 16] {
    let (low, high) = split::<8, 4, 12>(packed);
    let mut scales = [0i8; 16];
    let nibbles = low
        .iter()
        .map(|byte| byte & 0x0f)
        .chain(low.iter().map(|byte| byte >> 4));
    for (i, ((scale, nibble), byte)) in scales
        .iter_mut()
        .zip(nibbles)
        .zip(high.iter().cycle())
        .enumerate()
    {
        let upper = byte >> (2 * (i / 4)) & 3;
        *scale = (nibble | upper << 4).cast_signed() - 32;
    }
    scales
}

pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (ql, rest) = split::<128, 82, 210>(block);
    let (qh, rest) = split::<64, 18, 82>(rest);
    let (scales, rest) = split::<16, 2, 18>(rest);
    let [d0, d1] = *rest;
    let d = half(d0, d1);
    for (group, (scale, out)) in scales.iter().zip(out.as_chunks_mut::<16>().0).enumerate() {
        let scale = d * f32::from(scale.cast_signed());
        // A half block of 128 is four runs of 32. Runs 0 and 2 are the low and high nibbles of the
        // first 32 bytes of `ql`, runs 1 and 3 those of the next 32; run r has its upper two bits at
        // bits 2 * r of the 32 bytes of `qh`.
        let (half_block, run, start) = (group / 8, group / 2 % 4, group % 2 * 16);
        let low = ql.iter().skip(half_block * 64 + run % 2 * 32 + start);
        let high = qh.iter().skip(half_block * 32 + start);
        for ((l, h), out) in low.zip(high).zip(out) {
            let q = l >> (run / 2 * 4) & 0x0f | (h >> (2 * run) & 3) << 4;
            *out = scale * (f32::from(q) - 32.0);
        }
    }
}

/// The sixteen 2-bit codes of a group of 16: a half block of 128 has 32 bytes, and its four runs of 32
/// elements lie at bits 0, 2, 4 and 6 of them.
fn crumbs(qs: &[u8; 64], group: usize) -> impl Iterator<Item = u8> {
    let (half_block, run, start) = (group / 8, group / 2 % 4, group % 2 * 16);
    qs.iter()
        .skip(half_block * 32 + start)
        .take(16)
        .map(move |byte| byte >> (2 * run) & 3)
}

/// Cuts an array in two; the three lengths are checked by the compiler's const evaluation.
pub(super) fn split<const A: usize, const B: usize, const N: usize>(
    bytes: &[u8; N],
) -> (&[u8; A], &[u8; B]) {
    const { assert!(A + B == N, "the parts must fill the block") };
    let (Some(first), Some(last)) = (bytes.first_chunk(), bytes.last_chunk()) else {
        return (&[0; A], &[0; B]);
    };
    (first, last)
}

#[cfg(test)]
mod tests {
    use super::super::dequant::dequantize;
    use super::super::ggml_type::GgmlType;

    const ONE: [u8; 2] = [0x00, 0x3c];
    const TWO: [u8; 2] = [0x00, 0x40];

    fn decode(ty: GgmlType, parts: &[&[u8]]) -> Vec<f32> {
        let block = parts.concat();
        assert_eq!(block.len(), ty.block_bytes());
        let mut out = vec![f32::NAN; 256];
        dequantize(ty, &block, &mut out);
        out
    }

    /// Where the values differ from `rest`, in words.
    fn unlike(values: &[f32], rest: impl Fn(usize) -> f32) -> Vec<(usize, f32)> {
        let differs = |(i, x): &(usize, &f32)| **x != rest(*i);
        values
            .iter()
            .enumerate()
            .filter(differs)
            .map(|(i, x)| (i, *x))
            .collect()
    }

    #[test]
    fn q4_k_by_hand() {
        // Group 0: scale 1, minimum 2. Group 5: scale 0b10_0011 = 35, minimum 0b01_0100 = 20.
        let mut scales = [0u8; 12];
        scales[0] = 1;
        scales[4] = 2;
        scales[1] = 0b1000_0000;
        scales[5] = 0b0100_0000;
        scales[9] = 0b0100_0011;
        let mut qs = [0u8; 128];
        qs[3] = 0x0f; // element 3 of group 0
        qs[64 + 7] = 0x90; // element 7 of group 5
        let out = decode(GgmlType::Q4_K, &[&ONE, &TWO, &scales, &qs]);
        let minimum = |i: usize| match i / 32 {
            0 => -2.0 * 2.0,
            5 => -2.0 * 20.0,
            _ => 0.0,
        };
        assert_eq!(
            unlike(&out, minimum),
            [(3, 15.0 - 4.0), (5 * 32 + 7, 35.0 * 9.0 - 40.0)]
        );
    }

    #[test]
    fn q5_k_by_hand() {
        let mut scales = [0u8; 12];
        scales[2] = 3; // group 2: scale 3
        scales[3] = 1; // group 3: scale 1
        let mut qh = [0u8; 32];
        qh[4] = 0b0000_1100; // fifth bit of element 4 in groups 2 and 3
        let mut qs = [0u8; 128];
        qs[32 + 4] = 0x21;
        let out = decode(GgmlType::Q5_K, &[&ONE, &TWO, &scales, &qh, &qs]);
        assert_eq!(unlike(&out, |_| 0.0), [(68, 3.0 * 17.0), (100, 18.0)]);
    }

    #[test]
    fn q2_k_by_hand() {
        let mut scales = [0u8; 16];
        scales[0] = 0x10; // group 0: scale 0, minimum 1
        scales[11] = 0x05; // group 11: scale 5
        let mut qs = [0u8; 64];
        // Group 11 is in the second half block, run 1, second sixteen: bits 2-3 of bytes 48 to 63.
        qs[48 + 2] = 0b0000_1100;
        let out = decode(GgmlType::Q2_K, &[&scales, &qs, &ONE, &TWO]);
        let minimum = |i: usize| if i < 16 { -2.0 } else { 0.0 };
        assert_eq!(unlike(&out, minimum), [(11 * 16 + 2, 15.0)]);
    }

    #[test]
    fn q3_k_by_hand() {
        // All scales are stored as 32 (upper bits 2), which is 0; scale 9 is 0b10_0011 - 32 = 3.
        let mut scales = [0u8; 12];
        scales[8..].fill(0b1010_1010);
        scales[1] = 0x30;
        let mut mask = [0u8; 32];
        let mut qs = [0u8; 64];
        // Group 9 is in the second half block, run 0, second sixteen; mask bit 4 of bytes 16 to 31.
        mask[16] = 1 << 4;
        qs[48] = 2;
        qs[49] = 1;
        let out = decode(GgmlType::Q3_K, &[&mask, &qs, &scales, &ONE]);
        let rest = |i: usize| if i / 16 == 9 { 3.0 * -4.0 } else { 0.0 };
        assert_eq!(unlike(&out, rest), [(144, 6.0), (145, 3.0 * -3.0)]);
    }

    #[test]
    fn q6_k_by_hand() {
        let mut ql = [0u8; 128];
        let mut qh = [0u8; 64];
        let mut scales = [0u8; 16];
        scales[14] = 0xfe; // -2
        // Group 14 is in the second half block, run 3, first sixteen.
        ql[64 + 32 + 5] = 0xf0;
        qh[32 + 5] = 0b1100_0000;
        let out = decode(GgmlType::Q6_K, &[&ql, &qh, &scales, &ONE]);
        let rest = |i: usize| if i / 16 == 14 { -2.0 * -32.0 } else { 0.0 };
        assert_eq!(unlike(&out, rest), [(14 * 16 + 5, -2.0 * 31.0)]);
    }
}
