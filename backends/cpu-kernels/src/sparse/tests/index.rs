//! Choices, by the definition in f64.

use super::super::{Index, Pages, index};
use super::{KEYS_OF_POOL, Kept, PAGES, each_isa};
use crate::attention::Cells;
use crate::quantized::testing::Numbers;
use crate::{Isa, Pool};

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
