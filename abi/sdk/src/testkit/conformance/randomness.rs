//! Random draws: distributions, reproducibility, independence. Values differ between backends.

use mlxcel_abi::kinds::random as kind;
use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::Array;
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::{Backend, Result, Tensor};

const COUNT: i64 = 4096;

pub(super) fn run(suite: &mut Suite<'_>) {
    descriptions(suite);
    keys(suite);
    for dtype in FLOATS {
        floats(suite, dtype);
    }
    others(suite);
    categories(suite);
    refusals(suite);
}

/// Dtypes and shapes, which must not depend on the generator: compared by what is left when the
/// values are taken out.
fn descriptions(suite: &mut Suite<'_>) {
    let shape_of = |t: Tensor| -> Result<Tensor> { t.eq(&t) };
    for (code, name) in kind::ALL
        .iter()
        .filter(|(code, _)| *code != kind::CATEGORICAL)
    {
        for dims in [&[][..], &[3, 5], &[0]] {
            suite.check(
                "random",
                format!("{name} {dims:?}"),
                Tolerance::EXACT,
                |b| {
                    shape_of(Tensor::random_key(b, 1)?.random(*code, DType::F32, dims, 0.0, 1.0)?)
                },
            );
        }
    }
    suite.check("random_key", "two words", Tolerance::EXACT, |b| {
        shape_of(Tensor::random_key(b, u64::MAX)?)
    });
    suite.check("random_split", "seven keys", Tolerance::EXACT, |b| {
        shape_of(Tensor::random_key(b, 1)?.random_split(7)?)
    });
    suite.holds("random", "results have the dtype asked for", |b| {
        let key = Tensor::random_key(b, 2).map_err(|e| e.to_string())?;
        for dtype in FLOATS {
            for code in [kind::UNIFORM, kind::NORMAL, kind::GUMBEL] {
                let found = key
                    .random(code, dtype, &[4], 0.0, 1.0)
                    .and_then(|t| t.dtype())
                    .map_err(|e| e.to_string())?;
                if found != dtype {
                    return Err(format!(
                        "{} gives {} for {}",
                        kind::name(code),
                        found.name(),
                        dtype.name()
                    ));
                }
            }
        }
        Ok(())
    });
}

type Checked = core::result::Result<(), String>;

fn numbers(run: impl FnOnce() -> Result<Tensor>) -> core::result::Result<Vec<f64>, String> {
    let array = run()
        .and_then(|t| Array::read(&t))
        .map_err(|e| e.to_string())?;
    Ok(array.0.reals().into_owned())
}

fn draw(
    b: &Backend,
    seed: u64,
    code: u32,
    dtype: DType,
    a: f64,
    c: f64,
) -> core::result::Result<Vec<f64>, String> {
    numbers(|| Tensor::random_key(b, seed)?.random(code, dtype, &[COUNT], a, c))
}

fn keys(suite: &mut Suite<'_>) {
    suite.holds(
        "random",
        "the same key gives the same values, another key others",
        |b| {
            let [a, again, other] =
                [7, 7, 8].map(|seed| draw(b, seed, kind::UNIFORM, DType::F32, 0.0, 1.0));
            let (a, again, other) = (a?, again?, other?);
            let common = a.iter().zip(&other).filter(|(a, b)| a == b).count();
            match (a == again, common) {
                (false, _) => Err("the same key gave other values".to_owned()),
                (true, common) if common > 8 => {
                    Err(format!("{common} of {COUNT} values of two keys are equal"))
                }
                _ => Ok(()),
            }
        },
    );
    suite.holds("random_key", "both halves of the seed count", |b| {
        let [low, high] =
            [1, 1 << 32].map(|seed| draw(b, seed, kind::UNIFORM, DType::F32, 0.0, 1.0));
        if low? == high? {
            Err("seeds 1 and 2^32 give the same values".to_owned())
        } else {
            Ok(())
        }
    });
    suite.holds(
        "random_split",
        "keys are different and give different streams",
        |b| {
            let words = numbers(|| Tensor::random_key(b, 3)?.random_split(64))?;
            let mut pairs: Vec<(u64, u64)> = words
                .chunks(2)
                .map(|pair| (pair[0] as u64, pair[1] as u64))
                .collect();
            pairs.sort_unstable();
            pairs.dedup();
            if pairs.len() != 64 {
                return Err(format!("{} of 64 keys are different", pairs.len()));
            }
            let stream = |row: i64| {
                numbers(|| {
                    let key = Tensor::random_key(b, 3)?
                        .random_split(2)?
                        .narrow(0, row, 1)?
                        .reshape(&[2])?;
                    key.random(kind::UNIFORM, DType::F32, &[16], 0.0, 1.0)
                })
            };
            if stream(0)? == stream(1)? {
                Err("two keys give the same stream".to_owned())
            } else {
                Ok(())
            }
        },
    );
}

struct Moments {
    mean: f64,
    deviation: f64,
    least: f64,
    most: f64,
}

fn moments(x: &[f64]) -> Moments {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let fold = |f: fn(f64, f64) -> f64, start| x.iter().copied().fold(start, f);
    Moments {
        mean,
        deviation: variance.sqrt(),
        least: fold(f64::min, f64::INFINITY),
        most: fold(f64::max, f64::NEG_INFINITY),
    }
}

/// Five standard errors, so that a right generator fails for one key in millions (keys are fixed).
fn expect(what: &str, found: f64, wanted: f64, standard_error: f64) -> Checked {
    if (found - wanted).abs() <= 5.0 * standard_error {
        return Ok(());
    }
    Err(format!(
        "{what} is {found}, expected {wanted} within {}",
        5.0 * standard_error
    ))
}

fn floats(suite: &mut Suite<'_>, dtype: DType) {
    let root = (COUNT as f64).sqrt();
    // Half types round the draws.
    let grain = if dtype == DType::F32 { 0.0 } else { 0.004 };
    for (low, high) in [(0.0, 1.0), (-3.0, 5.0)] {
        suite.holds(
            "random",
            format!("uniform {} in [{low}, {high})", dtype.name()),
            |b| {
                let m = moments(&draw(b, 11, kind::UNIFORM, dtype, low, high)?);
                if m.least < low || m.most >= high {
                    return Err(format!("values lie in [{}, {}]", m.least, m.most));
                }
                let deviation = (high - low) / 12f64.sqrt();
                expect(
                    "the mean",
                    m.mean,
                    (low + high) / 2.0,
                    deviation / root + grain * (high - low) / 5.0,
                )?;
                expect(
                    "the deviation",
                    m.deviation,
                    deviation,
                    deviation / root + grain * (high - low) / 5.0,
                )
            },
        );
    }
    for (mean, deviation) in [(0.0, 1.0), (2.0, 0.5)] {
        suite.holds(
            "random",
            format!("normal {} of {mean}, {deviation}", dtype.name()),
            |b| {
                let x = draw(b, 12, kind::NORMAL, dtype, mean, deviation)?;
                if x.iter().any(|x| !x.is_finite()) {
                    return Err("values are not finite".to_owned());
                }
                let m = moments(&x);
                expect("the mean", m.mean, mean, deviation / root + grain)?;
                expect(
                    "the deviation",
                    m.deviation,
                    deviation,
                    deviation / root + grain,
                )?;
                let inside = x.iter().filter(|x| (*x - mean).abs() < deviation).count() as f64
                    / COUNT as f64;
                expect(
                    "the share within a deviation",
                    inside,
                    0.6827,
                    0.4655 / root + grain,
                )
            },
        );
    }
    suite.holds("random", format!("gumbel {}", dtype.name()), |b| {
        let x = draw(b, 13, kind::GUMBEL, dtype, 0.0, 1.0)?;
        if x.iter().any(|x| !x.is_finite()) {
            return Err("values are not finite".to_owned());
        }
        // The mean is Euler's constant, the deviation pi / sqrt(6).
        expect(
            "the mean",
            moments(&x).mean,
            0.577_215_7,
            1.282_55 / root + 2.0 * grain,
        )
    });
}

fn others(suite: &mut Suite<'_>) {
    let root = (COUNT as f64).sqrt();
    suite.holds("random", "bits", |b| {
        let x = draw(b, 14, kind::BITS, DType::U32, 0.0, 1.0)?;
        for bit in 0..32 {
            let share =
                x.iter().filter(|x| (**x as u64 >> bit) & 1 == 1).count() as f64 / COUNT as f64;
            expect(
                &format!("the share of ones at bit {bit}"),
                share,
                0.5,
                0.5 / root,
            )?;
        }
        Ok(())
    });
    for p in [0.0, 0.25, 1.0] {
        suite.holds("random", format!("bernoulli of {p}"), |b| {
            let x = draw(b, 15, kind::BERNOULLI, DType::BOOL, p, 0.0)?;
            expect(
                "the share of true",
                moments(&x).mean,
                p,
                (p * (1.0 - p)).sqrt() / root,
            )
        });
    }
}

fn categories(suite: &mut Suite<'_>) {
    let root = (COUNT as f64).sqrt();
    for dtype in FLOATS {
        let wanted = [0.5f64, 0.125, 0.125, 0.25];
        let logits = Array::of(
            dtype,
            &[COUNT, 4],
            wanted
                .iter()
                .map(|p| p.ln())
                .cycle()
                .take(4 * COUNT as usize),
        );
        suite.holds(
            "random",
            format!("categorical of {} logits", dtype.name()),
            |b| {
                let x = numbers(|| Tensor::random_key(b, 16)?.categorical(&logits.on(b)?))?;
                if x.len() != COUNT as usize {
                    return Err(format!("{} draws, expected {COUNT}", x.len()));
                }
                for (class, p) in wanted.iter().enumerate() {
                    let share =
                        x.iter().filter(|x| **x == class as f64).count() as f64 / COUNT as f64;
                    expect(
                        &format!("the share of class {class}"),
                        share,
                        *p,
                        (p * (1.0 - p)).sqrt() / root + 0.002,
                    )?;
                }
                Ok(())
            },
        );
    }
    let only = Array::of(
        DType::F32,
        &[2, 3],
        [
            f64::NEG_INFINITY,
            0.0,
            f64::NEG_INFINITY,
            5.0,
            f64::NEG_INFINITY,
            f64::NEG_INFINITY,
        ],
    );
    suite.check(
        "random",
        "categorical never draws an impossible class",
        Tolerance::EXACT,
        |b| Tensor::random_key(b, 17)?.categorical(&only.on(b)?),
    );
}

fn refusals(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    suite.refuses("random", "a key of three words", bad, |b| {
        Array::usual(DType::U32, &[3], 1)
            .on(b)?
            .random(kind::UNIFORM, DType::F32, &[2], 0.0, 1.0)
    });
    suite.refuses("random", "a key of floats", bad, |b| {
        Array::usual(DType::F32, &[2], 1)
            .on(b)?
            .random(kind::UNIFORM, DType::F32, &[2], 0.0, 1.0)
    });
    suite.refuses("random", "a negative dimension", bad, |b| {
        Tensor::random_key(b, 1)?.random(kind::UNIFORM, DType::F32, &[2, -1], 0.0, 1.0)
    });
    suite.refuses("random", "uniform integers", bad, |b| {
        Tensor::random_key(b, 1)?.random(kind::UNIFORM, DType::I32, &[2], 0.0, 1.0)
    });
    suite.refuses("random", "an unknown draw", status::UNIMPLEMENTED, |b| {
        Tensor::random_key(b, 1)?.random(9999, DType::F32, &[2], 0.0, 1.0)
    });
}
