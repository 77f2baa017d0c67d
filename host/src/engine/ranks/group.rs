//! Rank 0's side: starts the others, orders steps, and notices their end.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::super::error::EngineError;
use super::RANK_COMMAND;
use super::failure::{Failure, LAST_WORD};
use super::frame;
use super::message::{Answer, Order, Setup, StepOrder};
use super::words::pass_on;

/// Variables of a process by name.
pub type Environment = BTreeMap<String, String>;

/// The other ranks, as rank 0 sees them.
pub struct Ranks {
    links: Vec<UnixStream>,
    ready: Receiver<()>,
    failure: Failure,
    addresses: Vec<String>,
    /// All have loaded their part.
    is_ready: bool,
    /// A step was ordered that has not ended here.
    is_ordered: bool,
}

/// For ranks that run to end by themselves.
const GRACE: Duration = Duration::from_secs(2);

impl Ranks {
    /// Starts ranks 1 to `size` - 1. `setup` says what each of them loads and which variables it is
    /// started with, from its number and the addresses of all.
    pub fn start(
        size: usize,
        failure: Failure,
        setup: impl Fn(usize, &[String]) -> (Setup, Environment),
    ) -> Result<Self, EngineError> {
        let system = |action: &'static str| {
            move |source: io::Error| EngineError::Ranks {
                reason: format!("cannot {action}: {source}"),
            }
        };
        let addresses = free_addresses(size).map_err(system("find free ports"))?;
        let (tell, ready) = channel();
        let mut ranks = Self {
            links: Vec::new(),
            ready,
            failure,
            addresses,
            is_ready: false,
            is_ordered: false,
        };
        for rank in 1..size {
            let (setup, environment) = setup(rank, &ranks.addresses);
            let load = Order::Load(Box::new(setup));
            ranks
                .add(rank, &load, environment, tell.clone())
                .map_err(system("start the other ranks"))?;
        }
        Ok(ranks)
    }

    fn add(
        &mut self,
        rank: usize,
        load: &Order,
        environment: Environment,
        ready: Sender<()>,
    ) -> io::Result<()> {
        let (mut ours, theirs) = UnixStream::pair()?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg(RANK_COMMAND)
            .envs(environment)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // Libraries may print there, and results go to stdout.
            .stdout(Stdio::null())
            // Passed on by us, so that it ends with us: ranks that lost the first say so ten times over.
            .stderr(Stdio::piped())
            // Ctrl-C is for rank 0, which ends the others.
            .process_group(0)
            .spawn()?;
        let id = child.id();
        let words = child.stderr.take();
        self.failure.adopt(child);
        if let Some(words) = words {
            let thread = std::thread::Builder::new().name(format!("mlxcel-words-{rank}"));
            let pass_on = move || {
                // Where stderr is gone there is nobody to tell.
                let _ = pass_on(words, &mut io::stderr());
            };
            self.failure.listen(thread.spawn(pass_on)?);
        }
        let link = ours.try_clone()?;
        let failure = self.failure.clone();
        std::thread::Builder::new()
            .name(format!("mlxcel-rank-{rank}"))
            .spawn(move || watch(rank, id, link, &failure, &ready))?;
        frame::write(&mut ours, load)?;
        self.links.push(ours);
        Ok(())
    }

    /// An address for every rank.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Waits until all have loaded their part.
    pub fn wait_until_ready(&mut self) -> Result<(), EngineError> {
        for _ in &self.links {
            self.failure
                .receive(&self.ready)
                .map_err(|_| self.ended())?;
        }
        self.is_ready = true;
        Ok(())
    }

    /// Has the others run a step, which must run here next.
    pub fn order(&mut self, order: StepOrder) -> Result<(), EngineError> {
        if self.failure.reason().is_some() {
            return Err(self.ended());
        }
        if self.is_ordered {
            // It panicked here, and the others are in the middle of it.
            self.failure.fail("a step never ended on rank 0".to_owned());
            return Err(self.ended());
        }
        self.is_ordered = true;
        let order = Order::Step(Box::new(order));
        for (index, link) in self.links.iter_mut().enumerate() {
            if let Err(error) = frame::write(link, &order) {
                let rank = index + 1;
                self.failure
                    .fail(format!("rank {rank} takes no orders: {error}"));
                return Err(self.ended());
            }
        }
        Ok(())
    }

    /// The step that was ordered ended here, well or with an error. An error leaves the others in the middle of it: it
    /// ends all, unless the end of another rank is what caused it.
    pub fn end_step<T>(&mut self, outcome: Result<T, EngineError>) -> Result<T, EngineError> {
        let was_ordered = std::mem::take(&mut self.is_ordered);
        self.end(outcome, was_ordered)
    }

    /// The same of a step that had been submitted: what it gave was waited for.
    pub fn end_wait<T>(&mut self, outcome: Result<T, EngineError>) -> Result<T, EngineError> {
        self.end(outcome, true)
    }

    fn end<T>(
        &mut self,
        outcome: Result<T, EngineError>,
        was_ordered: bool,
    ) -> Result<T, EngineError> {
        match outcome {
            Err(error) if was_ordered => {
                let deadline = Instant::now() + LAST_WORD;
                while self.failure.reason().is_none() && Instant::now() < deadline {
                    std::thread::sleep(LAST_WORD / 50);
                }
                self.failure
                    .fail(format!("a step failed on rank 0: {error}"));
                Err(self.ended())
            }
            outcome => outcome,
        }
    }

    fn ended(&self) -> EngineError {
        EngineError::Ranks {
            reason: self.failure.reason().unwrap_or("unknown").to_owned(),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.failure.expect_end();
        for link in &self.links {
            // The end of its orders is how a rank learns that it is over.
            let _ = link.shutdown(std::net::Shutdown::Both);
        }
        // One that still loads may wait for others that never come.
        self.failure
            .reap(if self.is_ready { GRACE } else { Duration::ZERO });
        self.failure.hear_out(LAST_WORD);
    }
}

/// Follows one rank until it ends.
fn watch(rank: usize, id: u32, mut link: UnixStream, failure: &Failure, ready: &Sender<()>) {
    loop {
        match frame::read::<Answer>(&mut link) {
            Ok(Some(Answer::Ready)) => {
                // Rank 0 may have given up.
                let _ = ready.send(());
            }
            Ok(Some(Answer::Failed(reason))) => {
                // It may have failed because another one is gone, which is noticed at once.
                std::thread::sleep(LAST_WORD / 2);
                failure.fail(format!("rank {rank}: {reason}"));
            }
            Ok(None) | Err(_) => {
                let how = failure.status_of(id);
                let how = how.unwrap_or_else(|| "it no longer answers".to_owned());
                failure.fail(format!("rank {rank} ended ({how})"));
                return;
            }
        }
    }
}

/// Ports that systems do not give out by themselves, neither to who connects nor to who asks for any, unless they are told to (Linux and
/// macOS begin above).
const QUIET_PORTS: Range<u16> = 20_000..32_768;

/// As many addresses on this machine as there are ranks. Nobody holds them until the backend does, which takes seconds where devices are
/// opened first: so they are where nobody comes by chance, and groups that start at the same time look in different places, which is
/// why these follow from chance too and not from the process: in containers it often has the same number.
fn free_addresses(size: usize) -> io::Result<Vec<String>> {
    let count = QUIET_PORTS.len();
    let first = RandomState::new().hash_one(size) as usize % count;
    let quiet = QUIET_PORTS.cycle().skip(first).take(count);
    let mut listeners: Vec<TcpListener> = quiet
        .filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok())
        .take(size)
        .collect();
    while listeners.len() < size {
        listeners.push(TcpListener::bind(("127.0.0.1", 0))?);
    }
    let address = |listener: &TcpListener| Ok(listener.local_addr()?.to_string());
    listeners.iter().map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_where_nobody_comes_by_chance() {
        let found = free_addresses(4).unwrap();
        let ports: Vec<u16> = found
            .iter()
            .map(|at| at.rsplit_once(':').unwrap().1.parse().unwrap())
            .collect();
        for (i, port) in ports.iter().enumerate() {
            assert!(!ports[..i].contains(port), "{found:?}");
            assert!(QUIET_PORTS.contains(port), "{found:?}");
        }
        let taken = TcpListener::bind(found[0].as_str()).unwrap();
        let others = free_addresses(4).unwrap();
        assert!(!others.contains(&found[0]), "{others:?}");
        drop(taken);
    }
}
