//! Sampling. Backends without the slot are not asked: the host chooses the tokens then.

use mlxcel_abi::fused_args::SampleArgs;
use mlxcel_abi::{DType, status};

use super::array::Array;
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::{Backend, Result, Tensor};

/// Arguments of one call, one entry for each row.
#[derive(Clone)]
struct Case {
    logits: Array,
    top_k: Vec<f64>,
    top_p: Vec<f64>,
    min_p: Vec<f64>,
    temperature: Vec<f64>,
    uniform: Vec<f64>,
}

impl Case {
    /// Highest logit of every row.
    fn greedy(logits: Array, rows: usize) -> Self {
        Self {
            logits,
            top_k: vec![1.0; rows],
            top_p: vec![1.0; rows],
            min_p: vec![0.0; rows],
            temperature: vec![1.0; rows],
            uniform: vec![0.5; rows],
        }
    }

    fn run(&self, b: &Backend) -> Result<Tensor> {
        let column = |dtype, values: &[f64]| {
            Array::of(dtype, &[values.len() as i64], values.iter().copied()).on(b)
        };
        let logits = self.logits.on(b)?;
        let top_k = column(DType::I32, &self.top_k)?;
        let top_p = column(DType::F32, &self.top_p)?;
        let min_p = column(DType::F32, &self.min_p)?;
        let temperature = column(DType::F32, &self.temperature)?;
        let uniform = column(DType::F32, &self.uniform)?;
        let args = SampleArgs {
            logits: logits.handle(),
            top_k: top_k.handle(),
            top_p: top_p.handle(),
            min_p: min_p.handle(),
            temperature: temperature.handle(),
            uniform: uniform.handle(),
            ..SampleArgs::default()
        };
        op!(b, sample, &raw const args)
    }
}

/// Whether the backend has the slot at all.
fn is_there(b: &Backend) -> bool {
    let logits = Array::of(DType::F32, &[1, 2], [0.0, 1.0]);
    !matches!(Case::greedy(logits, 1).run(b), Err(error) if error.code() == status::UNIMPLEMENTED)
}

pub(super) fn run(suite: &mut Suite<'_>) {
    if !is_there(suite.subject) {
        return;
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (rows, width) in [(1, 1), (1, 9), (5, 300), (3, 5000), (9, 64)] {
            highest(suite, dtype, rows, width);
            drawn(suite, dtype, rows, width);
        }
    }
    odd(suite);
    cuts(suite);
    refusals(suite);
}

fn highest(suite: &mut Suite<'_>, dtype: DType, rows: usize, width: i64) {
    let logits = Array::usual(dtype, &[rows as i64, width], 11);
    let case = Case::greedy(logits, rows);
    let name = format!("highest {} [{rows}, {width}]", dtype.name());
    suite.check("sample", name, Tolerance::EXACT, |b| case.run(b));
}

/// Rows with different numbers. Random numbers lie between the steps of the sums, since a rounding may
/// move those.
fn drawn(suite: &mut Suite<'_>, dtype: DType, rows: usize, width: i64) {
    for round in 0..6 {
        let at = |row: usize, list: &[f64]| list[(row + round) % list.len()];
        let column = |list: &[f64]| (0..rows).map(|row| at(row, list)).collect::<Vec<f64>>();
        let case = Case {
            logits: Array::usual(dtype, &[rows as i64, width], 20 + round as u64),
            top_k: column(&[40.0, 1.0, 256.0, 2.0, 7.0]),
            top_p: column(&[0.95, 1.0, 0.5, 0.0]),
            min_p: column(&[0.05, 0.0, 0.3]),
            temperature: column(&[0.8, 1.0, 0.05, 3.0, 100.0]),
            uniform: (0..rows)
                .map(|row| (row as f64 * 0.617_31 + round as f64 * 0.271_83).fract())
                .collect(),
        };
        let name = format!("draw {round} {} [{rows}, {width}]", dtype.name());
        suite.check("sample", name, Tolerance::EXACT, |b| case.run(b));
    }
}

/// Rows without a token are told apart from their neighbours.
fn odd(suite: &mut Suite<'_>) {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let rows = [
        [1.0, nan, 2.0, 0.0],
        [1.0, 3.0, 3.0, 0.0],
        [-inf, -inf, -inf, -inf],
        [-inf, -inf, -4.0, -inf],
        [1.0, inf, 2.0, 0.0],
        [-1.0, -2.0, -0.5, -0.5],
    ];
    for dtype in [DType::F32, DType::BF16] {
        for top_k in [1.0, 3.0] {
            let logits = Array::of(dtype, &[6, 4], rows.into_iter().flatten());
            let case = Case {
                top_k: vec![top_k; 6],
                uniform: vec![0.999; 6],
                ..Case::greedy(logits, 6)
            };
            let name = format!("rows without a token {} of {top_k}", dtype.name());
            suite.check("sample", name, Tolerance::EXACT, |b| case.run(b));
        }
    }
}

/// One filter at a time, with every tenth as the random number.
fn cuts(suite: &mut Suite<'_>) {
    // Probabilities 0.4, 0.3, 0.15, 0.1 and 0.05.
    let logits: Vec<f64> = [0.1, 0.4, 0.05, 0.3, 0.15_f64].map(f64::ln).to_vec();
    let rows = 10;
    let all = || {
        let numbers = (0..rows).flat_map(|_| logits.iter().copied());
        let array = Array::of(DType::F32, &[rows as i64, 5], numbers);
        Case {
            top_k: vec![256.0; rows],
            uniform: (0..rows).map(|row| row as f64 / 10.0 + 0.031).collect(),
            ..Case::greedy(array, rows)
        }
    };
    let cases = [
        ("all", all()),
        (
            "two",
            Case {
                top_k: vec![2.0; rows],
                ..all()
            },
        ),
        (
            "top_p 0.69",
            Case {
                top_p: vec![0.69; rows],
                ..all()
            },
        ),
        (
            "top_p 0.71",
            Case {
                top_p: vec![0.71; rows],
                ..all()
            },
        ),
        (
            "top_p 0",
            Case {
                top_p: vec![0.0; rows],
                ..all()
            },
        ),
        (
            "min_p 0.26",
            Case {
                min_p: vec![0.26; rows],
                ..all()
            },
        ),
        (
            "min_p 1",
            Case {
                min_p: vec![1.0; rows],
                ..all()
            },
        ),
        (
            "warm",
            Case {
                temperature: vec![2.0; rows],
                ..all()
            },
        ),
        (
            "cold",
            Case {
                temperature: vec![0.3; rows],
                ..all()
            },
        ),
        (
            "top_k before top_p",
            Case {
                top_k: vec![3.0; rows],
                top_p: vec![0.8; rows],
                ..all()
            },
        ),
    ];
    for (name, case) in cases {
        suite.check("sample", name, Tolerance::EXACT, |b| case.run(b));
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let logits = || Array::of(DType::F32, &[2, 3], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let good = || Case::greedy(logits(), 2);
    let integers = Array::of(DType::I32, &[2, 3], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let flat = Array::of(DType::F32, &[3], [0.0, 1.0, 2.0]);
    let cases = [
        (
            "three numbers for two rows",
            Case {
                top_k: vec![1.0; 3],
                ..good()
            },
        ),
        (
            "one number for two rows",
            Case {
                uniform: vec![0.5],
                ..good()
            },
        ),
        (
            "integers",
            Case {
                logits: integers,
                ..good()
            },
        ),
        (
            "logits without rows",
            Case {
                logits: flat,
                ..good()
            },
        ),
    ];
    for (name, case) in cases {
        suite.refuses("sample", name, status::INVALID_ARGUMENT, |b| case.run(b));
    }
}
