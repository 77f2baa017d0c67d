//! What ended the ranks. Known to everybody who may wait for the engine thread, which may never return from a step: the
//! library under a backend waits for ever for a rank that is gone.

use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often whoever waits looks whether the ranks still live.
const LOOK: Duration = Duration::from_millis(50);

/// For those who have to do with an end to say what they know of it.
pub(super) const LAST_WORD: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Shared {
    reason: OnceLock<String>,
    is_ending: AtomicBool,
    children: Mutex<Vec<Child>>,
    /// Threads that pass on what the ranks write to stderr.
    words: Mutex<Vec<JoinHandle<()>>>,
}

/// The fate of the other ranks. Without any nothing can happen to them.
#[derive(Clone, Default)]
pub struct Failure(Option<Arc<Shared>>);

impl std::fmt::Debug for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Failure").field(&self.reason()).finish()
    }
}

impl Failure {
    /// Of a model that is split.
    pub fn possible() -> Self {
        Self(Some(Arc::default()))
    }

    /// Why the ranks ended, if they did.
    pub fn reason(&self) -> Option<&str> {
        self.0.as_ref()?.reason.get().map(String::as_str)
    }

    /// Takes over the processes of the other ranks.
    pub(super) fn adopt(&self, mut child: Child) {
        if let Some(shared) = &self.0 {
            let mut children = lock(&shared.children);
            if shared.reason.get().is_some() {
                // Another one ended while this one was started.
                let _ = child.kill();
            }
            children.push(child);
        }
    }

    /// Takes over a thread that passes on what a rank writes to stderr.
    pub(super) fn listen(&self, thread: JoinHandle<()>) {
        if let Some(shared) = &self.0 {
            lock(&shared.words).push(thread);
        }
    }

    /// Waits until all that the ranks wrote before they ended is passed on, but not for ever: a process that one of them
    /// started may hold its stderr open.
    pub(super) fn hear_out(&self, patience: Duration) {
        let Some(shared) = &self.0 else { return };
        let began = Instant::now();
        while !lock(&shared.words).iter().all(JoinHandle::is_finished) {
            if began.elapsed() > patience {
                return;
            }
            std::thread::sleep(LOOK / 10);
        }
    }

    /// Ends all ranks. The first reason stays.
    pub(super) fn fail(&self, reason: String) {
        let Some(shared) = &self.0 else { return };
        if shared.is_ending.load(Ordering::Acquire) || shared.reason.set(reason).is_err() {
            return;
        }
        if let Some(reason) = self.reason() {
            tracing::error!("{reason}");
        }
        for child in lock(&shared.children).iter_mut() {
            // It may have ended already.
            let _ = child.kill();
        }
    }

    /// How a child ended, once it has.
    pub(super) fn status_of(&self, id: u32) -> Option<String> {
        let shared = self.0.as_ref()?;
        let deadline = Instant::now() + LAST_WORD;
        loop {
            let status = {
                let mut children = lock(&shared.children);
                let child = children.iter_mut().find(|child| child.id() == id)?;
                child.try_wait().ok()?
            };
            match status {
                Some(status) => return Some(status.to_string()),
                None if Instant::now() > deadline => return None,
                None => std::thread::sleep(LOOK / 10),
            }
        }
    }

    /// From now on the end of a rank is no failure.
    pub(super) fn expect_end(&self) {
        if let Some(shared) = &self.0 {
            shared.is_ending.store(true, Ordering::Release);
        }
    }

    /// Waits for the other ranks to end, and kills them when they do not within `grace`.
    pub(super) fn reap(&self, grace: Duration) {
        let Some(shared) = &self.0 else { return };
        let deadline = Instant::now() + grace;
        let mut children = std::mem::take(&mut *lock(&shared.children));
        for child in &mut children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(LOOK / 10);
            }
            // Both fail only for a child that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Waits for a message of the engine thread, but not when the ranks have ended: then for their last words, since
    /// whoever waits may end the process and the engine thread may never return to do it.
    pub fn receive<T>(&self, from: &Receiver<T>) -> Result<T, RecvError> {
        if self.0.is_none() {
            return from.recv();
        }
        loop {
            let ended = self.reason().is_some();
            let patience = if ended { LAST_WORD } else { LOOK };
            match from.recv_timeout(patience) {
                Ok(message) => return Ok(message),
                Err(RecvTimeoutError::Disconnected) => return Err(RecvError),
                Err(RecvTimeoutError::Timeout) if ended => {
                    self.hear_out(LAST_WORD);
                    return Err(RecvError);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Waits for a thread, but not for ever when the ranks have ended: then for their last words. Whether it ended.
    pub fn join(&self, thread: JoinHandle<()>) -> bool {
        let began = Instant::now();
        while self.reason().is_some() && !thread.is_finished() {
            if began.elapsed() > LAST_WORD {
                self.hear_out(LAST_WORD);
                return false;
            }
            std::thread::sleep(LOOK / 10);
        }
        // A panic of the thread was reported when it happened.
        let _ = thread.join();
        true
    }
}

/// The list is only ever changed by one complete call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn whoever_waits_is_told_and_the_first_reason_stays() {
        let failure = Failure::possible();
        let (keep, inbox) = channel::<u32>();
        let waits = {
            let failure = failure.clone();
            std::thread::spawn(move || failure.receive(&inbox))
        };
        failure.fail("first".to_owned());
        failure.fail("second".to_owned());
        assert_eq!(waits.join().unwrap(), Err(RecvError));
        assert_eq!(failure.reason(), Some("first"));
        drop(keep);
    }

    #[test]
    fn words_are_heard_to_their_end_unless_that_does_not_come() {
        let failure = Failure::possible();
        let (says, words) = channel();
        let speaks = move || {
            std::thread::yield_now();
            says.send("last").unwrap();
        };
        failure.listen(std::thread::spawn(speaks));
        failure.hear_out(Duration::MAX);
        assert_eq!(words.try_recv(), Ok("last"));

        let (keep, never) = channel::<u32>();
        failure.listen(std::thread::spawn(move || assert!(never.recv().is_err())));
        failure.hear_out(Duration::ZERO);
        assert!(!lock(&failure.0.as_ref().unwrap().words)[1].is_finished());
        drop(keep);
    }

    #[test]
    fn an_end_that_is_expected_is_no_failure() {
        let failure = Failure::possible();
        failure.expect_end();
        failure.fail("gone".to_owned());
        assert_eq!(failure.reason(), None);
        Failure::default().fail("nobody".to_owned());
    }
}
