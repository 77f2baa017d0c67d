//! The two questions asked of a hub, which commit a revision is and which files it has, and the meaning of
//! the statuses it answers with.
//!
//! Everything a server says is untrusted: answers are capped in size and number, names stay text until
//! `select` has judged them.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::digest::{ContentId, hex_digits};
use super::error::StoreError;
use super::http::{Client, Reply};
use super::name::RepoId;
use super::repo_path::RepoPath;
use super::url::{encode_path, encode_segment, join};

/// Caps of one listing: bytes of one answer, answers, files.
const MAX_ANSWER_BYTES: u64 = 32 << 20;
const MAX_PAGES: usize = 200;
const MAX_LISTED_FILES: usize = 100_000;
/// How much of an error answer is read, and how much of its text is repeated.
const MAX_ERROR_BYTES: u64 = 64 << 10;
const MAX_DETAIL_CHARS: usize = 200;

/// What a hub knows of a revision.
#[derive(Debug)]
pub(super) struct RevisionInfo {
    /// The commit.
    pub commit: String,
    /// Names of all files, as listed.
    pub names: Vec<String>,
}

/// One file as listed. The name is not checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ListedFile {
    /// Name as the server wrote it.
    pub name: String,
    /// Size, if told.
    pub size: Option<u64>,
    /// Digest, if told.
    pub content: Option<ContentId>,
}

/// What a request was about, which decides what its status means.
#[derive(Debug, Clone, Copy)]
pub(super) enum Asked<'a> {
    /// A revision of a repository.
    Revision(&'a str),
    /// The files of a commit that exists.
    Tree,
    /// One of them.
    File(&'a RepoPath),
}

#[derive(Deserialize)]
struct RevisionAnswer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    oid: Option<String>,
    #[serde(default)]
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    oid: String,
    #[serde(default)]
    size: Option<u64>,
}

/// Asks `GET /api/models/{repo}/revision/{revision}`.
pub(super) fn revision_info(
    client: &Client,
    id: &RepoId,
    revision: &str,
) -> Result<RevisionInfo, StoreError> {
    let url = format!(
        "{}/api/models/{id}/revision/{}",
        client.endpoint(),
        encode_segment(revision)
    );
    let reply = client.get(&url, &[])?;
    if reply.status != 200 {
        return Err(status_error(client, id, Asked::Revision(revision), reply));
    }
    let answer: RevisionAnswer = parse(reply)?;
    let commit = hex_digits(&answer.sha, 40)
        .or_else(|| hex_digits(&answer.sha, 64))
        .ok_or_else(|| malformed(&url, "its `sha` is no commit id of 40 or 64 hex digits"))?;
    check_count(id, answer.siblings.len())?;
    Ok(RevisionInfo {
        commit,
        names: answer.siblings.into_iter().map(|s| s.rfilename).collect(),
    })
}

/// Asks `GET /api/models/{repo}/tree/{commit}?recursive=true`, page by page; `None` if the endpoint does
/// not have that interface, as some mirrors do not.
pub(super) fn tree(
    client: &Client,
    id: &RepoId,
    commit: &str,
) -> Result<Option<Vec<ListedFile>>, StoreError> {
    let mut url = format!(
        "{}/api/models/{id}/tree/{commit}?recursive=true",
        client.endpoint()
    );
    let mut files = Vec::new();
    for page in 0..MAX_PAGES {
        let reply = client.get(&url, &[])?;
        match reply.status {
            200 => {}
            404 | 405 | 501 if page == 0 => return Ok(None),
            _ => return Err(status_error(client, id, Asked::Tree, reply)),
        }
        let next = next_page(&reply, &url)?;
        let entries: Vec<TreeEntry> = parse(reply)?;
        for entry in entries.into_iter().filter(|e| e.kind == "file") {
            files.push(listed(entry, &url)?);
        }
        check_count(id, files.len())?;
        match next {
            Some(next) => url = next,
            None => return Ok(Some(files)),
        }
    }
    Err(StoreError::TooLarge {
        what: format!("the listing of {id}"),
        limit: format!("{MAX_PAGES} pages"),
    })
}

/// Where a file's content is.
pub(super) fn file_url(client: &Client, id: &RepoId, commit: &str, file: &RepoPath) -> String {
    format!(
        "{}/{id}/resolve/{commit}/{}",
        client.endpoint(),
        encode_path(file.as_str())
    )
}

/// The error that a status other than success means.
pub(super) fn status_error(
    client: &Client,
    id: &RepoId,
    asked: Asked<'_>,
    reply: Reply,
) -> StoreError {
    let model = id.to_string();
    let status = reply.status;
    let url = reply.url.clone();
    let host = reply.host();
    let retry_after_s = reply
        .header("retry-after")
        .and_then(|t| t.trim().parse().ok());
    let code = reply
        .hub_header("x-error-code")
        .unwrap_or_default()
        .to_owned();
    let detail = error_detail(reply);
    match (status, code.as_str(), asked) {
        (401, ..) | (403, "GatedRepo", _) => StoreError::Unauthorized {
            model,
            detail,
            with_token: client.has_token(),
        },
        (403, ..) => StoreError::Forbidden { model, detail },
        (404, "RevisionNotFound", Asked::Revision(revision)) => StoreError::RevisionNotFound {
            model,
            revision: revision.to_owned(),
        },
        (404, _, Asked::File(file)) => StoreError::FileNotFound {
            model,
            file: file.to_string(),
        },
        (404, _, Asked::Revision(revision)) if code.is_empty() && revision != "main" => {
            StoreError::RevisionNotFound {
                model,
                revision: revision.to_owned(),
            }
        }
        (404, ..) => StoreError::RepoNotFound {
            model,
            endpoint: client.endpoint().to_owned(),
        },
        (429, ..) => StoreError::RateLimited {
            host,
            retry_after_s,
        },
        (500..=599, ..) => StoreError::Server { url, status },
        _ => StoreError::UnexpectedStatus {
            url,
            status,
            detail,
        },
    }
}

fn listed(entry: TreeEntry, url: &str) -> Result<ListedFile, StoreError> {
    let (size, content) = match entry.lfs {
        None => (
            entry.size,
            entry.oid.as_deref().and_then(ContentId::git_blob),
        ),
        Some(large) => {
            let hex = large.oid.strip_prefix("sha256:").unwrap_or(&large.oid);
            let content = ContentId::sha256(hex)
                .ok_or_else(|| malformed(url, "a large file has an `oid` that is no SHA-256"))?;
            (large.size.or(entry.size), Some(content))
        }
    };
    Ok(ListedFile {
        name: entry.path,
        size,
        content,
    })
}

fn parse<T: DeserializeOwned>(reply: Reply) -> Result<T, StoreError> {
    let url = reply.url.clone();
    let bytes = reply.read(MAX_ANSWER_BYTES)?;
    serde_json::from_slice(&bytes).map_err(|e| malformed(&url, &e.to_string()))
}

/// The `rel="next"` target of the `Link` header.
fn next_page(reply: &Reply, url: &str) -> Result<Option<String>, StoreError> {
    let Some(links) = reply.header("link") else {
        return Ok(None);
    };
    links
        .split(',')
        .find(|link| link.contains("rel=\"next\""))
        .and_then(|link| link.split_once('<')?.1.split_once('>'))
        .map(|(target, _)| join(url, target).map_err(|reason| malformed(url, &reason)))
        .transpose()
}

fn check_count(id: &RepoId, count: usize) -> Result<(), StoreError> {
    if count <= MAX_LISTED_FILES {
        return Ok(());
    }
    Err(StoreError::TooLarge {
        what: format!("the listing of {id}"),
        limit: format!("{MAX_LISTED_FILES} files"),
    })
}

/// The server's own words, made safe to show.
fn error_detail(reply: Reply) -> String {
    #[derive(Deserialize)]
    struct ErrorAnswer {
        error: String,
    }
    let status = reply.status;
    let header = reply.hub_header("x-error-message").map(str::to_owned);
    let text = header.or_else(|| {
        let bytes = reply.read(MAX_ERROR_BYTES).ok()?;
        let answer: ErrorAnswer = serde_json::from_slice(&bytes).ok()?;
        Some(answer.error)
    });
    let text = text.unwrap_or_default();
    let clean: String = text
        .chars()
        .filter(|c| !c.is_control())
        .take(MAX_DETAIL_CHARS)
        .collect();
    if clean.is_empty() {
        format!("status {status}")
    } else {
        clean
    }
}

fn malformed(url: &str, reason: &str) -> StoreError {
    StoreError::MalformedReply {
        url: super::url::without_query(url),
        reason: reason.to_owned(),
    }
}
