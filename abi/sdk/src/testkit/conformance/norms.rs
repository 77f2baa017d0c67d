//! Norms, rotary embedding and gated activations as the backend has them.

use mlxcel_abi::kinds::glu as glu_kind;
use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::{Backend, Result, RopeSpec, Tensor};

pub(super) fn run(suite: &mut Suite<'_>) {
    norms(suite, "");
    rotations(suite, "");
    gates(suite, "");
    refusals(suite);
}

fn norm_tolerance() -> Tolerance {
    // Squares of a thousand elements may be summed one after another in f32; a weight of another
    // type may be brought to the activation's first.
    Tolerance::units(32.0, 2.0).floor(0.5)
}

/// RMS and layer norms; `how` is added to the case names.
pub(super) fn norms(suite: &mut Suite<'_>, how: &str) {
    for dtype in FLOATS {
        for dims in [
            &[1, 64][..],
            &[5, 48],
            &[2, 3, 100],
            &[7],
            &[3, 1],
            &[1, 1024],
        ] {
            let width = dims[dims.len() - 1];
            let x = Array::usual(dtype, dims, 1);
            for parameters in [None, Some(dtype), Some(DType::F32), Some(DType::BF16)] {
                let w = parameters.map(|dtype| Array::spread(dtype, &[width], 0.5, 1.5, 2));
                let bias = parameters.map(|dtype| Array::spread(dtype, &[width], -0.5, 0.5, 3));
                let with = parameters.map_or("no weight".to_owned(), |dtype| {
                    format!("{} weight", dtype.name())
                });
                let case = format!("{} {dims:?} {with}{how}", dtype.name());
                suite.check("rms_norm", case.clone(), norm_tolerance(), |b| {
                    x.on(b)?.rms_norm(optional(&w, b)?.as_ref(), 1e-5)
                });
                suite.check("layer_norm", case, norm_tolerance(), |b| {
                    x.on(b)?.layer_norm(
                        optional(&w, b)?.as_ref(),
                        optional(&bias, b)?.as_ref(),
                        1e-5,
                    )
                });
            }
        }
        for layout in [Layout::Transposed, Layout::Strided] {
            let x = Array::usual(dtype, &[6, 8], 4);
            let case = format!("{} {layout:?}{how}", dtype.name());
            suite.check("rms_norm", case, norm_tolerance(), |b| {
                x.laid_out(b, layout)?.rms_norm(None, 1e-6)
            });
        }
        // Squares of such activations overflow f16, and an eps of 1e-6 vanishes in it.
        let large = Array::spread(dtype, &[2, 64], -1000.0, 1000.0, 5);
        let case = format!("{} large activations{how}", dtype.name());
        suite.check("rms_norm", case.clone(), norm_tolerance(), |b| {
            large.on(b)?.rms_norm(None, 1e-6)
        });
        suite.check("layer_norm", case, norm_tolerance(), |b| {
            large.on(b)?.layer_norm(None, None, 1e-6)
        });
        let small = Array::spread(dtype, &[2, 64], -0.002, 0.002, 6);
        let case = format!("{} small activations{how}", dtype.name());
        suite.check("rms_norm", case, norm_tolerance(), |b| {
            small.on(b)?.rms_norm(None, 1e-6)
        });
    }
}

fn optional(array: &Option<Array>, b: &Backend) -> Result<Option<Tensor>> {
    array.as_ref().map(|array| array.on(b)).transpose()
}

/// Rotary embedding with halves and neighbours, partial, scaled, with given frequencies.
pub(super) fn rotations(suite: &mut Suite<'_>, how: &str) {
    // An f32 angle of a few hundred has an error of 1e-5, which is also the result's.
    let near = Tolerance::units(512.0, 2.0).floor(2.0);
    for dtype in FLOATS {
        for (dims, rotated) in [
            (&[1, 2, 8][..], 8),
            (&[5, 3, 64], 64),
            (&[4, 1, 10], 6),
            (&[3, 2, 16], 4),
        ] {
            let x = Array::usual(dtype, dims, 7);
            let positions = Array::indices(DType::I32, &dims[..1], 300, 8);
            let freqs = Array::spread(DType::F32, &[i64::from(rotated) / 2], 1.0, 5000.0, 9);
            for interleaved in [false, true] {
                for (base, scale, given) in [
                    (10_000.0, 1.0, false),
                    (500_000.0, 0.25, false),
                    (10_000.0, 1.0, true),
                ] {
                    let case = format!(
                        "{} {dims:?} {rotated} features{}{}{how}",
                        dtype.name(),
                        if interleaved { " interleaved" } else { "" },
                        if given {
                            " given frequencies".to_owned()
                        } else {
                            format!(" base {base} scale {scale}")
                        },
                    );
                    suite.check("rope", case, near, |b| {
                        let freqs = if given { Some(freqs.on(b)?) } else { None };
                        let spec = RopeSpec {
                            dims: rotated,
                            interleaved,
                            base,
                            scale,
                            freqs,
                        };
                        x.on(b)?.rope(&positions.on(b)?, &spec)
                    });
                }
            }
        }
        let spec = RopeSpec {
            dims: 8,
            interleaved: false,
            base: 10_000.0,
            scale: 1.0,
            freqs: None,
        };
        let x = Array::usual(dtype, &[2, 3, 8], 10);
        let same = Array::of(DType::I32, &[2], [7.0, 7.0]);
        suite.check(
            "rope",
            format!("{} a position per row{how}", dtype.name()),
            near,
            |b| x.on(b)?.rope(&same.on(b)?, &spec),
        );
        for layout in [Layout::Transposed, Layout::Strided] {
            suite.check(
                "rope",
                format!("{} {layout:?}{how}", dtype.name()),
                near,
                |b| x.laid_out(b, layout)?.rope(&same.on(b)?, &spec),
            );
        }
    }
}

/// Gated activations.
pub(super) fn gates(suite: &mut Suite<'_>, how: &str) {
    for dtype in FLOATS {
        for (code, name) in glu_kind::ALL {
            for dims in [&[9][..], &[3, 40], &[0, 4]] {
                let (gate, up) = (
                    Array::spread(dtype, dims, -6.0, 6.0, 11),
                    Array::usual(dtype, dims, 12),
                );
                let case = format!("{name} {} {dims:?}{how}", dtype.name());
                suite.check("glu", case, Tolerance::units(8.0, 6.0).floor(1.0), |b| {
                    gate.on(b)?.glu(*code, &up.on(b)?)
                });
            }
        }
        let both = Array::usual(dtype, &[4, 12], 13);
        let case = format!("silu {} halves of one tensor{how}", dtype.name());
        suite.check("glu", case, Tolerance::units(8.0, 6.0).floor(1.0), |b| {
            let both = both.on(b)?;
            both.narrow(1, 0, 6)?
                .glu(glu_kind::SILU, &both.narrow(1, 6, 6)?)
        });
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    let x = Array::usual(DType::F32, &[2, 3, 8], 14);
    let w = Array::usual(DType::F32, &[7], 15);
    suite.refuses("rms_norm", "a weight of another width", bad, |b| {
        x.on(b)?.rms_norm(Some(&w.on(b)?), 1e-5)
    });
    suite.refuses("layer_norm", "a bias of another width", bad, |b| {
        x.on(b)?.layer_norm(None, Some(&w.on(b)?), 1e-5)
    });
    let spec = |dims: u32| RopeSpec {
        dims,
        interleaved: false,
        base: 10_000.0,
        scale: 1.0,
        freqs: None,
    };
    let positions = |n: i64| Array::indices(DType::I32, &[n], 5, 16);
    suite.refuses("rope", "an odd number of features", bad, |b| {
        x.on(b)?.rope(&positions(2).on(b)?, &spec(5))
    });
    suite.refuses("rope", "more features than there are", bad, |b| {
        x.on(b)?.rope(&positions(2).on(b)?, &spec(10))
    });
    suite.refuses("rope", "positions for other rows", bad, |b| {
        x.on(b)?.rope(&positions(3).on(b)?, &spec(8))
    });
    suite.refuses("glu", "an unknown gate", status::UNIMPLEMENTED, |b| {
        x.on(b)?.glu(9999, &x.on(b)?)
    });
    suite.refuses("glu", "shapes that differ", bad, |b| {
        x.on(b)?.glu(glu_kind::SILU, &w.on(b)?)
    });
}
