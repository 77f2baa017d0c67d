//! Fused operations against the reference and against their parts. A backend that lacks one passes
//! through the parts, as the SDK composes them.

use core::cell::RefCell;

use mlxcel_abi::fused_args::{GatedMlpArgs, InputNorm, LinearWeight, ProjectArgs, RotateArgs};
use mlxcel_abi::kinds::{glu, quant as kind};
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::{DType, Tensor as Handle, status};

use super::FLOATS;
use super::array::Array;
use super::layer::{Layer, Loaded};
use super::paging::{Scene, scenes};
use super::quantization::{name, spec};
use super::rounding::{Block, Rows};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::{Backend, Result, RopeSpec, Tensor};

const EPS: f32 = 1e-5;

/// What comes before and after the products.
#[derive(Debug, Clone, Copy)]
pub(super) struct Around {
    pub(super) dtype: DType,
    pub(super) rows: i64,
    /// A norm, and whether it has a weight.
    pub(super) norm: Option<bool>,
    pub(super) residual: bool,
    /// One row of the input has a NaN.
    pub(super) nan: bool,
}

impl Around {
    fn input(&self, b: &Backend, columns: i64) -> Result<Tensor> {
        let mut numbers = Array::usual(self.dtype, &[self.rows, columns], 1);
        if self.nan
            && let crate::testkit::reference::value::Data::Real(numbers) = &mut numbers.0.data
        {
            numbers[columns as usize + 3] = f64::NAN;
        }
        numbers.on(b)
    }

    fn weight(&self, b: &Backend, columns: i64) -> Result<Option<Tensor>> {
        match self.norm {
            Some(true) => Array::spread(self.dtype, &[columns], 0.5, 1.5, 2)
                .on(b)
                .map(Some),
            _ => Ok(None),
        }
    }

    fn raw(&self, weight: Option<&Tensor>) -> InputNorm {
        InputNorm {
            normed: u32::from(self.norm.is_some()),
            eps: EPS,
            weight: Tensor::handle_of(weight),
            ..InputNorm::default()
        }
    }

    fn normed(&self, x: &Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
        match self.norm {
            Some(_) => x.rms_norm(weight, EPS),
            None => Ok(x.clone()),
        }
    }

    /// What comes before the products.
    fn before(&self, b: &Backend, columns: i64) -> Result<Tensor> {
        let weight = self.weight(b, columns)?;
        self.normed(&self.input(b, columns)?, weight.as_ref())
    }

    fn added(&self, b: &Backend, width: i64) -> Result<Option<Tensor>> {
        let shape = [self.rows, width];
        let residual = self
            .residual
            .then(|| Array::usual(self.dtype, &shape, 3).on(b));
        residual.transpose()
    }
}

fn plus(y: Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
    residual.map_or_else(|| Ok(y.clone()), |residual| residual.add(&y))
}

/// Whether a fused call was answered; unimplemented is no failure.
pub(super) fn answered(done: Result<()>) -> Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(error) if error.is_unimplemented() => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) fn project(
    b: &Backend,
    around: &Around,
    layers: &[Layer],
    fused: bool,
) -> Result<Vec<Tensor>> {
    let [width, columns] = layers.first().map_or([0; 2], Layer::shape);
    let (x, weight) = (around.input(b, columns)?, around.weight(b, columns)?);
    let loaded = layers
        .iter()
        .map(|layer| layer.on(b))
        .collect::<Result<Vec<_>>>()?;
    let residual = around.added(b, width)?;
    if fused {
        let raw: Vec<LinearWeight> = loaded.iter().map(Loaded::raw).collect();
        let args = ProjectArgs {
            x: x.handle(),
            norm: around.raw(weight.as_ref()),
            layers: raw.as_ptr(),
            n_layers: raw.len() as u32,
            residual: Tensor::handle_of(residual.as_ref()),
            ..ProjectArgs::default()
        };
        let mut out = vec![Handle::NONE; raw.len()];
        if answered(command!(b.table(), project, &args, out.as_mut_ptr()))? {
            return Ok(out.into_iter().map(|t| Tensor::from_handle(b, t)).collect());
        }
    }
    let x = around.normed(&x, weight.as_ref())?;
    let results = loaded
        .iter()
        .map(|layer| plus(layer.forward(&x)?, residual.as_ref()));
    results.collect()
}

/// A gated block: input and inner width, forms of gate, up and down, activation.
pub(super) struct Mlp {
    pub(super) columns: i64,
    pub(super) inner: i64,
    pub(super) forms: [Option<QuantSpec>; 3],
    pub(super) bias: bool,
    pub(super) kind: u32,
}

impl Mlp {
    /// Gate, up and down.
    fn layers(&self, dtype: DType) -> [Layer; 3] {
        let Self { columns, inner, .. } = *self;
        let layer = |i: usize, shape: [i64; 2]| {
            Layer::new(self.forms[i], dtype, shape, self.bias, 30 + i as u64)
        };
        let narrow = [inner, columns];
        [
            layer(0, narrow),
            layer(1, narrow),
            layer(2, [columns, inner]),
        ]
    }

    pub(super) fn run(&self, b: &Backend, around: &Around, fused: bool) -> Result<Vec<Tensor>> {
        let columns = self.columns;
        let [gate, up, down] = self.layers(around.dtype);
        let (gate, up, down) = (gate.on(b)?, up.on(b)?, down.on(b)?);
        let (x, weight) = (around.input(b, columns)?, around.weight(b, columns)?);
        let residual = around.added(b, columns)?;
        if fused {
            let args = GatedMlpArgs {
                x: x.handle(),
                norm: around.raw(weight.as_ref()),
                gate: gate.raw(),
                up: up.raw(),
                down: down.raw(),
                kind: self.kind,
                residual: Tensor::handle_of(residual.as_ref()),
                ..GatedMlpArgs::default()
            };
            let mut out = Handle::NONE;
            if answered(command!(b.table(), gated_mlp, &args, &mut out))? {
                return Ok(vec![Tensor::from_handle(b, out)]);
            }
        }
        let x = around.normed(&x, weight.as_ref())?;
        let inner = gate.forward(&x)?.glu(self.kind, &up.forward(&x)?)?;
        Ok(vec![plus(down.forward(&inner)?, residual.as_ref())?])
    }

    /// How far rounded activations reach into the result.
    pub(super) fn reach(&self, b: &Backend, around: &Around) -> Result<f64> {
        let [gate, up, down] = self.layers(around.dtype);
        let weights = [gate.measured(b)?, up.measured(b)?, down.measured(b)?];
        let x = around.before(b, self.columns)?;
        let (gate, up) = (gate.on(b)?.forward(&x)?, up.on(b)?.forward(&x)?);
        Block::of(&x, &gate, &up, self.kind, weights).map(|block| block.reach())
    }
}

/// Norms of heads, with or without weights, and a rotation.
#[derive(Debug, Clone)]
struct Turn {
    norm: Option<bool>,
    dims: i64,
    interleaved: bool,
    periods: bool,
    /// Rows come as products give them.
    flat: bool,
}

impl Turn {
    fn run(&self, b: &Backend, scene: &Scene, fused: bool) -> Result<Vec<Tensor>> {
        let rows = [
            scene.activation(scene.heads, scene.width, 1).on(b)?,
            scene.activation(scene.kv_heads, scene.width, 2).on(b)?,
            scene
                .activation(scene.kv_heads, scene.value_width, 3)
                .on(b)?,
        ];
        let weight = |seed| match self.norm {
            Some(true) => Array::spread(scene.dtype, &[scene.width], 0.5, 1.5, seed)
                .on(b)
                .map(Some),
            _ => Ok(None),
        };
        let (q_norm, k_norm) = (weight(8)?, weight(9)?);
        let freqs = match self.periods {
            true => Some(Array::spread(DType::F32, &[self.dims / 2], 1.0, 50.0, 10).on(b)?),
            false => None,
        };
        let positions = scene.positions().on(b)?;
        if fused {
            let rotate = RotateArgs {
                normed: u32::from(self.norm.is_some()),
                eps: EPS,
                q_norm: Tensor::handle_of(q_norm.as_ref()),
                k_norm: Tensor::handle_of(k_norm.as_ref()),
                dims: self.dims as u32,
                interleaved: u32::from(self.interleaved),
                base: 500.0,
                scale: 0.5,
                freqs: Tensor::handle_of(freqs.as_ref()),
                ..RotateArgs::default()
            };
            let given = match self.flat {
                true => {
                    let flat = |t: &Tensor| t.reshape(&[t.dim(0)?, -1]);
                    [flat(&rows[0])?, flat(&rows[1])?, flat(&rows[2])?]
                }
                false => rows.clone(),
            };
            let made = scene.through(b, &given, |args, out| {
                command!(b.table(), rotated_paged_attention, args, &rotate, out)
            });
            match made {
                Err(error) if error.is_unimplemented() => {}
                Ok(made) if self.flat => {
                    let [mixed, keys, values] = &made[..] else {
                        return Ok(made);
                    };
                    let shape = [-1, scene.heads, scene.value_width];
                    if mixed.shape()?.len() != 2 {
                        return Err(crate::Error::Other(
                            "flat rows gave no flat result".to_owned(),
                        ));
                    }
                    return Ok(vec![mixed.reshape(&shape)?, keys.clone(), values.clone()]);
                }
                other => return other,
            }
        }
        let turned = |rows: &Tensor, weight: Option<&Tensor>| {
            let rows = match self.norm {
                Some(_) => rows.rms_norm(weight, EPS)?,
                None => rows.clone(),
            };
            if self.dims == 0 {
                return Ok(rows);
            }
            let spec = RopeSpec {
                dims: self.dims as u32,
                interleaved: self.interleaved,
                base: 500.0,
                scale: 0.5,
                freqs: freqs.clone(),
            };
            rows.rope(&positions, &spec)
        };
        let turned = [
            turned(&rows[0], q_norm.as_ref())?,
            turned(&rows[1], k_norm.as_ref())?,
            rows[2].clone(),
        ];
        scene.through(b, &turned, |args, out| {
            command!(b.table(), paged_attention, args, out)
        })
    }
}

pub(super) fn run(suite: &mut Suite<'_>) {
    let q4 = Some(spec(kind::AFFINE, 4, 32));
    let q6 = Some(spec(kind::AFFINE, 6, 64));
    let q8 = Some(spec(kind::AFFINE, 8, 32));
    let other = Some(spec(kind::MXFP4, 4, 32));
    for dtype in FLOATS {
        for (rows, norm, residual, nan) in [
            (1, Some(true), false, false),
            (1, None, true, false),
            (3, Some(false), true, false),
            (5, Some(true), false, true),
            (21, Some(true), true, false),
            (40, None, false, true),
        ] {
            let around = Around {
                dtype,
                rows,
                norm,
                residual,
                nan,
            };
            projections(suite, &around, &[q4, q6, q8, other, None]);
            for (forms, bias, kind) in [
                ([q4; 3], false, glu::SILU),
                ([q4, q8, q6], true, glu::GELU_TANH),
                ([None; 3], true, glu::GELU),
                ([None, q4, other], false, glu::RELU),
            ] {
                let mlp = Mlp {
                    columns: 192,
                    inner: 320,
                    forms,
                    bias,
                    kind,
                };
                let case = format!(
                    "{} {around:?} {} bias {bias} kind {kind}",
                    dtype.name(),
                    names(&forms)
                );
                let near = suite.rounded(mlp_tolerance(), |b| mlp.reach(b, &around));
                both(suite, "gated_mlp", case, near, |b, fused| {
                    mlp.run(b, &around, fused)
                });
            }
        }
        sums(suite, dtype);
        rotations(suite, dtype);
    }
    refusals(suite, q4);
}

/// The fused operation and its parts, both against the reference's, which computes it once.
pub(super) fn both(
    suite: &mut Suite<'_>,
    slot: &'static str,
    case: String,
    near: impl Into<Vec<Tolerance>>,
    run: impl Fn(&Backend, bool) -> Result<Vec<Tensor>>,
) {
    let near = near.into();
    let wanted = RefCell::new(None);
    let theirs = |b: &Backend| match &mut *wanted.borrow_mut() {
        Some(found) => Ok(Vec::clone(found)),
        none => run(b, true).map(|found| none.insert(found).clone()),
    };
    suite.check_against(slot, case.clone(), near.clone(), |b| run(b, true), theirs);
    let composed = format!("{case}, composed");
    suite.check_against(slot, composed, near, |b| run(b, false), theirs);
}

pub(super) fn names(forms: &[Option<QuantSpec>]) -> String {
    let each = |form: &Option<QuantSpec>| form.as_ref().map_or("plain".to_owned(), name);
    forms.iter().map(each).collect::<Vec<_>>().join(" + ")
}

/// Products whose input was rounded on the way: an ulp of it moves every term.
fn product_tolerance(columns: i64) -> Tolerance {
    let root = (columns as f64).sqrt();
    Tolerance::units(8.0 + root, 4.0).floor(2.0 * root)
}

/// One for every layer of a projection.
pub(super) fn projection_tolerances(
    suite: &Suite<'_>,
    around: &Around,
    layers: &[Layer],
    columns: i64,
) -> Vec<Tolerance> {
    let near = |layer: &Layer| {
        suite.rounded(product_tolerance(columns), |b| {
            let x = Rows::of(&around.before(b, columns)?)?;
            Ok(layer.measured(b)?.reach(&x))
        })
    };
    layers.iter().map(near).collect()
}

/// Three products in a row, the last of numbers that grew.
pub(super) fn mlp_tolerance() -> Tolerance {
    Tolerance::units(64.0, 8.0).floor(400.0)
}

fn projections(suite: &mut Suite<'_>, around: &Around, forms: &[Option<QuantSpec>]) {
    let dtype = around.dtype;
    let columns = 192;
    let of = |form, rows, bias, seed| Layer::new(form, dtype, [rows, columns], bias, seed);
    for &form in forms {
        let layers = [of(form, 77, around.nan, 40)];
        let case = format!("{} {around:?} {}", dtype.name(), names(&[form]));
        let near = projection_tolerances(suite, around, &layers, columns);
        both(suite, "project", case, near, |b, fused| {
            project(b, around, &layers, fused)
        });
    }
    if around.residual {
        return;
    }
    // As queries, keys and values are: of several forms, one of them small.
    for mixed in forms.windows(3) {
        let layers = [
            of(mixed[0], 130, false, 50),
            of(mixed[1], 64, true, 60),
            of(mixed[2], 5, false, 70),
        ];
        let case = format!("{} {around:?} {}", dtype.name(), names(mixed));
        let near = projection_tolerances(suite, around, &layers, columns);
        both(suite, "project", case, near, |b, fused| {
            project(b, around, &layers, fused)
        });
    }
}

fn sums(suite: &mut Suite<'_>, dtype: DType) {
    for (rows, width, weighted) in [(1, 64, true), (3, 77, false), (50, 576, true)] {
        let run = |b: &Backend, fused: bool| -> Result<Vec<Tensor>> {
            let x = Array::usual(dtype, &[rows, width], 1).on(b)?;
            let residual = Array::usual(dtype, &[rows, width], 2).on(b)?;
            let weight = match weighted {
                true => Some(Array::spread(dtype, &[width], 0.5, 1.5, 3).on(b)?),
                false => None,
            };
            if fused {
                let mut out = [Handle::NONE; 2];
                let (x, r) = (x.handle(), residual.handle());
                let w = Tensor::handle_of(weight.as_ref());
                if answered(command!(b.table(), add_rms_norm, x, r, w, EPS, &mut out))? {
                    return Ok(out.map(|t| Tensor::from_handle(b, t)).to_vec());
                }
            }
            let sum = residual.add(&x)?;
            let normed = sum.rms_norm(weight.as_ref(), EPS)?;
            Ok(vec![sum, normed])
        };
        let case = format!("{} [{rows}, {width}] weight {weighted}", dtype.name());
        let near = Tolerance::units(16.0, 3.0);
        both(suite, "add_rms_norm", case, near, run);
    }
}

fn rotations(suite: &mut Suite<'_>, dtype: DType) {
    let near = Tolerance::units(256.0, 8.0).floor(2.0);
    for scene in scenes(dtype) {
        let turn = |norm, dims, interleaved, periods, flat| Turn {
            norm,
            dims,
            interleaved,
            periods,
            flat,
        };
        let width = scene.width / 2 * 2;
        for turn in [
            turn(None, width, false, false, true),
            turn(Some(true), width, false, true, true),
            turn(Some(false), width / 4 * 2, true, false, false),
            turn(Some(true), 0, false, false, true),
            turn(None, 0, false, false, false),
        ] {
            let case = format!("{turn:?} {}", scene.name());
            both(suite, "rotated_paged_attention", case, near, |b, fused| {
                turn.run(b, &scene, fused)
            });
        }
    }
}

fn refusals(suite: &mut Suite<'_>, form: Option<QuantSpec>) {
    suite.refuses(
        "project",
        "a residual with two layers",
        status::INVALID_ARGUMENT,
        |b| {
            let x = Array::usual(DType::F32, &[1, 64], 1).on(b)?;
            let layer = Layer::new(form, DType::F32, [64, 64], false, 2).on(b)?;
            let raw = [layer.raw(), layer.raw()];
            let args = ProjectArgs {
                x: x.handle(),
                layers: raw.as_ptr(),
                n_layers: 2,
                residual: x.handle(),
                ..ProjectArgs::default()
            };
            let mut out = [Handle::NONE; 2];
            if !answered(command!(b.table(), project, &args, out.as_mut_ptr()))? {
                // Where the slot is absent, a product that cannot be answers in its place.
                return x.matmul(&x);
            }
            Ok(Tensor::from_handle(b, out[0]))
        },
    );
}
