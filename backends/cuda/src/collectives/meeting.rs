//! The ranks of a machine tell each other what they have, over connections that then say when one of them is gone.
//!
//! Rank 1 is the host, at the address that the group has for it: MLX's NCCL layer uses that of rank 0 alone.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mlxcel_abi::{AbiError, Result, status};
use mlxcel_backend_mlx::serde_json;

/// Who receives the others.
const HOST: usize = 1;
/// All ranks have just joined MLX's group, so they come within a moment.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(5);
/// A message is a handle or a reason.
const MOST_BYTES: usize = 1 << 16;

/// Why this rank met nobody.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Absent(pub(super) String);

/// A word that is not 0 once a rank is gone. It may be in memory that devices read.
#[derive(Debug, Clone)]
pub(crate) struct Gone(Word);

#[derive(Debug, Clone)]
enum Word {
    /// Memory that is never freed.
    Static(&'static AtomicU32),
    #[cfg(test)]
    Own(Arc<AtomicU32>),
}

impl Gone {
    /// Over a word that is never freed.
    pub(super) fn new(word: &'static AtomicU32) -> Self {
        Self(Word::Static(word))
    }

    fn word(&self) -> &AtomicU32 {
        match &self.0 {
            Word::Static(word) => word,
            #[cfg(test)]
            Word::Own(word) => word,
        }
    }

    /// Whether it is.
    pub(crate) fn is_set(&self) -> bool {
        self.word().load(Ordering::Acquire) != 0
    }

    fn set(&self) {
        self.word().store(1, Ordering::Release);
    }
}

/// Connections: the host's to all others, the others' to the host.
#[derive(Debug)]
pub(super) struct Meeting {
    rank: usize,
    size: usize,
    /// With the number of the rank at the other end.
    links: Vec<(usize, TcpStream)>,
}

/// What a rank says first: who it is, and of which group.
fn greeting(rank: usize, addresses: &[String]) -> String {
    format!("{rank} {}", addresses.join(" "))
}

impl Meeting {
    /// Meets the others of the group.
    pub(super) fn attend(rank: usize, addresses: &[String]) -> core::result::Result<Self, Absent> {
        let size = addresses.len();
        let at = addresses
            .get(HOST)
            .ok_or_else(|| Absent("the group has one rank".to_owned()))?;
        let deadline = Instant::now() + PATIENCE;
        let links = if rank == HOST {
            receive(at, addresses, deadline)
        } else {
            visit(rank, at, addresses, deadline).map(|link| vec![(HOST, link)])
        };
        let links =
            links.map_err(|error| Absent(format!("the ranks did not meet at {at}: {error}")))?;
        Ok(Self { rank, size, links })
    }

    /// What every rank says, in their order. An error is that a rank is gone, or as good as that: there is no way to go on with
    /// the others then.
    pub(super) fn exchange(&mut self, own: &str) -> Result<Vec<String>> {
        self.exchanged(own).map_err(|error| {
            AbiError::new(
                status::UNAVAILABLE,
                format!("the ranks could not agree on how they add: {error}"),
            )
        })
    }

    fn exchanged(&mut self, own: &str) -> io::Result<Vec<String>> {
        if self.rank != HOST {
            let (_, link) = self.links.first_mut().ok_or(io::ErrorKind::NotConnected)?;
            write(link, own)?;
            let all: Vec<String> = serde_json::from_str(&read(link)?)?;
            if all.len() != self.size {
                return Err(io::ErrorKind::InvalidData.into());
            }
            return Ok(all);
        }
        let mut all = vec![String::new(); self.size];
        for (rank, link) in &mut self.links {
            let said = read(link)?;
            if let Some(place) = all.get_mut(*rank) {
                *place = said;
            }
        }
        if let Some(place) = all.get_mut(HOST) {
            own.clone_into(place);
        }
        let text = serde_json::to_string(&all)?;
        for (_, link) in &mut self.links {
            write(link, &text)?;
        }
        Ok(all)
    }

    /// From now on has `gone` set when the other end of a connection is no more: the host's ends tell the others in turn.
    pub(super) fn watch(self, gone: &Gone) -> Result<()> {
        let failed =
            |error: io::Error| AbiError::internal(format!("cannot watch the other ranks: {error}"));
        let links: Vec<TcpStream> = self.links.into_iter().map(|(_, link)| link).collect();
        for link in &links {
            link.set_read_timeout(None).map_err(failed)?;
            link.set_write_timeout(None).map_err(failed)?;
        }
        let links = Arc::new(links);
        for i in 0..links.len() {
            let (links, gone) = (Arc::clone(&links), gone.clone());
            std::thread::Builder::new()
                .name("mlxcel-peers".to_owned())
                .spawn(move || {
                    if let Some(mut link) = links.get(i) {
                        // Nobody says anything any more, so whatever ends this is the end.
                        let _ = link.read(&mut [0]);
                    }
                    gone.set();
                    for link in links.iter() {
                        // It may be closed already.
                        let _ = link.shutdown(std::net::Shutdown::Both);
                    }
                })
                .map_err(failed)?;
        }
        Ok(())
    }
}

/// The host's side.
fn receive(
    at: &str,
    addresses: &[String],
    deadline: Instant,
) -> io::Result<Vec<(usize, TcpStream)>> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    let mut links: Vec<(usize, TcpStream)> = Vec::new();
    while links.len() + 1 < addresses.len() {
        match listener.accept() {
            Ok((mut link, _)) => {
                link.set_nonblocking(false)?;
                patient(&link)?;
                // Whoever says something else is none of us.
                let Ok(said) = read(&mut link) else { continue };
                let rank = (0..addresses.len())
                    .find(|rank| *rank != HOST && said == greeting(*rank, addresses));
                if let Some(rank) = rank.filter(|rank| links.iter().all(|(of, _)| of != rank)) {
                    links.push((rank, link));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() > deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(LOOK);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(links)
}

/// The others' side: the host may come later.
fn visit(rank: usize, at: &str, addresses: &[String], deadline: Instant) -> io::Result<TcpStream> {
    loop {
        match TcpStream::connect(at) {
            Ok(mut link) => {
                patient(&link)?;
                write(&mut link, &greeting(rank, addresses))?;
                return Ok(link);
            }
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

/// Nobody is waited for longer than that until all is agreed on.
fn patient(link: &TcpStream) -> io::Result<()> {
    link.set_nodelay(true)?;
    link.set_read_timeout(Some(PATIENCE))?;
    link.set_write_timeout(Some(PATIENCE))
}

/// A length in four bytes, then text.
fn write(link: &mut TcpStream, text: &str) -> io::Result<()> {
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    link.write_all(&bytes)
}

fn read(link: &mut TcpStream) -> io::Result<String> {
    let mut head = [0; 4];
    link.read_exact(&mut head)?;
    let len = u32::from_le_bytes(head) as usize;
    if len > MOST_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len];
    link.read_exact(&mut bytes)?;
    String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn addresses(size: usize) -> Vec<String> {
        let listeners: Vec<TcpListener> = (0..size)
            .map(|_| TcpListener::bind(("127.0.0.1", 0)).unwrap())
            .collect();
        let at = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
        listeners.iter().map(at).collect()
    }

    fn gone() -> Gone {
        Gone(Word::Own(Arc::default()))
    }

    fn meet(size: usize) -> Vec<Meeting> {
        let addresses = addresses(size);
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let addresses = addresses.clone();
                thread::spawn(move || Meeting::attend(rank, &addresses).unwrap())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn every_rank_hears_what_all_say_in_their_order() {
        for size in 2..=5 {
            let ranks: Vec<_> = meet(size)
                .into_iter()
                .map(|mut meeting| {
                    thread::spawn(move || {
                        let own = format!("from {}", meeting.rank);
                        let first = meeting.exchange(&own).unwrap();
                        (first, meeting.exchange("").unwrap())
                    })
                })
                .collect();
            let expected: Vec<String> = (0..size).map(|rank| format!("from {rank}")).collect();
            for rank in ranks {
                let (first, second) = rank.join().unwrap();
                assert_eq!(first, expected);
                assert_eq!(second, vec![String::new(); size]);
            }
        }
    }

    #[test]
    fn strangers_are_not_met() {
        let addresses = addresses(2);
        let host = {
            let addresses = addresses.clone();
            thread::spawn(move || Meeting::attend(1, &addresses).unwrap())
        };
        let deadline = Instant::now() + PATIENCE;
        let mut wrong = addresses.clone();
        wrong[0].push('0');
        let _stranger = visit(0, &addresses[1], &wrong, deadline).unwrap();
        let _itself = visit(1, &addresses[1], &addresses, deadline).unwrap();
        let mut other = Meeting::attend(0, &addresses).unwrap();
        let mut host = host.join().unwrap();
        let told = thread::spawn(move || other.exchange("a").unwrap());
        assert_eq!(host.exchange("b").unwrap(), ["a", "b"]);
        assert_eq!(told.join().unwrap(), ["a", "b"]);
    }

    #[test]
    fn the_end_of_one_is_known_to_all() {
        let mut ranks = meet(4);
        let last = ranks.pop().unwrap();
        let words: Vec<Gone> = ranks
            .into_iter()
            .map(|meeting| {
                let gone = gone();
                meeting.watch(&gone).unwrap();
                gone
            })
            .collect();
        assert!(words.iter().all(|gone| !gone.is_set()));
        drop(last);
        while !words.iter().all(Gone::is_set) {
            thread::yield_now();
        }
    }

    #[test]
    fn a_rank_that_ends_before_all_is_agreed_is_an_error() {
        let mut ranks = meet(3);
        drop(ranks.pop());
        // At once, as the processes are: one after the other would wait for whoever has not spoken yet.
        std::thread::scope(|scope| {
            for mut meeting in ranks {
                scope.spawn(move || {
                    let error = meeting.exchange("").unwrap_err();
                    assert!(error.message.starts_with("the ranks could not agree"));
                });
            }
        });
    }
}
