//! The disk tier of the prefix cache: full pages of finished sequences as files, which survive the process.
//!
//! The engine thread decides and reads; a thread of its own writes, so that a slow or full disk costs pages and never
//! time of an answer. A file that is not exactly what was asked for is deleted and counts as a miss.

mod format;
mod index;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use format::Subject;
pub use format::{Digest32, Part};
use index::{Entry, Index, TEMPORARY, file_name};

/// Pages that may wait for the writer.
const WAITING_PAGES: usize = 4;

/// After a write that failed, as on a full disk, none is tried for so long.
const PAUSE: Duration = Duration::from_secs(30);

/// Where the pages are and how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOptions {
    /// Folder, made if it is missing.
    pub dir: PathBuf,
    /// Most bytes of files in it.
    pub max_bytes: u64,
}

impl DiskOptions {
    /// Makes the folder, and says whether it can be read.
    pub fn check(&self) -> io::Result<()> {
        make_private(&self.dir)?;
        fs::read_dir(&self.dir).map(|_| ())
    }
}

/// Counters since the start, and what there is now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Whether there is a disk tier.
    pub is_on: bool,
    /// Pages read.
    pub read_pages: u64,
    /// Pages written.
    pub written_pages: u64,
    /// Pages that could not be written.
    pub failed_writes: u64,
    /// Files that were not what their names said, and were deleted.
    pub damaged_files: u64,
    /// Files deleted to keep the bound.
    pub evicted_files: u64,
    /// Files there are.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    read: AtomicU64,
    written: AtomicU64,
    failed: AtomicU64,
    damaged: AtomicU64,
    evicted: AtomicU64,
    /// Pages that were handed over and are not written yet.
    waiting: AtomicU64,
}

#[derive(Debug)]
struct Shared {
    options: DiskOptions,
    index: Mutex<Index>,
    counters: Counters,
}

struct Job {
    key: Digest32,
    file: Vec<u8>,
}

/// Names of the pages of one sequence, one after the other.
#[derive(Debug, Clone)]
pub struct KeyChain {
    state: Sha256,
    namespace: Digest32,
}

/// The disk tier of one model.
pub struct DiskTier {
    shared: Arc<Shared>,
    fingerprint: Digest32,
    page_tokens: usize,
    jobs: Option<SyncSender<Job>>,
    writer: Option<JoinHandle<()>>,
}

impl KeyChain {
    /// Name of the page that goes on with these tokens.
    pub fn next(&mut self, page: &[u32]) -> Digest32 {
        for token in page {
            self.state.update(token.to_le_bytes());
        }
        self.state.clone().finalize().into()
    }

    /// Name of the recurrent states at the end of the page that was named last.
    pub fn states(&self) -> Digest32 {
        let mut state = self.state.clone();
        // No token list ends so: tokens come in fours of bytes.
        state.update(b"states!");
        state.finalize().into()
    }
}

impl DiskTier {
    /// Opens the folder for a model with this fingerprint.
    pub fn open(
        options: DiskOptions,
        fingerprint: Digest32,
        page_tokens: usize,
    ) -> io::Result<Self> {
        make_private(&options.dir)?;
        let (index, damaged) = Index::scan(&options.dir, &fingerprint)?;
        let shared = Arc::new(Shared {
            options,
            index: Mutex::new(index),
            counters: Counters::default(),
        });
        shared.counters.damaged.store(damaged, Ordering::Relaxed);
        let gone = shared.index().make_room(0, shared.options.max_bytes);
        shared.delete(&gone, &shared.counters.evicted);
        let (jobs, inbox) = sync_channel(WAITING_PAGES);
        let own = Arc::clone(&shared);
        let writer = std::thread::Builder::new()
            .name("mlxcel-disk".to_owned())
            .spawn(move || write_all(&own, &inbox))?;
        Ok(Self {
            shared,
            fingerprint,
            page_tokens,
            jobs: Some(jobs),
            writer: Some(writer),
        })
    }

    /// Names of the pages of a tenant's sequence.
    pub fn chain(&self, namespace: &str) -> KeyChain {
        let namespace: Digest32 = Sha256::digest(namespace.as_bytes()).into();
        let mut state = Sha256::new();
        state.update(self.fingerprint);
        state.update(namespace);
        KeyChain { state, namespace }
    }

    /// Whether a page is there.
    pub fn contains(&self, key: &Digest32) -> bool {
        self.shared.index().contains(key)
    }

    /// Reads the part at the end of `tokens`. None when it is not, or not rightly, there.
    pub fn read(
        &self,
        chain: &KeyChain,
        (part, key): (Part, &Digest32),
        tokens: &[u32],
        payload_len: usize,
    ) -> Option<Vec<u8>> {
        if !self.contains(key) {
            return None;
        }
        let path = self.shared.path(key);
        let file = fs::read(&path).ok();
        let is_there = file.is_some();
        let payload =
            file.and_then(|file| self.subject(chain, part, tokens).decode(file, payload_len));
        if payload.is_some() {
            self.shared.index().touch(key);
            self.shared.counters.read.fetch_add(1, Ordering::Relaxed);
            // So that it is young after a restart too; a file that cannot be touched is merely older.
            let _ = File::options()
                .append(true)
                .open(&path)
                .and_then(|file| file.set_modified(SystemTime::now()));
        } else {
            self.shared.index().remove(key);
            if is_there {
                self.shared.delete(&[*key], &self.shared.counters.damaged);
            }
        }
        payload
    }

    fn subject<'a>(&'a self, chain: &'a KeyChain, part: Part, tokens: &'a [u32]) -> Subject<'a> {
        Subject {
            fingerprint: &self.fingerprint,
            namespace: &chain.namespace,
            tokens,
            page_tokens: self.page_tokens,
            part,
        }
    }

    /// Hands a part to the writer. False when it has too many already.
    pub fn write(
        &self,
        chain: &KeyChain,
        (part, key): (Part, Digest32),
        tokens: &[u32],
        payload: &[u8],
    ) -> bool {
        let file = self.subject(chain, part, tokens).encode(payload);
        let Some(jobs) = &self.jobs else { return true };
        let waiting = &self.shared.counters.waiting;
        waiting.fetch_add(1, Ordering::AcqRel);
        let sent = jobs.try_send(Job { key, file });
        if sent.is_err() {
            waiting.fetch_sub(1, Ordering::AcqRel);
        }
        !matches!(sent, Err(TrySendError::Full(_)))
    }

    /// Whether pages are being written.
    pub fn is_busy(&self) -> bool {
        self.shared.counters.waiting.load(Ordering::Acquire) > 0
    }

    /// Deletes all pages of this model.
    pub fn clear(&mut self) {
        let gone = self.shared.index().clear_own();
        self.shared.delete(&gone, &AtomicU64::new(0));
    }

    /// Counters.
    pub fn stats(&self) -> DiskStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        let (files, bytes) = self.shared.index().size();
        DiskStats {
            is_on: true,
            read_pages: count(&counters.read),
            written_pages: count(&counters.written),
            failed_writes: count(&counters.failed),
            damaged_files: count(&counters.damaged),
            evicted_files: count(&counters.evicted),
            files,
            bytes,
        }
    }
}

impl Drop for DiskTier {
    /// Waits for the few pages that were handed over.
    fn drop(&mut self) {
        self.jobs.take();
        if let Some(writer) = self.writer.take() {
            // A panic of the thread was reported when it happened.
            let _ = writer.join();
        }
    }
}

impl Shared {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, key: &Digest32) -> PathBuf {
        self.options.dir.join(file_name(key))
    }

    fn delete(&self, keys: &[Digest32], counter: &AtomicU64) {
        for key in keys {
            counter.fetch_add(1, Ordering::Relaxed);
            // Another server with the same folder may have been faster.
            let _ = fs::remove_file(self.path(key));
        }
    }

    fn write(&self, job: &Job) -> io::Result<()> {
        let bytes = job.file.len() as u64;
        if bytes > self.options.max_bytes || self.index().contains(&job.key) {
            return Ok(());
        }
        let gone = self.index().make_room(bytes, self.options.max_bytes);
        self.delete(&gone, &self.counters.evicted);
        let path = self.path(&job.key);
        let temporary = path.with_extension(format!("{}{TEMPORARY}", std::process::id()));
        let written = create_private(&temporary)
            .and_then(|mut file| file.write_all(&job.file))
            .and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            // It may never have been made.
            let _ = fs::remove_file(&temporary);
        }
        written?;
        let entry = Entry {
            bytes,
            used: SystemTime::now(),
            is_own: true,
        };
        self.index().insert(job.key, entry);
        self.counters.written.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn write_all(shared: &Shared, inbox: &Receiver<Job>) {
    let mut paused_until: Option<Instant> = None;
    while let Ok(job) = inbox.recv() {
        if paused_until.is_some_and(|until| Instant::now() < until) {
            shared.counters.failed.fetch_add(1, Ordering::Relaxed);
        } else if let Err(error) = shared.write(&job) {
            shared.counters.failed.fetch_add(1, Ordering::Relaxed);
            let dir = shared.options.dir.display();
            tracing::warn!("a page of the prefix cache cannot be written to {dir}: {error}");
            paused_until = Some(Instant::now() + PAUSE);
        }
        shared.counters.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Pages are what users said: nobody else may read them.
#[cfg(unix)]
fn make_private(dir: &std::path::Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
}

#[cfg(not(unix))]
fn make_private(dir: &std::path::Path) -> io::Result<()> {
    fs::create_dir_all(dir)
}

#[cfg(unix)]
fn create_private(path: &std::path::Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .mode(0o600)
        .open(path)
}

#[cfg(not(unix))]
fn create_private(path: &std::path::Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
}

#[cfg(test)]
mod tests;
