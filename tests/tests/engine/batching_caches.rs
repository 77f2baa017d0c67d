//! Batches over every kind of cache: latent keys, chosen keys, caches that layers share, recurrent
//! states. Whatever else runs, greedy tokens are those of the request alone, and what is found of
//! earlier requests changes nothing. On tiny checkpoints with the cpu plugin.

use mlxcel::engine::batch::BatchLimits;
use mlxcel::engine::load::PrefixOptions;
use mlxcel::engine::schedule::Budget;
use mlxcel::engine::{
    CancelToken, EngineHandle, Event, GenerateRequest, GenerateStats, GenerateStream, LoadOptions,
    Lookahead, open_model, start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use mlxcel_tests::golden::folder;

/// More than any of these models needs.
const ENOUGH_BYTES: u64 = 1 << 30;

/// One of each kind.
const KINDS: [(&str, &str); 7] = [
    ("deepseek", "v3"),
    ("deepseek", "v32"),
    ("gemma", "gemma3n"),
    ("gemma", "gemma4"),
    ("qwen", "qwen3-next"),
    ("qwen", "qwen3-next-mixed"),
    ("qwen", "mlx-qwen3-5-moe-4bit"),
];

/// Every answer is the same whether steps wait for the tokens of the ones before or not.
const MODES: [Lookahead; 2] = [Lookahead::Off, Lookahead::On];

const STATES: (&str, &str) = ("qwen", "qwen3-next");

fn engine(
    (family, variant): (&str, &str),
    parallel: usize,
    kv_budget_bytes: u64,
    prefix: PrefixOptions,
    lookahead: Lookahead,
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
    let opened = open_model(&folder(family, variant), &catalogue, &loader, None).unwrap();
    let backend = loader
        .select_backend(&catalogue, &BackendChoice::Named("cpu".to_owned()))
        .unwrap();
    let options = LoadOptions {
        dtype: Some(DType::F32),
        threads: 1,
        limits: BatchLimits {
            parallel,
            budget: Budget {
                rows: 48,
                prefill_rows_beside_decode: 16,
            },
        },
        kv_budget_bytes: Some(kv_budget_bytes),
        prefix,
        lookahead,
        ..LoadOptions::default()
    };
    start_engine(opened, backend, options, |_, _| {}).unwrap().0
}

fn request(prompt: &[u32], max_new_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_new_tokens: Some(max_new_tokens),
        ..GenerateRequest::default()
    }
}

fn start(engine: &EngineHandle, prompt: &[u32], max_new_tokens: usize) -> GenerateStream {
    engine
        .generate(request(prompt, max_new_tokens), CancelToken::default())
        .unwrap()
}

fn collect(stream: GenerateStream) -> (Vec<u32>, GenerateStats) {
    let mut tokens = Vec::new();
    for event in stream {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { stats, .. } => return (tokens, stats),
            Event::Failed(error) => panic!("{error}"),
            Event::Prefill { .. } => {}
        }
    }
    unreachable!("a stream ends with an event")
}

fn token(i: usize, seed: usize) -> u32 {
    ((i * 7 + seed * 13) % 58 + 3) as u32
}

/// Prompts of mixed lengths; some begin alike, and part within a page and at its end.
fn prompts() -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> = [1, 2, 5, 31, 32, 33, 40, 64]
        .iter()
        .map(|&len| (0..len).map(|i| token(i, len)).collect())
        .collect();
    for alike in [40, 64] {
        let mut prompt: Vec<u32> = (0..alike).map(|i| token(i, 64)).collect();
        prompt.extend([9, 8, 7]);
        prompts.push(prompt);
    }
    prompts
}

fn alone(kind: (&str, &str), prompts: &[Vec<u32>], max_new_tokens: usize) -> Vec<Vec<u32>> {
    // Keeps nothing, so that every answer is computed from its first token on.
    let nothing = PrefixOptions {
        max_bytes: Some(0),
        ..PrefixOptions::default()
    };
    let solo = engine(kind, 1, ENOUGH_BYTES, nothing, Lookahead::Off);
    let answer = |prompt: &Vec<u32>| {
        let (tokens, stats) = collect(start(&solo, prompt, max_new_tokens));
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
            let batch = engine(kind, 6, ENOUGH_BYTES, PrefixOptions::default(), lookahead);
            // Again and again: later rounds find what the earlier ones left.
            for round in 0..3 {
                let streams: Vec<GenerateStream> =
                    prompts.iter().map(|p| start(&batch, p, 20)).collect();
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
        let prompt: Vec<u32> = (0..40).map(|i| token(i, 1)).collect();
        let engine = engine(STATES, 1, ENOUGH_BYTES, PrefixOptions::default(), lookahead);
        let (answer, _) = collect(start(&engine, &prompt, 30));
        let mut turn = prompt.clone();
        turn.extend(&answer);
        turn.extend([5, 6, 7]);
        let want = alone(STATES, std::slice::from_ref(&turn), 20);
        let (tokens, stats) = collect(start(&engine, &turn, 20));
        assert_eq!(tokens, want[0]);
        // 70 tokens were seen: two pages, to whose end a state was kept.
        assert_eq!(stats.cached_tokens, 64);
        // The same prompt again: its own last page boundary has a state too.
        let (again, stats) = collect(start(&engine, &prompt, 30));
        assert_eq!((again, stats.cached_tokens), (answer, 32));
    }
}

#[test]
fn prompts_that_part_are_remembered_where_they_part() {
    for lookahead in MODES {
        let shared: Vec<u32> = (0..70).map(|i| token(i, 2)).collect();
        let prompts: Vec<Vec<u32>> = (0..4)
            .map(|own| {
                let tail = (0..60).map(|i| token(i, own + 20));
                shared.iter().copied().chain(tail).collect()
            })
            .collect();
        let want = alone(STATES, &prompts, 8);
        let engine = engine(STATES, 1, ENOUGH_BYTES, PrefixOptions::default(), lookahead);
        let mut cached = Vec::new();
        for (prompt, want) in prompts.iter().zip(&want) {
            let (tokens, stats) = collect(start(&engine, prompt, 8));
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
        let tight = engine(STATES, 6, budget_bytes, PrefixOptions::default(), lookahead);
        for _ in 0..2 {
            let streams: Vec<GenerateStream> =
                prompts.iter().map(|p| start(&tight, p, 30)).collect();
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
        let engine = engine(STATES, 4, ENOUGH_BYTES, PrefixOptions::default(), lookahead);
        for round in 0..6usize {
            let cancel = CancelToken::default();
            let cancelled = engine
                .generate(request(&[5, 6, 7], 10_000), cancel.clone())
                .unwrap();
            let abandoned = start(&engine, &prompt, 10_000);
            let kept = start(&engine, &prompt, 25);
            abandoned.take(round).for_each(drop);
            cancel.cancel();
            assert_eq!(collect(kept).0, want[0]);
            collect(cancelled);
        }
        engine.clear_prefix_cache().unwrap();
        assert_eq!(collect(start(&engine, &prompt, 25)).0, want[0]);
    }
}

/// Answers of every length up to the end of a page, so that the step in flight has a row behind it or in a page of its
/// own, and then the next turn, which goes on from a state.
#[test]
fn a_state_with_a_token_too_many_is_no_checkpoint() {
    let prompt: Vec<u32> = (0..56).map(|i| token(i, 5)).collect();
    let whole = &alone(STATES, std::slice::from_ref(&prompt), 20)[0];
    // A budget with and without room for checkpoints.
    for max_bytes in [None, Some(1)] {
        let prefix = || PrefixOptions {
            max_bytes,
            ..PrefixOptions::default()
        };
        for lookahead in MODES {
            for at in 5..12 {
                let engine = engine(STATES, 2, ENOUGH_BYTES, prefix(), lookahead);
                let eos = whole[at];
                let end = whole.iter().position(|token| *token == eos).unwrap();
                let ended = GenerateRequest {
                    eos: vec![eos],
                    ..request(&prompt, 20)
                };
                let stream = engine.generate(ended, CancelToken::default()).unwrap();
                let (tokens, _) = collect(stream);
                assert_eq!(tokens, whole[..end], "{lookahead:?}, {at}");
                let mut turn = prompt.clone();
                turn.extend(&tokens);
                turn.extend([5, 6, 7]);
                let want = alone(STATES, std::slice::from_ref(&turn), 8);
                assert_eq!(
                    collect(start(&engine, &turn, 8)).0,
                    want[0],
                    "{lookahead:?}, {at}"
                );
            }
        }
    }
}
