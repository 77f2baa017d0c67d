//! Activations rounded to integers with one scale per [`QUANT_GROUP`] elements, in the order in which
//! the kernels meet them.
//!
//! A block of a vector of packed weights holds elements that lie next to each other; taking the low
//! nibbles (bytes, words) of the vector apart gives every second or fourth of them. So a block of
//! activations is laid out in planes: element `e` of it is at plane `e % planes`, place `e / planes`.

use crate::Isa;
use crate::aligned::{Aligned, Number};
use crate::isa::dispatch;
use crate::pool::Pool;
use crate::simd::Simd;

use super::{Precision, order};
use crate::quantized::QuantizedMatrix;

/// Activations that share a scale.
pub const QUANT_GROUP: usize = 32;

/// Group sizes of weights, for each of which the sums of `x` are kept.
pub(crate) const GROUPS: [usize; 4] = [16, 32, 64, 128];

/// Elements below which rounding runs on the calling thread alone.
const SERIAL_BELOW: usize = 16_384;

/// An integer that activations are rounded to.
pub(crate) trait Code: Number + Send + Sync + 'static {
    /// What the largest activation of a group becomes.
    const LIMIT: f32;
    /// Planes of a block beside packed nibbles.
    const NIBBLE_PLANES: usize;
    /// Planes of a block beside codes of a byte, and of the four elements beside a panel's word.
    const BYTE_PLANES: usize;
    /// Stores whole numbers within the limit.
    unsafe fn store<S: Simd>(whole: S, to: *mut Self);
    /// Rounds the rows of a job that needs panels alone, if there is a faster way to.
    ///
    /// # Safety
    /// As for [`round_kernel`].
    unsafe fn round_panels(_isa: Isa, _job: &Job<'_, Self>) -> bool {
        false
    }
}

impl Code for i8 {
    const LIMIT: f32 = 127.0;
    const NIBBLE_PLANES: usize = 2;
    const BYTE_PLANES: usize = 1;
    #[inline(always)]
    unsafe fn store<S: Simd>(whole: S, to: *mut i8) {
        // SAFETY: forwarded to the caller.
        unsafe { whole.store_bytes(to) }
    }
    #[cfg(target_arch = "x86_64")]
    unsafe fn round_panels(isa: Isa, job: &Job<'_, i8>) -> bool {
        if isa < Isa::Avx512 {
            return false;
        }
        // SAFETY: the processor has the set; the rest is the caller's promise.
        unsafe { super::round_avx512::round_panels(job) }
    }
}

impl Code for i16 {
    const LIMIT: f32 = 32767.0;
    const NIBBLE_PLANES: usize = 4;
    const BYTE_PLANES: usize = 2;
    #[inline(always)]
    unsafe fn store<S: Simd>(whole: S, to: *mut i16) {
        // SAFETY: forwarded to the caller.
        unsafe { whole.store_words(to) }
    }
}

/// Which layouts a set of weights needs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Needs {
    /// For packed nibbles.
    pub(crate) four: bool,
    /// For codes of a byte each.
    pub(crate) bytes: bool,
    /// For the panels of products with many rows.
    pub(crate) panel: bool,
    /// Code of the panels' weights that stands for 0 where they are centred.
    pub(crate) middle: i32,
    /// Sums per group, by index into `GROUPS`.
    pub(crate) sums: [bool; 4],
}

impl Needs {
    /// For few rows of `x`.
    pub(crate) fn add(&mut self, w: &QuantizedMatrix<'_>, precision: Precision) {
        self.four |= w.reads_nibbles(precision);
        // Those of mxfp4 are spread to bytes where their exponents are extreme.
        self.bytes |= !w.has_nibbles();
        self.add_sums(w.group());
    }

    /// The sums alone.
    pub(crate) fn add_sums(&mut self, group: usize) {
        for (need, size) in self.sums.iter_mut().zip(GROUPS) {
            *need |= size == group;
        }
    }
}

/// Codes in each layout.
#[derive(Debug, Default)]
pub(crate) struct Codes<C: Code> {
    /// `[m, padded4]`, blocks of `8 * LANES` elements.
    pub(crate) four: Aligned<C>,
    /// `[m, padded]`, blocks of `4 * LANES` elements, of twice as many (see `pairs`), or those of `order`.
    pub(crate) bytes: Aligned<C>,
    /// `[m, columns]`, blocks of four elements.
    pub(crate) panel: Aligned<C>,
}

/// Their scales, and the sums of what they stand for.
#[derive(Debug, Default)]
pub(crate) struct Factors {
    /// Scale of every lane beside packed nibbles, `[m, padded4 / 8]`.
    pub(crate) four: Aligned<f32>,
    /// Scale of every lane beside bytes, `[m, scales]`.
    pub(crate) bytes: Aligned<f32>,
    /// `[m, columns / QUANT_GROUP]`.
    pub(crate) panel: Aligned<f32>,
    /// What sums of centred weights begin with, `[m, columns / QUANT_GROUP]`, twice as many for groups of 16.
    pub(crate) starts: Aligned<i32>,
    /// `[m, columns / group]` for each of `GROUPS`.
    pub(crate) sums: [Aligned<f32>; 4],
}

/// Sizes of the rows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sizes {
    pub(crate) columns: usize,
    /// Columns rounded up to whole blocks beside nibbles and beside bytes.
    pub(crate) padded4: usize,
    pub(crate) padded: usize,
    /// Scales of lanes beside bytes.
    pub(crate) scales: usize,
    pub(crate) layout: Layout,
    pub(crate) lanes: usize,
}

/// In which blocks activations lie beside codes of a byte.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Those of a vector of packed weights.
    #[default]
    Vectors,
    /// Those of `pairs`.
    Pairs,
    /// Those of `order`.
    Order,
}

impl Sizes {
    pub(crate) fn new(columns: usize, lanes: usize, layout: Layout) -> Self {
        let padded = match layout {
            Layout::Vectors => columns.next_multiple_of(4 * lanes),
            Layout::Pairs => columns.next_multiple_of(8 * lanes),
            Layout::Order => order::padded(columns),
        };
        let scales = match layout {
            Layout::Vectors => padded / 4,
            Layout::Pairs => padded / 8,
            Layout::Order => order::scales(columns),
        };
        Self {
            columns,
            padded4: columns.next_multiple_of(8 * lanes),
            padded,
            scales,
            layout,
            lanes,
        }
    }

    /// Codes and scales of a row beside bytes that are written whatever its length.
    fn written(&self) -> (usize, usize) {
        match self.layout {
            Layout::Vectors => (self.columns, self.columns / 4),
            Layout::Pairs => (self.columns, self.columns / 8),
            Layout::Order => order::full(self.columns),
        }
    }
}

/// What the threads write, each its own rows.
pub(crate) struct Job<'a, C> {
    pub(crate) x: &'a [f32],
    pub(crate) sizes: Sizes,
    pub(crate) needs: Needs,
    pub(crate) four: *mut C,
    pub(crate) bytes: *mut C,
    pub(crate) panel: *mut C,
    pub(crate) scales_four: *mut f32,
    pub(crate) scales_bytes: *mut f32,
    pub(crate) scales_panel: *mut f32,
    pub(crate) starts: *mut i32,
    pub(crate) sums: [*mut f32; 4],
    pub(crate) m: usize,
    pub(crate) first: usize,
    pub(crate) last: usize,
}

impl<C> Clone for Job<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for Job<'_, C> {}
// SAFETY: threads write disjoint rows.
unsafe impl<C> Sync for Job<'_, C> {}

/// Rounds the rows of `x` into the layouts that `needs` names.
pub(crate) fn round<C: Code>(
    isa: Isa,
    pool: &mut Pool,
    x: &[f32],
    sizes: Sizes,
    needs: Needs,
    codes: &mut Codes<C>,
    factors: &mut Factors,
) -> bool {
    let (columns, m) = (sizes.columns, x.len() / sizes.columns);
    let (padded4, eighth) = (sizes.padded4, columns / 8);
    resize(&mut codes.four, needs.four, m, columns, padded4);
    resize(&mut factors.four, needs.four, m, eighth, padded4 / 8);
    let (of_codes, of_scales) = sizes.written();
    if sizes.layout == Layout::Order {
        resize_tiles(&mut codes.bytes, needs.bytes, m, of_codes, sizes.padded);
        resize_tiles(&mut factors.bytes, needs.bytes, m, of_scales, sizes.scales);
    } else {
        resize(&mut codes.bytes, needs.bytes, m, of_codes, sizes.padded);
        resize(&mut factors.bytes, needs.bytes, m, of_scales, sizes.scales);
    }
    resize(&mut codes.panel, needs.panel, m, columns, columns);
    let n_scales = columns / QUANT_GROUP;
    resize(&mut factors.panel, needs.panel, m, n_scales, n_scales);
    let n_starts = if needs.sums[0] {
        2 * n_scales
    } else {
        n_scales
    };
    resize(&mut factors.starts, needs.panel, m, n_starts, n_starts);
    for ((sums, group), needed) in factors.sums.iter_mut().zip(GROUPS).zip(needs.sums) {
        let n = columns / group;
        resize(sums, needed, m, n, n);
    }
    let job = Job {
        x,
        sizes,
        needs,
        four: codes.four.as_mut_ptr(),
        bytes: codes.bytes.as_mut_ptr(),
        panel: codes.panel.as_mut_ptr(),
        scales_four: factors.four.as_mut_ptr(),
        scales_bytes: factors.bytes.as_mut_ptr(),
        scales_panel: factors.panel.as_mut_ptr(),
        starts: factors.starts.as_mut_ptr(),
        sums: factors.sums.each_mut().map(|sums| sums.as_mut_ptr()),
        m,
        first: 0,
        last: m,
    };
    let job = &job;
    pool.split(m, 1, SERIAL_BELOW / columns + 1, &|range| {
        let (first, last) = (range.start, range.end);
        let job = Job {
            first,
            last,
            ..*job
        };
        // SAFETY: `isa` was detected; every layout that is needed has `m` rows; ranges are disjoint.
        unsafe {
            if !C::round_panels(isa, &job) {
                run_round::<C>(isa, job);
            }
        };
    })
}

/// Makes room for `m` rows of `padded`, of which `used` are written.
fn resize<T: Number>(of: &mut Aligned<T>, needed: bool, m: usize, used: usize, padded: usize) {
    if !needed {
        return;
    }
    if of.len() != m * padded {
        of.set_len(m * padded);
    }
    // Codes behind a row's end meet weights of 0; a scale there must not be an old NaN.
    if used < padded {
        of.chunks_exact_mut(padded)
            .for_each(|row| row[used..].fill(T::default()));
    }
}

/// The same for rows in tiles, which end together.
fn resize_tiles<T: Number>(
    of: &mut Aligned<T>,
    needed: bool,
    m: usize,
    used: usize,
    padded: usize,
) {
    resize(of, needed, m, padded, padded);
    if !needed || used == padded {
        return;
    }
    for tile in order::Tile::all(m) {
        let start = tile.first * padded;
        of[start + tile.rows * used..start + tile.rows * padded].fill(T::default());
    }
}

/// Rounds one thread's rows. A group with NaN or infinity gets a NaN scale, so that it makes every
/// product of its row NaN instead of something plausible.
#[inline(always)]
unsafe fn round_kernel<S: Simd, C: Code>(job: Job<'_, C>) {
    let Sizes {
        columns,
        padded4,
        padded,
        scales,
        layout,
        lanes,
    } = job.sizes;
    let needs = job.needs;
    let n_scales = columns / QUANT_GROUP;
    for row in job.first..job.last {
        let tile = order::Tile::of(row, job.m);
        for g in 0..n_scales {
            let at = g * QUANT_GROUP;
            let mut codes = [C::default(); QUANT_GROUP];
            // SAFETY: row and group are inside every layout that is needed; see `Sizes`.
            unsafe {
                let x = job.x.as_ptr().add(row * columns + at);
                let (scale, halves) = round_group::<S, C>(x, &mut codes);
                if needs.four {
                    let out = job.four.add(row * padded4);
                    spread_codes(&codes, C::NIBBLE_PLANES, 8 * lanes, at, out);
                    let out = job.scales_four.add(row * (padded4 / 8) + at / 8);
                    out.cast::<[f32; 4]>().write([scale; 4]);
                }
                match layout {
                    _ if !needs.bytes => {}
                    Layout::Vectors => {
                        let out = job.bytes.add(row * padded);
                        spread_codes(&codes, C::BYTE_PLANES, 4 * lanes, at, out);
                        let out = job.scales_bytes.add(row * scales + at / 4);
                        out.cast::<[f32; 8]>().write([scale; 8]);
                    }
                    Layout::Pairs => {
                        spread_pair(&codes, at, job.bytes.add(row * padded));
                        let out = job.scales_bytes.add(row * scales + at / 8);
                        out.cast::<[f32; 4]>().write([scale; 4]);
                    }
                    Layout::Order => {
                        let out = order::Row {
                            codes: job.bytes.add(tile.first * padded),
                            scales: job.scales_bytes.add(tile.first * scales),
                            tile,
                            row,
                            columns,
                        };
                        out.write(&codes, scale, at);
                    }
                }
                if needs.panel {
                    let out = job.panel.add(row * columns + at);
                    for four in 0..QUANT_GROUP / 4 {
                        let mut codes = [
                            codes[4 * four],
                            codes[4 * four + 1],
                            codes[4 * four + 2],
                            codes[4 * four + 3],
                        ];
                        if C::BYTE_PLANES == 2 {
                            codes.swap(1, 2);
                        }
                        out.cast::<[C; 4]>().add(four).write(codes);
                    }
                    *job.scales_panel.add(row * n_scales + g) = scale;
                }
                add_sums(&job, row, at, halves, scale);
            }
        }
    }
}

/// The sums of what is multiplied, not of what was given: otherwise the error of the rounding meets
/// the codes instead of the weights.
#[inline(always)]
unsafe fn add_sums<C>(job: &Job<'_, C>, row: usize, at: usize, halves: [i32; 2], scale: f32) {
    if job.needs.panel {
        let n_scales = job.sizes.columns / QUANT_GROUP;
        let group = row * n_scales + at / QUANT_GROUP;
        // SAFETY: as below.
        unsafe {
            if job.needs.sums[0] {
                let starts = halves.map(|half| -job.needs.middle * half);
                job.starts
                    .cast::<[i32; 2]>()
                    .add(group)
                    .write_unaligned(starts);
            } else {
                *job.starts.add(group) = -job.needs.middle * (halves[0] + halves[1]);
            }
        }
    }
    let both = (halves[0] + halves[1]) as f32 * scale;
    for (i, group) in GROUPS.into_iter().enumerate() {
        if !job.needs.sums[i] {
            continue;
        }
        // SAFETY: the caller's row and group are inside. Rows that are no multiple of a group have
        // no weights of that group, and no sum behind their last whole one.
        unsafe {
            let n = job.sizes.columns / group;
            let out = job.sums[i].add(row * n + at / group);
            if group == 16 {
                out.cast::<[f32; 2]>()
                    .write(halves.map(|half| half as f32 * scale));
            } else if at / group >= n {
            } else if at.is_multiple_of(group) {
                *out = both;
            } else {
                *out += both;
            }
        }
    }
}

/// Rounds one group and gives its scale and the sums of the codes of its halves.
#[inline(always)]
unsafe fn round_group<S: Simd, C: Code>(
    x: *const f32,
    codes: &mut [C; QUANT_GROUP],
) -> (f32, [i32; 2]) {
    // SAFETY: the caller vouches for QUANT_GROUP elements, a multiple of the lanes.
    unsafe {
        let mut largest = S::zero();
        let mut check = S::zero();
        let mut i = 0;
        while i < QUANT_GROUP {
            let v = S::load(x.add(i));
            largest = v.max(S::zero().sub(v)).max(largest);
            check = v.mul_add(S::zero(), check);
            i += S::LANES;
        }
        // Infinity and NaN times 0 are NaN.
        if check.sum() != 0.0 {
            return (f32::NAN, [0; 2]);
        }
        let largest = largest.max_lane();
        if largest == 0.0 {
            return (0.0, [0; 2]);
        }
        // A subnormal group would overflow the quotient; its products are below any use.
        let inverse = S::splat((C::LIMIT / largest).min(f32::MAX));
        let mut sums = [S::zero(); 2];
        let mut i = 0;
        while i < QUANT_GROUP {
            // |x| is at most the limit: the quotient's error is far below half a step.
            let v = S::load(x.add(i)).mul(inverse).round();
            C::store(v, codes.as_mut_ptr().add(i));
            sums[i / 16] = sums[i / 16].add(v);
            i += S::LANES;
        }
        // Whole numbers below 2^24 are exact.
        let [first, second, ..] = S::sum4([sums[0], sums[1], sums[0], sums[1]]);
        let halves = [first, second].map(|sum| sum.to_int_unchecked::<i32>());
        (largest / C::LIMIT, halves)
    }
}

/// Writes a group's codes to the planes of the block that it is in.
#[inline(always)]
unsafe fn spread_codes<C: Code>(
    codes: &[C; QUANT_GROUP],
    planes: usize,
    block: usize,
    at: usize,
    row: *mut C,
) {
    // SAFETY: the caller vouches for whole blocks behind `row`.
    unsafe {
        let out = row.add(at / block * block + at % block / planes);
        for plane in 0..planes {
            let out = out.add(plane * (block / planes));
            for place in 0..QUANT_GROUP / planes {
                *out.add(place) = codes[place * planes + plane];
            }
        }
    }
}

/// Writes a group's codes to the two vectors of the block that it is in, see `pairs`.
#[inline(always)]
unsafe fn spread_pair<C: Code>(codes: &[C; QUANT_GROUP], at: usize, row: *mut C) {
    let planes = C::BYTE_PLANES;
    // SAFETY: the caller vouches for whole blocks behind `row`.
    unsafe {
        let out = row.add(at / 128 * 128 + at % 128 / 2 / planes);
        for (half, codes) in codes.chunks_exact(16).enumerate() {
            for plane in 0..planes {
                let out = out.add((half * planes + plane) * (64 / planes));
                for place in 0..16 / planes {
                    *out.add(place) = codes[place * planes + plane];
                }
            }
        }
    }
}

dispatch! {
    unsafe fn run_round[C: Code][C](job: Job<'_, C>) = round_kernel
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::testing::Numbers;

    fn rounded<C: Code>(isa: Isa, x: &[f32]) -> (Codes<C>, Factors) {
        let mut pool = Pool::new(1).unwrap();
        let (mut codes, mut factors) = (Codes::default(), Factors::default());
        let sizes = Sizes::new(x.len(), 8, Layout::Vectors);
        let needs = Needs {
            four: true,
            bytes: true,
            panel: true,
            middle: 8,
            sums: [true; 4],
        };
        assert!(round(
            isa,
            &mut pool,
            x,
            sizes,
            needs,
            &mut codes,
            &mut factors
        ));
        (codes, factors)
    }

    fn is_within_half_a_step<C: Code + Into<f64>>(isa: Isa) {
        let mut numbers = Numbers(31);
        for size in [1.0f32, 1e-30, 1e-42, 1e30] {
            let x: Vec<f32> = numbers.floats(96).iter().map(|x| x * size).collect();
            let (codes, factors) = rounded::<C>(isa, &x);
            for (i, x) in x.iter().enumerate() {
                let (four, place) = (i / 4 * 4, i % 4);
                let place = [place, [0, 2, 1, 3][place]][C::BYTE_PLANES - 1];
                let scale = f64::from(factors.panel[i / 32]);
                let code: f64 = codes.panel[four + place].into();
                let got = code * scale;
                let step = scale.max(1e-38);
                assert!(
                    (got - f64::from(*x)).abs() <= 0.51 * step,
                    "{} {got} {x}",
                    isa.name()
                );
            }
            let sum = |range: core::ops::Range<usize>| -> f64 {
                x[range].iter().map(|x| f64::from(*x)).sum()
            };
            for (i, group) in GROUPS.into_iter().enumerate() {
                for g in 0..96 / group {
                    let step =
                        f64::from(factors.panel.iter().fold(0f32, |a, b| a.max(*b))).max(1e-38);
                    let (got, want) = (factors.sums[i][g], sum(g * group..(g + 1) * group));
                    assert!((f64::from(got) - want).abs() <= 0.51 * step * group as f64);
                }
            }
        }
    }

    #[test]
    fn rounding_is_within_half_a_step_and_sums_are_those_of_what_was_rounded() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            is_within_half_a_step::<i8>(isa);
            is_within_half_a_step::<i16>(isa);
        }
    }

    #[test]
    fn not_a_number_never_becomes_plausible() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = Numbers(33).floats(64);
                x[40] = bad;
                for factors in [rounded::<i8>(isa, &x).1, rounded::<i16>(isa, &x).1] {
                    assert!(factors.panel[0].is_finite() && factors.panel[1].is_nan());
                    assert!(factors.sums[1][0].is_finite() && factors.sums[1][1].is_nan());
                    assert!(factors.four[4..8].iter().all(|scale| scale.is_nan()));
                }
            }
        }
    }

    #[test]
    fn planes_hold_every_second_or_fourth_element() {
        let x: Vec<f32> = (0..64).map(|i| (i % 32 * 4 + 1) as f32).collect();
        let (codes, _) = rounded::<i16>(Isa::Portable, &x);
        let code = |i: usize| (x[i] * (32767.0 / 125.0)).round_ties_even() as i16;
        for i in 0..64 {
            assert_eq!(codes.four[i % 4 * 16 + i / 4], code(i), "{i}");
            assert_eq!(
                codes.bytes[i / 32 * 32 + i % 2 * 16 + i % 32 / 2],
                code(i),
                "{i}"
            );
        }
    }
}
