//! Conformance of a backend with the operation table's contract, by comparison with the reference
//! backend.
//!
//! Every case runs the same operation on both and compares dtypes, shapes and elements within the
//! tolerance stated per operation and dtype; cases of refusal compare statuses. After every case the number of
//! live handles must be what it was. A backend that lacks a fused operation which the SDK composes
//! passes through the composition; any other missing slot is a failure unless it is declared.
//!
//! ```ignore
//! let report = conformance::run("mine", &backend, conformance::GROUPS, Depth::Values);
//! report.verdict(&Expectations::none())?;
//! ```

mod apart;
mod arithmetic;
pub(in crate::testkit) mod array;
mod attention;
mod composed;
mod contract;
mod convolution;
mod creation;
mod elementwise;
mod fourier;
mod fused;
mod indexing;
mod layer;
mod mixture;
mod movement;
mod norms;
mod ordering;
mod paging;
mod parts;
mod products;
mod prompts;
mod quantised_pools;
mod quantization;
mod randomness;
mod recurrence;
mod reductions;
mod report;
#[cfg(test)]
mod rounded_tests;
mod rounding;
mod sampling;
mod selecting;
mod suite;
#[cfg(test)]
mod tests;
mod tolerance;

use core::ops::Range;

use mlxcel_abi::DType;

use crate::Backend;
use crate::testkit::{ReferenceOptions, reference_backend};
pub use report::{Expectations, Finding, KnownFailure, Outcome, Progress, Report};
pub use rounding::Rounding;
use suite::Suite;

/// Float types of activations.
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Cases that belong together.
#[derive(Clone, Copy)]
pub struct Group {
    /// First part of the case names.
    pub name: &'static str,
    run: fn(&mut Suite<'_>),
}

impl core::fmt::Debug for Group {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name)
    }
}

/// Every group.
pub const GROUPS: &[Group] = &[
    Group {
        name: "creation",
        run: creation::run,
    },
    Group {
        name: "elementwise",
        run: elementwise::run,
    },
    Group {
        name: "arithmetic",
        run: arithmetic::run,
    },
    Group {
        name: "reductions",
        run: reductions::run,
    },
    Group {
        name: "ordering",
        run: ordering::run,
    },
    Group {
        name: "movement",
        run: movement::run,
    },
    Group {
        name: "indexing",
        run: indexing::run,
    },
    Group {
        name: "products",
        run: products::run,
    },
    Group {
        name: "quantization",
        run: quantization::run,
    },
    Group {
        name: "convolution",
        run: convolution::run,
    },
    Group {
        name: "fourier",
        run: fourier::run,
    },
    Group {
        name: "norms",
        run: norms::run,
    },
    Group {
        name: "attention",
        run: attention::run,
    },
    Group {
        name: "paging",
        run: paging::run,
    },
    Group {
        name: "recurrence",
        run: recurrence::run,
    },
    Group {
        name: "selecting",
        run: selecting::run,
    },
    Group {
        name: "fused",
        run: fused::run,
    },
    Group {
        name: "prompts",
        run: prompts::run,
    },
    Group {
        name: "mixture",
        run: mixture::run,
    },
    Group {
        name: "randomness",
        run: randomness::run,
    },
    Group {
        name: "sampling",
        run: sampling::run,
    },
    Group {
        name: "composed",
        run: composed::run,
    },
    Group {
        name: "contract",
        run: contract::run,
    },
];

/// What a backend promises that was opened with `deterministic`: not one of [`GROUPS`], since others promise nothing of the kind.
pub const ROWS: Group = Group {
    name: "rows",
    run: apart::run,
};

/// The group called `name`.
pub fn group(name: &str) -> Option<&'static Group> {
    let all = GROUPS.iter().chain([const { &ROWS }]);
    all.into_iter().find(|group| group.name == name)
}

/// What a run compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Depth {
    /// Dtypes, shapes and elements.
    #[default]
    Values,
    /// The same of a backend that was opened such that it rounds activations of products with quantised weights: results of these
    /// may lie as much farther from the reference as that rounding explains.
    Rounded(Rounding),
    /// Dtypes and shapes, for a backend that computes nothing.
    Shapes,
}

impl Depth {
    /// What is compared on a backend that was opened with the option `precision`: exactly what was asked for. None where there is no
    /// such precision, and for `auto`, where the backend decides.
    pub fn of_precision(precision: &str) -> Option<Self> {
        match precision {
            "exact" => Some(Self::Values),
            "high" => Some(Self::Rounded(Rounding::Sixteen)),
            "fast" => Some(Self::Rounded(Rounding::Eight)),
            _ => None,
        }
    }
}

/// Runs groups on a backend. The calling thread must be its backend thread.
pub fn run(name: &str, subject: &Backend, groups: &[Group], depth: Depth) -> Report {
    let mut outcomes = Vec::new();
    run_some(subject, groups, depth, 0..usize::MAX, &mut |progress| {
        if let Progress::Ended(_, outcome) = progress {
            outcomes.push(outcome);
        }
    });
    Report {
        backend: name.to_owned(),
        outcomes,
    }
}

/// Runs some of the cases of groups, by their place among all, and tells of each before and after it; gives how many cases
/// there are. So several processes can share a run, and one that dies says in what.
pub fn run_some(
    subject: &Backend,
    groups: &[Group],
    depth: Depth,
    cases: Range<usize>,
    told: &mut dyn FnMut(Progress<'_>),
) -> usize {
    let reference = reference_backend(ReferenceOptions::default());
    let reference = reference.backend();
    let mut suite = Suite {
        subject,
        reference: &reference,
        group: "",
        values: depth != Depth::Shapes,
        rounding: match depth {
            Depth::Rounded(rounding) => Some(rounding),
            Depth::Values | Depth::Shapes => None,
        },
        chosen: cases,
        cases: 0,
        told,
    };
    for group in groups {
        suite.group = group.name;
        (group.run)(&mut suite);
    }
    suite.cases
}
