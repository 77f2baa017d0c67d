//! The engine thread: it owns the backend, the model and the caches; everybody else holds a
//! handle and exchanges plain data with it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use super::error::EngineError;
use super::generate::{Generation, score};
use super::request::{CancelToken, Event, GenerateRequest};
use super::runner::Runner;
use super::sequence::Sequence;

/// Events that may wait for a slow reader before the engine waits for it.
const EVENT_BACKLOG: usize = 1024;

/// Stack of the engine thread: graphs are built and freed by recursion in some backends.
const STACK_BYTES: usize = 64 << 20;

enum Command {
    Generate { request: GenerateRequest, events: SyncSender<Event>, cancel: CancelToken },
    Score { tokens: Vec<u32>, reply: Sender<Result<Vec<f32>, EngineError>> },
}

/// Handle of an engine thread. Dropping it ends the thread and waits for it.
pub struct EngineHandle {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

/// Events of one request. Dropping it cancels the request.
pub struct GenerateStream {
    events: Receiver<Event>,
    cancel: CancelToken,
    ended: bool,
}

impl EngineHandle {
    /// Starts a thread, builds a runner on it and waits until it is ready; `build` also gives
    /// facts for the caller.
    pub fn start<T: Send + 'static>(
        build: impl FnOnce() -> Result<(Runner, T), EngineError> + Send + 'static,
    ) -> Result<(Self, T), EngineError> {
        let (commands, inbox) = channel();
        let (ready, started) = channel();
        let stopped = |reason: String| EngineError::Stopped { reason };
        let thread = std::thread::Builder::new()
            .name("mlxcel-engine".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || match build() {
                Ok((runner, facts)) => {
                    if ready.send(Ok(facts)).is_ok() {
                        serve(runner, &inbox);
                    }
                }
                // The other side is gone only if its thread panicked; there is nobody to tell.
                Err(error) => drop(ready.send(Err(error))),
            })
            .map_err(|e| stopped(format!("its thread could not be started: {e}")))?;
        let facts = started.recv().map_err(|_| stopped("it panicked while loading".to_owned()))??;
        Ok((Self { commands: Some(commands), thread: Some(thread) }, facts))
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        let sent = self.commands.as_ref().map(|commands| commands.send(command));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(EngineError::Stopped { reason: "its thread has ended".to_owned() }),
        }
    }

    /// Starts a request. Requests run one after another.
    pub fn generate(&self, request: GenerateRequest) -> Result<GenerateStream, EngineError> {
        let (sender, events) = sync_channel(EVENT_BACKLOG);
        let cancel = CancelToken::default();
        self.send(Command::Generate { request, events: sender, cancel: cancel.clone() })?;
        Ok(GenerateStream { events, cancel, ended: false })
    }

    /// Logits `[vocabulary]` after the last of `tokens`.
    pub fn score(&self, tokens: Vec<u32>) -> Result<Vec<f32>, EngineError> {
        let (reply, answer) = channel();
        self.send(Command::Score { tokens, reply })?;
        let gone = |_| EngineError::Stopped { reason: "its thread ended during the request".to_owned() };
        answer.recv().map_err(gone)?
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.commands.take();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl GenerateStream {
    /// The flag that ends the request between two steps; may be given to other threads.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }
}

impl Iterator for GenerateStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().unwrap_or_else(|_| {
            Event::Failed(EngineError::Stopped { reason: "its thread ended during the request".to_owned() })
        });
        self.ended = matches!(event, Event::Done { .. } | Event::Failed(_));
        Some(event)
    }
}

impl Drop for GenerateStream {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

fn serve(mut runner: Runner, inbox: &Receiver<Command>) {
    // The last sequence stays in the pool, so that the next turn of a chat reuses it.
    let mut sequence = Sequence::default();
    while let Ok(command) = inbox.recv() {
        let outcome = catch_unwind(AssertUnwindSafe(|| match command {
            Command::Generate { request, events, cancel } => {
                Generation { runner: &mut runner, sequence: &mut sequence, events: &events, cancel: &cancel }
                    .run(&request);
            }
            Command::Score { tokens, reply } => {
                // A caller that no longer waits needs no answer.
                let _ = reply.send(score(&mut runner, &mut sequence, &tokens));
            }
        }));
        if outcome.is_err() {
            // The request's channel is closed by unwinding, which its reader sees as an error.
            tracing::error!("a request panicked on the engine thread; its caches were dropped");
            runner.truncate(&mut sequence, 0);
        }
    }
}
