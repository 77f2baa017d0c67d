//! What a download tells its caller while it runs, and how the caller stops it.
//!
//! Nothing is printed here; a progress bar is the caller's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::StoreError;

/// A step of a download.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgressEvent<'a> {
    /// What has to be done is known.
    Planned {
        /// Files of the checkpoint.
        files: usize,
        /// Size of all of them; `None` if the endpoint does not tell every size.
        total_bytes: Option<u64>,
        /// How much of that is already here.
        present_bytes: u64,
    },
    /// A file begins.
    FileStarted {
        /// Its name in the repository.
        file: &'a str,
        /// Its size, if known.
        size_bytes: Option<u64>,
        /// How much of it is kept from an earlier attempt.
        resumed_bytes: u64,
    },
    /// Bytes of a file arrived and are written.
    Received {
        /// The file.
        file: &'a str,
        /// How many.
        bytes: u64,
    },
    /// A file starts over; what was received of it is dropped.
    FileRestarted {
        /// The file.
        file: &'a str,
        /// How much is dropped.
        lost_bytes: u64,
        /// Why.
        reason: &'a str,
    },
    /// A file is complete and its digest is right.
    FileFinished {
        /// The file.
        file: &'a str,
        /// Its size.
        size_bytes: u64,
    },
    /// Something failed that may succeed later; the download waits and tries again.
    Retrying {
        /// The file, or the repository.
        what: &'a str,
        /// Which try comes next, from 2.
        attempt: u32,
        /// How long it waits before.
        delay_ms: u64,
        /// What failed.
        reason: &'a str,
    },
    /// All files are here and are being moved to their place.
    Finishing,
}

/// Receives the steps of a download.
pub trait Progress {
    /// Called on the thread that downloads; should return soon.
    fn event(&mut self, event: &ProgressEvent<'_>);
}

/// Ignores every step.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn event(&mut self, _event: &ProgressEvent<'_>) {}
}

/// Stops a download from another thread or a signal handler. What arrived is kept.
///
/// It is looked at between pieces of a file and during waits. A connection on which nothing arrives is
/// noticed when its own timeout of 30 seconds ends.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Asks the download to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked to.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        if self.is_cancelled() {
            return Err(StoreError::Cancelled);
        }
        Ok(())
    }
}
