//! A directory of safetensors as a checkpoint.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation is a failed test"
)]

use mlxcel_registry::checkpoint::testing::{SafetensorsBuilder, TempCheckpoint};
use mlxcel_registry::checkpoint::{Checkpoint, DType, QuantMode, QuantSpec};
use serde_json::{Value, json};

fn opened(dir: &TempCheckpoint) -> Result<Checkpoint, String> {
    let path = dir.path().display().to_string();
    Checkpoint::open_dir(dir.path()).map_err(|error| error.to_string().replace(&path, "DIR"))
}

fn quantised(config: &Value) -> TempCheckpoint {
    let weights = SafetensorsBuilder::new()
        .u32("a.weight", &[2, 8], &[1; 16])
        .f32("a.scales", &[2, 1], &[1.0; 2])
        .f32("a.biases", &[2, 1], &[0.0; 2])
        .u32("e.weight", &[2, 16], &[1; 32])
        .f32("e.scales", &[2, 1], &[1.0; 2])
        .f32("e.biases", &[2, 1], &[0.0; 2])
        .f32("norm.weight", &[4], &[1.0; 4])
        .build();
    TempCheckpoint::new()
        .file("model.safetensors", &weights)
        .json("config.json", config)
}

#[test]
fn a_directory_is_read_from_headers_then_mapped() {
    let weights = SafetensorsBuilder::new()
        .f32("b", &[2, 2], &[1.0, 2.0, 3.0, 4.0])
        .tensor("c", DType::F8E4M3, &[3], &[1, 2, 3])
        .build();
    let dir = TempCheckpoint::new()
        .file("model.safetensors", &weights)
        .json("config.json", &json!({"model_type": "llama"}))
        .json("generation_config.json", &json!({"eos_token_id": 2}));
    let checkpoint = opened(&dir).unwrap();
    assert_eq!(checkpoint.config()["model_type"], "llama");
    assert_eq!(
        checkpoint.generation_config(),
        Some(&json!({"eos_token_id": 2}))
    );
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["b", "c"]);
    assert_eq!(checkpoint.weights_bytes(), 19);
    assert_eq!(checkpoint.path(), dir.path());
    assert!(checkpoint.gguf().is_none());

    let b = checkpoint.load("b").unwrap();
    assert_eq!((b.dtype, &b.shape[..]), (DType::F32, &[2, 2][..]));
    assert!(b.bytes.is_mapped());
    assert_eq!(b.bytes[4..8], 2.0f32.to_le_bytes());
    let c = checkpoint.load("c").unwrap();
    assert_eq!((c.dtype, &c.bytes[..]), (DType::F8E4M3, &[1, 2, 3][..]));
    assert_eq!(
        checkpoint.load("d").unwrap_err().to_string(),
        "the checkpoint has no tensor `d`"
    );

    // The bytes outlive the checkpoint.
    drop(checkpoint);
    assert_eq!(c.bytes[2], 3);
}

#[test]
fn unaligned_data_is_copied() {
    // A byte before the floats, and no padding: the floats are at an odd address.
    let weights = SafetensorsBuilder::new()
        .tensor("a", DType::U8, &[1], &[1])
        .f32("b", &[2], &[1.5, 2.5])
        .build();
    let dir = TempCheckpoint::new()
        .file("model.safetensors", &weights)
        .json("config.json", &json!({}));
    let b = opened(&dir).unwrap().load("b").unwrap();
    assert!(!b.bytes.is_mapped());
    assert!(b.bytes.as_ptr().addr().is_multiple_of(4));
    assert_eq!(b.bytes[..4], 1.5f32.to_le_bytes());
}

#[test]
fn quantisation_follows_the_config() {
    let dir = quantised(&json!({"quantization": {
        "bits": 4, "group_size": 64, "e": {"bits": 8, "group_size": 64}
    }}));
    let checkpoint = opened(&dir).unwrap();
    let spec = |bits| {
        Some(QuantSpec {
            mode: QuantMode::Affine,
            bits,
            group_size: 64,
        })
    };
    assert_eq!(checkpoint.quant_for("a"), spec(4));
    assert_eq!(checkpoint.quant_for("e"), spec(8));
    assert_eq!(checkpoint.quant_for("norm"), None);
    assert_eq!(checkpoint.quant_for("absent"), None);
    assert_eq!(checkpoint.foreign_quant_method(), None);
}

#[test]
fn contradictions_are_refused_when_opening() {
    let refusals = [
        opened(&quantised(
            &json!({"quantization": {"bits": 4, "group_size": 64}}),
        ))
        .unwrap_err(),
        opened(&quantised(&json!({}))).unwrap_err(),
        opened(&quantised(&json!({"quantization": {"bits": 9}}))).unwrap_err(),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        DIR: `e.weight` of shape [2, 16] with scales [2, 1] cannot be affine bits 4 group_size 64, as config.json says: expected 256 bits a group, found 512 bits; affine bits 8 group_size 64 or affine bits 4 group_size 128 would fit
        DIR: `a.weight` of shape [2, 8] with scales [2, 1] is packed, but config.json has no `quantization` that says how: affine bits 8 group_size 32 or affine bits 4 group_size 64 or affine bits 2 group_size 128 would fit
        DIR: `quantization` in config.json asks for affine bits 9 group_size 64; affine has bits [1, 2, 3, 4, 5, 6, 8] and group_size [32, 64, 128]
        "#);
}

#[test]
fn directories_that_are_no_checkpoints_say_so() {
    let weights = || SafetensorsBuilder::new().f32("a", &[1], &[1.0]).build();
    let with_config = |text: &str| {
        TempCheckpoint::new()
            .file("model.safetensors", &weights())
            .file("config.json", text.as_bytes())
    };
    let refusals = [
        opened(&TempCheckpoint::new().file("model.safetensors", &weights())),
        opened(&TempCheckpoint::new().file("m.gguf", b"")),
        opened(&TempCheckpoint::new().json("config.json", &json!({}))),
        opened(&with_config("[1]")),
        opened(&with_config("{")),
        opened(&with_config(&format!("{{\"a\": {}", "[".repeat(1000)))),
        opened(&with_config("{}").file("generation_config.json", b"3")),
        opened(&with_config("{}").file("model.safetensors", &weights()[..40])),
        opened(&with_config("{}").file("model.safetensors", b"")),
        opened(&with_config("{}").json(
            "model.safetensors.index.json",
            &json!({"weight_map": {"a": "x.safetensors"}}),
        )),
    ]
    .map(|result| result.expect_err("a refusal"));
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        DIR has no config.json: expected a directory as `mlx_lm.convert` or `save_pretrained` writes it
        DIR has no config.json; it has m.gguf: give the path of that file instead
        DIR has no *.safetensors file
        DIR/config.json: expected a json object, found an array
        DIR/config.json: expected json: EOF while parsing an object at line 1 column 1
        DIR/config.json: expected json nested at most 64 deep, found more at byte 69
        DIR/generation_config.json: expected a json object, found a number
        DIR/model.safetensors: the header of 56 bytes does not fit into the file of 40 bytes (truncated download?)
        DIR/model.safetensors: expected a safetensors file, found only 0 bytes
        shard DIR/x.safetensors is missing: model.safetensors.index.json puts tensor `a` there (the download may be incomplete; fetch the model again)
        "#);
    let dir = TempCheckpoint::new();
    let error = Checkpoint::open_dir(&dir.join("absent"))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("cannot read ") && error.contains("absent"),
        "{error}"
    );
}
