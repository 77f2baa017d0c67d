//! Continuous batching never changes an answer: whatever else runs, greedy tokens are those of the
//! request alone. On tiny checkpoints of the llama line with the cpu plugin.

use std::path::Path;

use mlxcel::engine::batch::BatchLimits;
use mlxcel::engine::schedule::Budget;
use mlxcel::engine::{
    CancelToken, EngineError, EngineHandle, Event, FinishReason, GenerateRequest, GenerateStats,
    GenerateStream, LoadOptions, Lookahead, open_model, start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};

const KV_BYTES_PER_TOKEN_IS_SMALL: u64 = 1 << 30;

/// Every answer is the same whether steps wait for the tokens of the ones before or not.
const MODES: [Lookahead; 2] = [Lookahead::Off, Lookahead::On];

/// The engine that others are compared with: one request at a time, one step after the other.
fn alone(variant: &str) -> EngineHandle {
    engine(variant, 1, KV_BYTES_PER_TOKEN_IS_SMALL, Lookahead::Off)
}

fn engine(
    variant: &str,
    parallel: usize,
    kv_budget_bytes: u64,
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
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden/llama")
        .join(variant);
    let opened = open_model(&path, &catalogue, &loader, None).unwrap();
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

fn collect(stream: GenerateStream) -> Result<(Vec<u32>, FinishReason, GenerateStats), EngineError> {
    let mut tokens = Vec::new();
    for event in stream {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { reason, stats } => return Ok((tokens, reason, stats)),
            Event::Failed(error) => return Err(error),
            Event::Prefill { .. } => {}
        }
    }
    unreachable!("a stream ends with an event")
}

/// Prompts of mixed lengths; some begin alike, so that prefixes are found.
fn prompts() -> Vec<Vec<u32>> {
    let token = |i: usize, seed: usize| ((i * 7 + seed * 13) % 60 + 2) as u32;
    let mut prompts: Vec<Vec<u32>> = [1, 2, 5, 31, 32, 33, 40, 64]
        .iter()
        .map(|&len| (0..len).map(|i| token(i, len)).collect())
        .collect();
    let mut alike: Vec<u32> = (0..64).map(|i| token(i, 64)).collect();
    alike.extend([9, 8, 7]);
    prompts.push(alike);
    prompts
}

#[test]
fn batched_answers_are_the_solo_answers() {
    for variant in [
        "llama-gqa",
        "mistral-window",
        "mlx-4bit-g32",
        "smollm3",
        "mixtral",
    ] {
        let solo = alone(variant);
        let prompts = prompts();
        let want: Vec<Vec<u32>> = prompts
            .iter()
            .map(|p| {
                collect(
                    solo.generate(request(p, 20), CancelToken::default())
                        .unwrap(),
                )
                .unwrap()
                .0
            })
            .collect();
        for lookahead in MODES {
            let batch = engine(variant, 6, KV_BYTES_PER_TOKEN_IS_SMALL, lookahead);
            // Twice: the second round finds the prefixes of the first.
            for round in 0..2 {
                let streams: Vec<GenerateStream> = prompts
                    .iter()
                    .map(|p| {
                        batch
                            .generate(request(p, 20), CancelToken::default())
                            .unwrap()
                    })
                    .collect();
                let mut cached = 0;
                for (stream, (prompt, want)) in streams.into_iter().zip(prompts.iter().zip(&want)) {
                    let (tokens, reason, stats) = collect(stream).unwrap();
                    assert_eq!(
                        &tokens,
                        want,
                        "{variant}, {lookahead:?}, round {round}, prompt of {}",
                        prompt.len()
                    );
                    assert_eq!(reason, FinishReason::MaxTokens);
                    assert!(stats.cached_tokens < prompt.len());
                    cached += stats.cached_tokens;
                }
                assert!(
                    round == 0 || cached > 0,
                    "{variant}: the second round found no prefix"
                );
            }
        }
    }
}

#[test]
fn a_small_pool_preempts_and_changes_nothing() {
    for lookahead in MODES {
        let solo = alone("llama-gqa");
        // Room for about 160 tokens in the one layer: less than the requests together need, more than each alone.
        let per_token = 2 * 2 * 2 * 16 * 2;
        let tight = engine("llama-gqa", 6, 80 * per_token, lookahead);
        let prompts = prompts();
        let streams: Vec<GenerateStream> = prompts
            .iter()
            .map(|p| {
                tight
                    .generate(request(p, 30), CancelToken::default())
                    .unwrap()
            })
            .collect();
        for (stream, prompt) in streams.into_iter().zip(&prompts) {
            let want = collect(
                solo.generate(request(prompt, 30), CancelToken::default())
                    .unwrap(),
            )
            .unwrap()
            .0;
            assert_eq!(
                collect(stream).unwrap().0,
                want,
                "{lookahead:?}, prompt of {}",
                prompt.len()
            );
        }
        let figures = tight.figures();
        assert!(figures.preemptions > 0, "{figures:?}");
    }
}

#[test]
fn cancelled_and_abandoned_requests_do_not_disturb_the_others() {
    for lookahead in MODES {
        let engine = engine("llama-gqa", 4, KV_BYTES_PER_TOKEN_IS_SMALL, lookahead);
        let prompt: Vec<u32> = (2..40).collect();
        let want = collect(
            engine
                .generate(request(&prompt, 25), CancelToken::default())
                .unwrap(),
        )
        .unwrap()
        .0;
        for round in 0..6usize {
            let cancel = CancelToken::default();
            let cancelled = engine
                .generate(request(&[5, 6, 7], 10_000), cancel.clone())
                .unwrap();
            let abandoned = engine
                .generate(request(&prompt, 10_000), CancelToken::default())
                .unwrap();
            let kept = engine
                .generate(request(&prompt, 25), CancelToken::default())
                .unwrap();
            abandoned.take(round).for_each(drop);
            cancel.cancel();
            assert_eq!(collect(kept).unwrap().0, want);
            let (_, reason, _) = collect(cancelled).unwrap();
            assert!(matches!(
                reason,
                FinishReason::Cancelled | FinishReason::ContextFull
            ));
        }
        // The last answers are out; what is left of their step ends by itself.
        while engine.health().step_age.is_some() {
            std::thread::yield_now();
        }
        let health = engine.health();
        assert!(
            health.is_alive && (health.running, health.waiting) == (0, 0),
            "{health:?}"
        );
    }
}

#[test]
fn requests_that_cannot_run_are_refused_with_numbers_and_the_engine_lives() {
    for lookahead in MODES {
        let engine = engine("llama-gqa", 2, KV_BYTES_PER_TOKEN_IS_SMALL, lookahead);
        let fails = |prompt: Vec<u32>| {
            collect(
                engine
                    .generate(request(&prompt, 2), CancelToken::default())
                    .unwrap(),
            )
            .unwrap_err()
        };
        assert!(matches!(fails(vec![]), EngineError::EmptyPrompt));
        let long = fails(vec![3; 100_000]).to_string();
        assert!(long.contains("100000 tokens"), "{long}");
        let foreign = fails(vec![3, 4_000_000]).to_string();
        assert!(foreign.contains("4000000"), "{foreign}");
        assert_eq!(
            collect(
                engine
                    .generate(request(&[3, 4], 2), CancelToken::default())
                    .unwrap()
            )
            .unwrap()
            .0
            .len(),
            2
        );
    }
}

/// Requests with seeds and without, that the device samples or the host has to, each as it is alone.
fn sampled(seed: u64, kind: usize) -> SamplingParams {
    let params = SamplingParams {
        seed: Some(seed),
        temperature: 1.5,
        ..SamplingParams::server()
    };
    match kind % 4 {
        0 => params,
        1 => SamplingParams {
            temperature: 0.0,
            ..params
        },
        2 => SamplingParams {
            top_k: 7,
            top_p: 1.0,
            min_p: 0.0,
            ..params
        },
        _ => SamplingParams {
            presence_penalty: 0.5,
            ..params
        },
    }
}

#[test]
fn seeds_give_the_same_answer_alone_and_in_any_company() {
    let solo = alone("llama-gqa");
    let prompts = prompts();
    let all: Vec<GenerateRequest> = (0..24)
        .map(|i| GenerateRequest {
            sampling: sampled(i as u64, i),
            ..request(&prompts[i % prompts.len()], 12 + i % 5)
        })
        .collect();
    let ask = |engine: &EngineHandle, request: &GenerateRequest| {
        engine
            .generate(request.clone(), CancelToken::default())
            .unwrap()
    };
    let want: Vec<Vec<u32>> = all
        .iter()
        .map(|request| collect(ask(&solo, request)).unwrap().0)
        .collect();
    for lookahead in MODES {
        let batch = engine("llama-gqa", 6, KV_BYTES_PER_TOKEN_IS_SMALL, lookahead);
        // Without those that the host samples, every step is followed before it is read.
        for leave_out in [4, 3] {
            let chosen = || (0..all.len()).filter(|i| i % 4 != leave_out);
            let streams: Vec<GenerateStream> = chosen().map(|i| ask(&batch, &all[i])).collect();
            for (i, stream) in chosen().zip(streams) {
                assert_eq!(collect(stream).unwrap().0, want[i], "{lookahead:?}, {i}");
            }
        }
    }
}

#[test]
fn an_end_that_comes_with_a_step_in_flight_leaves_nothing_wrong_behind() {
    let solo = alone("llama-gqa");
    let prompts = prompts();
    for lookahead in MODES {
        let batch = engine("llama-gqa", 4, KV_BYTES_PER_TOKEN_IS_SMALL, lookahead);
        // Rounds end at other tokens, at ends of pages too.
        for round in 0..3 {
            let cases: Vec<(GenerateRequest, Vec<u32>)> = prompts
                .iter()
                .map(|prompt| {
                    let stream = solo.generate(request(prompt, 36), CancelToken::default());
                    let whole = collect(stream.unwrap()).unwrap().0;
                    let eos = whole[3 + 11 * round];
                    let end = whole.iter().position(|token| *token == eos).unwrap();
                    let request = GenerateRequest {
                        eos: vec![eos],
                        ..request(prompt, 36)
                    };
                    (request, whole[..end].to_vec())
                })
                .collect();
            let streams: Vec<GenerateStream> = cases
                .iter()
                .map(|(request, _)| {
                    batch
                        .generate(request.clone(), CancelToken::default())
                        .unwrap()
                })
                .collect();
            for (stream, (request, want)) in streams.into_iter().zip(&cases) {
                let (tokens, reason, _) = collect(stream).unwrap();
                assert_eq!(
                    (&tokens, reason),
                    (want, FinishReason::Eos),
                    "{lookahead:?}"
                );
                // The next turn goes on from what is in the pages.
                let mut turn = request.prompt.clone();
                turn.extend(tokens);
                turn.extend([9, 8]);
                let answer = |engine: &EngineHandle| {
                    let stream = engine.generate(self::request(&turn, 6), CancelToken::default());
                    collect(stream.unwrap()).unwrap().0
                };
                assert_eq!(answer(&batch), answer(&solo), "{lookahead:?}");
            }
        }
        while batch.health().step_age.is_some() {
            std::thread::yield_now();
        }
        batch.clear_prefix_cache().unwrap();
        assert_eq!(batch.figures().pages_in_use, 0, "{lookahead:?}");
    }
}
