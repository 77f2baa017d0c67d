//! Checkpoints that contradict themselves or say nonsense: one line that names the place, what it says and what is
//! allowed. Real plugins, tiny checkpoints.

use std::path::Path;

use mlxcel_registry::checkpoint::testing::SafetensorsBuilder;
use mlxcel_tests::cli::{Finished, Mlxcel};
use mlxcel_tests::scripted::scripted_model;
use serde_json::{Value, json};

fn golden(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden")
        .join(name)
}

fn inspect(mlxcel: &Mlxcel, model: &str, flags: &[&str]) -> Finished {
    let model = mlxcel.path(model);
    let model = model.to_str().expect("text");
    mlxcel.run(["inspect", "-m", model].iter().chain(flags))
}

/// A golden with some keys of its configuration changed, after `mark`.
fn changed(mlxcel: &Mlxcel, name: &str, changes: Value, mark: &[u8]) {
    let folder = golden(name);
    let config = std::fs::read(folder.join("config.json")).expect("read");
    let mut config: Value = serde_json::from_slice(&config).expect("json");
    for (key, value) in changes.as_object().expect("an object") {
        config[key] = value.clone();
    }
    let text = [mark, config.to_string().as_bytes()].concat();
    mlxcel.file("model/config.json", text);
    let weights = std::fs::read(folder.join("model.safetensors")).expect("read");
    mlxcel.file("model/model.safetensors", weights);
}

/// A GGUF golden whose `key`, an unsigned number of 32 bits, has another value.
fn patched(mlxcel: &Mlxcel, name: &str, key: &str, value: u32) {
    let mut bytes = std::fs::read(golden(name).join("model.gguf")).expect("read");
    let found = bytes
        .windows(key.len())
        .position(|part| part == key.as_bytes());
    // Behind the key are four bytes of type, then the value.
    let at = found.expect("the key") + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    mlxcel.file("model.gguf", &bytes);
}

#[test]
fn what_a_configuration_is_of_is_said_once() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    changed(&mlxcel, "llama/llama-gqa", json!({"model_type": 7}), b"");
    insta::assert_snapshot!(inspect(&mlxcel, "model", &[]).show(), @r#"
    exit 5
    --- stdout
    --- stderr
    error: [home]/model/config.json: `model_type` is 7, expected the name of a kind of model: `mlxcel arch` lists those that are known
    "#);
}

#[test]
fn a_byte_order_mark_does_no_harm() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    changed(&mlxcel, "llama/llama-gqa", json!({}), b"\xef\xbb\xbf");
    inspect(&mlxcel, "model", &[]).expect_success();
}

#[test]
fn descriptions_of_weights_that_disagree_are_refused() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let changes = json!({"quantization_config": {"bits": 8, "group_size": 32}});
    changed(&mlxcel, "llama/mlx-3bit-g32", changes, b"");
    let said = inspect(&mlxcel, "model", &[]);
    assert_eq!(said.code, Some(5), "{}", said.show());
    let expected = "`quantization` and `quantization_config` in config.json disagree on all modules (affine bits 3";
    assert!(said.stderr.contains(expected), "{}", said.show());
}

#[test]
fn numbers_of_gguf_metadata_are_named_as_the_file_has_them() {
    let mlxcel = Mlxcel::new().with_real_plugins();
    let said = [
        ("llama.block_count", 0),
        ("llama.vocab_size", 0),
        ("llama.vocab_size", u32::MAX),
    ]
    .map(|(key, value)| {
        patched(&mlxcel, "llama/gguf-llama3", key, value);
        inspect(&mlxcel, "model.gguf", &[]).stderr
    });
    insta::assert_snapshot!(said.concat(), @r#"
    error: [home]/model.gguf: no plugin can take this file of architecture "llama": llama: config key "llama.block_count" is 0: expected an integer from 1 to 4096
    error: [home]/model.gguf: no plugin can take this file of architecture "llama": llama: config key "llama.vocab_size" is 0: expected an integer from 1 to 16777216 in the GGUF metadata
    error: [home]/model.gguf: no plugin can take this file of architecture "llama": llama: config key "llama.vocab_size" is 4294967295: expected an integer from 1 to 16777216 in the GGUF metadata
    "#);
}

#[test]
fn ids_that_would_end_an_answer_and_are_not_there_are_named() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    let answer = |eos: Value, settings: Option<&str>| {
        let model = scripted_model(&mlxcel, "model", &json!({"eos_token_id": eos}));
        if let Some(settings) = settings {
            mlxcel.file("model/tokenizer_config.json", settings);
        }
        let model = model.to_str().expect("text");
        let args = [
            "-p",
            "hello",
            "-n",
            "1",
            "--ignore-eos",
            "--force",
            "--dtype",
            "f32",
        ];
        mlxcel.run(["generate", "-m", model].iter().chain(&args))
    };
    // Beside one that there is, it is left out: published files have such.
    answer(json!([256, 1_000_000_000]), None).expect_success();
    let said = [json!(1_000_000_000), json!("2")].map(|eos| answer(eos, Some("{}")).show());
    insta::assert_snapshot!(said.concat(), @r#"
    exit 5
    --- stdout
    --- stderr
    error: no answer would end: the end-of-sequence ids 1000000000 (config.json eos_token_id) are all outside the model's 257 tokens
    exit 5
    --- stdout
    --- stderr
    error: `config.json` is not valid: eos_token_id has "2", expected a token id or a list of them
    "#);
}

#[test]
fn weights_that_are_no_numbers_are_found() {
    let mlxcel = Mlxcel::new().with_mock_plugins();
    mlxcel.mock_model("model");
    let args = ["--check-values"];
    insta::assert_snapshot!(inspect(&mlxcel, "model", &args).show(), @r"
    exit 0
    --- stdout
    all weights of [home]/model are finite
    --- stderr
    ");
    let mut table = [0.0; 9];
    table[4] = f32::NAN;
    let weights = SafetensorsBuilder::new()
        .f32("table", &[3, 3], &table)
        .build();
    mlxcel.file("model/model.safetensors", weights);
    insta::assert_snapshot!(inspect(&mlxcel, "model", &args).show(), @r"
    exit 5
    --- stdout
    table: 1 of 9 values are not finite, the first is NaN at 4
    --- stderr
    ");
    let json = inspect(&mlxcel, "model", &["--check-values", "--json"]).json();
    insta::assert_snapshot!(json.to_string(), @r#"{"not_finite":[{"tensor":"table","values":9,"not_finite":1,"first":4,"value":"NaN"}]}"#);
}
