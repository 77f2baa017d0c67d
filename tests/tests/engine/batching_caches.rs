//! Batches over every kind of cache: latent keys, chosen keys, caches that layers share, recurrent
//! states. Whatever else runs, greedy tokens are those of the request alone, and what is found of
//! earlier requests changes nothing. On tiny checkpoints with the cpu plugin.

use mlxcel::engine::{
    EngineHandle, GenerateRequest, GenerateStream, LoadOptions, Lookahead, PrefixOptions,
};
use mlxcel_tests::tiny::{
    Kind, MODES, begin, begin_with, cancel_beside, collect, nothing_kept, options, request, tokens,
};

/// One of each kind.
const KINDS: [Kind; 7] = [
    ("deepseek", "v3"),
    ("deepseek", "v32"),
    ("gemma", "gemma3n"),
    ("gemma", "gemma4"),
    ("qwen", "qwen3-next"),
    ("qwen", "qwen3-next-mixed"),
    ("qwen", "mlx-qwen3-5-moe-4bit"),
];

const STATES: Kind = ("qwen", "qwen3-next");

fn engine(kind: Kind, parallel: usize, lookahead: Lookahead) -> EngineHandle {
    start(kind, parallel, lookahead, PrefixOptions::default())
}

fn start(kind: Kind, parallel: usize, lookahead: Lookahead, prefix: PrefixOptions) -> EngineHandle {
    let options = LoadOptions {
        prefix,
        lookahead,
        ..options(parallel)
    };
    mlxcel_tests::tiny::start(kind, options).unwrap()
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

fn alone(kind: Kind, prompts: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
    let solo = start(kind, 1, Lookahead::Off, nothing_kept());
    let answer = |prompt: &Vec<u32>| {
        let (tokens, stats) = collect(begin(&solo, prompt, count));
        assert_eq!(stats.cached_tokens, 0);
        tokens
    };
    prompts.iter().map(answer).collect()
}

#[test]
fn batched_answers_are_the_solo_answers_on_every_kind_of_cache() {
    for kind in KINDS {
        let prompts = prompts();
        let want = alone(kind, &prompts, 20);
        for lookahead in MODES {
            let batch = engine(kind, 6, lookahead);
            // Again and again: later rounds find what the earlier ones left.
            for round in 0..3 {
                let streams: Vec<GenerateStream> =
                    prompts.iter().map(|p| begin(&batch, p, 20)).collect();
                let mut cached = 0;
                for (stream, (prompt, want)) in streams.into_iter().zip(prompts.iter().zip(&want)) {
                    let (tokens, stats) = collect(stream);
                    let len = prompt.len();
                    assert_eq!(
                        &tokens, want,
                        "{kind:?}, {lookahead:?}, round {round}, prompt of {len}"
                    );
                    assert!(stats.cached_tokens < len);
                    cached += stats.cached_tokens;
                }
                assert!(
                    round == 0 || cached > 0,
                    "{kind:?}: round {round} found no prefix"
                );
            }
        }
    }
}

#[test]
fn the_next_turn_of_a_chat_goes_on_from_the_state_of_the_last() {
    for lookahead in MODES {
        let prompt: Vec<u32> = tokens(40, 1);
        let engine = engine(STATES, 1, lookahead);
        let (answer, _) = collect(begin(&engine, &prompt, 30));
        let mut turn = prompt.clone();
        turn.extend(&answer);
        turn.extend([5, 6, 7]);
        let want = alone(STATES, std::slice::from_ref(&turn), 20);
        let (tokens, stats) = collect(begin(&engine, &turn, 20));
        assert_eq!(tokens, want[0]);
        // 70 tokens were seen: two pages, to whose end a state was kept.
        assert_eq!(stats.cached_tokens, 64);
        // The same prompt again: its own last page boundary has a state too.
        let (again, stats) = collect(begin(&engine, &prompt, 30));
        assert_eq!((again, stats.cached_tokens), (answer, 32));
    }
}

#[test]
fn prompts_that_part_are_remembered_where_they_part() {
    for lookahead in MODES {
        let shared: Vec<u32> = tokens(70, 2);
        let prompts: Vec<Vec<u32>> = (0..4)
            .map(|own| [&shared[..], &tokens(60, own + 20)].concat())
            .collect();
        let want = alone(STATES, &prompts, 8);
        let engine = engine(STATES, 1, lookahead);
        let mut cached = Vec::new();
        for (prompt, want) in prompts.iter().zip(&want) {
            let (tokens, stats) = collect(begin(&engine, prompt, 8));
            assert_eq!(&tokens, want);
            cached.push(stats.cached_tokens);
        }
        // Nobody knows at first where others will part; the second leaves a state there.
        assert_eq!(cached, [0, 0, 64, 64]);
    }
}

#[test]
fn little_room_preempts_and_changes_nothing() {
    for lookahead in MODES {
        let prompts = prompts();
        let want = alone(STATES, &prompts, 30);
        let state_bytes = 3 * 4 * (3 * (2 * 16 + 48) + 4 * 8 * 12) as u64;
        let token_bytes = 2 * 16 * 4;
        // Two states for each of six requests, two checkpoints, and room for about 160 tokens.
        let budget_bytes = 14 * state_bytes + 160 * token_bytes;
        let limited = LoadOptions {
            kv_budget_bytes: Some(budget_bytes),
            lookahead,
            ..options(6)
        };
        let tight = mlxcel_tests::tiny::start(STATES, limited).unwrap();
        for _ in 0..2 {
            let streams: Vec<GenerateStream> =
                prompts.iter().map(|p| begin(&tight, p, 30)).collect();
            for (stream, want) in streams.into_iter().zip(&want) {
                assert_eq!(&collect(stream).0, want);
            }
        }
        let figures = tight.figures();
        assert!(figures.preemptions > 0, "{figures:?}");
        // Page 0 and slot 0, which belong to nobody, come on top.
        let most_bytes = budget_bytes + 32 * token_bytes + state_bytes;
        assert!(figures.kv_bytes as u64 <= most_bytes, "{figures:?}");
    }
}

#[test]
fn cancelled_requests_leave_the_states_of_others_alone() {
    for lookahead in MODES {
        let prompt: Vec<u32> = (3..43).collect();
        let want = alone(STATES, std::slice::from_ref(&prompt), 25);
        let engine = engine(STATES, 4, lookahead);
        cancel_beside(&engine, &prompt, &want[0], 6);
        engine.clear_prefix_cache().unwrap();
        assert_eq!(collect(begin(&engine, &prompt, 25)).0, want[0]);
    }
}

/// Answers of every length up to the end of a page, so that the step in flight has a row behind it or in a page of its
/// own, and then the next turn, which goes on from a state.
#[test]
fn a_state_with_a_token_too_many_is_no_checkpoint() {
    let prompt: Vec<u32> = tokens(56, 5);
    let whole = &alone(STATES, std::slice::from_ref(&prompt), 20)[0];
    // A budget with and without room for checkpoints.
    for max_bytes in [None, Some(1)] {
        let prefix = || PrefixOptions {
            max_bytes,
            ..PrefixOptions::default()
        };
        for lookahead in MODES {
            for at in 5..12 {
                let engine = start(STATES, 2, lookahead, prefix());
                let eos = whole[at];
                let end = whole.iter().position(|token| *token == eos).unwrap();
                let ended = GenerateRequest {
                    eos: vec![eos],
                    ..request(&prompt, 20)
                };
                let (tokens, _) = collect(begin_with(&engine, ended));
                assert_eq!(tokens, whole[..end], "{lookahead:?}, {at}");
                let mut turn = prompt.clone();
                turn.extend(&tokens);
                turn.extend([5, 6, 7]);
                let want = alone(STATES, std::slice::from_ref(&turn), 8);
                assert_eq!(
                    collect(begin(&engine, &turn, 8)).0,
                    want[0],
                    "{lookahead:?}, {at}"
                );
            }
        }
    }
}
