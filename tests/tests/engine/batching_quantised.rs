//! Batches over caches in q8_0 and q4_0: whatever else runs, greedy tokens are those of the request alone with the same
//! caches, and what is found of earlier requests changes nothing. On tiny checkpoints with the cpu plugin.

use mlxcel::engine::{
    EngineHandle, GenerateStream, KvType, KvTypes, LoadOptions, Lookahead, PrefixOptions,
};
use mlxcel_tests::tiny::{
    Kind, MODES, ask, begin, cancel_beside, collect, nothing_kept, options, start, token_bytes,
    tokens,
};

/// Plain layers, windows, layers that use another's keys, and layers with states between others.
const KINDS: [Kind; 4] = [
    ("llama", "llama-gqa"),
    ("llama", "mistral-window"),
    ("gemma", "gemma3n"),
    ("qwen", "qwen3-next"),
];

fn with(kv_type: KvType, lookahead: Lookahead, parallel: usize) -> LoadOptions {
    LoadOptions {
        kv_types: KvTypes::both(kv_type),
        lookahead,
        ..options(parallel)
    }
}

/// Both types in both modes.
fn cases() -> impl Iterator<Item = (KvType, Lookahead)> {
    let both = |kv_type| MODES.map(|lookahead| (kv_type, lookahead));
    KvType::QUANTISED.into_iter().flat_map(both)
}

/// Prompts of mixed lengths; some begin alike, and part within a page and at its end.
fn prompts() -> Vec<Vec<u32>> {
    let lengths = [1, 2, 5, 31, 32, 33, 40, 64];
    let mut prompts: Vec<Vec<u32>> = lengths.iter().map(|&len| tokens(len, len)).collect();
    for alike in [40, 64] {
        prompts.push([tokens(alike, 64), vec![9, 8, 7]].concat());
    }
    prompts
}

fn alone(kind: Kind, kv_type: KvType, prompts: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
    let options = LoadOptions {
        prefix: nothing_kept(),
        ..with(kv_type, Lookahead::Off, 1)
    };
    let solo = start(kind, options).unwrap();
    let answer = |prompt: &Vec<u32>| ask(&solo, prompt, count);
    let answers = prompts.iter().map(answer);
    answers
        .map(|(tokens, cached)| {
            assert_eq!(cached, 0);
            tokens
        })
        .collect()
}

fn all_at_once(engine: &EngineHandle, prompts: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
    let begin = |prompt: &Vec<u32>| begin(engine, prompt, count);
    let streams: Vec<GenerateStream> = prompts.iter().map(begin).collect();
    streams
        .into_iter()
        .map(|stream| collect(stream).0)
        .collect()
}

#[test]
fn batched_answers_are_the_solo_answers() {
    for kind in KINDS {
        for (kv_type, lookahead) in cases() {
            let prompts = prompts();
            let want = alone(kind, kv_type, &prompts, 20);
            let batch = start(kind, with(kv_type, lookahead, 6)).unwrap();
            // Again and again: later rounds find what the earlier ones left.
            for round in 0..3 {
                let found = all_at_once(&batch, &prompts, 20);
                let name = kv_type.name();
                for (prompt, (found, want)) in prompts.iter().zip(found.iter().zip(&want)) {
                    let len = prompt.len();
                    assert_eq!(
                        found, want,
                        "{kind:?} {name}, {lookahead:?}, round {round}, prompt of {len}"
                    );
                }
            }
            assert!(batch.figures().prefix.reused_tokens > 0);
        }
    }
}

#[test]
fn little_room_preempts_and_changes_nothing() {
    let cases = [(KINDS[0], KvType::Q8_0), (KINDS[3], KvType::Q4_0)];
    let cases = cases.map(|(kind, kv_type)| MODES.map(|mode| (kind, kv_type, mode)));
    for (kind, kv_type, lookahead) in cases.into_iter().flatten() {
        let prompts = prompts();
        let want = alone(kind, kv_type, &prompts, 30);
        let token_bytes = token_bytes(kind, kv_type);
        let state_bytes = match kind == KINDS[0] {
            true => 0,
            false => 3 * 4 * (3 * (2 * 16 + 48) + 4 * 8 * 12) as u64,
        };
        // Two states for each of six requests, one checkpoint, and room for about 160 tokens.
        let budget_bytes = 13 * state_bytes + 160 * token_bytes;
        let options = LoadOptions {
            kv_budget_bytes: Some(budget_bytes),
            ..with(kv_type, lookahead, 6)
        };
        let tight = start(kind, options).unwrap();
        for _ in 0..2 {
            assert_eq!(
                all_at_once(&tight, &prompts, 30),
                want,
                "{kind:?}, {lookahead:?}"
            );
        }
        let figures = tight.figures();
        assert!(figures.preemptions > 0, "{figures:?}");
        // Page 0 and slot 0, which belong to nobody, come on top.
        let most_bytes = budget_bytes + 32 * token_bytes + state_bytes;
        assert!(figures.kv_bytes as u64 <= most_bytes, "{figures:?}");
    }
}

#[test]
fn cancelled_requests_leave_others_alone() {
    let prompt = tokens(40, 3);
    for (kv_type, lookahead) in cases() {
        let want = alone(KINDS[0], kv_type, std::slice::from_ref(&prompt), 25);
        let engine = start(KINDS[0], with(kv_type, lookahead, 4)).unwrap();
        cancel_beside(&engine, &prompt, &want[0], 5);
    }
}

#[test]
fn a_prefix_of_every_length_gives_the_uncached_answer() {
    for (kv_type, lookahead) in cases() {
        let cached = start(KINDS[0], with(kv_type, lookahead, 1)).unwrap();
        let plain = LoadOptions {
            prefix: nothing_kept(),
            ..with(kv_type, Lookahead::Off, 1)
        };
        let plain = start(KINDS[0], plain).unwrap();
        let whole = tokens(70, 3);
        for length in (1..=whole.len()).step_by(3) {
            let prompt = [&whole[..length], &[5, 9]].concat();
            let (answer, found) = ask(&cached, &prompt, 4);
            assert!(found < prompt.len());
            assert_eq!(answer, ask(&plain, &prompt, 4).0, "prefix of {length}");
        }
        assert!(cached.figures().prefix.reused_tokens > 300);
    }
}

#[test]
fn a_cache_cap_evicts_and_changes_nothing() {
    for lookahead in MODES {
        let kind = KINDS[0];
        let prompts = prompts();
        let want = alone(kind, KvType::Q8_0, &prompts, 12);
        let few_pages = PrefixOptions {
            max_bytes: Some(3 * 32 * token_bytes(kind, KvType::Q8_0)),
            ..PrefixOptions::default()
        };
        let options = LoadOptions {
            prefix: few_pages,
            ..with(KvType::Q8_0, lookahead, 3)
        };
        let engine = start(kind, options).unwrap();
        for _ in 0..3 {
            assert_eq!(all_at_once(&engine, &prompts, 12), want);
        }
        // Figures are those of the last step: one more, after all of these have ended.
        ask(&engine, &[3], 2);
        let figures = engine.figures();
        assert!(figures.prefix_pages <= 3, "{figures:?}");
        assert!(figures.prefix.capped_pages > 0, "{figures:?}");
    }
}
