//! What all requests share: options, the model once it is there, the queue's bound, and whether the server is ending.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::body::LONG_AT_A_TIME;
use super::crowd::Crowd;
use super::error::{ApiError, Kind};
use super::listen::within_open_files;
use super::metrics::Metrics;
use super::options::ServerOptions;
use super::room::{NoPlace, Place, Room};
use super::served::Served;
use super::slots::Slots;

/// For a new connection to say something before it may have to go for another.
const GRACE: Duration = Duration::from_millis(50);

/// What is counted. Apart from the rest, so that the engine's thread never holds its own handle.
#[derive(Debug)]
pub struct Watched {
    /// Counters.
    pub metrics: Metrics,
    /// Answers that run.
    pub slots: Slots,
}

/// Shared by all connections.
pub struct App {
    /// How it is reached and bounded.
    pub options: ServerOptions,
    /// What the engine's thread writes too.
    pub watched: Arc<Watched>,
    /// Open connections.
    pub crowd: Arc<Crowd>,
    /// When the process started, in seconds of Unix time.
    pub started_s: u64,
    /// Turns of long bodies.
    pub long_bodies: Arc<Semaphore>,
    served: OnceLock<Arc<Served>>,
    room: Room,
    is_draining: AtomicBool,
    is_ending: AtomicBool,
    live: AtomicUsize,
    tasks: AtomicU64,
}

/// State that health and routers see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// The model is not there yet.
    Loading,
    /// It answers.
    Ready,
    /// No new requests, the running ones end.
    Draining,
    /// A step takes longer than any may.
    Stuck(Duration),
    /// The model panicked and refuses every step.
    Poisoned,
    /// The engine has ended.
    Dead,
}

/// Counts an answer in work for as long as it lives.
pub struct Live(Arc<App>);

impl App {
    /// Without a model yet.
    pub fn new(options: ServerOptions, started_s: u64) -> Self {
        let places = options.limits.parallel + options.limits.queue_depth;
        Self {
            watched: Arc::new(Watched {
                metrics: Metrics::default(),
                slots: Slots::new(options.limits.parallel),
            }),
            crowd: Arc::new(Crowd::new(
                within_open_files(options.limits.connections),
                GRACE,
            )),
            started_s,
            long_bodies: Arc::new(Semaphore::new(LONG_AT_A_TIME)),
            served: OnceLock::new(),
            room: Room::new(places, options.limits.per_key),
            is_draining: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            live: AtomicUsize::new(0),
            tasks: AtomicU64::new(0),
            options,
        }
    }

    /// The model is there. A second one is not taken.
    pub fn serve(&self, served: Served) {
        let _ = self.served.set(Arc::new(served));
    }

    /// The model, or why requests cannot have it.
    pub fn served(&self) -> Result<&Arc<Served>, ApiError> {
        self.served
            .get()
            .ok_or_else(|| ApiError::unavailable("model_loading", "Loading model", Some(1)))
    }

    /// State of the server, from the engine's own steps.
    pub fn condition(&self) -> Condition {
        let Some(served) = self.served.get() else {
            return Condition::Loading;
        };
        let health = served.engine.health();
        match health.step_age {
            _ if !health.is_alive => Condition::Dead,
            _ if served.engine.figures().is_poisoned => Condition::Poisoned,
            Some(age) if age > self.options.limits.step => Condition::Stuck(age),
            _ if self.is_draining.load(Ordering::Acquire) => Condition::Draining,
            _ => Condition::Ready,
        }
    }

    /// Why nothing new is taken at the moment.
    pub fn check_condition(&self) -> Result<(), ApiError> {
        match self.condition() {
            Condition::Ready => Ok(()),
            Condition::Loading => Err(ApiError::unavailable(
                "model_loading",
                "Loading model",
                Some(1),
            )),
            Condition::Draining => Err(ApiError::unavailable(
                "draining",
                "the server is ending and takes no new requests",
                Some(1),
            )),
            Condition::Stuck(_) | Condition::Poisoned | Condition::Dead => Err(self.engine_error()),
        }
    }

    /// What is wrong with the engine.
    pub fn engine_error(&self) -> ApiError {
        match self.condition() {
            Condition::Stuck(age) => {
                let message = format!(
                    "the engine's step has taken {} s and is stuck",
                    age.as_secs()
                );
                ApiError::unavailable("engine_stuck", message, None)
            }
            Condition::Poisoned => {
                let message = "the model panicked and is not to be trusted: restart the server";
                ApiError::unavailable("engine_poisoned", message, None)
            }
            Condition::Dead => {
                let ranks = self
                    .served
                    .get()
                    .and_then(|served| served.engine.ranks_ended());
                match ranks {
                    Some(error) => error.into(),
                    None => ApiError::unavailable("engine_stopped", "the engine has stopped", None),
                }
            }
            _ => ApiError::new(Kind::Internal, "the engine gave the answer up"),
        }
    }

    /// Places for so many answers, which a field asks for, or a refusal at once.
    pub fn admit(&self, tenant: &str, answers: usize, field: &str) -> Result<Vec<Place>, ApiError> {
        self.check_condition()?;
        if answers > self.room.most() {
            let message = format!(
                "{field} asks for {answers} answers at a time, at most {} are possible",
                self.room.most()
            );
            return Err(ApiError::new(Kind::Invalid, message).with_param(field));
        }
        self.room.take(tenant, answers).map_err(|no_place| {
            self.watched.metrics.refused();
            match no_place {
                NoPlace::Full => {
                    let places = self.room.places();
                    let message = format!("the queue is full: {places} requests run or wait");
                    ApiError::unavailable("queue_full", message, Some(1))
                }
                NoPlace::Share { most } => ApiError::too_many(most),
            }
        })
    }

    /// Number of a new answer.
    pub fn next_task(&self) -> u64 {
        self.tasks.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts an answer in work.
    pub fn live(self: &Arc<Self>) -> Live {
        self.live.fetch_add(1, Ordering::AcqRel);
        Live(Arc::clone(self))
    }

    /// Answers in work.
    pub fn live_count(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    /// Takes nothing new from now on.
    pub fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    /// Ends what still runs.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    /// Why an answer in work has to end now, if it has to.
    pub fn check_running(&self, arrived: Instant, limit: Duration) -> Result<(), ApiError> {
        if self.is_ending.load(Ordering::Acquire) {
            return Err(ApiError::unavailable(
                "draining",
                "the server ended before the answer did",
                None,
            ));
        }
        if arrived.elapsed() > limit {
            return Err(ApiError::answer_timeout(limit));
        }
        match self.condition() {
            Condition::Stuck(_) | Condition::Dead => Err(self.engine_error()),
            _ => Ok(()),
        }
    }
}

impl Live {
    /// What it is counted by.
    pub fn app(&self) -> &Arc<App> {
        &self.0
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Ordering::AcqRel);
    }
}
