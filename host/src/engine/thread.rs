//! The engine thread: it owns the backend, the model and the caches; everybody else holds a
//! handle and exchanges plain data with it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::active::{Active, Reply};
use super::batch::Batch;
use super::error::EngineError;
use super::figures::EngineFigures;
use super::ranks::Failure;
use super::request::{CancelToken, Event, EventSink, GenerateRequest};
use super::runner::{Runner, Spilled};
use super::schedule::Budget;

/// Stack of the engine thread: graphs are built and freed by recursion in some backends.
pub(super) const STACK_BYTES: usize = 64 << 20;

/// How long to wait for the writer of pages when it has enough.
const WRITER_WAIT: Duration = Duration::from_millis(5);

/// For pages that wait to be written when the engine ends.
const FLUSH: Duration = Duration::from_secs(1);

enum Command {
    Generate(Box<Job>),
    /// Empty the prefix cache and say so.
    ClearPrefix(Sender<()>),
}

struct Job {
    request: GenerateRequest,
    cancel: CancelToken,
    reply: Reply,
}

/// What the engine thread shows of itself while it works.
#[derive(Debug)]
struct Pulse {
    origin: Instant,
    /// Milliseconds from `origin` to the start of the current step; 0 when it waits for work.
    step_began_ms: AtomicU64,
    running: AtomicUsize,
    waiting: AtomicUsize,
    is_alive: AtomicBool,
    /// As of the last step.
    figures: Mutex<EngineFigures>,
    /// What ended the other ranks, if there are any.
    ranks: Failure,
}

/// State of the engine, as seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineHealth {
    /// Whether the thread runs.
    pub is_alive: bool,
    /// How long the current step has taken; none when there is nothing to do.
    pub step_age: Option<Duration>,
    /// Requests in steps.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
}

/// Handle of an engine thread. Dropping it ends the thread and waits for it.
pub struct EngineHandle {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
    pulse: Arc<Pulse>,
}

/// Events of one request. Dropping it cancels the request.
pub struct GenerateStream {
    events: Receiver<Event>,
    cancel: CancelToken,
    pulse: Arc<Pulse>,
    ended: bool,
}

impl Pulse {
    /// What ended the other ranks.
    fn ended(&self) -> Option<EngineError> {
        self.ranks.reason().map(|reason| EngineError::Ranks {
            reason: reason.to_owned(),
        })
    }

    /// Waits for the engine thread; `gone` says that it ended instead.
    fn receive<T>(&self, from: &Receiver<T>, gone: &str) -> Result<T, EngineError> {
        self.ranks.receive(from).map_err(|_| {
            self.ended().unwrap_or_else(|| EngineError::Stopped {
                reason: gone.to_owned(),
            })
        })
    }
}

impl EngineHandle {
    /// Starts a thread, builds a runner on it and waits until it is ready; `build` also gives
    /// facts for the caller. `ranks` is the fate of the other ranks that the runner may have.
    pub fn start<T: Send + 'static>(
        parallel: usize,
        budget: Budget,
        ranks: Failure,
        build: impl FnOnce() -> Result<(Runner, T), EngineError> + Send + 'static,
    ) -> Result<(Self, T), EngineError> {
        let (commands, inbox) = channel();
        let (ready, started) = channel();
        let pulse = Arc::new(Pulse {
            origin: Instant::now(),
            step_began_ms: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            is_alive: AtomicBool::new(true),
            figures: Mutex::default(),
            ranks,
        });
        let own = Arc::clone(&pulse);
        let stopped = |reason: String| EngineError::Stopped { reason };
        let thread = std::thread::Builder::new()
            .name("mlxcel-engine".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                match build() {
                    Ok((runner, facts)) => {
                        if ready.send(Ok(facts)).is_ok() {
                            serve(Batch::new(runner, parallel, budget), &inbox, &own);
                        }
                    }
                    // The other side is gone only if its thread panicked; there is nobody to tell.
                    Err(error) => drop(ready.send(Err(error))),
                }
                own.is_alive.store(false, Ordering::Release);
            })
            .map_err(|e| stopped(format!("its thread could not be started: {e}")))?;
        let facts = match pulse.ranks.receive(&started) {
            Ok(facts) => facts?,
            Err(_) => {
                return Err(pulse
                    .ended()
                    .unwrap_or_else(|| stopped("it panicked while loading".to_owned())));
            }
        };
        Ok((
            Self {
                commands: Some(commands),
                thread: Some(thread),
                pulse,
            },
            facts,
        ))
    }

    fn start_job(
        &self,
        request: GenerateRequest,
        cancel: CancelToken,
        reply: Reply,
    ) -> Result<(), EngineError> {
        self.send(Command::Generate(Box::new(Job {
            request,
            cancel,
            reply,
        })))
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        let sent = self
            .commands
            .as_ref()
            .map(|commands| commands.send(command));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(self.pulse.ended().unwrap_or_else(|| EngineError::Stopped {
                reason: "its thread has ended".to_owned(),
            })),
        }
    }

    /// Starts a request, which `cancel` ends between two steps.
    pub fn generate(
        &self,
        request: GenerateRequest,
        cancel: CancelToken,
    ) -> Result<GenerateStream, EngineError> {
        let (sender, events) = channel();
        self.start_job(request, cancel.clone(), Reply::Events(sender))?;
        Ok(GenerateStream {
            events,
            cancel,
            pulse: Arc::clone(&self.pulse),
            ended: false,
        })
    }

    /// Starts a request whose events go to `sink`, on the engine thread. The sink is dropped when the
    /// request is over, whatever became of it.
    pub fn generate_into(
        &self,
        request: GenerateRequest,
        cancel: CancelToken,
        sink: Box<dyn EventSink>,
    ) -> Result<(), EngineError> {
        self.start_job(request, cancel, Reply::Sink(sink))
    }

    /// Empties the prefix cache; waits until the step that runs is over.
    pub fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        let (reply, answer) = channel();
        self.send(Command::ClearPrefix(reply))?;
        self.pulse.receive(&answer, "its thread has ended")
    }

    /// What the engine has done and holds, as of its last step.
    pub fn figures(&self) -> EngineFigures {
        *self
            .pulse
            .figures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Logits `[vocabulary]` after the last of `tokens`.
    pub fn score(&self, tokens: Vec<u32>) -> Result<Vec<f32>, EngineError> {
        let (reply, answer) = channel();
        let request = GenerateRequest {
            prompt: tokens,
            max_new_tokens: Some(1),
            ..GenerateRequest::default()
        };
        self.start_job(request, CancelToken::default(), Reply::Logits(reply))?;
        self.pulse
            .receive(&answer, "its thread ended during the request")?
    }

    /// What ended the other ranks of a model that is split, after which there are no steps.
    pub fn ranks_ended(&self) -> Option<EngineError> {
        self.pulse.ended()
    }

    /// How the engine is. Comes from its own steps, not from anything that merely listens.
    pub fn health(&self) -> EngineHealth {
        let began_ms = self.pulse.step_began_ms.load(Ordering::Acquire);
        let now_ms = self.pulse.origin.elapsed().as_millis() as u64;
        EngineHealth {
            is_alive: self.pulse.is_alive.load(Ordering::Acquire)
                && self.pulse.ranks.reason().is_none()
                && self.thread.as_ref().is_some_and(|t| !t.is_finished()),
            step_age: (began_ms > 0)
                .then(|| Duration::from_millis(now_ms.saturating_sub(began_ms))),
            running: self.pulse.running.load(Ordering::Relaxed),
            waiting: self.pulse.waiting.load(Ordering::Relaxed),
        }
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.commands.take();
        if let Some(thread) = self.thread.take()
            && !self.pulse.ranks.join(thread)
        {
            tracing::warn!("the engine waits for a rank that is gone and is left behind");
        }
    }
}

impl Iterator for GenerateStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self
            .pulse
            .receive(&self.events, "its thread ended during the request")
            .unwrap_or_else(Event::Failed);
        self.ended = matches!(event, Event::Done { .. } | Event::Failed(_));
        Some(event)
    }
}

impl Drop for GenerateStream {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// Takes commands and runs steps until every handle is gone.
fn serve(mut batch: Batch, inbox: &Receiver<Command>, pulse: &Pulse) {
    publish(&batch, pulse);
    loop {
        if batch.is_idle() {
            pulse.step_began_ms.store(0, Ordering::Release);
            match idle(&mut batch, inbox, pulse) {
                Some(command) => accept(&mut batch, command, pulse),
                None => {
                    flush(&mut batch);
                    return;
                }
            }
        }
        loop {
            match inbox.try_recv() {
                Ok(command) => accept(&mut batch, command, pulse),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    batch.stop("it was asked to end");
                    flush(&mut batch);
                    return;
                }
            }
        }
        let now_ms = pulse.origin.elapsed().as_millis() as u64;
        pulse.step_began_ms.store(now_ms.max(1), Ordering::Release);
        if catch_unwind(AssertUnwindSafe(|| batch.step())).is_err() {
            tracing::error!("a step panicked; its requests fail and all caches are dropped");
            batch.fail_all(EngineError::Internal {
                message: "the engine panicked in this step".to_owned(),
            });
        }
        publish(&batch, pulse);
    }
}

/// Waits for a command, and writes pages to the disk meanwhile. None when every handle is gone.
fn idle(batch: &mut Batch, inbox: &Receiver<Command>, pulse: &Pulse) -> Option<Command> {
    loop {
        let began_ms = pulse.origin.elapsed().as_millis() as u64;
        pulse
            .step_began_ms
            .store(began_ms.max(1), Ordering::Release);
        let spilled = catch_unwind(AssertUnwindSafe(|| batch.spill())).unwrap_or(Spilled::Nothing);
        pulse.step_began_ms.store(0, Ordering::Release);
        let command = match spilled {
            Spilled::Nothing => {
                publish(batch, pulse);
                return inbox.recv().ok();
            }
            Spilled::Some => inbox.recv_timeout(Duration::ZERO),
            Spilled::Later => inbox.recv_timeout(WRITER_WAIT),
        };
        publish(batch, pulse);
        match command {
            Ok(command) => return Some(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// Writes what waits to be written, but not for long.
fn flush(batch: &mut Batch) {
    let deadline = Instant::now() + FLUSH;
    while Instant::now() < deadline {
        match batch.spill() {
            Spilled::Nothing => return,
            Spilled::Some => {}
            Spilled::Later => std::thread::sleep(WRITER_WAIT),
        }
    }
}

fn publish(batch: &Batch, pulse: &Pulse) {
    let (running, waiting) = batch.load();
    pulse.running.store(running, Ordering::Relaxed);
    pulse.waiting.store(waiting, Ordering::Relaxed);
    *pulse.figures.lock().unwrap_or_else(PoisonError::into_inner) = batch.figures();
}

fn accept(batch: &mut Batch, command: Command, pulse: &Pulse) {
    match command {
        Command::Generate(job) => {
            if let Some(active) = Active::new(job.request, job.cancel, job.reply) {
                batch.add(active);
            }
        }
        Command::ClearPrefix(reply) => {
            batch.clear_prefix();
            publish(batch, pulse);
            // Whoever asked need not wait for the answer.
            let _ = reply.send(());
        }
    }
}
