//! Plugins that go wrong while their code runs: in a constructor, in the handshake, in every entry. The process that asks
//! stays alive and gets one line.

use std::path::Path;

use mlxcel::plugin::{
    AbiError, AttendArgs, Backend, CallError, DType, DeviceTensor, Family, KvSource, Loader,
    LoaderOptions, ModelRequest, OpenOptions, QuantSpec, StepInputs, TensorInfo, WeightSource,
};
use mlxcel_abi::status;
use mlxcel_registry::plugin::{ReasonCode, Rejection};
use mlxcel_tests::plugins::{Healthy, loader_with, places, record_of, replaced, without_lines};

const CHILD: &str = env!("CARGO_BIN_EXE_plugin_probe_child");

/// Loads a faulty copy through a child, which is what happens to every file that did not come with the installation.
fn refused(file: &Path, timeout_ms: u64) -> Rejection {
    let record = record_of(file).expect("listed");
    let error = loader_with(CHILD, timeout_ms, None)
        .load_family(&record)
        .expect_err("refused");
    let rejection = error.rejection().expect("a rejection").clone();
    assert!(!rejection.text.contains('\n'), "{rejection}");
    rejection
}

/// `stage code: text` of a plugin with this fault.
fn refusal(fault: &str) -> String {
    let dir = tempfile::tempdir().expect("folder");
    let file = Healthy::Faulty
        .with_fault(dir.path(), fault)
        .expect("written");
    let rejection = refused(&file, 60_000);
    let text = without_lines(&rejection.text);
    format!("{} {}: {text}", rejection.stage.name(), rejection.code)
}

#[test]
fn constructors_that_end_the_process() {
    insta::assert_snapshot!(refusal("crash_constructor"), @"probe crashed: crashed while loading (SIGSEGV): remove it or report this to its author");
    insta::assert_snapshot!(refusal("abort_constructor"), @"probe crashed: crashed while loading (SIGABRT): remove it or report this to its author");
    insta::assert_snapshot!(refusal("exit_constructor"), @"probe crashed: ended the process with exit code 7 while loading: remove it or report this to its author");
}

#[test]
fn a_constructor_that_does_not_return() {
    let dir = tempfile::tempdir().expect("folder");
    let file = Healthy::Faulty
        .with_fault(dir.path(), "sleep_constructor")
        .expect("written");
    insta::assert_snapshot!(refused(&file, 300), @"did not finish loading within 300 ms: remove it or report this to its author");
}

#[test]
fn handshakes_that_fail() {
    insta::assert_snapshot!(refusal("panic_metadata"), @"open panicked: its metadata function panicked or gave nothing: report this to its author");
    insta::assert_snapshot!(refusal("garbage_metadata"), @"open bad_metadata: metadata record 1: EOF while parsing a value at column 10");
    insta::assert_snapshot!(refusal("panic_open"), @"open panicked: refused to open: panicked: open was told to panic (at tests/plugins/faulty/src/lib.rs:LINE)");
    insta::assert_snapshot!(refusal("error_open"), @"open open_failed: refused to open: no licence for mlxcel 0.1.0");
    insta::assert_snapshot!(refusal("hello_minor"), @"open hello_mismatch: its file says kind 1 at ABI minor 4 needing 0, its open says kind 1 at 11 needing 0: rebuild it");
    insta::assert_snapshot!(refusal("hello_needs"), @"open abi_mismatch: plugin needs ABI 1.900, this host has 1.4: update mlxcel");
    insta::assert_snapshot!(refusal("hello_kind"), @"open hello_mismatch: its file says kind 1 at ABI minor 4 needing 0, its open says kind 2 at 4 needing 0: rebuild it");
    insta::assert_snapshot!(refusal("null_table"), @"open bad_table: FamilyTable is null or misaligned");
    insta::assert_snapshot!(refusal("small_table"), @"open bad_table: FamilyTable says it has 8 bytes, expected 24 to 65536");
}

fn refusal_of_patch(from: &[u8], to: &[u8]) -> String {
    let dir = tempfile::tempdir().expect("folder");
    let file = dir.path().join(Healthy::Faulty.file_name());
    let bytes = Healthy::Faulty.bytes().expect("built");
    std::fs::write(&file, replaced(bytes, from, to)).expect("written");
    let rejection = refused(&file, 60_000);
    let place = file.canonicalize().expect("there").display().to_string();
    format!("{} {}: {rejection}", rejection.stage.name(), rejection.code).replace(&place, "FILE")
}

#[test]
fn a_library_it_needs_is_missing() {
    insta::assert_snapshot!(refusal_of_patch(b"libgcc_s.so.1", b"libgcc_x.so.1"), @"link missing_library: needs a library that is not installed: libgcc_x.so.1. Looked for where the system looks (LD_LIBRARY_PATH, ldconfig)");
}

#[test]
fn its_root_is_missing_or_of_another_envelope() {
    insta::assert_snapshot!(refusal_of_patch(b"_1as_0lib_1header", b"_1as_0lib_1haeder"), @"header no_root_module: exports no plugin root (FILE: undefined symbol: _1as_0lib_1header_0root_bmodule_bloader): export it with the macro of mlxcel-sdk");
    insta::assert_snapshot!(refusal_of_patch(b"abi stable library for Rust", b"abi stable library for Dust"), @"header layout_mismatch: built on another version of the plugin envelope: rebuild it with a current mlxcel-sdk");
}

#[test]
fn a_file_that_says_other_than_the_running_plugin() {
    let bytes = Healthy::Faulty.bytes().expect("built");
    let (from, to) = (br#""abi":[1,4],"needs_"#, br#""abi":[1,5],"needs_"#);
    // One copy is the file's section, the other the text that the running plugin gives.
    let places = places(&bytes, from);
    assert!(places.len() >= 2, "{places:?}");
    for place in places {
        let mut bytes = bytes.clone();
        bytes[place..place + to.len()].copy_from_slice(to);
        let dir = tempfile::tempdir().expect("folder");
        let file = dir.path().join(Healthy::Faulty.file_name());
        std::fs::write(&file, bytes).expect("written");
        let rejection = refused(&file, 60_000);
        assert_eq!(rejection.code, ReasonCode::HelloMismatch);
        assert!(
            rejection.text.contains("family faulty at ABI 1.4"),
            "{rejection}"
        );
    }
}

#[test]
fn what_it_prints_is_not_taken_for_an_answer() {
    let dir = tempfile::tempdir().expect("folder");
    let file = Healthy::Faulty
        .with_fault(dir.path(), "noisy_constructor")
        .expect("written");
    let record = record_of(&file).expect("listed");
    let outcome = loader_with(CHILD, 60_000, None)
        .probe(&record)
        .expect("uses a child");
    assert_eq!(outcome.expect("good").name, "faulty");
}

#[test]
fn a_child_that_cannot_be_started_is_an_error() {
    let dir = tempfile::tempdir().expect("folder");
    let record = record_of(&Healthy::Faulty.copy_to(dir.path()).expect("copied")).expect("listed");
    let error = loader_with("/nonexistent/child", 1000, None)
        .load_family(&record)
        .expect_err("no child");
    let place = dir
        .path()
        .canonicalize()
        .expect("there")
        .display()
        .to_string();
    insta::assert_snapshot!(error.to_string().replace(&place, "DIR"), @"plugin DIR/libmlxcel_family_faulty.so: the child /nonexistent/child cannot be started: No such file or directory (os error 2)");
}

/// A faulty family in this process.
fn family(dir: &Path, fault: &str) -> Family {
    let file = Healthy::Faulty.with_fault(dir, fault).expect("written");
    let loader = Loader::new(LoaderOptions::default());
    loader
        .load_family(&record_of(&file).expect("listed"))
        .expect("loads")
}

fn backend(dir: &Path) -> Backend {
    let file = Healthy::Backend.copy_to(dir).expect("copied");
    let loader = Loader::new(LoaderOptions::default());
    let plugin = loader
        .load_backend(&record_of(&file).expect("listed"))
        .expect("loads");
    plugin.open(&OpenOptions::default()).expect("opens")
}

struct Nothing;

impl WeightSource for Nothing {
    fn count(&self) -> usize {
        0
    }
    fn name(&self, _index: usize) -> Option<&str> {
        None
    }
    fn info(&self, name: &str) -> Result<TensorInfo, AbiError> {
        Err(AbiError::invalid(format!("no tensor {name}")))
    }
    fn load(&self, name: &str) -> Result<DeviceTensor, AbiError> {
        Err(AbiError::invalid(format!("no tensor {name}")))
    }
    fn quant(&self, _path: &str) -> Result<Option<QuantSpec>, AbiError> {
        Ok(None)
    }
}

impl KvSource for Nothing {
    fn attend(&self, _layer: u32, _args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        Err(AbiError::invalid("no caches"))
    }
}

const REQUEST: ModelRequest<'static> = ModelRequest {
    arch: "faulty",
    config: "{}",
    compute_dtype: DType::F32,
    context_length: 0,
};

/// Calls every pure function of a family; gives the first error.
fn ask(family: &Family) -> Result<(), CallError> {
    family.probe("{}")?;
    family.describe("faulty", "{}")?;
    family.adapt_gguf("faulty", "{}")?;
    Ok(())
}

#[test]
fn pure_entries_that_fail() {
    for (fault, start) in [
        (
            "panic_probe",
            "family faulty: probe: panicked: panic_probe as told (at ",
        ),
        (
            "panic_describe",
            "family faulty: describe: panicked: panic_describe as told (at ",
        ),
        (
            "panic_adapt_gguf",
            "family faulty: adapt_gguf: panicked: panic_adapt_gguf as told (at ",
        ),
        (
            "garbage_answers",
            "family faulty: probe: the answer is not the JSON expected: ",
        ),
        (
            "error_answers",
            "family faulty: probe: hidden_size: expected 64, found 63",
        ),
    ] {
        let dir = tempfile::tempdir().expect("folder");
        let error = ask(&family(dir.path(), fault))
            .expect_err(fault)
            .to_string();
        assert!(error.starts_with(start), "{error}");
    }
}

#[test]
fn loads_that_fail() {
    for (fault, start) in [
        (
            "panic_load",
            "family faulty: load: panicked: panic_load as told",
        ),
        (
            "null_model",
            "family faulty: load: success was reported but no model was given",
        ),
    ] {
        let dir = tempfile::tempdir().expect("folder");
        let (family, backend) = (family(dir.path(), fault), backend(dir.path()));
        let error = family
            .load(&backend, REQUEST, &Nothing)
            .expect_err(fault)
            .to_string();
        assert!(error.starts_with(start), "{error}");
    }
}

fn step(rows: &DeviceTensor) -> StepInputs {
    StepInputs {
        tokens: rows.handle(),
        positions: rows.handle(),
        logit_rows: rows.handle(),
        n_rows: 1,
        n_sequences: 1,
    }
}

#[test]
fn a_panic_in_a_step_ends_trust_in_the_model_alone() {
    let dir = tempfile::tempdir().expect("folder");
    let (family, backend) = (family(dir.path(), "panic_forward"), backend(dir.path()));
    let rows = backend.full(0.0, DType::U32, &[1]).expect("made");
    let model = family.load(&backend, REQUEST, &Nothing).expect("loads");
    let error = model.forward(&step(&rows), &Nothing).expect_err("panics");
    assert!(error.is_panic() && model.poison().is_some());
    let error = model.forward(&step(&rows), &Nothing).expect_err("poisoned");
    assert_eq!(error.code(), status::FAILED_PRECONDITION);
    let text = error.to_string();
    assert!(
        text.contains(
            "the model was given up after an earlier panic (panicked: panic_forward as told"
        ),
        "{text}"
    );
    drop(model);
    family
        .load(&backend, REQUEST, &Nothing)
        .expect("a new model may be built");
}

#[test]
fn a_step_without_logits_and_an_unload_that_panics() {
    let dir = tempfile::tempdir().expect("folder");
    let backend = backend(dir.path());
    let rows = backend.full(0.0, DType::U32, &[1]).expect("made");
    let model = family(dir.path(), "no_logits")
        .load(&backend, REQUEST, &Nothing)
        .expect("loads");
    let error = model
        .forward(&step(&rows), &Nothing)
        .expect_err("no logits");
    insta::assert_snapshot!(error, @"family faulty: forward: success was reported but no logits were given");
    let other = tempfile::tempdir().expect("folder");
    let model = family(other.path(), "panic_unload")
        .load(&backend, REQUEST, &Nothing)
        .expect("loads");
    model.forward(&step(&rows), &Nothing).expect("steps");
    drop(model);
}

#[test]
fn a_backend_that_gives_no_operations() {
    let dir = tempfile::tempdir().expect("folder");
    let file = Healthy::Backend
        .with_fault(dir.path(), "null_ops")
        .expect("written");
    let loader = Loader::new(LoaderOptions::default());
    let plugin = loader
        .load_backend(&record_of(&file).expect("listed"))
        .expect("loads");
    let error = plugin
        .open(&OpenOptions::default())
        .expect_err("no operations");
    insta::assert_snapshot!(error, @"backend mock: open: BackendOps is null or misaligned");
}
