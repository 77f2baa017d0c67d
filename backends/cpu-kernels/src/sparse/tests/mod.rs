//! Attention and choices against sums in f64, for every instruction set of this processor.

mod attend;
mod index;

use super::{Attend, Index, Pages};
use crate::Isa;
use crate::attention::{Cells, CellsMut, Format, read};

const PAGES: Pages<'static> = Pages {
    positions: &[2, 3, 0],
    page_table: &[2, 1, 1, 0],
    row_starts: &[0, 2, 2],
    page_size: 2,
    pages: 3,
};

fn base<'a>(keys: &'a [f32], selection: &'a [i32]) -> Attend<'a> {
    let keys = Cells::F32(keys);
    Attend {
        q: &[0.0; 3],
        keys,
        values: keys,
        value_stride: 1,
        selection,
        sinks: &[],
        pages: PAGES,
        heads: 1,
        kv_heads: 1,
        k_dim: 1,
        v_dim: 1,
        scale: 1.0,
        softcap: 0.0,
        window: 0,
        chunk: 0,
    }
}

/// Positions 0 to 3 of the first sequence hold 5, 6, 3, 4.
const KEYS_OF_POOL: [f32; 6] = [0.0, 0.0, 3.0, 4.0, 5.0, 6.0];

#[test]
fn what_is_not_in_the_pool_is_refused() {
    assert!(PAGES.is_valid());
    for bad in [
        Pages {
            positions: &[2, 4, 0],
            ..PAGES
        },
        Pages {
            page_table: &[2, 3, 1, 0],
            ..PAGES
        },
        Pages {
            row_starts: &[0, 3, 2],
            ..PAGES
        },
        Pages {
            row_starts: &[0, 2, 4],
            ..PAGES
        },
        Pages {
            row_starts: &[],
            ..PAGES
        },
    ] {
        assert!(!bad.is_valid(), "{bad:?}");
    }
    assert!(
        !Attend {
            v_dim: 2,
            ..base(&KEYS_OF_POOL, &[])
        }
        .is_valid()
    );
}

/// Elements in a type of storage, and what they stand for there.
#[derive(Clone)]
enum Kept {
    F32(Vec<f32>),
    F16(Vec<u16>),
    Bf16(Vec<u16>),
    Q8(Vec<u8>),
    Q4(Vec<u8>),
}

impl Kept {
    /// Rows of `width` elements in every type that has such rows.
    fn all(rows: &[f32], width: usize) -> Vec<Self> {
        let count = rows.len() / width;
        let (halves, bytes) = (vec![0; rows.len()], |f: Format| {
            vec![0; count * f.row_len(width)]
        });
        let mut all = vec![
            Self::F32(vec![0.0; rows.len()]),
            Self::F16(halves.clone()),
            Self::Bf16(halves),
            Self::Q8(bytes(Format::Q8)),
        ];
        if width.is_multiple_of(2) {
            all.push(Self::Q4(bytes(Format::Q4)));
        }
        let slots: Vec<i32> = (0..count as i32).collect();
        for kept in &mut all {
            let mut cells = match kept {
                Self::F32(cells) => CellsMut::F32(cells),
                Self::F16(cells) => CellsMut::F16(cells),
                Self::Bf16(cells) => CellsMut::Bf16(cells),
                Self::Q8(cells) => CellsMut::Q8(cells),
                Self::Q4(cells) => CellsMut::Q4(cells),
            };
            cells.append(&slots, rows, [1, width]);
        }
        all
    }

    fn cells(&self) -> Cells<'_> {
        match self {
            Self::F32(cells) => Cells::F32(cells),
            Self::F16(cells) => Cells::F16(cells),
            Self::Bf16(cells) => Cells::Bf16(cells),
            Self::Q8(cells) => Cells::Q8(cells),
            Self::Q4(cells) => Cells::Q4(cells),
        }
    }

    /// Whether a stored element is an f32 to the last bit.
    fn is_exact(&self) -> bool {
        !matches!(self, Self::Q8(_) | Self::Q4(_))
    }

    /// What is stored, by the definition of the type.
    fn read(&self, width: usize) -> Vec<f32> {
        let rows = |format: Format, stored: &[u8]| {
            let rows = stored.chunks_exact(format.row_len(width));
            rows.flat_map(|row| read(format, row, width))
                .map(|x| x as f32)
                .collect()
        };
        match self {
            Self::F32(cells) => cells.clone(),
            Self::F16(cells) => cells
                .iter()
                .map(|b| half::f16::from_bits(*b).to_f32())
                .collect(),
            Self::Bf16(cells) => cells
                .iter()
                .map(|b| half::bf16::from_bits(*b).to_f32())
                .collect(),
            Self::Q8(cells) => rows(Format::Q8, cells),
            Self::Q4(cells) => rows(Format::Q4, cells),
        }
    }
}

fn each_isa() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn pools_that_are_not_rows_of_their_type_are_refused() {
    let (halves, bytes) = ([0; 6], [0; 18]);
    let with = |keys, values| Attend {
        keys,
        values,
        ..base(&KEYS_OF_POOL, &[])
    };
    let f16 = Cells::F16(&halves);
    assert!(with(f16, f16).is_valid());
    assert!(!with(f16, Cells::Bf16(&halves)).is_valid());
    // A scale and a code for each of the six rows.
    assert!(with(Cells::Q8(&bytes), Cells::Q8(&bytes)).is_valid());
    assert!(!with(Cells::Q8(&bytes[..6]), f16).is_valid());
    assert!(!with(f16, Cells::F16(&halves[..5])).is_valid());
    // Half a byte is no row.
    assert!(!with(Cells::Q4(&bytes), Cells::Q4(&bytes)).is_valid());
    let choice = Index {
        q: &[0.0; 3],
        weights: &[0.0; 3],
        keys: f16,
        pages: PAGES,
        heads: 1,
        dim: 1,
        top_k: 1,
        scale: 1.0,
    };
    assert!(choice.is_valid());
    assert!(
        !Index {
            keys: Cells::Q8(&bytes[..6]),
            ..choice
        }
        .is_valid()
    );
    assert!(
        !Index {
            keys: Cells::Q4(&bytes),
            ..choice
        }
        .is_valid()
    );
}
