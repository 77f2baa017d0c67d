//! A model that is split over ranks: processes with a part of the weights each, which run the same steps.
//!
//! Rank 0 is the process that was started. It schedules, samples and answers; the others (`worker`) are children of it
//! that do what it orders (`message`) over a pair of sockets (`frame`). What ends one of them ends all (`failure`).
//! Their stderr goes through that of rank 0 (`words`). Tensors are moved by the backend's collectives alone.
//! docs/adr/0013-tensor-parallel.md says why.

mod failure;
mod frame;
mod group;
mod message;
mod split;
mod words;
mod worker;

use std::path::PathBuf;

pub use failure::Failure;
pub use group::Ranks;
pub use message::{Capacity, Draw, StepOrder, Told};
pub use split::Split;
pub use worker::rank_main;

/// First argument by which the program knows that it is a rank.
pub const RANK_COMMAND: &str = "__rank";

/// How a model is split, and what the other ranks need to find the same plugins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    /// Ranks, at least 2.
    pub size: usize,
    /// Folders with plugins that were named.
    pub plugins_dir: Vec<PathBuf>,
    /// Plugin files that were named.
    pub plugin: Vec<PathBuf>,
}
