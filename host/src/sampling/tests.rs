//! The chain as a whole: distributions, determinism, errors.

use proptest::prelude::*;

use super::*;

fn sampler(params: SamplingParams) -> Sampler {
    let seed = params.seed.or(Some(1));
    Sampler::new(&SamplingParams { seed, ..params }, &[]).unwrap()
}

/// Pearson's statistic of `draws` steps against `expected` probabilities; tokens are counted per `bucket`.
fn chi_square(
    params: SamplingParams,
    logits: &[f32],
    expected: &[f64],
    bucket: impl Fn(u32) -> usize,
    draws: u64,
) -> f64 {
    let mut sampler = sampler(params);
    let mut counts = vec![0u64; expected.len()];
    for _ in 0..draws {
        counts[bucket(sampler.sample(logits).unwrap().token)] += 1;
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
    // Logits that differ in four classes spread over the ids; the place inside a class is uniform.
    let logits: Vec<f32> = (0..VOCAB).map(|id| (id % 4) as f32 * 0.5).collect();
    let class = softmax(&[0.0, 0.5, 1.0, 1.5]);
    let expected: Vec<f64> = (0..8).map(|cell| class[cell % 4] / 2.0).collect();
    let cell = |token: u32| token as usize % 4 + 4 * usize::from(token as usize >= VOCAB / 2);
    let statistic = chi_square(open(1.0), &logits, &expected, cell, 100);
    // 7 degrees of freedom: 24.3 has probability 0.001.
    assert!(statistic < 24.3, "{statistic}");
}

#[test]
fn a_result_depends_on_seed_and_step_alone() {
    let mut one = sampler(open(1.0));
    let mut other = sampler(open(1.0));
    let tokens: Vec<u32> = (0..64)
        .map(|_| one.sample(&LOGITS).unwrap().token)
        .collect();
    // In another order, with other rows in between.
    for step in (0..64).rev() {
        other.at(7).sample(&[0.0; 6]).unwrap();
        assert_eq!(
            other.at(step).sample(&LOGITS).unwrap().token,
            tokens[step as usize]
        );
    }
    let mut seeded = sampler(SamplingParams {
        seed: Some(43),
        ..open(1.0)
    });
    assert!(
        tokens
            .iter()
            .any(|token| seeded.sample(&LOGITS).unwrap().token != *token)
    );
}

#[test]
fn greedy_takes_the_lowest_id_of_the_largest() {
    let token = |logits: &[f32], params: SamplingParams, prompt: &[u32]| {
        let mut sampler = Sampler::new(&params, prompt).unwrap();
        sampler.sample(logits).unwrap().token
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
    let mut sampler = sampler(open(f32::MIN_POSITIVE));
    for _ in 0..50 {
        assert_eq!(sampler.sample(&LOGITS).unwrap().token, 4);
    }
}

#[test]
fn bad_logits_name_the_step() {
    let mut sampler = sampler(open(1.0));
    let mut message =
        |logits: &[f32], step| sampler.at(step).sample(logits).unwrap_err().to_string();
    insta::assert_snapshot!(
        [
            message(&[0.0, f32::NAN, 0.0], 3),
            message(&[0.0, 0.0, f32::INFINITY], 4),
            message(&[f32::NEG_INFINITY; 3], 5),
        ]
        .join("\n"),
        @r"
    step 3: the logit of token 1 is NaN, expected a number (numeric overflow in the model? --cache-type-k f32 --cache-type-v f32 rules out that of half caches, `mlxcel inspect --check-values` damaged weights)
    step 4: the logit of token 2 is inf, expected a number (numeric overflow in the model? --cache-type-k f32 --cache-type-v f32 rules out that of half caches, `mlxcel inspect --check-values` damaged weights)
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
    let run = |params| sampler(params).sample(&LOGITS).unwrap();
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

#[test]
fn mirostat_holds_the_surprise() {
    // Zipf's distribution over 5,000 tokens; its own entropy is 8.9 bits.
    let logits: Vec<f32> = (1..=5000).map(|rank| -(rank as f32).ln()).collect();
    let total: f64 = (1..=5000).map(|rank| 1.0 / f64::from(rank)).sum();
    for mirostat in [Mirostat::V1, Mirostat::V2] {
        for tau in [3.0, 6.0] {
            let params = SamplingParams {
                mirostat,
                mirostat_tau: tau,
                temperature: 1.0,
                logprobs: Some(LogprobsRequest {
                    top: 0,
                    stage: LogprobStage::Drawn,
                }),
                ..open(1.0)
            };
            let mut sampler = sampler(params);
            let mut surprise = 0.0;
            for step in 0..1200 {
                let sample = sampler.sample(&logits).unwrap();
                let p = f64::from(sample.logprobs.unwrap().token);
                if step >= 200 {
                    surprise += -p / std::f64::consts::LN_2;
                }
            }
            let mean = surprise / 1000.0;
            assert!(
                (mean - f64::from(tau)).abs() < 0.2,
                "{mirostat:?} {tau}: {mean} of {total}"
            );
        }
    }
}

#[test]
fn adaptive_p_holds_the_probability() {
    let logits: Vec<f32> = [0.4f32, 0.25, 0.15, 0.1, 0.06, 0.04].map(f32::ln).to_vec();
    for target in [0.1, 0.3] {
        let mut sampler = sampler(SamplingParams {
            adaptive_target: target,
            ..open(1.0)
        });
        let mut sum = 0.0;
        for _ in 0..3000 {
            sum += f64::from(logits[sampler.sample(&logits).unwrap().token as usize]).exp();
        }
        let mean = sum / 3000.0;
        assert!((mean - f64::from(target)).abs() < 0.02, "{target}: {mean}");
    }
}

#[test]
fn xtc_happens_as_often_as_asked() {
    let params = SamplingParams {
        xtc_probability: 0.25,
        xtc_threshold: 0.2,
        ..open(1.0)
    };
    // 0.5, 0.3 and 0.2 or more: 1 and 4 are good, the last good one stays.
    let p = softmax(&LOGITS.map(f64::from));
    let good: Vec<usize> = (0..6).filter(|id| p[*id] >= 0.2).collect();
    assert_eq!(good, [1, 4]);
    let rest = 1.0 - p[4];
    let expected: Vec<f64> = (0..6)
        .map(|id| 0.75 * p[id] + if id == 4 { 0.0 } else { 0.25 * p[id] / rest })
        .collect();
    let statistic = chi_square(params, &LOGITS, &expected, |token| token as usize, 20_000);
    assert!(statistic < 20.5, "{statistic}");
}

#[test]
fn the_order_decides_what_filters_see() {
    let of = |samplers: &str| SamplingParams {
        samplers: samplers.parse().unwrap(),
        top_p: 0.7,
        repetition_penalty: 1.5,
        ..open(5.0)
    };
    let drawn = |params: SamplingParams| {
        let sampler = Sampler::new(&params, &[4]).unwrap();
        let mut seen = [false; 6];
        for step in 0..2000 {
            seen[sampler.clone().at(step).sample(&LOGITS).unwrap().token as usize] = true;
        }
        seen.iter().filter(|seen| **seen).count()
    };
    // See `filters_look_at_the_distribution_without_temperature`: two tokens, or four of a flatter distribution.
    assert_eq!(drawn(of("pt")), 2);
    assert_eq!(drawn(of("tp")), 4);
    // 4 falls behind 1 when it is punished first, and the two have less of the probability.
    assert_eq!(drawn(of("ep")), 3);
    assert_eq!(drawn(of("")), 6);
}

#[test]
fn without_temperature_in_the_order_none_is_applied() {
    let params = SamplingParams {
        samplers: "k".parse().unwrap(),
        top_k: 2,
        ..open(0.0)
    };
    let two = softmax(&[2.0, 2.5]);
    let expected = [0.0, two[0], 0.0, 0.0, two[1], 0.0];
    let statistic = chi_square(params, &LOGITS, &expected, |token| token as usize, 20_000);
    assert!(statistic < 10.8, "{statistic}");
}

#[test]
fn greedy_among_what_xtc_and_typical_leave() {
    let token = |params| sampler(params).sample(&LOGITS).unwrap().token;
    let xtc = SamplingParams {
        xtc_probability: 1.0,
        ..open(0.0)
    };
    // At least 0.1 have 0, 1 and 4.
    assert_eq!(token(xtc), 0);
    let typical = SamplingParams {
        typical_p: 0.1,
        ..open(0.0)
    };
    assert_eq!(token(typical), 1);
}

#[test]
fn dry_needs_its_breakers_and_ends_a_loop() {
    let mut params = SamplingParams {
        dry_multiplier: 2.0,
        dry_penalty_last_n: -1,
        ..SamplingParams::cli()
    };
    assert_eq!(
        Sampler::new(&params, &[]).unwrap_err().to_string(),
        "dry_sequence_breakers were not turned into tokens"
    );
    params.dry_sequence_breakers.resolve(Default::default());
    // 1 2 was followed by 4, the best token: 3.5 below it is no longer.
    let run = |params: &SamplingParams, prompt: &[u32]| {
        let mut sampler = Sampler::new(params, prompt).unwrap();
        sampler.sample(&LOGITS).unwrap().token
    };
    assert_eq!(run(&params, &[1, 2, 4, 1, 2]), 1);
    assert_eq!(run(&params, &[2, 4, 1, 2]), 4);
    let late = SamplingParams {
        samplers: "kd".parse().unwrap(),
        top_k: 2,
        ..params.clone()
    };
    assert!([1, 4].contains(&run(&late, &[1, 2, 4, 1, 2])));
    let off = SamplingParams {
        dry_penalty_last_n: 0,
        ..params
    };
    assert_eq!(run(&off, &[1, 2, 4, 1, 2]), 4);
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let order = Just("edskypmxta".chars().collect::<Vec<char>>()).prop_shuffle();
    let floats = prop::collection::vec(0.0f32..=1.0, 12);
    (
        order,
        0usize..=10,
        floats,
        0u32..20,
        0i64..3,
        any::<u64>(),
        prop::option::of(0usize..4),
    )
        .prop_map(|(order, kept, f, top_k, mirostat, seed, logprobs)| {
            let letters: String = order.into_iter().take(kept).collect();
            let mut dry_sequence_breakers = SequenceBreakers::default();
            dry_sequence_breakers.resolve(Default::default());
            SamplingParams {
                samplers: letters.parse().unwrap(),
                temperature: if f[0] < 0.2 { 0.0 } else { f[0] * 3.0 },
                dynatemp_range: if f[1] < 0.5 { 0.0 } else { f[1] },
                top_k,
                top_p: f[2],
                min_p: f[3],
                typical_p: f[4],
                top_n_sigma: f[5] * 4.0 - 1.0,
                xtc_probability: f[6],
                xtc_threshold: f[7] * 0.6,
                dry_multiplier: f[8],
                dry_penalty_last_n: -1,
                dry_sequence_breakers,
                mirostat: if f[9] < 0.3 {
                    Mirostat::of(mirostat).unwrap()
                } else {
                    Mirostat::Off
                },
                adaptive_target: if f[10] < 0.3 { f[10] } else { -1.0 },
                repetition_penalty: 1.0 + f[11],
                presence_penalty: 0.5,
                repeat_last_n: -1,
                min_keep: top_k as usize % 5,
                seed: Some(seed),
                logprobs: logprobs.map(|top| LogprobsRequest {
                    top,
                    stage: LogprobStage::Drawn,
                }),
                ..SamplingParams::cli()
            }
        })
}

proptest! {
    #[test]
    fn the_token_is_always_one_that_may_be_drawn(
        logits in prop::collection::vec(prop_oneof![8 => -30.0f32..30.0, 1 => Just(f32::NEG_INFINITY), 1 => Just(f32::MAX)], 4..200),
        params in any_params(), prompt in prop::collection::vec(0u32..8, 0..20),
    ) {
        let mut sampler = Sampler::new(&params, &prompt).unwrap();
        let mut again = Sampler::new(&params, &prompt).unwrap();
        for _ in 0..4 {
            let sample = match sampler.sample(&logits) {
                Ok(sample) => sample,
                Err(error) => {
                    prop_assert!(matches!(error, SamplingError::NoToken { .. }), "{error}");
                    prop_assert!(logits.iter().all(|logit| *logit == f32::NEG_INFINITY));
                    break;
                }
            };
            prop_assert!(logits[sample.token as usize] > f32::NEG_INFINITY);
            if let Some(found) = &sample.logprobs {
                prop_assert!(found.token <= 0.0 && found.top.iter().all(|(_, logprob)| *logprob <= 0.0), "{found:?}");
                let sum: f64 = found.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
                prop_assert!(sum < 1.0 + 1e-5);
            }
            // The same again, for whoever repeats the request.
            prop_assert_eq!(again.sample(&logits).unwrap(), sample);
        }
    }
}
