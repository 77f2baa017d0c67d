//! The architecture index: which plugin serves which checkpoint, and the `arch --json` document.
//!
//! Built from the plugin catalogue alone. Scores come from the families' probes, which the host calls;
//! here they are only compared. Must not know how a plugin is run.

mod decide;
mod document;
mod index;
mod nearest;

#[cfg(test)]
mod tests;

pub use decide::{Decision, DetectError, ProbeScore, decide};
pub use document::{DocumentOptions, arch_document};
pub use index::{ArchConflict, ArchIndex, Candidate, Query};
