//! Against llama.cpp's samplers: what they leave of fixed rows, recorded by `tests/golden/tools/make_sampling.py`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::breakers::Breakers;
use super::dry::{Dry, DryScan};
use super::feedback::Feedback;
use super::filter;
use super::row::Row;
use super::*;

fn golden() -> Value {
    serde_json::from_str(include_str!(
        "../../../tests/golden/sampling/llama_cpp.json"
    ))
    .unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn whole(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn ids(value: &Value) -> Vec<u32> {
    list(value).iter().map(|id| whole(id) as u32).collect()
}

/// The row that the script calls a wave.
fn wave(count: usize) -> Vec<f32> {
    let logit = |id: u64| {
        let hashed = (id * 2_654_435_761) & 0xffff_ffff;
        let u = (hashed as f64 + 0.5) / 4_294_967_296.0;
        let squared = |x: f64, times: usize| (0..times).fold(x, |x, _| x * x);
        let wide = squared(u, 8);
        let middle = squared(wide, 4);
        let narrow = squared(middle, 4);
        (3.0 * narrow + 4.0 * middle + 5.0 * wide + 4.0 * u - 4.0) as f32
    };
    (0..count as u64).map(logit).collect()
}

fn row(value: &Value) -> Vec<f32> {
    match value.as_array() {
        Some(list) => list.iter().map(|logit| number(logit) as f32).collect(),
        None => wave(whole(value)),
    }
}

/// Settings under the names that llama-server has for them.
fn params(settings: &Value) -> SamplingParams {
    let mut params = SamplingParams {
        temperature: 1.0,
        seed: Some(11),
        ..SamplingParams::cli()
    };
    for (name, value) in settings.as_object().unwrap() {
        let float = value.as_f64().unwrap_or(f64::NAN) as f32;
        match name.as_str() {
            "temperature" => params.temperature = float,
            "dynatemp_range" => params.dynatemp_range = float,
            "dynatemp_exponent" => params.dynatemp_exponent = float,
            "top_k" => params.top_k = whole(value) as u32,
            "top_p" => params.top_p = float,
            "min_p" => params.min_p = float,
            "typical_p" => params.typical_p = float,
            "top_n_sigma" => params.top_n_sigma = float,
            "xtc_probability" => params.xtc_probability = float,
            "xtc_threshold" => params.xtc_threshold = float,
            "repeat_penalty" => params.repetition_penalty = float,
            "frequency_penalty" => params.frequency_penalty = float,
            "presence_penalty" => params.presence_penalty = float,
            "repeat_last_n" => params.repeat_last_n = whole(value) as i32,
            "samplers" => {
                let names = list(value).iter().map(|name| name.as_str().unwrap());
                params.samplers = SamplerOrder::from_names(names).unwrap();
            }
            other => panic!("{other}"),
        }
    }
    params
}

/// The distribution that a case is drawn from, likeliest first.
fn distribution(case: &Value) -> Vec<(u32, f64)> {
    let stage = LogprobStage::Drawn;
    let params = SamplingParams {
        logprobs: Some(LogprobsRequest { top: 1000, stage }),
        ..params(&case["settings"])
    };
    let logits = row(&case["row"]);
    let params = SamplingParams {
        logprobs: Some(LogprobsRequest {
            top: 1000.min(logits.len()),
            stage,
        }),
        ..params
    };
    let mut sampler = Sampler::new(&params, &ids(&case["history"])).unwrap();
    let top = sampler.sample(&logits).unwrap().logprobs.unwrap().top;
    top.into_iter()
        .map(|(token, logprob)| (token, f64::from(logprob).exp()))
        .collect()
}

fn expected(case: &Value) -> Vec<(u32, f64)> {
    ids(&case["tokens"])
        .into_iter()
        .zip(list(&case["p"]).iter().map(number))
        .collect()
}

#[test]
fn chains_leave_what_llama_cpp_leaves() {
    let golden = golden();
    for (id, logit) in golden["wave_sample"].as_object().unwrap() {
        let id: usize = id.parse().unwrap();
        assert_eq!(wave(151_936)[id], number(logit) as f32, "{id}");
    }
    let mut cases = 0;
    for case in list(&golden["small"]).iter().chain(list(&golden["large"])) {
        let (found, expected) = (distribution(case), expected(case));
        let tokens = |list: &[(u32, f64)]| list.iter().map(|(token, _)| *token).collect::<Vec<_>>();
        assert_eq!(tokens(&found), tokens(&expected), "{}", case["name"]);
        for ((token, p), (_, wanted)) in found.iter().zip(&expected) {
            assert!(
                (p - wanted).abs() < 1e-6,
                "{} {token}: {p} and {wanted}",
                case["name"]
            );
        }
        cases += 1;
    }
    assert_eq!(cases, 32);
}

/// Draws follow the distribution that `make_sampling.py` computed in float64, over a vocabulary of 151,936.
#[test]
fn draws_from_a_large_vocabulary_follow_the_reference() {
    let golden = golden();
    const DRAWS: usize = 200;
    let drawn = ["server", "hot", "penalties"].map(Value::from);
    let cases = list(&golden["large"])
        .iter()
        .filter(|case| drawn.contains(&case["name"]));
    for case in cases {
        let expected = expected(case);
        let logits = row(&case["row"]);
        // The same seed for every case; its draws are of no particular kind.
        let mut params = params(&case["settings"]);
        // The window moves with the draws, the reference does not.
        let history = ids(&case["history"]);
        params.repeat_last_n = history.len().max(1) as i32;
        let sampler = Sampler::new(&params, &history).unwrap();
        let mut counts: BTreeMap<u32, f64> = BTreeMap::new();
        for step in 0..DRAWS {
            let drawn = sampler.clone().at(step as u64).sample(&logits).unwrap();
            *counts.entry(drawn.token).or_default() += 1.0;
        }
        // Rare tokens are counted together, as the statistic wants at least five in each cell.
        let (mut statistic, mut cells, mut rare, mut rare_p) = (0.0, 0, 0.0, 0.0);
        let mut cell = |count: f64, p: f64| {
            let mean = p * DRAWS as f64;
            statistic += (count - mean).powi(2) / mean;
            cells += 1;
        };
        for (token, p) in &expected {
            let count = counts.remove(token).unwrap_or(0.0);
            if p * (DRAWS as f64) < 5.0 {
                rare += count;
                rare_p += p;
            } else {
                cell(count, *p);
            }
        }
        if rare_p > 0.0 {
            cell(rare, rare_p);
        }
        assert!(
            counts.is_empty(),
            "{}: {counts:?} cannot be drawn",
            case["name"]
        );
        // Wilson and Hilferty's approximation of the quantile whose tail has probability 0.001.
        let degrees = f64::from((cells - 1).max(1));
        let limit =
            degrees * (1.0 - 2.0 / (9.0 * degrees) + 3.09 * (2.0 / (9.0 * degrees)).sqrt()).powi(3);
        assert!(
            statistic < limit,
            "{}: {statistic}, limit {limit}",
            case["name"]
        );
    }
}

#[test]
fn mirostat_leaves_what_llama_cpp_leaves() {
    for case in list(&golden()["mirostat"]) {
        let logits = row(&case["row"]);
        let mirostat = Mirostat::of(whole(&case["version"]) as i64).unwrap();
        let params = SamplingParams {
            mirostat,
            mirostat_tau: number(&case["tau"]) as f32,
            mirostat_eta: number(&case["eta"]) as f32,
            ..SamplingParams::cli()
        };
        let mut feedback = Feedback::new(&params);
        for step in list(&case["steps"]) {
            let mut list_memory = Vec::new();
            let mut row = Row::new(&logits, &mut list_memory);
            filter::temperature(&mut row, number(&case["temperature"]), 0.0, 1.0);
            match mirostat {
                Mirostat::V1 => filter::mirostat(&mut row, feedback.mu, logits.len()),
                _ => filter::mirostat_v2(&mut row, feedback.mu),
            }
            let softmax = row.softmax();
            assert_eq!(row.list().len(), whole(&step["left"]), "{case}");
            row.list().sort_by(select::by_rank);
            for (candidate, p) in row.list().iter().zip(list(&step["p"])) {
                assert!(
                    (softmax.p(candidate.logit) - number(p)).abs() < 1e-5,
                    "{case}"
                );
            }
            // Our draws have other random numbers, so the other's are followed.
            let token = whole(&step["token"]);
            let p = softmax.p(logits[token]);
            assert!((p - number(&step["token_p"])).abs() < 1e-5, "{case}");
            feedback.surprised(p, &params);
        }
    }
}

#[test]
fn adaptive_p_bends_as_llama_cpp_does() {
    for case in list(&golden()["adaptive"]) {
        let logits = row(&case["row"]);
        let (target, decay) = (number(&case["target"]), number(&case["decay"]));
        let mut feedback = Feedback::new(&SamplingParams {
            adaptive_target: target as f32,
            adaptive_decay: decay as f32,
            ..SamplingParams::cli()
        });
        for step in list(&case["steps"]) {
            let mut list_memory = Vec::new();
            let mut row = Row::new(&logits, &mut list_memory);
            let before = feedback.adapt(&mut row, target);
            let after = row.softmax();
            for (candidate, p) in row.list().iter().zip(list(&step["p"])) {
                assert!(
                    (after.p(candidate.logit) - number(p)).abs() < 1e-5,
                    "{case}"
                );
            }
            feedback.adapted(before.p(logits[whole(&step["token"])]), decay);
        }
    }
}

#[test]
fn dry_penalises_what_llama_cpp_penalises() {
    for case in list(&golden()["dry"]) {
        let dry = Dry {
            multiplier: number(&case["multiplier"]) as f32,
            base: number(&case["base"]) as f32,
            allowed_length: whole(&case["allowed_length"]),
        };
        let mut breakers = Breakers::default();
        for token in ids(&case["breakers"]) {
            breakers.add(token, Vec::new());
        }
        let ids = ids(&case["ids"]);
        let window =
            usize::try_from(case["penalty_last_n"].as_i64().unwrap()).unwrap_or(usize::MAX);
        let mut scan = DryScan::default();
        scan.scan(dry, &ids[ids.len().saturating_sub(window)..], &breakers);
        let mut logits = vec![0.0; 49_152];
        scan.penalise(dry, &mut logits);
        let penalties = case["penalties"].as_object().unwrap();
        for (token, logit) in logits
            .iter()
            .enumerate()
            .filter(|(_, logit)| **logit != 0.0)
        {
            let penalty = penalties.get(&token.to_string()).map_or(0.0, number);
            // A penalty beyond all floats stops a little earlier there.
            let equal = (-f64::from(*logit) / penalty - 1.0).abs() < 1e-4 || penalty > 1e37;
            assert!(equal, "{}: {token} {logit} {penalty}", case["name"]);
        }
        let changed = logits.iter().filter(|logit| **logit != 0.0).count();
        assert_eq!(changed, penalties.len(), "{}", case["name"]);
    }
}
