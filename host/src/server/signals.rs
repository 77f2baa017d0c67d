//! SIGINT and SIGTERM: before the server answers they end the process as usual; then the first one asks it to end, and
//! a second one ends the process.
//!
//! The signals are blocked in every thread and taken by one that waits for them, so that no code ever runs inside a
//! signal handler. Must be installed before other threads start, which inherit the block.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigSet, Signal, raise};
use tokio::sync::watch;

/// What the signals ask for.
pub struct Asked {
    is_serving: Arc<AtomicBool>,
    asked: watch::Receiver<bool>,
}

impl Asked {
    /// From now on the first signal asks instead of ending the process.
    pub fn serve(&self) {
        self.is_serving.store(true, Ordering::Release);
    }

    /// Waits until the end is asked for.
    pub async fn wait(&mut self) {
        // The sender lives as long as its thread, which never ends by itself.
        let _ = self.asked.wait_for(|asked| *asked).await;
    }
}

/// Takes over both signals for this process.
pub fn install() -> io::Result<Asked> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.thread_block()?;
    let (ask, asked) = watch::channel(false);
    let is_serving = Arc::new(AtomicBool::new(false));
    let serving = Arc::clone(&is_serving);
    std::thread::Builder::new()
        .name("mlxcel-signals".to_owned())
        .spawn(move || {
            while let Ok(signal) = signals.wait() {
                let was_asked = ask.send_replace(true);
                if was_asked || !serving.load(Ordering::Acquire) {
                    // With the default action this ends the process as if the signal had never been taken over.
                    let _ = signals.thread_unblock().and_then(|()| raise(signal));
                }
            }
        })?;
    Ok(Asked { is_serving, asked })
}
