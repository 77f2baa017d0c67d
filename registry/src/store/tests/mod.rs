//! The store against a real HTTP server on loopback, in a temporary folder, with a clock that does not wait
//! and a disk that can be full.

mod download;
mod fake_hub;
mod listing;
mod manage;
mod names;
mod resolve;
mod resume;
mod security;
mod server;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;

use super::disk::{Disk, PartFile, SystemDisk};
use super::retry::Clock;
use super::*;
use fake_hub::FakeHub;
use server::Server;

/// A clock that only counts.
#[derive(Default)]
struct CountingClock(AtomicU64);

impl Clock for CountingClock {
    fn sleep(&self, duration: Duration) {
        self.0
            .fetch_add(duration.as_millis() as u64, Ordering::SeqCst);
    }
}

/// A disk with little room.
struct SmallDisk {
    free_bytes: u64,
    quota_bytes: Arc<AtomicU64>,
}

struct QuotaFile {
    inner: Box<dyn PartFile>,
    left: Arc<AtomicU64>,
}

impl io::Write for QuotaFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.left.load(Ordering::SeqCst) as usize;
        if left == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let count = self.inner.write(&bytes[..bytes.len().min(left)])?;
        self.left.fetch_sub(count as u64, Ordering::SeqCst);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl PartFile for QuotaFile {
    fn sync(&mut self) -> io::Result<()> {
        self.inner.sync()
    }
}

impl Disk for SmallDisk {
    fn free_bytes(&self, _dir: &Path) -> io::Result<u64> {
        Ok(self.free_bytes)
    }

    fn open_part(&self, path: &Path, keep_bytes: u64) -> io::Result<Box<dyn PartFile>> {
        Ok(Box::new(QuotaFile {
            inner: SystemDisk.open_part(path, keep_bytes)?,
            left: self.quota_bytes.clone(),
        }))
    }
}

/// Everything that a download said, and a hook to act in the middle of it.
#[derive(Default)]
struct Recorder {
    lines: Vec<String>,
    received_bytes: u64,
    cancel_after: Option<(u64, CancelFlag)>,
}

impl Progress for Recorder {
    fn event(&mut self, event: &ProgressEvent<'_>) {
        if let ProgressEvent::Received { bytes, .. } = event {
            self.received_bytes += bytes;
            if let Some((limit, flag)) = &self.cancel_after
                && self.received_bytes >= *limit
            {
                flag.cancel();
            }
            return;
        }
        self.lines.push(format!("{event:?}"));
    }
}

/// A store in a temporary folder.
struct Place {
    dir: TempDir,
    store: Store,
    clock: Arc<CountingClock>,
}

impl Place {
    fn new(endpoint: &str) -> Self {
        Self::with(endpoint, |_| {})
    }

    fn with(endpoint: &str, change: impl FnOnce(&mut StoreEnv)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut env = StoreEnv {
            home: Some(dir.path().to_path_buf()),
            endpoint: endpoint.to_owned(),
            ..StoreEnv::default()
        };
        change(&mut env);
        let mut store = Store::new(env);
        let clock = Arc::new(CountingClock::default());
        store.services.clock = clock.clone();
        Self { dir, store, clock }
    }

    fn disk(&mut self, free_bytes: u64, quota_bytes: u64) -> Arc<AtomicU64> {
        let quota_bytes = Arc::new(AtomicU64::new(quota_bytes));
        self.store.services.disk = Arc::new(SmallDisk {
            free_bytes,
            quota_bytes: quota_bytes.clone(),
        });
        quota_bytes
    }

    fn get(&self, model: &str) -> Result<Resolved, StoreError> {
        self.store.download(&request(model), &mut NoProgress)
    }

    fn find(&self, model: &str) -> Result<Resolved, StoreError> {
        let model = self.store.parse(model)?;
        self.store.resolve(&model, None)
    }

    fn target(&self) -> PathBuf {
        self.store.root().unwrap().join("o/n")
    }

    fn part(&self, file: &str) -> PathBuf {
        self.store
            .root()
            .unwrap()
            .join("o/.n.partial")
            .join(format!("{file}.part"))
    }
}

fn request(model: &str) -> DownloadRequest {
    DownloadRequest::new(HubRef::parse(model, DEFAULT_ORG).unwrap())
}

fn serve(hub: &FakeHub) -> Server {
    let hub = hub.clone();
    Server::start(move |request| hub.answer(request))
}

/// Names below `dir`, folders with a slash at their end.
fn tree_of(dir: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() && !path.is_symlink() {
                names.push(format!("{name}/"));
                open.push(path);
            } else {
                names.push(name);
            }
        }
    }
    names.sort();
    names
}
