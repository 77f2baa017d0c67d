//! The suite on the reference backend, and on backends that are wrong in known ways.

use core::ffi::c_void;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, ErrorObj, Status, Table, Tensor as Handle, status};

use super::*;
use crate::testkit::ReferenceBackend;

fn failures(report: &Report) -> Vec<&str> {
    report
        .outcomes
        .iter()
        .filter_map(|outcome| outcome.failure.as_deref())
        .collect()
}

fn report_of(reference: &ReferenceBackend, groups: &[Group], depth: Depth) -> Report {
    run("reference", &reference.backend(), groups, depth)
}

#[test]
fn the_reference_conforms_and_every_slot_is_tried() {
    let reference = reference_backend(ReferenceOptions::default());
    let report = report_of(&reference, GROUPS, Depth::Values);
    report.verdict(&Expectations::none()).unwrap();
    let calls = reference.statistics().calls;
    let untried: Vec<&str> = BackendOps::SLOTS
        .iter()
        .map(|slot| slot.name)
        .filter(|name| !calls.contains_key(name))
        .collect();
    assert_eq!(untried, Vec::<&str>::new());
    assert_eq!(reference.statistics().live_tensors, 0);
}

#[test]
fn pieces_are_the_whole_and_a_backend_that_is_broken_is_told_of() {
    let reference = reference_backend(ReferenceOptions::default());
    let groups = [*group("norms").unwrap(), *group("ordering").unwrap()];
    let whole = report_of(&reference, &groups, Depth::Values);
    let backend = reference.backend();
    let (mut told, mut begun, mut from) = (Vec::new(), 0, 0);
    loop {
        let total = run_some(
            &backend,
            &groups,
            Depth::Values,
            from..from + 97,
            &mut |p| match p {
                Progress::Begins(place, _) => begun = place,
                Progress::Ended(place, outcome) => {
                    assert_eq!(place, begun);
                    told.push(outcome.case);
                }
                Progress::Broken(why) => panic!("{why}"),
            },
        );
        assert_eq!(total, whole.outcomes.len());
        from += 97;
        if from >= total {
            break;
        }
    }
    let cases: Vec<String> = whole.outcomes.into_iter().map(|o| o.case).collect();
    assert_eq!(told, cases);

    let missing = ReferenceOptions {
        missing: vec!["binary".to_owned()],
        ..ReferenceOptions::default()
    };
    let reference = reference_backend(missing);
    let mut broken = 0;
    let arithmetic = [*group("arithmetic").unwrap()];
    run_some(
        &reference.backend(),
        &arithmetic,
        Depth::Values,
        0..3,
        &mut |p| {
            broken += usize::from(matches!(p, Progress::Broken(_)));
        },
    );
    assert_eq!(broken, 3);
}

#[test]
fn shapes_and_dtypes_are_inferred_as_computed() {
    let options = ReferenceOptions {
        shapes_only: true,
        ..ReferenceOptions::default()
    };
    let reference = reference_backend(options);
    report_of(&reference, GROUPS, Depth::Shapes)
        .verdict(&Expectations::none())
        .unwrap();
}

#[test]
fn a_backend_without_fused_operations_conforms_by_composition() {
    let fused = [
        "glu",
        "rms_norm",
        "rope",
        "layer_norm",
        "gather_quantized_matmul",
    ];
    let options = ReferenceOptions {
        missing: fused.map(str::to_owned).to_vec(),
        ..ReferenceOptions::default()
    };
    let reference = reference_backend(options);
    let report = report_of(&reference, &[*group("composed").unwrap()], Depth::Values);
    report.verdict(&Expectations::none()).unwrap();
}

#[test]
fn a_missing_operation_is_found_and_can_be_declared() {
    let options = ReferenceOptions {
        missing: vec!["fft".to_owned()],
        ..ReferenceOptions::default()
    };
    let reference = reference_backend(options);
    let report = report_of(&reference, &[*group("fourier").unwrap()], Depth::Values);
    let text = report.verdict(&Expectations::none()).unwrap_err();
    assert!(text.contains("BackendOps.fft is not implemented"), "{text}");
    let known = Expectations::none().fails("fourier/*", "no transforms here");
    // A refusal with the status of a missing slot is right by accident, and is said to be.
    let findings = report.findings(&known);
    assert!(
        findings
            .iter()
            .all(|f| matches!(f, Finding::Passed { case, .. } if case.contains("unknown"))),
        "{findings:?}"
    );
}

/// A table with one slot replaced.
pub(super) fn patched(
    reference: &ReferenceBackend,
    patch: impl FnOnce(&mut BackendOps),
) -> Backend {
    // SAFETY: the table of a reference backend is never freed.
    let mut table = unsafe { BackendOps::import(reference.ops()) };
    patch(&mut table);
    let table: &'static BackendOps = Box::leak(Box::new(table));
    // SAFETY: leaked, and its context is the reference's.
    unsafe { Backend::from_raw(table) }
}

/// The table behind a reference's context.
pub(super) fn original(ctx: *mut c_void) -> BackendOps {
    let mut table = BackendOps::stubs();
    crate::testkit::reference::install_all(&mut table);
    table.ctx = ctx;
    table
}

unsafe extern "C" fn widening_rms_norm(
    ctx: *mut c_void,
    x: Handle,
    w: Handle,
    eps: f32,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    let table = original(ctx);
    let mut narrow = Handle::NONE;
    // SAFETY: forwarded from the caller, with a place of our own for the result between.
    unsafe {
        let code = (table.rms_norm)(ctx, x, w, eps, &mut narrow, err);
        if code != status::OK {
            return code;
        }
        let code = (table.cast)(ctx, narrow, DType::F32, out, err);
        (table.release)(ctx, narrow, err);
        code
    }
}

unsafe extern "C" fn wrong_axis_softmax(
    ctx: *mut c_void,
    a: Handle,
    axis: i32,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    let axis = if axis == 0 { -1 } else { axis };
    // SAFETY: forwarded from the caller.
    unsafe { (original(ctx).softmax)(ctx, a, axis, out, err) }
}

unsafe extern "C" fn leaking_tile(
    ctx: *mut c_void,
    a: Handle,
    reps: *const i64,
    n: u32,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    let table = original(ctx);
    // SAFETY: forwarded from the caller.
    unsafe {
        (table.retain)(ctx, a, err);
        (table.tile)(ctx, a, reps, n, out, err)
    }
}

#[test]
fn wrong_dtypes_values_and_leaks_are_found() {
    let reference = reference_backend(ReferenceOptions::default());
    let look = |patch: fn(&mut BackendOps), name: &str| {
        let backend = patched(&reference, patch);
        run("wrong", &backend, &[*group(name).unwrap()], Depth::Values)
    };
    let report = look(|table| table.rms_norm = widening_rms_norm, "norms");
    assert!(
        failures(&report).contains(&"dtype is f32, expected bf16"),
        "{:?}",
        failures(&report)
    );
    let report = look(|table| table.softmax = wrong_axis_softmax, "reductions");
    assert!(
        failures(&report)
            .iter()
            .any(|text| text.starts_with("element [0, 0] of [3, 5]"))
    );
    let report = look(|table| table.tile = leaking_tile, "movement");
    assert!(
        failures(&report)
            .iter()
            .any(|text| text.starts_with("live handles went from"))
    );
}
