//! OpenAI's dialect of the server, over raw sockets, with a model whose answers are known.

use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::{LOOKAHEAD, Server};
use serde_json::{Value, json};

fn server() -> Server {
    ahead("off")
}

fn ahead(lookahead: &str) -> Server {
    let flags = [
        "--alias",
        "scripted",
        "--temp",
        "0",
        "--lookahead",
        lookahead,
    ];
    Server::scripted(&json!({}), &flags)
}

fn chat(extra: Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": "hi"}]}),
        extra,
    )
}

fn with(mut body: Value, extra: Value) -> Value {
    for (name, value) in extra.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// Bodies without what differs from run to run.
fn stable(mut value: Value) -> Value {
    for name in ["id", "created", "timings", "system_fingerprint"] {
        if value.get(name).is_some() {
            value[name] = json!(format!("[{name}]"));
        }
    }
    value
}

fn chunks(events: &[String]) -> Vec<Value> {
    let (last, chunks) = events.split_last().expect("events");
    assert_eq!(last, "[DONE]");
    chunks
        .iter()
        .map(|event| serde_json::from_str(event).expect("JSON"))
        .collect()
}

#[test]
fn a_chat_answer() {
    insta::allow_duplicates! {
        LOOKAHEAD.into_iter().for_each(chat_answer);
    }
}

fn chat_answer(lookahead: &str) {
    let server = ahead(lookahead);
    let answer = server.post(
        "/v1/chat/completions",
        &chat(json!({"max_tokens": 2, "logprobs": true, "top_logprobs": 1})),
    );
    let request_id = answer.header("x-request-id").expect("an id");
    assert!(request_id.starts_with("req_"), "{request_id}");
    insta::assert_snapshot!(format!("{:#}", stable(answer.success())), @r#"
    {
      "id": "[id]",
      "object": "chat.completion",
      "created": "[created]",
      "model": "scripted",
      "system_fingerprint": "[system_fingerprint]",
      "choices": [
        {
          "index": 0,
          "message": {
            "role": "assistant",
            "content": "ab",
            "refusal": null
          },
          "logprobs": {
            "content": [
              {
                "id": 97,
                "token": "a",
                "bytes": [
                  97
                ],
                "logprob": 0.0,
                "top_logprobs": [
                  {
                    "id": 97,
                    "token": "a",
                    "bytes": [
                      97
                    ],
                    "logprob": 0.0
                  }
                ]
              },
              {
                "id": 98,
                "token": "b",
                "bytes": [
                  98
                ],
                "logprob": 0.0,
                "top_logprobs": [
                  {
                    "id": 98,
                    "token": "b",
                    "bytes": [
                      98
                    ],
                    "logprob": 0.0
                  }
                ]
              }
            ],
            "refusal": null
          },
          "finish_reason": "length"
        }
      ],
      "usage": {
        "prompt_tokens": 18,
        "completion_tokens": 2,
        "total_tokens": 20,
        "prompt_tokens_details": {
          "cached_tokens": 0
        }
      },
      "timings": "[timings]"
    }
    "#);
    let streamed = server.post(
        "/v1/chat/completions",
        &chat(json!({"max_tokens": 2, "stream": true, "stream_options": {"include_usage": true}})),
    );
    assert_eq!(streamed.header("content-type"), Some("text/event-stream"));
    let lines: Vec<String> = chunks(&streamed.events())
        .into_iter()
        .map(|chunk| stable(chunk).to_string())
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    {"id":"[id]","object":"chat.completion.chunk","created":"[created]","model":"scripted","system_fingerprint":"[system_fingerprint]","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}
    {"id":"[id]","object":"chat.completion.chunk","created":"[created]","model":"scripted","system_fingerprint":"[system_fingerprint]","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}],"usage":null}
    {"id":"[id]","object":"chat.completion.chunk","created":"[created]","model":"scripted","system_fingerprint":"[system_fingerprint]","choices":[{"index":0,"delta":{"content":"b"},"logprobs":null,"finish_reason":null}],"usage":null}
    {"id":"[id]","object":"chat.completion.chunk","created":"[created]","model":"scripted","system_fingerprint":"[system_fingerprint]","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null,"timings":"[timings]"}
    {"id":"[id]","object":"chat.completion.chunk","created":"[created]","model":"scripted","system_fingerprint":"[system_fingerprint]","choices":[],"usage":{"prompt_tokens":18,"completion_tokens":2,"total_tokens":20,"prompt_tokens_details":{"cached_tokens":17}}}
    "#);
}

#[test]
fn a_completion() {
    insta::allow_duplicates! {
        LOOKAHEAD.into_iter().for_each(whole_completion);
    }
}

fn whole_completion(lookahead: &str) {
    let server = ahead(lookahead);
    let body =
        json!({"prompt": ["a", [50, 51]], "n": 2, "max_tokens": 2, "logprobs": 0, "user": "me"});
    insta::assert_snapshot!(format!("{:#}", stable(server.post("/v1/completions", &body).success())), @r#"
    {
      "id": "[id]",
      "object": "text_completion",
      "created": "[created]",
      "model": "scripted",
      "system_fingerprint": "[system_fingerprint]",
      "choices": [
        {
          "index": 0,
          "text": "bc",
          "logprobs": {
            "tokens": [
              "b",
              "c"
            ],
            "token_logprobs": [
              0.0,
              0.0
            ],
            "top_logprobs": [
              {
                "b": 0.0
              },
              {
                "c": 0.0
              }
            ],
            "text_offset": [
              0,
              1
            ]
          },
          "finish_reason": "length"
        },
        {
          "index": 1,
          "text": "bc",
          "logprobs": {
            "tokens": [
              "b",
              "c"
            ],
            "token_logprobs": [
              0.0,
              0.0
            ],
            "top_logprobs": [
              {
                "b": 0.0
              },
              {
                "c": 0.0
              }
            ],
            "text_offset": [
              0,
              1
            ]
          },
          "finish_reason": "length"
        },
        {
          "index": 2,
          "text": "45",
          "logprobs": {
            "tokens": [
              "4",
              "5"
            ],
            "token_logprobs": [
              0.0,
              0.0
            ],
            "top_logprobs": [
              {
                "4": 0.0
              },
              {
                "5": 0.0
              }
            ],
            "text_offset": [
              0,
              1
            ]
          },
          "finish_reason": "length"
        },
        {
          "index": 3,
          "text": "45",
          "logprobs": {
            "tokens": [
              "4",
              "5"
            ],
            "token_logprobs": [
              0.0,
              0.0
            ],
            "top_logprobs": [
              {
                "4": 0.0
              },
              {
                "5": 0.0
              }
            ],
            "text_offset": [
              0,
              1
            ]
          },
          "finish_reason": "length"
        }
      ],
      "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {
          "cached_tokens": 0
        }
      },
      "timings": "[timings]"
    }
    "#);
    let echoed = server
        .post("/v1/completions", &json!({"prompt": "7", "echo": true}))
        .success();
    assert_eq!(echoed["choices"][0]["text"], "789!");
    assert_eq!(echoed["choices"][0]["finish_reason"], "stop");
}

/// Every route, streaming or not, gives the same text, reason and usage.
#[test]
fn streamed_answers_are_the_same_and_have_no_empty_deltas() {
    for lookahead in LOOKAHEAD {
        let server = ahead(lookahead);
        for (extra, text, reason) in [
            (json!({"max_tokens": 5}), "bcdef", "length"),
            (json!({"stop": "de"}), "bc", "stop"),
            (json!({"stop": ["xyz", "fg", "ghi"]}), "bcde", "stop"),
            (json!({"stop": "efz", "max_tokens": 5}), "bcdef", "length"),
            (json!({"max_completion_tokens": 1, "n": 3}), "b", "length"),
        ] {
            let body = with(json!({"prompt": "a"}), extra.clone());
            let whole = server.post("/v1/completions", &body).success();
            let streamed = server.post(
                "/v1/completions",
                &with(
                    body,
                    json!({"stream": true, "stream_options": {"include_usage": true}}),
                ),
            );
            let chunks = chunks(&streamed.events());
            assert_eq!(
                chunks.last().expect("usage")["usage"],
                whole["usage"],
                "{extra}"
            );
            for (index, choice) in whole["choices"]
                .as_array()
                .expect("choices")
                .iter()
                .enumerate()
            {
                assert_eq!(
                    (choice["text"].as_str(), choice["finish_reason"].as_str()),
                    (Some(text), Some(reason)),
                    "{extra}"
                );
                let of_choice: Vec<&Value> = chunks
                    .iter()
                    .flat_map(|chunk| chunk["choices"].as_array().expect("choices"))
                    .filter(|choice| choice["index"] == index)
                    .collect();
                let joined: String = of_choice
                    .iter()
                    .filter_map(|choice| choice["text"].as_str())
                    .collect();
                assert_eq!(joined, text, "{extra}");
                for choice in &of_choice {
                    assert_eq!(
                        choice["text"] == "",
                        choice["finish_reason"] != Value::Null,
                        "{extra}: {choice}"
                    );
                }
            }
        }
    }
}

#[test]
fn characters_arrive_whole() {
    for lookahead in LOOKAHEAD {
        let server = ahead(lookahead);
        let streamed = server.post(
            "/v1/completions",
            &json!({"prompt": "cost $", "stream": true}),
        );
        let texts: Vec<String> = chunks(&streamed.events())
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["text"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(texts, ["€", "!", ""]);
    }
}

#[test]
fn a_seed_repeats_an_answer_and_several_answers_differ() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({}),
            &[
                "--temp",
                "30",
                "--top-k",
                "0",
                "--min-p",
                "0",
                "--top-p",
                "1",
                "--lookahead",
                lookahead,
            ],
        );
        let ask = |extra: Value| {
            let answer = server
                .post(
                    "/v1/completions",
                    &with(json!({"prompt": "a", "max_tokens": 12}), extra),
                )
                .success();
            let texts: Vec<String> = answer["choices"]
                .as_array()
                .expect("choices")
                .iter()
                .map(|choice| choice["text"].as_str().expect("text").to_owned())
                .collect();
            texts
        };
        let three = ask(json!({"seed": 5, "n": 3}));
        assert_eq!(three, ask(json!({"seed": 5, "n": 3})));
        assert_eq!(three[0], ask(json!({"seed": 5}))[0]);
        assert_eq!(three[1], ask(json!({"seed": 6}))[0]);
        assert!(three[0] != three[1] && three[1] != three[2], "{three:?}");
        assert_ne!(ask(json!({})), ask(json!({})));
        assert_eq!(ask(json!({"temperature": 0})), [continuation("a", 12)]);
    }
}

/// What is not honoured is refused, by the name of the field.
#[test]
fn fields_are_honoured_or_refused_by_name() {
    let server = server();
    let refused = [
        ("temperature", json!(-1)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.5)),
        ("top_k", json!(2.5)),
        ("n", json!(0)),
        ("n", json!(129)),
        ("n", json!(100)),
        ("max_tokens", json!(0)),
        ("stop", json!([""])),
        ("stop", json!(5)),
        ("logit_bias", json!({"999999": 1})),
        ("logit_bias", json!({"-1": 1})),
        ("logprobs", json!(3)),
        ("top_logprobs", json!(2)),
        ("stream_options", json!({"include_usage": true})),
        ("response_format", json!({"type": "json_object"})),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {}}),
        ),
        ("tools", json!([{"type": "function"}])),
        ("tool_choice", json!("required")),
        ("functions", json!([{}])),
        ("function_call", json!({"name": "f"})),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "x"})),
        ("prediction", json!({"type": "content"})),
        ("reasoning_effort", json!("high")),
        ("verbosity", json!("low")),
        ("store", json!(true)),
        ("service_tier", json!("priority")),
        ("web_search_options", json!({})),
        ("grammar", json!("root ::= \"a\"")),
        ("mirostat", json!(3)),
        ("samplers", json!(["infill"])),
        ("samplers", json!("zz")),
        ("dry_base", json!(0.5)),
        ("dry_sequence_breakers", json!("x")),
        ("xtc_probability", json!(-1)),
        ("adaptive_decay", json!(1)),
        ("dynatemp_exponent", json!("x")),
        ("backend_sampling", json!(true)),
        ("n_indent", json!(2)),
        ("cache_prompt", json!(false)),
        ("id_slot", json!(0)),
        ("lora", json!([{"id": 0, "scale": 1}])),
        ("guided_json", json!({})),
        ("temprature", json!(0.5)),
    ];
    for (name, value) in refused {
        let answer = server.post("/v1/chat/completions", &chat(json!({name: value})));
        let error = &answer.json()["error"];
        assert_eq!(answer.status, 400, "{name}: {}", answer.text());
        assert!(
            error["message"].as_str().expect("a message").contains(name),
            "{error}"
        );
        assert_eq!(error["type"], "invalid_request_error");
    }
    let accepted = json!({
        "model": "scripted", "max_tokens": 2, "user": "me", "metadata": {"a": "b"}, "store": false, "service_tier": "auto",
        "tools": [], "functions": [], "tool_choice": "auto", "parallel_tool_calls": true, "response_format": {"type": "text"}, "modalities": ["text"],
        "logit_bias": {}, "stop": null, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_logprobs": null,
        "mirostat": 0, "mirostat_tau": 5.0, "cache_prompt": true, "id_slot": -1, "n_keep": 0, "repeat_penalty": 1.1,
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    });
    assert_eq!(
        server
            .post("/v1/chat/completions", &chat(accepted))
            .success()["choices"][0]["message"]["content"],
        "ab"
    );
}

#[test]
fn bias_and_penalties_work() {
    for lookahead in LOOKAHEAD {
        let server = ahead(lookahead);
        let text = |extra: Value| {
            let answer = server
                .post(
                    "/v1/completions",
                    &with(json!({"prompt": "a", "max_tokens": 3}), extra),
                )
                .success();
            answer["choices"][0]["text"]
                .as_str()
                .expect("text")
                .to_owned()
        };
        assert_eq!(text(json!({"logit_bias": {"98": -100}}))[..1], *"\0");
        assert_eq!(text(json!({"logit_bias": [["z", 100]]})), "zzz");
        assert_eq!(text(json!({"ignore_eos": true, "prompt": "!"})).len(), 3);
        assert_eq!(
            text(json!({"prompt": "zabcdefghijklmnopqrstuvwxyza", "frequency_penalty": 100}))[..1],
            *"\0"
        );
    }
}

#[test]
fn messages_and_prompts_that_make_no_sense_are_refused() {
    let server = server();
    for (body, words) in [
        (json!({}), "messages is missing"),
        (json!({"messages": []}), "messages is empty"),
        (json!({"messages": "hi"}), "messages is a text"),
        (
            json!({"messages": [{"role": "king", "content": "x"}]}),
            "king",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}),
            "text only",
        ),
        (chat(json!({"model": "other"})), "is not served here"),
        (
            chat(json!({"chat_template_kwargs": {"messages": 1}})),
            "reserved",
        ),
    ] {
        let answer = server.post("/v1/chat/completions", &body);
        assert!(
            (400..=404).contains(&answer.status) && answer.text().contains(words),
            "{body}: {}",
            answer.text()
        );
    }
    for body in [
        json!({}),
        json!({"prompt": []}),
        json!({"prompt": ""}),
        json!({"prompt": [999]}),
        json!({"prompt": [-1]}),
        json!({"prompt": {}}),
    ] {
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], "prompt", "{body}");
    }
    for body in [
        "",
        "[",
        "[]",
        "null",
        "1",
        "\"x\"",
        "{\"messages\": \"\\ud800\"}",
        &"[".repeat(100_000),
    ] {
        let answer = server.post_bytes("/v1/chat/completions", body.as_bytes());
        assert_eq!(
            (answer.status, answer.json()["error"]["type"].as_str()),
            (400, Some("invalid_request_error")),
            "{body:.20}"
        );
    }
    assert_eq!(
        server
            .post_bytes("/v1/chat/completions", b"{\"messages\": \"\xff\"}")
            .status,
        400
    );
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_with_both_numbers() {
    insta::allow_duplicates! {
        LOOKAHEAD.into_iter().for_each(prompts_at_the_limit);
    }
}

fn prompts_at_the_limit(lookahead: &str) {
    let server = ahead(lookahead);
    let answer = server.post("/v1/completions", &json!({"prompt": "x".repeat(5000)}));
    insta::assert_snapshot!(answer.text(), @r#"{"error":{"message":"the prompt has 5000 tokens and the context holds 4096: shorten the prompt","type":"invalid_request_error","param":null,"code":"context_length_exceeded","n_prompt_tokens":5000,"n_ctx":4096}}"#);
    let native = server.post("/completion", &json!({"prompt": "x".repeat(5000)}));
    insta::assert_snapshot!(native.text(), @r#"{"error":{"message":"the prompt has 5000 tokens and the context holds 4096: shorten the prompt","type":"exceed_context_size_error","code":400,"n_prompt_tokens":5000,"n_ctx":4096}}"#);
    // The longest that fits still gives a token, and ends because the context is full.
    let fits = server
        .post("/v1/completions", &json!({"prompt": "x".repeat(4096)}))
        .success();
    assert_eq!(
        (
            fits["usage"]["completion_tokens"].as_u64(),
            fits["choices"][0]["finish_reason"].as_str()
        ),
        (Some(1), Some("length"))
    );
}

#[test]
fn the_second_turn_reuses_the_first() {
    for lookahead in LOOKAHEAD {
        let server = ahead(lookahead);
        let long = "word ".repeat(60);
        let first = server
            .post(
                "/v1/chat/completions",
                &json!({"messages": [{"role": "user", "content": long}], "max_tokens": 40}),
            )
            .success();
        let answer = &first["choices"][0]["message"];
        let messages =
            json!([{"role": "user", "content": long}, answer, {"role": "user", "content": "more"}]);
        let second = server
            .post(
                "/v1/chat/completions",
                &json!({"messages": messages, "max_tokens": 1}),
            )
            .success();
        let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .expect("a number");
        let before = first["usage"]["total_tokens"].as_u64().expect("a number");
        assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        // All of the first turn but the last token of its answer, which is never run.
        assert_eq!(cached, before - 1);
    }
}

#[test]
fn models() {
    let server = server();
    let list = server.get("/v1/models").success();
    assert_eq!(list["data"][0]["id"], "scripted");
    assert_eq!(server.get("/v1/models/scripted").success(), list["data"][0]);
    let unknown = server.get("/v1/models/other/name");
    assert_eq!(
        (unknown.status, unknown.json()["error"]["code"].as_str()),
        (404, Some("model_not_found"))
    );
    for (path, status) in [
        ("/v1/nothing", 404),
        ("/nothing", 404),
        ("/v1/embeddings", 501),
        ("/v1/audio/speech", 501),
    ] {
        let answer = server.post(path, &json!({}));
        assert_eq!(answer.status, status, "{path}");
        assert!(
            answer.json()["error"]["message"]
                .as_str()
                .expect("a message")
                .contains(path),
            "{}",
            answer.text()
        );
    }
    assert_eq!(server.get("/v1/chat/completions").status, 405);
}
