//! How keys and values are stored: rows of elements, or of codes behind their scales.
//!
//! A quantised row of `width` elements is one f16 scale for every 32 of them and then the codes: unsigned bytes
//! around 128, or nibbles around 8, the even element in the low half. Scales come first so that codes are
//! in a row.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::factor::{Bf16, F16, Factor};
use crate::simd::Simd;

/// Elements that share a scale.
pub(super) const GROUP: usize = 32;

/// Bytes of a scale.
const SCALE_BYTES: usize = 2;

/// Bytes of the scales in front of a row's codes.
const fn scale_bytes(width: usize) -> usize {
    width.div_ceil(GROUP) * SCALE_BYTES
}

/// A way to store elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Elements one by one.
    Plain,
    /// A byte an element.
    Q8,
    /// Half a byte an element; widths are even.
    Q4,
}

impl Format {
    /// Units of storage that a row of `width` elements takes: elements, or bytes.
    pub const fn row_len(self, width: usize) -> usize {
        match self {
            Self::Plain => width,
            Self::Q8 => scale_bytes(width) + width,
            Self::Q4 => scale_bytes(width) + width.div_ceil(2),
        }
    }

    /// The quantised format in which a row of `width` elements takes so many bytes.
    pub fn of_bytes(width: usize, bytes: usize) -> Option<Self> {
        let fits = |format: &Self| format.row_len(width) == bytes;
        let found = [Self::Q8, Self::Q4].into_iter().find(fits)?;
        (found == Self::Q8 || width.is_multiple_of(2)).then_some(found)
    }

    /// Elements of a row that takes so many units; none where no row does.
    pub fn width(self, len: usize) -> Option<usize> {
        let width = match self {
            Self::Plain => len,
            Self::Q8 => len.checked_sub(len.div_ceil(SCALE_BYTES + GROUP) * SCALE_BYTES)?,
            Self::Q4 => len
                .checked_sub(len.div_ceil(SCALE_BYTES + GROUP / 2) * SCALE_BYTES)?
                .checked_mul(2)?,
        };
        (width > 0 && self.row_len(width) == len).then_some(width)
    }
}

/// Keys or values of the pool, row-major.
#[derive(Debug, Clone, Copy)]
pub enum Cells<'a> {
    /// f32.
    F32(&'a [f32]),
    /// Bits of f16.
    F16(&'a [u16]),
    /// Bits of bf16.
    Bf16(&'a [u16]),
    /// Rows of [`Format::Q8`].
    Q8(&'a [u8]),
    /// Rows of [`Format::Q4`].
    Q4(&'a [u8]),
}

impl Cells<'_> {
    /// Number of units: elements, or bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(cells) => cells.len(),
            Self::F16(cells) | Self::Bf16(cells) => cells.len(),
            Self::Q8(cells) | Self::Q4(cells) => cells.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How they are stored.
    pub fn format(&self) -> Format {
        match self {
            Self::F32(_) | Self::F16(_) | Self::Bf16(_) => Format::Plain,
            Self::Q8(_) => Format::Q8,
            Self::Q4(_) => Format::Q4,
        }
    }
}

/// Keys or values of the pool, to be written.
#[derive(Debug)]
pub enum CellsMut<'a> {
    /// f32.
    F32(&'a mut [f32]),
    /// Bits of f16.
    F16(&'a mut [u16]),
    /// Bits of bf16.
    Bf16(&'a mut [u16]),
    /// Rows of [`Format::Q8`].
    Q8(&'a mut [u8]),
    /// Rows of [`Format::Q4`].
    Q4(&'a mut [u8]),
}

impl CellsMut<'_> {
    /// Writes rows of `heads` times `width` elements to the slots of the pool, rounded to its type. Slots outside
    /// of it are left out. What is written depends on the row alone.
    pub fn append(&mut self, slots: &[i32], rows: &[f32], [heads, width]: [usize; 2]) {
        let len = heads * self.cells().format().row_len(width);
        for (slot, row) in slots.iter().zip(rows.chunks_exact(heads * width)) {
            let Ok(slot) = usize::try_from(*slot) else {
                continue;
            };
            self.write(slot * len..(slot + 1) * len, row, width);
        }
    }

    fn write(&mut self, range: core::ops::Range<usize>, row: &[f32], width: usize) {
        match self {
            Self::F32(cells) => {
                if let Some(cells) = cells.get_mut(range) {
                    cells.copy_from_slice(row);
                }
            }
            Self::F16(cells) => {
                if let Some(cells) = cells.get_mut(range) {
                    cells
                        .reinterpret_cast_mut::<f16>()
                        .convert_from_f32_slice(row);
                    cells.iter_mut().for_each(mark_overflow);
                }
            }
            Self::Bf16(cells) => {
                if let Some(cells) = cells.get_mut(range) {
                    cells
                        .reinterpret_cast_mut::<half::bf16>()
                        .convert_from_f32_slice(row);
                }
            }
            Self::Q8(cells) => {
                let rows = row.chunks_exact(width);
                let stored = cells.get_mut(range).unwrap_or_default();
                let stored = stored.chunks_exact_mut(Format::Q8.row_len(width));
                rows.zip(stored).for_each(|(row, to)| write_bytes(row, to));
            }
            Self::Q4(cells) => {
                let rows = row.chunks_exact(width);
                let stored = cells.get_mut(range).unwrap_or_default();
                let stored = stored.chunks_exact_mut(Format::Q4.row_len(width));
                rows.zip(stored)
                    .for_each(|(row, to)| write_nibbles(row, to));
            }
        }
    }

    /// The same cells, to be read.
    pub fn cells(&self) -> Cells<'_> {
        match self {
            Self::F32(cells) => Cells::F32(cells),
            Self::F16(cells) => Cells::F16(cells),
            Self::Bf16(cells) => Cells::Bf16(cells),
            Self::Q8(cells) => Cells::Q8(cells),
            Self::Q4(cells) => Cells::Q4(cells),
        }
    }
}

/// Turns an infinity into NaN: what is beyond f16 must not pass for a key that is far away or for one that is
/// never chosen.
#[inline(always)]
fn mark_overflow(bits: &mut u16) {
    if *bits & 0x7fff == f16::INFINITY.to_bits() {
        *bits = f16::NAN.to_bits();
    }
}

/// The scale by which the element of largest magnitude becomes `code`. A group with anything that is not finite
/// gets none, so that all of it reads as NaN instead of as something that looks right.
fn scale(group: &[f32], code: f32) -> f16 {
    if !group.iter().all(|x| x.is_finite()) {
        return f16::NAN;
    }
    let largest = group.iter().fold(
        0.0f32,
        |best, x| if x.abs() > best.abs() { *x } else { best },
    );
    let signed = if code < 0.0 { largest } else { largest.abs() };
    let exact = signed / code;
    f16::from_f32(exact.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Calls `write(elements, 1 / scale, codes)` for every group of a row, whose scale is in its place.
fn each_group(
    row: &[f32],
    stored: &mut [u8],
    (largest_code, code_bytes): (f32, usize),
    write: impl Fn(&[f32], f32, &mut [u8]),
) {
    let (scales, codes) = stored.split_at_mut(scale_bytes(row.len()));
    let places = scales
        .chunks_exact_mut(SCALE_BYTES)
        .zip(codes.chunks_mut(code_bytes));
    for (group, (at, codes)) in row.chunks(GROUP).zip(places) {
        let scale = scale(group, largest_code);
        at.copy_from_slice(&scale.to_le_bytes());
        let scale = scale.to_f32();
        let inverse = if scale == 0.0 { 0.0 } else { scale.recip() };
        write(group, inverse, codes);
    }
}

/// Quantises a row to [`Format::Q8`]. Casts saturate.
fn write_bytes(row: &[f32], stored: &mut [u8]) {
    each_group(row, stored, (127.0, GROUP), |group, inverse, codes| {
        for (code, x) in codes.iter_mut().zip(group) {
            *code = (x * inverse + 128.5) as u8;
        }
    });
}

/// Quantises a row to [`Format::Q4`]: the element of largest magnitude becomes -8, so that all 16 codes are used.
fn write_nibbles(row: &[f32], stored: &mut [u8]) {
    each_group(row, stored, (-8.0, GROUP / 2), |group, inverse, codes| {
        let nibble = |x: f32| ((x * inverse + 8.5) as u8).min(15);
        for (code, pair) in codes.iter_mut().zip(group.chunks_exact(2)) {
            *code = nibble(pair[0]) | nibble(pair[1]) << 4;
        }
    });
}

/// A stored row of elements, behind a pointer to its first unit.
pub(crate) trait Stored: Copy {
    /// How the row is stored.
    const FORMAT: Format;
    /// Whether the type is f32, so that a row can be read as it is.
    const IS_F32: bool = false;
    /// Elements `at..` of a row of `width`, as many as there are lanes; those beyond the row are 0. `at` is a
    /// multiple of the lanes.
    unsafe fn load<S: Simd>(row: *const Self, at: usize, width: usize) -> S;
}

macro_rules! plain {
    ($($t:ty, $is_f32:literal);*) => {$(
        impl Stored for $t {
            const FORMAT: Format = Format::Plain;
            const IS_F32: bool = $is_f32;
            #[inline(always)]
            unsafe fn load<S: Simd>(row: *const Self, at: usize, width: usize) -> S {
                // SAFETY: the caller vouches for the row; nothing behind it is read.
                unsafe { Factor::load(row.wrapping_add(at), width.saturating_sub(at)) }
            }
        }
    )*};
}
plain!(f32, true; F16, false; Bf16, false);

/// A byte of a row of [`Format::Q8`].
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Q8(u8);

/// A byte of a row of [`Format::Q4`].
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Q4(u8);

/// The scale of element `at`, in every lane.
#[inline(always)]
unsafe fn scale_of<S: Simd>(row: *const u8, at: usize) -> S {
    // SAFETY: the caller vouches for the scales.
    unsafe {
        let bits = row.cast::<u16>().add(at / GROUP).read_unaligned();
        S::spread_f16(u64::from(u16::from_le(bits)), S::places(1))
    }
}

impl Stored for Q8 {
    const FORMAT: Format = Format::Q8;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const Self, at: usize, width: usize) -> S {
        // SAFETY: the caller vouches for the row, of which only what is there is read.
        unsafe {
            if at >= width {
                return S::zero();
            }
            let row = row.cast::<u8>();
            let codes = row.add(scale_bytes(width) + at);
            let left = width - at;
            let codes = if left >= S::LANES {
                S::load_u8(codes)
            } else {
                // What is beyond the row reads as 0.
                let mut few = [128u8; 16];
                core::ptr::copy_nonoverlapping(codes, few.as_mut_ptr(), left);
                S::load_u8(few.as_ptr())
            };
            codes.sub(S::splat(128.0)).mul(scale_of(row, at))
        }
    }
}

impl Stored for Q4 {
    const FORMAT: Format = Format::Q4;
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const Self, at: usize, width: usize) -> S {
        // SAFETY: as above.
        unsafe {
            if at >= width {
                return S::zero();
            }
            let row = row.cast::<u8>();
            let codes = row.add(scale_bytes(width) + at / 2);
            let mut packed = [0x88u8; 8];
            let n = (width - at).min(S::LANES) / 2;
            if n == 8 {
                packed = codes.cast::<[u8; 8]>().read_unaligned();
            } else if n == 4 {
                packed[..4].copy_from_slice(&codes.cast::<[u8; 4]>().read_unaligned());
            } else {
                core::ptr::copy_nonoverlapping(codes, packed.as_mut_ptr(), n);
            }
            let packed = u64::from_le_bytes(packed);
            let halves = [packed, packed >> 32].map(|half| S::deposit(half, 0x0f0f_0f0f_0f0f_0f0f));
            let codes = halves.map(u64::to_le_bytes);
            S::load_u8(codes.as_ptr().cast())
                .sub(S::splat(8.0))
                .mul(scale_of(row, at))
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A stored row as its definition has it.
    pub(crate) fn read(format: Format, stored: &[u8], width: usize) -> Vec<f64> {
        let (scales, codes) = stored.split_at(scale_bytes(width));
        let scale = |i: usize| {
            f64::from(f16::from_le_bytes([
                scales[i / GROUP * 2],
                scales[i / GROUP * 2 + 1],
            ]))
        };
        let code = |i: usize| match format {
            Format::Q8 => f64::from(codes[i]) - 128.0,
            _ => f64::from(codes[i / 2] >> (i % 2 * 4) & 15) - 8.0,
        };
        (0..width).map(|i| code(i) * scale(i)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::read;
    use super::*;
    use crate::quantized::testing::Numbers;

    #[test]
    fn formats_and_widths_tell_each_other() {
        for width in 1..300 {
            for format in [Format::Q8, Format::Q4] {
                if format == Format::Q4 && width % 2 == 1 {
                    continue;
                }
                let len = format.row_len(width);
                assert_eq!(Format::of_bytes(width, len), Some(format));
                assert_eq!(format.width(len), Some(width));
            }
        }
        assert_eq!(Format::of_bytes(64, 64), None);
        assert_eq!(Format::Q8.width(2), None);
        assert_eq!(Format::Q8.width(0), None);
        assert_eq!(Format::Q4.width(1), None);
    }

    fn stored(format: Format, row: &[f32]) -> Vec<u8> {
        let mut cells = vec![0; 3 * format.row_len(row.len())];
        let mut to = match format {
            Format::Q8 => CellsMut::Q8(&mut cells),
            _ => CellsMut::Q4(&mut cells),
        };
        to.append(&[1, -1, 7], &[row, row, row].concat(), [1, row.len()]);
        let len = format.row_len(row.len());
        assert!(
            cells[..len]
                .iter()
                .chain(&cells[2 * len..])
                .all(|byte| *byte == 0)
        );
        cells[len..2 * len].to_vec()
    }

    #[test]
    fn elements_come_back_within_half_a_step() {
        let mut numbers = Numbers(5);
        for width in [2, 8, 30, 32, 34, 64, 80, 128] {
            let row = numbers.floats(width);
            for (format, steps) in [(Format::Q8, 127.0), (Format::Q4, 8.0)] {
                let back = read(format, &stored(format, &row), width);
                for (group, back) in row.chunks(GROUP).zip(back.chunks(GROUP)) {
                    let most = group.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                    for (x, y) in group.iter().zip(back) {
                        let off = (f64::from(*x) - y).abs() / f64::from(most);
                        // The side opposite to the largest element has one code less of four bits.
                        let limit = if format == Format::Q4 { 1.0 } else { 0.5 };
                        assert!(off <= (limit + 0.07) / steps, "{format:?} {width}: {x} {y}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY] {
            for format in [Format::Q8, Format::Q4] {
                let mut row = vec![1.0; 64];
                row[40] = bad;
                let back = read(format, &stored(format, &row), 64);
                assert!(back[..32].iter().all(|x| (x - 1.0).abs() < 0.01));
                assert!(back[32..].iter().all(|x| x.is_nan()));
            }
        }
        let back = read(Format::Q8, &stored(Format::Q8, &[0.0; 32]), 32);
        assert!(back.iter().all(|x| *x == 0.0));
        let back = read(Format::Q8, &stored(Format::Q8, &[3e38; 32]), 32);
        assert!(back.iter().all(|x| *x > 8e6));
    }

    fn loaded<C: Stored, S: Simd>(row: *const C, width: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; width.next_multiple_of(S::LANES) + S::LANES];
        for at in (0..out.len()).step_by(S::LANES) {
            // SAFETY: the portable vectors run everywhere; the row is whole and `out` has room.
            unsafe { C::load::<S>(row, at, width).store(out.as_mut_ptr().add(at)) };
        }
        out
    }

    #[test]
    fn rows_load_as_they_are_defined() {
        let mut numbers = Numbers(6);
        for width in [2, 6, 16, 32, 40, 64, 72] {
            let row = numbers.floats(width);
            for format in [Format::Q8, Format::Q4] {
                let stored = stored(format, &row);
                let got = match format {
                    Format::Q8 => {
                        loaded::<Q8, crate::simd::scalar::Scalar8>(stored.as_ptr().cast(), width)
                    }
                    _ => loaded::<Q4, crate::simd::scalar::Scalar8>(stored.as_ptr().cast(), width),
                };
                let want = read(format, &stored, width);
                for (got, want) in got.iter().zip(want.iter().chain(core::iter::repeat(&0.0))) {
                    assert!(
                        (f64::from(*got) - want).abs() <= 1e-6 * want.abs(),
                        "{format:?} {width}"
                    );
                }
            }
        }
    }
}
