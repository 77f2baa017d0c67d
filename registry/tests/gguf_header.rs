//! Hostile and broken GGUF headers, each refused with what is wrong and where.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation is a failed test"
)]

use mlxcel_registry::checkpoint::gguf::{GgmlType, MetaType, MetaValue, parse_header};
use mlxcel_registry::checkpoint::testing::GgufBuilder;

fn refusal(file: &[u8]) -> String {
    match parse_header(file) {
        Ok(header) => format!("accepted {} tensors", header.tensors().len()),
        Err(error) => error.to_string(),
    }
}

/// Little-endian fields after one another.
fn fields(magic: &[u8], version: u32, counts: [u64; 2]) -> Vec<u8> {
    [
        magic,
        &version.to_le_bytes(),
        &counts[0].to_le_bytes(),
        &counts[1].to_le_bytes(),
    ]
    .concat()
}

#[test]
fn a_good_file_is_read() {
    let file = GgufBuilder::new()
        .str("general.architecture", "llama")
        .bool("flag", true)
        .array(
            "nested",
            MetaType::Array,
            1,
            &[0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 9],
        )
        .tensor("b", GgmlType::Q4_0, &[2, 32], &[1; 36])
        .f32_tensor("a", &[3], &[1.0, 2.0, 3.0])
        .build();
    let header = parse_header(&file).unwrap();
    assert_eq!(header.version(), 3);
    assert_eq!(
        header.keys().collect::<Vec<_>>(),
        ["flag", "general.architecture", "nested"]
    );
    let [b, a] = header.tensors() else {
        panic!("two tensors")
    };
    assert_eq!(
        (b.name.as_str(), b.ty, &b.shape[..]),
        ("b", GgmlType::Q4_0, &[2, 32][..])
    );
    assert_eq!(file[b.range.clone()], [1; 36]);
    assert_eq!(b.range.start % 32, 0);
    assert_eq!(a.range, b.range.start + 64..b.range.start + 76);

    let Ok(Some(MetaValue::Array(nested))) = header.value(&file, "nested") else {
        panic!("array")
    };
    let inner: Vec<_> = nested.values().map(Result::unwrap).collect();
    let [MetaValue::Array(inner)] = inner.as_slice() else {
        panic!("one array in it")
    };
    assert_eq!(inner.i32s().unwrap(), [7, 9]);
}

#[test]
fn version_2_is_read_and_others_are_named() {
    assert_eq!(
        refusal(&GgufBuilder::new().version(2).build()),
        "accepted 0 tensors"
    );
    let refusals = [
        refusal(b""),
        refusal(b"GG"),
        refusal(b"PK\x03\x04 a zip file"),
        refusal(b"GGUF"),
        refusal(&fields(b"GGUF", 1, [0, 0])),
        refusal(&fields(b"GGUF", 4, [0, 0])),
        refusal(&fields(b"GGUF", 3u32.swap_bytes(), [0, 0])),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        expected a gguf file, which begins with `GGUF`, found ""
        expected a gguf file, which begins with `GGUF`, found "GG"
        expected a gguf file, which begins with `GGUF`, found "PK\u{3}\u{4}"
        the file ends inside the version: 4 bytes needed at byte 4, 0 left (truncated download?)
        expected gguf version 2 or 3, found 1
        expected gguf version 2 or 3, found 4
        expected a little-endian gguf file, found a big-endian one: convert it again for this machine
        "#);
}

#[test]
fn counts_and_lengths_are_bounded() {
    let array = |element, len| GgufBuilder::new().array("k", element, len, &[0; 8]).build();
    // Five arrays inside one another.
    let mut deep = Vec::new();
    for _ in 0..5 {
        deep.extend_from_slice(&9u32.to_le_bytes());
        deep.extend_from_slice(&1u64.to_le_bytes());
    }
    let long = u64::MAX.to_le_bytes();
    let refusals = [
        refusal(&fields(b"GGUF", 3, [u64::MAX, 0])),
        refusal(&fields(b"GGUF", 3, [0, u64::MAX])),
        refusal(&fields(b"GGUF", 3, [1, 0])),
        refusal(&fields(b"GGUF", 3, [0, 1])),
        refusal(&[&fields(b"GGUF", 3, [0, 1])[..], &long].concat()),
        refusal(&GgufBuilder::new().raw("k", 8, &long).build()),
        refusal(
            &GgufBuilder::new()
                .raw("k", 8, &1000u64.to_le_bytes())
                .build(),
        ),
        refusal(&GgufBuilder::new().raw("k", 13, &[0; 8]).build()),
        refusal(&array(MetaType::U64, u64::MAX)),
        refusal(&array(MetaType::U64, 1 << 26)),
        refusal(&array(MetaType::Str, 1 << 26)),
        refusal(&GgufBuilder::new().raw("k", 9, &deep).build()),
        refusal(
            &GgufBuilder::new()
                .raw_tensor(&"n".repeat(300), 0, &[1], &[0; 4])
                .build(),
        ),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        expected at most 262144 for the number of tensors, found 18446744073709551615
        expected at most 65536 for the number of metadata keys, found 18446744073709551615
        the file ends inside a tensor name: 8 bytes needed at byte 24, 0 left (truncated download?)
        the file ends inside a metadata key: 8 bytes needed at byte 24, 0 left (truncated download?)
        expected at most 65535 for the length of a metadata key, found 18446744073709551615
        expected at most 67108864 for the length of the value of metadata `k`, found 18446744073709551615
        the file ends inside the value of metadata `k`: 1000 bytes needed at byte 45, 19 left (truncated download?)
        metadata `k` has the unknown type number 13
        expected at most 67108864 for the number of elements of metadata `k`, found 18446744073709551615
        the file ends inside the value of metadata `k`: 536870912 bytes needed at byte 49, 15 left (truncated download?)
        the file ends inside the value of metadata `k`: 8 bytes needed at byte 57, 7 left (truncated download?)
        expected at most 4 for the nesting of metadata `k`, found 5
        expected at most 255 for the length of a tensor name, found 300
        "#);
}

#[test]
fn duplicates_and_bad_alignment_are_refused() {
    let aligned = |alignment| {
        GgufBuilder::new()
            .u32("general.alignment", alignment)
            .build()
    };
    let refusals = [
        refusal(&GgufBuilder::new().u32("k", 1).u32("k", 2).build()),
        refusal(
            &GgufBuilder::new()
                .f32_tensor("t", &[1], &[1.0])
                .f32_tensor("t", &[1], &[1.0])
                .build(),
        ),
        refusal(&aligned(0)),
        refusal(&aligned(24)),
        refusal(&aligned(1 << 31)),
        refusal(&GgufBuilder::new().str("general.alignment", "32").build()),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        metadata `k` is there twice
        tensor `t` is there twice
        expected `general.alignment` to be a power of two up to 1048576, found 0
        expected `general.alignment` to be a power of two up to 1048576, found 24
        expected `general.alignment` to be a power of two up to 1048576, found 2147483648
        metadata `general.alignment` should be an unsigned integer, found a string
        "#);
}

#[test]
fn tensors_are_checked_one_by_one() {
    let tensor = |type_id, dims: &[u64]| {
        refusal(
            &GgufBuilder::new()
                .raw_tensor("t", type_id, dims, &[0; 64])
                .build(),
        )
    };
    let refusals = [
        tensor(0, &[2, 2, 2, 2, 2]),
        tensor(0, &[2, 0]),
        tensor(0, &[1 << 40, 1 << 40]),
        tensor(0, &[1 << 62]),
        tensor(2, &[48]),
        tensor(12, &[32]),
        tensor(0, &[17]),
        tensor(39, &[32]),
        tensor(4, &[32]),
        tensor(777, &[32]),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        expected at most 4 for the rank of tensor `t`, found 5
        tensor `t` has the shape [2, 0] (innermost first): every dimension must be at least 1
        tensor `t` has the shape [1099511627776, 1099511627776] (innermost first): its size is beyond what memory can address
        tensor `t` has the shape [4611686018427387904] (innermost first): its size is beyond what memory can address
        tensor `t` has the shape [48] (innermost first): rows of Q4_0 must be a multiple of 32 long
        tensor `t` has the shape [32] (innermost first): rows of Q4_K must be a multiple of 256 long
        tensor `t` needs 68 bytes at offset 0 of the data, but the file holds 64 (truncated download?)
        tensor `t` has ggml type MXFP4 (39), which is not supported; supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
        tensor `t` has ggml type Q4_2 (removed from ggml) (4), which is not supported; supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
        tensor `t` has ggml type unknown (777), which is not supported; supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
        "#);
}

#[test]
fn offsets_are_checked() {
    // Two tensors of 32 bytes; the offset of the second is the last field before the data.
    let file = |offset: u64| {
        let mut file = GgufBuilder::new()
            .f32_tensor("a", &[8], &[0.0; 8])
            .f32_tensor("b", &[8], &[0.0; 8])
            .build();
        let header_len = 24 + 2 * (8 + 1 + 4 + 8 + 4 + 8);
        file[header_len - 8..header_len].copy_from_slice(&offset.to_le_bytes());
        file
    };
    assert_eq!(refusal(&file(32)), "accepted 2 tensors");
    let refusals = [
        refusal(&file(0)),
        refusal(&file(8)),
        refusal(&file(64)),
        refusal(&file(u64::MAX - 31)),
        refusal(&file(32)[..100]),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r#"
        tensors `a` and `b` overlap
        tensor `b` starts at offset 8, which is no multiple of the alignment 32
        tensor `b` needs 32 bytes at offset 64 of the data, but the file holds 64 (truncated download?)
        tensor `b` needs 32 bytes at offset 18446744073709551584 of the data, but the file holds 64 (truncated download?)
        tensor `a` needs 32 bytes at offset 0 of the data, but the file holds 4 (truncated download?)
        "#);
}
