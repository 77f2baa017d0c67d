//! Caches of cross-attention: every request attends to its own encoder's output, alone and in a batch, and what it
//! computes is what a float64 forward of the same model gives.

use std::path::Path;

use mlxcel::engine::{
    CancelToken, EngineError, EngineFigures, EngineHandle, Event, Features, GenerateRequest,
    KvTypes, LoadOptions, Lookahead, start_engine,
};
use mlxcel::plugin::DType;
use mlxcel_registry::checkpoint::testing::{SafetensorsBuilder, TempCheckpoint};
use mlxcel_tests::plugins::Healthy;
use mlxcel_tests::tiny::{collect, nothing_kept, open_path, options, request, tokens};
use serde_json::json;

const VOCAB: usize = 64;
const HIDDEN: usize = 16;
const WIDTH: usize = 6;
const STRIDE: usize = 2;
const MAX_ROWS: usize = 150;

/// A number between -1 and 1, the same for the same place.
fn noise(seed: usize, at: usize) -> f32 {
    let mut word = (seed as u64) << 32 | at as u64;
    for _ in 0..3 {
        word = (word ^ (word >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    (word >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn matrix(seed: usize, rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|at| noise(seed, at)).collect()
}

/// Weights of the model by name, `[outputs, inputs]`.
struct Weights {
    embedding: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    head: Vec<f32>,
}

impl Weights {
    fn new() -> Self {
        Self {
            embedding: matrix(1, VOCAB, HIDDEN),
            keys: matrix(2, HIDDEN, WIDTH),
            values: matrix(3, HIDDEN, WIDTH),
            head: matrix(4, VOCAB, HIDDEN),
        }
    }

    fn checkpoint(&self) -> TempCheckpoint {
        let file = SafetensorsBuilder::new()
            .f32("embedding.weight", &[VOCAB, HIDDEN], &self.embedding)
            .f32("keys.weight", &[HIDDEN, WIDTH], &self.keys)
            .f32("values.weight", &[HIDDEN, WIDTH], &self.values)
            .f32("head.weight", &[VOCAB, HIDDEN], &self.head);
        TempCheckpoint::new()
            .json(
                "config.json",
                &json!({
                    "model_type": "test_encoder", "vocab_size": VOCAB, "hidden_size": HIDDEN,
                    "feature_width": WIDTH, "max_rows": MAX_ROWS, "stride": STRIDE, "fail_from": 1000.0
                }),
            )
            .file("model.safetensors", &file.build())
    }

    /// `[rows, outputs]` of a product with a weight `[outputs, inputs]`.
    fn product(x: &[Vec<f64>], weight: &[f32]) -> Vec<Vec<f64>> {
        let of_row = |row: &Vec<f64>| {
            let outputs = weight.chunks(row.len());
            outputs
                .map(|w| w.iter().zip(row).map(|(w, x)| f64::from(*w) * x).sum())
                .collect()
        };
        x.iter().map(of_row).collect()
    }

    /// Logits after the last of `tokens`, beside features, in float64.
    fn logits(&self, tokens: &[u32], features: &[f32]) -> Vec<f64> {
        let groups = features.chunks(WIDTH * STRIDE).map(|group| {
            let column = |c: usize| group.iter().skip(c).step_by(WIDTH).map(|v| f64::from(*v));
            (0..WIDTH).map(|c| column(c).sum()).collect::<Vec<f64>>()
        });
        let groups: Vec<Vec<f64>> = groups.collect();
        let (keys, values) = (
            Self::product(&groups, &self.keys),
            Self::product(&groups, &self.values),
        );
        let embed = |token: &u32| {
            let row = self.embedding.chunks(HIDDEN).nth(*token as usize).unwrap();
            row.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>()
        };
        let own: Vec<Vec<f64>> = tokens.iter().map(embed).collect();
        // One block of each kind: only the last row is needed.
        let turned = own.iter().enumerate().map(|(at, row)| rotated(row, at));
        let turned: Vec<Vec<f64>> = turned.collect();
        let (x, q) = (own.last().unwrap(), turned.last().unwrap());
        let x = add(x, &attend(q, &turned, &own));
        let x = add(&x, &attend(&x, &keys, &values));
        Self::product(&[x], &self.head).remove(0)
    }

    fn greedy(&self, prompt: &[u32], features: &[f32], count: usize) -> Vec<u32> {
        let mut all = prompt.to_vec();
        for _ in 0..count {
            let logits = self.logits(&all, features);
            let best = (0..VOCAB).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
            all.push(best.unwrap() as u32);
        }
        all.split_off(prompt.len())
    }
}

/// Rotary embedding in halves, base 10,000.
fn rotated(row: &[f64], position: usize) -> Vec<f64> {
    let half = HIDDEN / 2;
    let turn = |i: usize| {
        let pair = i % half;
        let angle = position as f64 / 10_000_f64.powf(pair as f64 / half as f64);
        let (sin, cos) = angle.sin_cos();
        match i < half {
            true => row[pair] * cos - row[pair + half] * sin,
            false => row[pair] * sin + row[pair + half] * cos,
        }
    };
    (0..HIDDEN).map(turn).collect()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn attend(q: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>]) -> Vec<f64> {
    let scores: Vec<f64> = keys
        .iter()
        .map(|k| k.iter().zip(q).map(|(k, q)| k * q).sum())
        .collect();
    let most = scores.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
    let total: f64 = weights.iter().sum();
    let column = |c: usize| {
        let parts = weights.iter().zip(values).map(|(w, v)| w * v[c]);
        parts.sum::<f64>() / total
    };
    (0..HIDDEN).map(column).collect()
}

/// Options with caches in which nothing is rounded.
fn in_f32(parallel: usize) -> LoadOptions {
    LoadOptions {
        kv_types: KvTypes::both(DType::F32),
        ..options(parallel)
    }
}

fn engine(checkpoint: &Path, options: LoadOptions) -> EngineHandle {
    let plugins = tempfile::tempdir().unwrap();
    let file = Healthy::Encoder.copy_to(plugins.path()).unwrap();
    let (opened, backend) = open_path(checkpoint, &[file]);
    start_engine(opened, backend, options, |_, _| {}).unwrap().0
}

/// Figures after the step that ended the last request.
fn settled(engine: &EngineHandle) -> EngineFigures {
    engine.clear_prefix_cache().unwrap();
    engine.figures()
}

fn with_features(prompt: &[u32], features: &[f32], count: usize) -> GenerateRequest {
    GenerateRequest {
        features: Some(Features::new(WIDTH, features.to_vec()).unwrap()),
        ..request(prompt, count)
    }
}

fn features(rows: usize, seed: usize) -> Vec<f32> {
    matrix(100 + seed, rows, WIDTH)
}

/// Prompts, features and lengths of answers: short and long ones of both, odd numbers of rows, equal prompts beside
/// other features, and equal features beside other prompts.
fn requests() -> Vec<(Vec<u32>, Vec<f32>, usize)> {
    let rows = [1, 2, 63, 64, 65, 7, 150, 150, 33, 2];
    let lengths = [3, 40, 1, 9, 70, 9, 9, 33, 64, 9];
    let each = rows.into_iter().zip(lengths).enumerate();
    each.map(|(i, (rows, length))| {
        let seed = if length == 9 { 0 } else { i };
        (tokens(length, seed), features(rows, rows % 7), 8 + i)
    })
    .collect()
}

fn failure(engine: &EngineHandle, request: GenerateRequest) -> EngineError {
    let stream = engine.generate(request, CancelToken::default()).unwrap();
    for event in stream {
        match event {
            Event::Failed(error) => return error,
            Event::Done { .. } => panic!("the request was served"),
            _ => {}
        }
    }
    panic!("a stream ended without an end")
}

/// Asks everything at once, then one after the other with what the cache has of the same prompts and features.
fn ask_all(
    checkpoint: &Path,
    parallel: usize,
    kv_type: DType,
    lookahead: Lookahead,
) -> [Vec<Vec<u32>>; 2] {
    let options = LoadOptions {
        kv_types: KvTypes::both(kv_type),
        lookahead,
        ..options(parallel)
    };
    let engine = engine(checkpoint, options);
    let all = requests().into_iter();
    let all: Vec<_> = all
        .map(|(prompt, features, count)| with_features(&prompt, &features, count))
        .collect();
    let begin = |request: &GenerateRequest| {
        engine
            .generate(request.clone(), CancelToken::default())
            .unwrap()
    };
    let streams: Vec<_> = all.iter().map(begin).collect();
    let together = streams.into_iter().map(|stream| collect(stream).0);
    let together = together.collect();
    let again = all.iter().map(|request| collect(begin(request)).0);
    let again = again.collect();
    assert_eq!(settled(&engine).encoder_pages_in_use, 0);
    [together, again]
}

#[test]
fn answers_are_those_of_a_float64_forward_alone_and_in_a_batch() {
    let weights = Weights::new();
    let checkpoint = weights.checkpoint();
    let exact: Vec<Vec<u32>> = requests()
        .iter()
        .map(|(prompt, features, count)| weights.greedy(prompt, features, *count))
        .collect();
    let path = checkpoint.path();
    for lookahead in [Lookahead::Off, Lookahead::On] {
        for parallel in [1, 4, 16] {
            for answers in ask_all(path, parallel, DType::F32, lookahead) {
                assert_eq!(answers, exact, "{parallel} at a time, {lookahead:?}");
            }
        }
    }
    let [alone, again] = ask_all(path, 1, DType::F16, Lookahead::Off);
    assert_eq!(alone, again);
    for answers in ask_all(path, 4, DType::F16, Lookahead::Off) {
        assert_eq!(answers, alone);
    }
}

#[test]
fn a_request_that_steps_back_runs_its_encoder_again() {
    let weights = Weights::new();
    let checkpoint = weights.checkpoint();
    // Keys and values of 2 layers in f32, and pages for the encoders of 8 requests: what is left holds few requests.
    let position = 2 * 2 * HIDDEN * 4;
    let encoders = 8 * 75_usize.next_multiple_of(32) * position / 2;
    let engine = engine(
        checkpoint.path(),
        LoadOptions {
            kv_budget_bytes: Some((encoders + 200 * position / 2) as u64),
            prefix: nothing_kept(),
            ..in_f32(8)
        },
    );
    let all = requests();
    let streams: Vec<_> = all
        .iter()
        .map(|(prompt, features, count)| {
            let request = with_features(prompt, features, count + 20);
            engine.generate(request, CancelToken::default()).unwrap()
        })
        .collect();
    for (stream, (prompt, features, count)) in streams.into_iter().zip(&all) {
        let expected = weights.greedy(prompt, features, count + 20);
        assert_eq!(collect(stream).0, expected);
    }
    let figures = settled(&engine);
    assert!(figures.preemptions > 0, "{figures:?}");
    assert_eq!((figures.encoder_pages_in_use, figures.pages_in_use), (0, 0));
}

#[test]
fn cancelled_requests_give_their_pages_back() {
    let weights = Weights::new();
    let checkpoint = weights.checkpoint();
    let engine = engine(checkpoint.path(), in_f32(4));
    let all = requests();
    let (prompt, own, count) = &all[6];
    for round in 0..6 {
        let cancel = CancelToken::default();
        let request = with_features(&tokens(20, round), &features(150, round), 200);
        let mut ended_early = engine.generate(request, cancel.clone()).unwrap();
        let beside = engine
            .generate(with_features(prompt, own, *count), CancelToken::default())
            .unwrap();
        for _ in 0..round {
            ended_early.next();
        }
        cancel.cancel();
        ended_early.by_ref().for_each(drop);
        assert_eq!(collect(beside).0, weights.greedy(prompt, own, *count));
    }
    assert_eq!(settled(&engine).encoder_pages_in_use, 0);
}

#[test]
fn features_that_do_not_fit_are_refused_and_failing_encoders_fail_alone() {
    let weights = Weights::new();
    let checkpoint = weights.checkpoint();
    let engine = engine(checkpoint.path(), in_f32(4));
    insta::assert_snapshot!(failure(&engine, request(&[1, 2], 4)), @"test_encoder reads features with its encoder and the request has none");
    let long = with_features(&[1, 2], &features(151, 0), 4);
    insta::assert_snapshot!(failure(&engine, long), @"the encoder of test_encoder reads up to 150 rows of 6 values, the request has 151 of 6");
    let wide = GenerateRequest {
        features: Features::new(7, vec![0.0; 14]),
        ..request(&[1, 2], 4)
    };
    insta::assert_snapshot!(failure(&engine, wide), @"the encoder of test_encoder reads up to 150 rows of 6 values, the request has 2 of 7");
    let (prompt, own, count) = &requests()[3];
    let beside = engine
        .generate(with_features(prompt, own, *count), CancelToken::default())
        .unwrap();
    let mut failing = features(20, 0);
    failing[0] = 2000.0;
    let error = failure(&engine, with_features(&[1, 2], &failing, 4));
    insta::assert_snapshot!(error, @"family encoder: encode: the encoder fails as told");
    assert_eq!(collect(beside).0, weights.greedy(prompt, own, *count));
    assert!(engine.score(vec![1, 2]).is_err());
    assert_eq!(settled(&engine).encoder_pages_in_use, 0);
}

#[test]
fn models_without_an_encoder_refuse_features() {
    let engine = mlxcel_tests::tiny::start(("llama", "arcee"), options(1)).unwrap();
    let error = failure(&engine, with_features(&[5, 6], &features(2, 0), 4));
    insta::assert_snapshot!(error, @"arcee has no encoder, and the request brings features for one");
}
