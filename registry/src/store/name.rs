//! Names of models: what a user, a request or a listing may call a model, a revision or a file.
//!
//! Owns validation: everything that later becomes a path or part of a URL is one of the types here, so no
//! other module has to think about traversal. Knows nothing of what is on disk except for
//! [`ModelRef::parse`], which asks whether a path exists.
//!
//! Forms of a model name:
//!
//! | text | meaning |
//! |---|---|
//! | a path that exists, or text starting with `/`, `./`, `../` or `~/`, or a short `*.gguf` | that path |
//! | `owner/name` | a repository |
//! | `name` | `<default organisation>/name` |
//! | `owner/name:Q4_K_M` | the GGUF file of that quantisation in the repository |
//! | `owner/name/folder/file.gguf` | exactly that GGUF file in the repository |

use std::fmt;
use std::path::{Path, PathBuf};

use super::env::StoreEnv;
use super::repo_path::{RepoPath, is_gguf};

/// Longest text that is considered as a model name.
const MAX_TEXT_BYTES: usize = 1024;
/// Longest owner, name or quantisation label; the hub's own limit for a repository name.
const MAX_SEGMENT_BYTES: usize = 96;
/// Longest revision.
const MAX_REVISION_BYTES: usize = 255;

/// A name that is refused before anything is read or asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// Nothing was given.
    #[error("the model name is empty: expected a path, `owner/name` or `name`")]
    Empty,
    /// A path in the home folder, and nobody says where that is.
    #[error("{text:?} is in the home folder and HOME is not set: give the whole path")]
    NoHome {
        /// The path.
        text: String,
    },
    /// The text is longer than any name.
    #[error("the model name has {found_bytes} bytes: at most {limit_bytes} are accepted")]
    TooLong {
        /// Length of the text.
        found_bytes: usize,
        /// Longest accepted text.
        limit_bytes: usize,
    },
    /// Owner or name breaks a rule.
    #[error("model name {name:?} is not valid: {segment:?} {reason}")]
    BadSegment {
        /// The whole text.
        name: String,
        /// The offending part.
        segment: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// Too many slashes for a repository, and it does not end in a GGUF file.
    #[error(
        "model name {name:?} has {parts} parts: expected `owner/name`, `name`, or `owner/name/file.gguf`"
    )]
    WrongParts {
        /// The whole text.
        name: String,
        /// Parts between slashes.
        parts: usize,
    },
    /// A short `*.gguf` where only repositories are meant.
    #[error(
        "{name:?} looks like a file: a GGUF file of a repository is written `owner/name/file.gguf`"
    )]
    LooksLikeFile {
        /// The whole text.
        name: String,
    },
    /// The part after the colon breaks a rule.
    #[error("quantisation {label:?} in {name:?} is not valid: it {reason}")]
    BadLabel {
        /// The whole text.
        name: String,
        /// The offending part.
        label: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// A revision breaks a rule.
    #[error("revision {revision:?} is not valid: it {reason}")]
    BadRevision {
        /// The text.
        revision: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// A file name inside a repository breaks a rule.
    #[error("file name {path:?} is not valid: it {reason}")]
    BadPath {
        /// The text.
        path: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
}

/// `owner/name`: a repository on a hub and a folder in the store.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepoId {
    owner: String,
    name: String,
}

impl RepoId {
    /// Parses `owner/name`, with both halves.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        check_text(text)?;
        match text.split_once('/') {
            Some((owner, name)) if !name.contains('/') => Self::checked(text, owner, name),
            _ => Err(NameError::WrongParts {
                name: text.to_owned(),
                parts: text.split('/').count(),
            }),
        }
    }

    fn checked(text: &str, owner: &str, name: &str) -> Result<Self, NameError> {
        for segment in [owner, name] {
            check_segment(segment).map_err(|reason| NameError::BadSegment {
                name: text.to_owned(),
                segment: segment.to_owned(),
                reason,
            })?;
        }
        Ok(Self {
            owner: owner.to_owned(),
            name: name.to_owned(),
        })
    }

    /// The half before the slash.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The half after the slash.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// Which GGUF file of a repository is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GgufSelector {
    /// By quantisation, as in `owner/name:Q4_K_M`; upper and lower case are equal.
    Label(String),
    /// By file, as in `owner/name/file.gguf`.
    File(RepoPath),
}

impl fmt::Display for GgufSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Label(label) => f.write_str(label),
            Self::File(path) => f.write_str(path.as_str()),
        }
    }
}

/// A model of a repository: the repository, and for GGUF optionally which file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRef {
    /// The repository.
    pub id: RepoId,
    /// The chosen GGUF file; without it the repository has to offer only one choice.
    pub gguf: Option<GgufSelector>,
}

impl HubRef {
    /// Parses a repository name and never a path. This is the form for names that come from requests.
    pub fn parse(text: &str, default_org: &str) -> Result<Self, NameError> {
        check_text(text)?;
        let (place, label) = match text.split_once(':') {
            None => (text, None),
            Some((place, label)) => (place, Some(label)),
        };
        let parts: Vec<&str> = place.split('/').collect();
        let (owner, name, file) = match parts.as_slice() {
            [name] => (default_org, *name, None),
            [owner, name] => (*owner, *name, None),
            [owner, name, file @ ..] if is_gguf(place) => (*owner, *name, Some(file.join("/"))),
            _ => {
                return Err(NameError::WrongParts {
                    name: text.to_owned(),
                    parts: parts.len(),
                });
            }
        };
        if file.is_none() && is_gguf(place) {
            return Err(NameError::LooksLikeFile {
                name: text.to_owned(),
            });
        }
        let id = RepoId::checked(text, owner, name)?;
        let gguf = match (file, label) {
            (None, None) => None,
            (None, Some(label)) => Some(GgufSelector::Label(check_label(text, label)?)),
            (Some(file), None) => Some(GgufSelector::File(RepoPath::parse(&file)?)),
            (Some(_), Some(label)) => {
                return Err(NameError::BadLabel {
                    name: text.to_owned(),
                    label: label.to_owned(),
                    reason: "cannot be combined with a file name",
                });
            }
        };
        Ok(Self { id, gguf })
    }
}

impl fmt::Display for HubRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gguf {
            None => self.id.fmt(f),
            Some(GgufSelector::Label(label)) => write!(f, "{}:{label}", self.id),
            Some(GgufSelector::File(path)) => write!(f, "{}/{}", self.id, path.as_str()),
        }
    }
}

/// What a user means by a model: a place on this machine or a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelRef {
    /// A local directory or GGUF file.
    Path(PathBuf),
    /// A repository, to be looked for in the store and the Hugging Face cache.
    Hub(HubRef),
}

impl ModelRef {
    /// Reads what a user typed. Text that names an existing path is that path; for names that come from
    /// elsewhere than the user, use [`HubRef::parse`].
    pub fn parse(text: &str, env: &StoreEnv) -> Result<Self, NameError> {
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if text.contains('\0') {
            return check_text(text).map(|()| Self::Path(PathBuf::from(text)));
        }
        if let Some(rest) = text.strip_prefix("~/") {
            return match &env.home {
                Some(home) => Ok(Self::Path(home.join(rest))),
                None => Err(NameError::NoHome {
                    text: text.to_owned(),
                }),
            };
        }
        let explicit = ["/", "./", "../"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
            || matches!(text, "." | "..");
        let short_file = is_gguf(text) && text.split('/').count() <= 2;
        if explicit || short_file || Path::new(text).exists() {
            return Ok(Self::Path(PathBuf::from(text)));
        }
        HubRef::parse(text, &env.default_org).map(Self::Hub)
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Hub(hub) => hub.fmt(f),
        }
    }
}

/// A branch, a tag, a reference such as `refs/pr/3`, or a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revision(String);

impl Revision {
    /// Validates the text of a revision.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let reason = if text.is_empty() {
            Some("is empty")
        } else if text.len() > MAX_REVISION_BYTES {
            Some("is longer than 255 bytes")
        } else if !text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_./+@=".contains(&b))
        {
            Some("may hold only ASCII letters, digits and -_./+@=")
        } else if text
            .split('/')
            .any(|s| s.is_empty() || s.starts_with('.') || s.contains(".."))
        {
            Some("may not hold an empty part, a part that starts with a dot, or two dots in a row")
        } else {
            None
        };
        match reason {
            None => Ok(Self(text.to_owned())),
            Some(reason) => Err(NameError::BadRevision {
                revision: text.to_owned(),
                reason,
            }),
        }
    }

    /// The branch that is used when none is asked for.
    pub fn main() -> Self {
        Self("main".to_owned())
    }

    /// The text of the revision.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The rule for an owner and for a name, after the hub's own: letters, digits, `-`, `_` and `.`, where the
/// ends are neither dash nor dot and neither is doubled (`--` separates owner and name in its cache).
pub(super) fn check_segment(segment: &str) -> Result<(), &'static str> {
    if segment.is_empty() {
        return Err("is an empty part");
    }
    if segment.len() > MAX_SEGMENT_BYTES {
        return Err("is longer than 96 bytes");
    }
    if !segment
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    {
        return Err("may hold only ASCII letters, digits, dash, underscore and dot");
    }
    if segment.starts_with(['-', '.']) || segment.ends_with(['-', '.']) {
        return Err("may not start or end with a dash or a dot");
    }
    if segment.contains("--") || segment.contains("..") {
        return Err("may not hold two dashes or two dots in a row");
    }
    Ok(())
}

fn check_text(text: &str) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    if text.len() > MAX_TEXT_BYTES {
        return Err(NameError::TooLong {
            found_bytes: text.len(),
            limit_bytes: MAX_TEXT_BYTES,
        });
    }
    if text.chars().any(char::is_control) {
        return Err(NameError::BadSegment {
            name: text.to_owned(),
            segment: text.chars().filter(|c| c.is_control()).take(8).collect(),
            reason: "is a control character",
        });
    }
    Ok(())
}

fn check_label(text: &str, label: &str) -> Result<String, NameError> {
    let reason = if label.is_empty() {
        "is empty"
    } else if label.len() > MAX_SEGMENT_BYTES {
        "is longer than 96 bytes"
    } else if !label
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    {
        "may hold only ASCII letters, digits, dash, underscore and dot"
    } else {
        return Ok(label.to_owned());
    };
    Err(NameError::BadLabel {
        name: text.to_owned(),
        label: label.to_owned(),
        reason,
    })
}
