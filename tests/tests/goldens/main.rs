//! Architectures, tokenizers and real weights against recorded references, and configurations that nobody should load.
//!
//! One program for the whole folder: a program for every file takes gigabytes of disk, and minutes to link.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failure in a test is a failed test, `--nocapture` shows the distances"
)]

mod deepseek;
mod family_config_keys;
mod family_configs;
mod gemma;
mod gemma3_270m;
mod gguf_keys;
mod llama;
mod qwen;
mod smollm2;
mod smollm2_forms;
mod tokenizers;
mod weight_types;
