//! The open connections: how many there are, whose turn it is on each, and which one has to go when there are too many.
//!
//! A server that lets clients hold connections without saying anything is full as soon as somebody wants it to be. Here
//! the connection that has kept the server waiting longest makes room for the next one: for a request, for its body, or
//! for what was written to be taken. One whose answer is in work is never closed for another.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// All open connections.
#[derive(Debug)]
pub struct Crowd {
    most: usize,
    /// Nobody has to go sooner: what was sent may be on its way.
    grace: Duration,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    members: BTreeMap<u64, Arc<Presence>>,
    next: u64,
    /// Connections that were closed for others.
    displaced: u64,
}

/// An open connection, counted for as long as it lives.
pub struct Member {
    crowd: Arc<Crowd>,
    id: u64,
    /// Its state.
    pub presence: Arc<Presence>,
}

/// Whose turn it is on a connection.
#[derive(Debug)]
pub struct Presence {
    state: Mutex<State>,
    displaced: Notify,
}

#[derive(Debug)]
struct State {
    /// Since when the client's request is waited for; none while it is answered.
    request_since: Option<Instant>,
    /// Since when nothing of what is written was taken.
    blocked_since: Option<Instant>,
    /// Whether interim responses may be sent.
    takes_interim: bool,
    has_response: bool,
    wants_comment: bool,
}

/// What can be written to find out whether the client still reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// Nothing: it is the client's turn, or what was written already is on its way.
    Nothing,
    /// An interim response.
    Interim,
    /// A comment in a stream of events, which was asked for.
    Comment,
    /// Nothing, and an older client cannot be told apart from one that is gone.
    Impossible,
}

impl Crowd {
    /// Of so many connections at most.
    pub fn new(most: usize, grace: Duration) -> Self {
        Self {
            most,
            grace,
            open: Mutex::default(),
        }
    }

    /// Takes a connection in, in the place of the one that has kept the server waiting longest where there are too many.
    /// None when all are being answered, or have just come.
    pub fn enter(self: &Arc<Self>) -> Option<Member> {
        let mut open = self.lock();
        let before = Instant::now().checked_sub(self.grace);
        while open.members.len() >= self.most {
            open.displace_one(before?).then_some(())?;
        }
        let id = open.next;
        open.next += 1;
        let presence = Arc::new(Presence::new());
        open.members.insert(id, Arc::clone(&presence));
        Some(Member {
            crowd: Arc::clone(self),
            id,
            presence,
        })
    }

    /// Closes the connection that has kept the server waiting longest, if there is one.
    pub fn displace_one(&self) -> bool {
        let before = Instant::now().checked_sub(self.grace);
        before.is_some_and(|before| self.lock().displace_one(before))
    }

    /// Open connections.
    pub fn count(&self) -> usize {
        self.lock().members.len()
    }

    /// Connections that were closed for others.
    pub fn displaced_count(&self) -> u64 {
        self.lock().displaced
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Of those that began to keep the server waiting at that time or before.
    fn displace_one(&mut self, before: Instant) -> bool {
        let waits = self
            .members
            .iter()
            .filter_map(|(id, presence)| Some((presence.waiting_since()?, *id)));
        let Some((_, id)) = waits.filter(|(since, _)| *since <= before).min() else {
            return false;
        };
        if let Some(presence) = self.members.remove(&id) {
            presence.displaced.notify_one();
            self.displaced += 1;
        }
        true
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.crowd.lock().members.remove(&self.id);
    }
}

impl Presence {
    fn new() -> Self {
        Self {
            state: Mutex::new(State {
                request_since: Some(Instant::now()),
                blocked_since: None,
                takes_interim: false,
                has_response: false,
                wants_comment: false,
            }),
            displaced: Notify::new(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the connection has to be closed for another.
    pub async fn displaced(&self) {
        self.displaced.notified().await;
    }

    /// The head of a request has come; its body is still waited for.
    pub fn request(&self, takes_interim: bool) {
        let mut state = self.lock();
        *state = State {
            request_since: Some(Instant::now()),
            blocked_since: state.blocked_since,
            takes_interim,
            has_response: false,
            wants_comment: false,
        };
    }

    /// The whole request has come, or as much of it as anybody wants.
    pub fn received(&self) {
        self.lock().request_since = None;
    }

    /// The head of the response is written from now on.
    pub fn respond(&self) {
        self.lock().has_response = true;
    }

    /// The response has ended; the next request is waited for.
    pub fn responded(&self) {
        self.lock().request_since = Some(Instant::now());
    }

    /// Whether the client takes what is written.
    pub fn blocked(&self, is_blocked: bool) {
        let mut state = self.lock();
        match (is_blocked, state.blocked_since) {
            (true, None) => state.blocked_since = Some(Instant::now()),
            (false, Some(_)) => state.blocked_since = None,
            _ => {}
        }
    }

    /// Whether a request is waited for and all that was written is on its way.
    pub fn is_silent(&self) -> bool {
        let state = self.lock();
        state.request_since.is_some() && state.blocked_since.is_none()
    }

    /// What to write to a client that says that it writes nothing more.
    pub fn probe(&self) -> Probe {
        let mut state = self.lock();
        if state.request_since.is_some() || state.blocked_since.is_some() {
            return Probe::Nothing;
        }
        match (state.takes_interim, state.has_response) {
            (false, _) => Probe::Impossible,
            (true, false) => Probe::Interim,
            (true, true) => {
                state.wants_comment = true;
                Probe::Comment
            }
        }
    }

    /// Whether a comment was asked for; once.
    pub fn take_wants_comment(&self) -> bool {
        std::mem::take(&mut self.lock().wants_comment)
    }

    fn waiting_since(&self) -> Option<Instant> {
        let state = self.lock();
        state
            .request_since
            .into_iter()
            .chain(state.blocked_since)
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_keeps_the_server_waiting_longest_makes_room() {
        let crowd = Arc::new(Crowd::new(3, Duration::ZERO));
        let answered = crowd.enter().unwrap();
        answered.presence.request(true);
        answered.presence.received();
        let idle = crowd.enter().unwrap();
        let slow = crowd.enter().unwrap();
        // It says something, so that the other one is silent for longer.
        slow.presence.request(true);
        let newest = crowd.enter().unwrap();
        assert_eq!((crowd.count(), crowd.displaced_count()), (3, 1));
        drop(idle);
        assert_eq!(crowd.count(), 3);
        slow.presence.received();
        newest.presence.request(false);
        newest.presence.received();
        assert!(crowd.enter().is_none(), "all are being answered");
        assert!(!crowd.displace_one());
        slow.presence.respond();
        slow.presence.blocked(true);
        let next = crowd.enter().unwrap();
        assert_eq!((crowd.count(), crowd.displaced_count()), (3, 2));
        drop((answered, slow, newest, next));
        assert_eq!(crowd.count(), 0);
        let patient = Arc::new(Crowd::new(1, Duration::from_secs(3600)));
        let only = patient.enter().unwrap();
        assert!(patient.enter().is_none() && !patient.displace_one());
        drop(only);
    }

    #[test]
    fn a_client_is_probed_with_what_may_be_written_next() {
        let crowd = Arc::new(Crowd::new(1, Duration::ZERO));
        let member = crowd.enter().unwrap();
        let presence = &member.presence;
        assert_eq!(presence.probe(), Probe::Nothing);
        presence.request(true);
        assert_eq!(presence.probe(), Probe::Nothing);
        presence.received();
        assert_eq!(presence.probe(), Probe::Interim);
        presence.blocked(true);
        assert_eq!(presence.probe(), Probe::Nothing);
        presence.blocked(false);
        presence.respond();
        assert_eq!(presence.probe(), Probe::Comment);
        assert!(presence.take_wants_comment() && !presence.take_wants_comment());
        presence.responded();
        presence.request(false);
        presence.received();
        assert_eq!(presence.probe(), Probe::Impossible);
    }
}
