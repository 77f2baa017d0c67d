//! What is kept of finished sequences changes no answer: found again to the very token, in memory and after a restart.
//! On tiny checkpoints with the cpu plugin.

use std::fs;
use std::path::{Path, PathBuf};

use mlxcel::engine::{
    DiskOptions, EngineHandle, GenerateRequest, KvTypes, LoadOptions, Lookahead, PrefixOptions,
};
use mlxcel::plugin::DType;
use mlxcel_tests::tiny::{
    MODES, begin_with, collect, nothing_kept, options, request, start, tokens,
};

const PAGE: usize = 32;

fn engine(variant: &'static str, lookahead: Lookahead, prefix: PrefixOptions) -> EngineHandle {
    let options = LoadOptions {
        lookahead,
        prefix,
        ..options(1)
    };
    start(("llama", variant), options).unwrap()
}

/// The engine that others are compared with.
fn uncached(variant: &'static str) -> EngineHandle {
    engine(variant, Lookahead::Off, nothing_kept())
}

/// Greedy answer, and tokens of the prompt that were found.
fn ask(engine: &EngineHandle, namespace: &str, prompt: &[u32], count: usize) -> (Vec<u32>, usize) {
    let request = GenerateRequest {
        namespace: namespace.to_owned(),
        ..request(prompt, count)
    };
    let (tokens, stats) = collect(begin_with(engine, request));
    (tokens, stats.cached_tokens)
}

#[test]
fn every_turn_begins_where_the_last_one_ended() {
    let variants = ["llama-gqa", "mistral-window"];
    for (variant, lookahead) in variants
        .into_iter()
        .flat_map(|v| MODES.map(|mode| (v, mode)))
    {
        let (cached, plain) = (
            engine(variant, lookahead, PrefixOptions::default()),
            uncached(variant),
        );
        let mut prompt = tokens(9, 1);
        let mut known = 0;
        for turn in 0..9 {
            let count = 5 + turn * 2;
            let (answer, found) = ask(&cached, "", &prompt, count);
            assert_eq!(found, known, "{variant}, {lookahead:?}, turn {turn}");
            let (expected, nothing) = ask(&plain, "", &prompt, count);
            assert_eq!(
                (&answer, nothing),
                (&expected, 0),
                "{variant}, {lookahead:?}, turn {turn}"
            );
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
    for lookahead in MODES {
        let (cached, plain) = (
            engine("llama-gqa", lookahead, PrefixOptions::default()),
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
    for lookahead in MODES {
        let dir = tempfile::tempdir().unwrap();
        let options = || on_disk(dir.path(), 1 << 30);
        let prompt = tokens(100, 2);
        let (answer, _) = ask(&engine("llama-gqa", lookahead, options()), "", &prompt, 10);
        // Dropping the engine wrote what was left: three full pages of 109 tokens.
        assert_eq!(pages(dir.path()).len(), 3);
        let again = engine("llama-gqa", lookahead, options());
        assert_eq!(ask(&again, "", &prompt, 10), (answer.clone(), 3 * PAGE));
        assert_eq!(again.figures().disk.read_pages, 3);
        // Memory comes first; the disk is not asked again.
        assert_eq!(ask(&again, "", &prompt, 10).0, answer);
        assert_eq!(again.figures().disk.read_pages, 3);
        // Another tenant, model or context finds nothing.
        assert_eq!(ask(&again, "other", &prompt, 1).1, 0);
        drop(again);
        assert_eq!(
            ask(&engine("mixtral", lookahead, options()), "", &prompt, 1).1,
            0
        );
        let shorter = LoadOptions {
            ctx_size: 128,
            prefix: options(),
            ..mlxcel_tests::tiny::options(1)
        };
        let shorter = start(("llama", "llama-gqa"), shorter).unwrap();
        assert_eq!(ask(&shorter, "", &prompt, 1).1, 0);
        drop(shorter);
        let emptied = engine("llama-gqa", lookahead, options());
        emptied.clear_prefix_cache().unwrap();
        assert_eq!(ask(&emptied, "", &prompt, 1).1, 0);
    }
}

#[test]
fn pages_of_half_types_are_kept_apart_and_take_half_the_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let with = |dtype| {
        let options = LoadOptions {
            kv_types: KvTypes::both(dtype),
            prefix: on_disk(dir.path(), 1 << 30),
            ..options(1)
        };
        start(("llama", "llama-gqa"), options).unwrap()
    };
    let (half, single) = (|| with(DType::F16), || with(DType::F32));
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
    for lookahead in MODES {
        let dir = tempfile::tempdir().unwrap();
        let options = || on_disk(dir.path(), 1 << 30);
        let prompt = tokens(100, 2);
        let (answer, _) = ask(&engine("llama-gqa", lookahead, options()), "", &prompt, 10);
        for file in pages(dir.path()) {
            let mut bytes = fs::read(&file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            fs::write(&file, bytes).unwrap();
        }
        let again = engine("llama-gqa", lookahead, options());
        assert_eq!(ask(&again, "", &prompt, 10), (answer.clone(), 0));
        assert_eq!(again.figures().disk.damaged_files, 1);
        drop(again);
        // The one that was looked at is whole again, and behind it is another that is not.
        let last = engine("llama-gqa", lookahead, options());
        assert_eq!(ask(&last, "", &prompt, 10), (answer, PAGE));
    }
}

#[test]
fn a_small_or_missing_disk_costs_pages_and_no_answer() {
    for lookahead in MODES {
        let dir = tempfile::tempdir().unwrap();
        let small = engine("llama-gqa", lookahead, on_disk(dir.path(), 40_000));
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
        let without = engine("llama-gqa", lookahead, on_disk(&gone, 1 << 30));
        fs::remove_dir_all(&gone).unwrap();
        for seed in 0..3 {
            let prompt = tokens(70, seed);
            assert_eq!(
                ask(&without, "", &prompt, 5).0,
                ask(&plain, "", &prompt, 5).0
            );
        }
    }
}
