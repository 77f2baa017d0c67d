//! Getting pinned files onto this machine: what is pinned, how it is downloaded, checked and put in place.
//!
//! The Python package client (`pip`) does the transfer, because it is what knows the index that the user configured.
//! Nothing is trusted before its sha256 is the pinned one, and nothing is visible before it is complete.

pub mod digest;
pub mod install;
pub mod pins;
pub mod pip;
