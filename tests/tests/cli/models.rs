//! `list`, `rm` and `download`, against a store on disk and a hub on the loopback address.

use super::hub::Hub;
use mlxcel_tests::cli::Mlxcel;
use serde_json::Value;

/// A store with two models and an unfinished download.
fn with_store() -> Mlxcel {
    let mlxcel = Mlxcel::new();
    mlxcel.mock_model("cache/models/acme/small");
    let large = mlxcel.mock_model("cache/models/acme/zoo-large");
    std::fs::write(large.join("extra.bin"), vec![0; 5000]).expect("written");
    mlxcel.file("cache/models/acme/.begun.partial/x", "");
    mlxcel.file("cache/models/acme/halfway/config.json", "{}");
    mlxcel
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array()
        .expect("array")
        .iter()
        .map(|model| model["repo_id"].as_str().expect("text"))
        .collect()
}

#[test]
fn an_empty_store_lists_nothing() {
    let mlxcel = Mlxcel::new();
    insta::assert_snapshot!(mlxcel.run(["list"]).show(), @r#"
    exit 0
    --- stdout
    --- stderr
    no models in [home]/cache/models
    "#);
    assert_eq!(
        mlxcel.run(["list", "--json"]).json(),
        Value::Array(Vec::new())
    );
    assert!(!mlxcel.path("cache").exists(), "listing writes nothing");
}

#[test]
fn list_has_the_established_keys_and_orders() {
    let mlxcel = with_store();
    let json = mlxcel.run(["list", "--json"]).expect_success().json();
    let keys: Vec<&String> = json[0].as_object().expect("object").keys().collect();
    assert_eq!(keys, ["repo_id", "size_bytes", "path", "modified"]);
    assert_eq!(names(&json), ["acme/small", "acme/zoo-large"]);
    let by_size = mlxcel.run(["list", "--json", "--sort", "size"]).json();
    assert_eq!(names(&by_size), ["acme/zoo-large", "acme/small"]);
    assert!(by_size[0]["size_bytes"].as_u64() > by_size[1]["size_bytes"].as_u64());
    assert_eq!(
        mlxcel.run(["list", "-q"]).stdout,
        "acme/small\nacme/zoo-large\n"
    );
}

#[test]
fn list_for_people_names_what_is_not_whole() {
    let done = with_store().run(["list", "-v"]).expect_success();
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"\d{4}-\d\d-\d\d", "[day]    ");
    settings.bind(|| insta::assert_snapshot!(done.show(), @r#"
    exit 0
    --- stdout
    NAME            SIZE     MODIFIED    PATH
    acme/small      163 B    [day]      [home]/cache/models/acme/small
    acme/zoo-large  5.0 KiB  [day]      [home]/cache/models/acme/zoo-large
    --- stderr
    warning: [home]/cache/models/acme/.begun.partial (0 B): unfinished download; continue with `mlxcel download acme/begun` or drop it with `mlxcel rm acme/begun`
    warning: [home]/cache/models/acme/halfway (2 B): damaged: it holds no safetensors or GGUF file; repair it with `mlxcel download acme/halfway`
    "#));
}

#[test]
fn rm_removes_only_what_it_is_told_and_only_when_it_may() {
    let mlxcel = with_store();
    let refused = mlxcel.run(["rm", "acme/small"]);
    insta::assert_snapshot!(refused.show(), @r#"
    exit 2
    --- stdout
    --- stderr
    error: rm asks before it removes, and stdin is not a terminal: add --yes
    "#);
    assert!(mlxcel.path("cache/models/acme/small").exists());
    let done = mlxcel.run(["rm", "acme/small", "--yes"]).expect_success();
    assert!(
        done.stdout.is_empty() && done.stderr.starts_with("removed acme/small: "),
        "{}",
        done.show()
    );
    assert!(!mlxcel.path("cache/models/acme/small").exists());
    assert!(mlxcel.path("cache/models/acme/zoo-large").exists());
    insta::assert_snapshot!(mlxcel.run(["rm", "acme/small", "-y"]).show(), @r#"
    exit 3
    --- stdout
    --- stderr
    error: acme/small is not in the store at [home]/cache/models; `mlxcel list` shows what is
    "#);
}

#[test]
fn rm_never_touches_the_hugging_face_cache_or_a_path() {
    let mlxcel = Mlxcel::new();
    let snapshot =
        "huggingface/hub/models--acme--other/snapshots/0123456789012345678901234567890123456789";
    mlxcel.mock_model(snapshot);
    mlxcel.file(
        "huggingface/hub/models--acme--other/refs/main",
        "0123456789012345678901234567890123456789",
    );
    let done = mlxcel.run(["rm", "acme/other", "--yes"]);
    assert_eq!(done.code, Some(3), "{}", done.show());
    assert!(mlxcel.path(snapshot).join("config.json").exists());
    for name in [
        "../../etc/passwd",
        "/etc/passwd",
        "a/../b",
        "acme/small/x.gguf",
        "",
    ] {
        assert_eq!(mlxcel.run(["rm", "--yes", name]).code, Some(2), "{name}");
    }
}

#[test]
fn a_download_lands_in_the_store_and_prints_its_path() {
    let hub = Hub::start();
    let mlxcel = Mlxcel::new().with("HF_ENDPOINT", hub.endpoint());
    let done = mlxcel.run(["download", "acme/tiny"]).expect_success();
    assert_eq!(done.stdout, "[home]/cache/models/acme/tiny\n");
    insta::assert_snapshot!(done.stderr, @"downloading 2 files, 163 B");
    assert_eq!(mlxcel.run(["list", "-q"]).stdout, "acme/tiny\n");
    let asked = hub.requests();
    mlxcel.run(["download", "acme/tiny"]).expect_success();
    assert_eq!(hub.requests(), asked, "what is here is not asked for again");
}

#[test]
fn a_download_elsewhere_leaves_the_store_alone() {
    let hub = Hub::start();
    let mlxcel = Mlxcel::new().with("HF_ENDPOINT", hub.endpoint());
    let here = mlxcel.path("here");
    let done = mlxcel.run([
        "download",
        "acme/tiny",
        "-q",
        "--local-dir",
        here.to_str().expect("text"),
    ]);
    assert_eq!(
        done.expect_success().show(),
        "exit 0\n--- stdout\n[home]/here\n--- stderr\n"
    );
    assert!(here.join("model.safetensors").exists());
    assert_eq!(mlxcel.run(["list", "-q"]).stdout, "");
}

#[test]
fn what_the_hub_does_not_have_is_told() {
    let hub = Hub::start();
    let mlxcel = Mlxcel::new().with("HF_ENDPOINT", hub.endpoint());
    let done = mlxcel.run(["download", "acme/absent"]);
    assert_eq!(done.code, Some(3), "{}", done.show());
    assert!(
        done.stderr.contains("has no repository acme/absent"),
        "{}",
        done.stderr
    );
    let done = mlxcel.run(["download", "acme/tiny", "--revision", "gone"]);
    assert_eq!(done.code, Some(3), "{}", done.show());
    assert!(
        !mlxcel.path("cache/models/acme").exists(),
        "nothing is left behind"
    );
}

#[test]
fn a_server_that_refuses_is_a_failed_download() {
    let hub = Hub::start();
    let mlxcel = Mlxcel::new().with("HF_ENDPOINT", hub.endpoint());
    let done = mlxcel.run(["download", "acme/secret"]);
    assert_eq!(done.code, Some(6), "{}", done.show());
    assert!(done.stderr.contains("HF_TOKEN"), "{}", done.stderr);
}

#[test]
fn without_the_network_a_download_says_which_variable_forbids_it() {
    let done = Mlxcel::new()
        .with("MLXCEL_OFFLINE", "1")
        .run(["download", "acme/tiny"]);
    insta::assert_snapshot!(done.show(), @r#"
    exit 3
    --- stdout
    --- stderr
    error: acme/tiny is not on this machine and MLXCEL_OFFLINE forbids the network; unset it to download
    "#);
}

#[test]
fn run_downloads_what_it_is_told_to_run_and_generate_does_not() {
    let hub = Hub::start();
    let mlxcel = Mlxcel::new()
        .with_mock_plugins()
        .with("HF_ENDPOINT", hub.endpoint());
    let done = mlxcel.run(["generate", "-m", "acme/tiny", "-p", "x"]);
    insta::assert_snapshot!(done.show(), @r#"
    exit 3
    --- stdout
    --- stderr
    error: model acme/tiny is not on this machine (looked in [home]/cache/models/acme/tiny; [home]/huggingface/hub/models--acme--tiny); get it with `mlxcel download acme/tiny`
    "#);
    assert_eq!(hub.requests(), 0);
    let done = mlxcel
        .run(["run", "acme/tiny", "--estimate-memory"])
        .expect_success();
    assert!(done.stdout.starts_with("memory: "), "{}", done.show());
    assert_eq!(mlxcel.run(["list", "-q"]).stdout, "acme/tiny\n");
}

#[test]
fn the_default_model_is_not_downloaded_unasked() {
    let hub = Hub::start();
    let done = Mlxcel::new()
        .with("HF_ENDPOINT", hub.endpoint())
        .run(["run"]);
    insta::assert_snapshot!(done.show(), @r#"
    exit 3
    --- stdout
    --- stderr
    error: no model was named, and the default mlx-community/gemma-4-e2b-it-4bit is not on this machine
    hint: `mlxcel run mlx-community/gemma-4-e2b-it-4bit` downloads and runs it; `mlxcel run PATH` runs a local directory or .gguf file
    "#);
    assert_eq!(hub.requests(), 0);
}

#[test]
fn the_store_does_not_pass_one_revision_off_as_another() {
    let hub = Hub::start();
    let mlxcel = Mlxcel::new()
        .with_mock_plugins()
        .with("HF_ENDPOINT", hub.endpoint());
    mlxcel.run(["download", "acme/tiny"]).expect_success();
    let done = mlxcel.run([
        "generate",
        "-m",
        "acme/tiny",
        "-p",
        "x",
        "--revision",
        "other",
    ]);
    assert_eq!(done.code, Some(3), "{}", done.show());
    assert!(
        done.stderr.contains("but revision other was asked for"),
        "{}",
        done.stderr
    );
}

/// A service or a container may have no home: what lies at a path needs none, and the rest says which variable helps.
#[test]
fn without_a_home_paths_work_and_the_store_says_what_to_set() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    mlxcel.mock_model("model");
    let model = mlxcel.path("model").display().to_string();
    let nowhere = ["HOME", "MLXCEL_CACHE_DIR", "HF_HOME"];
    let mlxcel = nowhere
        .iter()
        .fold(mlxcel, |mlxcel, name| mlxcel.with(name, ""));
    for args in [
        &["inspect", "-m", &model][..],
        &["inspect", "-m", "./model"],
        &["generate", "-m", &model, "-p", "x", "--estimate-memory"],
        &["run", &model, "-p", "x", "--estimate-memory"],
        &["bench", "-m", &model, "--estimate-memory"],
        &["serve", &model, "--estimate-memory"],
        &["arch"],
        &["plugin", "list"],
        &["list", "--models-dir", "."],
    ] {
        let done = mlxcel.run(args).expect_success();
        let warned = done.stderr.contains("HOME") || done.stderr.contains("error");
        assert!(!warned, "{args:?}: {}", done.show());
    }
    for args in [
        &["list"][..],
        &["rm", "o/n", "--yes"],
        &["download", "o/n"],
        &["inspect", "-m", "o/n"],
        &["run", "-p", "x"],
        &["serve", "o/n"],
    ] {
        let done = mlxcel.run(args);
        assert_eq!(
            (done.code, done.stderr.as_str()),
            (
                Some(2),
                "error: no folder for models: HOME is not set, so set MLXCEL_MODELS_DIR or MLXCEL_CACHE_DIR\n"
            ),
            "{args:?}"
        );
    }
    let done = mlxcel.run(["inspect", "-m", "~/model"]);
    insta::assert_snapshot!(done.stderr, @r#"error: "~/model" is in the home folder and HOME is not set: give the whole path"#);
    let json = mlxcel.run(["doctor", "--json"]).json();
    assert_eq!(json["ready"], true);
    for folder in ["cache", "store"] {
        let problem = json[folder]["problem"].as_str().expect("text");
        assert!(problem.contains("HOME is not set"), "{folder}: {problem}");
    }
}
