//! Good plugins from file to answer: a family and a backend that were never linked with this program.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use mlxcel::plugin::{
    AbiError, AttendArgs, Backend, BackendChoice, BackendPlugin, DType, DeviceTensor, Family,
    KvSource, LoadError, Loader, ModelRequest, OpenOptions, QuantSpec, StepInputs, TensorInfo,
    WeightSource,
};
use mlxcel_abi::status;
use mlxcel_registry::arch::{ArchIndex, Query};
use mlxcel_registry::plugin::{Catalogue, PluginKind, State};
use mlxcel_tests::plugins::{Healthy, catalogue_of, loader_with, replaced, without_lines};

const CHILD: &str = env!("CARGO_BIN_EXE_plugin_probe_child");
const CONFIG: &str = r#"{"model_type": "mock", "vocab_size": 3}"#;
const ATTENDING: &str = r#"{"model_type": "mock", "vocab_size": 3, "attend": true}"#;

struct Setup {
    dir: tempfile::TempDir,
    catalogue: Catalogue,
    loader: Loader,
}

fn setup() -> Setup {
    let dir = tempfile::tempdir().expect("folder");
    Healthy::Family.copy_to(dir.path()).expect("copied");
    Healthy::Backend.copy_to(dir.path()).expect("copied");
    Setup {
        catalogue: catalogue_of(dir.path()).expect("built"),
        loader: loader_with(CHILD, 60_000, None),
        dir,
    }
}

impl Setup {
    fn family(&self) -> Family {
        let record = self
            .catalogue
            .find(PluginKind::Family, "mock")
            .expect("there");
        self.loader.load_family(record).expect("loads")
    }

    fn plugin(&self) -> BackendPlugin {
        let record = self
            .catalogue
            .find(PluginKind::Backend, "mock")
            .expect("there");
        self.loader.load_backend(record).expect("loads")
    }

    fn backend(&self) -> Backend {
        self.plugin().open(&OpenOptions::default()).expect("opens")
    }
}

/// Row t of the table names token t + 1 as the most likely, cyclically.
struct Weights<'a> {
    backend: &'a Backend,
    shape: [i64; 2],
}

impl WeightSource for Weights<'_> {
    fn count(&self) -> usize {
        1
    }

    fn name(&self, index: usize) -> Option<&str> {
        (index == 0).then_some("table")
    }

    fn info(&self, name: &str) -> Result<TensorInfo, AbiError> {
        match name {
            "table" => Ok(TensorInfo::new(DType::F32, &self.shape).expect("two dimensions")),
            other => Err(AbiError::new(
                status::NOT_FOUND,
                format!("no tensor {other}"),
            )),
        }
    }

    fn load(&self, _name: &str) -> Result<DeviceTensor, AbiError> {
        let table: [f32; 9] = [0., 1., 0., 0., 0., 1., 1., 0., 0.];
        let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_ne_bytes()).collect();
        Ok(self.backend.from_host(&bytes, DType::F32, &[3, 3])?)
    }

    fn quant(&self, _path: &str) -> Result<Option<QuantSpec>, AbiError> {
        Ok(None)
    }
}

struct NoCaches;

impl KvSource for NoCaches {
    fn attend(&self, layer: u32, _args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        Err(AbiError::invalid(format!("layer {layer} has no cache")))
    }
}

/// Attention to oneself alone: gives the values back.
struct Echo<'a>(&'a Backend);

impl KvSource for Echo<'_> {
    fn attend(&self, layer: u32, args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        assert_eq!((layer, args.scale), (0, 1.0));
        Ok(self.0.retain(args.v)?)
    }
}

struct Panics;

impl KvSource for Panics {
    fn attend(&self, _layer: u32, _args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        panic!("the pool is broken")
    }
}

fn request(config: &str) -> ModelRequest<'_> {
    ModelRequest {
        arch: "mock",
        config,
        compute_dtype: DType::F32,
        context_length: 0,
    }
}

struct Rows {
    tokens: DeviceTensor,
    positions: DeviceTensor,
    logit_rows: DeviceTensor,
}

fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

impl Rows {
    fn new(backend: &Backend, tokens: &[u32]) -> Self {
        let n = i64::try_from(tokens.len()).expect("few");
        let positions: Vec<u32> = (0..).take(tokens.len()).collect();
        let make =
            |values: &[u32], dtype| backend.from_host(&u32s(values), dtype, &[n]).expect("made");
        Self {
            tokens: make(tokens, DType::U32),
            positions: make(&positions, DType::I32),
            logit_rows: make(&positions, DType::I32),
        }
    }

    fn inputs(&self, n_rows: u32) -> StepInputs {
        StepInputs {
            tokens: self.tokens.handle(),
            positions: self.positions.handle(),
            logit_rows: self.logit_rows.handle(),
            n_rows,
            n_sequences: 1,
        }
    }
}

fn live(backend: &Backend) -> u64 {
    backend.memory().expect("figures").live_tensors
}

#[test]
fn a_model_is_built_and_stepped() {
    let setup = setup();
    let (family, backend) = (setup.family(), setup.backend());
    let weights = Weights {
        backend: &backend,
        shape: [3, 3],
    };
    for (config, kv) in [
        (CONFIG, &NoCaches as &dyn KvSource),
        (ATTENDING, &Echo(&backend)),
    ] {
        let model = family
            .load(&backend, request(config), &weights)
            .expect("loads");
        let rows = Rows::new(&backend, &[0, 1, 2, 2]);
        let logits = model.forward(&rows.inputs(4), kv).expect("steps");
        assert_eq!(logits.info().expect("info").shape(), [4, 3]);
        let next = backend
            .arg_reduce(mlxcel_abi::kinds::arg_reduce::ARGMAX, &logits, -1)
            .expect("argmax");
        assert_eq!(backend.read_u32(&next).expect("read"), [1, 2, 0, 0]);
        drop((next, logits, rows, model));
        assert_eq!(live(&backend), 0, "every handle was released");
    }
}

#[test]
fn pure_functions_answer_without_a_backend() {
    let setup = setup();
    let family = setup.family();
    assert_eq!(
        (family.name(), family.version()),
        ("mock", env!("CARGO_PKG_VERSION"))
    );
    assert_eq!(family.probe(CONFIG).expect("answers")[0].score, 100);
    assert!(family.probe("{}").expect("answers").is_empty());
    assert_eq!(
        family.describe("mock", CONFIG).expect("answers")["vocab_size"],
        3
    );
    let error = family.describe("mock", "{}").expect_err("no size");
    insta::assert_snapshot!(error, @"family mock: describe: vocab_size: expected an integer, found none");
    let error = family.adapt_gguf("mock", "{}").expect_err("a stub");
    assert!(error.is_unimplemented());
    insta::assert_snapshot!(error, @"family mock: adapt_gguf: FamilyTable.adapt_gguf is not implemented by the other side of the plugin interface");
}

#[test]
fn a_family_may_be_asked_from_any_thread() {
    let setup = setup();
    let family = setup.family();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(family.probe(CONFIG).expect("answers").len(), 1));
        }
    });
}

#[test]
fn errors_cross_in_both_directions() {
    let setup = setup();
    let (family, backend) = (setup.family(), setup.backend());
    let wrong = Weights {
        backend: &backend,
        shape: [3, 4],
    };
    let error = family
        .load(&backend, request(CONFIG), &wrong)
        .expect_err("wrong shape");
    insta::assert_snapshot!(error, @"family mock: load: weight table: expected shape [3, 3], found [3, 4]");

    let weights = Weights {
        backend: &backend,
        shape: [3, 3],
    };
    let model = family
        .load(&backend, request(ATTENDING), &weights)
        .expect("loads");
    let rows = Rows::new(&backend, &[0]);
    let error = model
        .forward(&rows.inputs(1), &NoCaches)
        .expect_err("no cache");
    insta::assert_snapshot!(error, @"family mock: forward: layer 0 has no cache");
    assert_eq!(model.poison(), None, "an error is not a panic");

    // A panic of the host inside a call of the family comes back as an error too, and ends trust in the model.
    let error = model.forward(&rows.inputs(1), &Panics).expect_err("panic");
    assert!(error.is_panic(), "{error}");
    assert!(error.to_string().contains("the pool is broken"), "{error}");
    let error = model
        .forward(&rows.inputs(1), &Echo(&backend))
        .expect_err("poisoned");
    assert_eq!(error.code(), status::FAILED_PRECONDITION);
    drop((rows, model));
    assert_eq!(live(&backend), 0);
}

#[test]
fn a_backend_refuses_what_it_cannot_do() {
    let setup = setup();
    let plugin = setup.plugin();
    let open = |device: &str, key: Option<&str>| {
        let mut options = OpenOptions {
            device: device.to_owned(),
            ..OpenOptions::default()
        };
        options
            .options
            .extend(key.map(|key| (key.to_owned(), 1.into())));
        plugin
            .open(&options)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    assert_eq!(open("mock0", None), Ok(()));
    insta::assert_snapshot!(open("gpu7", None).expect_err("no device"), @"backend mock: open: no device gpu7, there is mock0");
    insta::assert_snapshot!(open("", Some("threads")).expect_err("no option"), @r#"backend mock: open: options: expected none, found {"threads":1}"#);

    let backend = setup.backend();
    assert!(backend.has_op("softmax"), "the slot is there, a stub");
    let a = backend.full(1.5, DType::F32, &[2]).expect("made");
    assert!(
        backend
            .softmax(&a, 0)
            .expect_err("a stub")
            .is_unimplemented()
    );
    insta::assert_snapshot!(backend.read_into(&a, &mut [0; 4]).expect_err("room"), @"backend mock: read: read: 8 bytes, room for 4");
    assert_eq!(backend.read_i32(&a).expect("converted"), [1, 1]);
    let stale = a.handle();
    drop(a);
    assert_eq!(
        backend.read(stale).expect_err("stale").code(),
        status::INVALID_ARGUMENT
    );
}

/// Bytes whose owner notes when it is dropped.
struct Owner(Arc<Vec<u8>>);

impl std::ops::Deref for Owner {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn borrowed_memory_lives_as_long_as_its_tensor() {
    let setup = setup();
    let backend = setup.backend();
    let bytes = Arc::new(u32s(&[5, 6]));
    let tensor = backend
        .from_host_shared(Owner(Arc::clone(&bytes)), DType::U32, &[2])
        .expect("made");
    let clone = tensor.try_clone().expect("retained");
    drop(tensor);
    assert_eq!(Arc::strong_count(&bytes), 2, "the clone still needs it");
    assert_eq!(backend.read_u32(&clone).expect("read"), [5, 6]);
    drop(clone);
    assert_eq!(Arc::strong_count(&bytes), 1, "released");
    let refused = backend.from_host_shared(Owner(Arc::clone(&bytes)), DType::U32, &[3]);
    assert!(refused.is_err());
    assert_eq!(Arc::strong_count(&bytes), 1, "an error takes nothing over");
    let tensor = backend
        .from_host_shared(Owner(Arc::clone(&bytes)), DType::U32, &[2])
        .expect("made");
    let handle = tensor.into_handle();
    drop(
        backend
            .retain(handle)
            .expect("alive: the reference was given away, not dropped"),
    );
    drop(backend);
    assert_eq!(
        Arc::strong_count(&bytes),
        1,
        "closing the backend releases what is left"
    );
}

#[test]
fn a_file_is_loaded_once_and_the_wrong_kind_is_refused() {
    let setup = setup();
    let record = setup
        .catalogue
        .find(PluginKind::Family, "mock")
        .expect("there");
    assert_eq!(setup.family().path(), record.path);
    let error = setup.loader.load_backend(record).expect_err("a family");
    assert!(matches!(error, LoadError::WrongKind { .. }));
    assert!(
        error
            .to_string()
            .ends_with("is a family, expected a backend"),
        "{error}"
    );
}

fn detect(
    setup: &Setup,
    query: Query<'_>,
    pin: Option<&str>,
    config: &str,
) -> Result<String, String> {
    let index = ArchIndex::build(&setup.catalogue, pin);
    let detected = setup
        .loader
        .detect(&index, query, config)
        .map_err(|error| error.to_string())?;
    Ok(format!(
        "{}/{} {}",
        detected.family.name(),
        detected.decision.arch,
        detected.decision.score
    ))
}

#[test]
fn detection_asks_the_family() {
    let setup = setup();
    let mock = Query::ModelType("mock");
    assert_eq!(
        detect(&setup, mock, None, CONFIG).as_deref(),
        Ok("mock/mock 100")
    );
    assert_eq!(
        detect(&setup, Query::Untyped, None, CONFIG).as_deref(),
        Ok("mock/mock 100")
    );
    assert_eq!(
        detect(&setup, Query::Gguf("mock"), Some("mock"), CONFIG).as_deref(),
        Ok("mock/mock 100")
    );
    let text = |result: Result<String, String>| result.expect_err("not detected");
    insta::assert_snapshot!(text(detect(&setup, Query::ModelType("mocks"), None, "{}")), @r#"no plugin knows model_type "mocks": did you mean mock"#);
    insta::assert_snapshot!(text(detect(&setup, Query::ModelType("zamba"), None, "{}")), @r#"no plugin knows model_type "zamba": see `mlxcel arch` for what is known"#);
    insta::assert_snapshot!(text(detect(&setup, Query::Untyped, None, "{}")), @"no plugin knows this configuration, which has no model_type: see `mlxcel arch` for what is known");
    insta::assert_snapshot!(text(detect(&setup, mock, Some("lama"), CONFIG)), @"--family lama: no family plugin has this name; there are mock");
    let odd = r#"{"model_type": "mock", "variant": "odd"}"#;
    insta::assert_snapshot!(text(detect(&setup, mock, None, odd)), @r#"model_type "mock" is recognised but not supported: mock/mock: variant odd is not implemented"#);
}

/// A second family for the architecture `mock`, called `mo2k`.
fn add_rival(dir: &Path) {
    let bytes = Healthy::Family.bytes().expect("built");
    let rival = replaced(bytes, br#""name":"mock""#, br#""name":"mo2k""#);
    fs::write(dir.join("libmlxcel_family_mo2k.so"), rival).expect("written");
}

#[test]
fn two_plugins_for_one_architecture_need_a_pin() {
    let mut setup = setup();
    add_rival(setup.dir.path());
    setup.catalogue = catalogue_of(setup.dir.path()).expect("built");
    let mock = Query::ModelType("mock");
    let error = detect(&setup, mock, None, CONFIG).expect_err("conflict");
    insta::assert_snapshot!(error, @"architecture mock is offered by the plugins mo2k, mock: choose one with --family mo2k or --family mock");
    assert_eq!(
        detect(&setup, mock, Some("mo2k"), CONFIG).as_deref(),
        Ok("mo2k/mock 100")
    );
    assert_eq!(
        detect(&setup, mock, Some("mock"), CONFIG).as_deref(),
        Ok("mock/mock 100")
    );
}

#[test]
fn a_rejected_plugin_is_named_when_its_model_is_asked_for() {
    let mut setup = setup();
    let bytes = Healthy::Family.bytes().expect("built");
    let old = replaced(bytes, br#""abi":[1,4]"#, br#""abi":[0,4]"#);
    fs::write(setup.dir.path().join(Healthy::Family.file_name()), old).expect("written");
    setup.catalogue = catalogue_of(setup.dir.path()).expect("built");
    let error = detect(&setup, Query::ModelType("mock"), None, CONFIG).expect_err("rejected");
    let place = setup
        .dir
        .path()
        .canonicalize()
        .expect("there")
        .display()
        .to_string();
    insta::assert_snapshot!(error.replace(&place, "DIR"), @r#"no plugin knows model_type "mock"; a plugin for it exists but is not used: DIR/libmlxcel_family_mock.so: plugin uses ABI major 0, this host has 1: update the plugin"#);
}

#[test]
fn backends_are_chosen_by_score_and_never_silently() {
    let dir = tempfile::tempdir().expect("folder");
    let add = |name: &str, fault: &str| {
        let bytes = Healthy::Backend.bytes().expect("built");
        let named = replaced(
            bytes,
            br#""name":"mock""#,
            format!(r#""name":"{name}""#).as_bytes(),
        );
        let path = dir.path().join(format!("libmlxcel_backend_{name}.so"));
        fs::write(path, mlxcel_tests::plugins::faulty(named, fault)).expect("written");
    };
    add("slow", "none");
    add("fast", "score_high");
    add("olde", "score_zero");
    add("boom", "abort_probe");
    add("oops", "panic_probe");
    fs::write(dir.path().join("libmlxcel_backend_text.so"), "text").expect("written");
    let catalogue = catalogue_of(dir.path()).expect("built");
    let loader = loader_with(CHILD, 60_000, None);
    let select = |choice: &str| {
        let choice: BackendChoice = choice.parse().expect("infallible");
        loader.select_backend(&catalogue, &choice)
    };
    let best = select("auto").expect("one runs");
    assert_eq!(best.plugin.name(), "fast");
    insta::assert_snapshot!(without_lines(&best.summary), @r#"backend fast (pretends to be fast); not taken: text: expected an ELF library, found text that starts with "text": the file is not a plugin, remove or rename it; slow: score 1 is below 900; boom: crashed while loading (SIGABRT): remove it or report this to its author; olde: driver 550 found, 570 or newer needed; oops: its probe failed: panicked: probe was told to panic (at tests/plugins/mock_backend/src/lib.rs:LINE)"#);
    insta::assert_snapshot!(select("slow").expect("runs").summary, @"backend slow (host memory)");
    let text = |choice: &str| without_lines(&select(choice).expect_err("refused").to_string());
    insta::assert_snapshot!(text("olde"), @"--backend olde: driver 550 found, 570 or newer needed");
    insta::assert_snapshot!(text("boom"), @"--backend boom: crashed while loading (SIGABRT): remove it or report this to its author");
    insta::assert_snapshot!(text("oops"), @"--backend oops: its probe failed: panicked: probe was told to panic (at tests/plugins/mock_backend/src/lib.rs:LINE)");
    insta::assert_snapshot!(text("text"), @r#"--backend text: expected an ELF library, found text that starts with "text": the file is not a plugin, remove or rename it"#);
    insta::assert_snapshot!(text("cuda"), @"--backend cuda: no backend plugin has this name; there are boom, fast, olde, oops, slow");
    let empty = Catalogue::default();
    let none = loader
        .select_backend(&empty, &BackendChoice::Auto)
        .expect_err("none");
    insta::assert_snapshot!(none, @"no backend can run here: no backend plugin was found, see `mlxcel doctor`");
}

#[test]
fn the_answer_about_a_family_is_kept_and_forgotten_when_the_file_changes() {
    let setup = setup();
    let cache = tempfile::tempdir().expect("folder");
    let place = cache.path().join("probe");
    let record = setup
        .catalogue
        .find(PluginKind::Family, "mock")
        .expect("there");
    let ask = |child: &str| {
        let loader = loader_with(child, 60_000, Some(place.clone()));
        loader.probe(record).expect("uses a child")
    };
    let first = ask(CHILD).expect("good");
    let kept = fs::read_dir(&place).expect("made").count();
    assert_eq!((first.name.as_str(), kept), ("mock", 1));

    // A child that nobody may start: an answer can only be the kept one.
    let child = setup.dir.path().join("child");
    fs::copy(CHILD, &child).expect("copied");
    let path = child.to_str().expect("plain");
    assert_eq!(
        ask(path).expect("good"),
        first,
        "another host asks for itself"
    );
    fs::set_permissions(&child, fs::Permissions::from_mode(0o600)).expect("changed");
    assert_eq!(ask(path).expect("kept"), first);

    let bytes = fs::read(&record.path).expect("read");
    fs::write(&record.path, [bytes, vec![0]].concat()).expect("written");
    assert!(ask(path).is_err(), "a changed file is tried again");
}

#[test]
fn a_state_follows_the_loading() {
    let mut setup = setup();
    let record = setup
        .catalogue
        .find(PluginKind::Family, "mock")
        .expect("there")
        .clone();
    setup.loader.load_family(&record).expect("loads");
    setup.catalogue.set_state(&record.path, State::Ready);
    assert_eq!(
        setup
            .catalogue
            .at(&record.path)
            .expect("there")
            .state
            .name(),
        "ready"
    );
}
