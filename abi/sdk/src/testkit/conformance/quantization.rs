//! Quantised weights: expansion, products, and quantising itself.

use mlxcel_abi::kinds::quant as kind;
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Numbers};
use super::rounding::{Rows, Weight};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::quant::QuantizedTensor;
use crate::{Backend, Result};

pub(super) fn run(suite: &mut Suite<'_>) {
    for spec in specs() {
        for dtype in FLOATS {
            expansions(suite, spec, dtype);
            products(suite, spec, dtype);
            chosen(suite, spec, dtype, true);
        }
        round_trips(suite, spec);
    }
    large(suite);
    parameter_types(suite);
    refusals(suite);
}

/// Products of chosen matrices, for a backend that composes them from expanded weights, beside which nothing is rounded.
pub(super) fn composed(suite: &mut Suite<'_>) {
    for spec in [
        spec(kind::AFFINE, 4, 64),
        spec(kind::AFFINE, 6, 32),
        spec(kind::MXFP4, 4, 32),
    ] {
        for dtype in FLOATS {
            chosen(suite, spec, dtype, false);
        }
    }
}

pub(super) fn spec(mode: u32, bits: u32, group_size: u32) -> QuantSpec {
    QuantSpec {
        mode,
        bits,
        group_size,
        ..QuantSpec::default()
    }
}

fn specs() -> Vec<QuantSpec> {
    let mut specs = Vec::new();
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            specs.push(spec(kind::AFFINE, bits, group));
        }
    }
    specs.extend([
        spec(kind::MXFP4, 4, 32),
        spec(kind::MXFP8, 8, 32),
        spec(kind::NVFP4, 4, 16),
    ]);
    specs
}

pub(super) fn name(spec: &QuantSpec) -> String {
    format!(
        "{} {} bits in {}s",
        kind::name(spec.mode),
        spec.bits,
        spec.group_size
    )
}

/// A weight made on the host: any bits are a valid weight, so none is quantised for it.
pub(super) struct Packed {
    weight: Array,
    scales: Array,
    biases: Option<Array>,
    spec: QuantSpec,
}

impl Packed {
    /// `[leading.., rows, columns]` with parameters of `dtype`.
    pub(super) fn new(
        spec: QuantSpec,
        dtype: DType,
        leading: &[i64],
        rows: i64,
        columns: i64,
        seed: u64,
    ) -> Self {
        let dims = |last: i64| [leading, &[rows, last]].concat();
        let mut numbers = Numbers::new(seed);
        let words: Vec<i128> = (0..dims(columns * i64::from(spec.bits) / 32)
            .iter()
            .product::<i64>())
            .map(|_| {
                let word = (numbers.unit() * 4_294_967_296.0) as u32;
                // The NaN patterns of e4m3 are not weights.
                let sane = |byte: u8| {
                    if byte & 0x7f == 0x7f {
                        byte & 0xf0
                    } else {
                        byte
                    }
                };
                let word = if spec.mode == kind::MXFP8 {
                    u32::from_ne_bytes(word.to_ne_bytes().map(sane))
                } else {
                    word
                };
                i128::from(word)
            })
            .collect();
        let weight = Array::ints(
            DType::U32,
            &dims(columns * i64::from(spec.bits) / 32),
            &words,
        );
        let groups = dims(columns / i64::from(spec.group_size));
        let affine = spec.mode == kind::AFFINE;
        let top = f64::from((1u32 << spec.bits.min(8)) - 1);
        let scales = match spec.mode {
            // Steps and offsets such that weights fill [-1, 1].
            kind::AFFINE => Array::spread(dtype, &groups, 1.0 / top, 2.0 / top, seed + 1),
            kind::NVFP4 => Array::spread(DType::U8, &groups, 32.0, 56.0, seed + 1),
            kind::MXFP8 => Array::spread(DType::U8, &groups, 117.0, 121.0, seed + 1),
            _ => Array::spread(DType::U8, &groups, 123.0, 127.0, seed + 1),
        };
        let biases = affine.then(|| Array::spread(dtype, &groups, -1.0, -0.5, seed + 2));
        Self {
            weight,
            scales,
            biases,
            spec,
        }
    }

    /// Rows of the matrix.
    pub(super) fn rows(&self) -> i64 {
        self.scales.dims().iter().rev().nth(1).copied().unwrap_or(0)
    }

    /// Columns of the matrix.
    pub(super) fn columns(&self) -> i64 {
        let groups = self.scales.dims().last().copied().unwrap_or(0);
        groups * i64::from(self.spec.group_size)
    }

    pub(super) fn on(&self, backend: &Backend) -> Result<QuantizedTensor> {
        Ok(QuantizedTensor {
            weight: self.weight.on(backend)?,
            scales: self.scales.on(backend)?,
            biases: self
                .biases
                .as_ref()
                .map(|biases| biases.on(backend))
                .transpose()?,
            spec: self.spec,
        })
    }

    /// What its rows measure, by the reference.
    pub(super) fn measured(&self, reference: &Backend) -> Result<Weight> {
        Ok(Weight {
            rows: Rows::of(&self.on(reference)?.dequantize(DType::F32)?)?,
            is_quantised: true,
        })
    }

    /// The tolerance of `x @ self.T` on a backend that may round the activations.
    fn near(&self, suite: &Suite<'_>, near: Tolerance, x: &Array) -> Tolerance {
        suite.rounded(near, |reference| {
            let x = Rows::of(&x.on(reference)?)?;
            Ok(self.measured(reference)?.reach(&x))
        })
    }
}

fn expansions(suite: &mut Suite<'_>, spec: QuantSpec, dtype: DType) {
    // Scale times code, then plus bias: both steps may be taken in the result's type.
    let near = Tolerance::units(2.0, 2.0).floor(2.0);
    let columns = 2 * i64::from(spec.group_size);
    for leading in [&[][..], &[3]] {
        let packed = Packed::new(spec, dtype, leading, 5, columns, 1);
        let case = format!("{} {} {leading:?}", name(&spec), dtype.name());
        suite.check("dequantize", case, near, |b| {
            packed.on(b)?.dequantize(dtype)
        });
    }
}

/// Large enough for tiles, their rests, and several threads.
fn large(suite: &mut Suite<'_>) {
    let specs = [
        spec(kind::AFFINE, 4, 64),
        spec(kind::AFFINE, 6, 32),
        spec(kind::AFFINE, 8, 128),
        spec(kind::NVFP4, 4, 16),
    ];
    for spec in specs {
        for dtype in FLOATS {
            for (rows, outputs, columns) in
                [(1, 519, 384), (3, 131, 512), (37, 67, 256), (130, 35, 256)]
            {
                let packed = Packed::new(spec, dtype, &[], outputs, columns, 20);
                let activation = Array::usual(dtype, &[rows, columns], 21);
                let near = Tolerance::accumulated(columns as usize, 3.0);
                let near = packed.near(suite, near, &activation);
                let case = format!(
                    "{} {} [{rows}, {columns}] @ [{outputs}, {columns}].T",
                    name(&spec),
                    dtype.name()
                );
                suite.check("quantized_matmul", case, near, |b| {
                    packed.on(b)?.matmul_t(&activation.on(b)?)
                });
            }
        }
    }
}

fn products(suite: &mut Suite<'_>, spec: QuantSpec, dtype: DType) {
    let group = i64::from(spec.group_size);
    // One row, a few, a prompt's worth; output sizes that are no multiple of a tile.
    for (x, rows, columns) in [
        (&[1][..], 8, 2 * group),
        (&[1], 67, 4 * group),
        (&[5], 33, 2 * group),
        (&[40], 16, group.max(64)),
        (&[2, 3], 9, 2 * group),
    ] {
        let packed = Packed::new(spec, dtype, &[], rows, columns, 2);
        let dims = [x, &[columns]].concat();
        let activation = Array::usual(dtype, &dims, 3);
        let near = Tolerance::accumulated(columns as usize, 3.0);
        let near = packed.near(suite, near, &activation);
        let case = format!(
            "{} {} {dims:?} @ [{rows}, {columns}].T",
            name(&spec),
            dtype.name()
        );
        suite.check("quantized_matmul", case, near, |b| {
            packed.on(b)?.matmul_t(&activation.on(b)?)
        });
    }
    let packed = Packed::new(spec, dtype, &[], 64, 2 * group, 4);
    let activation = Array::usual(dtype, &[3, 64], 5);
    let near = Tolerance::accumulated(64, 3.0);
    let case = format!("{} {} not transposed", name(&spec), dtype.name());
    suite.check("quantized_matmul", case, near, |b| {
        packed.on(b)?.matmul(&activation.on(b)?)
    });
}

fn chosen(suite: &mut Suite<'_>, spec: QuantSpec, dtype: DType, may_round: bool) {
    let columns = i64::from(spec.group_size).max(64);
    let packed = Packed::new(spec, dtype, &[4], 10, columns, 6);
    let exact = Tolerance::accumulated(columns as usize, 3.0);
    let near = |suite: &Suite<'_>, x: &Array| match may_round {
        true => packed.near(suite, exact, x),
        false => exact,
    };
    let slot = "gather_quantized_matmul";
    let tokens = Array::usual(dtype, &[3, 1, 1, columns], 7);
    let experts = Array::indices(DType::U32, &[3, 2], 4, 8);
    suite.check(
        slot,
        format!("{} {} two experts a token", name(&spec), dtype.name()),
        near(suite, &tokens),
        |b| {
            packed
                .on(b)?
                .gather_matmul_t(&tokens.on(b)?, None, &experts.on(b)?, false)
        },
    );
    let rows = Array::usual(dtype, &[6, 1, columns], 9);
    let ascending = Array::of(DType::U32, &[6], [0.0, 1.0, 1.0, 2.0, 3.0, 3.0]);
    suite.check(
        slot,
        format!("{} {} sorted rows", name(&spec), dtype.name()),
        near(suite, &rows),
        |b| {
            packed
                .on(b)?
                .gather_matmul_t(&rows.on(b)?, None, &ascending.on(b)?, true)
        },
    );
    let left = Array::of(DType::U32, &[4], [5.0, 0.0, 0.0, 2.0]);
    let right = Array::of(DType::U32, &[4], [3.0, 0.0, 2.0, 1.0]);
    suite.check(
        slot,
        format!("{} {} both chosen", name(&spec), dtype.name()),
        near(suite, &rows),
        |b| {
            packed
                .on(b)?
                .gather_matmul_t(&rows.on(b)?, Some(&left.on(b)?), &right.on(b)?, false)
        },
    );
}

/// A backend may round ties in its own way, so what it quantised is judged by what comes back.
fn round_trips(suite: &mut Suite<'_>, spec: QuantSpec) {
    for dtype in FLOATS {
        let array = Array::usual(dtype, &[3, 256], 10);
        let step = match (spec.mode, spec.bits) {
            (kind::AFFINE, bits) => 4.0 / f64::from((1 << bits) - 1),
            // The shared power of two may be too small for the largest element, which saturates.
            (kind::MXFP8, _) => 0.3,
            _ => 0.6,
        };
        let allowed = step * 1.02 + 0.02;
        suite.holds(
            "quantize",
            format!("{} {} comes back", name(&spec), dtype.name()),
            |b| {
                let quantized = array
                    .on(b)
                    .and_then(|w| w.quantize(spec))
                    .map_err(|e| e.to_string())?;
                let affine = spec.mode == kind::AFFINE;
                if quantized.biases.is_some() != affine {
                    return Err(format!("biases are given: {}", quantized.biases.is_some()));
                }
                let scale_dtype = quantized.scales.dtype().map_err(|e| e.to_string())?;
                if scale_dtype != if affine { dtype } else { DType::U8 } {
                    return Err(format!("scales are {}", scale_dtype.name()));
                }
                let back = quantized
                    .dequantize(dtype)
                    .and_then(|w| Array::read(&w))
                    .map_err(|e| e.to_string())?;
                let pairs = back
                    .0
                    .reals()
                    .into_owned()
                    .into_iter()
                    .zip(array.0.reals().into_owned());
                let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                if worst <= allowed {
                    Ok(())
                } else {
                    Err(format!("off by {worst}, at most {allowed} is expected"))
                }
            },
        );
    }
}

/// Parameters of another float type never widen the activation.
fn parameter_types(suite: &mut Suite<'_>) {
    for (x, parameters) in [
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F16, DType::BF16),
        (DType::BF16, DType::F16),
        (DType::F32, DType::F16),
    ] {
        let packed = Packed::new(spec(kind::AFFINE, 4, 64), parameters, &[], 8, 128, 11);
        let activation = Array::usual(x, &[3, 128], 12);
        let case = format!("{} with {} scales", x.name(), parameters.name());
        // Scales may be brought to the activation's type first: one more rounding of each weight.
        let near = packed.near(suite, Tolerance::accumulated(128, 6.0), &activation);
        suite.check("quantized_matmul", case.clone(), near, |b| {
            packed.on(b)?.matmul_t(&activation.on(b)?)
        });
        suite.check(
            "dequantize",
            case,
            Tolerance::units(2.0, 3.0).floor(2.0),
            |b| packed.on(b)?.dequantize(x),
        );
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    let packed = |spec: QuantSpec| Packed::new(spec, DType::F32, &[], 8, 128, 13);
    let with = |stated: QuantSpec| {
        let packed = packed(spec(kind::AFFINE, 4, 64));
        move |b: &Backend| {
            QuantizedTensor {
                spec: stated,
                ..packed.on(b)?
            }
            .dequantize(DType::F32)
        }
    };
    suite.refuses(
        "dequantize",
        "bits that contradict the tensors",
        bad,
        with(spec(kind::AFFINE, 8, 64)),
    );
    suite.refuses(
        "dequantize",
        "a group size that contradicts the tensors",
        bad,
        with(spec(kind::AFFINE, 4, 32)),
    );
    suite.refuses("dequantize", "7 bits", bad, with(spec(kind::AFFINE, 7, 64)));
    suite.refuses(
        "dequantize",
        "an unknown mode",
        status::UNIMPLEMENTED,
        with(spec(99, 4, 64)),
    );
    suite.refuses("dequantize", "affine without biases", bad, |b| {
        QuantizedTensor {
            biases: None,
            ..packed(spec(kind::AFFINE, 4, 64)).on(b)?
        }
        .dequantize(DType::F32)
    });
    let activation = Array::usual(DType::F32, &[2, 96], 14);
    suite.refuses(
        "quantized_matmul",
        "an activation of another width",
        bad,
        |b| {
            packed(spec(kind::AFFINE, 4, 64))
                .on(b)?
                .matmul_t(&activation.on(b)?)
        },
    );
    suite.refuses(
        "quantize",
        "a last axis that groups do not divide",
        bad,
        |b| {
            activation
                .on(b)?
                .quantize(spec(kind::AFFINE, 4, 64))
                .map(|q| q.weight)
        },
    );
    let integers = Array::usual(DType::I32, &[2, 64], 15);
    suite.refuses("quantize", "integers", bad, |b| {
        integers
            .on(b)?
            .quantize(spec(kind::AFFINE, 4, 64))
            .map(|q| q.weight)
    });
}
