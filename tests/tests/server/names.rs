//! What is wrong with a field is said of the name that the client has written.

use mlxcel_tests::server::Server;
use serde_json::{Value, json};

fn refused(server: &Server, path: &str, base: &Value, name: &str, value: &Value) -> Value {
    let mut body = base.clone();
    body[name] = value.clone();
    let answer = server.post(path, &body);
    assert_eq!(answer.status, 400, "{path} {name}: {}", answer.text());
    let error = answer.json()["error"].clone();
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains(name), "{path} {name}: {message}");
    error
}

#[test]
fn fields_are_called_what_the_client_calls_them() {
    let server = Server::scripted(&json!({}), &[]);
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    let prompt = json!({"prompt": "a"});
    let mut texts = Vec::new();
    for (path, base) in [
        ("/v1/chat/completions", &chat),
        ("/v1/completions", &prompt),
        ("/completion", &prompt),
    ] {
        for (name, value) in [
            ("temperature", json!(-1)),
            ("min_p", json!(1.1)),
            ("typical_p", json!(2)),
            ("typ_p", json!(2)),
            ("repeat_penalty", json!(0)),
            ("repetition_penalty", json!(0)),
            ("repetition_penalty", json!("x")),
            ("n", json!(0)),
            ("n_cmpl", json!(0)),
            ("n_cmpl", json!(129)),
            ("n_cmpl", json!(100)),
            ("max_tokens", json!(-2)),
            ("max_completion_tokens", json!(-2)),
            ("n_predict", json!(-2)),
            ("n_predict", json!("x")),
            ("max_tokens", json!(1.5)),
            ("max_tokens", json!(u64::MAX)),
            ("stream_options", json!({"include_usage": true})),
            ("priority", json!(101)),
            ("timeout", json!(0)),
            ("sse_ping_interval", json!(-2)),
        ] {
            let error = refused(&server, path, base, name, &value);
            if path.starts_with("/v1/") {
                assert_eq!(error["param"], name, "{path}");
            }
            if path == "/v1/completions" {
                texts.push(error["message"].clone());
            }
        }
    }
    for name in ["n_probs", "logprobs"] {
        refused(&server, "/completion", &prompt, name, &json!(300));
        refused(&server, "/completion", &prompt, name, &json!(-1));
    }
    refused(&server, "/v1/completions", &prompt, "logprobs", &json!(6));
    let error = refused(
        &server,
        "/v1/chat/completions",
        &chat,
        "n_probs",
        &json!(300),
    );
    assert_eq!(error["param"], "n_probs");
    let mut ranked = prompt.clone();
    ranked["n_cmpl"] = json!(2);
    let error = refused(&server, "/v1/completions", &ranked, "best_of", &json!(3));
    texts.push(error["message"].clone());
    let texts: Vec<&str> = texts.iter().filter_map(Value::as_str).collect();
    insta::assert_snapshot!(texts.join("\n"), @r#"
    temperature is -1, expected 0 to 100
    min_p is 1.1, expected 0 to 1
    typical_p is 2, expected 0 to 1
    typ_p is 2, expected 0 to 1
    repeat_penalty is 0, expected more than 0, up to 100
    repetition_penalty is 0, expected more than 0, up to 100
    repetition_penalty is a text, expected a number
    n is 0, expected 1 to 128
    n_cmpl is 0, expected 1 to 128
    n_cmpl is 129, expected 1 to 128
    n_cmpl asks for 100 answers at a time, at most 36 are possible
    max_tokens is -2, expected a whole number above 0, or -1 for no limit
    max_completion_tokens is -2, expected a whole number above 0, or -1 for no limit
    n_predict is -2, expected a whole number above 0, or -1 for no limit
    n_predict is a text, expected a whole number above 0, or -1 for no limit
    max_tokens is 1.5, expected a whole number above 0, or -1 for no limit
    max_tokens is 18446744073709551615, expected a whole number of at most 63 bits above 0, or -1 for no limit
    stream_options is given and stream is not true
    priority is 101, expected -100 to 100
    timeout is 0, expected seconds above 0 and up to this server's 600
    sse_ping_interval is -2, expected -1 to 2147483647
    best_of is 3 and n_cmpl is 2: answers are not ranked here, so both have to agree
    "#);
}

#[test]
fn members_are_called_by_their_place() {
    let server = Server::scripted(&json!({}), &["--ctx-size", "64"]);
    let message = |role: &str| json!({"messages": [{"role": role, "content": "a"}]});
    for (extra, param) in [
        (
            json!({"stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
        ),
        (json!({"stream_options": {"x": 1}}), "stream_options.x"),
        (
            json!({"response_format": {"type": "text", "x": 1}}),
            "response_format.x",
        ),
        (
            json!({"response_format": {"type": 1}}),
            "response_format.type",
        ),
    ] {
        let mut body = message("user");
        body["stream"] = json!(true);
        for (name, value) in extra.as_object().expect("members") {
            body[name] = value.clone();
        }
        let error = server.post("/v1/chat/completions", &body).json()["error"].clone();
        assert_eq!(error["param"], param);
        let text = error["message"].as_str().expect("a message");
        assert!(text.contains(param), "{text}");
    }
    for (extra, param) in [
        (
            json!({"content": [{"type": "text", "text": "a", "foo": 1}]}),
            "messages[0].content[0].foo",
        ),
        (json!({"content": "a", "foo": 1}), "messages[0].foo"),
        (json!({"content": "a", "name": 1}), "messages[0].name"),
        (
            json!({"content": "a", "tool_calls": {}}),
            "messages[0].tool_calls",
        ),
        (
            json!({"content": "a", "tool_call_id": 1}),
            "messages[0].tool_call_id",
        ),
    ] {
        let mut message = extra.clone();
        message["role"] = json!("user");
        let answer = server.post("/v1/chat/completions", &json!({"messages": [message]}));
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, &error["param"]), (400, &json!(param)));
        let text = error["message"].as_str().expect("a message");
        assert!(text.contains(param), "{text}");
    }
}

/// Two values of one name: one of them would have no effect.
#[test]
fn names_come_once_at_every_depth() {
    let server = Server::scripted(&json!({}), &["--ctx-size", "64"]);
    let chat = |rest: &str| {
        format!(r#"{{"stream": true, "messages": [{{"role": "user", "content": "a"}}], {rest}}}"#)
    };
    let said = |message: &str| format!(r#"{{"messages": [{{"role": "user", {message}}}]}}"#);
    for (path, body, place) in [
        (
            "/v1/completions",
            r#"{"prompt": "a", "top_k": 1, "top_k": 2}"#.to_owned(),
            "top_k",
        ),
        (
            "/v1/completions",
            r#"{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}"#.to_owned(),
            "logit_bias.5",
        ),
        (
            "/v1/chat/completions",
            chat(r#""stream_options": {"include_usage": true, "include_usage": false}"#),
            "stream_options.include_usage",
        ),
        (
            "/v1/chat/completions",
            chat(r#""chat_template_kwargs": {"a": {"b": 1, "b": 2}}"#),
            "chat_template_kwargs.a.b",
        ),
        (
            "/v1/chat/completions",
            said(r#""content": "x", "content": "y""#),
            "messages[0].content",
        ),
        (
            "/v1/chat/completions",
            said(r#""content": [{"type": "text", "text": "x", "text": "y"}]"#),
            "messages[0].content[0].text",
        ),
    ] {
        let answer = server.post_bytes(path, body.as_bytes());
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!(place)));
        assert_eq!(
            error["message"],
            format!("the body has {place:?} twice, expected it once")
        );
    }
    let native = server.post_bytes("/tokenize", br#"{"content": "a", "content": "b"}"#);
    let message = native.json()["error"]["message"].clone();
    assert_eq!(
        (native.status, message),
        (
            400,
            json!("the body has \"content\" twice, expected it once")
        )
    );
}
