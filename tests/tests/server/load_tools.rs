//! The load generator and the soak run against the real server with a scripted model: that they measure what was asked for
//! and find nothing wrong where nothing is. No figure is judged here.

use std::time::Duration;

use mlxcel_load::http::Target;
use mlxcel_load::load::{self, Until};
use mlxcel_load::soak::{self, Kind, Limits};
use mlxcel_load::{LoadError, chat};
use mlxcel_tests::server::Server;
use serde_json::json;

fn target(server: &Server) -> Target {
    Target::parse(server.url()).expect("an address")
}

#[test]
fn clients_get_the_tokens_that_they_asked_for() {
    let server = Server::scripted(&json!({}), &["--parallel", "2"]);
    let options = load::Options {
        target: target(&server),
        clients: 3,
        until: Until::Requests(7),
        prompt_tokens: 40,
        max_tokens: 9,
        seed: 1,
    };
    let outcome = load::run(&options).expect("a run");
    assert!(outcome.failures.is_empty(), "{:?}", outcome.failures);
    let tokens: Vec<usize> = outcome.answers.iter().map(|answer| answer.tokens).collect();
    assert_eq!(tokens, [9; 7]);
    let report = outcome.json(&options);
    assert_eq!(report["answers"], 7);
    assert_eq!(report["ttft_ms"]["count"], 7);
    assert!(report["inter_token_ms"]["p95"].is_number(), "{report}");
}

#[test]
fn a_failure_is_counted_by_its_text() {
    let server = Server::scripted(&json!({}), &["--ctx-size", "64"]);
    let options = load::Options {
        target: target(&server),
        clients: 2,
        until: Until::Requests(4),
        prompt_tokens: 100,
        max_tokens: 4,
        seed: 1,
    };
    let outcome = load::run(&options).expect("a run");
    assert!(outcome.answers.is_empty());
    assert_eq!(outcome.failures.values().sum::<usize>(), 4);
    let text = outcome.failures.keys().next().expect("one");
    assert!(text.starts_with("status 400"), "{text}");
}

#[test]
fn both_turns_of_a_chat_have_a_first_token() {
    let server = Server::scripted(&json!({}), &[]);
    let options = chat::Options {
        target: target(&server),
        history_tokens: 300,
        max_tokens: 4,
        rounds: 2,
        seed: 1,
    };
    let report = chat::run(&options).expect("a run");
    assert_eq!(report["turn_two_ttft_ms"].as_array().map(Vec::len), Some(2));
    assert!(server.metric("llamacpp:prompt_tokens_cached_total") >= 0.0);
}

#[test]
#[cfg(target_os = "linux")]
fn a_soak_run_sends_every_kind_and_all_of_it_comes_back() {
    let server = Server::scripted(&json!({}), &["--metrics", "--parallel", "2"]);
    let (csv, curve) = (server.home.path("soak.csv"), server.home.path("soak.md"));
    let options = soak::Options {
        target: target(&server),
        process: server.id(),
        time: Duration::from_secs(2),
        every: Duration::from_millis(250),
        clients: 3,
        long_tokens: 400,
        seed: 1,
        csv: csv.clone(),
        curve: curve.clone(),
        // Two seconds say nothing of memory.
        limits: Limits {
            growth_bytes: u64::MAX / 4,
            ..Limits::default()
        },
    };
    let (verdict, tally) = soak::run(&options).expect("a run");
    assert_eq!(verdict.problems, [""; 0]);
    for kind in Kind::MIX {
        assert!(tally.sent.contains_key(&kind), "{kind:?}");
    }
    let samples = std::fs::read_to_string(csv).unwrap();
    assert!(samples.lines().count() >= 4, "{samples}");
    let page = std::fs::read_to_string(curve).unwrap();
    assert!(page.contains("Everything came back"), "{page}");
}

#[test]
fn a_server_that_is_not_there_is_told() {
    let target = Target::parse("http://127.0.0.1:1").unwrap();
    let error = load::ask(&target, &[1], 1).unwrap_err();
    assert!(matches!(error, LoadError::Connection { .. }), "{error}");
}
