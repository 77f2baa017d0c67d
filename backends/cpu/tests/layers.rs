//! Norms, rotary embedding and attention against a plain f64 computation.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, close_to, noise};
use mlxcel_abi::kinds::mask;
use mlxcel_abi::ops_args::{AttentionArgs, PagedAttentionArgs, RopeArgs};
use mlxcel_abi::{DType, Tensor, status};

const TYPES: [(DType, f32); 3] = [(DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 4e-2)];

#[test]
fn norms_keep_the_activations_type() {
    let d = Device::open();
    let x = [1.0_f32, -2.0, 3.0, 0.5];
    let rms = (x.iter().map(|v| v * v).sum::<f32>() / 4.0 + 1e-5).sqrt();
    let mean = x.iter().sum::<f32>() / 4.0;
    let deviation = (x.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 4.0 + 1e-5).sqrt();
    let w = d.f32s(&[1.0, 2.0, 3.0, 4.0], &[4]);
    let b = d.f32s(&[0.5; 4], &[4]);
    let none = Tensor::NONE;
    for (dtype, _) in TYPES {
        let t = d.of(dtype, &x, &[1, 4]);
        let plain: Vec<f32> = x.iter().map(|v| v / rms).collect();
        let weighted: Vec<f32> = plain
            .iter()
            .zip([1.0, 2.0, 3.0, 4.0])
            .map(|(v, w)| v * w)
            .collect();
        d.expect(op!(d, rms_norm, t, none, 1e-5), dtype, &[1, 4], &plain);
        d.expect(op!(d, rms_norm, t, w, 1e-5), dtype, &[1, 4], &weighted);
        let plain: Vec<f32> = x.iter().map(|v| (v - mean) / deviation).collect();
        let weighted: Vec<f32> = plain
            .iter()
            .zip([1.0, 2.0, 3.0, 4.0])
            .map(|(v, w)| v * w + 0.5)
            .collect();
        d.expect(
            op!(d, layer_norm, t, none, none, 1e-5),
            dtype,
            &[1, 4],
            &plain,
        );
        d.expect(op!(d, layer_norm, t, w, b, 1e-5), dtype, &[1, 4], &weighted);
        let only_bias: Vec<f32> = plain.iter().map(|v| v + 0.5).collect();
        d.expect(
            op!(d, layer_norm, t, none, b, 1e-5),
            dtype,
            &[1, 4],
            &only_bias,
        );
    }
    assert!(op!(d, rms_norm, d.f32s(&x, &[4]), d.f32s(&[1.0], &[1]), 1e-5).is_err());
    assert!(op!(d, rms_norm, d.f32s(&[1.0], &[]), none, 1e-5).is_err());
}

struct Rotation {
    dims: usize,
    interleaved: bool,
    base: f64,
    scale: f64,
    freqs: Option<Vec<f32>>,
}

fn rotated(x: &[f32], positions: &[i32], heads: usize, width: usize, r: &Rotation) -> Vec<f32> {
    let half = r.dims / 2;
    let mut out = x.to_vec();
    for (t, &position) in positions.iter().enumerate() {
        for h in 0..heads {
            let at = (t * heads + h) * width;
            for i in 0..half {
                let period = r.freqs.as_ref().map_or_else(
                    || r.base.powf(2.0 * i as f64 / r.dims as f64),
                    |f| f64::from(f[i]),
                );
                let (sin, cos) = (r.scale * f64::from(position) / period).sin_cos();
                let (a, b) = if r.interleaved {
                    (2 * i, 2 * i + 1)
                } else {
                    (i, i + half)
                };
                let (va, vb) = (f64::from(x[at + a]), f64::from(x[at + b]));
                out[at + a] = (va * cos - vb * sin) as f32;
                out[at + b] = (va * sin + vb * cos) as f32;
            }
        }
    }
    out
}

#[test]
fn rotary_embedding_has_a_position_per_row() {
    let d = Device::open();
    let positions = [0, 5, 1000];
    let x = noise(11, 3 * 2 * 8);
    let cases = [
        Rotation {
            dims: 8,
            interleaved: false,
            base: 10_000.0,
            scale: 1.0,
            freqs: None,
        },
        Rotation {
            dims: 8,
            interleaved: true,
            base: 500_000.0,
            scale: 0.25,
            freqs: None,
        },
        Rotation {
            dims: 4,
            interleaved: false,
            base: 100.0,
            scale: 1.0,
            freqs: None,
        },
        Rotation {
            dims: 4,
            interleaved: true,
            base: 100.0,
            scale: 2.0,
            freqs: Some(vec![3.0, 70.0]),
        },
        Rotation {
            dims: 8,
            interleaved: false,
            base: 1.0,
            scale: 1.0,
            freqs: Some(vec![1.0, 2.0, 4.0, 1e9]),
        },
    ];
    let rows = d.i32s(&positions, &[3]);
    for (case, r) in cases.iter().enumerate() {
        let expected = rotated(&x, &positions, 2, 8, r);
        for (dtype, tolerance) in TYPES {
            let args = RopeArgs {
                x: d.of(dtype, &x, &[3, 2, 8]),
                positions: rows,
                dims: r.dims as u32,
                interleaved: u32::from(r.interleaved),
                base: r.base as f32,
                scale: r.scale as f32,
                freqs: r
                    .freqs
                    .as_ref()
                    .map_or(Tensor::NONE, |f| d.f32s(f, &[f.len() as i64])),
                ..RopeArgs::default()
            };
            // Twice: the second time the angles come from the memo.
            for _ in 0..2 {
                let out = op!(d, rope, &raw const args)
                    .unwrap_or_else(|error| panic!("case {case}: {error}"));
                assert_eq!((d.dtype(out), d.shape(out)), (dtype, vec![3, 2, 8]));
                close_to(&d.read(out), &expected, tolerance.max(2e-4));
            }
        }
    }
}

#[test]
fn wrong_rotations_are_refused() {
    let d = Device::open();
    let right = RopeArgs {
        x: d.f32s(&[0.0; 8], &[1, 1, 8]),
        positions: d.i32s(&[1], &[1]),
        dims: 8,
        ..RopeArgs::default()
    };
    assert!(op!(d, rope, &raw const right).is_ok());
    for wrong in [
        RopeArgs { dims: 7, ..right },
        RopeArgs { dims: 0, ..right },
        RopeArgs { dims: 10, ..right },
        RopeArgs {
            dims: u32::MAX,
            ..right
        },
        RopeArgs {
            positions: d.i32s(&[1, 2], &[2]),
            ..right
        },
        RopeArgs {
            positions: d.f32s(&[1.0], &[1]),
            ..right
        },
        RopeArgs {
            x: d.f32s(&[0.0; 8], &[1, 8]),
            ..right
        },
        RopeArgs {
            freqs: d.f32s(&[1.0], &[1]),
            ..right
        },
        RopeArgs { base: 0.0, ..right },
        RopeArgs {
            interleaved: 2,
            ..right
        },
    ] {
        assert_eq!(
            op!(d, rope, &raw const wrong).unwrap_err().code,
            status::INVALID_ARGUMENT
        );
    }
}

#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    width: usize,
    v_width: usize,
}

#[derive(Clone, Copy)]
struct Scores<'a> {
    scale: f64,
    softcap: f64,
    sinks: Option<&'a [f32]>,
}

/// Attention in f64; `bias(b, h, q, k)` is added to a score, minus infinity hides a key.
fn reference(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    s: Shape,
    scores: Scores<'_>,
    bias: impl Fn(usize, usize, usize, usize) -> f64,
) -> Vec<f32> {
    let mut out = vec![0.0_f32; s.batch * s.heads * s.queries * s.v_width];
    for b in 0..s.batch {
        for h in 0..s.heads {
            let kv = b * s.kv_heads + h / (s.heads / s.kv_heads);
            for i in 0..s.queries {
                let row = ((b * s.heads + h) * s.queries + i) * s.width;
                let logits: Vec<f64> = (0..s.keys)
                    .map(|j| {
                        let key = (kv * s.keys + j) * s.width;
                        let dot: f64 = (0..s.width)
                            .map(|x| f64::from(q[row + x]) * f64::from(k[key + x]))
                            .sum();
                        let mut score = dot * scores.scale;
                        if scores.softcap > 0.0 {
                            score = scores.softcap * (score / scores.softcap).tanh();
                        }
                        score + bias(b, h, i, j)
                    })
                    .collect();
                let sink = scores
                    .sinks
                    .map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
                let top = logits.iter().copied().fold(sink, f64::max);
                let total: f64 =
                    logits.iter().map(|l| (l - top).exp()).sum::<f64>() + (sink - top).exp();
                for x in 0..s.v_width {
                    let value: f64 = (0..s.keys)
                        .map(|j| {
                            (logits[j] - top).exp() / total
                                * f64::from(v[(kv * s.keys + j) * s.v_width + x])
                        })
                        .sum();
                    out[((b * s.heads + h) * s.queries + i) * s.v_width + x] = value as f32;
                }
            }
        }
    }
    out
}

#[test]
fn dense_attention_in_every_variant() {
    let d = Device::open();
    let s = Shape {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        queries: 3,
        keys: 5,
        width: 8,
        v_width: 6,
    };
    let dims = |heads: usize, rows: usize, width: usize| {
        [s.batch as i64, heads as i64, rows as i64, width as i64]
    };
    let (q, k, v) = (
        noise(1, 2 * 4 * 3 * 8),
        noise(2, 2 * 2 * 5 * 8),
        noise(3, 2 * 2 * 5 * 6),
    );
    let sinks = [0.5_f32, -1.0, 2.0, 0.0];
    let additive = noise(4, 3 * 5);
    let visible: Vec<bool> = (0..15).map(|i| i % 4 != 1).collect();
    let hidden = |seen: bool| if seen { 0.0 } else { f64::NEG_INFINITY };
    for (dtype, tolerance) in TYPES {
        let base = AttentionArgs {
            q: d.of(dtype, &q, &dims(4, 3, 8)),
            k: d.of(dtype, &k, &dims(2, 5, 8)),
            v: d.of(dtype, &v, &dims(2, 5, 6)),
            scale: 0.35,
            ..AttentionArgs::default()
        };
        let check = |args: AttentionArgs,
                     scores: Scores<'_>,
                     bias: &dyn Fn(usize, usize, usize, usize) -> f64| {
            let out = op!(d, attention, &raw const args).unwrap();
            assert_eq!((d.dtype(out), d.shape(out)), (dtype, vec![2, 4, 3, 6]));
            close_to(
                &d.read(out),
                &reference(&q, &k, &v, s, scores, bias),
                tolerance,
            );
        };
        for softcap in [0.0, 1.5] {
            for sink in [None, Some(&sinks[..])] {
                let scores = Scores {
                    scale: f64::from(0.35_f32),
                    softcap,
                    sinks: sink,
                };
                let base = AttentionArgs {
                    softcap: softcap as f32,
                    sinks: sink.map_or(Tensor::NONE, |values| d.f32s(values, &[4])),
                    ..base
                };
                check(base, scores, &|_, _, _, _| 0.0);
                let causal = AttentionArgs {
                    mask_kind: mask::CAUSAL,
                    ..base
                };
                check(causal, scores, &|_, _, i, j| hidden(j <= i + 2));
                let window = AttentionArgs {
                    window: 2,
                    ..causal
                };
                check(window, scores, &|_, _, i, j| {
                    hidden(j <= i + 2 && j + 2 > i + 2)
                });
                let bools = AttentionArgs {
                    mask_kind: mask::TENSOR,
                    mask: d.bools(&visible, &[3, 5]),
                    ..base
                };
                check(bools, scores, &|_, _, i, j| hidden(visible[i * 5 + j]));
                let added = AttentionArgs {
                    mask: d.f32s(&additive, &[1, 1, 3, 5]),
                    ..bools
                };
                check(added, scores, &|_, _, i, j| f64::from(additive[i * 5 + j]));
            }
        }
    }
}

#[test]
fn wrong_attention_is_refused() {
    let d = Device::open();
    let right = AttentionArgs {
        q: d.f32s(&[0.0; 8], &[1, 2, 1, 4]),
        k: d.f32s(&[0.0; 8], &[1, 1, 2, 4]),
        v: d.f32s(&[0.0; 8], &[1, 1, 2, 4]),
        ..AttentionArgs::default()
    };
    assert!(op!(d, attention, &raw const right).is_ok());
    let cases = [
        AttentionArgs {
            k: d.f32s(&[], &[1, 0, 2, 4]),
            ..right
        },
        AttentionArgs {
            k: d.f32s(&[], &[1, 1, 0, 4]),
            v: d.f32s(&[], &[1, 1, 0, 4]),
            ..right
        },
        AttentionArgs {
            k: d.f32s(&[0.0; 6], &[1, 1, 2, 3]),
            ..right
        },
        AttentionArgs {
            q: d.f32s(&[0.0; 8], &[2, 4]),
            ..right
        },
        AttentionArgs {
            mask_kind: mask::TENSOR,
            ..right
        },
        AttentionArgs {
            mask: d.bools(&[true], &[1]),
            ..right
        },
        AttentionArgs { window: 3, ..right },
        AttentionArgs {
            softcap: -1.0,
            ..right
        },
        AttentionArgs {
            sinks: d.f32s(&[0.0], &[1]),
            ..right
        },
        AttentionArgs {
            mask_kind: mask::TENSOR,
            mask: d.bools(&[true; 3], &[3]),
            ..right
        },
        AttentionArgs {
            mask_kind: mask::TENSOR,
            mask: d.i32s(&[1, 1], &[2]),
            ..right
        },
    ];
    for wrong in cases {
        assert_eq!(
            op!(d, attention, &raw const wrong).unwrap_err().code,
            status::INVALID_ARGUMENT
        );
    }
    let unknown = AttentionArgs {
        mask_kind: 77,
        ..right
    };
    assert_eq!(
        op!(d, attention, &raw const unknown).unwrap_err().code,
        status::UNIMPLEMENTED
    );
}

/// One sequence of a packed step: its pages, how many keys it has already, how many rows it brings.
struct Sequence {
    pages: Vec<i32>,
    past: usize,
    rows: usize,
}

const PAGE: usize = 4;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const WIDTH: usize = 8;
const V_WIDTH: usize = 6;

struct Options {
    window: u32,
    softcap: f32,
    with_sinks: bool,
    with_starts: bool,
    pool: DType,
}

fn check_paged(
    d: &Device,
    sequences: &[Sequence],
    padding: usize,
    options: &Options,
    (dtype, tolerance): (DType, f32),
) {
    let n_pages = 9;
    let real: usize = sequences.iter().map(|s| s.rows).sum();
    let rows = real + padding;
    let (q, k, v) = (
        noise(1, rows * HEADS * WIDTH),
        noise(2, rows * KV_HEADS * WIDTH),
        noise(3, rows * KV_HEADS * V_WIDTH),
    );
    let mut k_pool = noise(4, n_pages * PAGE * KV_HEADS * WIDTH);
    let mut v_pool = noise(5, n_pages * PAGE * KV_HEADS * V_WIDTH);
    let sinks = [0.5_f32, -1.0, 2.0, 0.0];
    let widest = sequences.iter().map(|s| s.pages.len()).max().unwrap_or(1);
    let (mut slots, mut positions, mut row_sequences, mut table, mut starts) =
        (vec![], vec![], vec![], vec![], vec![0_u32]);
    for (index, sequence) in sequences.iter().enumerate() {
        for row in 0..sequence.rows {
            let position = sequence.past + row;
            slots.push(sequence.pages[position / PAGE] * PAGE as i32 + (position % PAGE) as i32);
            positions.push(position as i32);
            row_sequences.push(index as i32);
        }
        table.extend((0..widest).map(|i| sequence.pages.get(i).copied().unwrap_or(0)));
        starts.push(slots.len() as u32);
    }
    for row in 0..padding {
        slots.push(row as i32);
        positions.push(0);
        row_sequences.push(0);
    }
    let args = PagedAttentionArgs {
        q: d.of(dtype, &q, &[rows as i64, HEADS as i64, WIDTH as i64]),
        k: d.of(dtype, &k, &[rows as i64, KV_HEADS as i64, WIDTH as i64]),
        v: d.of(dtype, &v, &[rows as i64, KV_HEADS as i64, V_WIDTH as i64]),
        k_pool: d.of(
            options.pool,
            &k_pool,
            &[n_pages as i64, PAGE as i64, KV_HEADS as i64, WIDTH as i64],
        ),
        v_pool: d.of(
            options.pool,
            &v_pool,
            &[n_pages as i64, PAGE as i64, KV_HEADS as i64, V_WIDTH as i64],
        ),
        slots: d.i32s(&slots, &[rows as i64]),
        row_sequences: d.i32s(&row_sequences, &[rows as i64]),
        positions: d.i32s(&positions, &[rows as i64]),
        page_table: d.i32s(&table, &[sequences.len() as i64, widest as i64]),
        row_starts: if options.with_starts {
            starts.as_ptr()
        } else {
            std::ptr::null()
        },
        n_sequences: sequences.len() as u32,
        window: options.window,
        scale: 0.35,
        softcap: options.softcap,
        sinks: if options.with_sinks {
            d.f32s(&sinks, &[HEADS as i64])
        } else {
            Tensor::NONE
        },
        ..PagedAttentionArgs::default()
    };
    let mut out = [Tensor::NONE; 3];
    run!(d, paged_attention, &raw const args, &raw mut out).unwrap();
    for (row, &slot) in slots.iter().enumerate() {
        let (at, width) = (slot as usize * KV_HEADS * WIDTH, KV_HEADS * WIDTH);
        k_pool[at..at + width].copy_from_slice(&k[row * width..(row + 1) * width]);
        let (at, width) = (slot as usize * KV_HEADS * V_WIDTH, KV_HEADS * V_WIDTH);
        v_pool[at..at + width].copy_from_slice(&v[row * width..(row + 1) * width]);
    }
    assert_eq!(
        (d.dtype(out[0]), d.shape(out[0])),
        (dtype, vec![rows as i64, HEADS as i64, V_WIDTH as i64])
    );
    assert_eq!(
        (d.dtype(out[1]), d.dtype(out[2])),
        (options.pool, options.pool)
    );
    close_to(&d.read(out[1]), &k_pool, tolerance);
    close_to(&d.read(out[2]), &v_pool, tolerance);
    let found = d.read(out[0]);
    for row in 0..real {
        let position = positions[row] as usize;
        let pages = &sequences[row_sequences[row] as usize].pages;
        let place = |j: usize| pages[j / PAGE] as usize * PAGE + j % PAGE;
        let first = if options.window > 0 {
            (position + 1).saturating_sub(options.window as usize)
        } else {
            0
        };
        let mut keys = vec![];
        let mut values = vec![];
        for h in 0..KV_HEADS {
            for j in first..=position {
                let at = (place(j) * KV_HEADS + h) * WIDTH;
                keys.extend_from_slice(&k_pool[at..at + WIDTH]);
                let at = (place(j) * KV_HEADS + h) * V_WIDTH;
                values.extend_from_slice(&v_pool[at..at + V_WIDTH]);
            }
        }
        let shape = Shape {
            batch: 1,
            heads: HEADS,
            kv_heads: KV_HEADS,
            queries: 1,
            keys: position + 1 - first,
            width: WIDTH,
            v_width: V_WIDTH,
        };
        let scores = Scores {
            scale: f64::from(0.35_f32),
            softcap: f64::from(options.softcap),
            sinks: options.with_sinks.then_some(&sinks[..]),
        };
        let own = &q[row * HEADS * WIDTH..(row + 1) * HEADS * WIDTH];
        let expected = reference(own, &keys, &values, shape, scores, |_, _, _, _| 0.0);
        close_to(
            &found[row * HEADS * V_WIDTH..(row + 1) * HEADS * V_WIDTH],
            &expected,
            tolerance,
        );
    }
}

#[test]
fn paged_attention_for_any_mixture_of_rows() {
    let d = Device::open();
    let mixtures: [Vec<Sequence>; 4] = [
        // Decode: one row each.
        vec![
            Sequence {
                pages: vec![3, 1],
                past: 6,
                rows: 1,
            },
            Sequence {
                pages: vec![7],
                past: 0,
                rows: 1,
            },
            Sequence {
                pages: vec![2, 5, 8],
                past: 9,
                rows: 1,
            },
        ],
        // Prefill of one.
        vec![Sequence {
            pages: vec![4, 2],
            past: 0,
            rows: 7,
        }],
        // A chunk between decodes, a speculative pair, and a sequence without rows.
        vec![
            Sequence {
                pages: vec![3],
                past: 2,
                rows: 1,
            },
            Sequence {
                pages: vec![1, 6],
                past: 3,
                rows: 5,
            },
            Sequence {
                pages: vec![5],
                past: 1,
                rows: 0,
            },
            Sequence {
                pages: vec![2],
                past: 1,
                rows: 2,
            },
            Sequence {
                pages: vec![7],
                past: 2,
                rows: 2,
            },
        ],
        // Equal chunks.
        vec![
            Sequence {
                pages: vec![1],
                past: 0,
                rows: 3,
            },
            Sequence {
                pages: vec![2],
                past: 1,
                rows: 3,
            },
        ],
    ];
    for sequences in &mixtures {
        for kind in TYPES {
            for with_starts in [true, false] {
                let options = Options {
                    window: 0,
                    softcap: 0.0,
                    with_sinks: false,
                    with_starts,
                    pool: kind.0,
                };
                check_paged(&d, sequences, 0, &options, kind);
                check_paged(&d, sequences, 3, &options, kind);
            }
        }
        let options = Options {
            window: 3,
            softcap: 2.0,
            with_sinks: true,
            with_starts: true,
            pool: DType::F16,
        };
        check_paged(&d, sequences, 1, &options, (DType::F32, 1e-2));
        let options = Options {
            window: 2,
            softcap: 0.0,
            with_sinks: true,
            with_starts: true,
            pool: DType::F32,
        };
        check_paged(&d, sequences, 0, &options, TYPES[0]);
    }
}

#[test]
fn wrong_steps_are_refused() {
    let d = Device::open();
    let starts = [0_u32, 1];
    let right = PagedAttentionArgs {
        q: d.f32s(&[0.0; 8], &[1, 2, 4]),
        k: d.f32s(&[0.0; 4], &[1, 1, 4]),
        v: d.f32s(&[0.0; 4], &[1, 1, 4]),
        k_pool: d.f32s(&[0.0; 16], &[2, 2, 1, 4]),
        v_pool: d.f32s(&[0.0; 16], &[2, 2, 1, 4]),
        slots: d.i32s(&[2], &[1]),
        row_sequences: d.i32s(&[0], &[1]),
        positions: d.i32s(&[0], &[1]),
        page_table: d.i32s(&[1], &[1, 1]),
        row_starts: starts.as_ptr(),
        n_sequences: 1,
        ..PagedAttentionArgs::default()
    };
    let call = |args: PagedAttentionArgs| {
        let mut out = [Tensor::NONE; 3];
        run!(d, paged_attention, &raw const args, &raw mut out).map(|()| out)
    };
    assert!(call(right).is_ok());
    let backwards = [1_u32, 0];
    let beyond = [0_u32, 9];
    for wrong in [
        PagedAttentionArgs {
            row_starts: backwards.as_ptr(),
            ..right
        },
        PagedAttentionArgs {
            row_starts: beyond.as_ptr(),
            ..right
        },
        PagedAttentionArgs {
            n_sequences: 0,
            ..right
        },
        PagedAttentionArgs {
            slots: d.i32s(&[1, 2], &[2]),
            ..right
        },
        PagedAttentionArgs {
            positions: d.f32s(&[1.0], &[1]),
            ..right
        },
        PagedAttentionArgs {
            page_table: d.i32s(&[1], &[1]),
            ..right
        },
        PagedAttentionArgs {
            v_pool: d.f32s(&[0.0; 16], &[1, 4, 1, 4]),
            ..right
        },
        PagedAttentionArgs {
            k_pool: d.i32s(&[0; 16], &[2, 2, 1, 4]),
            ..right
        },
        PagedAttentionArgs {
            q: Tensor::NONE,
            ..right
        },
    ] {
        assert_eq!(call(wrong).unwrap_err().code, status::INVALID_ARGUMENT);
    }
}
