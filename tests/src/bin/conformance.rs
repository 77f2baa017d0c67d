//! The conformance suite on a backend plugin, in pieces that somebody else hands out: `conformance PLUGINS BACKEND [OPTIONS]`.
//!
//! `PLUGINS` is a folder of plugins, `BACKEND` a backend's name or `reference`, `OPTIONS` what it is opened with, as JSON. Requests are lines
//! of standard input, answers lines of JSON on standard output: `groups` gives each group with how many cases it has, `run GROUP FROM TO`
//! runs those from place FROM to before TO and tells of each before and after it. With `{"deterministic":true}` there is the group `rows` besides; with
//! `{"precision":"high"}` or `"fast"` products with quantised weights may be as far from the reference as activations of 16 or 8 bits explain. `conformance.py` of `cargo xtask bench-cuda` hands out.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "lines are what this program is for"
)]

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;

use mlxcel::plugin::{BackendChoice, Loader, OpenOptions};
use mlxcel_sdk::Backend;
use mlxcel_sdk::testkit::conformance::{Depth, GROUPS, Progress, ROWS, group, run_some};
use mlxcel_sdk::testkit::{ReferenceOptions, reference_backend};
use mlxcel_tests::plugins::catalogue_of;
use serde_json::{Map, Value, json};

fn main() -> ExitCode {
    match start(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}

fn start(args: &[String]) -> Result<(), String> {
    let (plugins, name, options) = match args {
        [plugins, name] => (plugins, name, "{}"),
        [plugins, name, options] => (plugins, name, options.as_str()),
        _ => return Err("expected PLUGINS BACKEND [OPTIONS]".to_owned()),
    };
    if name == "reference" {
        let reference = reference_backend(ReferenceOptions::default());
        return answer(&reference.backend(), Depth::Values, true);
    }
    let wrong = |error: &dyn std::fmt::Display| error.to_string();
    let catalogue = catalogue_of(Path::new(plugins)).map_err(|error| wrong(&error))?;
    let choice = BackendChoice::Named(name.clone());
    let selected = Loader::default().select_backend(&catalogue, &choice);
    let selected = selected.map_err(|error| wrong(&error))?;
    let options: Map<String, Value> =
        serde_json::from_str(options).map_err(|error| wrong(&error))?;
    let is_deterministic = options.get("deterministic") == Some(&Value::Bool(true));
    let precision = options.get("precision").and_then(Value::as_str);
    // Where the backend decides how to round, it is held to what it would give without that.
    let depth = precision.and_then(Depth::of_precision).unwrap_or_default();
    let open = OpenOptions {
        options,
        ..OpenOptions::default()
    };
    let opened = selected.plugin.open(&open).map_err(|error| wrong(&error))?;
    // SAFETY: the table is open until `opened` is dropped, on this thread.
    let backend = unsafe { Backend::from_raw(opened.ops()) };
    answer(&backend, depth, is_deterministic)
}

fn answer(backend: &Backend, depth: Depth, is_deterministic: bool) -> Result<(), String> {
    tell(&json!({ "ready": true }))?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["groups"] => groups(backend, is_deterministic)?,
            ["run", name, from, to] => {
                let place = |text: &str| {
                    let number = text.parse::<usize>();
                    number.map_err(|error| format!("run {name} {from} {to}: {text}: {error}"))
                };
                cases(backend, depth, name, place(from)?..place(to)?)?;
            }
            _ => {
                return Err(format!(
                    "expected groups or run GROUP FROM TO, found {line}"
                ));
            }
        }
    }
    Ok(())
}

fn groups(backend: &Backend, is_deterministic: bool) -> Result<(), String> {
    for group in GROUPS.iter().chain(is_deterministic.then_some(&ROWS)) {
        let cases = run_some(backend, &[*group], Depth::Values, 0..0, &mut |_| {});
        tell(&json!({ "group": group.name, "cases": cases }))?;
    }
    tell(&json!({ "done": true }))
}

fn cases(
    backend: &Backend,
    depth: Depth,
    name: &str,
    places: std::ops::Range<usize>,
) -> Result<(), String> {
    let group = group(name).ok_or_else(|| format!("there is no group called {name}"))?;
    let mut told = Ok(());
    run_some(backend, &[*group], depth, places, &mut |progress| {
        let line = match progress {
            Progress::Begins(place, case) => json!({ "begins": place, "case": case }),
            Progress::Ended(place, outcome) => json!({
                "ended": place, "case": outcome.case, "failure": outcome.failure, "worst": outcome.worst,
            }),
            Progress::Broken(reason) => json!({ "broken": reason }),
        };
        if told.is_ok() {
            told = tell(&line);
        }
    });
    told?;
    tell(&json!({ "done": true }))
}

fn tell(line: &Value) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{line}").and_then(|()| out.flush());
    written.map_err(|error| error.to_string())
}
