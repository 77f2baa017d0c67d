//! A whole checkpoint from a hub into its place.
//!
//! Files are gathered in a staging directory beside the target and appear in one rename, so what a reader
//! finds under the model's name is complete at every moment. A further GGUF file of a repository that is
//! already stored joins it file by file instead; the record, which alone makes a file visible, comes last.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Store;
use super::damage::Damage;
use super::error::StoreError;
use super::fetch::Transfer;
use super::http::Client;
use super::hub::{ListedFile, revision_info, tree};
use super::inspect::{choose_content, missing_shard};
use super::lock::SlotLock;
use super::name::{HubRef, Revision};
use super::progress::{CancelFlag, Progress, ProgressEvent};
use super::record::{PartialState, RECORD_FILE, Record, RecordedFile, STATE_FILE, sync_dir};
use super::repo_path::RepoPath;
use super::resolve::{ModelSource, Resolved};
use super::retry::{Retrier, with_retries};
use super::select::{WantedFile, select};
use super::slot::Slot;
use super::timestamp::rfc3339;

/// Room that has to remain when everything is here: the record, and blocks of small files.
const SPACE_MARGIN_BYTES: u64 = 16 << 20;

/// What to download and where to.
#[derive(Debug, Clone)]
pub struct DownloadRequest {
    /// The model.
    pub model: HubRef,
    /// Which revision; without it, what the store already has, else `main`.
    pub revision: Option<Revision>,
    /// A folder to download to in place of the store.
    pub local_dir: Option<PathBuf>,
    /// Stops the download.
    pub cancel: CancelFlag,
}

impl DownloadRequest {
    /// A download of `model` into the store.
    pub fn new(model: HubRef) -> Self {
        Self {
            model,
            revision: None,
            local_dir: None,
            cancel: CancelFlag::default(),
        }
    }
}

/// One download under its lock.
struct Job<'a> {
    store: &'a Store,
    request: &'a DownloadRequest,
    slot: &'a Slot,
    client: Client,
    id_text: String,
}

impl Store {
    /// Downloads a model, continuing an earlier attempt if there is one. A model that is already complete is
    /// returned as it is, without the network.
    pub fn download(
        &self,
        request: &DownloadRequest,
        progress: &mut dyn Progress,
    ) -> Result<Resolved, StoreError> {
        let slot = match &request.local_dir {
            Some(dir) => Slot::at(dir)?,
            None => Slot::in_store(self.root()?, &request.model.id),
        };
        if request.local_dir.is_none() && slot.target.symlink_metadata().is_ok() {
            self.check_inside(&slot.target)?;
        }
        if let Some(present) = already_there(request, &slot)? {
            return Ok(present);
        }
        if let Some(variable) = self.env().offline {
            return Err(StoreError::Offline {
                model: request.model.to_string(),
                variable,
            });
        }
        let client = Client::new(self.env())?;
        let lock = SlotLock::acquire(&slot.lock)?;
        // Whoever held the lock before may have brought it.
        if let Some(present) = already_there(request, &slot)? {
            return Ok(present);
        }
        let job = Job {
            store: self,
            request,
            slot: &slot,
            client,
            id_text: request.model.id.to_string(),
        };
        let outcome = job.run(progress);
        drop(lock);
        if outcome.is_err()
            && request.local_dir.is_none()
            && let Some(owner) = slot.target.parent()
        {
            // A misspelt name leaves no folder behind. Fails where the owner has anything, as it should.
            let _ = fs::remove_dir(owner);
        }
        outcome
    }
}

impl Job<'_> {
    fn run(&self, progress: &mut dyn Progress) -> Result<Resolved, StoreError> {
        let stored = stored_record(self.slot, &self.id_text)?;
        let (commit, listed) = self.ask_hub(stored.as_ref(), progress)?;
        let wanted = select(&self.request.model, &listed)?;
        let (here, missing) = split_present(wanted, stored.as_ref(), &self.slot.target);

        let staging = &self.slot.staging;
        fs::create_dir_all(staging).map_err(StoreError::io("create", staging))?;
        // Left where an earlier attempt was stopped just before its rename; from here on it would lie.
        remove_if_there(&staging.join(RECORD_FILE))?;
        let mut state = PartialState::read(staging);
        let transfer = Transfer {
            client: &self.client,
            disk: self.store.services().disk.as_ref(),
            clock: self.store.services().clock.as_ref(),
            cancel: &self.request.cancel,
            id: &self.request.model.id,
            commit: &commit,
            staging,
        };
        if let Err(error) = self.plan(&transfer, &state, &here, &missing, progress) {
            let _ = fs::remove_dir(staging);
            return Err(error);
        }

        let names: Vec<RepoPath> = here
            .iter()
            .chain(&missing)
            .map(|f| f.path.clone())
            .collect();
        let mut fetched = BTreeMap::new();
        let mut checked = false;
        for file in &missing {
            // Small files come first: an index that names absent shards is found before any shard.
            if file.is_weights() && !checked {
                self.check_shards(&names)?;
                checked = true;
            }
            let recorded = transfer.fetch(file, &mut state, progress)?;
            fetched.insert(file.path.to_string(), recorded);
        }
        progress.event(&ProgressEvent::Finishing);
        let asked = self.request.revision.clone().unwrap_or_else(Revision::main);
        let fresh = Record::new(
            self.id_text.clone(),
            self.client.endpoint().to_owned(),
            asked.to_string(),
            commit,
        );
        let record = self.install(stored, fresh, fetched)?;
        self.resolved(&record)
    }

    /// Which commit is meant, and its files.
    fn ask_hub(
        &self,
        stored: Option<&Record>,
        progress: &mut dyn Progress,
    ) -> Result<(String, Vec<ListedFile>), StoreError> {
        let id = &self.request.model.id;
        let asked = match (&self.request.revision, stored) {
            (Some(revision), _) => revision.to_string(),
            (None, Some(record)) => record.commit.clone(),
            (None, None) => Revision::main().to_string(),
        };
        let info = with_retries(self.retrier(), progress, || {
            self.request.cancel.check()?;
            revision_info(&self.client, id, &asked)
        })?;
        if let Some(record) = stored
            && record.commit != info.commit
        {
            return Err(StoreError::RevisionConflict {
                model: id.to_string(),
                stored: record.revision_text(),
                asked: format!(
                    "{asked} (commit {})",
                    info.commit.get(..12).unwrap_or_default()
                ),
            });
        }
        let files = with_retries(self.retrier(), progress, || {
            self.request.cancel.check()?;
            tree(&self.client, id, &info.commit)
        })?;
        let files = files.unwrap_or_else(|| {
            let unsized_file = |name| ListedFile {
                name,
                size: None,
                content: None,
            };
            info.names.into_iter().map(unsized_file).collect()
        });
        Ok((info.commit, files))
    }

    fn retrier(&self) -> Retrier<'_> {
        let clock = self.store.services().clock.as_ref();
        Retrier::new(clock, &self.request.cancel, &self.id_text)
    }

    /// Announces the work and refuses it if the disk cannot hold it.
    fn plan(
        &self,
        transfer: &Transfer<'_>,
        state: &PartialState,
        here: &[WantedFile],
        missing: &[WantedFile],
        progress: &mut dyn Progress,
    ) -> Result<(), StoreError> {
        let too_large = || StoreError::TooLarge {
            what: format!("the checkpoint of {}", self.request.model.id),
            limit: "any disk".to_owned(),
        };
        let all = || here.iter().chain(missing);
        let known_total = checked_sum(all().filter_map(|f| f.size)).ok_or_else(too_large)?;
        let stored_bytes = checked_sum(here.iter().filter_map(|f| f.size)).ok_or_else(too_large)?;
        let staged_bytes = checked_sum(missing.iter().map(|f| transfer.staged_bytes(f, state)))
            .ok_or_else(too_large)?;
        progress.event(&ProgressEvent::Planned {
            files: here.len() + missing.len(),
            total_bytes: all().all(|f| f.size.is_some()).then_some(known_total),
            present_bytes: stored_bytes.saturating_add(staged_bytes),
        });
        let left = known_total
            .saturating_sub(stored_bytes)
            .saturating_sub(staged_bytes);
        let need_bytes = left.checked_add(SPACE_MARGIN_BYTES).ok_or_else(too_large)?;
        let free_bytes = transfer
            .disk
            .free_bytes(&self.slot.staging)
            .map_err(StoreError::io("ask the free space of", &self.slot.staging))?;
        if need_bytes > free_bytes {
            return Err(StoreError::NotEnoughSpace {
                path: self.slot.staging.clone(),
                need_bytes,
                free_bytes,
            });
        }
        Ok(())
    }

    fn check_shards(&self, names: &[RepoPath]) -> Result<(), StoreError> {
        for dir in [&self.slot.staging, &self.slot.target] {
            let missing =
                missing_shard(dir, names).map_err(|damage| StoreError::HostileListing {
                    model: self.id_text.clone(),
                    reason: damage.to_string(),
                })?;
            if let Some((index, shard)) = missing {
                return Err(StoreError::IncompleteRepository {
                    model: self.id_text.clone(),
                    index: index.to_string(),
                    missing: shard.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Moves what is staged to its place.
    fn install(
        &self,
        stored: Option<Record>,
        fresh: Record,
        fetched: BTreeMap<String, RecordedFile>,
    ) -> Result<Record, StoreError> {
        let (staging, target) = (&self.slot.staging, &self.slot.target);
        let joins = stored.is_some();
        let mut record = stored.unwrap_or(fresh);
        let paths: Vec<RepoPath> = fetched
            .keys()
            .map(|name| RepoPath::parse(name))
            .collect::<Result<_, _>>()?;
        record.files.extend(fetched);
        record.completed = rfc3339(SystemTime::now());
        if joins {
            for path in &paths {
                move_file(&path.below(staging), &path.below(target))?;
            }
            sync_folders(target, &paths)?;
            record.write(target)?;
            fs::remove_dir_all(staging).map_err(StoreError::io("remove", staging))?;
            return Ok(record);
        }
        remove_strangers(staging, &paths)?;
        record.write(staging)?;
        sync_folders(staging, &paths)?;
        fs::rename(staging, target).map_err(StoreError::io("put into place", target))?;
        if let Some(parent) = target.parent() {
            sync_dir(parent)?;
        }
        // It goes last: were it gone before the rename and we were stopped between, every file would be
        // fetched again.
        remove_if_there(&target.join(STATE_FILE))?;
        Ok(record)
    }

    fn resolved(&self, record: &Record) -> Result<Resolved, StoreError> {
        resolved(self.request, self.slot, record)?.ok_or_else(|| StoreError::Damaged {
            model: self.id_text.clone(),
            path: self.slot.target.clone(),
            damage: Damage::NoWeights,
        })
    }
}

fn checked_sum(mut sizes: impl Iterator<Item = u64>) -> Option<u64> {
    sizes.try_fold(0_u64, u64::checked_add)
}

/// The model as it lies there, if that is all that is asked for.
fn already_there(request: &DownloadRequest, slot: &Slot) -> Result<Option<Resolved>, StoreError> {
    let Ok(Some(record)) = Record::read(&slot.target) else {
        return Ok(None);
    };
    if record.repo_id != request.model.id.to_string() || record.damage(&slot.target).is_some() {
        return Ok(None);
    }
    match &request.revision {
        Some(asked) if !record.satisfies(asked) => Ok(None),
        _ => resolved(request, slot, &record),
    }
}

fn resolved(
    request: &DownloadRequest,
    slot: &Slot,
    record: &Record,
) -> Result<Option<Resolved>, StoreError> {
    let files = record.paths().map_err(|damage| StoreError::Damaged {
        model: record.repo_id.clone(),
        path: slot.target.clone(),
        damage,
    })?;
    let source = match request.local_dir {
        Some(_) => ModelSource::Path,
        None => ModelSource::Store,
    };
    let id = Some(request.model.id.clone());
    Ok(
        choose_content(&slot.target, &files, request.model.gguf.as_ref())
            .ok()
            .map(|content| Resolved::new(slot.target.clone(), content, source, id)),
    )
}

/// The record of what is already at the target; a target that is not ours is refused.
fn stored_record(slot: &Slot, id: &str) -> Result<Option<Record>, StoreError> {
    let occupied = |reason: String| StoreError::TargetOccupied {
        path: slot.target.clone(),
        reason,
    };
    let mut entries = match fs::read_dir(&slot.target) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(occupied(format!("cannot be read as a folder ({error})"))),
    };
    match Record::read(&slot.target) {
        Ok(Some(record)) if record.repo_id == id => Ok(Some(record)),
        Ok(Some(record)) => Err(occupied(format!("holds {}", record.repo_id))),
        Ok(None) if entries.next().is_none() => Ok(None),
        Ok(None) => Err(occupied(
            "holds files that were not downloaded here".to_owned(),
        )),
        Err(damage) => Err(occupied(format!(
            "holds a record that is no use ({damage})"
        ))),
    }
}

/// Parts what the target already has from what has to be fetched.
fn split_present(
    wanted: Vec<WantedFile>,
    stored: Option<&Record>,
    target: &Path,
) -> (Vec<WantedFile>, Vec<WantedFile>) {
    wanted.into_iter().partition(|file| {
        let recorded = stored.and_then(|record| record.files.get(file.path.as_str()));
        recorded.is_some_and(|recorded| {
            let on_disk = fs::metadata(file.path.below(target))
                .map(|meta| meta.len())
                .ok();
            let same_content = file.content.is_none() || file.content == recorded.hub;
            on_disk == Some(recorded.size)
                && same_content
                && file.size.is_none_or(|size| size == recorded.size)
        })
    })
}

fn remove_if_there(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(StoreError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

fn move_file(from: &Path, to: &Path) -> Result<(), StoreError> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(StoreError::io("create", parent))?;
    }
    fs::rename(from, to).map_err(StoreError::io("put into place", to))
}

/// Deletes what an earlier attempt staged and this one does not want, such as the files of a commit before.
fn remove_strangers(staging: &Path, wanted: &[RepoPath]) -> Result<(), StoreError> {
    let mut open = vec![staging.to_path_buf()];
    while let Some(folder) = open.pop() {
        let entries = fs::read_dir(&folder).map_err(StoreError::io("read", &folder))?;
        for entry in entries {
            let entry = entry.map_err(StoreError::io("read", &folder))?;
            let path = entry.path();
            let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
            let needed = wanted.iter().map(|w| w.below(staging));
            let state = staging.join(STATE_FILE);
            if is_dir {
                if needed.into_iter().any(|n| n.starts_with(&path)) {
                    open.push(path);
                } else {
                    fs::remove_dir_all(&path).map_err(StoreError::io("remove", &path))?;
                }
            } else if path != state && !needed.into_iter().any(|n| n == path) {
                fs::remove_file(&path).map_err(StoreError::io("remove", &path))?;
            }
        }
    }
    Ok(())
}

fn sync_folders(dir: &Path, files: &[RepoPath]) -> Result<(), StoreError> {
    let mut folders: Vec<PathBuf> = files
        .iter()
        .filter_map(|file| file.below(dir).parent().map(Path::to_path_buf))
        .collect();
    folders.push(dir.to_path_buf());
    folders.sort();
    folders.dedup();
    folders.iter().try_for_each(|folder| sync_dir(folder))
}
