//! Rules that every model keeps, whatever it computes.

use mlxcel_abi::DType;

use super::model::{LoadedModel, Logits, Part, StepOptions};
use super::{Caches, FamilyUnderTest, fault_checks, weight_checks, words};
use crate::testkit::conformance::array::Numbers;
use crate::testkit::{ReferenceBackend, ReferenceOptions, reference_backend};

type Checked = core::result::Result<(), String>;

/// Tokens of a sequence.
type Rows<'a> = (usize, &'a [u32]);

/// A rule with its name.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// Name for reports.
    pub name: &'static str,
    run: fn(&FamilyUnderTest) -> Checked,
}

impl Check {
    /// Runs it on models of its own.
    pub fn run(&self, family: &FamilyUnderTest) -> Checked {
        (self.run)(family)
    }
}

/// Every rule.
pub const CHECKS: &[Check] = &[
    Check {
        name: "cached step = uncached",
        run: cached_equals_uncached,
    },
    Check {
        name: "chunked prefill = one prefill",
        run: chunked_equals_whole,
    },
    Check {
        name: "batch = solo",
        run: batch_equals_solo,
    },
    Check {
        name: "packed mixed step = separate steps",
        run: mixed_equals_separate,
    },
    Check {
        name: "padding rows change nothing",
        run: padding_changes_nothing,
    },
    Check {
        name: "logits of chosen rows = those of all rows",
        run: chosen_rows,
    },
    Check {
        name: "order matters",
        run: order_matters,
    },
    Check {
        name: "dtypes stay",
        run: dtypes_stay,
    },
    Check {
        name: "shapes without computing",
        run: FamilyUnderTest::check_shapes,
    },
    Check {
        name: "a step reads nothing back",
        run: reads_nothing,
    },
    Check {
        name: "no handle is left",
        run: leaks_nothing,
    },
    Check {
        name: "missing tensors are named",
        run: weight_checks::missing,
    },
    Check {
        name: "tensors of a wrong shape are named",
        run: weight_checks::misshapen,
    },
    Check {
        name: "extra tensors are named",
        run: weight_checks::extra,
    },
    Check {
        name: "failures of the backend come through",
        run: fault_checks::failures,
    },
    Check {
        name: "panics of the backend come through",
        run: fault_checks::panics,
    },
];

/// A backend of its own for a check, with the model on it.
pub(super) struct Stage {
    // Dropped first: the model lives on the backend.
    pub model: LoadedModel,
    pub reference: ReferenceBackend,
}

impl Stage {
    pub(super) fn new(
        family: &FamilyUnderTest,
        dtype: DType,
    ) -> core::result::Result<Self, String> {
        let reference = reference_backend(ReferenceOptions::default());
        let model = words(family.load(&reference.backend(), dtype))?;
        Ok(Self { model, reference })
    }

    pub(super) fn step(
        &self,
        caches: &mut Caches,
        parts: &[Rows<'_>],
    ) -> core::result::Result<Vec<Logits>, String> {
        self.step_with(caches, parts, StepOptions::default())
    }

    fn step_with(
        &self,
        caches: &mut Caches,
        parts: &[Rows<'_>],
        options: StepOptions,
    ) -> core::result::Result<Vec<Logits>, String> {
        let parts: Vec<Part<'_>> = parts
            .iter()
            .map(|&(sequence, tokens)| Part { sequence, tokens })
            .collect();
        words(self.model.step(caches, &parts, options))
    }

    /// Logits of one sequence alone, from its first token.
    fn solo(&self, tokens: &[u32]) -> core::result::Result<Vec<Vec<f32>>, String> {
        let mut logits = self.step(&mut Caches::new(), &[(0, tokens)])?;
        Ok(logits.swap_remove(0).rows)
    }
}

/// Fixed random tokens.
pub(super) fn tokens(family: &FamilyUnderTest, count: usize, seed: u64) -> Vec<u32> {
    let mut numbers = Numbers::new(seed);
    let vocabulary = family.desc().vocab_size as f64;
    (0..count)
        .map(|_| (numbers.unit() * vocabulary) as u32)
        .collect()
}

/// Logits that must be the same up to rounding in f32.
pub(super) fn same(what: &str, found: &[Vec<f32>], wanted: &[Vec<f32>]) -> Checked {
    if found.len() != wanted.len() {
        return Err(format!(
            "{what}: {} rows of logits, expected {}",
            found.len(),
            wanted.len()
        ));
    }
    for (row, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let size = wanted.iter().fold(1f32, |a, x| a.max(x.abs()));
        for (token, (a, b)) in found.iter().zip(wanted).enumerate() {
            // Negated so that NaN counts as different.
            let near = (a - b).abs() <= 1e-4 * size;
            if !near {
                return Err(format!(
                    "{what}: row {row}, token {token}: {a} instead of {b}"
                ));
            }
        }
    }
    Ok(())
}

fn cached_equals_uncached(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let tokens = tokens(family, 14, 1);
    let whole = stage.solo(&tokens)?;
    let mut caches = Caches::new();
    let mut rows = stage
        .step(&mut caches, &[(0, &tokens[..9])])?
        .swap_remove(0)
        .rows;
    for token in 9..tokens.len() {
        rows.extend(
            stage
                .step(&mut caches, &[(0, &tokens[token..=token])])?
                .swap_remove(0)
                .rows,
        );
    }
    same("prompt of 9 and 5 single steps", &rows, &whole)
}

fn chunked_equals_whole(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let tokens = tokens(family, 13, 2);
    let whole = stage.solo(&tokens)?;
    let mut caches = Caches::new();
    let mut rows = Vec::new();
    for (start, end) in [(0, 5), (5, 6), (6, 10), (10, 13)] {
        rows.extend(
            stage
                .step(&mut caches, &[(0, &tokens[start..end])])?
                .swap_remove(0)
                .rows,
        );
    }
    same("chunks of 5, 1, 4 and 3", &rows, &whole)
}

fn batch_equals_solo(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let prompts = [
        tokens(family, 7, 3),
        tokens(family, 1, 4),
        tokens(family, 11, 5),
    ];
    let parts: Vec<Rows<'_>> = prompts.iter().map(Vec::as_slice).enumerate().collect();
    let batch = stage.step(&mut Caches::new(), &parts)?;
    for (prompt, logits) in prompts.iter().zip(&batch) {
        same(
            &format!("sequence of {} in a batch", prompt.len()),
            &logits.rows,
            &stage.solo(prompt)?,
        )?;
    }
    Ok(())
}

fn mixed_equals_separate(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let [a, b, c, d] = [
        tokens(family, 9, 6),
        tokens(family, 5, 7),
        tokens(family, 12, 8),
        tokens(family, 4, 9),
    ];
    // One decodes, one verifies a draft, one starts, one goes on with its prompt.
    let (before, now): (&[Rows<'_>], &[Rows<'_>]) = (
        &[(0, &a[..8]), (1, &b[..2]), (2, &c[..6])],
        &[(2, &c[6..]), (0, &a[8..]), (3, &d), (1, &b[2..])],
    );
    let mut mixed = Caches::new();
    stage.step(&mut mixed, before)?;
    let together = stage.step(&mut mixed, now)?;
    for (index, &(sequence, rows)) in now.iter().enumerate() {
        let mut alone = Caches::new();
        if let Some(history) = before.iter().find(|(number, _)| *number == sequence) {
            stage.step(&mut alone, &[*history])?;
        }
        let separate = stage.step(&mut alone, &[(sequence, rows)])?;
        same(
            &format!("part {index} of a mixed step"),
            &together[index].rows,
            &separate[0].rows,
        )?;
    }
    Ok(())
}

fn padding_changes_nothing(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let (a, b) = (tokens(family, 6, 10), tokens(family, 3, 11));
    let parts: [Rows<'_>; 2] = [(0, &a), (1, &b)];
    let exact = stage.step(&mut Caches::new(), &parts)?;
    let options = StepOptions {
        padding_rows: 7,
        ..StepOptions::default()
    };
    let padded = stage.step_with(&mut Caches::new(), &parts, options)?;
    for (exact, padded) in exact.iter().zip(&padded) {
        same("with 7 padding rows", &padded.rows, &exact.rows)?;
    }
    Ok(())
}

fn chosen_rows(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let (a, b) = (tokens(family, 6, 12), tokens(family, 4, 13));
    let parts: [Rows<'_>; 2] = [(0, &a), (1, &b)];
    let all = stage.step(&mut Caches::new(), &parts)?;
    let options = StepOptions {
        last_rows: true,
        ..StepOptions::default()
    };
    let last = stage.step_with(&mut Caches::new(), &parts, options)?;
    for (all, last) in all.iter().zip(&last) {
        same(
            "the last row alone",
            &last.rows,
            &all.rows[all.rows.len() - 1..],
        )?;
    }
    Ok(())
}

/// A model that ignores its cache, positions or tokens would pass the comparisons above.
fn order_matters(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let mut prompt = tokens(family, 8, 14);
    let logits = stage.solo(&prompt)?;
    let (first, last) = (&logits[0], &logits[7]);
    if logits.iter().flatten().any(|x| !x.is_finite()) {
        return Err("logits are not finite".to_owned());
    }
    let spread = last.iter().fold(0f32, |a, x| a.max((x - last[0]).abs()));
    if spread < 1e-3
        || same(
            "",
            core::slice::from_ref(first),
            core::slice::from_ref(last),
        )
        .is_ok()
    {
        return Err("the logits of all rows or all tokens are alike".to_owned());
    }
    prompt.swap(1, 5);
    if prompt[1] == prompt[5] {
        return Ok(());
    }
    let swapped = stage.solo(&prompt)?;
    match same("", &swapped[7..], &logits[7..]) {
        Ok(()) => {
            Err("two tokens changed places and the logits after them did not change".to_owned())
        }
        Err(_) => same("a row before the change", &swapped[..1], &logits[..1]),
    }
}

fn dtypes_stay(family: &FamilyUnderTest) -> Checked {
    let prompt = tokens(family, 5, 15);
    let exact = Stage::new(family, DType::F32)?.solo(&prompt)?;
    let size = exact.iter().flatten().fold(0f32, |a, x| a.max(x.abs()));
    for compute in [DType::F16, DType::BF16, DType::F32] {
        for stored in [compute, DType::F32] {
            let mut family = family.clone();
            family.weights = words(family.weights.stored_as(stored))?;
            // The step itself checks keys, values and logits for the compute dtype.
            let stage = Stage::new(&family, compute)
                .map_err(|e| format!("{} from {}: {e}", compute.name(), stored.name()))?;
            let found = stage
                .solo(&prompt)
                .map_err(|e| format!("{} from {}: {e}", compute.name(), stored.name()))?;
            let last = found.iter().flatten().zip(exact.iter().flatten());
            let worst = last.fold(0f32, |a, (x, y)| a.max((x - y).abs()));
            // Coarse: a half model is another model, but not a broken one.
            let near = worst <= 0.25 * size;
            if !near {
                return Err(format!(
                    "{} from {} weights is off by {worst}, logits reach {size}",
                    compute.name(),
                    stored.name()
                ));
            }
        }
    }
    Ok(())
}

impl FamilyUnderTest {
    /// Loads and steps on a backend that checks shapes and dtypes and computes nothing.
    pub fn check_shapes(&self) -> Checked {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let reference = reference_backend(ReferenceOptions {
                shapes_only: true,
                ..ReferenceOptions::default()
            });
            let model = words(self.load(&reference.backend(), dtype))?;
            let stage = Stage { model, reference };
            let mut caches = Caches::new();
            let (a, b) = (tokens(self, 5, 16), tokens(self, 2, 17));
            stage.step(&mut caches, &[(0, &a), (1, &b)])?;
            stage.step(&mut caches, &[(1, &b), (0, &a[..1])])?;
        }
        Ok(())
    }
}

/// Within `forward` the host's thread waits for nothing, and steps of one shape are one list of
/// calls whatever their values.
fn reads_nothing(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let (a, b, c) = (
        tokens(family, 6, 18),
        tokens(family, 6, 19),
        tokens(family, 9, 20),
    );
    let mut recorded = Vec::new();
    let options = StepOptions {
        last_rows: true,
        ..StepOptions::default()
    };
    for (history, now) in [(&c[..3], &a), (&c[..3], &b), (&c[..9], &b)] {
        let mut caches = Caches::new();
        stage.step_with(&mut caches, &[(0, history)], options)?;
        stage.reference.reset_statistics();
        stage.step_with(&mut caches, &[(0, now)], options)?;
        recorded.push(stage.reference.statistics().calls);
    }
    let calls = |slot: &str| recorded[0].get(slot).copied().unwrap_or(0);
    // The step itself reads the logits once.
    if calls("read") > 1 || calls("eval") + calls("async_eval") + calls("synchronize") > 0 {
        return Err(format!(
            "a step reads {} tensor(s), evaluates {} and waits {} time(s)",
            calls("read").saturating_sub(1),
            calls("eval") + calls("async_eval"),
            calls("synchronize")
        ));
    }
    if recorded.iter().any(|calls| *calls != recorded[0]) {
        return Err(format!("steps of one shape made other calls: {recorded:?}"));
    }
    Ok(())
}

fn leaks_nothing(family: &FamilyUnderTest) -> Checked {
    let stage = Stage::new(family, DType::F32)?;
    let loaded = stage.reference.statistics().live_tensors;
    for seed in [21, 22] {
        let prompt = tokens(family, 6, seed);
        let mut caches = Caches::new();
        stage.step(&mut caches, &[(0, &prompt)])?;
        stage.step(&mut caches, &[(0, &prompt[..1])])?;
        drop(caches);
        let live = stage.reference.statistics().live_tensors;
        if live != loaded {
            return Err(format!(
                "{loaded} handles live after loading, {live} after a step"
            ));
        }
    }
    let Stage { model, reference } = stage;
    words(model.unload())?;
    match reference.statistics().live_tensors {
        0 => Ok(()),
        live => Err(format!("{live} handles live after unloading")),
    }
}
