//! Model files that are not in order, and `inspect` on those that are. Needs no backend.

use std::path::Path;

use mlxcel_registry::checkpoint::testing::{GgufBuilder, SafetensorsBuilder};
use mlxcel_tests::cli::{Finished, Mlxcel, real_model};
use mlxcel_tests::plugins::Healthy;
use serde_json::{Value, json};

fn inspect(mlxcel: &Mlxcel, model: &Path) -> Finished {
    mlxcel.run([Path::new("inspect"), Path::new("-m"), model])
}

#[test]
fn inspect_needs_no_backend_and_has_the_established_keys() {
    let mlxcel = Mlxcel::new().with("MEMORY_LIMIT", "1G");
    Healthy::Family
        .copy_to(&mlxcel.dir("plugins"))
        .expect("copied");
    let mlxcel = {
        let plugins = mlxcel.path("plugins");
        mlxcel.with("MLXCEL_PLUGIN_PATH", plugins)
    };
    mlxcel.mock_model("model");
    let json = mlxcel
        .run(["inspect", "-m", "./model", "--json"])
        .expect_success()
        .json();
    insta::assert_json_snapshot!(json, @r#"
    {
      "mlxcel_version": "0.1.0",
      "model": "./model",
      "model_type": "mock",
      "family": "mock",
      "plugin": {
        "name": "mock",
        "version": "0.1.0"
      },
      "inputs": {
        "max_tokens": 4096,
        "batch": 1,
        "kv_cache_mode": "fp16",
        "quant": "default",
        "dtype": "f16",
        "kv_dtype": "f16"
      },
      "context_length": 4096,
      "weights_bytes": 36,
      "weights_source": "safetensors_header",
      "kv_bytes_per_token": {
        "fp16": 12,
        "fp32": 24,
        "q8_0": 10,
        "q4_0": 8,
        "int8": null,
        "turbo4": null
      },
      "kv_bytes_total": 49152,
      "kv_detail": "1 dense layer",
      "per_slot_overhead_bytes": null,
      "activation_bytes": 3084,
      "backend_inflight_bytes": null,
      "headroom_bytes": 10454,
      "headroom_factor": 1.2,
      "budget_bytes": 1073741824,
      "total_bytes": 62726,
      "fits": true,
      "tensors_checked": false
    }
    "#);
    insta::assert_snapshot!(mlxcel.run(["inspect", "-m", "./model", "-n", "100", "--batch", "4"]).show(), @r#"
    exit 0
    --- stdout
    model         ./model
    architecture  mock (plugin mock 0.1.0)
    context       4096 tokens
    weights       36 B
    caches        4.7 KiB for 4 x 100 tokens in f16, 12 B a token: 1 dense layer
    activations   2.4 KiB
    headroom      1.4 KiB (20 %)
    total         8.5 KiB
    budget        1.0 GiB (MEMORY_LIMIT)
    fits          yes
    tensors       not compared with the configuration: loading does that
    --- stderr
    "#);
}

#[test]
fn the_parts_of_an_estimate_add_up_and_follow_the_flags() {
    let mlxcel = Mlxcel::new()
        .with_mock_plugins()
        .with("MLXCEL_MEMORY_LIMIT", "3000");
    mlxcel.mock_model("model");
    let figures = |args: &[&str]| -> Value {
        let all = ["inspect", "-m", "./model", "--json"].iter().chain(args);
        mlxcel.run(all).expect_success().json()
    };
    let number = |json: &Value, key: &str| json[key].as_u64().expect("number");
    let one = figures(&["-n", "100"]);
    let two = figures(&["-n", "100", "--batch", "2"]);
    let per_token = one["kv_bytes_per_token"]["fp16"].as_u64().expect("number");
    assert_eq!(
        per_token,
        3 * 2 * 2,
        "one head of three keys and three values in 16 bits"
    );
    assert_eq!(number(&one, "kv_bytes_total"), per_token * 100);
    assert_eq!(number(&two, "kv_bytes_total"), per_token * 200);
    for json in [&one, &two] {
        let sum = [
            "weights_bytes",
            "kv_bytes_total",
            "activation_bytes",
            "headroom_bytes",
        ]
        .map(|key| number(json, key));
        assert_eq!(number(json, "total_bytes"), sum.iter().sum::<u64>());
        let fits = number(json, "total_bytes") <= number(json, "budget_bytes");
        assert_eq!(json["fits"], json!(fits));
    }
    assert_eq!((&one["fits"], &two["fits"]), (&json!(true), &json!(false)));
}

#[test]
fn a_longer_sequence_than_the_context_is_estimated_at_the_context_and_said_so() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    mlxcel.mock_model("model");
    let done = mlxcel
        .run(["inspect", "-m", "./model", "--json", "-n", "1000000"])
        .expect_success();
    assert_eq!(done.json()["inputs"]["max_tokens"], json!(4096));
    assert_eq!(
        done.stderr,
        "1000000 tokens are more than the model's context: the estimate is for 4096\n"
    );
}

#[test]
fn inspect_reads_the_headers_of_a_real_model() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let model = real_model();
    let args = [
        Path::new("inspect"),
        Path::new("-m"),
        &model,
        Path::new("--json"),
    ];
    let json = mlxcel.run(args).expect_success().json();
    assert_eq!(
        (&json["family"], &json["weights_source"]),
        (&json!("llama"), &json!("gguf_header"))
    );
    assert_eq!(
        json["kv_bytes_per_token"]["fp16"],
        json!(30 * 3 * (64 + 64) * 2)
    );
    // The backend that would run it keeps caches in f16 beside f32 activations, and so does the verdict.
    let per_token = json["kv_bytes_per_token"]["fp16"].as_u64().expect("number");
    assert_eq!(json["inputs"]["dtype"], json!("f32"));
    assert_eq!(json["kv_bytes_total"], json!(per_token * 8192));
}

/// What the guard counts for caches follows their type, that of the activations apart.
#[test]
fn caches_count_as_their_type_is() {
    let model = real_model();
    let model = model.to_str().expect("text");
    let mlxcel = Mlxcel::new()
        .with_real_plugins()
        .with("MLXCEL_MEMORY_LIMIT", "1T");
    let line = |flags: &[&str]| {
        let args = ["generate", "-m", model, "--estimate-memory"];
        let done = mlxcel.run(args.iter().chain(flags)).expect_success();
        let found = done.stdout.split("caches ").nth(1).expect("caches");
        let caches = found.split(',').next().expect("a part").to_owned();
        (
            done.stdout.split(" (").next().expect("a part").to_owned(),
            caches,
        )
    };
    let (text, caches) = line(&["--cache-type-k", "f32", "--cache-type-v", "f32"]);
    assert!(text.ends_with(" for 8192 tokens in f32"), "{text}");
    // Exact products have exact caches, others what the backend prefers.
    assert_eq!(line(&["--precision", "exact"]).1, caches);
    let (half_text, half_caches) = line(&[]);
    assert!(
        half_text.ends_with(" for 8192 tokens in f32 with f16 keys and values"),
        "{half_text}"
    );
    assert_eq!((&*caches, &*half_caches), ("360.0 MiB", "180.0 MiB"));
    // A head of 64 elements has 64 codes and two scales of two bytes.
    let (q8_text, q8_caches) = line(&["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]);
    assert!(q8_text.ends_with(" with q8_0 keys and values"), "{q8_text}");
    let (_, q4_caches) = line(&["--cache-type-k", "q4_0", "--cache-type-v", "q4_0"]);
    assert_eq!((&*q8_caches, &*q4_caches), ("95.6 MiB", "50.6 MiB"));
}

fn joined<'a>(args: &[&'a str], flags: &[&'a str]) -> Vec<&'a str> {
    [args, flags].concat()
}

/// `inspect` and the guard of `run` say the same of the same model, whatever the type.
#[test]
fn inspect_and_the_guard_have_one_verdict() {
    let model = real_model();
    let model = model.to_str().expect("text");
    let types = |name| ["--cache-type-k", name, "--cache-type-v", name];
    for flags in [
        ["--dtype", "auto"].to_vec(),
        ["--dtype", "f16"].to_vec(),
        types("q8_0").to_vec(),
    ] {
        for limit in ["1T", "200M", "1M"] {
            let mlxcel = Mlxcel::new()
                .with_real_plugins()
                .with("MLXCEL_MEMORY_LIMIT", limit);
            let args = joined(&["inspect", "-m", model, "--json"], &flags);
            let json = mlxcel.run(args).expect_success().json();
            let args = joined(
                &["generate", "-m", model, "-p", "x", "--estimate-memory"],
                &flags,
            );
            let line = mlxcel.run(args).expect_success().stdout;
            let name = json["inputs"]["dtype"].as_str().expect("text");
            assert!(
                line.contains(&format!("for 8192 tokens in {name} ")),
                "{line}"
            );
            let total = json["total_bytes"].as_u64().expect("number");
            let budget = json["budget_bytes"].as_u64().expect("number");
            assert_eq!(json["fits"], json!(total <= budget));
            let text = mlxcel
                .run(joined(&["inspect", "-m", model], &flags))
                .expect_success();
            let row = text
                .stdout
                .lines()
                .find_map(|line| line.strip_prefix("total "));
            let row = row.expect("a row").trim();
            assert!(
                line.starts_with(&format!("memory: {row} ")),
                "{line}{}",
                text.stdout
            );
            if json["fits"] == json!(false) {
                let args = joined(&["generate", "-m", model, "-p", "x"], &flags);
                assert_eq!(mlxcel.run(args).code, Some(7));
            }
        }
    }
    // What one refuses, so does the other, in the same words.
    let mock = Mlxcel::new().with_mock_plugins();
    mock.mock_model("model");
    let refused = ["inspect", "generate"].map(|command| {
        let prompt: &[&str] = match command {
            "generate" => &["-p", "x"],
            _ => &[],
        };
        let args = joined(&joined(&[command, "-m", "./model"], prompt), &types("q4_0"));
        let done = mock.run(args);
        (done.code, done.stderr)
    });
    assert_eq!(refused[0], refused[1]);
    insta::assert_snapshot!(refused[0].1, @"error: backend mock does not keep keys and values in q4_0: leave --cache-type-k and --cache-type-v out, or choose a backend that lists q4_0");
}

/// A family reads the configuration's keys; a GGUF file has others, and those are named.
#[test]
fn a_fault_of_gguf_metadata_has_the_names_of_the_file() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/gemma/gguf-gemma/model.gguf");
    let mut bytes = std::fs::read(file).expect("read");
    let key = b"gemma.attention.head_count_kv";
    let at = bytes
        .windows(key.len())
        .position(|part| part == key)
        .expect("the key");
    // Behind the key are four bytes of type, then the value.
    bytes[at + key.len() + 4] = 3;
    mlxcel.file("bad.gguf", &bytes);
    let done = inspect(&mlxcel, &mlxcel.path("bad.gguf"));
    insta::assert_snapshot!(done.show(), @r#"
    exit 5
    --- stdout
    --- stderr
    error: [home]/bad.gguf: family gemma: describe: config key "gemma.attention.head_count" is 2: expected a multiple of gemma.attention.head_count_kv (3)
    "#);
}

/// What a file says that it is, is said by whoever made it: missing, of another type, or made to steer a terminal.
#[test]
fn a_model_that_does_not_say_what_it_is_is_told_within_a_line() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    mlxcel.mock_model("model");
    let gguf = |name: &str| GgufBuilder::new().str("general.architecture", name);
    let files = [
        GgufBuilder::new().str("general.name", "x"),
        gguf(""),
        GgufBuilder::new().u32("general.architecture", 3),
        gguf("mcok"),
        gguf("a\x1b]0;title\x07\u{9b}2J\u{202e}\nb"),
        gguf(&"long ".repeat(1000)),
    ];
    let mut said: Vec<String> = files
        .into_iter()
        .map(|file| {
            let path = mlxcel.file("bad.gguf", file.f32_tensor("x", &[1], &[1.0]).build());
            inspect(&mlxcel, &path)
        })
        .map(|done| format!("{}: {}", done.code.unwrap_or_default(), done.stderr))
        .collect();
    for model_type in [
        json!(""),
        json!(7),
        json!("a\x1b[2J\u{9b}2J\nb"),
        json!("long ".repeat(1000)),
        json!(vec!["long\u{9b}"; 1000]),
    ] {
        let config = json!({"model_type": model_type}).to_string();
        mlxcel.file("model/config.json", config);
        let done = inspect(&mlxcel, &mlxcel.path("model"));
        said.push(format!(
            "{}: {}",
            done.code.unwrap_or_default(),
            done.stderr
        ));
    }
    let config = json!({"model_type": "mock", "quantization_config": {"quant_method": "long ".repeat(1000)}});
    mlxcel.file("model/config.json", config.to_string());
    let done = inspect(&mlxcel, &mlxcel.path("model"));
    said.push(format!(
        "{}: {}",
        done.code.unwrap_or_default(),
        done.stderr
    ));
    insta::assert_snapshot!(said.concat(), @r#"
    5: error: [home]/bad.gguf: metadata `general.architecture` is missing: expected the name of the model's architecture, such as those that `mlxcel arch --json` lists under `gguf`
    5: error: [home]/bad.gguf: metadata `general.architecture` is empty: expected the name of the model's architecture, such as those that `mlxcel arch --json` lists under `gguf`
    5: error: [home]/bad.gguf: metadata `general.architecture` should be a string, found u32
    4: error: no plugin knows GGUF architecture "mcok": see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    4: error: no plugin knows GGUF architecture "a\u{1b}]0;title\u{7}\u{9b}2J\u{202e}\nb": see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    4: error: no plugin knows GGUF architecture "long long long long long long long long long long long long long"... (5000 characters): see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    5: error: [home]/model/config.json: `model_type` is "", expected the name of a kind of model: `mlxcel arch` lists those that are known
    5: error: [home]/model/config.json: `model_type` is 7, expected the name of a kind of model: `mlxcel arch` lists those that are known
    4: error: no plugin knows model_type "a\u{1b}[2J\u{9b}2J\nb": see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    4: error: no plugin knows model_type "long long long long long long long long long long long long long"... (5000 characters): see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    5: error: [home]/model/config.json: `model_type` is ["long\u{9b}","long\u{9b}","long\u{9b}","long\u{9b}","long\u{9b}","long\u{9b}","long\u{9b}","long\u{9b}"... (8001 characters), expected the name of a kind of model: `mlxcel arch` lists those that are known
    5: error: [home]/model: `quantization_config.quant_method` in config.json is "long long long long long long long long long long long long long"... (5000 characters): expected fp8, or MLX's form with group_size and bits
    "#);
}

/// What keeps a plugin out is named in the error, and the hint says how to undo that.
#[test]
fn a_plugin_that_is_left_out_is_named_with_what_leaves_it_out() {
    let model = real_model();
    let all = [&["--family", "gemma"][..], &[]].map(|args| {
        let disabled = if args.is_empty() { "llama" } else { "" };
        let mlxcel = Mlxcel::new()
            .with_real_plugins()
            .with("MLXCEL_PLUGINS_DISABLE", disabled);
        let head = ["inspect", "-m", model.to_str().expect("text")];
        let done = mlxcel.run(head.iter().chain(args));
        assert_eq!(done.code, Some(4), "{}", done.show());
        done.stderr
    });
    insta::assert_snapshot!(all.concat(), @r#"
    error: no plugin knows GGUF architecture "llama"; a plugin for it exists but is not used: llama: left out by --family gemma
    hint: leave out --family gemma, or give --family llama
    error: no plugin knows GGUF architecture "llama"; a plugin for it exists but is not used: [plugins]/mlxcel-family-llama/libmlxcel_family_llama.so: disabled by MLXCEL_PLUGINS_DISABLE
    hint: take the plugin out of MLXCEL_PLUGINS_DISABLE, or name its file with --plugin FILE
    "#);
}

/// What a broken checkpoint is told as, without the folder's name.
fn complaint(prepare: impl FnOnce(&Mlxcel)) -> String {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    mlxcel.mock_model("model");
    prepare(&mlxcel);
    let done = inspect(&mlxcel, &mlxcel.path("model"));
    assert_eq!(done.stdout, "", "{}", done.show());
    format!("{}: {}", done.code.unwrap_or_default(), done.stderr)
}

#[test]
fn each_defect_of_a_checkpoint_is_one_line() {
    let remove = |name: &'static str| {
        move |mlxcel: &Mlxcel| std::fs::remove_file(mlxcel.path(name)).expect("removed")
    };
    let config =
        |text: &'static str| move |mlxcel: &Mlxcel| drop(mlxcel.file("model/config.json", text));
    let deep = format!(
        "{{\"model_type\": {}1{}}}",
        "[".repeat(10_000),
        "]".repeat(10_000)
    );
    let weights = SafetensorsBuilder::new()
        .f32("table", &[3, 3], &[0.0; 9])
        .build();
    let all = [
        complaint(remove("model/config.json")),
        complaint(remove("model/model.safetensors")),
        complaint(config("{")),
        complaint(config("[1]")),
        complaint(config(r#"{"vocab_size": 3}"#)),
        complaint(config(r#"{"model_type": "mcok"}"#)),
        complaint(config(r#"{"model_type": "gemma3"}"#)),
        complaint(config(r#"{"model_type": "mock", "variant": "odd"}"#)),
        complaint(config(r#"{"model_type": "mock"}"#)),
        complaint(|mlxcel| drop(mlxcel.file("model/config.json", deep))),
        complaint(|mlxcel| {
            drop(mlxcel.file("model/model.safetensors", &weights[..weights.len() - 4]))
        }),
        complaint(|mlxcel| drop(mlxcel.file("model/model.safetensors", [0xff; 64]))),
        complaint(|mlxcel| {
            mlxcel.file(
                "model/model.safetensors.index.json",
                r#"{"weight_map": {"table": "gone.safetensors"}}"#,
            );
        }),
        complaint(|mlxcel| {
            mlxcel.file(
                "model/model.safetensors.index.json",
                r#"{"weight_map": {"table": "../../x.safetensors"}}"#,
            );
        }),
    ];
    insta::assert_snapshot!(all.concat(), @r#"
    5: error: [home]/model has no config.json: expected a directory as `mlx_lm.convert` or `save_pretrained` writes it
    5: error: [home]/model has no *.safetensors file
    5: error: [home]/model/config.json: expected json: EOF while parsing an object at line 1 column 1
    5: error: [home]/model/config.json: expected a json object, found an array
    4: error: no plugin knows this configuration, which has no model_type: see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    4: error: no plugin knows model_type "mcok": see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    4: error: no plugin knows model_type "gemma3": see `mlxcel arch` for what is known
    hint: --plugins-dir names a folder with more plugins; `mlxcel doctor` shows where they are looked for
    4: error: model_type "mock" is recognised but not supported: mock/mock: variant odd is not implemented
    5: error: family mock: describe: vocab_size: expected an integer, found none
    5: error: [home]/model/config.json: expected json nested at most 64 deep, found more at byte 78
    5: error: [home]/model/model.safetensors: tensor `table` ends at offset 36, but the file holds 32 bytes of data (truncated download?)
    5: error: [home]/model/model.safetensors: expected a header of at most 33554432 bytes, found a length of 18446744073709551615
    5: error: shard [home]/model/gone.safetensors is missing: model.safetensors.index.json puts tensor `table` there (the download may be incomplete; fetch the model again)
    5: error: [home]/model/model.safetensors.index.json: shard `../../x.safetensors` is not a plain *.safetensors file name
    "#);
}

#[test]
fn what_is_no_model_is_told_by_its_path() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    mlxcel.dir("empty");
    mlxcel.file("notes.txt", "hello");
    mlxcel.file("bad.gguf", "GGUF");
    let all: Vec<String> = [
        "./nowhere",
        "./empty",
        "./notes.txt",
        "./bad.gguf",
        "../../etc/passwd",
        "a/b/c",
        "",
        "name\u{7}",
    ]
    .iter()
    .map(|name| {
        let done = inspect(&mlxcel, Path::new(name));
        format!("{}: {}", done.code.unwrap_or_default(), done.stderr)
    })
    .collect();
    insta::assert_snapshot!(all.concat(), @r#"
    3: error: no model at ./nowhere: expected a directory with config.json or a .gguf file
    hint: a model of a repository is written `owner/name`; `mlxcel list` shows what is in the store
    5: error: ./empty is not a model: expected a directory with config.json and safetensors, or with one .gguf file
    5: error: ./notes.txt is not a model: a single file has to be a .gguf file
    5: error: ./bad.gguf: the file ends inside the version: 4 bytes needed at byte 4, 0 left (truncated download?)
    5: error: ../../etc/passwd is not a model: a single file has to be a .gguf file
    2: error: model name "a/b/c" has 3 parts: expected `owner/name`, `name`, or `owner/name/file.gguf`
    2: error: the model name is empty: expected a path, `owner/name` or `name`
    2: error: model name "name\u{7}" is not valid: "\u{7}" is a control character
    "#);
}

#[test]
fn a_rejected_plugin_that_would_serve_the_model_is_named() {
    let mlxcel = Mlxcel::new();
    mlxcel.mock_model("model");
    let bytes = Healthy::Family.bytes().expect("built");
    let file = mlxcel.file(
        "plugins/libmlxcel_family_mock.so",
        &bytes[..bytes.len() / 2],
    );
    let mlxcel = mlxcel.with("MLXCEL_PLUGIN_PATH", file.parent().expect("folder"));
    let done = inspect(&mlxcel, &mlxcel.path("model"));
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"\d{4,}", "[n]");
    settings.bind(|| insta::assert_snapshot!(done.show(), @r#"
    exit 4
    --- stdout
    --- stderr
    error: no plugin knows model_type "mock"; a plugin for it exists but is not used: [home]/plugins/libmlxcel_family_mock.so: truncated: the section table ends at byte [n], the file has [n]; copy the file again
    hint: `mlxcel plugin verify FILE` examines a rejected plugin
    "#));
}

#[test]
fn two_plugins_for_one_architecture_are_a_question_to_the_user() {
    let mlxcel = Mlxcel::new();
    mlxcel.mock_model("model");
    let first = Healthy::Family.copy_to(&mlxcel.dir("one")).expect("copied");
    let second = Healthy::Family.copy_to(&mlxcel.dir("two")).expect("copied");
    let folders = std::env::join_paths([
        first.parent().expect("folder"),
        second.parent().expect("folder"),
    ]);
    let mlxcel = mlxcel.with("MLXCEL_PLUGIN_PATH", folders.expect("joined"));
    let done = inspect(&mlxcel, &mlxcel.path("model"));
    assert_eq!(done.code, Some(4), "{}", done.show());
    let list = mlxcel.run(["plugin", "list"]).expect_success();
    insta::assert_snapshot!(list.show(), @r#"
    exit 0
    --- stdout
    PLUGIN       VERSION  ABI  STATE     FILE
    family/mock  0.1.0    1.4  conflict  [home]/one/libmlxcel_family_mock.so: same name and rank as [home]/two/libmlxcel_family_mock.so: remove one, or name the one to use with --plugin FILE
    family/mock  0.1.0    1.4  conflict  [home]/two/libmlxcel_family_mock.so: same name and rank as [home]/one/libmlxcel_family_mock.so: remove one, or name the one to use with --plugin FILE
    --- stderr
    "#);
    let args = [
        Path::new("inspect"),
        Path::new("-m"),
        &mlxcel.path("model"),
        Path::new("--plugin"),
        &second,
    ];
    mlxcel.run(args).expect_success();
}
