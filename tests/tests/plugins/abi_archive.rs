//! Plugins built at every released ABI minor load in today's host and compute.
//!
//! `tests/abi_archive/<major>.<minor>/<platform>/` holds one family and one backend; `make.sh` there makes them.

use std::fs;
use std::path::{Path, PathBuf};

use mlxcel::plugin::{
    AbiError, AttendArgs, Backend, DType, DeviceTensor, KvSource, ModelRequest, OpenOptions,
    QuantSpec, StepInputs, TensorInfo, WeightSource,
};
use mlxcel_abi::metadata::{TARGET_ARCH, TARGET_OS};
use mlxcel_abi::version::{ABI_MAJOR, ABI_MINOR, OLDEST_PLUGIN_MINOR};
use mlxcel_registry::plugin::PluginKind;
use mlxcel_tests::plugins::{catalogue_of, loader_with};

const CHILD: &str = env!("CARGO_BIN_EXE_plugin_probe_child");
/// Where the first pair was archived; other platforms follow with their first release.
const ARCHIVED_FIRST: (&str, &str) = ("x86_64", "linux");

fn archive() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("abi_archive")
}

/// Folders of this platform, by minor of this major.
fn archived() -> Vec<(u32, PathBuf)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(archive()).expect("the archive is there") {
        let path = entry.expect("readable").path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let Some((major, minor)) = name.split_once('.') else {
            continue;
        };
        let platform = path.join(format!("{TARGET_ARCH}-{TARGET_OS}"));
        if let (Ok(major), Ok(minor)) = (major.parse::<u32>(), minor.parse())
            && major == ABI_MAJOR
            && platform.is_dir()
        {
            found.push((minor, platform));
        }
    }
    found.sort();
    found
}

struct Table<'a>(&'a Backend);

impl WeightSource for Table<'_> {
    fn count(&self) -> usize {
        1
    }
    fn name(&self, index: usize) -> Option<&str> {
        (index == 0).then_some("table")
    }
    fn info(&self, _name: &str) -> Result<TensorInfo, AbiError> {
        TensorInfo::new(DType::F32, &[2, 2]).ok_or_else(|| AbiError::internal("two dimensions fit"))
    }
    fn load(&self, _name: &str) -> Result<DeviceTensor, AbiError> {
        let bytes: Vec<u8> = [1.0_f32, 2.0, 4.0, 3.0]
            .iter()
            .flat_map(|x| x.to_ne_bytes())
            .collect();
        Ok(self.0.from_host(&bytes, DType::F32, &[2, 2])?)
    }
    fn quant(&self, _path: &str) -> Result<Option<QuantSpec>, AbiError> {
        Ok(None)
    }
}

impl KvSource for Table<'_> {
    fn attend(&self, _layer: u32, args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        Ok(self.0.retain(args.v)?)
    }
}

fn run_pair(dir: &Path, minor: u32) {
    let catalogue = catalogue_of(dir).expect("listed");
    for record in catalogue.records() {
        assert_eq!(record.state.reason(), None, "{}", record.path.display());
        assert_eq!(record.info().expect("metadata").abi, [ABI_MAJOR, minor]);
    }
    let loader = loader_with(CHILD, 60_000, None);
    let find = |kind| catalogue.find(kind, "mock").expect("archived");
    let family = loader.load_family(find(PluginKind::Family)).expect("loads");
    let plugin = loader
        .load_backend(find(PluginKind::Backend))
        .expect("loads");
    assert_eq!(plugin.probe().expect("answers").score, 1);
    let backend = plugin.open(&OpenOptions::default()).expect("opens");

    let config = r#"{"model_type":"mock","vocab_size":2,"attend":true}"#;
    assert_eq!(family.probe(config).expect("answers")[0].arch, "mock");
    let request = ModelRequest {
        arch: "mock",
        config,
        compute_dtype: DType::F32,
        context_length: 0,
    };
    let source = Table(&backend);
    let model = family.load(&backend, request, &source).expect("loads");
    let ids = |values: [u32; 2]| {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        backend.from_host(&bytes, DType::U32, &[2]).expect("made")
    };
    let (tokens, rows) = (ids([1, 0]), ids([0, 1]));
    let step = StepInputs {
        tokens: tokens.handle(),
        positions: rows.handle(),
        logit_rows: rows.handle(),
        n_rows: 2,
        n_sequences: 1,
    };
    let logits = model.forward(&step, &source).expect("steps");
    assert_eq!(
        backend.read_f32(&logits).expect("read"),
        [4.0, 3.0, 1.0, 2.0]
    );
}

#[test]
fn every_archived_pair_loads_and_computes() {
    for (minor, dir) in archived() {
        if (OLDEST_PLUGIN_MINOR..=ABI_MINOR).contains(&minor) {
            run_pair(&dir, minor);
        }
    }
}

#[test]
fn no_supported_minor_is_missing() {
    if (TARGET_ARCH, TARGET_OS) != ARCHIVED_FIRST {
        return;
    }
    let minors: Vec<u32> = archived().into_iter().map(|(minor, _)| minor).collect();
    for minor in OLDEST_PLUGIN_MINOR..=ABI_MINOR {
        assert!(
            minors.contains(&minor),
            "ABI {ABI_MAJOR}.{minor} is not archived: run tests/abi_archive/make.sh"
        );
    }
}
