//! Continuous batching never changes an answer: whatever else runs, greedy tokens are those of the
//! request alone. On tiny checkpoints of the llama line with the cpu plugin.

use mlxcel::engine::{
    CancelToken, EngineError, EngineHandle, FinishReason, GenerateRequest, GenerateStream, KvTypes,
    LoadOptions, Lookahead,
};
use mlxcel::plugin::DType;
use mlxcel::sampling::SamplingParams;
use mlxcel_tests::tiny::{
    MODES, begin, begin_with, collect, options, outcome, request, settle, start, token_bytes,
};

/// The engine that others are compared with: one request at a time, one step after the other.
fn alone(variant: &'static str) -> EngineHandle {
    engine(variant, 1, Lookahead::Off)
}

fn engine(variant: &'static str, parallel: usize, lookahead: Lookahead) -> EngineHandle {
    let options = LoadOptions {
        lookahead,
        ..options(parallel)
    };
    start(("llama", variant), options).unwrap()
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
            .map(|p| collect(begin(&solo, p, 20)).0)
            .collect();
        for lookahead in MODES {
            let batch = engine(variant, 6, lookahead);
            // Twice: the second round finds the prefixes of the first.
            for round in 0..2 {
                let streams: Vec<GenerateStream> =
                    prompts.iter().map(|p| begin(&batch, p, 20)).collect();
                let mut cached = 0;
                for (stream, (prompt, want)) in streams.into_iter().zip(prompts.iter().zip(&want)) {
                    let (tokens, reason, stats) = outcome(stream).unwrap();
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
        // Room for about 160 tokens: less than the requests together need, more than each alone.
        let limited = LoadOptions {
            kv_budget_bytes: Some(160 * token_bytes(("llama", "llama-gqa"), DType::F32)),
            kv_types: KvTypes::both(DType::F32),
            lookahead,
            ..options(6)
        };
        let tight = start(("llama", "llama-gqa"), limited).unwrap();
        let prompts = prompts();
        let streams: Vec<GenerateStream> = prompts.iter().map(|p| begin(&tight, p, 30)).collect();
        for (stream, prompt) in streams.into_iter().zip(&prompts) {
            let want = collect(begin(&solo, prompt, 30)).0;
            let length = prompt.len();
            assert_eq!(collect(stream).0, want, "{lookahead:?}, prompt of {length}");
        }
        let figures = tight.figures();
        assert!(figures.preemptions > 0, "{figures:?}");
    }
}

#[test]
fn cancelled_and_abandoned_requests_do_not_disturb_the_others() {
    for lookahead in MODES {
        let engine = engine("llama-gqa", 4, lookahead);
        let prompt: Vec<u32> = (2..40).collect();
        let want = collect(begin(&engine, &prompt, 25)).0;
        for round in 0..6usize {
            let cancel = CancelToken::default();
            let cancelled = engine
                .generate(request(&[5, 6, 7], 10_000), cancel.clone())
                .unwrap();
            let abandoned = begin(&engine, &prompt, 10_000);
            let kept = begin(&engine, &prompt, 25);
            abandoned.take(round).for_each(drop);
            cancel.cancel();
            assert_eq!(collect(kept).0, want);
            let (_, reason, _) = outcome(cancelled).unwrap();
            assert!(matches!(
                reason,
                FinishReason::Cancelled | FinishReason::ContextFull
            ));
        }
        settle(&engine);
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
        let engine = engine("llama-gqa", 2, lookahead);
        let fails = |prompt: Vec<u32>| outcome(begin(&engine, &prompt, 2)).unwrap_err();
        assert!(matches!(fails(vec![]), EngineError::EmptyPrompt));
        let long = fails(vec![3; 100_000]).to_string();
        assert!(long.contains("100000 tokens"), "{long}");
        let foreign = fails(vec![3, 4_000_000]).to_string();
        assert!(foreign.contains("4000000"), "{foreign}");
        assert_eq!(collect(begin(&engine, &[3, 4], 2)).0.len(), 2);
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
    let want: Vec<Vec<u32>> = all
        .iter()
        .map(|request| collect(begin_with(&solo, request.clone())).0)
        .collect();
    for lookahead in MODES {
        let batch = engine("llama-gqa", 6, lookahead);
        // Without those that the host samples, every step is followed before it is read.
        for leave_out in [4, 3] {
            let chosen = || (0..all.len()).filter(|i| i % 4 != leave_out);
            let streams: Vec<GenerateStream> = chosen()
                .map(|i| begin_with(&batch, all[i].clone()))
                .collect();
            for (i, stream) in chosen().zip(streams) {
                assert_eq!(collect(stream).0, want[i], "{lookahead:?}, {i}");
            }
        }
    }
}

#[test]
fn an_end_that_comes_with_a_step_in_flight_leaves_nothing_wrong_behind() {
    let solo = alone("llama-gqa");
    let prompts = prompts();
    let [waiting, ahead] = MODES.map(|lookahead| {
        let batch = engine("llama-gqa", 4, lookahead);
        // Rounds end at other tokens, at ends of pages too.
        for round in 0..3 {
            let cases: Vec<(GenerateRequest, Vec<u32>)> = prompts
                .iter()
                .map(|prompt| {
                    let whole = collect(begin(&solo, prompt, 36)).0;
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
                .map(|(request, _)| begin_with(&batch, request.clone()))
                .collect();
            for (stream, (request, want)) in streams.into_iter().zip(&cases) {
                let (tokens, reason, _) = outcome(stream).unwrap();
                assert_eq!(
                    (&tokens, reason),
                    (want, FinishReason::Eos),
                    "{lookahead:?}"
                );
                // The next turn goes on from what is in the pages.
                let mut turn = request.prompt.clone();
                turn.extend(tokens);
                turn.extend([9, 8]);
                let answer = |engine: &EngineHandle| collect(begin(engine, &turn, 6)).0;
                assert_eq!(answer(&batch), answer(&solo), "{lookahead:?}");
            }
        }
        settle(&batch);
        batch.clear_prefix_cache().unwrap();
        assert_eq!(batch.figures().pages_in_use, 0, "{lookahead:?}");
        batch.figures().decode_rows
    });
    // Rows for nothing show that there was a step in flight.
    assert!(ahead > waiting, "{ahead} rows, {waiting} without");
}
