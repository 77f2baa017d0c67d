//! Loading plugins: good ones, broken ones, and those of older minors of the ABI.
//!
//! One program for the whole folder: a program for every file takes gigabytes of disk, and minutes to link.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

mod abi_archive;
mod faults;
mod files;
mod loading;
