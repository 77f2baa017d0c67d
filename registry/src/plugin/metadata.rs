//! The JSON records embedded in a plugin file.
//!
//! Owns their types and rules. Unknown keys and unknown records are let through, because a newer plugin
//! may say more; a known key of the wrong type is refused. Must not know of files or object formats.

use std::collections::BTreeMap;
use std::fmt;

use mlxcel_abi::metadata::FORMAT;
use mlxcel_abi::version::PluginVersion;
use semver::Version;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Largest metadata section that is read.
pub const METADATA_CAP_BYTES: usize = 1 << 20;

/// Most architectures one plugin may offer.
const ARCH_CAP: usize = 1024;

/// Longest name, id or version, in bytes.
const NAME_CAP_BYTES: usize = 64;

/// What a plugin is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PluginKind {
    /// Model architectures.
    Family,
    /// A device.
    Backend,
}

impl PluginKind {
    /// The kind's name in metadata and file names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Family => "family",
            Self::Backend => "backend",
        }
    }

    /// The kind called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "family" => Some(Self::Family),
            "backend" => Some(Self::Backend),
            _ => None,
        }
    }

    /// The kind's code in the handshake, one of [`mlxcel_abi::kinds::plugin`].
    pub const fn code(self) -> u32 {
        match self {
            Self::Family => mlxcel_abi::kinds::plugin::FAMILY,
            Self::Backend => mlxcel_abi::kinds::plugin::BACKEND,
        }
    }
}

impl fmt::Display for PluginKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The `{"plugin": {..}}` record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PluginInfo {
    /// Version of the record format.
    pub format: u32,
    /// ABI major and minor it was built at.
    pub abi: [u32; 2],
    /// Oldest host minor it works with.
    pub needs_minor: u32,
    /// `family` or `backend`; kept as text because a newer plugin may be of a kind unknown here.
    pub kind: String,
    /// Name, unique among the plugins of its kind.
    pub name: String,
    /// Version of the plugin itself. Says nothing of compatibility.
    pub version: Version,
    /// Who made it.
    #[serde(default)]
    pub vendor: String,
    /// Processor it was built for.
    pub arch: String,
    /// Operating system it was built for.
    pub os: String,
    /// `unwind`, or the plugin is refused.
    pub panic: String,
    /// Operations without which it cannot work.
    #[serde(default)]
    pub requires_ops: Vec<String>,
    /// Extension tables without which it cannot work.
    #[serde(default)]
    pub requires_ext: Vec<String>,
    /// Everything else it says, for instance `mlx_version`.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl PluginInfo {
    /// The versions that are negotiated.
    pub fn abi_version(&self) -> PluginVersion {
        PluginVersion {
            major: self.abi[0],
            built_minor: self.abi[1],
            needs_minor: self.needs_minor,
        }
    }

    /// The kind, when this host knows it.
    pub fn known_kind(&self) -> Option<PluginKind> {
        PluginKind::from_name(&self.kind)
    }
}

/// One `{"arch": {..}}` record: an architecture that a family plugin offers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ArchRecord {
    /// Unique snake_case name.
    pub id: String,
    /// Name for people.
    #[serde(default)]
    pub display_name: String,
    /// dense, moe, vlm, hybrid_ssm, embedding and so on.
    #[serde(default)]
    pub category: String,
    /// Keys as found in `config.json`.
    pub model_types: Vec<String>,
    /// Values of GGUF's `general.architecture`.
    #[serde(default)]
    pub gguf: Vec<String>,
    /// Marketing names that share the code.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// generate, serve, embed, rerank, asr, tts, detect.
    #[serde(default)]
    pub runtimes: Vec<String>,
    /// text, image, video, audio.
    #[serde(default)]
    pub modalities_in: Vec<String>,
    /// tokens, embeddings, scores, audio or boxes.
    #[serde(default)]
    pub output: String,
    /// Support level by backend name.
    #[serde(default)]
    pub backends: BTreeMap<String, String>,
    /// Whether it can be split over devices by tensor.
    #[serde(default)]
    pub tensor_parallel: bool,
    /// Whether it can be split over devices by layer.
    #[serde(default)]
    pub pipeline_parallel: bool,
    /// Draft models it can use.
    #[serde(default)]
    pub drafters: Vec<String>,
    /// Forms of the key-value cache it works with.
    #[serde(default)]
    pub kv_modes: Vec<String>,
    /// What it is used for; with `id` the key under which two plugins can clash.
    #[serde(default = "default_task")]
    pub task: String,
    /// Keys that this host does not know; passed on to `arch --json`.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

fn default_task() -> String {
    "text-generation".to_owned()
}

/// Everything a plugin's file says of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metadata {
    /// The plugin.
    pub plugin: PluginInfo,
    /// Its architectures in order of their ids; empty for a backend.
    pub archs: Vec<ArchRecord>,
}

/// Why metadata could not be understood.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The section is too large.
    #[error("metadata has {found} bytes, the limit is {limit}")]
    TooLarge {
        /// Bytes found.
        found: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The bytes are not text.
    #[error("metadata is not UTF-8")]
    NotUtf8,
    /// A line is not a record.
    #[error("metadata record {record}: {}", without_line(source))]
    Json {
        /// Number of the record, from 1.
        record: usize,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// The number of plugin records is not one.
    #[error("metadata has {found} plugin records, expected 1")]
    PluginRecords {
        /// Records found.
        found: usize,
    },
    /// The record format is newer than this host.
    #[error(
        "metadata format {found} is newer than {known}, the newest this host reads: update mlxcel"
    )]
    NewerFormat {
        /// Format found.
        found: u32,
        /// Newest known.
        known: u32,
    },
    /// Too many architectures.
    #[error("metadata has {found} architectures, the limit is {limit}")]
    TooManyArchs {
        /// Records found.
        found: usize,
        /// Records allowed.
        limit: usize,
    },
    /// A name cannot be used as one.
    #[error("metadata key {key} is {value:?}: {rule}")]
    BadText {
        /// The key.
        key: &'static str,
        /// What it holds.
        value: String,
        /// The rule it breaks.
        rule: &'static str,
    },
    /// One architecture is there twice.
    #[error("metadata has architecture {id} twice")]
    DuplicateArch {
        /// The architecture.
        id: String,
    },
}

#[derive(Deserialize)]
struct Line {
    plugin: Option<PluginInfo>,
    arch: Option<ArchRecord>,
}

/// The parser counts lines within one record, which is always one line.
fn without_line(error: &serde_json::Error) -> String {
    error
        .to_string()
        .replace(" at line 1 column ", " at column ")
}

/// Reads the bytes of the metadata section: JSON records, one a line. Zero bytes between them (padding
/// of the linker) are skipped.
pub fn parse_metadata(bytes: &[u8]) -> Result<Metadata, MetadataError> {
    if bytes.len() > METADATA_CAP_BYTES {
        return Err(MetadataError::TooLarge {
            found: bytes.len(),
            limit: METADATA_CAP_BYTES,
        });
    }
    let text = std::str::from_utf8(bytes).map_err(|_| MetadataError::NotUtf8)?;
    let mut plugins = Vec::new();
    let mut archs = Vec::new();
    let mut records = 0;
    for line in text.split('\n') {
        let line = line.trim_matches(|c: char| c == '\0' || c.is_ascii_whitespace());
        if line.is_empty() {
            continue;
        }
        records += 1;
        let line: Line = serde_json::from_str(line).map_err(|source| MetadataError::Json {
            record: records,
            source,
        })?;
        plugins.extend(line.plugin);
        archs.extend(line.arch);
    }
    let found = plugins.len();
    let plugin = match plugins.pop() {
        Some(plugin) if found == 1 => plugin,
        _ => return Err(MetadataError::PluginRecords { found }),
    };
    check_plugin(&plugin)?;
    check_archs(&mut archs)?;
    Ok(Metadata { plugin, archs })
}

fn check_plugin(plugin: &PluginInfo) -> Result<(), MetadataError> {
    if plugin.format > FORMAT {
        return Err(MetadataError::NewerFormat {
            found: plugin.format,
            known: FORMAT,
        });
    }
    check_name("name", &plugin.name)?;
    check_name("kind", &plugin.kind)?;
    for (key, text) in [
        ("vendor", &plugin.vendor),
        ("arch", &plugin.arch),
        ("os", &plugin.os),
        ("panic", &plugin.panic),
    ] {
        check_text(key, text)?;
    }
    plugin
        .requires_ops
        .iter()
        .chain(&plugin.requires_ext)
        .try_for_each(|text| check_text("requires", text))
}

fn check_archs(archs: &mut [ArchRecord]) -> Result<(), MetadataError> {
    if archs.len() > ARCH_CAP {
        return Err(MetadataError::TooManyArchs {
            found: archs.len(),
            limit: ARCH_CAP,
        });
    }
    for arch in archs.iter_mut() {
        check_name("id", &arch.id)?;
        if arch.display_name.is_empty() {
            arch.display_name.clone_from(&arch.id);
        }
        for (key, text) in [
            ("display_name", &arch.display_name),
            ("category", &arch.category),
            ("output", &arch.output),
            ("task", &arch.task),
        ] {
            check_text(key, text)?;
        }
        for (key, list) in [
            ("model_types", &arch.model_types),
            ("gguf", &arch.gguf),
            ("aliases", &arch.aliases),
            ("runtimes", &arch.runtimes),
            ("modalities_in", &arch.modalities_in),
            ("drafters", &arch.drafters),
            ("kv_modes", &arch.kv_modes),
        ] {
            list.iter().try_for_each(|text| check_text(key, text))?;
        }
    }
    archs.sort_by(|a, b| (&a.id, &a.task).cmp(&(&b.id, &b.task)));
    match archs.windows(2).find(|pair| match pair {
        [a, b] => a.id == b.id && a.task == b.task,
        _ => false,
    }) {
        Some([twice, ..]) => Err(MetadataError::DuplicateArch {
            id: twice.id.clone(),
        }),
        _ => Ok(()),
    }
}

/// Names are used in file names, options and messages.
fn check_name(key: &'static str, name: &str) -> Result<(), MetadataError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    let starts = name
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphanumeric());
    if starts && name.len() <= NAME_CAP_BYTES && name.bytes().all(plain) {
        return Ok(());
    }
    Err(MetadataError::BadText {
        key,
        value: shortened(name),
        rule: "expected 1 to 64 of a-z, A-Z, 0-9, _, - and ., starting with a letter or digit",
    })
}

/// Texts are shown on terminals: no escape sequences.
fn check_text(key: &'static str, text: &str) -> Result<(), MetadataError> {
    if text.len() <= 4 * NAME_CAP_BYTES && !text.chars().any(char::is_control) {
        return Ok(());
    }
    Err(MetadataError::BadText {
        key,
        value: shortened(text),
        rule: "expected at most 256 bytes without control characters",
    })
}

fn shortened(text: &str) -> String {
    text.chars().take(NAME_CAP_BYTES).collect()
}
