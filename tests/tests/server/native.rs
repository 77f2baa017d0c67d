//! llama-server's dialect, and what operators ask.

use std::collections::BTreeSet;

use mlxcel_tests::server::Server;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

fn server() -> Server {
    Server::scripted(&json!({}), &["--temp", "0", "--metrics", "--parallel", "2"])
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn a_completion_has_the_members_of_llama_server() {
    let server = server();
    let answer = server.post("/completion", &json!({"prompt": "a", "n_predict": 3, "n_probs": 2, "return_tokens": true, "stop": ["d"]})).success();
    let expected: BTreeSet<&str> = [
        "index",
        "content",
        "tokens",
        "id_slot",
        "stop",
        "model",
        "tokens_predicted",
        "tokens_evaluated",
        "generation_settings",
        "prompt",
        "has_new_line",
        "truncated",
        "stop_type",
        "stopping_word",
        "tokens_cached",
        "timings",
        "completion_probabilities",
    ]
    .into();
    assert_eq!(keys(&answer), expected);
    assert_eq!(
        (
            answer["content"].as_str(),
            answer["stop_type"].as_str(),
            answer["stopping_word"].as_str()
        ),
        (Some("bc"), Some("word"), Some("d"))
    );
    assert_eq!(answer["tokens"], json!([98, 99]));
    insta::assert_snapshot!(answer["completion_probabilities"][0].to_string(), @r#"{"id":98,"token":"b","bytes":[98],"logprob":0.0,"top_logprobs":[{"id":98,"token":"b","bytes":[98],"logprob":0.0},{"id":0,"token":"\u0000","bytes":[0],"logprob":-60.0}]}"#);
    insta::assert_snapshot!(answer["generation_settings"].to_string(), @r#"{"seed":4294967295,"temperature":0.0,"dynatemp_range":0.0,"dynatemp_exponent":1.0,"top_k":40,"top_p":0.95,"min_p":0.05,"typical_p":1.0,"top_n_sigma":-1.0,"xtc_probability":0.0,"xtc_threshold":0.1,"min_keep":0,"repeat_last_n":64,"repeat_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"dry_multiplier":0.0,"dry_base":1.75,"dry_allowed_length":2,"dry_penalty_last_n":64,"mirostat":0,"mirostat_tau":5.0,"mirostat_eta":0.1,"adaptive_target":-1.0,"adaptive_decay":0.9,"n_predict":3,"max_tokens":3,"n_probs":2,"post_sampling_probs":false,"samplers":["penalties","dry","top_n_sigma","top_k","typ_p","top_p","min_p","xtc","temperature"],"stop":["d"],"ignore_eos":false,"stream":false,"logit_bias":[],"dry_sequence_breakers":["\n",":","\"","*"],"timings_per_token":false}"#);
}

#[test]
fn rules_of_the_fields() {
    let server = server();
    let ask = |body: Value| server.post("/completion", &body).success();
    // One token comes with the prompt in any case.
    assert_eq!(ask(json!({"prompt": "a", "n_predict": 0}))["content"], "b");
    let chosen = ask(
        json!({"prompt": "a", "n_predict": 2, "response_fields": ["content", "generation_settings/n_predict", "nothing"]}),
    );
    assert_eq!(
        chosen,
        json!({"content": "bc", "generation_settings/n_predict": 2})
    );
    let several = ask(json!({"prompt": ["a", "m"], "n_predict": 2}));
    assert_eq!(
        (
            several[0]["content"].as_str(),
            several[1]["content"].as_str()
        ),
        (Some("bc"), Some("no"))
    );
    let timings = ask(json!({"prompt": "a", "n_predict": 5}))["timings"].clone();
    assert_eq!(
        (
            timings["prompt_n"].as_u64(),
            timings["cache_n"].as_u64(),
            timings["predicted_n"].as_u64()
        ),
        (Some(1), Some(0), Some(5))
    );
    let ended =
        ask(json!({"prompt": "8", "post_sampling_probs": true, "n_probs": 1, "temperature": 1}));
    assert_eq!(
        (ended["stop_type"].as_str(), ended["content"].as_str()),
        (Some("eos"), Some("9!"))
    );
    assert_eq!(
        ended["completion_probabilities"][0]["top_probs"][0]["prob"],
        1.0
    );
}

#[test]
fn a_stream_ends_with_its_last_object() {
    let server = server();
    let answer = server.post(
        "/completion",
        &json!({"prompt": "a", "n_predict": 3, "stream": true, "return_progress": true}),
    );
    let events: Vec<Value> = answer
        .events()
        .iter()
        .map(|event| serde_json::from_str(event).expect("JSON"))
        .collect();
    assert_eq!(events[0]["prompt_progress"]["total"], 1);
    let texts: Vec<&str> = events
        .iter()
        .filter_map(|event| event["content"].as_str())
        .collect();
    assert_eq!(texts, ["", "b", "c", "d", ""]);
    assert_eq!(
        events
            .iter()
            .map(|event| event["stop"] == true)
            .collect::<Vec<_>>(),
        [false, false, false, false, true]
    );
    assert_eq!(events[1]["tokens"], json!([98]));
}

#[test]
fn text_and_tokens() {
    let server = server();
    let tokens = server
        .post("/tokenize", &json!({"content": "a€<|end|>"}))
        .success();
    assert_eq!(tokens, json!({"tokens": [97, 0xe2, 0x82, 0xac, 256]}));
    let plain = server
        .post(
            "/tokenize",
            &json!({"content": "<|end|>", "parse_special": false}),
        )
        .success();
    assert_eq!(plain["tokens"].as_array().expect("a list").len(), 7);
    let pieces = server
        .post(
            "/tokenize",
            &json!({"content": ["é", 97], "with_pieces": true}),
        )
        .success();
    assert_eq!(
        pieces["tokens"],
        json!([{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}, {"id": 97, "piece": "a"}])
    );
    let text = server.post("/detokenize", &tokens).success();
    assert_eq!(text, json!({"content": "a€<|end|>"}));
    assert_eq!(
        server.post("/detokenize", &json!({"tokens": [257]})).status,
        400
    );
    assert_eq!(server.post("/tokenize", &json!({"content": 5})).status, 400);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(
        server.post("/apply-template", &chat).success(),
        json!({"prompt": "user:hi\nassistant:"})
    );
    let counted = server
        .post("/v1/chat/completions/input_tokens", &chat)
        .success();
    let answered = server
        .post(
            "/v1/chat/completions",
            &json!({"messages": chat["messages"], "max_tokens": 1}),
        )
        .success();
    assert_eq!(counted["input_tokens"], answered["usage"]["prompt_tokens"]);
}

#[test]
fn properties_and_slots() {
    let server = server();
    let props = server.get("/props").success();
    assert_eq!(
        (
            props["total_slots"].as_u64(),
            props["default_generation_settings"]["n_ctx"].as_u64()
        ),
        (Some(2), Some(4096))
    );
    let slots = server.get("/slots").success();
    assert_eq!(slots.as_array().expect("a list").len(), 2);
    assert_eq!(
        keys(&slots[0]),
        ["id", "is_processing", "n_ctx", "speculative"].into()
    );
    server
        .post(
            "/completion",
            &json!({"prompt": "secret text", "n_predict": 3}),
        )
        .success();
    server.wait_for("the slot is free", |server| {
        server.get("/slots").success()[0]["is_processing"] == false
    });
    let after = server.get("/slots");
    assert_eq!(after.json()[0]["next_token"][0]["n_decoded"], 3);
    assert!(!after.text().contains("secret"), "{}", after.text());
}

/// How many rows a step has comes from the backend and three flags: what came of it is told.
#[test]
fn rows_of_a_step_that_are_in_force_are_told() {
    let chosen = ["--prefill-chunk-size", "64", "--parallel", "2"];
    let beside = ["--prefill-beside-decode", "16"];
    for (flags, rows, told) in [
        (
            vec![],
            [512, 128],
            "4 answers at a time, at most 512 rows a step and 128 of prompts beside answers\n",
        ),
        (
            chosen.to_vec(),
            [64, 64],
            "2 answers at a time, at most 64 rows a step and 64 of prompts beside answers\n",
        ),
        (
            [&chosen[..], &beside].concat(),
            [64, 16],
            "2 answers at a time, at most 64 rows a step and 16 of prompts beside answers\n",
        ),
    ] {
        let mut server = Server::scripted(&json!({}), &flags);
        let props = server.get("/props").success();
        let found = [
            &props["prefill_chunk_size"],
            &props["prefill_beside_decode"],
        ];
        assert_eq!(found, rows.map(Value::from).each_ref(), "{flags:?}");
        let process = i32::try_from(server.id()).ok().and_then(Pid::from_raw);
        kill_process(process.expect("an id"), Signal::TERM).expect("signalled");
        let ended = server.wait();
        assert!(ended.stderr.contains(told), "{flags:?}: {}", ended.stderr);
    }
}

#[test]
fn metrics_count_and_never_quote() {
    let server = server();
    for _ in 0..3 {
        server
            .post(
                "/completion",
                &json!({"prompt": "secretnonce", "n_predict": 4}),
            )
            .success();
    }
    server.post("/unknown/secretnonce", &json!({}));
    let page = server.get("/metrics");
    assert!(page.header("process-start-time-unix").is_some());
    assert!(!page.text().contains("secretnonce"));
    for name in [
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "prompt_seconds_total",
        "tokens_predicted_total",
        "tokens_predicted_seconds_total",
        "n_decode_total",
        "n_tokens_max",
        "n_busy_slots_per_decode",
        "prompt_tokens_seconds",
        "predicted_tokens_seconds",
        "requests_processing",
        "requests_deferred",
    ] {
        assert!(
            page.text().contains(&format!("\nllamacpp:{name} ")),
            "{name}"
        );
    }
    assert_eq!(server.metric("llamacpp:tokens_predicted_total"), 12.0);
    assert_eq!(
        server.metric("mlxcel_time_to_first_token_seconds_count"),
        3.0
    );
    assert_eq!(
        server.metric("mlxcel_inter_token_latency_seconds_count"),
        9.0
    );
    assert_eq!(server.metric("mlxcel_requests_total"), 3.0);
    assert!(
        page.text()
            .contains("mlxcel_http_responses_total{route=\"none\",code=\"404\"} 1")
    );
    let hidden = Server::scripted(&json!({}), &["--no-slots"]);
    assert_eq!(
        (hidden.get("/metrics").status, hidden.get("/slots").status),
        (501, 501)
    );
}

#[test]
fn the_prefix_cache_shows_itself_and_can_be_emptied() {
    let server = server();
    let ask = || {
        server
            .post(
                "/completion",
                &json!({"prompt": "x".repeat(100), "n_predict": 1}),
            )
            .success()["timings"]["cache_n"]
            .as_u64()
    };
    assert_eq!((ask(), ask()), (Some(0), Some(99)));
    server.wait_for("the second step is counted", |server| {
        server.get("/v1/cache/stats").success()["hits"] == 1
    });
    let stats = server.get("/v1/cache/stats").success();
    assert_eq!(
        (stats["pages"].as_u64(), stats["tokens_reused"].as_u64()),
        (Some(4), Some(99))
    );
    assert_eq!(
        server.post("/v1/cache/reset", &json!({})).success()["status"],
        "ok"
    );
    assert_eq!(ask(), Some(0));
}
