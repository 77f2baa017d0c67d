//! One file from the hub into the staging directory: resumed where it stopped, hashed as it streams,
//! verified before it gets its name.
//!
//! Bytes are written to `<name>.part`; a file that carries its own name in the staging directory is whole
//! and verified. A part is only continued if the hub still says the same about the file and the server
//! confirms that it is the same content (`If-Range`), or a digest will tell.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::digest::{ContentId, FileHasher};
use super::disk::{Disk, is_full};
use super::error::StoreError;
use super::http::{Client, Reply, broken};
use super::hub::{Asked, file_url, status_error};
use super::name::RepoId;
use super::progress::{CancelFlag, Progress, ProgressEvent};
use super::range::{continuation_fault, is_strong};
use super::record::{PartialFile, PartialState, RecordedFile};
use super::retry::{Clock, Retrier};
use super::select::WantedFile;

/// How much is read, hashed and written at a time, and how often cancellation is looked at.
const CHUNK_BYTES: usize = 256 << 10;

/// What all files of one download share.
pub(super) struct Transfer<'a> {
    pub client: &'a Client,
    pub disk: &'a dyn Disk,
    pub clock: &'a dyn Clock,
    pub cancel: &'a CancelFlag,
    pub id: &'a RepoId,
    pub commit: &'a str,
    pub staging: &'a Path,
}

/// How far one file is.
struct Partial<'a> {
    file: &'a WantedFile,
    part: PathBuf,
    /// Bytes in the part, all of which are in the hasher.
    offset: u64,
    hasher: Option<FileHasher>,
    size: Option<u64>,
    content: Option<ContentId>,
    /// The bytes come from more than one answer.
    pieced: bool,
    /// It was already started over because of a wrong digest.
    restarted_for_digest: bool,
}

enum Step {
    Done(RecordedFile),
    /// Make another request at once.
    Again,
}

impl Transfer<'_> {
    /// Fetches one file, or finds that it is already staged.
    pub fn fetch(
        &self,
        file: &WantedFile,
        state: &mut PartialState,
        progress: &mut dyn Progress,
    ) -> Result<RecordedFile, StoreError> {
        let name = file.path.as_str();
        if let Some(done) = self.staged(file, state) {
            progress.event(&ProgressEvent::FileFinished {
                file: name,
                size_bytes: done.size,
            });
            return Ok(done);
        }
        let mut partial = self.begin(file, state)?;
        progress.event(&ProgressEvent::FileStarted {
            file: name,
            size_bytes: partial.size,
            resumed_bytes: partial.offset,
        });
        let mut retrier = Retrier::new(self.clock, self.cancel, name);
        loop {
            self.cancel.check()?;
            let before = partial.offset;
            match self.attempt(&mut partial, state, progress) {
                Ok(Step::Done(done)) => {
                    progress.event(&ProgressEvent::FileFinished {
                        file: name,
                        size_bytes: done.size,
                    });
                    return Ok(done);
                }
                Ok(Step::Again) => {}
                Err(error) => retrier.after(error, partial.offset > before, progress)?,
            }
        }
    }

    /// How many bytes of a file are already staged.
    pub fn staged_bytes(&self, file: &WantedFile, state: &PartialState) -> u64 {
        if let Some(done) = self.staged(file, state) {
            return done.size;
        }
        if !is_same(file, state) {
            return 0;
        }
        let length = fs::metadata(part_path(self.staging, file)).map_or(0, |meta| meta.len());
        length.min(file.size.unwrap_or(0))
    }

    /// The finished file of an earlier run, if it is still what the hub offers.
    fn staged(&self, file: &WantedFile, state: &PartialState) -> Option<RecordedFile> {
        let known = state.files.get(file.path.as_str())?;
        let sha256 = known.sha256.clone()?;
        let size = fs::metadata(file.path.below(self.staging)).ok()?.len();
        if !is_same(file, state) || known.size.is_some_and(|s| s != size) {
            return None;
        }
        Some(RecordedFile {
            size,
            sha256,
            hub: known.content.clone(),
        })
    }

    /// Takes up the part of an earlier run, or starts from nothing.
    fn begin<'a>(
        &self,
        file: &'a WantedFile,
        state: &mut PartialState,
    ) -> Result<Partial<'a>, StoreError> {
        let part = part_path(self.staging, file);
        let mut partial = Partial {
            file,
            part,
            offset: 0,
            hasher: None,
            size: file.size,
            content: file.content.clone(),
            pieced: false,
            restarted_for_digest: false,
        };
        if let Some(parent) = partial.part.parent() {
            fs::create_dir_all(parent).map_err(StoreError::io("create", parent))?;
        }
        let length = fs::metadata(&partial.part).map_or(0, |meta| meta.len());
        let known = state.files.get(file.path.as_str());
        let etag = known.and_then(|k| k.etag.clone());
        let resumable = is_same(file, state) && (etag.is_some() || file.content.is_some());
        if let (true, Some(size)) = (resumable && length > 0, file.size)
            && length <= size
        {
            let mut hasher = FileHasher::new(size, file.content.as_ref());
            self.rehash(&partial.part, length, &mut hasher)?;
            partial.hasher = Some(hasher);
            partial.offset = length;
            partial.pieced = true;
        }
        state.files.insert(
            file.path.to_string(),
            PartialFile {
                size: file.size,
                content: file.content.clone(),
                etag: etag.filter(|_| partial.offset > 0),
                sha256: None,
            },
        );
        state.write(self.staging)?;
        Ok(partial)
    }

    fn rehash(&self, path: &Path, length: u64, hasher: &mut FileHasher) -> Result<(), StoreError> {
        let file = File::open(path).map_err(StoreError::io("open", path))?;
        let mut reader = file.take(length);
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            self.cancel.check()?;
            let count = reader
                .read(&mut buffer)
                .map_err(StoreError::io("read", path))?;
            match buffer.get(..count) {
                None | Some([]) => return Ok(()),
                Some(chunk) => hasher.update(chunk),
            }
        }
    }

    /// One request and what follows from its answer.
    fn attempt(
        &self,
        partial: &mut Partial<'_>,
        state: &mut PartialState,
        progress: &mut dyn Progress,
    ) -> Result<Step, StoreError> {
        if partial.offset > 0 && partial.size == Some(partial.offset) {
            return self.finish(partial, state, progress);
        }
        let name = partial.file.path.as_str();
        let etag = state.files.get(name).and_then(|k| k.etag.clone());
        let mut headers = Vec::new();
        if partial.offset > 0 {
            headers.push(("range", format!("bytes={}-", partial.offset)));
            headers.extend(etag.clone().map(|etag| ("if-range", etag)));
        }
        let url = file_url(self.client, self.id, self.commit, &partial.file.path);
        let reply = self.client.get(&url, &headers)?;
        let changed = match reply.status {
            200 if partial.offset > 0 => {
                Some("the server sends it whole: it changed, or cannot resume")
            }
            200 => None,
            206 if partial.offset > 0 => {
                continuation_fault(&reply, partial.offset, partial.size, etag.as_deref())
            }
            416 if partial.offset > 0 => Some("the server has no such range of it"),
            _ => {
                return Err(status_error(
                    self.client,
                    self.id,
                    Asked::File(&partial.file.path),
                    reply,
                ));
            }
        };
        if let Some(reason) = changed {
            self.restart(partial, state, progress, reason)?;
            if reply.status != 200 {
                return Ok(Step::Again);
            }
        }
        self.learn(partial, state, &reply)?;
        self.receive(partial, reply, progress)?;
        self.finish(partial, state, progress)
    }

    /// Takes from the headers what the listing did not say, and holds them to what it did say.
    fn learn(
        &self,
        partial: &mut Partial<'_>,
        state: &mut PartialState,
        reply: &Reply,
    ) -> Result<(), StoreError> {
        let file = partial.file;
        let announced = reply
            .content_length()
            .and_then(|n| n.checked_add(partial.offset));
        if partial.content.is_none() {
            // Only this header: a plain `etag` of 40 or 64 hex digits is some other digest on some mirrors.
            let tag = reply.hub_header("x-linked-etag").unwrap_or_default();
            partial.content = ContentId::sha256(tag.trim_matches('"'));
        }
        let linked = reply
            .hub_header("x-linked-size")
            .and_then(|t| t.trim().parse().ok());
        let size = partial.size.or(linked).or(announced);
        let Some(size) = size else {
            return Err(StoreError::MalformedReply {
                url: reply.url.clone(),
                reason: format!(
                    "neither listing nor answer tells the size of {file}",
                    file = file.path
                ),
            });
        };
        if let Some(found_bytes) = announced.filter(|n| *n != size) {
            return Err(StoreError::SizeMismatch {
                file: file.path.to_string(),
                expected_bytes: size,
                found_bytes,
            });
        }
        partial.size = Some(size);
        if partial.hasher.is_none() {
            partial.hasher = Some(FileHasher::new(size, partial.content.as_ref()));
        }
        if partial.offset > 0 {
            partial.pieced = true;
        }
        let etag = reply
            .header("etag")
            .filter(|tag| is_strong(tag))
            .map(str::to_owned);
        if let Some(known) = state.files.get_mut(file.path.as_str())
            && known.etag != etag
        {
            known.etag = etag;
            state.write(self.staging)?;
        }
        Ok(())
    }

    /// Streams the body to the part.
    fn receive(
        &self,
        partial: &mut Partial<'_>,
        reply: Reply,
        progress: &mut dyn Progress,
    ) -> Result<(), StoreError> {
        let name = partial.file.path.as_str();
        let size = partial.size.unwrap_or(0);
        let url = reply.url.clone();
        let mut out = self
            .disk
            .open_part(&partial.part, partial.offset)
            .map_err(|error| disk_error("open", partial, error))?;
        let mut reader = reply.into_reader();
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            self.cancel.check()?;
            let count = reader
                .read(&mut buffer)
                .map_err(|error| broken(&url, &error))?;
            let Some(chunk) = buffer.get(..count).filter(|chunk| !chunk.is_empty()) else {
                break;
            };
            let after = partial.offset.saturating_add(chunk.len() as u64);
            if after > size {
                return Err(StoreError::SizeMismatch {
                    file: name.to_owned(),
                    expected_bytes: size,
                    found_bytes: after,
                });
            }
            out.write_all(chunk)
                .map_err(|error| disk_error("write", partial, error))?;
            if let Some(hasher) = &mut partial.hasher {
                hasher.update(chunk);
            }
            partial.offset = after;
            progress.event(&ProgressEvent::Received {
                file: name,
                bytes: chunk.len() as u64,
            });
        }
        if partial.offset < size {
            return Err(StoreError::Truncated {
                file: name.to_owned(),
                expected_bytes: size,
                found_bytes: partial.offset,
            });
        }
        out.sync()
            .map_err(|error| disk_error("sync", partial, error))
    }

    /// Compares the digest and gives the file its name.
    fn finish(
        &self,
        partial: &mut Partial<'_>,
        state: &mut PartialState,
        progress: &mut dyn Progress,
    ) -> Result<Step, StoreError> {
        let name = partial.file.path.as_str();
        let size = partial.offset;
        let hasher = partial
            .hasher
            .take()
            .unwrap_or_else(|| FileHasher::new(size, partial.content.as_ref()));
        let digests = hasher.finish();
        if let Some((expected, found)) = partial
            .content
            .as_ref()
            .and_then(|content| digests.mismatch(content))
        {
            // Pieces that do not fit together are our problem and worth one fresh start; a file that came
            // in one piece and is wrong would come wrong again.
            let again = partial.pieced && !partial.restarted_for_digest;
            partial.restarted_for_digest = true;
            self.restart(partial, state, progress, "its digest is wrong")?;
            if again {
                return Ok(Step::Again);
            }
            return Err(StoreError::HashMismatch {
                file: name.to_owned(),
                expected,
                found,
            });
        }
        let whole = partial.file.path.below(self.staging);
        fs::rename(&partial.part, &whole).map_err(StoreError::io("rename", &partial.part))?;
        if let Some(known) = state.files.get_mut(name) {
            known.sha256 = Some(digests.sha256.clone());
        }
        state.write(self.staging)?;
        Ok(Step::Done(RecordedFile {
            size,
            sha256: digests.sha256,
            hub: partial.content.clone(),
        }))
    }

    fn restart(
        &self,
        partial: &mut Partial<'_>,
        state: &mut PartialState,
        progress: &mut dyn Progress,
        reason: &str,
    ) -> Result<(), StoreError> {
        progress.event(&ProgressEvent::FileRestarted {
            file: partial.file.path.as_str(),
            lost_bytes: partial.offset,
            reason,
        });
        fs::remove_file(&partial.part).map_err(StoreError::io("remove", &partial.part))?;
        partial.offset = 0;
        partial.hasher = None;
        partial.pieced = false;
        if let Some(known) = state.files.get_mut(partial.file.path.as_str()) {
            known.etag = None;
        }
        state.write(self.staging)
    }
}

/// Where the unfinished bytes of a file are.
fn part_path(staging: &Path, file: &WantedFile) -> PathBuf {
    let mut name = file.path.below(staging).into_os_string();
    name.push(".part");
    PathBuf::from(name)
}

/// Whether the state speaks of the same content as the listing does now.
fn is_same(file: &WantedFile, state: &PartialState) -> bool {
    state
        .files
        .get(file.path.as_str())
        .is_some_and(|known| known.size == file.size && known.content == file.content)
}

fn disk_error(action: &'static str, partial: &Partial<'_>, error: std::io::Error) -> StoreError {
    if is_full(&error) {
        return StoreError::DiskFull {
            path: partial.part.clone(),
            kept_bytes: partial.offset,
        };
    }
    StoreError::io(action, &partial.part)(error)
}
