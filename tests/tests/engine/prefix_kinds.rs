//! Prefixes of models whose caches are not keys and values alone: on disk, and shared while a request runs. On tiny
//! checkpoints with the cpu plugin.

use std::fs;
use std::path::{Path, PathBuf};

use mlxcel::engine::{
    CancelToken, DiskOptions, EngineHandle, Event, GenerateRequest, LoadOptions, Lookahead,
    PrefixOptions,
};
use mlxcel::plugin::DType;
use mlxcel_tests::tiny::{
    Kind, MODES, ask, begin, collect, nothing_kept, options, request, start, token_bytes, tokens,
};

const PAGE: usize = 32;

/// Latent keys; with index keys; layers that use another's keys.
const BY_POSITION: [Kind; 3] = [
    ("deepseek", "v3"),
    ("deepseek", "v32"),
    ("gemma", "gemma3n"),
];

/// Recurrent states, between attention layers; beside latent keys.
const STATES: [Kind; 3] = [
    ("qwen", "qwen3-next"),
    ("qwen", "qwen3-5-moe"),
    ("deepseek", "v4"),
];

/// Every kind in both modes.
fn cases<const N: usize>(kinds: [Kind; N]) -> impl Iterator<Item = (Kind, Lookahead)> {
    let both = |kind| MODES.map(|lookahead| (kind, lookahead));
    kinds.into_iter().flat_map(both)
}

fn on_disk(kind: Kind, lookahead: Lookahead, dir: &Path) -> EngineHandle {
    let disk = DiskOptions {
        dir: dir.to_path_buf(),
        max_bytes: 1 << 30,
    };
    let prefix = PrefixOptions {
        disk: Some(disk),
        ..PrefixOptions::default()
    };
    let options = LoadOptions {
        prefix,
        lookahead,
        ..options(1)
    };
    start(kind, options).unwrap()
}

fn plain(kind: Kind) -> EngineHandle {
    let options = LoadOptions {
        prefix: nothing_kept(),
        ..options(1)
    };
    start(kind, options).unwrap()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<PathBuf> = files.collect();
    files.sort();
    files
}

#[test]
fn caches_by_position_survive_a_restart() {
    for (kind, lookahead) in cases(BY_POSITION) {
        let dir = tempfile::tempdir().unwrap();
        let prompt = tokens(100, 2);
        let want = ask(&plain(kind), &prompt, 10).0;
        assert_eq!(
            ask(&on_disk(kind, lookahead, dir.path()), &prompt, 10).0,
            want
        );
        assert_eq!(files(dir.path()).len(), 3, "{kind:?}, {lookahead:?}");
        let again = on_disk(kind, lookahead, dir.path());
        assert_eq!(
            ask(&again, &prompt, 10),
            (want.clone(), 3 * PAGE),
            "{kind:?}, {lookahead:?}"
        );
        assert_eq!(again.figures().disk.read_pages, 3);
    }
}

#[test]
fn every_turn_begins_where_the_last_one_ended() {
    for (kind, lookahead) in cases(BY_POSITION) {
        let cached = LoadOptions {
            lookahead,
            ..options(1)
        };
        let cached = start(kind, cached).unwrap();
        let plain = plain(kind);
        let mut prompt = tokens(9, 1);
        let mut known = 0;
        for turn in 0..6 {
            let (answer, found) = ask(&cached, &prompt, 5 + turn * 2);
            assert_eq!(found, known, "{kind:?}, {lookahead:?}, turn {turn}");
            let want = ask(&plain, &prompt, 5 + turn * 2).0;
            assert_eq!(answer, want, "{kind:?}, {lookahead:?}, turn {turn}");
            prompt.extend(&answer);
            // The last token was said and never computed.
            known = prompt.len() - 1;
            prompt.extend(tokens(3 + turn, turn));
        }
    }
}

#[test]
fn little_room_changes_no_answer() {
    for (kind, lookahead) in cases(BY_POSITION) {
        let prompts: Vec<Vec<u32>> = [3, 31, 32, 40, 64, 70]
            .iter()
            .map(|&len| tokens(len, len % 3))
            .collect();
        let solo = plain(kind);
        let want: Vec<Vec<u32>> = prompts.iter().map(|p| ask(&solo, p, 30).0).collect();
        let options = LoadOptions {
            kv_budget_bytes: Some(160 * token_bytes(kind, DType::F32)),
            lookahead,
            ..options(6)
        };
        let tight = start(kind, options).unwrap();
        for round in 0..3 {
            let streams: Vec<_> = prompts.iter().map(|p| begin(&tight, p, 30)).collect();
            for (stream, want) in streams.into_iter().zip(&want) {
                assert_eq!(
                    &collect(stream).0,
                    want,
                    "{kind:?}, {lookahead:?}, round {round}"
                );
            }
        }
        assert!(tight.figures().preemptions > 0, "{kind:?}, {lookahead:?}");
    }
}

#[test]
fn states_survive_a_restart_beside_their_pages() {
    for (kind, lookahead) in cases(STATES) {
        let dir = tempfile::tempdir().unwrap();
        let prompt = tokens(100, 2);
        let want = ask(&plain(kind), &prompt, 10).0;
        assert_eq!(
            ask(&on_disk(kind, lookahead, dir.path()), &prompt, 10).0,
            want
        );
        // Three pages, and the states at the end of the last.
        assert_eq!(files(dir.path()).len(), 4, "{kind:?}, {lookahead:?}");
        let again = on_disk(kind, lookahead, dir.path());
        assert_eq!(ask(&again, &prompt, 10), (want.clone(), 3 * PAGE));
        assert_eq!(again.figures().disk.read_pages, 4);
        // Memory comes first; the disk is not asked again.
        assert_eq!(ask(&again, &prompt, 10), (want.clone(), 3 * PAGE));
        assert_eq!(again.figures().disk.read_pages, 4);
        // What goes on from there finds it too, and a shorter prompt finds pages but no states.
        let longer = [&prompt[..], &tokens(20, 5)].concat();
        let longer_want = ask(&plain(kind), &longer, 8).0;
        drop(again);
        let again = on_disk(kind, lookahead, dir.path());
        assert_eq!(ask(&again, &longer, 8), (longer_want, 3 * PAGE));
        let again = on_disk(kind, lookahead, dir.path());
        assert_eq!(ask(&again, &prompt[..80], 1).1, 0);
    }
}

#[test]
fn a_process_that_is_killed_leaves_whole_files() {
    for lookahead in MODES {
        let kind = STATES[0];
        let dir = tempfile::tempdir().unwrap();
        let prompt = tokens(100, 2);
        let first = on_disk(kind, lookahead, dir.path());
        let (want, _) = ask(&first, &prompt, 10);
        while first.figures().disk.written_pages < 4 {
            std::thread::yield_now();
        }
        // Its thread never gets to clean up, and a write was cut.
        let _first = std::mem::ManuallyDrop::new(first);
        fs::write(dir.path().join("cut.99.kvtemp"), b"half").unwrap();
        let again = on_disk(kind, lookahead, dir.path());
        assert_eq!(ask(&again, &prompt, 10), (want, 3 * PAGE));
        assert_eq!(again.figures().disk.damaged_files, 0);
    }
}

#[test]
fn damaged_states_or_pages_are_computed_again() {
    let kind = STATES[0];
    let prompt = tokens(100, 2);
    let want = ask(&plain(kind), &prompt, 10).0;
    for (damaged, lookahead) in (0..4).flat_map(|file| MODES.map(|mode| (file, mode))) {
        let dir = tempfile::tempdir().unwrap();
        ask(&on_disk(kind, lookahead, dir.path()), &prompt, 10);
        let file = &files(dir.path())[damaged];
        let mut bytes = fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(file, bytes).unwrap();
        let again = on_disk(kind, lookahead, dir.path());
        assert_eq!(ask(&again, &prompt, 10), (want.clone(), 0));
        assert_eq!(again.figures().disk.damaged_files, 1);
        drop(again);
        // It was written again.
        let last = on_disk(kind, lookahead, dir.path());
        assert_eq!(ask(&last, &prompt, 10), (want.clone(), 3 * PAGE));
    }
}

#[test]
fn answers_to_one_prompt_begin_at_the_checkpoint_of_the_first() {
    for (kind, lookahead) in cases(STATES) {
        let engine = LoadOptions {
            lookahead,
            ..options(4)
        };
        let engine = start(kind, engine).unwrap();
        let prompt = tokens(75, 4);
        let want = ask(&plain(kind), &prompt, 30).0;
        let shared = GenerateRequest {
            shares_prompt: true,
            ..request(&prompt, 30)
        };
        let mut first = engine
            .generate(shared.clone(), CancelToken::default())
            .unwrap();
        let mut tokens = Vec::new();
        for event in first.by_ref() {
            if let Event::Token { id, .. } = event {
                tokens.push(id);
                break;
            }
        }
        // The first still runs.
        let others: Vec<_> = (0..3)
            .map(|_| engine.generate(shared.clone(), CancelToken::default()))
            .collect();
        for other in others {
            let (answer, stats) = collect(other.unwrap());
            assert_eq!(
                (&answer, stats.cached_tokens),
                (&want, 2 * PAGE),
                "{kind:?}, {lookahead:?}"
            );
        }
        tokens.extend(collect(first).0);
        assert_eq!(tokens, want);
    }
}
