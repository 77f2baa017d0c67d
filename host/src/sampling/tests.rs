//! The chain as a whole: distributions, determinism, errors.

use proptest::prelude::*;

use super::*;

fn chain(params: SamplingParams) -> Chain {
    let seed = params.seed.unwrap_or(1);
    Chain::new(params, seed).unwrap()
}

/// Pearson's statistic of `draws` steps against `expected` probabilities; tokens are counted per `bucket`.
fn chi_square(
    params: SamplingParams,
    logits: &[f32],
    expected: &[f64],
    bucket: impl Fn(u32) -> usize,
    draws: u64,
) -> f64 {
    let mut chain = chain(params);
    let mut counts = vec![0u64; expected.len()];
    for step in 0..draws {
        counts[bucket(chain.choose(logits, &[], step).unwrap().token)] += 1;
    }
    counts
        .iter()
        .zip(expected)
        .map(|(&count, &p)| {
            let mean = p * draws as f64;
            if mean == 0.0 {
                if count == 0 { 0.0 } else { f64::INFINITY }
            } else {
                (count as f64 - mean).powi(2) / mean
            }
        })
        .sum()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

const LOGITS: [f32; 6] = [1.0, 2.0, 0.5, -1.0, 2.5, 0.0];

fn open(temperature: f32) -> SamplingParams {
    SamplingParams {
        temperature,
        seed: Some(42),
        ..SamplingParams::cli()
    }
}

#[test]
fn draws_follow_the_tempered_softmax() {
    for temperature in [0.5, 1.0, 1.7] {
        let expected = softmax(&LOGITS.map(|logit| f64::from(logit) / f64::from(temperature)));
        let statistic = chi_square(
            open(temperature),
            &LOGITS,
            &expected,
            |token| token as usize,
            20_000,
        );
        // 5 degrees of freedom: 20.5 has probability 0.001. The seed is fixed.
        assert!(statistic < 20.5, "temperature {temperature}: {statistic}");
    }
}

#[test]
fn filters_look_at_the_distribution_without_temperature() {
    // At temperature 1 the two best have 0.77 of the probability; at 5 they would have 0.43 and top-p 0.7 would keep four.
    let params = SamplingParams {
        top_p: 0.7,
        ..open(5.0)
    };
    let two = softmax(&[2.0 / 5.0, 2.5 / 5.0]);
    let expected = [0.0, two[0], 0.0, 0.0, two[1], 0.0];
    let statistic = chi_square(params, &LOGITS, &expected, |token| token as usize, 20_000);
    assert!(statistic < 10.8, "{statistic}");
}

#[test]
fn a_large_vocabulary_is_drawn_exactly() {
    const VOCAB: usize = 151_936;
    // Logits that differ in eight classes spread over the ids; the place inside a class is uniform.
    let logits: Vec<f32> = (0..VOCAB).map(|id| (id % 8) as f32 * 0.5).collect();
    let class = softmax(&[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]);
    let expected: Vec<f64> = (0..16).map(|cell| class[cell % 8] / 2.0).collect();
    let cell = |token: u32| token as usize % 8 + 8 * usize::from(token as usize >= VOCAB / 2);
    let statistic = chi_square(open(1.0), &logits, &expected, cell, 256);
    // 15 degrees of freedom: 37.7 has probability 0.001.
    assert!(statistic < 37.7, "{statistic}");
}

#[test]
fn a_result_depends_on_seed_and_step_alone() {
    let mut one = chain(open(1.0));
    let mut other = chain(open(1.0));
    let tokens: Vec<u32> = (0..64)
        .map(|step| one.choose(&LOGITS, &[], step).unwrap().token)
        .collect();
    // In another order, with other rows in between.
    for step in (0..64).rev() {
        other.choose(&[0.0; 6], &[1], 7).unwrap();
        assert_eq!(
            other.choose(&LOGITS, &[], step).unwrap().token,
            tokens[step as usize]
        );
    }
    let mut seeded = chain(SamplingParams {
        seed: Some(43),
        ..open(1.0)
    });
    assert!(
        (0..64)
            .any(|step| seeded.choose(&LOGITS, &[], step).unwrap().token != tokens[step as usize])
    );
}

#[test]
fn greedy_takes_the_lowest_id_of_the_largest() {
    let token = |logits: &[f32], params: SamplingParams, history: &[u32]| {
        chain(params).choose(logits, history, 0).unwrap().token
    };
    assert_eq!(token(&[1.0, 3.0, 3.0], SamplingParams::cli(), &[]), 1);
    assert_eq!(
        token(
            &[f32::NEG_INFINITY, -9e9, f32::NEG_INFINITY],
            SamplingParams::cli(),
            &[]
        ),
        1
    );
    let penalty = SamplingParams {
        repetition_penalty: 1.5,
        ..SamplingParams::cli()
    };
    assert_eq!(token(&[1.0, 3.0, 2.5], penalty, &[1]), 2);
    let mut forbidden = SamplingParams::cli();
    forbidden.forbid([1, 2]);
    assert_eq!(token(&[1.0, 3.0, 3.0], forbidden, &[]), 0);
    let bias = SamplingParams {
        logit_bias: vec![LogitBias {
            token: 0,
            bias: 5.0,
        }],
        ..SamplingParams::cli()
    };
    assert_eq!(token(&[1.0, 3.0, 3.0], bias, &[]), 0);
}

#[test]
fn a_very_small_temperature_is_greedy_in_effect() {
    let mut chain = chain(open(f32::MIN_POSITIVE));
    for step in 0..50 {
        assert_eq!(chain.choose(&LOGITS, &[], step).unwrap().token, 4);
    }
}

#[test]
fn bad_logits_name_the_step() {
    let mut chain = chain(open(1.0));
    let mut message =
        |logits: &[f32], step| chain.choose(logits, &[], step).unwrap_err().to_string();
    insta::assert_snapshot!(
        [
            message(&[0.0, f32::NAN, 0.0], 3),
            message(&[0.0, 0.0, f32::INFINITY], 4),
            message(&[f32::NEG_INFINITY; 3], 5),
        ]
        .join("\n"),
        @r"
    step 3: the logit of token 1 is NaN, expected a number (numeric overflow in the model?)
    step 4: the logit of token 2 is inf, expected a number (numeric overflow in the model?)
    step 5: no token can be chosen, all 3 logits are -infinity
    "
    );
}

#[test]
fn logprobs_of_both_stages() {
    let with = |stage, temperature| SamplingParams {
        logprobs: Some(LogprobsRequest { top: 2, stage }),
        top_k: 3,
        ..open(temperature)
    };
    let run = |params| chain(params).choose(&LOGITS, &[], 0).unwrap();
    let model = softmax(&LOGITS.map(f64::from));
    let sample = run(with(LogprobStage::Model, 0.0));
    let found = sample.logprobs.unwrap();
    assert_eq!(sample.token, 4);
    assert!((f64::from(found.token) - model[4].ln()).abs() < 1e-6);
    assert_eq!(
        found
            .top
            .iter()
            .map(|(token, _)| *token)
            .collect::<Vec<_>>(),
        [4, 1]
    );
    assert!((f64::from(found.top[1].1) - model[1].ln()).abs() < 1e-6);

    let sample = run(with(LogprobStage::Drawn, 2.0));
    let three = softmax(&[1.25, 1.0, 0.5]);
    let found = sample.logprobs.unwrap();
    assert!((f64::from(found.top[0].1) - three[0].ln()).abs() < 1e-6);
    assert!((f64::from(found.top[1].1) - three[1].ln()).abs() < 1e-6);
    let greedy = run(with(LogprobStage::Drawn, 0.0)).logprobs.unwrap();
    assert_eq!((greedy.token, greedy.top), (0.0, vec![(4, 0.0)]));
}

#[test]
fn a_sampler_counts_steps_and_remembers_ids() {
    let params = SamplingParams {
        frequency_penalty: 0.4,
        ..SamplingParams::cli()
    };
    let mut sampler = Sampler::new(&params, &[4]).unwrap();
    let tokens: Vec<u32> = (0..4)
        .map(|_| sampler.sample(&LOGITS).unwrap().token)
        .collect();
    // 2.5 - 0.4 beats 2.0 once, then the two take turns.
    assert_eq!(tokens, [4, 1, 4, 1]);
    let mut first = Sampler::new(&open(1.0), &[]).unwrap();
    let mut plain = chain(open(1.0));
    for step in 0..20 {
        assert_eq!(
            first.sample(&LOGITS).unwrap(),
            plain.choose(&LOGITS, &[], step).unwrap()
        );
    }
    let unseeded = SamplingParams {
        seed: None,
        ..open(1.0)
    };
    assert_ne!(
        Sampler::new(&unseeded, &[]).unwrap().seed(),
        Sampler::new(&unseeded, &[]).unwrap().seed()
    );
    let bias = SamplingParams {
        logit_bias: vec![LogitBias {
            token: 6,
            bias: 1.0,
        }],
        ..SamplingParams::cli()
    };
    let error = Sampler::new(&bias, &[])
        .unwrap()
        .sample(&LOGITS)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "logit_bias names token 6, the vocabulary has 6 tokens"
    );
    assert!(
        Sampler::new(
            &SamplingParams {
                top_p: 2.0,
                ..SamplingParams::cli()
            },
            &[]
        )
        .is_err()
    );
}

proptest! {
    #[test]
    fn the_token_is_always_one_that_may_be_drawn(
        logits in prop::collection::vec(prop_oneof![8 => -30.0f32..30.0, 1 => Just(f32::NEG_INFINITY)], 1..200),
        temperature in 0.0f32..3.0, top_k in 0u32..20, top_p in 0.0f32..=1.0, min_p in 0.0f32..=1.0,
        history in prop::collection::vec(0u32..250, 0..20), seed in any::<u64>(), step in any::<u64>(),
    ) {
        let params = SamplingParams {
            temperature, top_k, top_p, min_p, seed: Some(seed), repetition_penalty: 1.3, presence_penalty: 0.5,
            ..SamplingParams::cli()
        };
        match chain(params).choose(&logits, &history, step) {
            Ok(sample) => prop_assert!(logits[sample.token as usize] > f32::NEG_INFINITY),
            Err(error) => prop_assert!(matches!(error, SamplingError::NoToken { .. }), "{error}"),
        }
    }
}
