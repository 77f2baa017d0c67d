//! Thousands of mutations of good files: no parser may panic, nor allocate out of proportion.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation is a failed test"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mlxcel_registry::checkpoint::gguf::{Adapter, GgmlType, parse_header as parse_gguf};
use mlxcel_registry::checkpoint::json::{CONFIG_LIMITS, parse_object};
use mlxcel_registry::checkpoint::safetensors::parse_header as parse_safetensors;
use mlxcel_registry::checkpoint::testing::{GgufBuilder, SafetensorsBuilder, TempCheckpoint};
use mlxcel_registry::checkpoint::{Checkpoint, DType};
use serde_json::json;

/// Counts the bytes that the current thread holds, and the most it ever held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    // The thread's counters may be gone while the thread ends.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is handed on to the system's allocator unchanged; the counters hold no memory and
// do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the pointer came from the system's allocator with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `run` held at once beyond what was held before.
fn peak_bytes(run: impl FnOnce()) -> usize {
    let before = HELD.get();
    PEAK.set(before);
    run();
    (PEAK.get() - before).max(0).cast_unsigned()
}

/// xorshift64*: seeded, so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Flips bits, cuts, repeats, and writes numbers that parsers trip over.
fn mutated(good: &[u8], header_len: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..=random.below(3) {
        if bytes.is_empty() {
            break;
        }
        // Mostly in the header, which is what is parsed.
        let end = if random.below(8) == 0 {
            bytes.len()
        } else {
            header_len.min(bytes.len())
        };
        let at = random.below(end);
        match random.below(7) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => {
                let numbers = [
                    0,
                    1,
                    0x7f,
                    0xff,
                    1 << 31,
                    u64::from(u32::MAX),
                    1 << 62,
                    u64::MAX,
                ];
                let number = numbers[random.below(numbers.len())].to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            4 => {
                let piece = bytes[at..(at + 1 + random.below(16)).min(bytes.len())].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            5 => drop(bytes.drain(at..(at + 1 + random.below(16)).min(end))),
            _ => {
                // Digits of the JSON headers.
                if let Some(digit) = bytes[..end].iter().position(|b| b.is_ascii_digit()) {
                    let at = if bytes[at].is_ascii_digit() {
                        at
                    } else {
                        digit
                    };
                    let text = [
                        &b"-1"[..],
                        b"9999999999999999999",
                        b"0",
                        b"1e9",
                        b"[",
                        b"{\"a\":",
                    ];
                    bytes.splice(at..=at, text[random.below(text.len())].iter().copied());
                }
            }
        }
    }
    bytes
}

/// Runs `parse` on mutations; a panic or an allocation beyond `64 KiB + factor * length` fails.
fn hold(
    good: &[u8],
    header_len: usize,
    rounds: usize,
    factor: usize,
    parse: impl Fn(&[u8]) -> bool,
) {
    assert!(parse(good), "the unchanged file must be accepted");
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut accepted = 0;
    for round in 0..rounds {
        let bytes = mutated(good, header_len, &mut random);
        let mut outcome = Ok(false);
        let peak = peak_bytes(|| outcome = catch_unwind(AssertUnwindSafe(|| parse(&bytes))));
        match outcome {
            Ok(good) => accepted += usize::from(good),
            Err(_) => panic!("round {round} panicked on {bytes:02x?}"),
        }
        let limit = (64 << 10) + factor * bytes.len();
        assert!(
            peak <= limit,
            "round {round} held {peak} of at most {limit} bytes: {bytes:02x?}"
        );
    }
    // Mutations that change nothing of importance must pass, or the parser refuses everything.
    assert!(
        accepted > 0 && accepted < rounds,
        "{accepted} of {rounds} accepted"
    );
}

fn good_safetensors() -> Vec<u8> {
    SafetensorsBuilder::new()
        .f32("model.embed_tokens.weight", &[4, 2], &[0.5; 8])
        .tensor("model.norm.weight", DType::BF16, &[2], &[0, 1, 2, 3])
        .u32("lm_head.weight", &[2, 2], &[1, 2, 3, 4])
        .build()
}

fn good_gguf() -> Vec<u8> {
    GgufBuilder::new()
        .str("general.architecture", "llama")
        .u32("general.alignment", 32)
        .strs("tokenizer.ggml.tokens", &["<s>", "</s>", "a"])
        .f32s("tokenizer.ggml.scores", &[0.0, 1.0, 2.0])
        .bool("tokenizer.ggml.add_bos_token", true)
        .tensor("token_embd.weight", GgmlType::Q4_1, &[2, 32], &[0x11; 40])
        .f32_tensor("output_norm.weight", &[4], &[1.0; 4])
        .tensor("output.weight", GgmlType::Q6_K, &[1, 256], &[0x11; 210])
        .build()
}

#[test]
fn safetensors_headers() {
    let good = good_safetensors();
    let header_len = 8 + u64::from_le_bytes(*good.first_chunk().unwrap()) as usize;
    hold(&good, header_len, 6000, 64, |bytes| {
        parse_safetensors(bytes).is_ok()
    });
}

#[test]
fn gguf_headers() {
    let good = good_gguf();
    hold(&good, good.len() - 384, 6000, 64, |bytes| {
        parse_gguf(bytes).is_ok()
    });
}

#[test]
fn json_documents() {
    let config =
        br#"{"model_type":"llama","rope_scaling":{"factor":[8.0,{"a":null}]},"x":Infinity}"#;
    hold(config, config.len(), 3000, 256, |bytes| {
        parse_object(bytes, &CONFIG_LIMITS).is_ok()
    });
    let adapter = br#"{"config":{"a":1},"tensors":[{"from":"a","to":"b","ops":[{"op":"add","value":1}]}],"ignore":["c"]}"#;
    hold(adapter, adapter.len(), 3000, 256, |bytes| {
        Adapter::from_json(bytes).is_ok()
    });
}

#[test]
fn whole_gguf_checkpoints() {
    let good = good_gguf();
    let adapter = Adapter::from_json(
        json!({"config": {}, "tensors": [
            {"from": "token_embd.weight", "to": "e.weight", "ops": [{"op": "unpermute_rope", "heads": 1}]},
            {"from": "output_norm.weight", "to": "n.weight", "ops": [{"op": "add", "value": -1.0}]},
            {"from": "output.weight", "to": "o.weight"}
        ]})
        .to_string()
        .as_bytes(),
    )
    .unwrap();
    let dir = TempCheckpoint::new();
    let path = dir.join("model.gguf");
    hold(&good, good.len(), 1500, 64, |bytes| {
        // A new file each time: a mapped file must not be changed in place.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, bytes).unwrap();
        let Ok(file) = Checkpoint::open_gguf(&path) else {
            return false;
        };
        let _ = (
            file.summary_json(),
            file.strs("tokenizer.ggml.tokens"),
            file.f32s("tokenizer.ggml.scores"),
        );
        let Ok(checkpoint) = file.into_checkpoint(adapter.clone()) else {
            return false;
        };
        checkpoint.names().all(|name| match checkpoint.load(name) {
            Ok(data) => {
                data.bytes.len() == data.shape.iter().product::<usize>() * data.dtype.size_bytes()
            }
            Err(_) => false,
        })
    });
}

#[test]
fn whole_safetensors_checkpoints() {
    let good = good_safetensors();
    let dir = TempCheckpoint::new().json("config.json", &json!({"model_type": "llama"}));
    let path = dir.join("model.safetensors");
    hold(&good, good.len(), 1500, 64, |bytes| {
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, bytes).unwrap();
        let Ok(checkpoint) = Checkpoint::open_dir(dir.path()) else {
            return false;
        };
        checkpoint.names().all(|name| checkpoint.load(name).is_ok())
    });
}
