//! What `deterministic` promises: a row's result has the same bits whoever else is in the call, and however a sequence was cut into calls.
//!
//! For a backend that was opened with that option; a call that it refuses as unimplemented passes.

use core::ops::Range;

use mlxcel_abi::fused_args::{
    GatedMlpArgs, InputNorm, LinearWeight, MixtureArgs, ProjectArgs, RouteArgs, SampleArgs,
};
use mlxcel_abi::kinds::{glu, quant as kind, reduce};
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::{DType, Tensor as Handle};

use super::FLOATS;
use super::array::Array;
use super::parts::{sequences, states};
use super::quantization::{Packed, name, spec};
use super::suite::Suite;
use crate::testkit::reference::value::Value;
use crate::{Backend, Result, Tensor};

/// Rows in all: more than any kernel for few takes, and no multiple of a tile.
pub(super) const ROWS: usize = 71;
/// Rows of a call.
const CUTS: [usize; 6] = [1, 2, 3, 7, 16, 33];

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in FLOATS {
        products(suite, dtype);
        elements(suite, dtype);
        layers(suite, dtype);
        mixtures(suite, dtype);
        for (width, window, turns) in [
            (64, 0, false),
            (128, 0, true),
            (64, 21, true),
            (32, 0, false),
        ] {
            sequences(suite, dtype, width, window, turns);
        }
        samples(suite, dtype);
    }
    states(suite);
}

/// Some rows of an array.
pub(super) fn rows_of(array: &Array, rows: Range<usize>) -> Array {
    let each: usize = array.0.shape.iter().skip(1).product();
    let places: Vec<usize> = (rows.start * each..rows.end * each).collect();
    let mut shape = array.0.shape.clone();
    shape[0] = rows.len();
    Array(Value {
        dtype: array.0.dtype,
        shape,
        data: array.0.data.pick(&places),
    })
}

pub(super) fn bits(tensors: &[Tensor]) -> Result<Vec<Vec<u64>>> {
    let read = |t: &Tensor| {
        let numbers = Array::read(t)?.0.reals().into_owned();
        Ok(numbers.into_iter().map(f64::to_bits).collect())
    };
    tensors.iter().map(read).collect()
}

/// `run` gives results whose first axis is that of the rows it was asked for.
fn same(
    suite: &mut Suite<'_>,
    slot: &'static str,
    case: String,
    run: impl Fn(&Backend, Range<usize>) -> Result<Vec<Tensor>>,
) {
    suite.holds_or_is_refused(slot, case, |b| {
        let whole = match run(b, 0..ROWS).and_then(|made| bits(&made)) {
            Err(error) if error.is_unimplemented() => return Ok(false),
            other => other.map_err(|error| error.to_string())?,
        };
        for cut in CUTS {
            for first in (0..ROWS).step_by(cut) {
                let rows = first..(first + cut).min(ROWS);
                let some = run(b, rows.clone()).and_then(|made| bits(&made));
                let some = some.map_err(|error| format!("rows {rows:?}: {error}"))?;
                for (index, (some, whole)) in some.iter().zip(&whole).enumerate() {
                    let each = whole.len() / ROWS;
                    let expected = &whole[rows.start * each..rows.end * each];
                    if let Some(at) = (0..expected.len()).find(|&i| some.get(i) != expected.get(i))
                    {
                        return Err(format!(
                            "result {index}: element {} of row {} is {:e} in a call of rows {rows:?} and {:e} in one of {ROWS}",
                            at % each,
                            rows.start + at / each,
                            f64::from_bits(some[at]),
                            f64::from_bits(expected[at]),
                        ));
                    }
                }
            }
        }
        Ok(true)
    });
}

fn forms() -> [Option<QuantSpec>; 6] {
    [
        None,
        Some(spec(kind::AFFINE, 4, 64)),
        Some(spec(kind::AFFINE, 8, 32)),
        Some(spec(kind::AFFINE, 6, 64)),
        Some(spec(kind::AFFINE, 3, 32)),
        Some(spec(kind::MXFP4, 4, 32)),
    ]
}

fn named(form: Option<QuantSpec>) -> String {
    form.map_or("plain".to_owned(), |form| name(&form))
}

/// One weight or a stack of them, as layers have it.
struct Weight {
    plain: Option<Array>,
    packed: Option<Packed>,
}

struct Loaded {
    plain: Option<Tensor>,
    packed: Option<crate::quant::QuantizedTensor>,
}

impl Weight {
    fn new(
        form: Option<QuantSpec>,
        dtype: DType,
        leading: &[i64],
        [rows, columns]: [i64; 2],
        seed: u64,
    ) -> Self {
        let size = 2.0 / (columns as f64).sqrt();
        let dims = [leading, &[rows, columns]].concat();
        Self {
            plain: form
                .is_none()
                .then(|| Array::spread(dtype, &dims, -size, size, seed)),
            packed: form.map(|form| Packed::new(form, dtype, leading, rows, columns, seed)),
        }
    }

    fn on(&self, b: &Backend) -> Result<Loaded> {
        Ok(Loaded {
            plain: match &self.plain {
                Some(w) if w.dims().len() == 3 => Some(w.on(b)?.transpose(&[0, 2, 1])?),
                Some(w) => Some(w.on(b)?.t()?),
                None => None,
            },
            packed: self.packed.as_ref().map(|w| w.on(b)).transpose()?,
        })
    }
}

impl Loaded {
    fn raw(&self) -> LinearWeight {
        LinearWeight {
            plain: Tensor::handle_of(self.plain.as_ref()),
            quantized: self.packed.as_ref().map(|w| w.raw()).unwrap_or_default(),
            ..LinearWeight::default()
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match (&self.plain, &self.packed) {
            (Some(w), _) => x.matmul(w),
            (None, Some(w)) => w.matmul_t(x),
            (None, None) => Ok(x.clone()),
        }
    }
}

fn products(suite: &mut Suite<'_>, dtype: DType) {
    for form in forms() {
        for (outputs, columns) in [(77, 192), (264, 576)] {
            let weight = Weight::new(form, dtype, &[], [outputs, columns], 2);
            let x = Array::usual(dtype, &[ROWS as i64, columns], 3);
            let slot = if form.is_some() {
                "quantized_matmul"
            } else {
                "matmul"
            };
            let case = format!("{} {} [{outputs}, {columns}]", dtype.name(), named(form));
            same(suite, slot, case.clone(), |b, rows| {
                Ok(vec![weight.on(b)?.forward(&rows_of(&x, rows).on(b)?)?])
            });
            // With a norm before and a sum after it.
            let residual = Array::usual(dtype, &[ROWS as i64, outputs], 4);
            same(suite, "project", case, |b, rows| {
                let (x, residual) = (
                    rows_of(&x, rows.clone()).on(b)?,
                    rows_of(&residual, rows).on(b)?,
                );
                let norm = Array::spread(dtype, &[columns], 0.5, 1.5, 5).on(b)?;
                let weight = weight.on(b)?;
                let layer = weight.raw();
                let args = ProjectArgs {
                    x: x.handle(),
                    norm: InputNorm {
                        normed: 1,
                        eps: 1e-5,
                        weight: norm.handle(),
                        ..InputNorm::default()
                    },
                    layers: &raw const layer,
                    n_layers: 1,
                    residual: residual.handle(),
                    ..ProjectArgs::default()
                };
                Ok(vec![op!(b, project, &raw const args)?])
            });
        }
    }
    let w = Array::usual(dtype, &[96, 40], 6);
    let x = Array::usual(dtype, &[ROWS as i64, 2, 96], 7);
    same(
        suite,
        "matmul",
        format!("{} not transposed", dtype.name()),
        |b, rows| Ok(vec![rows_of(&x, rows).on(b)?.matmul(&w.on(b)?)?]),
    );
}

fn elements(suite: &mut Suite<'_>, dtype: DType) {
    type Op = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let cases: [(&str, Op); 10] = [
        ("rms_norm", |x, _| x.rms_norm(None, 1e-5)),
        ("layer_norm", |x, _| x.layer_norm(None, None, 1e-5)),
        ("softmax", |x, _| x.softmax(-1)),
        ("reduce", |x, _| x.sum(&[-1], true)),
        ("glu", |x, y| x.glu(glu::SILU, y)),
        ("glu", |x, y| x.glu(glu::GELU_TANH, y)),
        ("binary", |x, y| x.add(y)),
        ("unary", |x, _| x.silu()),
        ("unary", |x, _| x.sigmoid()),
        ("unary", |x, _| x.exp()),
    ];
    for width in [5, 64, 576, 1000] {
        let x = Array::usual(dtype, &[ROWS as i64, width], 8);
        let y = Array::usual(dtype, &[ROWS as i64, width], 9);
        for (i, (slot, op)) in cases.iter().enumerate() {
            let case = format!("{} {i} [{width}]", dtype.name());
            same(suite, slot, case, |b, rows| {
                Ok(vec![op(
                    &rows_of(&x, rows.clone()).on(b)?,
                    &rows_of(&y, rows).on(b)?,
                )?])
            });
        }
        let case = format!("{} [{width}]", dtype.name());
        same(suite, "add_rms_norm", case, |b, rows| {
            let (x, y) = (rows_of(&x, rows.clone()).on(b)?, rows_of(&y, rows).on(b)?);
            let w = Array::spread(dtype, &[width], 0.5, 1.5, 5).on(b)?;
            let mut out = [Handle::NONE; 2];
            command!(
                b.table(),
                add_rms_norm,
                x.handle(),
                y.handle(),
                w.handle(),
                1e-5,
                &mut out
            )?;
            Ok(out.map(|t| Tensor::from_handle(b, t)).into())
        });
    }
    let x = Array::usual(dtype, &[ROWS as i64, 6, 40], 10);
    for (axis, kind) in [(1, reduce::SUM), (1, reduce::MEAN), (2, reduce::LOGSUMEXP)] {
        let case = format!("{} {} along axis {axis}", dtype.name(), reduce::name(kind));
        same(suite, "reduce", case, |b, rows| {
            let x = rows_of(&x, rows).on(b)?;
            let axes = [axis];
            Ok(vec![op!(b, reduce, kind, x.handle(), axes.as_ptr(), 1, 0)?])
        });
    }
    same(
        suite,
        "softmax",
        format!("{} along axis 1", dtype.name()),
        |b, rows| Ok(vec![rows_of(&x, rows).on(b)?.softmax(1)?]),
    );
}

fn layers(suite: &mut Suite<'_>, dtype: DType) {
    let (columns, inner) = (192, 320);
    for form in forms() {
        let weights = [
            Weight::new(form, dtype, &[], [inner, columns], 30),
            Weight::new(form, dtype, &[], [inner, columns], 31),
            Weight::new(form, dtype, &[], [columns, inner], 32),
        ];
        let x = Array::usual(dtype, &[ROWS as i64, columns], 33);
        let case = format!("{} {}", dtype.name(), named(form));
        same(suite, "gated_mlp", case, |b, rows| {
            let x = rows_of(&x, rows).on(b)?;
            let [gate, up, down] = [weights[0].on(b)?, weights[1].on(b)?, weights[2].on(b)?];
            let args = GatedMlpArgs {
                x: x.handle(),
                norm: InputNorm {
                    normed: 1,
                    eps: 1e-5,
                    ..InputNorm::default()
                },
                gate: gate.raw(),
                up: up.raw(),
                down: down.raw(),
                kind: glu::SILU,
                residual: x.handle(),
                ..GatedMlpArgs::default()
            };
            Ok(vec![op!(b, gated_mlp, &raw const args)?])
        });
    }
}

fn mixtures(suite: &mut Suite<'_>, dtype: DType) {
    let (n, chosen, columns, inner) = (9, 3, 256, 128);
    let ids = Array::of(
        DType::U32,
        &[ROWS as i64, chosen],
        // Some experts have many rows, others few.
        (0..ROWS as i64).flat_map(|row| {
            let first = if row % 3 == 0 { row % n } else { 1 };
            (0..chosen).map(move |i| ((first + i) % n) as f64)
        }),
    );
    let weights = Array::spread(dtype, &[ROWS as i64, chosen], 0.1, 0.9, 5);
    let x = Array::usual(dtype, &[ROWS as i64, columns], 41);
    for form in forms() {
        let stacks = [
            Weight::new(form, dtype, &[n], [inner, columns], 42),
            Weight::new(form, dtype, &[n], [inner, columns], 43),
            Weight::new(form, dtype, &[n], [columns, inner], 44),
        ];
        let case = format!("{} {}", dtype.name(), named(form));
        same(suite, "mixture", case.clone(), |b, rows| {
            let x = rows_of(&x, rows.clone()).on(b)?;
            let (ids, shares) = (
                rows_of(&ids, rows.clone()).on(b)?,
                rows_of(&weights, rows).on(b)?,
            );
            let [gate, up, down] = [stacks[0].on(b)?, stacks[1].on(b)?, stacks[2].on(b)?];
            let args = MixtureArgs {
                x: x.handle(),
                experts: ids.handle(),
                weights: shares.handle(),
                gate: gate.raw(),
                up: up.raw(),
                down: down.raw(),
                kind: glu::SILU,
                residual: x.handle(),
                ..MixtureArgs::default()
            };
            Ok(vec![op!(b, mixture, &raw const args)?])
        });
        let slot = if form.is_some() {
            "gather_quantized_matmul"
        } else {
            "gather_matmul"
        };
        same(suite, slot, case, |b, rows| {
            let count = rows.len() as i64;
            let x = rows_of(&x, rows.clone())
                .on(b)?
                .reshape(&[count, 1, columns])?;
            let ids = rows_of(&ids, rows).on(b)?;
            let of = Tensor::arange(b, 0.0, count as f64, 1.0, DType::U32)?
                .reshape(&[count, 1])?
                .broadcast_to(&[count, chosen])?;
            let gate = stacks[0].on(b)?;
            let made = match (&gate.plain, &gate.packed) {
                (Some(w), _) => x.gather_matmul(w, Some(&of), Some(&ids), false)?,
                (_, Some(w)) => w.gather_matmul_t(&x, Some(&of), &ids, false)?,
                _ => x,
            };
            Ok(vec![made])
        });
    }
    let logits = Array::usual(dtype, &[ROWS as i64, 60], 45);
    same(suite, "route", dtype.name().to_owned(), |b, rows| {
        let logits = rows_of(&logits, rows).on(b)?;
        let args = RouteArgs {
            logits: logits.handle(),
            top_k: 4,
            renormalised: 1,
            ..RouteArgs::default()
        };
        let mut out = [Handle::NONE; 2];
        command!(b.table(), route, &args, &mut out)?;
        let [experts, weights] = out.map(|t| Tensor::from_handle(b, t));
        Ok(vec![experts.cast(DType::F32)?, weights])
    });
}

fn samples(suite: &mut Suite<'_>, dtype: DType) {
    let logits = Array::usual(dtype, &[ROWS as i64, 3000], 50);
    let uniform = Array::spread(DType::F32, &[ROWS as i64], 0.0, 1.0, 51);
    same(suite, "sample", dtype.name().to_owned(), |b, rows| {
        let n = rows.len() as i64;
        let column = |dtype, value: f64| Tensor::full(b, value, dtype, &[n])?.contiguous();
        let (logits, uniform) = (
            rows_of(&logits, rows.clone()).on(b)?,
            rows_of(&uniform, rows).on(b)?,
        );
        let (top_k, top_p) = (column(DType::I32, 200.0)?, column(DType::F32, 0.99)?);
        let (min_p, temperature) = (column(DType::F32, 0.0)?, column(DType::F32, 1.5)?);
        let args = SampleArgs {
            logits: logits.handle(),
            top_k: top_k.handle(),
            top_p: top_p.handle(),
            min_p: min_p.handle(),
            temperature: temperature.handle(),
            uniform: uniform.handle(),
            ..SampleArgs::default()
        };
        Ok(vec![op!(b, sample, &raw const args)?.cast(DType::F32)?])
    });
}
