//! Running a case on the subject and on the reference, and comparing the two.

use core::ops::Range;

use mlxcel_abi::{DType, status};

use super::array::Array;
use super::report::{Outcome, Progress};
use super::rounding::Rounding;
use super::tolerance::Tolerance;
use crate::testkit::reference::shape;
use crate::testkit::reference::value::{Data, Value};
use crate::{Backend, Error, Result, Tensor};

/// One run of some groups of cases.
pub(super) struct Suite<'a> {
    pub subject: &'a Backend,
    pub reference: &'a Backend,
    pub group: &'static str,
    /// Compare elements, and not only shapes and dtypes.
    pub values: bool,
    /// What the subject rounds on purpose.
    pub rounding: Option<Rounding>,
    /// Cases that are run, by their place in what is run in all; others are counted.
    pub chosen: Range<usize>,
    /// Cases so far.
    pub cases: usize,
    /// Is told of every case before and after it ran.
    pub told: &'a mut dyn FnMut(Progress<'_>),
}

impl Suite<'_> {
    /// The tolerance of the next two cases, which are products with quantised weights. Where the subject rounds these,
    /// `reach` is asked, with the reference, how far that takes the result.
    pub(super) fn rounded(
        &self,
        near: Tolerance,
        reach: impl FnOnce(&Backend) -> Result<f64>,
    ) -> Tolerance {
        let is_next = self.chosen.start < self.cases + 2 && self.cases < self.chosen.end;
        match self.rounding {
            // What the reference refuses to measure, it refuses to compute: the case will tell.
            Some(rounding) if is_next => match reach(self.reference) {
                Ok(reach) => near.rounding(rounding.allowed(reach)),
                Err(_) => near,
            },
            _ => near,
        }
    }

    /// Runs an operation on both backends; dtypes, shapes and elements must agree.
    pub(super) fn check(
        &mut self,
        slot: &'static str,
        case: impl Into<String>,
        tolerance: Tolerance,
        run: impl Fn(&Backend) -> Result<Tensor>,
    ) {
        self.check_all(slot, case, tolerance, |backend| Ok(vec![run(backend)?]));
    }

    /// As [`Suite::check`] for several results, each with a tolerance of its own or all with one.
    pub(super) fn check_all(
        &mut self,
        slot: &'static str,
        case: impl Into<String>,
        tolerance: impl Into<Vec<Tolerance>>,
        run: impl Fn(&Backend) -> Result<Vec<Tensor>>,
    ) {
        self.check_against(slot, case, tolerance, &run, &run);
    }

    /// Runs `ours` on the subject and `theirs` on the reference; the results must agree.
    pub(super) fn check_against(
        &mut self,
        slot: &'static str,
        case: impl Into<String>,
        tolerance: impl Into<Vec<Tolerance>>,
        ours: impl Fn(&Backend) -> Result<Vec<Tensor>>,
        theirs: impl Fn(&Backend) -> Result<Vec<Tensor>>,
    ) {
        let values = self.values;
        let reference = self.reference.clone();
        let tolerances: Vec<Tolerance> = tolerance.into();
        self.record(slot, case.into(), |subject| {
            let wanted = results(&reference, &theirs)
                .map_err(|e| format!("the reference refused this: {e}"))?;
            let found = results(subject, &ours).map_err(|e| format!("was refused: {e}"))?;
            if found.len() != wanted.len() {
                return Err(format!(
                    "{} results, expected {}",
                    found.len(),
                    wanted.len()
                ));
            }
            let mut worst = 0.0;
            for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                let tolerance = tolerances.get(index).or(tolerances.last());
                let tolerance = *tolerance.unwrap_or(&Tolerance::EXACT);
                let share = compare(&found.0, &wanted.0, tolerance, values).map_err(|why| {
                    if index == 0 {
                        why
                    } else {
                        format!("result {index}: {why}")
                    }
                })?;
                worst = share.max(worst);
            }
            Ok(worst)
        });
    }

    /// Runs something that must be refused with this status, on both backends; the subject must
    /// work afterwards.
    pub(super) fn refuses(
        &mut self,
        slot: &'static str,
        case: impl Into<String>,
        code: status::Status,
        run: impl Fn(&Backend) -> Result<Tensor>,
    ) {
        let run = |backend: &Backend| Ok(vec![run(backend)?]);
        let reference = self.reference.clone();
        let values = self.values;
        self.record(slot, format!("refuses {}", case.into()), |subject| {
            for (whose, backend) in [("the reference", &reference), ("the backend", subject)] {
                match results(backend, &run) {
                    Ok(_) => return Err(format!("{whose} accepted it")),
                    Err(error) if error.code() != code => {
                        return Err(format!(
                            "{whose} answered \"{}\" instead of \"{}\": {error}",
                            status::name(error.code()),
                            status::name(code)
                        ));
                    }
                    Err(error) if message_of(&error).is_empty() => {
                        return Err(format!("{whose} gave no reason"));
                    }
                    Err(_) => {}
                }
            }
            if values {
                still_works(subject)?;
            }
            Ok(0.0)
        });
    }

    /// Checks a property of the subject's elements.
    pub(super) fn holds(
        &mut self,
        slot: &'static str,
        case: impl Into<String>,
        property: impl FnOnce(&Backend) -> core::result::Result<(), String>,
    ) {
        if self.values {
            self.record(slot, case.into(), |subject| property(subject).map(|()| 0.0));
        }
    }

    /// As [`Suite::holds`], for what a backend may refuse: false says that it did.
    pub(super) fn holds_or_is_refused(
        &mut self,
        slot: &'static str,
        case: impl Into<String>,
        property: impl FnOnce(&Backend) -> core::result::Result<bool, String>,
    ) {
        if self.values {
            self.record(slot, case.into(), |subject| {
                property(subject).map(|held| if held { 0.0 } else { f64::NAN })
            });
        }
    }

    /// Runs one case where it is chosen, and checks that it leaves no handle behind.
    fn record(
        &mut self,
        slot: &'static str,
        case: String,
        run: impl FnOnce(&Backend) -> core::result::Result<f64, String>,
    ) {
        let index = self.cases;
        self.cases += 1;
        if !self.chosen.contains(&index) {
            return;
        }
        let case = format!("{}/{slot}/{case}", self.group);
        (self.told)(Progress::Begins(index, &case));
        let before = live(self.subject);
        let found = run(self.subject);
        let after = live(self.subject);
        let mut failure = found.as_ref().err().cloned();
        if failure.is_none() && before != after {
            failure = Some(match (before, after) {
                (Ok(before), Ok(after)) => format!("live handles went from {before} to {after}"),
                (Err(error), _) | (_, Err(error)) => {
                    format!("live handles cannot be counted: {error}")
                }
            });
        }
        let failed = failure.is_some();
        let outcome = Outcome {
            case,
            slot,
            failure,
            worst: found.unwrap_or(0.0),
        };
        (self.told)(Progress::Ended(index, outcome));
        if failed
            && self.values
            && let Err(reason) = still_works(self.subject)
        {
            (self.told)(Progress::Broken(&reason));
        }
    }
}

fn live(backend: &Backend) -> core::result::Result<u64, String> {
    backend
        .memory()
        .map(|memory| memory.live_tensors)
        .map_err(|error| error.to_string())
}

fn results(
    backend: &Backend,
    run: &impl Fn(&Backend) -> Result<Vec<Tensor>>,
) -> Result<Vec<Array>> {
    run(backend)?.iter().map(Array::read).collect()
}

fn message_of(error: &Error) -> &str {
    match error {
        Error::Backend { source, .. } => &source.message,
        _ => "said by the SDK",
    }
}

fn still_works(backend: &Backend) -> core::result::Result<(), String> {
    let sum = Array::of(DType::F32, &[2], [1.0, 2.0])
        .on(backend)
        .and_then(|a| a.add(&a))
        .and_then(|sum| sum.to_vec::<f32>())
        .map_err(|error| format!("the backend does not work afterwards: {error}"))?;
    if sum == [2.0, 4.0] {
        Ok(())
    } else {
        Err(format!("afterwards 1 + 1 and 2 + 2 are {sum:?}"))
    }
}

/// Compares a result with the reference's; gives the largest distance as a share of what is allowed.
fn compare(
    found: &Value,
    wanted: &Value,
    tolerance: Tolerance,
    values: bool,
) -> core::result::Result<f64, String> {
    if found.dtype != wanted.dtype {
        return Err(format!(
            "dtype is {}, expected {}",
            found.dtype.name(),
            wanted.dtype.name()
        ));
    }
    if found.shape != wanted.shape {
        return Err(format!(
            "shape is {:?}, expected {:?}",
            found.shape, wanted.shape
        ));
    }
    if !values {
        return Ok(0.0);
    }
    let wrong = differences(found, wanted, tolerance);
    let Some((index, text)) = wrong.first() else {
        return Ok(largest_share(found, wanted, tolerance));
    };
    Err(format!(
        "element {:?} of {:?} {text}; {} of {} differ",
        coordinates(*index, &wanted.shape),
        wanted.shape,
        wrong.len(),
        wanted.count()
    ))
}

/// Elements that are too far apart, with the words for it.
fn differences(found: &Value, wanted: &Value, tolerance: Tolerance) -> Vec<(usize, String)> {
    let dtype = wanted.dtype;
    let apart = |found: f64, wanted: f64| {
        let same = found == wanted || (found.is_nan() && wanted.is_nan());
        let allowed = tolerance.allowed(dtype, wanted);
        // Negated so that a NaN distance counts as too far.
        let near = (found - wanted).abs() <= allowed;
        (!same && !near).then(|| format!("is {found:e}, expected {wanted:e} within {allowed:.1e}"))
    };
    match (&found.data, &wanted.data) {
        (Data::Real(found), Data::Real(wanted)) => found
            .iter()
            .zip(wanted)
            .enumerate()
            .filter_map(|(i, (&found, &wanted))| Some((i, apart(found, wanted)?)))
            .collect(),
        (Data::Complex(found), Data::Complex(wanted)) => found
            .iter()
            .zip(wanted)
            .enumerate()
            .filter_map(|(i, (found, wanted))| {
                let text = apart(found[0], wanted[0]).or_else(|| apart(found[1], wanted[1]))?;
                Some((i, format!("({found:?} for {wanted:?}) {text}")))
            })
            .collect(),
        (Data::Int(found), Data::Int(wanted)) => found
            .iter()
            .zip(wanted)
            .enumerate()
            .filter(|(_, (found, wanted))| found != wanted)
            .map(|(i, (found, wanted))| (i, format!("is {found}, expected {wanted}")))
            .collect(),
        _ => vec![(0, "is of another class".to_owned())],
    }
}

/// The largest distance of elements of a result within the tolerance, as a share of the allowed one.
fn largest_share(found: &Value, wanted: &Value, tolerance: Tolerance) -> f64 {
    let (Data::Real(found), Data::Real(real)) = (&found.data, &wanted.data) else {
        return 0.0;
    };
    let share = |(&found, &wanted_element): (&f64, &f64)| {
        let allowed = tolerance.allowed(wanted.dtype, wanted_element);
        match allowed > 0.0 {
            true => (found - wanted_element).abs() / allowed,
            false => 0.0,
        }
    };
    found.iter().zip(real).map(share).fold(0.0, f64::max)
}

/// Index of every axis for a position in row-major order.
fn coordinates(index: usize, dims: &[usize]) -> Vec<usize> {
    let strides = shape::strides(dims);
    dims.iter()
        .zip(strides)
        .map(|(&dim, stride)| index / stride as usize % dim.max(1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(dtype: DType, numbers: &[f64]) -> Value {
        Array::of(
            dtype,
            &[2, numbers.len() as i64 / 2],
            numbers.iter().copied(),
        )
        .0
    }

    #[test]
    fn a_difference_is_told_with_its_place() {
        let (a, b) = (
            value(DType::F32, &[1.0, 2.0, 3.0, 4.0]),
            value(DType::F32, &[1.0, 2.0, 3.5, 4.0]),
        );
        let text = compare(&b, &a, Tolerance::ROUNDED, true).unwrap_err();
        assert!(
            text.starts_with("element [1, 0] of [2, 2] is 3.5e0, expected 3e0"),
            "{text}"
        );
        assert!(compare(&b, &a, Tolerance::ROUNDED, false).is_ok());
        assert!(
            compare(
                &value(DType::F16, &[1.0, 2.0]),
                &value(DType::BF16, &[1.0, 2.0]),
                Tolerance::EXACT,
                false
            )
            .is_err()
        );
    }

    #[test]
    fn infinities_and_nan_equal_themselves_only() {
        let odd = value(
            DType::F32,
            &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0],
        );
        assert!(compare(&odd, &odd, Tolerance::EXACT, true).is_ok());
        let zeros = value(DType::F32, &[0.0, 0.0, 0.0, -0.0]);
        let text = compare(&zeros, &odd, Tolerance::ROUNDED, true).unwrap_err();
        assert!(text.ends_with("3 of 4 differ"), "{text}");
    }
}
