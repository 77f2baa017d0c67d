//! Dense attention.

use mlxcel_abi::ops_args::AttentionArgs;
use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::{Backend, DenseAttention, Result, Tensor};

/// Batch, query heads, key heads, queries, keys, key width, value width.
type Sizes = [i64; 7];

const SIZES: [Sizes; 7] = [
    [1, 1, 1, 1, 1, 8, 8],
    [1, 4, 2, 1, 9, 64, 64],
    [1, 4, 4, 5, 5, 64, 64],
    [2, 6, 2, 3, 7, 16, 16],
    [1, 4, 1, 9, 17, 128, 128],
    [1, 2, 2, 4, 6, 24, 16],
    [1, 2, 2, 33, 33, 40, 40],
];

/// Scores may be rounded to the activation's type before the softmax.
pub(super) const NEAR: Tolerance = Tolerance::units(64.0, 4.0).floor(1.0);

/// Queries, keys and values for some sizes.
pub(super) struct Inputs {
    pub q: Array,
    pub k: Array,
    pub v: Array,
}

impl Inputs {
    pub(super) fn new(dtype: DType, [b, h, hkv, tq, tk, d, dv]: Sizes) -> Self {
        Self {
            q: Array::usual(dtype, &[b, h, tq, d], 1),
            k: Array::usual(dtype, &[b, hkv, tk, d], 2),
            v: Array::usual(dtype, &[b, hkv, tk, dv], 3),
        }
    }

    fn run(&self, b: &Backend, options: &DenseAttention<'_>) -> Result<Tensor> {
        self.q
            .on(b)?
            .attention(&self.k.on(b)?, &self.v.on(b)?, options)
    }
}

fn scale(d: i64) -> f32 {
    1.0 / (d as f32).sqrt()
}

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in FLOATS {
        for sizes in SIZES {
            plain(suite, dtype, sizes);
            masked(suite, dtype, sizes);
        }
        layouts(suite, dtype);
        far_scores(suite, dtype);
    }
    refusals(suite);
}

fn plain(suite: &mut Suite<'_>, dtype: DType, sizes: Sizes) {
    let [_, h, _, tq, tk, d, _] = sizes;
    let inputs = Inputs::new(dtype, sizes);
    let options = DenseAttention {
        scale: scale(d),
        ..DenseAttention::default()
    };
    let name = dtype.name();
    suite.check("attention", format!("{name} {sizes:?}"), NEAR, |b| {
        inputs.run(b, &options)
    });
    let capped = DenseAttention {
        softcap: 2.0,
        ..options
    };
    suite.check(
        "attention",
        format!("{name} {sizes:?} soft cap"),
        NEAR,
        |b| inputs.run(b, &capped),
    );
    let sinks = Array::usual(dtype, &[h], 4);
    suite.check("attention", format!("{name} {sizes:?} sinks"), NEAR, |b| {
        let sinks = sinks.on(b)?;
        inputs.run(
            b,
            &DenseAttention {
                sinks: Some(&sinks),
                ..options
            },
        )
    });
    // Queries before the first key would see nothing.
    if tq > tk {
        return;
    }
    for window in [0, 1, 3] {
        let causal = DenseAttention {
            causal: true,
            window,
            ..options
        };
        let case = format!("{name} {sizes:?} causal window {window}");
        suite.check("attention", case, NEAR, |b| inputs.run(b, &causal));
    }
    suite.check(
        "attention",
        format!("{name} {sizes:?} causal, cap, sinks, window"),
        NEAR,
        |b| {
            let sinks = sinks.on(b)?;
            inputs.run(
                b,
                &DenseAttention {
                    causal: true,
                    window: 2,
                    softcap: 5.0,
                    sinks: Some(&sinks),
                    ..options
                },
            )
        },
    );
}

fn masked(suite: &mut Suite<'_>, dtype: DType, sizes: Sizes) {
    let [batch, h, _, tq, tk, d, _] = sizes;
    let inputs = Inputs::new(dtype, sizes);
    let options = DenseAttention {
        scale: scale(d),
        ..DenseAttention::default()
    };
    for dims in [
        &[tq, tk][..],
        &[1, 1, tq, tk],
        &[batch, h, tq, tk],
        &[1, tk],
    ] {
        // Every query keeps its first key.
        let count: i64 = dims.iter().product();
        let bits = Array::usual(DType::BOOL, dims, 5).0.reals().into_owned();
        let keep = bits
            .into_iter()
            .enumerate()
            .map(|(i, bit)| if i as i64 % tk == 0 { 1.0 } else { bit });
        let keep: Vec<f64> = keep.take(count as usize).collect();
        let bools = Array::of(DType::BOOL, dims, keep.iter().copied());
        let case = format!("{} {sizes:?} bool mask {dims:?}", dtype.name());
        suite.check("attention", case, NEAR, |b| {
            let mask = bools.on(b)?;
            inputs.run(
                b,
                &DenseAttention {
                    mask: Some(&mask),
                    ..options
                },
            )
        });
        for of in [dtype, DType::F32] {
            let added = Array::of(
                of,
                dims,
                keep.iter()
                    .map(|&keep| if keep == 0.0 { f64::NEG_INFINITY } else { 0.25 }),
            );
            let case = format!("{} {sizes:?} {} mask {dims:?}", dtype.name(), of.name());
            suite.check("attention", case, NEAR, |b| {
                let mask = added.on(b)?;
                inputs.run(
                    b,
                    &DenseAttention {
                        mask: Some(&mask),
                        ..options
                    },
                )
            });
        }
    }
}

fn layouts(suite: &mut Suite<'_>, dtype: DType) {
    let inputs = Inputs::new(dtype, [2, 4, 2, 3, 5, 16, 16]);
    let options = DenseAttention {
        scale: 0.25,
        causal: true,
        ..DenseAttention::default()
    };
    for layout in [Layout::Transposed, Layout::Strided] {
        suite.check(
            "attention",
            format!("{} {layout:?}", dtype.name()),
            NEAR,
            |b| {
                let [q, k, v] =
                    [&inputs.q, &inputs.k, &inputs.v].map(|array| array.laid_out(b, layout));
                q?.attention(&k?, &v?, &options)
            },
        );
    }
    // As projections give it: [B, T, H, D] with heads moved forward.
    let rows = Array::usual(dtype, &[1, 6, 4, 16], 6);
    suite.check(
        "attention",
        format!("{} heads moved", dtype.name()),
        NEAR,
        |b| {
            let heads = rows.on(b)?.transpose(&[0, 2, 1, 3])?;
            heads.attention(&heads, &heads, &options)
        },
    );
}

/// Scores whose exponentials overflow unless the largest is taken off first.
fn far_scores(suite: &mut Suite<'_>, dtype: DType) {
    let q = Array::of(dtype, &[1, 1, 1, 2], [8.0, 0.0]);
    let k = Array::of(dtype, &[1, 1, 3, 2], [32.0, 0.0, 31.0, 0.0, -32.0, 0.0]);
    let v = Array::usual(dtype, &[1, 1, 3, 4], 7);
    let options = DenseAttention {
        scale: 1.0,
        ..DenseAttention::default()
    };
    suite.check(
        "attention",
        format!("{} large scores", dtype.name()),
        NEAR,
        |b| q.on(b)?.attention(&k.on(b)?, &v.on(b)?, &options),
    );
}

fn refusals(suite: &mut Suite<'_>) {
    let mut refuse = |case: &str, q: &[i64], k: &[i64], v: &[i64]| {
        let [q, k, v] = [q, k, v].map(|dims| Array::usual(DType::F32, dims, 8));
        let options = DenseAttention {
            scale: 1.0,
            ..DenseAttention::default()
        };
        suite.refuses("attention", case, status::INVALID_ARGUMENT, |b| {
            q.on(b)?.attention(&k.on(b)?, &v.on(b)?, &options)
        });
    };
    refuse(
        "heads that key heads do not divide",
        &[1, 3, 2, 4],
        &[1, 2, 2, 4],
        &[1, 2, 2, 4],
    );
    refuse(
        "keys of another width",
        &[1, 2, 2, 4],
        &[1, 2, 2, 5],
        &[1, 2, 2, 4],
    );
    refuse(
        "fewer values than keys",
        &[1, 2, 2, 4],
        &[1, 2, 3, 4],
        &[1, 2, 2, 4],
    );
    refuse("three dimensions", &[2, 2, 4], &[2, 2, 4], &[2, 2, 4]);
    let x = Array::usual(DType::F32, &[1, 1, 2, 4], 9);
    suite.refuses(
        "attention",
        "a mask that does not fit",
        status::INVALID_ARGUMENT,
        |b| {
            let (x, mask) = (x.on(b)?, Array::usual(DType::BOOL, &[3, 2], 10).on(b)?);
            x.attention(
                &x,
                &x,
                &DenseAttention {
                    scale: 1.0,
                    mask: Some(&mask),
                    ..DenseAttention::default()
                },
            )
        },
    );
    suite.refuses(
        "attention",
        "an unknown mask kind",
        status::UNIMPLEMENTED,
        |b| {
            let x = x.on(b)?;
            let args = AttentionArgs {
                q: x.handle(),
                k: x.handle(),
                v: x.handle(),
                mask_kind: 9999,
                ..AttentionArgs::default()
            };
            op!(b, attention, &args)
        },
    );
}
