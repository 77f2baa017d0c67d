//! `deterministic`: log probabilities of the whole vocabulary have the same bits whoever else is in the steps, however prompts were cut
//! into them, and whether a prefix was found.

use mlxcel::engine::batch::BatchLimits;
use mlxcel::engine::schedule::AskedBudget;
use mlxcel::engine::{
    EngineHandle, Event, GenerateRequest, GenerateStream, KvTypes, LoadOptions, Lookahead,
    Precision, PrefixOptions,
};
use mlxcel::plugin::DType;
use mlxcel::sampling::{LogprobsRequest, SamplingParams};
use mlxcel_tests::tiny::{Kind, begin_with, nothing_kept, options, request, start, tokens};

/// One of every sort of layer: plain and quantised products, biases, norms of heads, windows, sinks and caps, mixtures, latent keys, states.
const KINDS: [Kind; 11] = [
    ("llama", "llama-gqa"),
    ("llama", "mlx-4bit-g32"),
    ("llama", "mlx-mxfp4"),
    ("llama", "mistral-window"),
    ("qwen", "mlx-qwen2-4bit"),
    ("qwen", "qwen3"),
    ("qwen", "mlx-qwen3-moe-4bit"),
    ("qwen", "qwen3-next"),
    ("gemma", "gemma2"),
    ("gemma", "gemma3"),
    ("deepseek", "v2-lite"),
];
/// Tokens of each answer.
const ANSWER: usize = 6;

fn engine(
    kind: Kind,
    parallel: usize,
    rows: usize,
    prefix: PrefixOptions,
    like: &LoadOptions,
) -> EngineHandle {
    let options = LoadOptions {
        deterministic: true,
        limits: BatchLimits {
            parallel,
            budget: AskedBudget {
                rows: Some(rows),
                prefill_rows_beside_decode: Some(rows.div_ceil(2)),
            },
        },
        prefix,
        dtype: like.dtype,
        kv_types: like.kv_types,
        precision: like.precision,
        lookahead: if parallel.is_multiple_of(2) {
            Lookahead::On
        } else {
            Lookahead::Off
        },
        ..options(parallel)
    };
    start(kind, options).unwrap()
}

fn asked(prompt: &[u32], count: usize) -> GenerateRequest {
    let plain = request(prompt, count);
    GenerateRequest {
        sampling: SamplingParams {
            logprobs: Some(LogprobsRequest {
                top: 64,
                ..LogprobsRequest::default()
            }),
            ..plain.sampling
        },
        ..plain
    }
}

type Answer = Vec<(u32, Vec<(u32, u32)>)>;

/// Tokens, and the bits of the log probabilities of all others.
fn answer(stream: GenerateStream) -> Answer {
    let mut answer = Vec::new();
    for event in stream {
        match event {
            Event::Token { id, logprobs } => {
                let top = logprobs.unwrap().top;
                let bits = top.into_iter().map(|(token, p)| (token, p.to_bits()));
                answer.push((id, bits.collect()));
            }
            Event::Failed(error) => panic!("{error}"),
            Event::Done { .. } | Event::Prefill { .. } => {}
        }
    }
    answer
}

fn ask(engine: &EngineHandle, prompt: &[u32]) -> Answer {
    answer(begin_with(engine, asked(prompt, ANSWER)))
}

/// The answers of `prompts` alone, and then in every company and by every division of prompts.
fn holds(kind: Kind, like: &LoadOptions) {
    let prompts: Vec<Vec<u32>> = [40, 1, 7, 33, 66].map(|n| tokens(n, n)).into();
    let solo = engine(kind, 1, 512, nothing_kept(), like);
    let want: Vec<Answer> = prompts.iter().map(|prompt| ask(&solo, prompt)).collect();
    assert_ne!(want[0], want[1]);
    drop(solo);
    for rows in [1, 5, 17, 48] {
        let cut = engine(kind, 1, rows, nothing_kept(), like);
        for (prompt, want) in prompts.iter().zip(&want) {
            assert_eq!(ask(&cut, prompt), *want, "{kind:?}: {rows} rows a step");
        }
    }
    for (parallel, rows) in [(2, 64), (5, 9), (16, 512), (64, 96)] {
        let crowd = engine(kind, parallel, rows, PrefixOptions::default(), like);
        // Others of any length, which come and go; the second round finds prefixes.
        for round in 0..2 {
            let others: Vec<GenerateStream> = (0..parallel - 1)
                .map(|i| {
                    begin_with(
                        &crowd,
                        asked(&tokens(1 + 11 * i % 50, i + round), 2 + i % 9),
                    )
                })
                .collect();
            for (prompt, want) in prompts.iter().zip(&want) {
                let found = ask(&crowd, prompt);
                assert_eq!(
                    found, *want,
                    "{kind:?}: {parallel} at a time, {rows} rows a step"
                );
            }
            others.into_iter().for_each(|other| drop(answer(other)));
        }
    }
}

#[test]
fn an_answer_depends_on_its_request_alone() {
    for kind in KINDS {
        holds(kind, &options(1));
    }
}

#[test]
fn so_it_does_in_every_precision_and_type_of_caches() {
    let kind = ("llama", "mlx-4bit-g32");
    for precision in [Precision::Exact, Precision::High, Precision::Fast] {
        let like = LoadOptions {
            precision: Some(precision),
            ..options(1)
        };
        holds(kind, &like);
    }
    for name in ["f32", "q8_0"] {
        let kv_type = mlxcel::engine::KvType::from_name(name);
        let like = LoadOptions {
            kv_types: KvTypes {
                keys: kv_type,
                values: kv_type,
            },
            ..options(1)
        };
        holds(kind, &like);
    }
}

#[test]
fn so_it_does_with_activations_of_16_bits() {
    let like = |dtype| LoadOptions {
        dtype: Some(dtype),
        ..options(1)
    };
    for kind in KINDS {
        holds(kind, &like(DType::BF16));
    }
    holds(KINDS[1], &like(DType::F16));
}
