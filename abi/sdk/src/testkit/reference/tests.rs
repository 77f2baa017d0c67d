//! The reference backend through its table, as hosts and families meet it.

use core::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::kinds::{quant, reduce};
use mlxcel_abi::ops_args::{FromHostArgs, QuantSpec};
use mlxcel_abi::types::OwnedBytes;
use mlxcel_abi::{AbiError, DType, Str, Table, status};

use super::*;
use crate::backend::{Fused, FusedSite};
use crate::{Backend, Error, Tensor};

/// Slots that are still stubs.
fn missing_slots(reference: &ReferenceBackend) -> Vec<&'static str> {
    // SAFETY: the table is never freed.
    let table = unsafe { BackendOps::import(reference.ops()) };
    let stubs = BackendOps::stubs();
    let word = |table: &BackendOps, offset: usize| -> usize {
        // SAFETY: every slot lies inside the table and is a function pointer of this size.
        unsafe {
            core::ptr::from_ref(table)
                .byte_add(offset)
                .cast::<usize>()
                .read()
        }
    };
    let same = |offset| word(&table, offset) == word(&stubs, offset);
    BackendOps::SLOTS
        .iter()
        .filter(|slot| same(slot.offset))
        .map(|slot| slot.name)
        .collect()
}

fn code_of(result: Result<Tensor, Error>) -> Status {
    result.unwrap_err().code()
}

#[test]
fn every_slot_is_filled_and_named_ones_can_be_left_out() {
    let full = reference_backend(ReferenceOptions::default());
    assert_eq!(missing_slots(&full), Vec::<&str>::new());
    let options = ReferenceOptions {
        missing: vec!["rope".to_owned()],
        ..ReferenceOptions::default()
    };
    let older = reference_backend(options);
    assert_eq!(missing_slots(&older), ["rope"]);
}

#[test]
fn handles_are_counted_and_go_back_to_none() {
    let reference = reference_backend(ReferenceOptions::default());
    let backend = reference.backend();
    {
        let a = Tensor::from_slice(&backend, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
        let b = a.matmul(&a).unwrap().add_scalar(0.5).unwrap();
        assert_eq!(b.to_vec::<f32>().unwrap(), [7.5, 10.5, 15.5, 22.5]);
        assert_eq!(reference.statistics().live_tensors, 2);
        assert_eq!(backend.memory().unwrap().active_bytes, 32);
    }
    let statistics = reference.statistics();
    assert_eq!((statistics.live_tensors, statistics.active_bytes), (0, 0));
    assert_eq!(statistics.calls_of("matmul"), 1);
    assert_eq!(statistics.threads, [std::thread::current().id()]);
    assert!(statistics.peak_bytes >= 48);
}

#[test]
fn shapes_only_infers_and_refuses_but_holds_nothing() {
    let reference = reference_backend(ReferenceOptions {
        shapes_only: true,
        ..ReferenceOptions::default()
    });
    let backend = reference.backend();
    let w = Tensor::zeros(&backend, DType::BF16, &[1 << 20, 1 << 20]).unwrap();
    let x = Tensor::zeros(&backend, DType::BF16, &[3, 1 << 20]).unwrap();
    let y = x
        .matmul(&w)
        .unwrap()
        .reduce(reduce::SUM, &[0], true)
        .unwrap();
    assert_eq!(
        (y.dtype().unwrap(), y.shape().unwrap()),
        (DType::BF16, vec![1, 1 << 20])
    );
    assert_eq!(code_of(w.matmul(&x)), status::INVALID_ARGUMENT);
}

#[test]
fn faults_come_when_told_and_once() {
    let reference = reference_backend(ReferenceOptions::default());
    let backend = reference.backend();
    let a = Tensor::zeros(&backend, DType::F32, &[2]).unwrap();
    reference.set_faults(vec![
        Fault::nth_call(2, status::RESOURCE_EXHAUSTED),
        Fault {
            slot: Some("binary".to_owned()),
            nth: 2,
            kind: FaultKind::Panic,
        },
    ]);
    assert!(a.add(&a).is_ok());
    assert_eq!(code_of(a.square()), status::RESOURCE_EXHAUSTED);
    let panic = a.add(&a).unwrap_err();
    assert_eq!(panic.code(), status::INTERNAL);
    assert!(panic.to_string().contains("told to panic"), "{panic}");
    assert!(a.add(&a).is_ok());
    assert_eq!(reference.statistics().live_tensors, 1);
}

#[test]
fn another_thread_may_release_and_nothing_else() {
    let reference = reference_backend(ReferenceOptions::default());
    let backend = reference.backend();
    let a = Tensor::zeros(&backend, DType::F32, &[2]).unwrap();
    let (handle, reference) = (a.into_handle().unwrap(), &reference);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let backend = reference.backend();
            let zeros = Tensor::zeros(&backend, DType::F32, &[2]);
            assert_eq!(code_of(zeros), status::FAILED_PRECONDITION);
            // SAFETY: the other thread gave up its reference to the tensor.
            drop(unsafe { Tensor::from_raw(&backend, handle) });
        });
    });
    let statistics = reference.statistics();
    assert_eq!((statistics.live_tensors, statistics.threads.len()), (0, 2));
}

#[test]
fn a_limit_refuses_and_leaves_everything_usable() {
    let reference = reference_backend(ReferenceOptions {
        memory_limit_bytes: 100,
        ..ReferenceOptions::default()
    });
    let backend = reference.backend();
    let a = Tensor::zeros(&backend, DType::F32, &[16]).unwrap();
    assert_eq!(code_of(a.square()), status::RESOURCE_EXHAUSTED);
    let w = Tensor::zeros(&backend, DType::F16, &[1, 16]).unwrap();
    drop(a);
    // Packed weight, scales and biases must all fit or none stays.
    let spec = QuantSpec {
        mode: quant::AFFINE,
        bits: 8,
        group_size: 32,
        ..QuantSpec::default()
    };
    assert!(w.quantize(spec).is_err());
    assert_eq!(reference.statistics().live_tensors, 1);
    assert!(w.square().is_ok());
}

static RELEASED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn count_release(_: *mut c_void) {
    RELEASED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn borrowed_memory_is_given_back_once() {
    let reference = reference_backend(ReferenceOptions::default());
    let ops = reference.ops();
    let data = [1.0f32, 2.0];
    let borrow = |byte_len: usize| {
        let args = FromHostArgs {
            data: data.as_ptr().cast(),
            byte_len,
            dtype: DType::F32,
            ndim: 1,
            dims: [2i64].as_ptr(),
            release: Some(count_release),
            ..FromHostArgs::default()
        };
        let mut out = mlxcel_abi::Tensor::NONE;
        // SAFETY: the table is open and the arguments are live.
        let code =
            unsafe { ((*ops).from_host)((*ops).ctx, &args, &mut out, core::ptr::null_mut()) };
        (code, out)
    };
    assert_eq!(borrow(7).0, status::INVALID_ARGUMENT);
    assert_eq!(
        RELEASED.load(Ordering::SeqCst),
        0,
        "a failed call takes nothing over"
    );
    let (code, handle) = borrow(8);
    assert_eq!((code, reference.statistics().live_borrows), (status::OK, 1));
    // SAFETY: the handle was given above.
    drop(unsafe { Tensor::from_raw(&reference.backend(), handle) });
    assert_eq!(
        (
            RELEASED.load(Ordering::SeqCst),
            reference.statistics().live_borrows
        ),
        (1, 0)
    );
    borrow(8);
    drop(reference);
    assert_eq!(RELEASED.load(Ordering::SeqCst), 2);
}

#[test]
fn a_closed_backend_answers_and_does_not_crash() {
    let reference = reference_backend(ReferenceOptions::default());
    let backend = reference.backend();
    let a = Tensor::zeros(&backend, DType::F32, &[2]).unwrap();
    drop(reference);
    assert_eq!(code_of(a.square()), status::FAILED_PRECONDITION);
}

fn opened(options: &str) -> Result<*const BackendOps, AbiError> {
    // SAFETY: the entry table lives as long as the process.
    let table = unsafe { BackendTable::import(reference_backend_table()) };
    let args = OpenArgs {
        options: Str::new(options),
        ..OpenArgs::default()
    };
    let (mut ops, mut err) = (core::ptr::null(), core::ptr::null_mut());
    // SAFETY: arguments and places are live.
    unsafe {
        let code = (table.open)(table.ctx, &args, &mut ops, &mut err);
        AbiError::check(code, err)?;
    }
    Ok(ops)
}

#[test]
fn the_entry_table_probes_opens_and_closes() {
    // SAFETY: the entry table lives as long as the process.
    let table = unsafe { BackendTable::import(reference_backend_table()) };
    let mut probe = OwnedBytes::EMPTY;
    // SAFETY: the place is live.
    let code = unsafe { (table.probe)(table.ctx, &mut probe, core::ptr::null_mut()) };
    assert_eq!(code, status::OK);
    // SAFETY: given by the call above and used once.
    let probe = unsafe { probe.take() };
    let probe: serde_json::Value = serde_json::from_slice(&probe).unwrap();
    assert_eq!(probe["devices"][0]["name"], "reference");

    let error = opened(r#"{"thread": 1}"#).unwrap_err();
    assert!(error.message.contains("unknown field `thread`"), "{error}");
    let ops = opened(r#"{"threads": 2, "shapes_only": true}"#).unwrap();
    // SAFETY: the table was just opened on this thread.
    let backend = unsafe { Backend::from_raw(ops) };
    assert!(Tensor::zeros(&backend, DType::F32, &[1 << 40]).is_ok());
    // SAFETY: the table came from `open`.
    let close = || unsafe { (table.close)(table.ctx, ops, core::ptr::null_mut()) };
    assert_eq!(close(), status::OK);
    assert_eq!(close(), status::INVALID_ARGUMENT);
    assert!(Tensor::zeros(&backend, DType::F32, &[1]).is_err());
}

#[test]
fn what_is_refused_for_no_rows_is_asked_for_again() {
    let refused = || {
        Err(Error::Backend {
            op: "glu".to_owned(),
            source: AbiError::unimplemented("not for these operands"),
        })
    };
    let reference = reference_backend(ReferenceOptions::default());
    let b = reference.backend();
    let rows = |n| Tensor::full(&b, 1.0, DType::F32, &[n, 4]).unwrap();
    let (site, of) = (FusedSite::default(), Fused::Project);
    let asked = |x: &Tensor| {
        [
            b.fused_or(Fused::Glu, x, || Ok("fused"), || Ok("composed"))
                .unwrap(),
            b.fused_at(of, x, &site, || Ok("fused"), || Ok("composed"))
                .unwrap(),
        ]
    };
    for (n, after) in [(0, "fused"), (1, "composed")] {
        b.fused_or(Fused::Glu, &rows(n), refused, || Ok(""))
            .unwrap();
        b.fused_at(of, &rows(n), &site, refused, || Ok("")).unwrap();
        assert_eq!(asked(&rows(2)), [after; 2], "after {n} rows");
    }
}
