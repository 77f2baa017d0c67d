//! What Ctrl-C does: it stops what can be stopped, and otherwise ends the program as usual.
//!
//! The signal is blocked in every thread and taken by one that waits for it, so that no code ever runs inside a signal
//! handler. Must be installed before other threads start, which inherit the block.

use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::signal::{SigSet, Signal, raise};

use super::error::CliError;

type Action = Box<dyn FnOnce() + Send>;

/// The place for what Ctrl-C stops at the moment.
#[derive(Clone, Default)]
pub struct Interrupts {
    action: Arc<Mutex<Option<Action>>>,
}

impl Interrupts {
    /// Takes over Ctrl-C for this process.
    pub fn install() -> Result<Self, CliError> {
        let interrupts = Self::default();
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGINT);
        let system = |action| {
            move |errno: nix::errno::Errno| CliError::System {
                action,
                source: errno.into(),
            }
        };
        signals.thread_block().map_err(system("take over Ctrl-C"))?;
        let watched = interrupts.clone();
        std::thread::Builder::new()
            .name("mlxcel-interrupt".to_owned())
            .spawn(move || watched.watch(signals))
            .map_err(|source| CliError::System {
                action: "start a thread",
                source,
            })?;
        Ok(interrupts)
    }

    fn watch(&self, signals: SigSet) {
        while signals.wait().is_ok() {
            if !self.fire() {
                // With the default action this ends the program as if the signal had never been taken over, so that
                // a shell sees why it ended.
                let _ = signals
                    .thread_unblock()
                    .and_then(|()| raise(Signal::SIGINT));
            }
        }
    }

    /// Runs the action and forgets it, so that a second Ctrl-C ends the program. Whether there was one.
    fn fire(&self) -> bool {
        let action = self.slot().take();
        let found = action.is_some();
        if let Some(action) = action {
            action();
        }
        found
    }

    /// While the guard lives, Ctrl-C runs `action` once.
    #[must_use]
    pub fn during(&self, action: impl FnOnce() + Send + 'static) -> InterruptGuard<'_> {
        *self.slot() = Some(Box::new(action));
        InterruptGuard(self)
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Action>> {
        // The slot is only ever replaced as a whole.
        self.action.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ctrl-C, as a test presses it.
    #[cfg(test)]
    pub fn press(&self) -> bool {
        self.fire()
    }
}

/// Ends what [`Interrupts::during`] began.
pub struct InterruptGuard<'a>(&'a Interrupts);

impl Drop for InterruptGuard<'_> {
    fn drop(&mut self) {
        self.0.slot().take();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn ctrl_c_stops_what_runs_once_and_nothing_afterwards() {
        let interrupts = Interrupts::default();
        let count = Arc::new(AtomicUsize::new(0));
        assert!(!interrupts.press());
        let counted = Arc::clone(&count);
        let guard = interrupts.during(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        assert!(interrupts.press());
        assert!(!interrupts.press());
        drop(guard);
        drop(interrupts.during(|| {}));
        assert!(!interrupts.press());
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
