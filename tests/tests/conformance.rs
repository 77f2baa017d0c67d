//! The conformance suite of the SDK's test kit on every backend that can run here, the CPU's in each of its precisions: one test for
//! every group of operations.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

#[path = "conformance/subject.rs"]
mod subject;

use mlxcel_sdk::testkit::conformance::{Depth, Expectations, GROUPS, Report, group, run};
use mlxcel_sdk::testkit::{ReferenceOptions, reference_backend};

/// Runs one group on a backend that was opened from its entry table.
fn report(name: &str, opened: &subject::Opened, of: &str, depth: Depth) -> Report {
    let group = group(of).unwrap_or_else(|| panic!("there is no group called {of}"));
    run(name, &opened.backend(), &[*group], depth)
}

macro_rules! each_group {
    ($check:path: $($group:ident)*) => {
        $(#[test]
        fn $group() {
            if let Err(text) = $check(stringify!($group)) {
                panic!("{text}");
            }
        })*

        #[test]
        fn no_group_is_left_out() {
            let listed = [$(stringify!($group)),*];
            let all: Vec<&str> = mlxcel_sdk::testkit::conformance::GROUPS.iter().map(|group| group.name).collect();
            assert_eq!(all, listed);
        }
    };
}

macro_rules! backend {
    ($name:ident, $check:path) => {
        mod $name {
            each_group! {
                $check: creation elementwise arithmetic reductions ordering movement indexing products
                quantization convolution fourier norms attention paging recurrence selecting fused prompts mixture randomness sampling
                composed
                contract
            }
        }
    };
}

backend!(reference, super::check_reference);
backend!(cpu, super::check_cpu_exact);
backend!(cpu_high, super::check_cpu_high);
backend!(cpu_fast, super::check_cpu_fast);

fn check_reference(of: &str) -> Result<(), String> {
    let opened = subject::Opened::new(mlxcel_sdk::testkit::reference_backend_table(), "{}");
    report("reference", &opened, of, Depth::Values).verdict(&Expectations::none())
}

fn check_cpu_exact(of: &str) -> Result<(), String> {
    check_cpu(of, "exact")
}

fn check_cpu_high(of: &str) -> Result<(), String> {
    check_cpu(of, "high")
}

fn check_cpu_fast(of: &str) -> Result<(), String> {
    check_cpu(of, "fast")
}

/// Only products with quantised weights may be farther from the reference in one precision than in another.
fn check_cpu(of: &str, precision: &str) -> Result<(), String> {
    let _alone = subject::alone();
    let options = format!("{{\"precision\":\"{precision}\"}}");
    let opened = subject::Opened::new(mlxcel_backend_cpu::backend_table(), &options);
    let depth = Depth::of_precision(precision).unwrap();
    report(precision, &opened, of, depth).verdict(&cpu_expectations())
}

/// What the CPU backend is known not to do.
fn cpu_expectations() -> Expectations {
    Expectations::none()
}

#[test]
fn shapes_are_checked_without_computing() {
    let reference = reference_backend(ReferenceOptions {
        shapes_only: true,
        ..ReferenceOptions::default()
    });
    let report = run("shapes", &reference.backend(), GROUPS, Depth::Shapes);
    if let Err(text) = report.verdict(&Expectations::none()) {
        panic!("{text}");
    }
}
