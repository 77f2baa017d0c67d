//! Attention and choices against sums in f64, for every instruction set of this processor.

use super::*;
use crate::attention::{CellsMut, Format, read};
use crate::quantized::testing::Numbers;

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

fn averages(a: &Attend<'_>) -> Vec<f32> {
    let mut out = vec![9.0; 3];
    assert!(attend(Isa::best(), &mut Pool::new(2).unwrap(), a, &mut out));
    // Shares are rounded; the numbers asked for are not.
    out.iter().map(|x| (x * 1024.0).round() / 1024.0).collect()
}

#[test]
fn a_query_without_scores_averages_what_it_sees() {
    let all = base(&KEYS_OF_POOL, &[]);
    assert_eq!(averages(&all), [4779.0 / 1024.0, 4.5, 0.0]);
    assert_eq!(averages(&Attend { window: 2, ..all }), [4.5, 3.5, 0.0]);
    assert_eq!(averages(&Attend { chunk: 2, ..all }), [3.0, 3.5, 0.0]);
    // Positions to come, none, and one behind the window do not count.
    let chosen = base(&KEYS_OF_POOL, &[0, 3, 1, -1, -1, -1]);
    assert_eq!(averages(&chosen), [5.0, 6.0, 0.0]);
    assert_eq!(
        averages(&Attend {
            window: 2,
            ..chosen
        }),
        [0.0; 3]
    );
}

#[test]
fn the_best_keys_are_chosen_and_all_of_few() {
    let choice = Index {
        q: &[1.0, -1.0, 1.0, -1.0, 0.0, 0.0],
        weights: &[1.0, 100.0, -1.0, 100.0, 1.0, 1.0],
        keys: Cells::F32(&KEYS_OF_POOL),
        pages: PAGES,
        heads: 2,
        dim: 1,
        top_k: 3,
        scale: 0.5,
    };
    let mut out = vec![7; 9];
    assert!(index(
        Isa::best(),
        &mut Pool::new(1).unwrap(),
        &choice,
        &mut out
    ));
    out[3..6].sort_unstable();
    // The second head sees nothing above 0; the second row wants small keys: 5, 3 and 4.
    assert_eq!(out, [0, 1, 2, 0, 2, 3, -1, -1, -1]);
}

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

/// Rows of three sequences: two behind four positions, none, and three; the last row is padding.
const RAGGED: Pages<'static> = Pages {
    positions: &[4, 5, 0, 1, 2, 3],
    page_table: &[3, 1, 0, 0, 0, 0, 6, 2, 5],
    row_starts: &[0, 2, 2, 5],
    page_size: 2,
    pages: 7,
};

fn run(isa: Isa, a: &Attend<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; a.pages.positions.len() * a.heads * a.v_dim];
    assert!(attend(isa, &mut Pool::new(2).unwrap(), a, &mut out));
    out
}

/// The definition, in f64, over keys and values as they are read.
fn expected(a: &Attend<'_>, keys: &[f32], values: &[f32]) -> Vec<f64> {
    let (rows, group) = (a.pages.positions.len(), a.heads / a.kv_heads);
    let mut out = vec![0.0; rows * a.heads * a.v_dim];
    for (sequence, bounds) in a.pages.row_starts.windows(2).enumerate() {
        for (row, head) in
            (bounds[0] as usize..bounds[1] as usize).flat_map(|r| (0..a.heads).map(move |h| (r, h)))
        {
            let position = a.pages.positions[row];
            let n = a.selection.len() / rows;
            let is_seen = |key: i32| {
                (a.window == 0 || key + a.window as i32 > position)
                    && (a.chunk == 0 || key / a.chunk as i32 == position / a.chunk as i32)
                    && (n == 0 || a.selection[row * n..][..n].contains(&key))
            };
            let mut terms = Vec::new();
            for key in (0..=position).filter(|key| is_seen(*key)) {
                let (page, at) = (
                    key as usize / a.pages.page_size,
                    key as usize % a.pages.page_size,
                );
                let page = a.pages.page_table[sequence * 3 + page] as usize;
                let at = (page * a.pages.page_size + at) * a.kv_heads + head / group;
                let q = &a.q[(row * a.heads + head) * a.k_dim..][..a.k_dim];
                let products = q.iter().zip(&keys[at * a.k_dim..]);
                let dot: f64 = products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let (score, cap) = (dot * f64::from(a.scale), f64::from(a.softcap));
                let score = if cap > 0.0 {
                    cap * (score / cap).tanh()
                } else {
                    score
                };
                terms.push((score, at));
            }
            let sink = a.sinks.get(head).map(|sink| f64::from(*sink));
            let top = terms
                .iter()
                .map(|t| t.0)
                .chain(sink)
                .fold(f64::MIN, f64::max);
            let total: f64 = terms
                .iter()
                .map(|t| t.0)
                .chain(sink)
                .map(|s| (s - top).exp())
                .sum();
            for d in 0..a.v_dim {
                let value = |at: usize| f64::from(values[at * a.value_stride + d]);
                let sum = terms
                    .iter()
                    .map(|(s, at)| (s - top).exp() / total * value(*at));
                out[(row * a.heads + head) * a.v_dim + d] = sum.sum();
            }
        }
    }
    out
}

fn matches(isa: Isa, a: &Attend<'_>, keys: &[f32], values: &[f32]) -> Vec<f32> {
    let got = run(isa, a);
    for (i, (got, want)) in got.iter().zip(expected(a, keys, values)).enumerate() {
        let off = (f64::from(*got) - want).abs();
        assert!(off < 2e-5, "{} {i}: {got} {want}", isa.name());
    }
    got
}

fn each_isa() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// The forms that the kernels take: some window, chunk, cap, choice and sinks.
fn forms<'a>(a: Attend<'a>, sinks: &'a [f32]) -> [Attend<'a>; 4] {
    const CHOSEN: [i32; 18] = [0, 3, -1, 5, 1, 4, 0, -1, -1, 1, 0, 7, -1, -1, -1, 1, 2, 3];
    let selection = &CHOSEN;
    [
        a,
        Attend {
            window: 3,
            softcap: 1.5,
            ..a
        },
        Attend {
            chunk: 4,
            sinks,
            ..a
        },
        Attend {
            selection,
            sinks,
            ..a
        },
    ]
}

#[test]
fn latent_keys_of_every_type_match_f64() {
    let mut numbers = Numbers(3);
    let pool_rows = RAGGED.pages * RAGGED.page_size;
    // More heads than a task has; values end within a vector and within a group of scales.
    for (heads, k_dim, v_dim) in [
        (3, 1, 1),
        (20, 24, 24),
        (2, 40, 33),
        (17, 72, 64),
        (4, 35, 8),
    ] {
        let rows = numbers.floats(pool_rows * k_dim);
        let q = numbers.floats(RAGGED.positions.len() * heads * k_dim);
        let sinks = numbers.floats(heads);
        for kept in Kept::all(&rows, k_dim) {
            let exact = kept.read(k_dim);
            let whole = Attend {
                q: &q,
                keys: kept.cells(),
                values: kept.cells(),
                value_stride: k_dim,
                selection: &[],
                sinks: &[],
                pages: RAGGED,
                heads,
                kv_heads: 1,
                k_dim,
                v_dim,
                scale: 0.6,
                softcap: 0.0,
                window: 0,
                chunk: 0,
            };
            for (a, isa) in forms(whole, &sinks)
                .into_iter()
                .flat_map(|a| each_isa().map(move |isa| (a, isa)))
            {
                let got = matches(isa, &a, &exact, &exact);
                let wide = Attend {
                    keys: Cells::F32(&exact),
                    values: Cells::F32(&exact),
                    ..a
                };
                // Widening is exact, so that what a half cache holds gives what an f32 cache gives.
                assert!(!kept.is_exact() || got == run(isa, &wide));
            }
        }
    }
}

#[test]
fn keys_and_values_of_every_type_match_f64() {
    let mut numbers = Numbers(4);
    let (heads, kv_heads, k_dim, v_dim) = (6, 2, 20, 34);
    let pool_rows = RAGGED.pages * RAGGED.page_size * kv_heads;
    let (keys, values) = (
        numbers.floats(pool_rows * k_dim),
        numbers.floats(pool_rows * v_dim),
    );
    let q = numbers.floats(RAGGED.positions.len() * heads * k_dim);
    let sinks = numbers.floats(heads);
    let all = Kept::all(&keys, k_dim)
        .into_iter()
        .zip(Kept::all(&values, v_dim));
    for (keys, values) in all {
        let exact = [keys.read(k_dim), values.read(v_dim)];
        let whole = Attend {
            q: &q,
            keys: keys.cells(),
            values: values.cells(),
            value_stride: v_dim,
            selection: &[],
            sinks: &[],
            pages: RAGGED,
            heads,
            kv_heads,
            k_dim,
            v_dim,
            scale: 0.6,
            softcap: 0.0,
            window: 0,
            chunk: 0,
        };
        for a in forms(whole, &sinks) {
            each_isa().for_each(|isa| {
                matches(isa, &a, &exact[0], &exact[1]);
            });
        }
    }
}

/// A latent row beyond f16 is NaN to every row of its sequence that sees it, and nothing to others; the largest and
/// the smallest numbers are what they are.
#[test]
fn extreme_halves_are_what_they_are() {
    let subnormal = half::f16::from_bits(1).to_f32();
    for (x, wanted) in [
        (f32::NAN, f32::NAN),
        (f32::NEG_INFINITY, f32::NAN),
        (7e4, f32::NAN),
        (65504.0, 65504.0),
        (subnormal, subnormal),
    ] {
        let mut keys = [0; 6];
        // Position 1 of the first sequence, which is in the page 2.
        CellsMut::F16(&mut keys).append(&[5], &[x], [1, 1]);
        for isa in each_isa() {
            let a = Attend {
                keys: Cells::F16(&keys),
                values: Cells::F16(&keys),
                ..base(&[], &[1, -1, -1])
            };
            // The others see nothing.
            let out = run(isa, &a);
            assert!(
                out[0] == wanted || (out[0].is_nan() && wanted.is_nan()),
                "{x}: {out:?}"
            );
            assert_eq!(out[1..], [0.0; 2]);
        }
    }
    // bf16 has the range of f32.
    let mut keys = [0; 6];
    CellsMut::Bf16(&mut keys).append(&[5, 4], &[3e38, f32::NAN], [1, 1]);
    let a = Attend {
        keys: Cells::Bf16(&keys),
        values: Cells::Bf16(&keys),
        ..base(&[], &[1, 0, -1])
    };
    for isa in each_isa() {
        let out = run(isa, &a);
        assert!(
            (out[0] / 3e38 - 1.0).abs() < 1.0 / 256.0 && out[1].is_nan(),
            "{out:?}"
        );
    }
}

#[test]
fn keys_of_every_type_are_chosen_as_the_same_ones_in_f32() {
    let mut numbers = Numbers(9);
    // More keys than one task has.
    let (page_size, pages, dim, heads, top_k) = (128, 20, 40, 3, 50);
    let page_table: Vec<i32> = (0..20).map(|page| page * 7 % 20).collect();
    let pages = Pages {
        positions: &[1200, 1201, 1100, 3],
        page_table: &page_table,
        row_starts: &[0, 2, 4],
        page_size,
        pages,
    };
    let q = numbers.floats(4 * heads * dim);
    let weights = numbers.floats(4 * heads);
    let rows = numbers.floats(pages.pages * page_size * dim);
    for kept in Kept::all(&rows, dim) {
        let exact = kept.read(dim);
        let choice = Index {
            q: &q,
            weights: &weights,
            keys: kept.cells(),
            pages,
            heads,
            dim,
            top_k,
            scale: 0.5,
        };
        for isa in each_isa() {
            let choose = |keys| {
                let mut out = vec![7; 4 * top_k];
                let choice = Index { keys, ..choice };
                assert!(index(isa, &mut Pool::new(2).unwrap(), &choice, &mut out));
                out
            };
            let got = choose(kept.cells());
            assert_eq!(got[3 * top_k..][..5], [0, 1, 2, 3, -1]);
            if kept.is_exact() {
                assert_eq!(got, choose(Cells::F32(&exact)), "{}", isa.name());
            }
            for row in 0..3 {
                let sequence = row / 2;
                let score = |key: i32| {
                    let page = page_table[sequence * 10 + key as usize / page_size] as usize;
                    let at = page * page_size + key as usize % page_size;
                    (0..heads)
                        .map(|h| {
                            let q = &q[(row * heads + h) * dim..][..dim];
                            let key = &exact[at * dim..][..dim];
                            let dot: f64 = q
                                .iter()
                                .zip(key)
                                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                                .sum();
                            f64::from(weights[row * heads + h]) * (0.5 * dot).max(0.0)
                        })
                        .sum::<f64>()
                };
                let chosen = &got[row * top_k..][..top_k];
                let least = chosen
                    .iter()
                    .map(|key| score(*key))
                    .fold(f64::MAX, f64::min);
                for key in (0..=pages.positions[row]).filter(|key| !chosen.contains(key)) {
                    assert!(score(key) <= least + 1e-5, "{} {row} {key}", isa.name());
                }
            }
        }
    }
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
