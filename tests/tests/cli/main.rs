//! The real `mlxcel` binary: output, exit codes, files it reads and writes.
//!
//! One program for the whole folder: a program for every file takes gigabytes of disk, and minutes to link.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

mod bench;
mod chat;
mod checkpoints;
mod faults;
mod hub;
mod models;
mod plugins;
mod usage;
