//! The CUDA backend: refused with a reason where it cannot run, and the conformance suite where it can.
//!
//! The crate is built everywhere. On a machine with a device the library path has to name the CUDA build of MLX
//! (docs/TESTING.md); elsewhere the groups find no device and have nothing to check.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

#[path = "conformance/subject.rs"]
mod subject;

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::{AbiError, OwnedBytes, Str, Table, status};
use mlxcel_sdk::testkit::conformance::{Depth, Expectations, GROUPS, group, run};
use serde_json::Value;

fn table() -> BackendTable {
    // SAFETY: entry tables live as long as the process.
    unsafe { BackendTable::import(mlxcel_backend_cuda::backend_table()) }
}

fn probe() -> Value {
    let table = table();
    let (mut out, mut err) = (OwnedBytes::EMPTY, std::ptr::null_mut());
    // SAFETY: places are live, and the answer is taken once.
    let bytes = unsafe {
        AbiError::check((table.probe)(table.ctx, &mut out, &mut err), err).unwrap();
        out.take()
    };
    let text = String::from_utf8(bytes).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn is_refused() -> bool {
    probe()["score"] == 0
}

#[test]
fn a_probe_says_why_it_refuses_or_what_there_is() {
    let answer = probe();
    assert!(!answer["reason"].as_str().unwrap().is_empty(), "{answer}");
    assert_eq!(answer["details"]["mlx_version"], "0.32.4");
    let devices = answer["devices"].as_array().unwrap();
    if answer["score"] == 0 {
        assert!(devices.is_empty(), "{answer}");
        return;
    }
    for device in devices {
        assert!(device["total_bytes"].as_u64().unwrap() > 0, "{answer}");
        assert!(
            device["description"]
                .as_str()
                .unwrap()
                .contains("compute capability"),
            "{answer}"
        );
    }
}

#[test]
fn opening_what_is_refused_gives_the_reason() {
    let answer = probe();
    if answer["score"] != 0 {
        return;
    }
    let table = table();
    let args = OpenArgs {
        options: Str::new("{}"),
        ..OpenArgs::default()
    };
    let (mut ops, mut err) = (std::ptr::null(), std::ptr::null_mut());
    // SAFETY: arguments and places are live.
    let opened =
        unsafe { AbiError::check((table.open)(table.ctx, &args, &mut ops, &mut err), err) };
    let error = opened.unwrap_err();
    assert_eq!(error.code, status::UNAVAILABLE);
    assert!(
        error.message.contains(answer["reason"].as_str().unwrap()),
        "{error}"
    );
}

/// Differences that cannot be helped, each with its reason.
fn expectations() -> Expectations {
    Expectations::none()
}

fn check(of: &str) {
    if is_refused() {
        return;
    }
    let _alone = subject::alone();
    let opened = subject::Opened::new(mlxcel_backend_cuda::backend_table(), "{}");
    let group = group(of).unwrap_or_else(|| panic!("there is no group called {of}"));
    let report = run("cuda", &opened.backend(), &[*group], Depth::Values);
    if let Err(text) = report.verdict(&expectations()) {
        panic!("{text}");
    }
}

macro_rules! each_group {
    ($($group:ident)*) => {
        $(#[test]
        fn $group() {
            check(stringify!($group));
        })*

        #[test]
        fn no_group_is_left_out() {
            let listed = [$(stringify!($group)),*];
            let all: Vec<&str> = GROUPS.iter().map(|group| group.name).collect();
            assert_eq!(all, listed);
        }
    };
}

each_group! {
    creation elementwise arithmetic reductions ordering movement indexing products quantization
    convolution fourier norms attention paging recurrence selecting fused prompts mixture randomness sampling composed contract
}
