//! The engine's end of an answer: called on the engine thread, it counts and passes on, and never waits.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use crate::engine::{Event, EventSink};

use super::app::Watched;
use super::room::Place;
use super::slots::Slot;

/// An event of one of the answers to a request.
#[derive(Debug)]
pub struct Message {
    /// Which answer.
    pub choice: usize,
    /// When the engine had it.
    pub at: Instant,
    /// What it is.
    pub event: Event,
}

/// Passes the events of one answer on.
pub struct ChoiceSink {
    /// Counters.
    pub watched: Arc<Watched>,
    /// Where events go.
    pub sender: Sender<Message>,
    /// Set when the reader is so slow that events were lost.
    pub is_overrun: Arc<AtomicBool>,
    /// Which answer.
    pub choice: usize,
    /// When the request came.
    pub arrived: Instant,
    /// The last token.
    pub last_token: Cell<Option<Instant>>,
    /// Shown in `/slots`.
    pub slot: Slot,
    /// Its place there.
    pub place: Cell<Option<usize>>,
    /// Its place in the queue, given back when the engine drops this.
    pub _queued: Place,
}

impl EventSink for ChoiceSink {
    fn send(&self, event: Event) -> bool {
        let at = Instant::now();
        self.note(&event, at);
        match self.sender.try_send(Message {
            choice: self.choice,
            at,
            event,
        }) {
            Ok(()) => true,
            Err(TrySendError::Closed(_)) => false,
            // Progress is told again with the next part of the prompt.
            Err(TrySendError::Full(Message {
                event: Event::Prefill { .. },
                ..
            })) => true,
            Err(TrySendError::Full(_)) => {
                self.is_overrun.store(true, Ordering::Release);
                false
            }
        }
    }
}

impl ChoiceSink {
    fn note(&self, event: &Event, at: Instant) {
        match event {
            Event::Prefill { done, total } => {
                if self.place.get().is_none() {
                    self.place.set(self.watched.slots.enter(self.slot.clone()));
                }
                self.update(|slot| {
                    slot.cached_tokens = slot.prompt_tokens.saturating_sub(*total);
                    slot.processed_tokens = *done;
                });
            }
            Event::Token { .. } => {
                match self.last_token.replace(Some(at)) {
                    None => self.watched.metrics.first_token.observe(at - self.arrived),
                    Some(before) => self.watched.metrics.inter_token.observe(at - before),
                }
                self.update(|slot| slot.decoded_tokens += 1);
            }
            Event::Done { .. } | Event::Failed(_) => {}
        }
    }

    fn update(&self, change: impl FnOnce(&mut Slot)) {
        if let Some(place) = self.place.get() {
            self.watched.slots.update(place, change);
        }
    }
}

impl Drop for ChoiceSink {
    fn drop(&mut self) {
        self.update(|slot| slot.is_processing = false);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::channel;

    use super::super::metrics::Metrics;
    use super::super::room::Room;
    use super::super::slots::Slots;
    use super::*;
    use crate::engine::{FinishReason, GenerateStats};

    #[test]
    fn a_full_channel_loses_progress_first_and_then_the_answer() {
        let room = Room::new(1, 0);
        let watched = Arc::new(Watched {
            metrics: Metrics::default(),
            slots: Slots::new(1),
        });
        let (sender, mut events) = channel(1);
        let sink = ChoiceSink {
            watched: Arc::clone(&watched),
            sender,
            is_overrun: Arc::default(),
            choice: 0,
            arrived: Instant::now(),
            last_token: Cell::new(None),
            slot: Slot::default(),
            place: Cell::new(None),
            _queued: room.take("", 1).unwrap().remove(0),
        };
        let token = || Event::Token {
            id: 7,
            logprobs: None,
        };
        assert!(sink.send(token()));
        assert!(sink.send(Event::Prefill { done: 1, total: 1 }));
        assert!(watched.slots.all()[0].is_processing);
        assert!(!sink.is_overrun.load(Ordering::Acquire));
        assert!(!sink.send(token()));
        assert!(sink.is_overrun.load(Ordering::Acquire));
        assert!(matches!(
            events.try_recv().unwrap().event,
            Event::Token { .. }
        ));
        drop(events);
        let (reason, stats) = (FinishReason::Eos, GenerateStats::default());
        assert!(!sink.send(Event::Done { reason, stats }));
        drop(sink);
        assert!(!watched.slots.all()[0].is_processing);
        assert!(room.take("", 1).is_ok());
    }
}
