//! Cases of a family's golden test, as a list: [`goldens!`](crate::goldens) makes of each a test of one
//! request at a time and one of several together, and of all the tests that hold for every family.

use std::path::{Path, PathBuf};

use mlxcel::engine::{KvTypes, LoadOptions};
use mlxcel::plugin::DType;
use serde_json::Value;

use super::{argmax, distance, engines, floats, folder, golden, ids, json};

/// A golden and how it is run.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    family: &'static str,
    variant: &'static str,
    prompts: &'static [&'static str],
    ctx_size: usize,
    limit: f32,
    /// Bounds in f16 and bf16 are those of the family times this; none is not run in them.
    halves: Option<f32>,
}

impl Case {
    /// Both prompts, in the model's own context, within 1e-4 of the range of logits.
    pub const fn new(family: &'static str, variant: &'static str) -> Self {
        Self {
            family,
            variant,
            prompts: &["short", "long"],
            ctx_size: 0,
            limit: 1e-4,
            halves: None,
        }
    }

    /// The short prompt alone.
    #[must_use]
    pub const fn short(mut self) -> Self {
        self.prompts = &["short"];
        self
    }

    /// The long prompt alone.
    #[must_use]
    pub const fn long(mut self) -> Self {
        self.prompts = &["long"];
        self
    }

    /// Another context than the model's own.
    #[must_use]
    pub const fn context(mut self, tokens: usize) -> Self {
        self.ctx_size = tokens;
        self
    }

    /// Another largest distance of the logits, relative to their range.
    #[must_use]
    pub const fn limit(mut self, limit: f32) -> Self {
        self.limit = limit;
        self
    }

    /// Runs in f16 and bf16 too, within the family's bounds times a factor.
    #[must_use]
    pub const fn halves(mut self, times: f32) -> Self {
        self.halves = Some(times);
        self
    }

    fn folder(&self) -> PathBuf {
        folder(self.family, self.variant)
    }

    /// The checkpoint: the folder, or the GGUF file in it.
    fn checkpoint(&self) -> PathBuf {
        let (folder, file) = (self.folder(), self.folder().join("model.gguf"));
        if file.is_file() { file } else { folder }
    }

    /// The prompts that are run.
    fn chosen(&self) -> Vec<Value> {
        let golden = golden(&self.folder());
        let named = |prompt: &&Value| self.prompts.iter().any(|name| prompt["name"] == *name);
        let all = golden["prompts"].as_array().unwrap();
        let chosen: Vec<Value> = all.iter().filter(named).cloned().collect();
        assert_eq!(chosen.len(), self.prompts.len(), "{self:?}");
        chosen
    }

    /// In f32: logits of the last position, greedy decoding step by step with the cache, and each prompt in
    /// two parts.
    pub fn alone(&self) {
        let variant = self.variant;
        let options = engines::alone(self.ctx_size, DType::F32);
        let (engine, facts) = engines::start(&self.checkpoint(), options).unwrap();
        let mut worst = 0.0_f32;
        for prompt in self.chosen() {
            let (name, tokens) = (&prompt["name"], ids(&prompt["ids"]));
            let logits = engine.score(tokens.clone()).unwrap();
            let off = distance(&logits, &floats(&prompt["last_logits"]));
            println!("{variant}, {name}: {off:.1e} of the range of logits");
            worst = worst.max(off);
            assert!(
                off < self.limit,
                "{variant}, {name}: logits are off by {off} of their range"
            );
            let want = ids(&prompt["greedy"]);
            let (mut text, mut got) = (tokens.clone(), vec![argmax(&logits)]);
            while got.len() < want.len() {
                text.push(*got.last().unwrap());
                got.push(argmax(&engine.score(text.clone()).unwrap()));
            }
            assert_eq!(got, want, "{variant}, {name}");
            engine.score(vec![2]).unwrap();
            engine.score(tokens[..tokens.len() / 2].to_vec()).unwrap();
            let parts = engine.score(tokens).unwrap();
            let off = distance(&parts, &logits);
            assert!(
                off < 1e-5,
                "{variant}, {name}: a prompt in two parts is off by {off}"
            );
        }
        crate::golden_results::settle(&self.folder(), &facts.arch, worst);
    }

    /// Prompts that run together, in chunks beside each other's decoding, get the tokens that the
    /// reference gave each alone; in the second round from prefixes that were found.
    pub fn together(&self) {
        let variant = self.variant;
        let engine = engines::batching(&self.checkpoint(), self.ctx_size);
        let prompts = self.chosen();
        for round in 0..2 {
            let answers: Vec<_> = [1, 0, 1, 0, 0]
                .iter()
                .map(|&n| {
                    let prompt = prompts.get(n).unwrap_or(&prompts[0]);
                    let want = ids(&prompt["greedy"]);
                    let stream = engines::greedy(&engine, ids(&prompt["ids"]), want.len());
                    (want, stream)
                })
                .collect();
            for (want, stream) in answers {
                let got = engines::tokens(stream);
                assert_eq!(got, want[..got.len()], "{variant}, round {round}");
                // The reference goes on behind the end of the text.
                assert!(
                    got.len() == want.len() || want[got.len()] == 2,
                    "{variant}: {got:?}"
                );
            }
        }
    }

    /// The largest distance of last logits, with another configuration, type or kind of products.
    fn worst(&self, checkpoint: &Path, options: LoadOptions) -> f32 {
        let engine = engines::start(checkpoint, options).unwrap().0;
        let off = |prompt: &Value| {
            distance(
                &engine.score(ids(&prompt["ids"])).unwrap(),
                &floats(&prompt["last_logits"]),
            )
        };
        self.chosen().iter().map(off).fold(0.0, f32::max)
    }
}

/// A variant's checkpoint with another configuration.
fn with_config(from: &Path, config: &str) -> tempfile::TempDir {
    let (dir, weights) = (tempfile::tempdir().unwrap(), "model.safetensors");
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::copy(from.join(weights), dir.path().join(weights)).unwrap();
    dir
}

/// Configurations as transformers 4 and the publishers spelled them mean the same.
pub fn legacy_configs_read_alike(cases: &[Case]) {
    let mut read = 0;
    for case in cases {
        let path = case.folder().join("config.legacy.json");
        if !path.is_file() {
            continue;
        }
        read += 1;
        let dir = with_config(&case.folder(), &std::fs::read_to_string(path).unwrap());
        let off = case.worst(dir.path(), engines::alone(case.ctx_size, DType::F32));
        assert!(off < case.limit, "{}: {off}", case.variant);
    }
    assert!(read > 3, "{read}");
}

/// Half precision stays near the reference in f32.
pub fn half_types_stay_near(cases: &[Case], f16: f32, bf16: f32) {
    for (dtype, limit) in [(DType::F16, f16), (DType::BF16, bf16)] {
        for case in cases {
            let Some(times) = case.halves else { continue };
            let options = engines::alone(case.ctx_size, dtype);
            let (off, limit) = (case.worst(&case.checkpoint(), options), limit * times);
            println!("{} in {}: {off:.1e}", case.variant, dtype.name());
            assert!(
                off < limit,
                "{} in {}: {off}, allowed is {limit}",
                case.variant,
                dtype.name()
            );
        }
    }
}

/// The products that a backend chooses itself for packed weights stay within a thousandth of the range, and within a
/// hundredth with the caches that it chooses too: these models are small and random, and let nothing average out.
pub fn default_products_stay_near(cases: &[Case]) {
    let whole = KvTypes::both(DType::F32);
    for case in cases {
        for (kv_types, limit) in [(whole, 1e-3), (KvTypes::default(), 1e-2)] {
            let options = LoadOptions {
                precision: None,
                kv_types,
                ..engines::alone(case.ctx_size, DType::F32)
            };
            let off = case.worst(&case.checkpoint(), options);
            println!("{} below {limit}: {off:.1e}", case.variant);
            assert!(off < limit, "{}: {off}, allowed is {limit}", case.variant);
        }
    }
}

/// A golden that is checked in and that no test reads would be no test at all.
pub fn every_golden_is_run(family: &str, cases: &[Case]) {
    let entries = std::fs::read_dir(folder(family, "")).unwrap();
    let mut found: Vec<String> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.json").is_file())
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    let mut run: Vec<String> = cases.iter().map(|case| case.variant.to_owned()).collect();
    run.sort();
    run.dedup();
    assert_eq!(found, run);
}

/// Configurations that contradict the weights: variant, changed keys, and a part of the message.
pub fn refusals(family: &str, cases: &[(&str, Value, &str)]) {
    let mut wrong = Vec::new();
    for (variant, changes, part) in cases {
        let from = folder(family, variant);
        let mut config = json(&from.join("config.json"));
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let dir = with_config(&from, &config.to_string());
        match engines::open(dir.path(), 0, DType::F32) {
            Ok(_) => wrong.push(format!("{variant}, {changes}: accepted")),
            Err(text) if text.contains(part) => {}
            Err(text) => wrong.push(format!("{variant}, {changes}: {text}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The golden test of a family: its folder, the bounds in f16 and bf16, and a line for each case, the name
/// of its test and the variant, which setters of [`Case`] may follow.
#[macro_export]
macro_rules! goldens {
    (
        $family:literal, f16 $f16:literal, bf16 $bf16:literal;
        $($test:ident: $variant:literal $(.$set:ident($($value:expr),*))*;)*
    ) => {
        const CASES: &[$crate::golden::Case] = &[
            $($crate::golden::Case::new($family, $variant)$(.$set($($value),*))*),*
        ];
        mod alone {
            $(#[test]
            fn $test() {
                $crate::golden::Case::new($family, $variant)$(.$set($($value),*))*.alone();
            })*
        }
        mod together {
            $(#[test]
            fn $test() {
                $crate::golden::Case::new($family, $variant)$(.$set($($value),*))*.together();
            })*
        }
        #[test]
        fn legacy_configs_read_alike() {
            $crate::golden::cases::legacy_configs_read_alike(CASES);
        }
        #[test]
        fn half_types_stay_near() {
            $crate::golden::cases::half_types_stay_near(CASES, $f16, $bf16);
        }
        #[test]
        fn default_products_stay_near() {
            $crate::golden::cases::default_products_stay_near(CASES);
        }
        #[test]
        fn every_golden_is_run() {
            $crate::golden::cases::every_golden_is_run($family, CASES);
        }
    };
}
