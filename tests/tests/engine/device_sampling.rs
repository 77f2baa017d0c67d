//! Tokens that a device chooses are those that the host's own sampler chooses, and follow the distribution that was
//! asked for. With the cpu plugin.

use mlxcel::plugin::{
    Backend, BackendChoice, DType, DeviceTensor, Loader, NO_TOKEN, OpenOptions, SampleArgs,
};
use mlxcel::sampling::{RowDraw, Sampler, SamplingParams};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};

/// That of Qwen 2.5.
const LARGE_VOCABULARY: usize = 151_936;

fn backend() -> Backend {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR");
    let dir =
        dir.expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let choice = BackendChoice::Named("cpu".to_owned());
    let selected = Loader::default()
        .select_backend(&catalogue, &choice)
        .unwrap();
    selected.plugin.open(&OpenOptions::default()).unwrap()
}

/// Logits with a long tail, and some that are equal.
fn logits(row: usize, vocabulary: usize) -> Vec<f32> {
    let mut word = row as u64 + 1;
    let mut next = || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        (word >> 40) as f32 / 16_777_216.0
    };
    (0..vocabulary)
        .map(|_| {
            let bell: f32 = (0..4).map(|_| next()).sum::<f32>() - 2.0;
            (bell * 24.0).round() / 4.0
        })
        .collect()
}

fn upload(backend: &Backend, rows: &[Vec<f32>]) -> DeviceTensor {
    let bytes: Vec<u8> = rows
        .iter()
        .flatten()
        .flat_map(|logit| logit.to_ne_bytes())
        .collect();
    let shape = [rows.len() as i64, rows[0].len() as i64];
    backend.from_host(&bytes, DType::F32, &shape).unwrap()
}

fn sample(backend: &Backend, logits: &DeviceTensor, draws: &[RowDraw]) -> Vec<u32> {
    let column = |dtype, word: fn(&RowDraw) -> [u8; 4]| {
        let bytes: Vec<u8> = draws.iter().flat_map(word).collect();
        backend
            .from_host(&bytes, dtype, &[draws.len() as i64])
            .unwrap()
    };
    let top_k = column(DType::I32, |draw| (draw.top_k as i32).to_ne_bytes());
    let top_p = column(DType::F32, |draw| draw.top_p.to_ne_bytes());
    let min_p = column(DType::F32, |draw| draw.min_p.to_ne_bytes());
    let temperature = column(DType::F32, |draw| draw.temperature.to_ne_bytes());
    let uniform = column(DType::F32, |draw| draw.uniform.to_ne_bytes());
    let args = SampleArgs {
        logits: logits.handle(),
        top_k: top_k.handle(),
        top_p: top_p.handle(),
        min_p: min_p.handle(),
        temperature: temperature.handle(),
        uniform: uniform.handle(),
        ..SampleArgs::default()
    };
    backend.read_u32(&backend.sample(args).unwrap()).unwrap()
}

/// Requests of every kind that a device takes.
fn params(seed: usize) -> SamplingParams {
    let base = SamplingParams {
        seed: Some(seed as u64),
        ..SamplingParams::server()
    };
    match seed % 5 {
        0 => base,
        1 => SamplingParams {
            temperature: 0.0,
            ..base
        },
        2 => SamplingParams {
            top_k: 256,
            top_p: 1.0,
            min_p: 0.0,
            temperature: 1.0,
            ..base
        },
        3 => SamplingParams {
            top_k: 3,
            top_p: 0.7,
            temperature: 5.0,
            ..base
        },
        _ => SamplingParams {
            min_p: 0.4,
            temperature: 0.3,
            ..base
        },
    }
}

/// Draws on both sides, `rows` at a time.
fn both_sides_agree(backend: &Backend, vocabulary: usize, rows: usize, rounds: usize) {
    let all: Vec<Vec<f32>> = (0..rows).map(|row| logits(row, vocabulary)).collect();
    let device = upload(backend, &all);
    let mut samplers: Vec<Sampler> = (0..rows)
        .map(|row| Sampler::new(&params(row), &[]).unwrap())
        .collect();
    for round in 0..rounds {
        let draws: Vec<RowDraw> = samplers.iter().map(|s| s.row_draw(0).unwrap()).collect();
        let tokens = sample(backend, &device, &draws);
        for (row, token) in tokens.into_iter().enumerate() {
            let own = samplers[row].sample(&all[row]).unwrap().token;
            assert_eq!(token, own, "round {round}: {:?}", draws[row]);
        }
    }
}

#[test]
fn ten_thousand_draws_equal_the_hosts() {
    both_sides_agree(&backend(), 4096, 20, 500);
}

#[test]
fn draws_from_a_large_vocabulary_equal_the_hosts() {
    both_sides_agree(&backend(), LARGE_VOCABULARY, 10, 20);
}

/// Tokens and probabilities that the server's defaults leave, in float64.
fn distribution(logits: &[f32]) -> Vec<(u32, f64)> {
    let mut ranked: Vec<(f64, u32)> = logits.iter().map(|l| f64::from(*l)).zip(0..).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    ranked.truncate(40);
    let max = ranked[0].0;
    let total: f64 = ranked.iter().map(|(l, _)| (l - max).exp()).sum();
    let mut sum = 0.0;
    let kept = ranked
        .iter()
        .take_while(|(l, _)| {
            let is_in = sum < f64::from(0.95_f32) * total;
            sum += (l - max).exp();
            is_in
        })
        .count();
    ranked.truncate(kept);
    ranked.retain(|(l, _)| *l >= max + f64::from(0.05_f32).ln());
    let weight = |l: f64| ((l - max) / f64::from(0.8_f32)).exp();
    let total: f64 = ranked.iter().map(|(l, _)| weight(*l)).sum();
    let p = ranked.iter().map(|(l, token)| (*token, weight(*l) / total));
    p.collect()
}

#[test]
fn draws_from_a_large_vocabulary_follow_the_distribution() {
    const ROWS: usize = 32;
    const ROUNDS: usize = 32;
    let backend = backend();
    let row = logits(3, LARGE_VOCABULARY);
    let expected = distribution(&row);
    assert!(expected.len() > 10, "{expected:?}");
    let device = upload(&backend, &vec![row; ROWS]);
    let mut samplers: Vec<Sampler> = (0..ROWS)
        .map(|row| {
            let params = SamplingParams {
                seed: Some(row as u64),
                ..SamplingParams::server()
            };
            Sampler::new(&params, &[]).unwrap()
        })
        .collect();
    let mut counts = vec![0.0; expected.len()];
    for _ in 0..ROUNDS {
        let draws: Vec<RowDraw> = samplers.iter().map(|s| s.row_draw(0).unwrap()).collect();
        for (token, sampler) in sample(&backend, &device, &draws)
            .into_iter()
            .zip(&mut samplers)
        {
            sampler.accept(token);
            let place = expected.iter().position(|(known, _)| *known == token);
            counts[place.expect("a token that is left")] += 1.0;
        }
    }
    let n = (ROWS * ROUNDS) as f64;
    let terms = counts.iter().zip(&expected);
    let chi_square: f64 = terms
        .map(|(count, (_, p))| (count - p * n).powi(2) / (p * n))
        .sum();
    // Mean and three standard deviations of the distribution that a right sampler has.
    let freedom = (expected.len() - 1) as f64;
    let most = freedom + 3.0 * (2.0 * freedom).sqrt();
    assert!(
        chi_square < most,
        "{chi_square} with {freedom} degrees of freedom"
    );
}

#[test]
fn a_row_without_a_token_says_so_and_its_neighbours_do_not() {
    let backend = backend();
    let mut rows: Vec<Vec<f32>> = (0..4).map(|row| logits(row, 300)).collect();
    rows[1][200] = f32::NAN;
    rows[2].fill(f32::NEG_INFINITY);
    let device = upload(&backend, &rows);
    let draws = vec![RowDraw::GREEDY; 4];
    let tokens = sample(&backend, &device, &draws);
    let is_none: Vec<bool> = tokens.iter().map(|token| *token == NO_TOKEN).collect();
    assert_eq!(is_none, [false, true, true, false]);
}
