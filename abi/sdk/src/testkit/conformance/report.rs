//! What a run found, and what was expected of it.

use core::fmt;
use std::collections::BTreeMap;

/// A failure that is known, with its reason. A case that matches and passes is a failure too, so
/// that the list does not outlive its reasons.
#[derive(Debug, Clone)]
pub struct KnownFailure {
    /// Case, `group/slot/description`; `*` stands for any text.
    pub pattern: String,
    /// Why it fails, for people.
    pub reason: String,
}

/// Known failures of one backend.
#[derive(Debug, Clone, Default)]
pub struct Expectations {
    known: Vec<KnownFailure>,
}

impl Expectations {
    /// Nothing is expected to fail.
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds a known failure.
    #[must_use]
    pub fn fails(mut self, pattern: &str, reason: &str) -> Self {
        self.known.push(KnownFailure {
            pattern: pattern.to_owned(),
            reason: reason.to_owned(),
        });
        self
    }

    fn of(&self, case: &str) -> Option<&KnownFailure> {
        self.known
            .iter()
            .find(|known| matches(&known.pattern, case))
    }
}

/// Whether `text` fits a pattern in which `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, rest)) => text.strip_prefix(head).is_some_and(|text| {
            let starts = text.char_indices().map(|(i, _)| i).chain([text.len()]);
            starts.into_iter().any(|i| matches(rest, &text[i..]))
        }),
    }
}

/// One case and how it ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// `group/slot/description`.
    pub case: String,
    /// Slot of the operation table.
    pub slot: &'static str,
    /// What went wrong, when it did.
    pub failure: Option<String>,
    /// The largest distance from the reference, as a share of the allowed one; 0 where none is measured, no number where the backend
    /// refused what it may refuse.
    pub worst: f64,
}

/// What a run tells while it goes on, by the case's place among all of the run.
#[derive(Debug)]
pub enum Progress<'a> {
    /// This case comes next.
    Begins(usize, &'a str),
    /// It ended.
    Ended(usize, Outcome),
    /// After the case that failed last, the backend computes nothing any more.
    Broken(&'a str),
}

/// All cases of a run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Name of the backend.
    pub backend: String,
    /// Every case, in order.
    pub outcomes: Vec<Outcome>,
}

/// Why a report is not clean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// A case failed.
    Failed {
        /// The case.
        case: String,
        /// What went wrong.
        failure: String,
    },
    /// A case that was expected to fail passed.
    Passed {
        /// The case.
        case: String,
        /// Why it was expected to fail.
        reason: String,
    },
    /// A known failure matches no case of the groups that ran.
    Unused {
        /// Its pattern.
        pattern: String,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { case, failure } => write!(f, "FAILED  {case}\n        {failure}"),
            Self::Passed { case, reason } => {
                write!(
                    f,
                    "PASSED  {case}\n        was expected to fail ({reason}): remove the expectation"
                )
            }
            Self::Unused { pattern } => {
                write!(
                    f,
                    "UNUSED  {pattern}\n        this expectation matches no case: remove it"
                )
            }
        }
    }
}

impl Report {
    /// What is not as expected: nothing when the backend conforms.
    pub fn findings(&self, expectations: &Expectations) -> Vec<Finding> {
        let mut findings = Vec::new();
        for outcome in &self.outcomes {
            let case = outcome.case.clone();
            match (&outcome.failure, expectations.of(&outcome.case)) {
                (Some(failure), None) => findings.push(Finding::Failed {
                    case,
                    failure: failure.clone(),
                }),
                (None, Some(known)) => findings.push(Finding::Passed {
                    case,
                    reason: known.reason.clone(),
                }),
                (Some(_), Some(_)) | (None, None) => {}
            }
        }
        for known in &expectations.known {
            let group = known.pattern.split('/').next().unwrap_or_default();
            let ran = |outcome: &Outcome| outcome.case.split('/').next() == Some(group);
            let used = |outcome: &Outcome| matches(&known.pattern, &outcome.case);
            if self.outcomes.iter().any(ran) && !self.outcomes.iter().any(used) {
                findings.push(Finding::Unused {
                    pattern: known.pattern.clone(),
                });
            }
        }
        findings
    }

    /// Cases and failures of every slot.
    pub fn counts(&self) -> BTreeMap<&'static str, (usize, usize)> {
        let mut counts = BTreeMap::new();
        for outcome in &self.outcomes {
            let (cases, failures) = counts.entry(outcome.slot).or_insert((0, 0));
            *cases += 1;
            *failures += usize::from(outcome.failure.is_some());
        }
        counts
    }

    /// Nothing when the backend conforms, else a text for people.
    pub fn verdict(&self, expectations: &Expectations) -> Result<(), String> {
        let findings = self.findings(expectations);
        if findings.is_empty() {
            return Ok(());
        }
        // A broken operation fails hundreds of cases in the same way.
        let shown = 40;
        let mut text = format!("{}: {} finding(s)\n{self}", self.backend, findings.len());
        for finding in findings.iter().take(shown) {
            text.push_str(&format!("{finding}\n"));
        }
        if findings.len() > shown {
            text.push_str(&format!("... and {} more\n", findings.len() - shown));
        }
        Err(text)
    }

    /// Adds the cases of another run.
    pub fn extend(&mut self, other: Report) {
        self.outcomes.extend(other.outcomes);
    }
}

impl fmt::Display for Report {
    /// A table of slots: cases and failures.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (slot, (cases, failures)) in self.counts() {
            writeln!(f, "{slot:<26}{cases:>6} cases{failures:>6} failed")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cases: &[(&str, bool)]) -> Report {
        let outcome = |(case, passed): &(&str, bool)| Outcome {
            case: (*case).to_owned(),
            slot: "unary",
            failure: (!passed).then(|| "differs".to_owned()),
            worst: 0.0,
        };
        Report {
            backend: "x".to_owned(),
            outcomes: cases.iter().map(outcome).collect(),
        }
    }

    #[test]
    fn patterns_match_whole_cases() {
        assert!(matches("a/b/*", "a/b/anything/else"));
        assert!(matches("*/unary/* f16*", "e/unary/exp f16 [2]"));
        assert!(!matches("a/b", "a/b/c"));
        assert!(!matches("a/*/c", "a/b/d"));
    }

    #[test]
    fn known_failures_must_fail_and_exist() {
        let report = report(&[("e/unary/exp", false), ("e/unary/log", true)]);
        assert_eq!(report.findings(&Expectations::none()).len(), 1);
        let known = Expectations::none().fails("e/unary/exp", "slow path");
        assert_eq!(report.verdict(&known), Ok(()));
        let stale = known.clone().fails("e/unary/log", "no longer");
        assert!(matches!(
            report.findings(&stale)[..],
            [Finding::Passed { .. }]
        ));
        let unused = known
            .clone()
            .fails("e/unary/sqrt", "gone")
            .fails("other/unary/x", "not run");
        assert!(
            matches!(&report.findings(&unused)[..], [Finding::Unused { pattern }] if pattern.ends_with("sqrt"))
        );
        assert_eq!(report.counts()["unary"], (2, 1));
    }
}
