//! The real `mlxcel-server` over raw sockets and with real clients.
//!
//! One program for the whole folder: a program for every file takes gigabytes of disk, and minutes to link.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

mod access;
mod crowd;
mod device;
mod faults;
mod framing;
mod half_closed;
mod load_tools;
mod long_bodies;
mod names;
mod native;
mod openai;
mod order;
mod ranks;
mod real;
mod refused_flags;
mod sampling;
mod several;
