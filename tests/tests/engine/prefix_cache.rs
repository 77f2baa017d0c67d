//! What is kept of finished sequences changes no answer: found again to the very token, in memory and after a restart.
//! On tiny checkpoints with the cpu plugin.

use std::fs;
use std::path::{Path, PathBuf};

use mlxcel::engine::{
    CancelToken, DiskOptions, EngineHandle, Event, GenerateRequest, KvTypes, LoadOptions,
    PrefixOptions, open_model, start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};

const PAGE: usize = 32;

fn engine(variant: &str, ctx_size: usize, prefix: PrefixOptions) -> EngineHandle {
    engine_with(variant, ctx_size, KvTypes::default(), prefix)
}

fn engine_with(
    variant: &str,
    ctx_size: usize,
    kv_types: KvTypes,
    prefix: PrefixOptions,
) -> EngineHandle {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR");
    let dir =
        dir.expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden/llama")
        .join(variant);
    let opened = open_model(&path, &catalogue, &loader, None).unwrap();
    let backend = loader
        .select_backend(&catalogue, &BackendChoice::Named("cpu".to_owned()))
        .unwrap();
    let options = LoadOptions {
        dtype: Some(DType::F32),
        kv_types,
        threads: 1,
        ctx_size,
        kv_budget_bytes: Some(1 << 30),
        prefix,
        ..LoadOptions::default()
    };
    start_engine(opened, backend, options, |_, _| {}).unwrap().0
}

fn uncached(variant: &str) -> EngineHandle {
    let nothing = PrefixOptions {
        max_bytes: Some(0),
        ..PrefixOptions::default()
    };
    engine(variant, 0, nothing)
}

/// Greedy answer, and tokens of the prompt that were found.
fn ask(engine: &EngineHandle, namespace: &str, prompt: &[u32], count: usize) -> (Vec<u32>, usize) {
    let request = GenerateRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_new_tokens: Some(count),
        namespace: namespace.to_owned(),
        ..GenerateRequest::default()
    };
    let mut tokens = Vec::new();
    for event in engine.generate(request, CancelToken::default()).unwrap() {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { stats, .. } => return (tokens, stats.cached_tokens),
            Event::Failed(error) => panic!("{error}"),
            Event::Prefill { .. } => {}
        }
    }
    unreachable!("a stream ends with an event")
}

fn tokens(count: usize, seed: usize) -> Vec<u32> {
    (0..count)
        .map(|i| ((i * 7 + seed * 13) % 60 + 2) as u32)
        .collect()
}

#[test]
fn every_turn_begins_where_the_last_one_ended() {
    for variant in ["llama-gqa", "mistral-window"] {
        let (cached, plain) = (
            engine(variant, 0, PrefixOptions::default()),
            uncached(variant),
        );
        let mut prompt = tokens(9, 1);
        let mut known = 0;
        for turn in 0..9 {
            let count = 5 + turn * 2;
            let (answer, found) = ask(&cached, "", &prompt, count);
            assert_eq!(found, known, "{variant}, turn {turn}");
            let (expected, nothing) = ask(&plain, "", &prompt, count);
            assert_eq!((&answer, nothing), (&expected, 0), "{variant}, turn {turn}");
            prompt.extend(&answer);
            // The last token was said and never computed.
            known = prompt.len() - 1;
            prompt.extend(tokens(3 + turn, turn));
        }
        // Nobody else finds any of it.
        assert_eq!(ask(&cached, "other", &prompt, 1).1, 0);
        // The same prompt again: all but its last token, which has to run.
        ask(&cached, "", &prompt, 1);
        assert_eq!(ask(&cached, "", &prompt, 1).1, prompt.len() - 1);
    }
}

#[test]
fn a_prefix_of_every_length_gives_the_uncached_answer() {
    let (cached, plain) = (
        engine("llama-gqa", 0, PrefixOptions::default()),
        uncached("llama-gqa"),
    );
    let whole = tokens(75, 3);
    for length in 1..=whole.len() {
        let mut prompt = whole[..length].to_vec();
        prompt.extend([5, 9]);
        let (answer, found) = ask(&cached, "", &prompt, 4);
        assert!(found < prompt.len());
        assert_eq!(answer, ask(&plain, "", &prompt, 4).0, "prefix of {length}");
    }
    assert!(cached.figures().prefix.reused_tokens > 1000);
}

fn on_disk(dir: &Path, max_bytes: u64) -> PrefixOptions {
    PrefixOptions {
        disk: Some(DiskOptions {
            dir: dir.to_path_buf(),
            max_bytes,
        }),
        ..PrefixOptions::default()
    }
}

fn pages(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<PathBuf> = files.collect();
    files.sort();
    files
}

#[test]
fn full_pages_survive_a_restart_and_give_the_same_answer() {
    let dir = tempfile::tempdir().unwrap();
    let options = || on_disk(dir.path(), 1 << 30);
    let prompt = tokens(100, 2);
    let (answer, _) = ask(&engine("llama-gqa", 0, options()), "", &prompt, 10);
    // Dropping the engine wrote what was left: three full pages of 109 tokens.
    assert_eq!(pages(dir.path()).len(), 3);
    let again = engine("llama-gqa", 0, options());
    assert_eq!(ask(&again, "", &prompt, 10), (answer.clone(), 3 * PAGE));
    assert_eq!(again.figures().disk.read_pages, 3);
    // Memory comes first; the disk is not asked again.
    assert_eq!(ask(&again, "", &prompt, 10).0, answer);
    assert_eq!(again.figures().disk.read_pages, 3);
    // Another tenant, model or context finds nothing.
    assert_eq!(ask(&again, "other", &prompt, 1).1, 0);
    drop(again);
    assert_eq!(ask(&engine("mixtral", 0, options()), "", &prompt, 1).1, 0);
    assert_eq!(
        ask(&engine("llama-gqa", 128, options()), "", &prompt, 1).1,
        0
    );
    let emptied = engine("llama-gqa", 0, options());
    emptied.clear_prefix_cache().unwrap();
    assert_eq!(ask(&emptied, "", &prompt, 1).1, 0);
}

#[test]
fn pages_of_half_types_are_kept_apart_and_take_half_the_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let options = || on_disk(dir.path(), 1 << 30);
    let half = || engine_with("llama-gqa", 0, KvTypes::both(DType::F16), options());
    let single = || engine_with("llama-gqa", 0, KvTypes::both(DType::F32), options());
    let prompt = tokens(100, 2);
    let size = |path: &PathBuf| fs::metadata(path).unwrap().len();
    ask(&single(), "", &prompt, 10);
    let whole = pages(dir.path());
    let (answer, found) = ask(&half(), "", &prompt, 10);
    assert_eq!(found, 0);
    let mut added = pages(dir.path());
    added.retain(|path| !whole.contains(path));
    assert_eq!((whole.len(), added.len()), (3, 3));
    assert!(size(&added[0]) < size(&whole[0]) * 6 / 10);
    assert_eq!(ask(&half(), "", &prompt, 10), (answer, 3 * PAGE));
}

#[test]
fn damaged_pages_are_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let options = || on_disk(dir.path(), 1 << 30);
    let prompt = tokens(100, 2);
    let (answer, _) = ask(&engine("llama-gqa", 0, options()), "", &prompt, 10);
    for file in pages(dir.path()) {
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(&file, bytes).unwrap();
    }
    let again = engine("llama-gqa", 0, options());
    assert_eq!(ask(&again, "", &prompt, 10), (answer.clone(), 0));
    assert_eq!(again.figures().disk.damaged_files, 1);
    drop(again);
    // The one that was looked at is whole again, and behind it is another that is not.
    let last = engine("llama-gqa", 0, options());
    assert_eq!(ask(&last, "", &prompt, 10), (answer, PAGE));
}

#[test]
fn a_small_or_missing_disk_costs_pages_and_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let small = engine("llama-gqa", 0, on_disk(dir.path(), 40_000));
    let plain = uncached("llama-gqa");
    for seed in 0..6 {
        let prompt = tokens(70, seed);
        assert_eq!(ask(&small, "", &prompt, 5).0, ask(&plain, "", &prompt, 5).0);
    }
    drop(small);
    let used: u64 = pages(dir.path())
        .iter()
        .map(|file| file.metadata().unwrap().len())
        .sum();
    assert!(used > 0 && used <= 40_000, "{used}");
    let gone = dir.path().join("gone");
    let without = engine("llama-gqa", 0, on_disk(&gone, 1 << 30));
    fs::remove_dir_all(&gone).unwrap();
    for seed in 0..3 {
        let prompt = tokens(70, seed);
        assert_eq!(
            ask(&without, "", &prompt, 5).0,
            ask(&plain, "", &prompt, 5).0
        );
    }
}
