//! Products of as many rows as prompts have. They are large enough for a backend to leave them to a library or to expand a weight for
//! them, which the small ones of the other groups are not.

use mlxcel_abi::DType;
use mlxcel_abi::kinds::{glu, quant as kind};

use super::fused::{Around, Mlp, both, names, project, projection_tolerances};
use super::layer::Layer;
use super::quantization::spec;
use super::suite::Suite;
use super::tolerance::Tolerance;

/// Rows, outputs and inputs, 64 Mi multiplications at least: more rows than one tile has and than several have; inputs that are no
/// multiple of a long piece; outputs that leave rows of the result without an alignment.
const SHAPES: [[i64; 3]; 4] = [
    [300, 456, 512],
    [520, 264, 512],
    [300, 408, 576],
    [300, 457, 512],
];

pub(super) fn run(suite: &mut Suite<'_>) {
    let q4 = Some(spec(kind::AFFINE, 4, 64));
    let q8 = Some(spec(kind::AFFINE, 8, 64));
    for dtype in [DType::F16, DType::BF16] {
        for [rows, outputs, inputs] in SHAPES {
            for (form, residual) in [(q4, true), (q8, false), (None, true)] {
                let around = Around {
                    dtype,
                    rows,
                    norm: (!residual).then_some(true),
                    residual,
                    nan: false,
                };
                let layers = [Layer::new(form, dtype, [outputs, inputs], false, 80)];
                let case = format!(
                    "{} {around:?} {outputs} from {inputs} {}",
                    dtype.name(),
                    names(&[form])
                );
                let near = projection_tolerances(suite, &around, &layers, inputs);
                both(suite, "project", case, near, |b, fused| {
                    project(b, &around, &layers, fused)
                });
            }
        }
    }
    for forms in [[q4; 3], [None; 3]] {
        let around = Around {
            dtype: DType::BF16,
            rows: 300,
            norm: Some(true),
            residual: true,
            nan: false,
        };
        let mlp = Mlp {
            columns: 576,
            inner: 448,
            forms,
            bias: false,
            kind: glu::SILU,
        };
        let case = format!("bf16 {around:?} {}", names(&forms));
        let near = suite.rounded(wide_mlp(), |b| mlp.reach(b, &around));
        both(suite, "gated_mlp", case, near, |b, fused| {
            mlp.run(b, &around, fused)
        });
    }
}

/// 1.4 times that of the small blocks: the sums are longer (the root of 448 over 320), and the largest error is one of 172,800 (4.9
/// standard deviations) in place of one of 7,680 (4.2).
fn wide_mlp() -> Tolerance {
    Tolerance::units(90.0, 12.0).floor(560.0)
}
