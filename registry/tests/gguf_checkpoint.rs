//! A GGUF file as a checkpoint: adapter, parts, operations and metadata.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation is a failed test"
)]

use mlxcel_registry::checkpoint::gguf::{Adapter, GgmlType, GgufFile, dequantize};
use mlxcel_registry::checkpoint::testing::{GgufBuilder, TempCheckpoint};
use mlxcel_registry::checkpoint::{
    Checkpoint, CheckpointError, DType, QuantMode, QuantSpec, TensorData,
};
use serde_json::{Value, json};

/// Blocks with a scale (and minimum) of 0.5 and codes that differ everywhere.
fn blocks(ty: GgmlType, elements: usize) -> Vec<u8> {
    let count = elements / ty.block_elements();
    let halves: &[usize] = match ty {
        GgmlType::Q2_K => &[80, 82],
        GgmlType::Q3_K => &[108],
        GgmlType::Q6_K => &[208],
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => &[0],
        GgmlType::F16 | GgmlType::BF16 | GgmlType::F32 => panic!("no blocks"),
        _ => &[0, 2],
    };
    let mut bytes = Vec::new();
    for number in 0..count {
        let mut block: Vec<u8> = (0..ty.block_bytes())
            .map(|at| (at * 37 + number * 101 + 11) as u8)
            .collect();
        for at in halves {
            block[*at..at + 2].copy_from_slice(&[0x00, 0x38]);
        }
        bytes.extend_from_slice(&block);
    }
    bytes
}

fn exact(ty: GgmlType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / ty.block_bytes() * ty.block_elements()];
    dequantize(ty, bytes, &mut values);
    values
}

fn values(data: &TensorData) -> Vec<f32> {
    match data.dtype {
        DType::F32 => exact(GgmlType::F32, &data.bytes),
        DType::F16 => exact(GgmlType::F16, &data.bytes),
        DType::BF16 => exact(GgmlType::BF16, &data.bytes),
        other => panic!("no floats: {other}"),
    }
}

/// MLX's affine arithmetic over the three parts of a module.
fn affine(checkpoint: &Checkpoint, path: &str) -> Vec<f32> {
    let bits = checkpoint.quant_for(path).expect("a packed module").bits as usize;
    let part = |name: &str| checkpoint.load(&format!("{path}.{name}")).expect("a part");
    let (weight, scales, biases) = (
        part("weight"),
        values(&part("scales")),
        values(&part("biases")),
    );
    (0..weight.bytes.len() * 8 / bits)
        .map(|i| {
            let code = (0..bits).fold(0u32, |code, bit| {
                let at = i * bits + bit;
                code | u32::from(weight.bytes[at / 8] >> (at % 8) & 1) << bit
            });
            scales[i / 32] * code as f32 + biases[i / 32]
        })
        .collect()
}

fn open(builder: GgufBuilder) -> (TempCheckpoint, GgufFile) {
    let dir = TempCheckpoint::new().file("model.gguf", &builder.build());
    let file = Checkpoint::open_gguf(&dir.join("model.gguf")).expect("a good file");
    (dir, file)
}

fn adapter(tensors: Value, ignore: Value) -> Adapter {
    let document = json!({"config": {"model_type": "test"}, "tensors": tensors, "ignore": ignore});
    Adapter::from_json(document.to_string().as_bytes()).expect("a good adapter")
}

/// A checkpoint of one tensor `x`, renamed and changed.
fn one(
    ty: GgmlType,
    shape: &[usize],
    bytes: &[u8],
    to: &str,
    ops: Value,
) -> (TempCheckpoint, Checkpoint) {
    let (dir, file) = open(GgufBuilder::new().tensor("x", ty, shape, bytes));
    let adapter = adapter(json!([{"from": "x", "to": to, "ops": ops}]), json!([]));
    (
        dir,
        file.into_checkpoint(adapter).expect("a good checkpoint"),
    )
}

fn refusal(builder: GgufBuilder, tensors: Value, ignore: Value) -> String {
    let (dir, file) = open(builder);
    let error = file
        .into_checkpoint(adapter(tensors, ignore))
        .expect_err("a bad adapter");
    error
        .to_string()
        .replace(&dir.path().display().to_string(), "DIR")
}

#[test]
fn packed_tensors_have_the_values_of_their_blocks() {
    use GgmlType::*;
    for (ty, bits, factors) in [
        (Q4_0, 4, DType::F16),
        (Q4_1, 4, DType::F16),
        (Q5_0, 5, DType::F16),
        (Q5_1, 5, DType::F16),
        (Q8_0, 8, DType::F16),
        (Q4_K, 4, DType::F32),
        (Q5_K, 5, DType::F32),
    ] {
        let bytes = blocks(ty, 3 * 512);
        let (_dir, checkpoint) = one(ty, &[3, 512], &bytes, "a.weight", json!([]));
        assert_eq!(
            checkpoint.names().collect::<Vec<_>>(),
            ["a.biases", "a.scales", "a.weight"]
        );
        let spec = QuantSpec {
            mode: QuantMode::Affine,
            bits,
            group_size: 32,
        };
        assert_eq!(checkpoint.quant_for("a"), Some(spec));
        assert_eq!(affine(&checkpoint, "a"), exact(ty, &bytes), "{ty}");

        let mut total = 0;
        for name in ["a.weight", "a.scales", "a.biases"] {
            let (info, data) = (
                checkpoint.info(name).unwrap(),
                checkpoint.load(name).unwrap(),
            );
            let expected = if name == "a.weight" {
                DType::U32
            } else {
                factors
            };
            assert_eq!((info.dtype, data.dtype), (expected, expected));
            assert_eq!(info.shape, data.shape);
            assert_eq!(info.byte_len, data.bytes.len());
            assert!(data.bytes.as_ptr().addr().is_multiple_of(64));
            total += data.bytes.len() as u64;
        }
        assert_eq!(checkpoint.weights_bytes(), total);
    }
}

#[test]
fn other_types_become_halves() {
    use GgmlType::*;
    for ty in [Q2_K, Q3_K, Q6_K] {
        let bytes = blocks(ty, 512);
        let (_dir, checkpoint) = one(ty, &[2, 256], &bytes, "a.weight", json!([]));
        assert_eq!(checkpoint.quant_for("a"), None);
        let data = checkpoint.load("a.weight").unwrap();
        assert_eq!((data.dtype, &data.shape[..]), (DType::F16, &[2, 256][..]));
        let expected: Vec<f32> = exact(ty, &bytes)
            .iter()
            .map(|x| half::f16::from_f32(*x).to_f32())
            .collect();
        assert_eq!(values(&data), expected, "{ty}");
    }
}

#[test]
fn values_beyond_a_half_widen_the_tensor() {
    // d = 60000: every scale is a half, but 8 * d is not.
    let d = half::f16::from_f32(60000.0).to_le_bytes();
    let mut q4_0 = blocks(GgmlType::Q4_0, 64);
    q4_0[18..20].copy_from_slice(&d);
    let (_dir, checkpoint) = one(GgmlType::Q4_0, &[1, 64], &q4_0, "a.weight", json!([]));
    for name in ["a.scales", "a.biases"] {
        assert!(checkpoint.info(name).unwrap().may_widen);
        assert_eq!(checkpoint.info(name).unwrap().dtype, DType::F16);
        assert_eq!(checkpoint.load(name).unwrap().dtype, DType::F32);
    }
    assert_eq!(affine(&checkpoint, "a"), exact(GgmlType::Q4_0, &q4_0));

    let mut q6_k = blocks(GgmlType::Q6_K, 256);
    q6_k[208..210].copy_from_slice(&d);
    let (_dir, checkpoint) = one(GgmlType::Q6_K, &[1, 256], &q6_k, "a.weight", json!([]));
    let data = checkpoint.load("a.weight").unwrap();
    assert_eq!(data.dtype, DType::F32);
    assert_eq!(values(&data), exact(GgmlType::Q6_K, &q6_k));
}

#[test]
fn damaged_scales_are_named() {
    for (ty, at) in [(GgmlType::Q4_1, 2), (GgmlType::Q6_K, 208)] {
        let mut bytes = blocks(ty, 256);
        bytes[at..at + 2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        let (_dir, checkpoint) = one(ty, &[1, 256], &bytes, "a.weight", json!([]));
        let name = if ty == GgmlType::Q4_1 {
            "a.scales"
        } else {
            "a.weight"
        };
        let error = checkpoint.load(name).unwrap_err();
        assert!(matches!(error, CheckpointError::Convert { .. }));
        assert!(error.to_string().contains("tensor `x` has a "), "{error}");
    }
}

#[test]
fn rope_rows_move_alike_in_all_parts() {
    let ty = GgmlType::Q4_1;
    let bytes = blocks(ty, 8 * 64);
    let ops = json!([{"op": "unpermute_rope", "heads": 2}]);
    let (_dir, checkpoint) = one(ty, &[8, 64], &bytes, "q.weight", ops.clone());
    let rows = exact(ty, &bytes);
    let expected: Vec<f32> = [0, 2, 1, 3, 4, 6, 5, 7]
        .iter()
        .flat_map(|r| &rows[r * 64..r * 64 + 64])
        .copied()
        .collect();
    assert_eq!(affine(&checkpoint, "q"), expected);

    // A bias has no columns: its elements are the rows.
    let bias: Vec<u8> = (0..8).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let (_dir, checkpoint) = one(GgmlType::F32, &[8], &bias, "q.bias", ops);
    let data = checkpoint.load("q.bias").unwrap();
    assert_eq!(values(&data), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
}

#[test]
fn operations_equal_their_definition() {
    use GgmlType::*;
    let numbers: Vec<f32> = (0..24).map(|i| i as f32).collect();
    let plain: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let run = |ops: Value| {
        let (_dir, checkpoint) = one(F32, &[4, 6], &plain, "a.weight", ops);
        let data = checkpoint.load("a.weight").unwrap();
        assert_eq!(checkpoint.info("a.weight").unwrap().shape, data.shape);
        (data.shape.clone(), values(&data), data.bytes.is_mapped())
    };
    assert_eq!(run(json!([])), (vec![4, 6], numbers.clone(), true));
    assert_eq!(
        run(json!([{"op": "slice_rows", "start": 1, "len": 2}])),
        (vec![2, 6], numbers[6..18].to_vec(), true)
    );
    assert_eq!(
        run(
            json!([{"op": "reshape", "shape": [2, 3, 4]}, {"op": "slice_rows", "start": 1, "len": 1}])
        ),
        (vec![1, 3, 4], numbers[12..].to_vec(), false)
    );
    let transposed: Vec<f32> = (0..24).map(|i| (i % 4 * 6 + i / 4) as f32).collect();
    assert_eq!(
        run(json!([{"op": "transpose"}])),
        (vec![6, 4], transposed.clone(), false)
    );
    let less: Vec<f32> = transposed[8..16].iter().map(|x| x - 1.0).collect();
    assert_eq!(
        run(json!([
            {"op": "transpose"}, {"op": "add", "value": -1.0},
            {"op": "slice_rows", "start": 2, "len": 2}
        ])),
        (vec![2, 4], less, false)
    );

    // On quantised values: decoded to single precision before anything is added.
    let bytes = blocks(Q4_K, 512);
    let ops = json!([{"op": "slice_rows", "start": 1, "len": 1}, {"op": "add", "value": 0.25}]);
    let (_dir, checkpoint) = one(Q4_K, &[2, 256], &bytes, "a.weight", ops);
    let data = checkpoint.load("a.weight").unwrap();
    let expected: Vec<f32> = exact(Q4_K, &bytes)[256..]
        .iter()
        .map(|x| x + 0.25)
        .collect();
    assert_eq!((data.dtype, values(&data)), (DType::F32, expected));
    assert_eq!(checkpoint.quant_for("a"), None);

    // Halves are widened by an addition.
    let halves = [0x00, 0x3c, 0x00, 0x40];
    let (_dir, checkpoint) = one(
        F16,
        &[2],
        &halves,
        "n",
        json!([{"op": "add", "value": -1.0}]),
    );
    let data = checkpoint.load("n").unwrap();
    assert_eq!((data.dtype, values(&data)), (DType::F32, vec![0.0, 1.0]));
}

#[test]
fn one_source_may_feed_several_targets() {
    let ty = GgmlType::Q8_0;
    let bytes = blocks(ty, 6 * 32);
    let slice = |to: &str, start: usize| json!({"from": "qkv", "to": to, "ops": [{"op": "slice_rows", "start": start, "len": 2}]});
    let (_dir, file) = open(GgufBuilder::new().tensor("qkv", ty, &[6, 32], &bytes));
    let tensors = json!([
        slice("q.weight", 0),
        slice("k.weight", 2),
        slice("v.weight", 4)
    ]);
    let checkpoint = file
        .into_checkpoint(adapter(tensors, json!(["rope_freqs.weight"])))
        .unwrap();
    let all = exact(ty, &bytes);
    assert_eq!(affine(&checkpoint, "k"), all[64..128]);
    assert_eq!(affine(&checkpoint, "v"), all[128..]);
    assert_eq!(checkpoint.config(), &json!({"model_type": "test"}));
    assert!(checkpoint.gguf().is_some());
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let two = || {
        GgufBuilder::new()
            .tensor("a", GgmlType::Q4_0, &[1, 32], &blocks(GgmlType::Q4_0, 32))
            .f32_tensor("b", &[1], &[1.0])
    };
    let many = (0..10).fold(GgufBuilder::new(), |builder, i| {
        builder.f32_tensor(&format!("t{i}"), &[1], &[1.0])
    });
    let a = || json!({"from": "a", "to": "a.weight"});
    let refusals = [
        refusal(two(), json!([a()]), json!([])),
        refusal(many, json!([]), json!([])),
        refusal(two(), json!([a(), {"from": "c", "to": "c"}]), json!(["b"])),
        refusal(
            two(),
            json!([a(), {"from": "b", "to": "a.weight"}]),
            json!([]),
        ),
        refusal(
            two(),
            json!([a(), {"from": "b", "to": "a.scales"}]),
            json!([]),
        ),
        refusal(two(), json!([a()]), json!(["a", "b"])),
        refusal(
            two(),
            json!([a(), {"from": "b", "to": "b", "ops": [{"op": "transpose"}]}]),
            json!([]),
        ),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        DIR/model.gguf: adapter: 1 tensors of the file are neither used nor ignored: b
        DIR/model.gguf: adapter: 10 tensors of the file are neither used nor ignored: t0, t1, t2, t3, t4, t5, t6, t7, ...
        DIR/model.gguf: adapter: the file has no tensor `c`, which should become `c`
        DIR/model.gguf: adapter: `a.weight` would exist twice; the second comes from `b`
        DIR/model.gguf: adapter: `a.scales` would exist twice; the second comes from `b`
        DIR/model.gguf: adapter: tensor `a` is both used and ignored
        DIR/model.gguf: adapter: `transpose` on `b` of shape [1]: expected two dimensions
        "#);

    let (_dir, file) = open(two());
    let text = r#"{"config": {"quantization": {"bits": 4}}, "tensors": [], "ignore": ["a", "b"]}"#;
    let error = file
        .into_checkpoint(Adapter::from_json(text.as_bytes()).unwrap())
        .unwrap_err();
    assert!(
        error.to_string().contains("must not have `quantization`"),
        "{error}"
    );
}

#[test]
fn the_summary_has_everything_but_long_arrays() {
    let scores: Vec<f32> = vec![0.0; 65];
    let (_dir, file) = open(
        GgufBuilder::new()
            .str("general.architecture", "llama")
            .u32("llama.block_count", 30)
            .i32("negative", -1)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .f32("infinite", f32::INFINITY)
            .bool("tokenizer.ggml.add_bos_token", false)
            .strs("general.languages", &["en", "de"])
            .f32s("tokenizer.ggml.scores", &scores)
            .tensor(
                "blk.0.attn_q.weight",
                GgmlType::Q4_0,
                &[2, 32],
                &blocks(GgmlType::Q4_0, 64),
            ),
    );
    insta::assert_json_snapshot!(file.summary_json().unwrap(), @r#"
        {
          "general.architecture": "llama",
          "general.languages": [
            "en",
            "de"
          ],
          "infinite": "Infinity",
          "llama.attention.layer_norm_rms_epsilon": 0.00001,
          "llama.block_count": 30,
          "negative": -1,
          "tokenizer.ggml.add_bos_token": false,
          "tokenizer.ggml.scores": {
            "array_len": 65
          },
          "tensors": {
            "blk.0.attn_q.weight": {
              "shape": [
                2,
                32
              ],
              "type": "Q4_0"
            }
          }
        }
        "#);
}

#[test]
fn metadata_is_typed() {
    let (_dir, file) = open(
        GgufBuilder::new()
            .strs("tokens", &["<s>", "▁a", ""])
            .f32s("scores", &[0.5, -1.0])
            .i32s("types", &[3, 1, -1])
            .bool("add_bos", true)
            .bool("broken_text_follows", false)
            .u16("eos", 2)
            .i32("minus", -1)
            .str("template", "{{ x }}")
            .raw("latin", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xe9])
            .raw("maybe", 7, &[2]),
    );
    assert_eq!(file.strs("tokens"), Ok(Some(vec!["<s>", "▁a", ""])));
    assert_eq!(file.f32s("scores"), Ok(Some(vec![0.5, -1.0])));
    assert_eq!(file.i32s("types"), Ok(Some(vec![3, 1, -1])));
    assert_eq!(file.bool("add_bos"), Ok(Some(true)));
    assert_eq!(file.u32("eos"), Ok(Some(2)));
    assert_eq!(file.str("template"), Ok(Some("{{ x }}")));
    assert_eq!(file.str("absent"), Ok(None));
    let refusals = [
        file.strs("scores").unwrap_err(),
        file.i32s("scores").unwrap_err(),
        file.strs("template").unwrap_err(),
        file.u32("minus").unwrap_err(),
        file.bool("eos").unwrap_err(),
        file.str("latin").unwrap_err(),
        file.bool("maybe").unwrap_err(),
    ]
    .map(|error| error.to_string());
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        metadata `scores` should be a string, found f32
        metadata `scores` should be an integer, found f32
        metadata `template` should be an array, found a string
        metadata `minus` should be a u32, found -1
        metadata `eos` should be a bool, found u16
        the text of metadata `latin` is not utf-8
        metadata `maybe` should be 0 or 1, found 2
        "#);
}

#[test]
fn split_files_are_one_checkpoint() {
    let part = |number: u16, count: u16, name: &str| {
        let builder = GgufBuilder::new()
            .u16("split.no", number)
            .u16("split.count", count)
            .i32("split.tensors.count", 2);
        let builder = if number == 0 {
            builder.str("general.architecture", "llama")
        } else {
            builder
        };
        builder
            .f32_tensor(name, &[2], &[f32::from(number), 7.0])
            .build()
    };
    let dir = TempCheckpoint::new()
        .file("m-00001-of-00002.gguf", &part(0, 2, "a"))
        .file("m-00002-of-00002.gguf", &part(1, 2, "b"));
    for name in ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"] {
        let file = Checkpoint::open_gguf(&dir.join(name)).unwrap();
        assert_eq!(file.str("general.architecture"), Ok(Some("llama")));
        assert_eq!(file.paths().count(), 2);
        let tensors = json!([{"from": "a", "to": "a"}, {"from": "b", "to": "b"}]);
        let checkpoint = file.into_checkpoint(adapter(tensors, json!([]))).unwrap();
        assert_eq!(values(&checkpoint.load("b").unwrap()), [1.0, 7.0]);
    }

    let refusal = |dir: &TempCheckpoint, name: &str| {
        let error = Checkpoint::open_gguf(&dir.join(name)).unwrap_err();
        error
            .to_string()
            .replace(&dir.path().display().to_string(), "DIR")
    };
    let first = || TempCheckpoint::new().file("m-00001-of-00002.gguf", &part(0, 2, "a"));
    let renamed = TempCheckpoint::new().file("m.gguf", &part(0, 2, "a"));
    let refusals = [
        refusal(&first(), "m-00001-of-00002.gguf"),
        refusal(&renamed, "m.gguf"),
        refusal(
            &first().file("m-00002-of-00002.gguf", &part(0, 2, "b")),
            "m-00001-of-00002.gguf",
        ),
        refusal(
            &first().file("m-00002-of-00002.gguf", &part(1, 2, "a")),
            "m-00001-of-00002.gguf",
        ),
        refusal(
            &first().file(
                "m-00002-of-00002.gguf",
                &GgufBuilder::new()
                    .u16("split.no", 1)
                    .u16("split.count", 2)
                    .build(),
            ),
            "m-00001-of-00002.gguf",
        ),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        shard DIR/m-00002-of-00002.gguf is missing: the checkpoint has 2 parts (the download may be incomplete; fetch the model again)
        DIR/m.gguf: split gguf: the file is one of 2 parts, so its name must end in -<number>-of-00002.gguf
        DIR/m-00002-of-00002.gguf: split gguf: expected split.no 1 and split.count 2, found 0 and 2
        DIR/m-00002-of-00002.gguf: tensor `a` is there twice
        DIR/m-00001-of-00002.gguf: split gguf: expected 2 tensors in all parts, found 1
        "#);
}

#[test]
fn unaligned_tensors_are_copied_into_place() {
    // An alignment of 1 puts the second tensor at an odd address.
    let builder = GgufBuilder::new()
        .alignment(1)
        .str("pad", "x")
        .tensor("h", GgmlType::F16, &[1], &[0x00, 0x3c])
        .f32_tensor("f", &[2], &[1.5, 2.5]);
    let (_dir, file) = open(builder);
    let tensors = json!([{"from": "h", "to": "h"}, {"from": "f", "to": "f"}]);
    let checkpoint = file.into_checkpoint(adapter(tensors, json!([]))).unwrap();
    let data = checkpoint.load("f").unwrap();
    assert!(data.bytes.as_ptr().addr().is_multiple_of(4));
    assert_eq!(values(&data), [1.5, 2.5]);
}

#[test]
fn checkpoints_can_be_shared_between_threads() {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Checkpoint>();
    is_shared::<GgufFile>();
    is_shared::<TensorData>();
}
