//! Mixtures of experts against the reference and against their parts. A backend that lacks an operation
//! passes through the parts, as the SDK composes them.

use mlxcel_abi::fused_args::{LinearWeight, MixtureArgs, RouteArgs};
use mlxcel_abi::kinds::{glu, quant as kind};
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::{DType, Tensor as Handle, status};

use super::FLOATS;
use super::array::{Array, Numbers};
use super::fused::{answered, both, mlp_tolerance, names};
use super::quantization::{Packed, spec};
use super::rounding::{Block, Rows, Weight};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::quant::QuantizedTensor;
use crate::{Backend, Result, Tensor};

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in FLOATS {
        routes(suite, dtype);
        mixtures(suite, dtype);
    }
    refusals(suite);
}

/// Logits whose values in a row are distinct in every float type: which experts are highest is then one set.
fn logits(dtype: DType, rows: i64, experts: i64, seed: u64) -> Array {
    let mut numbers = Numbers::new(seed);
    let mut all = Vec::new();
    for _ in 0..rows {
        let mut row: Vec<i64> = (0..experts).collect();
        for i in (1..row.len()).rev() {
            row.swap(i, (numbers.unit() * (i as f64 + 1.0)) as usize);
        }
        all.extend(row.into_iter().map(|i| (i - experts / 2) as f64 / 16.0));
    }
    Array::of(dtype, &[rows, experts], all)
}

/// `[T, E]`: the weights at their experts, zeros elsewhere.
fn spread_out(
    b: &Backend,
    rows: i64,
    n: i64,
    experts: &Tensor,
    weights: &Tensor,
) -> Result<Tensor> {
    let zeros = Tensor::full(b, 0.0, weights.dtype()?, &[rows, n])?;
    zeros.put_along(experts, weights, 1)
}

fn routes(suite: &mut Suite<'_>, dtype: DType) {
    for (rows, n, k, renormalised) in [
        (1, 8, 2, true),
        (3, 128, 8, true),
        (70, 128, 8, false),
        (2, 5, 5, false),
        (5, 512, 10, true),
        (1, 60, 4, false),
        (2, 1, 1, true),
    ] {
        let run = |b: &Backend, fused: bool| -> Result<Vec<Tensor>> {
            let logits = logits(dtype, rows, n, 3).on(b)?;
            if fused {
                let args = RouteArgs {
                    logits: logits.handle(),
                    top_k: k as u32,
                    renormalised: u32::from(renormalised),
                    ..RouteArgs::default()
                };
                let mut out = [Handle::NONE; 2];
                if answered(command!(b.table(), route, &args, &mut out))? {
                    let [experts, weights] = out.map(|t| Tensor::from_handle(b, t));
                    return Ok(vec![spread_out(b, rows, n, &experts, &weights)?]);
                }
            }
            let scores = logits.cast(DType::F32)?.softmax(-1)?;
            let experts = scores.argsort(-1)?.narrow(1, n - k, k)?;
            let mut chosen = scores.take_along(&experts, 1)?;
            if renormalised {
                chosen = chosen.div(&chosen.sum(&[-1], true)?)?;
            }
            Ok(vec![spread_out(
                b,
                rows,
                n,
                &experts,
                &chosen.cast(dtype)?,
            )?])
        };
        let case = format!(
            "{} [{rows}, {n}] {k} renormalised {renormalised}",
            dtype.name()
        );
        both(suite, "route", case, Tolerance::units(16.0, 2.0), run);
    }
}

/// A stack of layers on the host.
enum Stack {
    Plain(Array),
    Packed(Packed),
}

enum Loaded {
    Plain(Tensor),
    Packed(QuantizedTensor),
}

impl Stack {
    fn new(form: Option<QuantSpec>, dtype: DType, [n, rows, columns]: [i64; 3], seed: u64) -> Self {
        let size = 2.0 / (columns as f64).sqrt();
        match form {
            None => Self::Plain(Array::spread(dtype, &[n, rows, columns], -size, size, seed)),
            Some(form) => Self::Packed(Packed::new(form, dtype, &[n], rows, columns, seed)),
        }
    }

    fn on(&self, b: &Backend) -> Result<Loaded> {
        match self {
            Self::Plain(w) => Ok(Loaded::Plain(w.on(b)?.transpose(&[0, 2, 1])?)),
            Self::Packed(w) => w.on(b).map(Loaded::Packed),
        }
    }

    /// What its rows measure, by the reference.
    fn measured(&self, reference: &Backend) -> Result<Weight> {
        match self {
            Self::Plain(w) => Weight::plain(&w.on(reference)?),
            Self::Packed(w) => w.measured(reference),
        }
    }
}

impl Loaded {
    fn raw(&self) -> LinearWeight {
        let mut raw = LinearWeight::default();
        match self {
            Self::Plain(w) => raw.plain = w.handle(),
            Self::Packed(w) => raw.quantized = w.raw(),
        }
        raw
    }

    fn forward(&self, x: &Tensor, rows: &Tensor, experts: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(w) => x.gather_matmul(w, Some(rows), Some(experts), false),
            Self::Packed(w) => w.gather_matmul_t(x, Some(rows), experts, false),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Mixture {
    rows: i64,
    experts: i64,
    chosen: i64,
    columns: i64,
    inner: i64,
    kind: u32,
    residual: bool,
    /// All rows go to the same experts.
    crowded: bool,
}

impl Mixture {
    /// Experts of every row, distinct within it.
    fn choice(&self) -> Array {
        let mut numbers = Numbers::new(11);
        let mut ids = Vec::new();
        for row in 0..self.rows {
            let first = match (self.crowded, row) {
                (false, _) => (numbers.unit() * self.experts as f64) as i64,
                (true, _) => 1,
            };
            ids.extend((0..self.chosen).map(|i| i128::from((first + i) % self.experts)));
        }
        Array::ints(DType::U32, &[self.rows, self.chosen], &ids)
    }

    /// Gate, up and down of all experts.
    fn stacks(&self, forms: &[Option<QuantSpec>; 3], dtype: DType) -> [Stack; 3] {
        let Self { columns, inner, .. } = *self;
        let stack = |i: usize, [rows, columns]: [i64; 2]| {
            Stack::new(
                forms[i],
                dtype,
                [self.experts, rows, columns],
                30 + i as u64,
            )
        };
        let narrow = [inner, columns];
        [
            stack(0, narrow),
            stack(1, narrow),
            stack(2, [columns, inner]),
        ]
    }

    fn input(&self, b: &Backend, dtype: DType) -> Result<Tensor> {
        Array::usual(dtype, &[self.rows, self.columns], 1).on(b)
    }

    fn weights(&self, b: &Backend, dtype: DType) -> Result<Tensor> {
        Array::spread(dtype, &[self.rows, self.chosen], 0.1, 0.9, 5).on(b)
    }

    /// The first two products of every row with each of its experts.
    fn gate_and_up(
        &self,
        x: &Tensor,
        [gate, up]: [&Loaded; 2],
        experts: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let rows = self.rows;
        let row_of = Tensor::arange(x.backend(), 0.0, rows as f64, 1.0, DType::U32)?
            .reshape(&[rows, 1])?
            .broadcast_to(&[rows, self.chosen])?;
        let single = x.reshape(&[rows, 1, self.columns])?;
        Ok([
            gate.forward(&single, &row_of, experts)?,
            up.forward(&single, &row_of, experts)?,
        ])
    }

    /// How far rounded activations reach into the result.
    fn reach(&self, b: &Backend, forms: &[Option<QuantSpec>; 3]) -> Result<f64> {
        let dtype = DType::F32;
        let [gate, up, down] = self.stacks(forms, dtype);
        let weights = [gate.measured(b)?, up.measured(b)?, down.measured(b)?];
        let (x, experts) = (self.input(b, dtype)?, self.choice().on(b)?);
        let [gate, up] = self.gate_and_up(&x, [&gate.on(b)?, &up.on(b)?], &experts)?;
        let block = Block::of(&x, &gate, &up, self.kind, weights)?;
        let shares = Rows::of(&self.weights(b, dtype)?)?;
        Ok(shares.norm * block.reach())
    }

    fn run(
        &self,
        b: &Backend,
        forms: &[Option<QuantSpec>; 3],
        dtype: DType,
        fused: bool,
    ) -> Result<Vec<Tensor>> {
        let Self {
            rows,
            chosen,
            columns,
            inner,
            kind,
            ..
        } = *self;
        let [gate, up, down] = self.stacks(forms, dtype);
        let (gate, up, down) = (gate.on(b)?, up.on(b)?, down.on(b)?);
        let x = self.input(b, dtype)?;
        let residual = match self.residual {
            true => Some(Array::usual(dtype, &[rows, columns], 3).on(b)?),
            false => None,
        };
        let experts = self.choice().on(b)?;
        let weights = self.weights(b, dtype)?;
        if fused {
            let args = MixtureArgs {
                x: x.handle(),
                experts: experts.handle(),
                weights: weights.handle(),
                gate: gate.raw(),
                up: up.raw(),
                down: down.raw(),
                kind,
                residual: Tensor::handle_of(residual.as_ref()),
                ..MixtureArgs::default()
            };
            let mut out = Handle::NONE;
            if answered(command!(b.table(), mixture, &args, &mut out))? {
                return Ok(vec![Tensor::from_handle(b, out)]);
            }
        }
        let pair_of = Tensor::arange(b, 0.0, (rows * chosen) as f64, 1.0, DType::U32)?
            .reshape(&[rows, chosen])?;
        let [gate, up] = self.gate_and_up(&x, [&gate, &up], &experts)?;
        let both = gate.glu(kind, &up)?.reshape(&[rows * chosen, 1, inner])?;
        let y = down
            .forward(&both, &pair_of, &experts)?
            .reshape(&[rows, chosen, columns])?
            .mul(&weights.reshape(&[rows, chosen, 1])?)?
            .sum(&[1], false)?;
        Ok(vec![match &residual {
            Some(residual) => residual.add(&y)?,
            None => y,
        }])
    }
}

fn mixtures(suite: &mut Suite<'_>, dtype: DType) {
    let q4 = Some(spec(kind::AFFINE, 4, 64));
    let q8 = Some(spec(kind::AFFINE, 8, 32));
    let other = Some(spec(kind::MXFP4, 4, 32));
    let base = Mixture {
        rows: 1,
        experts: 6,
        chosen: 2,
        columns: 256,
        inner: 128,
        kind: glu::SILU,
        residual: true,
        crowded: false,
    };
    let cases = [
        base,
        Mixture {
            rows: 3,
            residual: false,
            ..base
        },
        Mixture {
            rows: 9,
            experts: 20,
            chosen: 4,
            kind: glu::GELU_TANH,
            ..base
        },
        Mixture {
            rows: 20,
            crowded: true,
            columns: 192,
            ..base
        },
        Mixture {
            rows: 70,
            residual: false,
            kind: glu::RELU,
            ..base
        },
        // Tiles of several rows that end within an expert's matrix.
        Mixture {
            rows: 150,
            experts: 3,
            columns: 512,
            inner: 256,
            chosen: 1,
            ..base
        },
        Mixture {
            rows: 150,
            experts: 9,
            crowded: true,
            columns: 256,
            inner: 320,
            ..base
        },
    ];
    for mixture in cases {
        // Large ones in the forms that have kernels of their own.
        let all = [[q4; 3], [q8; 3], [q4, q4, q8], [other; 3], [None; 3]];
        let count = if mixture.rows > 100 { 2 } else { all.len() };
        for forms in &all[..count] {
            let case = format!("{} {mixture:?} {}", dtype.name(), names(forms));
            // Weights of up to six, in three products: larger terms cancel in the last.
            let is_mxfp4 = forms.iter().flatten().any(|spec| spec.mode == kind::MXFP4);
            let floor = if is_mxfp4 { 4000.0 } else { 400.0 };
            // Gate and up each grow with the root of the columns, and their product is what the last one sums.
            let near = mlp_tolerance().floor(floor * (mixture.columns as f64 / 256.0).max(1.0));
            let near = suite.rounded(near, |b| mixture.reach(b, forms));
            both(suite, "mixture", case, near, |b, fused| {
                mixture.run(b, forms, dtype, fused)
            });
        }
    }
}

fn refusals(suite: &mut Suite<'_>) {
    for k in [0, 9] {
        let case = format!("{k} of 8 experts");
        suite.refuses("route", case, status::INVALID_ARGUMENT, |b| {
            let logits = logits(DType::F32, 1, 8, 3).on(b)?;
            let args = RouteArgs {
                logits: logits.handle(),
                top_k: k,
                ..RouteArgs::default()
            };
            let mut out = [Handle::NONE; 2];
            if !answered(command!(b.table(), route, &args, &mut out))? {
                // Where the slot is absent, a product that cannot be answers in its place.
                return logits.matmul(&logits);
            }
            let [experts, weights] = out.map(|t| Tensor::from_handle(b, t));
            drop(experts);
            Ok(weights)
        });
    }
}
