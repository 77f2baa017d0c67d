//! The engine over tiny checkpoints with the cpu plugin: batches, caches, prefixes, sampling on the device.
//!
//! One program for the whole folder: a program for every file takes gigabytes of disk, and minutes to link.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failure in a test is a failed test, `--nocapture` shows the distances"
)]

mod batching;
mod batching_caches;
mod batching_quantised;
mod cross_attention;
mod deterministic;
mod device_sampling;
mod kv_types;
mod prefix_cache;
mod prefix_kinds;
