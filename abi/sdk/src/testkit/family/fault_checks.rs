//! What a family does when an operation fails under it: the status comes through, nothing leaks,
//! and the next step works.

use mlxcel_abi::{DType, status};

use super::checks::{Stage, same, tokens};
use super::model::{LoadedModel, Part, StepOptions};
use super::{Caches, FamilyUnderTest, code_of, words};
use crate::testkit::{Fault, FaultKind, ReferenceOptions, reference_backend};

type Checked = core::result::Result<(), String>;

/// At most so many calls are made to fail, spread over the step.
const MOST_FAULTS: u64 = 60;

/// Numbers from 1 to `count`, all or evenly spread.
fn spread(count: u64) -> impl Iterator<Item = u64> {
    let step = count.div_ceil(MOST_FAULTS).max(1);
    (1..=count).step_by(step as usize)
}

/// Calls that faults count.
fn counted(calls: &std::collections::BTreeMap<&'static str, u64>) -> u64 {
    calls
        .iter()
        .filter(|(slot, _)| !matches!(**slot, "retain" | "release" | "info"))
        .map(|(_, n)| n)
        .sum()
}

pub(super) fn failures(family: &FamilyUnderTest) -> Checked {
    failing_loads(family)?;
    failing_steps(
        family,
        FaultKind::Status(status::RESOURCE_EXHAUSTED),
        status::RESOURCE_EXHAUSTED,
    )
}

pub(super) fn panics(family: &FamilyUnderTest) -> Checked {
    failing_steps(family, FaultKind::Panic, status::INTERNAL)
}

fn failing_loads(family: &FamilyUnderTest) -> Checked {
    let reference = reference_backend(ReferenceOptions {
        shapes_only: true,
        ..ReferenceOptions::default()
    });
    let backend = reference.backend();
    let load = || LoadedModel::load(family, &family.weights, &backend, DType::BF16);
    drop(words(load())?);
    for nth in spread(counted(&reference.statistics().calls)) {
        reference.set_faults(vec![Fault::nth_call(nth, status::RESOURCE_EXHAUSTED)]);
        match load() {
            Ok(_) => {
                return Err(format!(
                    "call {nth} of loading failed and loading succeeded"
                ));
            }
            Err(error) if code_of(&error) != status::RESOURCE_EXHAUSTED => {
                return Err(format!(
                    "call {nth} of loading ran out of memory, told as: {error}"
                ));
            }
            Err(_) => {}
        }
        match reference.statistics().live_tensors {
            0 => {}
            live => {
                return Err(format!(
                    "call {nth} of loading failed and {live} handle(s) live on"
                ));
            }
        }
    }
    Ok(())
}

fn failing_steps(family: &FamilyUnderTest, kind: FaultKind, wanted: status::Status) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let prompt = tokens(family, 4, 30);
    let mut caches = Caches::new();
    stage.step(&mut caches, &[(0, &prompt)])?;
    let step = |caches: &mut Caches| {
        let part = Part {
            sequence: 0,
            tokens: &prompt[..2],
        };
        stage.model.step(caches, &[part], StepOptions::default())
    };
    stage.reference.reset_statistics();
    let good = words(step(&mut caches.clone()))?;
    let calls = counted(&stage.reference.statistics().calls);
    let live = stage.reference.statistics().live_tensors;
    for nth in spread(calls) {
        stage.reference.set_faults(vec![Fault {
            slot: None,
            nth,
            kind,
        }]);
        match step(&mut caches) {
            Ok(_) => {
                return Err(format!(
                    "call {nth} of {calls} failed and the step succeeded"
                ));
            }
            Err(error) if code_of(&error) != wanted => {
                return Err(format!(
                    "call {nth} of {calls} failed with \"{}\", told as \"{}\": {error}",
                    status::name(wanted),
                    status::name(code_of(&error))
                ));
            }
            Err(_) => {}
        }
        let now = stage.reference.statistics().live_tensors;
        if now != live {
            return Err(format!(
                "call {nth} of {calls} failed: {live} handles live before, {now} after"
            ));
        }
    }
    stage.reference.set_faults(Vec::new());
    let again = words(step(&mut caches.clone()))?;
    same("a step after failures", &again[0].rows, &good[0].rows)
}
