//! Rows of cells as f32, for kernels that read a row once and use it for many heads.

use super::cells::{Cells, Format, Stored};
use crate::simd::Simd;

/// Most lanes that a vector has.
const MOST_LANES: usize = 16;

impl Cells<'_> {
    /// Whether these are `count` rows of `width` elements.
    pub(crate) fn is_rows(&self, count: usize, width: usize) -> bool {
        let format = self.format();
        (format != Format::Q4 || width.is_multiple_of(2))
            && count.checked_mul(format.row_len(width)) == Some(self.len())
    }
}

/// Rows of cells, of which the first elements are read.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, C> {
    cells: &'a [C],
    width: usize,
    used: usize,
}

impl<'a, C: Stored> Rows<'a, C> {
    /// Rows of `width` elements, `used` of which are read.
    ///
    /// # Safety
    /// `C` is transparent over `U`.
    pub(crate) unsafe fn new<U>(units: &'a [U], [width, used]: [usize; 2]) -> Self {
        assert!(size_of::<U>() == size_of::<C>() && used <= width);
        Self {
            // SAFETY: the size is the same, and the caller vouches for the type.
            cells: unsafe { core::slice::from_raw_parts(units.as_ptr().cast(), units.len()) },
            width,
            used,
        }
    }

    /// What a row is widened in; nothing where rows are read as they are stored.
    pub(crate) fn room(&self) -> Vec<f32> {
        match C::IS_F32 {
            true => Vec::new(),
            false => vec![0.0; self.used.next_multiple_of(MOST_LANES)],
        }
    }

    /// Row `index`, which is in `room` where it is not stored as f32.
    ///
    /// # Safety
    /// The CPU has the instruction set of `S`.
    #[inline(always)]
    pub(crate) unsafe fn row<'b, S: Simd>(&self, index: usize, room: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        let Self { width, used, .. } = *self;
        let len = C::FORMAT.row_len(width);
        let row = self.cells[index * len..][..len].as_ptr();
        if C::IS_F32 {
            // SAFETY: the row is whole, lives as long as the cells, and its type is f32.
            return unsafe { core::slice::from_raw_parts(row.cast(), used) };
        }
        assert!(room.len() >= used.next_multiple_of(S::LANES));
        for at in (0..used).step_by(S::LANES) {
            // SAFETY: the row is whole, there is room for whole vectors, and the caller vouches for the rest.
            unsafe { C::load::<S>(row, at, width).store(room.as_mut_ptr().add(at)) };
        }
        &room[..used]
    }
}

#[cfg(test)]
mod tests {
    use super::super::cells::{CellsMut, Q4, Q8, testing::read};
    use super::*;
    use crate::Isa;
    use crate::factor::{Bf16, F16};
    use crate::isa::dispatch;
    use crate::quantized::testing::Numbers;

    dispatch! {
        unsafe fn row_of[C: Stored][C](rows: Rows<'_, C>, index: usize, to: &mut Vec<f32>) = row_kernel
    }

    #[inline(always)]
    unsafe fn row_kernel<S: Simd, C: Stored>(rows: Rows<'_, C>, index: usize, to: &mut Vec<f32>) {
        let mut room = rows.room();
        // SAFETY: the dispatch has chosen the instruction set.
        to.extend_from_slice(unsafe { rows.row::<S>(index, &mut room) });
    }

    fn each_isa(cells: Cells<'_>, index: usize, sizes: [usize; 2], check: impl Fn(&[f32])) {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut got = Vec::new();
            // SAFETY: the instruction set is available, and types are transparent over their bits.
            unsafe {
                match cells {
                    Cells::F32(cells) => {
                        row_of::<f32>(isa, Rows::new(cells, sizes), index, &mut got);
                    }
                    Cells::F16(cells) => {
                        row_of::<F16>(isa, Rows::new(cells, sizes), index, &mut got);
                    }
                    Cells::Bf16(cells) => {
                        row_of::<Bf16>(isa, Rows::new(cells, sizes), index, &mut got);
                    }
                    Cells::Q8(cells) => row_of::<Q8>(isa, Rows::new(cells, sizes), index, &mut got),
                    Cells::Q4(cells) => row_of::<Q4>(isa, Rows::new(cells, sizes), index, &mut got),
                }
            }
            assert_eq!(got.len(), sizes[1]);
            check(&got);
        }
    }

    #[test]
    fn the_first_elements_of_a_row_are_as_they_are_stored() {
        let mut numbers = Numbers(8);
        for (width, used) in [(1, 1), (7, 7), (16, 9), (40, 33), (66, 64), (72, 72)] {
            let rows = numbers.floats(3 * width);
            let mut halves = vec![[0_u16; 2]; 3 * width];
            for (bits, x) in halves.iter_mut().zip(&rows) {
                *bits = [
                    half::f16::from_f32(*x).to_bits(),
                    half::bf16::from_f32(*x).to_bits(),
                ];
            }
            let [f16, bf16] = [0, 1].map(|i| halves.iter().map(|b| b[i]).collect::<Vec<_>>());
            let at = 2 * width..2 * width + used;
            each_isa(Cells::F32(&rows), 2, [width, used], |got| {
                assert_eq!(got, &rows[at.clone()]);
            });
            each_isa(Cells::F16(&f16), 2, [width, used], |got| {
                let want = f16[at.clone()].iter().map(|b| half::f16::from_bits(*b));
                assert_eq!(got, want.map(half::f16::to_f32).collect::<Vec<_>>());
            });
            each_isa(Cells::Bf16(&bf16), 2, [width, used], |got| {
                let want = bf16[at.clone()].iter().map(|b| half::bf16::from_bits(*b));
                assert_eq!(got, want.map(half::bf16::to_f32).collect::<Vec<_>>());
            });
            for format in [Format::Q8, Format::Q4] {
                if format == Format::Q4 && width % 2 == 1 {
                    continue;
                }
                let len = format.row_len(width);
                let mut bytes = vec![0; 3 * len];
                let mut to = match format {
                    Format::Q8 => CellsMut::Q8(&mut bytes),
                    _ => CellsMut::Q4(&mut bytes),
                };
                to.append(&[0, 1, 2], &rows, [1, width]);
                let want = read(format, &bytes[2 * len..], width);
                let cells = match format {
                    Format::Q8 => Cells::Q8(&bytes),
                    _ => Cells::Q4(&bytes),
                };
                each_isa(cells, 2, [width, used], |got| {
                    for (got, want) in got.iter().zip(&want) {
                        assert!((f64::from(*got) - want).abs() <= 1e-6 * want.abs());
                    }
                });
            }
        }
    }

    /// Subnormal numbers, the largest ones, infinities and NaN.
    #[test]
    fn every_half_is_widened_to_itself() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let alike = |got: f32, want: f32| {
            got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan())
        };
        let sizes = [all.len(); 2];
        each_isa(Cells::F16(&all), 0, sizes, |got| {
            let wants = |bits: u16| half::f16::from_bits(bits).to_f32();
            assert!(got.iter().zip(&all).all(|(got, b)| alike(*got, wants(*b))));
        });
        each_isa(Cells::Bf16(&all), 0, sizes, |got| {
            let wants = |bits: u16| half::bf16::from_bits(bits).to_f32();
            assert!(got.iter().zip(&all).all(|(got, b)| alike(*got, wants(*b))));
        });
    }

    #[test]
    fn rows_have_the_length_of_their_format() {
        assert!(Cells::F32(&[0.0; 6]).is_rows(2, 3));
        assert!(!Cells::F16(&[0; 6]).is_rows(2, 4));
        assert!(Cells::Q8(&[0; 10]).is_rows(2, 3));
        assert!(!Cells::Q8(&[0; 6]).is_rows(2, 3));
        assert!(Cells::Q4(&[0; 8]).is_rows(2, 4));
        // Three elements would leave half a byte.
        assert!(!Cells::Q4(&[0; 8]).is_rows(2, 3));
        assert!(!Cells::F32(&[]).is_rows(usize::MAX, 2));
    }
}
