//! A hub with one repository, `o/n`, that can be told to misbehave.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::super::digest::FileHasher;
use super::server::{Answer, Request};

pub const COMMIT: &str = "c0ffee0000000000000000000000000000000001";
pub const OTHER_COMMIT: &str = "c0ffee0000000000000000000000000000000002";

/// How one answer about a file goes wrong.
#[derive(Debug, Clone)]
pub enum Fault {
    /// The connection ends after so many bytes.
    Cut(usize),
    /// A status, with headers.
    Status(u16, Vec<(&'static str, String)>),
    /// The right number of wrong bytes.
    Garbage,
    /// A range is asked and everything is sent.
    Whole,
    /// A range is asked and another one is sent.
    WrongRange,
    /// More bytes than listed, without a length.
    Endless,
    /// A shorter file than listed.
    Short,
}

#[derive(Debug, Clone)]
struct HubFile {
    bytes: Vec<u8>,
    large: bool,
    etag: String,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, HubFile>,
    faults: BTreeMap<String, VecDeque<Fault>>,
    revisions: BTreeMap<String, String>,
    /// Answers this instead of the tree.
    tree: Option<Answer>,
    /// Answers this instead of the revision.
    info: VecDeque<Answer>,
    /// Entries per page of the tree.
    page: Option<usize>,
    /// Where large files are redirected to.
    cdn: Option<String>,
}

/// Shared with the server's closure.
#[derive(Clone, Default)]
pub struct FakeHub(Arc<Mutex<State>>);

impl FakeHub {
    /// Revision `main` at [`COMMIT`] and no files.
    pub fn new() -> Self {
        let hub = Self::default();
        hub.revision("main", COMMIT);
        hub
    }

    /// A small safetensors repository with one large file of `bytes`.
    pub fn small(bytes: usize) -> Self {
        let hub = Self::new();
        hub.file("config.json", b"{\"model_type\":\"llama\"}", false);
        hub.file("model.safetensors", &pattern(bytes), true);
        hub
    }

    pub fn file(&self, name: &str, bytes: &[u8], large: bool) {
        let etag = format!("\"{}\"", sha256(bytes));
        let file = HubFile {
            bytes: bytes.to_vec(),
            large,
            etag,
        };
        self.lock().files.insert(name.to_owned(), file);
    }

    pub fn etag(&self, name: &str, etag: &str) {
        self.lock().files.get_mut(name).unwrap().etag = etag.to_owned();
    }

    pub fn revision(&self, name: &str, commit: &str) {
        let mut state = self.lock();
        state.revisions.insert(name.to_owned(), commit.to_owned());
        state.revisions.insert(commit.to_owned(), commit.to_owned());
    }

    pub fn faults(&self, name: &str, faults: impl IntoIterator<Item = Fault>) {
        self.lock()
            .faults
            .insert(name.to_owned(), faults.into_iter().collect());
    }

    pub fn tree_answer(&self, answer: Answer) {
        self.lock().tree = Some(answer);
    }

    pub fn info_answer(&self, answer: Answer) {
        self.lock().info.push_back(answer);
    }

    pub fn paged(&self, entries: usize) {
        self.lock().page = Some(entries);
    }

    pub fn cdn(&self, url: &str) {
        self.lock().cdn = Some(url.to_owned());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn answer(&self, request: &Request) -> Answer {
        let mut state = self.lock();
        if let Some(revision) = request.path.strip_prefix("/api/models/o/n/revision/") {
            return state
                .info
                .pop_front()
                .unwrap_or_else(|| state.info(revision));
        }
        if let Some(commit) = request.path.strip_prefix("/api/models/o/n/tree/") {
            assert!(
                request.query.contains("recursive=true"),
                "{}",
                request.query
            );
            return state
                .tree
                .clone()
                .unwrap_or_else(|| state.tree(commit, &request.query));
        }
        let resolve = format!("/o/n/resolve/{COMMIT}/");
        let other = format!("/o/n/resolve/{OTHER_COMMIT}/");
        if let Some(name) = request.path.strip_prefix("/cdn/") {
            return state.content(name, request);
        }
        let name = request
            .path
            .strip_prefix(&resolve)
            .or(request.path.strip_prefix(&other));
        let Some((name, file)) = name.and_then(|n| Some((n, state.files.get(n)?))) else {
            return not_found("RepoNotFound");
        };
        match state.cdn.as_ref().filter(|_| file.large) {
            None => state.content(name, request),
            Some(cdn) => Answer::new(302, "")
                .with("location", format!("{cdn}/cdn/{name}?signature=secret"))
                .with("x-linked-size", file.bytes.len().to_string())
                .with("x-linked-etag", format!("\"{}\"", sha256(&file.bytes))),
        }
    }
}

impl State {
    fn info(&self, revision: &str) -> Answer {
        let Some(commit) = self.revisions.get(revision) else {
            return not_found("RevisionNotFound");
        };
        let siblings: Vec<_> = self
            .files
            .keys()
            .map(|name| json!({"rfilename": name}))
            .collect();
        let body = json!({"id": "o/n", "sha": commit, "siblings": siblings, "private": false});
        Answer::new(200, body.to_string())
    }

    fn tree(&self, commit: &str, query: &str) -> Answer {
        assert!(self.revisions.contains_key(commit));
        let mut entries =
            vec![json!({"type": "directory", "path": "voices", "oid": "0", "size": 0})];
        for (name, file) in &self.files {
            let size = file.bytes.len();
            let entry = if file.large {
                let lfs = json!({"oid": sha256(&file.bytes), "size": size, "pointerSize": 135});
                json!({"type": "file", "path": name, "size": size, "oid": "1".repeat(40), "lfs": lfs})
            } else {
                json!({"type": "file", "path": name, "size": size, "oid": git_blob(&file.bytes)})
            };
            entries.push(entry);
        }
        let Some(page) = self.page else {
            return Answer::new(200, json!(entries).to_string());
        };
        let start: usize = query
            .split_once("cursor=")
            .map_or(0, |(_, cursor)| cursor.parse().unwrap());
        let end = (start + page).min(entries.len());
        let answer = Answer::new(200, json!(entries[start..end]).to_string());
        if end == entries.len() {
            return answer;
        }
        let next = format!("/api/models/o/n/tree/{commit}?recursive=true&cursor={end}");
        answer.with("link", format!("<{next}>; rel=\"next\""))
    }

    fn content(&mut self, name: &str, request: &Request) -> Answer {
        let file = self.files.get(name).unwrap().clone();
        let fault = self.faults.get_mut(name).and_then(VecDeque::pop_front);
        let start = range_start(request).filter(|_| {
            let same = request
                .header("if-range")
                .is_none_or(|tag| tag == file.etag);
            same && !matches!(fault, Some(Fault::Whole))
        });
        let total = file.bytes.len();
        let mut answer = match start {
            None => Answer::new(200, file.bytes),
            Some(start) if start >= total => return Answer::new(416, ""),
            Some(start) => {
                let told = if matches!(fault, Some(Fault::WrongRange)) {
                    start + 1
                } else {
                    start
                };
                Answer::new(206, &file.bytes[start..]).with(
                    "content-range",
                    format!("bytes {told}-{}/{total}", total - 1),
                )
            }
        };
        answer = answer.with("etag", file.etag);
        match fault {
            Some(Fault::Cut(bytes)) => answer.cut_after = Some(bytes),
            Some(Fault::Status(status, headers)) => {
                answer = Answer::new(status, "{\"error\":\"as told\"}");
                for (name, value) in headers {
                    answer = answer.with(name, value);
                }
            }
            Some(Fault::Garbage) => answer.body.iter_mut().for_each(|b| *b ^= 0xff),
            Some(Fault::Endless) => {
                // No length: the body ends with the connection.
                answer.body.extend_from_slice(b"more");
                answer = answer.with("transfer-encoding", "chunked");
                let chunk = format!("{:x}\r\n", answer.body.len()).into_bytes();
                answer.body = [chunk.as_slice(), &answer.body, b"\r\n0\r\n\r\n"].concat();
            }
            Some(Fault::Short) => answer.body.truncate(total / 2),
            Some(Fault::Whole | Fault::WrongRange) | None => {}
        }
        answer
    }
}

/// Bytes that differ from place to place.
pub fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    let mut hasher = FileHasher::new(bytes.len() as u64, None);
    hasher.update(bytes);
    hasher.finish().sha256
}

fn git_blob(bytes: &[u8]) -> String {
    use sha1::{Digest, Sha1};
    let mut hasher = Sha1::new();
    hasher.update(format!("blob {}\0", bytes.len()));
    hasher.update(bytes);
    hasher
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

fn range_start(request: &Request) -> Option<usize> {
    let text = request.header("range")?.strip_prefix("bytes=")?;
    text.strip_suffix('-')?.parse().ok()
}

pub fn not_found(code: &str) -> Answer {
    Answer::new(404, "{\"error\":\"not found\"}").with("x-error-code", code)
}
