//! Attention, by the definition in f64.

use super::super::{Attend, Pages, attend};
use super::{KEYS_OF_POOL, Kept, base, each_isa};
use crate::attention::{Cells, CellsMut};
use crate::quantized::testing::Numbers;
use crate::{Isa, Pool};

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

/// Rows of three sequences: two behind four positions, none, and three; the last row is padding.
const RAGGED: Pages<'static> = Pages {
    positions: &[4, 5, 0, 1, 2, 3],
    page_table: &[3, 1, 0, 0, 0, 0, 6, 2, 5],
    row_starts: &[0, 2, 2, 5],
    page_size: 2,
    pages: 7,
};

fn run(isa: Isa, a: &Attend<'_>) -> Vec<f32> {
    run_on(&mut Pool::new(2).unwrap(), isa, a)
}

fn run_on(pool: &mut Pool, isa: Isa, a: &Attend<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; a.pages.positions.len() * a.heads * a.v_dim];
    assert!(attend(isa, pool, a, &mut out));
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

/// Threads divide the heads of a row that is alone: 16, 8 or 2 to a task here.
#[test]
fn one_row_gets_the_same_bits_from_any_number_of_threads() {
    let mut numbers = Numbers(11);
    let (heads, dim) = (16, 40);
    let pages = Pages {
        positions: &[5],
        page_table: &[3, 1, 0],
        row_starts: &[0, 1],
        ..RAGGED
    };
    let rows = numbers.floats(pages.pages * pages.page_size * dim);
    let q = numbers.floats(heads * dim);
    let sinks = numbers.floats(heads);
    let mut pools = [1, 2, 5].map(|threads| Pool::new(threads).unwrap());
    let is_meant = |kept: &Kept| matches!(kept, Kept::F32(_) | Kept::F16(_));
    for kept in Kept::all(&rows, dim).into_iter().filter(is_meant) {
        let exact = kept.read(dim);
        for (kv_heads, k_dim) in [(1, dim), (2, dim / 2)] {
            let whole = Attend {
                q: &q[..heads * k_dim],
                keys: kept.cells(),
                values: kept.cells(),
                value_stride: k_dim,
                selection: &[],
                sinks: &sinks,
                pages,
                heads,
                kv_heads,
                k_dim,
                v_dim: k_dim - 3,
                scale: 0.6,
                softcap: 0.0,
                window: 0,
                chunk: 0,
            };
            let chosen = Attend {
                selection: &[0, 5, 2, -1],
                ..whole
            };
            for (a, isa) in [whole, chosen]
                .into_iter()
                .flat_map(|a| each_isa().map(move |isa| (a, isa)))
            {
                matches(isa, &a, &exact, &exact);
                let bits = pools.each_mut().map(|pool| {
                    let out = run_on(pool, isa, &a);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                });
                assert!(bits.iter().all(|one| *one == bits[0]), "{}", isa.name());
            }
        }
    }
}
