use super::*;
use crate::quantized::testing::Numbers;
use std::sync::Mutex;

struct Case {
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    positions: Vec<i32>,
    page_table: Vec<i32>,
    row_starts: Vec<u32>,
    sinks: Vec<f32>,
}

const PAGE: usize = 4;

/// Sequences of (cached keys, rows of this step), pages in shuffled order.
fn case(
    numbers: &mut Numbers,
    sequences: &[(usize, usize)],
    heads: usize,
    kv_heads: usize,
    k: usize,
    v: usize,
    sinks: bool,
) -> Case {
    let width = sequences
        .iter()
        .map(|(c, r)| (c + r).div_ceil(PAGE))
        .max()
        .unwrap();
    let pages = sequences.len() * width + 1;
    let page_table = (0..sequences.len() * width)
        .map(|i| 1 + (i * 7 % (pages - 1)) as i32)
        .collect::<Vec<_>>();
    let mut row_starts = vec![0u32];
    let mut positions = Vec::new();
    for (cached, rows) in sequences {
        positions.extend((0..*rows).map(|i| (cached + i) as i32));
        row_starts.push(positions.len() as u32);
    }
    let rows = positions.len();
    Case {
        q: numbers.floats(rows * heads * k),
        keys: numbers.floats(pages * PAGE * kv_heads * k),
        values: numbers.floats(pages * PAGE * kv_heads * v),
        positions,
        page_table,
        row_starts,
        sinks: if sinks {
            numbers.floats(heads)
        } else {
            Vec::new()
        },
    }
}

/// A pool in 8 and in 4 bits: as it is stored, and what that stands for.
fn quantised(pool: &[f32], kv_heads: usize, width: usize) -> [(Vec<u8>, Vec<f32>); 2] {
    let slots: Vec<i32> = (0..pool.len() / (kv_heads * width))
        .map(|slot| slot as i32)
        .collect();
    [Format::Q8, Format::Q4].map(|format| {
        let mut stored = vec![0; pool.len() / width * format.row_len(width)];
        let mut cells = match format {
            Format::Q8 => CellsMut::Q8(&mut stored),
            _ => CellsMut::Q4(&mut stored),
        };
        cells.append(&slots, pool, [kv_heads, width]);
        let back = stored
            .chunks_exact(format.row_len(width))
            .flat_map(|row| cells::testing::read(format, row, width))
            .map(|x| x as f32)
            .collect();
        (stored, back)
    })
}

fn reference(p: &Paged<'_>, keys: &[f32], values: &[f32]) -> Vec<f64> {
    let mut out = Vec::new();
    for row in 0..p.positions.len() {
        let sequence = p
            .row_starts
            .windows(2)
            .position(|w| (w[0]..w[1]).contains(&(row as u32)))
            .unwrap();
        let position = p.positions[row] as usize;
        for head in 0..p.heads {
            let kv = head / p.group();
            let sees = |key: usize| {
                (p.window == 0 || key + p.window > position)
                    && (p.chunk == 0 || key / p.chunk == position / p.chunk)
            };
            let mut terms: Vec<(f64, usize)> = Vec::new();
            for key in (0..=position).filter(|key| sees(*key)) {
                let at = p.pool_row(sequence, key) * p.kv_heads + kv;
                let q = &p.q[(row * p.heads + head) * p.k_dim..][..p.k_dim];
                let dot: f64 = q
                    .iter()
                    .zip(&keys[at * p.k_dim..])
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                let score = dot * f64::from(p.scale);
                let cap = f64::from(p.softcap);
                terms.push((
                    if cap > 0.0 {
                        cap * (score / cap).tanh()
                    } else {
                        score
                    },
                    at,
                ));
            }
            let sink = p
                .sinks
                .get(head)
                .map(|s| f64::from(*s).exp())
                .unwrap_or(0.0);
            let total: f64 = terms.iter().map(|(s, _)| s.exp()).sum::<f64>() + sink;
            for d in 0..p.v_dim {
                out.push(
                    terms
                        .iter()
                        .map(|(s, at)| s.exp() / total * f64::from(values[at * p.v_dim + d]))
                        .sum(),
                );
            }
        }
    }
    out
}

#[test]
fn ragged_steps_match_f64() {
    let mut numbers = Numbers(11);
    let mut pool = Pool::new(2).unwrap();
    let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
    let steps: [&[(usize, usize)]; 6] = [
        &[(0, 1)],
        &[(9, 1), (0, 1), (3, 1)],
        &[(0, 37)],
        &[(5, 20), (11, 1), (0, 3), (40, 4)],
        &[(70, 33), (0, 0), (2, 1)],
        &[(200, 1), (63, 1), (64, 2)],
    ];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for sequences in steps {
            for (heads, kv_heads, k, v) in [
                (4, 2, 16, 16),
                (3, 1, 24, 40),
                (2, 2, 64, 64),
                (7, 1, 32, 48),
            ] {
                for (window, chunk, softcap, sinks) in [
                    (0, 0, 0.0, false),
                    (5, 0, 0.0, false),
                    (0, 0, 2.0, true),
                    (3, 0, 0.0, true),
                    (0, 7, 0.0, false),
                    (5, 8, 0.0, true),
                ] {
                    let c = case(&mut numbers, sequences, heads, kv_heads, k, v, sinks);
                    let p = Paged {
                        q: &c.q,
                        keys: Cells::F32(&c.keys),
                        values: Cells::F32(&c.values),
                        positions: &c.positions,
                        page_table: &c.page_table,
                        row_starts: &c.row_starts,
                        sinks: &c.sinks,
                        heads,
                        kv_heads,
                        k_dim: k,
                        v_dim: v,
                        page_size: PAGE,
                        scale: 0.7,
                        softcap,
                        window,
                        chunk,
                        keeps_rows_apart: false,
                    };
                    let half = |x: &f32| half::f16::from_f32(*x);
                    let brain = |x: &f32| half::bf16::from_f32(*x);
                    let f16: [Vec<_>; 2] =
                        [&c.keys, &c.values].map(|x| x.iter().map(half).collect());
                    let bf16: [Vec<_>; 2] =
                        [&c.keys, &c.values].map(|x| x.iter().map(brain).collect());
                    let bits = f16
                        .each_ref()
                        .map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                    let brain_bits = bf16
                        .each_ref()
                        .map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                    let rounded = f16
                        .each_ref()
                        .map(|x| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
                    let brain_rounded = bf16
                        .each_ref()
                        .map(|x| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
                    let [q8_keys, q4_keys] = quantised(&c.keys, kv_heads, k);
                    let [q8_values, q4_values] = quantised(&c.values, kv_heads, v);
                    for (keys, values, exact) in [
                        (
                            Cells::Q8(&q8_keys.0),
                            Cells::Q8(&q8_values.0),
                            [&q8_keys.1, &q8_values.1],
                        ),
                        (
                            Cells::Q4(&q4_keys.0),
                            Cells::Q4(&q4_values.0),
                            [&q4_keys.1, &q4_values.1],
                        ),
                        (p.keys, p.values, [&c.keys, &c.values]),
                        (
                            Cells::F16(&bits[0]),
                            Cells::F16(&bits[1]),
                            rounded.each_ref(),
                        ),
                        (
                            Cells::Bf16(&brain_bits[0]),
                            Cells::Bf16(&brain_bits[1]),
                            brain_rounded.each_ref(),
                        ),
                    ] {
                        let p = Paged { keys, values, ..p };
                        let mut out = vec![f32::NAN; c.positions.len() * heads * v];
                        assert!(paged(isa, &mut pool, &p, &mut out, &scratch));
                        let want = reference(&p, exact[0], exact[1]);
                        for (i, (got, want)) in out.iter().zip(&want).enumerate() {
                            assert!(
                                (f64::from(*got) - want).abs() < 2e-5,
                                "{} {sequences:?} {window} {chunk} {softcap} at {i}: {got} {want}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bad_indices_are_found_before_the_kernels_run() {
    let mut numbers = Numbers(1);
    let c = case(&mut numbers, &[(3, 2)], 2, 1, 8, 8, false);
    let p = Paged {
        q: &c.q,
        keys: Cells::F32(&c.keys),
        values: Cells::F32(&c.values),
        positions: &c.positions,
        page_table: &c.page_table,
        row_starts: &c.row_starts,
        sinks: &[],
        heads: 2,
        kv_heads: 1,
        k_dim: 8,
        v_dim: 8,
        page_size: PAGE,
        scale: 1.0,
        softcap: 0.0,
        window: 0,
        chunk: 0,
        keeps_rows_apart: false,
    };
    assert!(p.is_valid());
    assert!(
        !Paged {
            positions: &[3, 999],
            ..p
        }
        .is_valid()
    );
    assert!(
        !Paged {
            positions: &[3, -1],
            ..p
        }
        .is_valid()
    );
    assert!(
        !Paged {
            page_table: &[1, 77],
            ..p
        }
        .is_valid()
    );
    assert!(
        !Paged {
            row_starts: &[0, 1],
            ..p
        }
        .is_valid()
    );
    assert!(!Paged { heads: 3, ..p }.is_valid());
}

/// A key or a value that is no f16 is seen in the result of every row that attends to it, and in none of another
/// sequence.
#[test]
fn what_is_beyond_half_caches_is_never_silent() {
    let mut numbers = Numbers(12);
    let mut pool = Pool::new(2).unwrap();
    let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
    // A row that sees position 2, one of another sequence, and a block of rows from position 0 on.
    let c = case(&mut numbers, &[(9, 1), (3, 1), (0, 6)], 2, 1, 16, 16, false);
    let p = Paged {
        q: &c.q,
        keys: Cells::F32(&c.keys),
        values: Cells::F32(&c.values),
        positions: &c.positions,
        page_table: &c.page_table,
        row_starts: &c.row_starts,
        sinks: &[],
        heads: 2,
        kv_heads: 1,
        k_dim: 16,
        v_dim: 16,
        page_size: PAGE,
        scale: 1.0,
        softcap: 0.0,
        window: 0,
        chunk: 0,
        keeps_rows_apart: false,
    };
    let bad_slots = [p.pool_row(0, 2), p.pool_row(2, 2)];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for (bad, in_keys) in [
            (7e4, true),
            (-7e4, true),
            (7e4, false),
            (f32::INFINITY, true),
        ] {
            let mut pools = [c.keys.clone(), c.values.clone()];
            for slot in bad_slots {
                pools[usize::from(!in_keys)][slot * 16 + 5] = bad;
            }
            let [keys, values] = pools.map(|rows| {
                let slots: Vec<i32> = (0..rows.len() as i32 / 16).collect();
                let mut stored = vec![0; rows.len()];
                CellsMut::F16(&mut stored).append(&slots, &rows, [1, 16]);
                stored
            });
            let p = Paged {
                keys: Cells::F16(&keys),
                values: Cells::F16(&values),
                ..p
            };
            let mut out = vec![0.0; c.positions.len() * 2 * 16];
            assert!(paged(isa, &mut pool, &p, &mut out, &scratch));
            // Rows 0 and 4 to 7 attend to the position, row 1 is of another sequence.
            for (row, out) in out.chunks_exact(2 * 16).enumerate() {
                let is_nan = |head: &[f32]| head.iter().any(|x| x.is_nan());
                let found = out.chunks_exact(16).filter(|head| is_nan(head)).count();
                let expected = match row {
                    0 | 4.. => Some(2),
                    1 => Some(0),
                    // A block of rows multiplies what a row does not see by 0.
                    _ => None,
                };
                let is_right = expected.is_none_or(|n| n == found);
                assert!(
                    is_right,
                    "{} {bad} {in_keys} row {row}: {found}",
                    isa.name()
                );
            }
        }
    }
}

/// As above where scores fill whole vectors, whose exponential knows no such thing.
#[test]
fn what_is_no_number_reaches_every_row_that_sees_it() {
    let mut numbers = Numbers(13);
    let mut pool = Pool::new(2).unwrap();
    let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
    let c = case(&mut numbers, &[(0, 150)], 2, 2, 16, 16, false);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut p = Paged {
                q: &c.q,
                keys: Cells::F32(&[]),
                values: Cells::F32(&c.values),
                positions: &c.positions,
                page_table: &c.page_table,
                row_starts: &c.row_starts,
                sinks: &[],
                heads: 2,
                kv_heads: 2,
                k_dim: 16,
                v_dim: 16,
                page_size: PAGE,
                scale: 1.0,
                softcap: 0.0,
                window: 0,
                chunk: 0,
                keeps_rows_apart: false,
            };
            let mut keys = c.keys.clone();
            keys[(p.pool_row(0, 70) * 2 + 1) * 16 + 3] = bad;
            p.keys = Cells::F32(&keys);
            let mut out = vec![0.0; 150 * 2 * 16];
            assert!(paged(isa, &mut pool, &p, &mut out, &scratch));
            for (i, head) in out.chunks_exact(16).enumerate() {
                let sees = i / 2 >= 70 && i % 2 == 1;
                let is_right = head.iter().all(|x| x.is_nan() == sees);
                assert!(is_right, "{} {bad} at {i}: {head:?}", isa.name());
            }
        }
    }
}
