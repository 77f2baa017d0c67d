//! When a failed request is made again, and after how long.

use std::time::Duration;

use super::error::StoreError;
use super::progress::{CancelFlag, Progress, ProgressEvent};

/// Failures in a row without a single byte before giving up.
const MAX_FRUITLESS: u32 = 5;
/// Failures in all for one file, so that a server that sends a byte each time does not hold us for ever.
const MAX_FAILURES: u32 = 64;
const FIRST_DELAY_MS: u64 = 500;
const MAX_DELAY_MS: u64 = 30_000;
/// A server that asks for a longer pause gets none; its wish goes to the user instead.
const MAX_RETRY_AFTER_S: u64 = 120;
/// Waits are cut into pieces of this length to notice cancellation.
const WAIT_SLICE_MS: u64 = 100;

/// Passes time. Tests put a clock here that does not.
pub(super) trait Clock: Send + Sync {
    /// Blocks for a while.
    fn sleep(&self, duration: Duration);
}

/// The real thing.
pub(super) struct SystemClock;

impl Clock for SystemClock {
    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// Counts the failures of one request or one file.
pub(super) struct Retrier<'a> {
    clock: &'a dyn Clock,
    cancel: &'a CancelFlag,
    what: &'a str,
    fruitless: u32,
    failures: u32,
}

impl<'a> Retrier<'a> {
    /// No failure so far of `what`.
    pub fn new(clock: &'a dyn Clock, cancel: &'a CancelFlag, what: &'a str) -> Self {
        Self {
            clock,
            cancel,
            what,
            fruitless: 0,
            failures: 0,
        }
    }

    /// Waits until it is time to try again, or returns the error that ends it.
    pub fn after(
        &mut self,
        error: StoreError,
        made_progress: bool,
        progress: &mut dyn Progress,
    ) -> Result<(), StoreError> {
        if !error.is_transient() {
            return Err(error);
        }
        self.failures += 1;
        self.fruitless = if made_progress { 1 } else { self.fruitless + 1 };
        if self.fruitless >= MAX_FRUITLESS || self.failures >= MAX_FAILURES {
            return Err(StoreError::GaveUp {
                attempts: self.failures,
                last: Box::new(error),
            });
        }
        let doubled = FIRST_DELAY_MS << (self.fruitless - 1).min(16);
        let mut delay_ms = doubled.min(MAX_DELAY_MS);
        if let StoreError::RateLimited {
            retry_after_s: Some(seconds),
            ..
        } = &error
        {
            if *seconds > MAX_RETRY_AFTER_S {
                return Err(error);
            }
            delay_ms = delay_ms.max(seconds * 1000);
        }
        progress.event(&ProgressEvent::Retrying {
            what: self.what,
            attempt: self.failures + 1,
            delay_ms,
            reason: &error.to_string(),
        });
        self.wait(delay_ms)
    }

    fn wait(&self, delay_ms: u64) -> Result<(), StoreError> {
        let mut left_ms = delay_ms;
        while left_ms > 0 {
            self.cancel.check()?;
            let slice_ms = left_ms.min(WAIT_SLICE_MS);
            self.clock.sleep(Duration::from_millis(slice_ms));
            left_ms -= slice_ms;
        }
        self.cancel.check()
    }
}

/// Runs `request` until it succeeds or there is no point in going on.
pub(super) fn with_retries<T>(
    mut retrier: Retrier<'_>,
    progress: &mut dyn Progress,
    mut request: impl FnMut() -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    loop {
        match request() {
            Ok(value) => return Ok(value),
            Err(error) => retrier.after(error, false, progress)?,
        }
    }
}
