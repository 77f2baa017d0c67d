//! `mlxcel bench` as a black box: what it refuses, and the perplexity of texts whose continuation is known.

use mlxcel_tests::cli::{Mlxcel, real_model};
use mlxcel_tests::scripted::scripted_model;
use serde_json::{Value, json};

#[test]
fn nothing_to_measure_is_an_error() {
    let done = Mlxcel::new().run(["bench", "-m", "x", "-p", "0", "-n", "0"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""));
    assert!(
        done.stderr.contains("nothing to measure"),
        "{}",
        done.stderr
    );
}

#[test]
fn speed_and_quality_are_not_measured_in_one_run() {
    for flags in [
        ["--perplexity", "x", "-p", "16"],
        ["--against", "dtype=f16", "-n", "8"],
    ] {
        let args = ["bench", "-m", "x"].iter().chain(&flags);
        let done = Mlxcel::new().run(args);
        assert_eq!(done.code, Some(2), "{flags:?}: {}", done.stderr);
    }
}

/// `bench --perplexity` of a text with the model that knows one successor of every byte.
fn perplexity(text: &str, flags: &[&str]) -> Value {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let model = scripted_model(&mlxcel, "scripted", &json!({}));
    let file = mlxcel.file("text.txt", text);
    let (model, file) = (model.display().to_string(), file.display().to_string());
    let mut args = vec!["bench", "-m", &model, "--perplexity", &file, "-o", "json"];
    // The mock device has less memory than any model needs.
    args.extend(["--perplexity-context", "32", "--dtype", "f32", "--force"]);
    args.extend(flags);
    let done = mlxcel.run(&args).expect_success();
    serde_json::from_str(&done.stdout).expect("JSON")
}

#[test]
fn a_text_that_the_model_expects_has_a_perplexity_of_one() {
    let text = "abcdefghijklmnopqrstuvwxyz".repeat(4);
    let found = perplexity(&text, &["--against", "step-rows=1"]);
    assert_eq!(found["chunks"], 3);
    for setting in found["settings"].as_array().expect("settings") {
        // Of each chunk of 32 the tokens from 17 to 31.
        assert_eq!(setting["tokens"], 3 * 15);
        let perplexity = setting["perplexity"].as_f64().unwrap();
        assert!((perplexity - 1.0).abs() < 1e-9, "{found}");
    }
    assert_eq!(found["settings"][1]["setting"], "step-rows=1");
    assert_eq!(found["distance"]["kl_max"], 0.0);
    assert_eq!(found["distance"]["logit_max"], 0.0);
    assert_eq!(found["distance"]["same_top"], 1.0);
}

#[test]
fn a_text_that_the_model_does_not_expect_has_a_high_one() {
    let found = perplexity(&"x".repeat(40), &["--perplexity-chunks", "1"]);
    assert_eq!(found["chunks"], 1);
    // The logit of the expected byte is 60, those of all others 0.
    let perplexity = found["settings"][0]["perplexity"].as_f64().unwrap();
    assert!((perplexity.ln() - 60.0).abs() < 1e-3, "{found}");
    assert!(found["distance"].is_null());
}

#[test]
fn a_text_that_is_too_short_and_a_setting_that_is_not_there_are_told() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let model = scripted_model(&mlxcel, "scripted", &json!({}));
    let file = mlxcel.file("text.txt", "short");
    let (model, file) = (model.display().to_string(), file.display().to_string());
    let done = mlxcel.run(["bench", "-m", &model, "--force", "--perplexity", &file]);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("has 5 tokens"), "{}", done.stderr);
    let long = mlxcel
        .file("long.txt", "a".repeat(600))
        .display()
        .to_string();
    let args = [
        "bench",
        "-m",
        &model,
        "--force",
        "--perplexity",
        &long,
        "--against",
        "speed=2",
    ];
    let done = mlxcel.run(args);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("--against speed=2"), "{}", done.stderr);
}

/// The mock backend does not say that it keeps keys and values in another type than that of the activations.
#[test]
fn types_of_keys_and_values_that_a_backend_does_not_keep_are_refused_at_once() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let model = scripted_model(&mlxcel, "scripted", &json!({}));
    let model = model.display().to_string();
    let both = ["--cache-type-k", "f16", "--cache-type-v", "f16"];
    let speed = [
        "bench", "-m", &model, "-p", "4", "-n", "0", "-r", "1", "--force",
    ];
    let answer = ["generate", "-m", &model, "-p", "x", "-n", "1"];
    let serve = ["serve", &model, "--port", "0"];
    for command in [&speed[..], &answer, &serve] {
        let run = |flags: &[&str]| {
            mlxcel.run(command.iter().chain(["--dtype", "f32"].iter()).chain(flags))
        };
        insta::allow_duplicates! {
            insta::assert_snapshot!(run(&both).show(), @r#"
            exit 2
            --- stdout
            --- stderr
            error: backend mock does not keep keys and values in f16 beside activations in f32: leave --cache-type-k and --cache-type-v out, or set --dtype f16
            "#);
            insta::assert_snapshot!(run(&both[..2]).show(), @r#"
            exit 2
            --- stdout
            --- stderr
            error: keys would be kept in f16 and values in f32: give --cache-type-k and --cache-type-v the same type
            "#);
        }
    }
    let mut same = speed.to_vec();
    same.extend(["--dtype", "f32", "-o", "json"]);
    same.extend(["--cache-type-k", "f32", "--cache-type-v", "f32"]);
    let report = mlxcel.run(&same).expect_success().json();
    assert_eq!(
        (&report["dtype"], &report["kv_dtype"]),
        (&json!("f32"), &json!("f32"))
    );
}

/// `bench` of the scripted model, which answers as long as it is asked to.
fn speed(flags: &[&str]) -> mlxcel_tests::cli::Finished {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let model = scripted_model(&mlxcel, "scripted", &json!({}));
    let model = model.display().to_string();
    // The mock device has less memory than any model needs.
    let args = ["bench", "-m", &model, "--dtype", "f32", "--force"];
    mlxcel.run(args.iter().chain(flags))
}

/// Half of a measurement would look like a whole one, and a case at the end of the list would cost those before it.
#[test]
fn what_the_context_does_not_hold_is_refused_before_anything_is_measured() {
    for (flags, told) in [
        (
            ["-p", "0", "-n", "128", "-c", "16", "-d", "0"],
            "tg128 takes 130 tokens of context and there are 16",
        ),
        (
            ["-p", "4", "-n", "4", "-c", "32", "-d", "0,28"],
            "tg4@d28 takes 33 tokens of context and there are 32",
        ),
        (
            ["-p", "4,4294967295", "-n", "0", "-c", "32", "-d", "0"],
            "pp4294967295 takes 4294967295 tokens of context and there are 32",
        ),
    ] {
        let done = speed(&flags);
        assert_eq!(
            (done.code, done.stdout.as_str()),
            (Some(2), ""),
            "{flags:?}"
        );
        assert!(done.stderr.contains(told), "{flags:?}: {}", done.stderr);
        assert!(!done.stderr.contains("measuring"), "{}", done.stderr);
    }
    let whole = ["-p", "4", "-n", "4", "-c", "32", "-d", "27", "-r", "1"];
    speed(&whole).expect_success();
}

/// What a report says of threads, precision and steps.
fn settings(report: &Value) -> Value {
    let names = [
        "threads",
        "threads_asked",
        "precision",
        "precision_asked",
        "step_rows",
    ];
    json!(names.map(|name| report[name].clone()))
}

#[test]
fn a_report_says_how_it_was_measured_and_one_run_has_no_deviation() {
    let flags = ["-p", "4", "-n", "0", "-r", "1", "-c", "64", "-o"];
    let run = |form| {
        speed(&[&flags[..], &[form]].concat())
            .expect_success()
            .stdout
    };
    let csv = run("csv");
    let mut lines = csv.lines();
    assert_eq!(
        lines.next(),
        Some("model,backend,precision,test,tokens_per_second,deviation,repetitions")
    );
    let row: Vec<&str> = lines.next().expect("a row").split(',').collect();
    // This backend does not say what it takes for `auto`, so that what was asked for is all there is to tell.
    assert_eq!((row[2], row[3], row[5], row[6]), ("auto", "pp4", "", "1"));
    let report: Value = serde_json::from_str(&run("json")).expect("JSON");
    assert_eq!(report["context_tokens"], 64);
    assert_eq!(report["deterministic"], false);
    assert!(report["results"][0]["deviation"].is_null());
    let table = run("table");
    assert!(
        table.contains("precision auto, threads default,"),
        "{table}"
    );
    assert_eq!(settings(&report), json!([null, 0, null, "auto", 512]));
    assert!(table.trim_end().ends_with("| - |"), "{table}");
}

/// What a backend takes where nobody asks is told by the backend, and is what it does.
#[test]
fn a_report_has_the_settings_in_force() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let model = real_model().display().to_string();
    let backends = mlxcel.run(["doctor", "--json"]).expect_success().json();
    let details = &backends["backends"][0]["details"];
    let default = details["preferred_precision"].as_str().expect("a word");
    let flags = ["bench", "-m", &model, "-p", "4", "-n", "0", "-r", "1", "-o"];
    let report = mlxcel.run(flags.iter().chain(&["json"])).expect_success();
    let report = report.json();
    let threads = &details["compute_threads"];
    assert_eq!(settings(&report), json!([threads, 0, default, "auto", 512]));
    let asked = ["json", "--precision", "fast", "-t", "1"];
    let report = mlxcel.run(flags.iter().chain(&asked)).expect_success();
    let report = settings(&report.json());
    assert_eq!(report, json!([1, 1, "fast", "fast", 512]));
    let table = mlxcel.run(flags.iter().chain(&["table"])).expect_success();
    let told = format!("precision {default} (auto), threads {threads} (default)");
    assert!(table.stdout.contains(&told), "{}", table.stdout);

    let file = mlxcel.file("text.txt", "The quick brown fox jumps over it. ".repeat(8));
    let file = file.display().to_string();
    let flags = ["bench", "-m", &model, "--perplexity", &file, "-o", "json"];
    // Exact products have exact caches unless told otherwise, and only precision is to differ.
    let short = [
        "--perplexity-context",
        "16",
        "--perplexity-chunks",
        "1",
        "--cache-type-k",
        "f32",
        "--cache-type-v",
        "f32",
    ];
    for precision in ["exact", "high", "fast"] {
        let against = format!("precision={precision}");
        let args = flags.iter().chain(&short);
        let done = mlxcel
            .run(args.chain(&["--against", &against]))
            .expect_success();
        let report = done.json();
        let settings = [0, 1].map(|at| report["settings"][at]["precision"].clone());
        assert_eq!(settings, [json!(default), json!(precision)]);
        let is_same = report["distance"]["logit_max"] == 0.0;
        assert_eq!(is_same, precision == default, "{precision}: {report}");
    }
}

/// A case that is measured twice takes twice the time and says nothing new.
#[test]
fn a_value_that_a_list_has_twice_is_refused() {
    for (flag, list, value) in [
        ("-p", "4,4", "4"),
        ("-n", "8,0,8", "8"),
        ("-d", "0,16,0", "0"),
        ("-b", "1,2,1", "1"),
        ("--n-prompt", "0,0", "0"),
    ] {
        let done = speed(&[flag, list]);
        assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""), "{flag}");
        let told = format!("{value} is given twice: each case is measured once");
        assert!(done.stderr.contains(&told), "{flag}: {}", done.stderr);
    }
    // A flag that is repeated adds to its list.
    let done = speed(&["-p", "4", "-p", "4"]);
    assert!(
        done.stderr.contains("-p 4 is given twice"),
        "{}",
        done.stderr
    );
}

#[test]
fn the_estimate_and_the_guard_of_memory_are_there_as_for_answers() {
    let done = speed(&["--estimate-memory"]).expect_success();
    assert!(done.stdout.starts_with("memory: "), "{}", done.stdout);
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let model = scripted_model(&mlxcel, "scripted", &json!({}));
    let model = model.display().to_string();
    let done = mlxcel.run([
        "bench", "-m", &model, "--dtype", "f32", "-p", "4", "-n", "0",
    ]);
    assert_eq!(done.code, Some(7), "{}", done.stderr);
    assert!(done.stderr.contains("may be used"), "{}", done.stderr);
}

#[test]
fn a_setting_that_is_given_twice_and_a_text_that_is_none_are_told() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let model = scripted_model(&mlxcel, "scripted", &json!({}));
    let file = mlxcel.file("text.txt", "a".repeat(600));
    let (model, file) = (model.display().to_string(), file.display().to_string());
    let text = [
        "bench",
        "-m",
        &model,
        "--dtype",
        "f32",
        "--force",
        "--perplexity",
    ];
    let twice = [
        &file,
        "--against",
        "step-rows=1",
        "--against",
        "step-rows=2",
    ];
    let done = mlxcel.run(text.iter().copied().chain(twice));
    assert_eq!(done.code, Some(2));
    assert!(
        done.stderr
            .contains("--against step-rows=2: step-rows=1 sets step-rows already;"),
        "{}",
        done.stderr
    );
    // The types of keys and of values are halves of one thing.
    for (first, second, is_told) in [
        ("cache-type=f16", "cache_type_k=f32", true),
        ("cache-type-v=f32", "cache-type=f16", true),
        ("cache-type-k=f32", "cache_type_k=f16", true),
        ("cache_type_k=f32", "cache_type_v=f32", false),
    ] {
        let flags = [&file, "--against", first, "--against", second];
        let done = mlxcel.run(text.iter().copied().chain(flags));
        assert_eq!(
            done.stderr
                .contains(&format!("--against {second}: {first} sets cache-type-")),
            is_told,
            "{first} {second}: {}",
            done.stderr
        );
    }
    let done = mlxcel.run(text.iter().chain(&["/nowhere/text.txt"]));
    assert_eq!(done.code, Some(2));
    assert!(
        done.stderr.contains("--perplexity /nowhere/text.txt"),
        "{}",
        done.stderr
    );
}
