//! Sampling over HTTP: every sampler's fields work, defaults are listed, seeds repeat alone and beside others.

use mlxcel_tests::server::{LOOKAHEAD, Server};
use serde_json::{Value, json};

fn server(flags: &[&str]) -> Server {
    Server::scripted(&json!({}), flags)
}

fn complete(server: &Server, body: Value) -> Value {
    server.post("/completion", &body).success()
}

fn text(server: &Server, body: Value) -> String {
    let answer = complete(server, body);
    answer["content"].as_str().expect("a text").to_owned()
}

#[test]
fn defaults_are_those_of_llama_server() {
    let props = server(&[]).get("/props").success();
    insta::assert_json_snapshot!(props["default_generation_settings"]["params"], @r#"
    {
      "seed": 4294967295,
      "temperature": 0.8,
      "dynatemp_range": 0.0,
      "dynatemp_exponent": 1.0,
      "top_k": 40,
      "top_p": 0.95,
      "min_p": 0.05,
      "typical_p": 1.0,
      "top_n_sigma": -1.0,
      "xtc_probability": 0.0,
      "xtc_threshold": 0.1,
      "min_keep": 0,
      "repeat_last_n": 64,
      "repeat_penalty": 1.0,
      "presence_penalty": 0.0,
      "frequency_penalty": 0.0,
      "dry_multiplier": 0.0,
      "dry_base": 1.75,
      "dry_allowed_length": 2,
      "dry_penalty_last_n": 64,
      "mirostat": 0,
      "mirostat_tau": 5.0,
      "mirostat_eta": 0.1,
      "adaptive_target": -1.0,
      "adaptive_decay": 0.9,
      "n_predict": -1,
      "max_tokens": -1,
      "n_probs": 0,
      "post_sampling_probs": false,
      "samplers": [
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature"
      ]
    }
    "#);
}

#[test]
fn flags_are_the_defaults_of_requests() {
    let server = server(&[
        "--temp=0.5",
        "--dynatemp-range=0.1",
        "--dynatemp-exp=2",
        "--top-k=7",
        "--top-p=0.9",
        "--min-p=0.2",
        "--typical-p=0.8",
        "--top-n-sigma=2",
        "--xtc-probability=0.3",
        "--xtc-threshold=0.2",
        "--repeat-penalty=1.5",
        "--presence-penalty=0.1",
        "--frequency-penalty=0.2",
        "--repeat-last-n=9",
        "--dry-multiplier=0.4",
        "--dry-base=1.5",
        "--dry-allowed-length=3",
        "--dry-penalty-last-n=11",
        "--dry-sequence-breaker=x",
        "--mirostat-ent=4",
        "--mirostat-lr=0.2",
        "--adaptive-target=0.6",
        "--adaptive-decay=0.7",
        "--samplers=top_k;temperature",
        "--seed=12",
        "--ignore-eos",
        "--logit-bias=65-1",
    ]);
    let answer = complete(&server, json!({"prompt": "a", "n_predict": 2}));
    insta::assert_snapshot!(answer["generation_settings"].to_string(), @r#"{"seed":12,"temperature":0.5,"dynatemp_range":0.1,"dynatemp_exponent":2.0,"top_k":7,"top_p":0.9,"min_p":0.2,"typical_p":0.8,"top_n_sigma":2.0,"xtc_probability":0.3,"xtc_threshold":0.2,"min_keep":0,"repeat_last_n":9,"repeat_penalty":1.5,"presence_penalty":0.1,"frequency_penalty":0.2,"dry_multiplier":0.4,"dry_base":1.5,"dry_allowed_length":3,"dry_penalty_last_n":11,"mirostat":0,"mirostat_tau":4.0,"mirostat_eta":0.2,"adaptive_target":0.6,"adaptive_decay":0.7,"n_predict":2,"max_tokens":2,"n_probs":0,"post_sampling_probs":false,"samplers":["top_k","temperature"],"stop":[],"ignore_eos":true,"stream":false,"logit_bias":[{"token":65,"bias":-1.0},{"token":256,"bias":null}],"dry_sequence_breakers":["x"],"timings_per_token":false}"#);
}

/// After `abc` the model says `d`. What the samplers make of it is what is asked about.
#[test]
fn every_sampler_changes_what_it_should() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--temp", "0", "--lookahead", lookahead]);
        let next = |extra: Value| {
            let mut body = json!({"prompt": "abcdabc", "n_predict": 1});
            let (Some(body), Some(extra)) = (body.as_object_mut(), extra.as_object()) else {
                return String::new();
            };
            body.extend(extra.clone());
            text(&server, Value::Object(body.clone()))
        };
        assert_eq!(next(json!({})), "d");
        let x = json!([["x", 50]]);
        assert_eq!(next(json!({"logit_bias": x})), "d");
        // abc was followed by d before.
        assert_eq!(next(json!({"logit_bias": x, "dry_multiplier": 100})), "x");
        assert_eq!(
            next(json!({"logit_bias": x, "dry_multiplier": 100, "dry_allowed_length": 4})),
            "d"
        );
        assert_eq!(
            next(json!({"logit_bias": x, "dry_multiplier": 100, "dry_penalty_last_n": 3})),
            "d"
        );
        assert_eq!(
            next(json!({"logit_bias": x, "dry_multiplier": 100, "dry_sequence_breakers": ["b"]})),
            "d"
        );
        assert_eq!(
            next(json!({"logit_bias": x, "dry_multiplier": 100, "samplers": ["temperature"]})),
            "d"
        );
        assert_eq!(
            next(json!({"logit_bias": x, "dry_multiplier": 100, "mirostat": 2})),
            "d"
        );
        // d and x are equally likely; d has the lower id and counts as the better one.
        let equal = json!([["x", 60]]);
        assert_eq!(next(json!({"logit_bias": equal})), "d");
        assert_eq!(
            next(json!({"logit_bias": equal, "xtc_probability": 1, "top_k": 2})),
            "x"
        );
        assert_eq!(
            next(json!({"logit_bias": equal, "xtc_probability": 1, "xtc_threshold": 0.6})),
            "d"
        );
        assert_eq!(
            next(json!({"logit_bias": x, "repeat_penalty": 100, "repeat_last_n": 4})),
            "x"
        );
        assert_eq!(
            next(json!({"logit_bias": x, "frequency_penalty": 60, "repeat_last_n": 3})),
            "d"
        );
        // Adaptive-p aims for what has no probability.
        let rare = json!({"logit_bias": x, "adaptive_target": 0.0, "temperature": 1, "top_k": 2, "min_p": 0, "top_p": 1});
        assert_eq!(next(rare), "x");
        // Without temperature in the order it is not applied, and top_k 1 decides.
        assert_eq!(
            next(json!({"temperature": 100, "samplers": "k", "top_k": 1})),
            "d"
        );
        // So hot that everything is as likely, but for what mirostat and the filters allow.
        let hot = json!({"temperature": 100, "mirostat": 1, "mirostat_tau": 0, "mirostat_eta": 1});
        assert_eq!(next(hot), "d");
        let narrow = json!({"temperature": 100, "samplers": ["top_n_sigma", "temperature"], "top_n_sigma": 1});
        assert_eq!(next(narrow), "d");
    }
}

/// Nearly uniform answers, so that equal ones are no accident.
fn random(seed: u64, extra: &Value) -> Value {
    let mut body = json!({
        "prompt": "a", "n_predict": 24, "temperature": 100, "top_k": 0, "top_p": 1, "min_p": 0, "seed": seed, "ignore_eos": true,
        "return_tokens": true,
    });
    if let (Some(body), Some(extra)) = (body.as_object_mut(), extra.as_object()) {
        body.extend(extra.clone());
    }
    body
}

#[test]
fn a_seed_repeats_alone_and_beside_others() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--parallel", "8", "--lookahead", lookahead]);
        let kinds = [
            json!({}),
            json!({"mirostat": 1, "mirostat_tau": 3}),
            json!({"mirostat": 2, "mirostat_tau": 3}),
            json!({"adaptive_target": 0.004}),
            json!({"xtc_probability": 0.5, "xtc_threshold": 0.001}),
            json!({"repeat_penalty": 1.3, "dry_multiplier": 1, "dynatemp_range": 50}),
        ];
        let bodies: Vec<Value> = (0..18).map(|n| random(n, &kinds[n as usize % 6])).collect();
        let alone: Vec<Value> = bodies
            .iter()
            .map(|body| complete(&server, body.clone())["tokens"].clone())
            .collect();
        let together: Vec<Value> = std::thread::scope(|scope| {
            let running: Vec<_> = bodies
                .iter()
                .map(|body| scope.spawn(|| complete(&server, body.clone())["tokens"].clone()))
                .collect();
            running
                .into_iter()
                .map(|thread| thread.join().expect("an answer"))
                .collect()
        });
        assert_eq!(alone, together);
        let mut different = alone.clone();
        different.dedup();
        assert_eq!(different.len(), alone.len());
    }
}

#[test]
fn several_answers_are_those_of_seeds_that_follow() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--parallel", "4", "--lookahead", lookahead]);
        let body = |seed: u64, n: usize| {
            let mut body = random(seed, &json!({"n": n, "max_tokens": 12}));
            if let Some(body) = body.as_object_mut() {
                for name in ["return_tokens", "n_predict"] {
                    body.remove(name);
                }
            }
            server.post("/v1/completions", &body).success()
        };
        let all = body(40, 6);
        for index in 0..6 {
            let one = body(40 + index as u64, 1);
            assert_eq!(
                all["choices"][index]["text"], one["choices"][0]["text"],
                "{index}"
            );
        }
        assert_eq!(all["usage"]["prompt_tokens"], 1);
    }
}

#[test]
fn probabilities_after_the_samplers_have_their_own_names() {
    insta::allow_duplicates! {
        LOOKAHEAD.into_iter().for_each(probabilities);
    }
}

fn probabilities(lookahead: &str) {
    let server = server(&["--temp", "1", "--lookahead", lookahead]);
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": true, "top_logprobs": 2,
        "logit_bias": [["b", 60]], "post_sampling_probs": true, "seed": 1, "samplers": "kt", "top_k": 2,
    });
    let answer = server.post("/v1/chat/completions", &body).success();
    let mut item = answer["choices"][0]["logprobs"]["content"][0].clone();
    // Which of the two was drawn is not the point.
    for name in ["id", "token", "bytes"] {
        item[name] = json!("either");
    }
    insta::assert_snapshot!(item.to_string(), @r#"{"id":"either","token":"either","bytes":"either","prob":0.5,"top_probs":[{"id":97,"token":"a","bytes":[97],"prob":0.5},{"id":98,"token":"b","bytes":[98],"prob":0.5}]}"#);
    let native = json!({
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "n_probs": 1, "temperature": 0,
    });
    let answer = server.post("/v1/chat/completions", &native).success();
    insta::assert_snapshot!(answer["choices"][0]["logprobs"].to_string(), @r#"{"content":[{"id":97,"token":"a","bytes":[97],"logprob":0.0,"top_logprobs":[{"id":97,"token":"a","bytes":[97],"logprob":0.0}]}],"refusal":null}"#);
    let legacy = json!({"prompt": "a", "max_tokens": 1, "logprobs": 1, "post_sampling_probs": true, "temperature": 0});
    let answer = server.post("/v1/completions", &legacy).success();
    insta::assert_snapshot!(answer["choices"][0]["logprobs"].to_string(), @r#"{"tokens":["b"],"token_logprobs":[0.0],"top_logprobs":[{"b":0.0}],"text_offset":[0]}"#);
    let both = json!({
        "messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 1, "n_probs": 2,
    });
    assert_eq!(server.post("/v1/chat/completions", &both).status, 400);
}

#[test]
fn an_end_that_is_ignored_is_shown_as_forbidden() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--temp", "0", "--lookahead", lookahead]);
        let body = json!({"prompt": "8", "n_predict": 4, "ignore_eos": true});
        let answer = complete(&server, body);
        assert_eq!(answer["stop_type"], "limit");
        assert_eq!(
            answer["generation_settings"]["logit_bias"],
            json!([{"token": 256, "bias": null}])
        );
    }
}

#[test]
fn several_answers_share_one_prefill() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--parallel", "4", "--metrics", "--lookahead", lookahead]);
        let prompt = "abcdefghij".repeat(10);
        let body = |seed: u64, n: u64| {
            let mut body = random(seed, &json!({"prompt": prompt, "n": n}));
            if let Some(body) = body.as_object_mut() {
                body.remove("n");
                body.insert("n_cmpl".to_owned(), json!(n));
            }
            complete(&server, body)
        };
        let counter = |name: &str| {
            let page = server.get("/metrics").text();
            let line = page
                .lines()
                .find(|line| line.starts_with(&format!("llamacpp:{name}")))
                .expect("a counter");
            let value = line.rsplit(' ').next().expect("a value");
            value.parse::<f64>().expect("a number")
        };
        let all = body(70, 4);
        // The first answer computes the prompt, the others what lies behind its last full page of 32, or one token where
        // another answer has ended before and left the rest.
        let computed = counter("prompt_tokens_total");
        assert!((103.0..=112.0).contains(&computed), "{computed}");
        for index in 0..4 {
            let one = body(70 + index as u64, 1);
            assert_eq!(all[index]["tokens"], one["tokens"], "{index}");
        }
    }
}
