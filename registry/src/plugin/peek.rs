//! Judges a plugin file by what is written in it. No code of the file runs.

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::Path;

use mlxcel_abi::metadata::{TARGET_ARCH, TARGET_OS};
use mlxcel_abi::version::{ABI_MAJOR, ABI_MINOR, OLDEST_PLUGIN_MINOR, negotiate};

use super::metadata::{Metadata, PluginInfo, parse_metadata};
use super::object_file::{ObjectFacts, read_object};
use super::reason::{ReasonCode, Rejection};

/// What a plugin has to fit to.
#[derive(Debug, Clone, Copy)]
pub struct HostProfile {
    /// Processor.
    pub arch: &'static str,
    /// Operating system.
    pub os: &'static str,
    /// Minor of the host's ABI.
    pub abi_minor: u32,
    /// Oldest plugin minor the host loads.
    pub oldest_plugin_minor: u32,
}

impl HostProfile {
    /// This build.
    pub const CURRENT: Self = Self {
        arch: TARGET_ARCH,
        os: TARGET_OS,
        abi_minor: ABI_MINOR,
        oldest_plugin_minor: OLDEST_PLUGIN_MINOR,
    };
}

/// What the file told.
#[derive(Debug, Clone, Default)]
pub struct Peek {
    /// Its metadata, also for a rejected file as far as it could be read.
    pub metadata: Option<Metadata>,
    /// Why it cannot be used, if it cannot.
    pub rejection: Option<Rejection>,
}

impl Peek {
    fn rejected(rejection: Rejection) -> Self {
        Self {
            metadata: None,
            rejection: Some(rejection),
        }
    }
}

/// Looks into the file at `path`.
pub fn peek(path: &Path, host: HostProfile) -> Peek {
    let refuse = |code, text: String| Peek::rejected(Rejection::peek(code, text));
    let attributes = match fs::metadata(path) {
        Ok(attributes) => attributes,
        Err(error) => return refuse(ReasonCode::Unreadable, format!("cannot be read: {error}")),
    };
    // Before opening: that would wait for ever on a pipe.
    if attributes.is_dir() {
        return refuse(
            ReasonCode::NotAFile,
            "a folder, expected a plugin file: for a folder of plugins use --plugins-dir"
                .to_owned(),
        );
    }
    if !attributes.is_file() {
        return refuse(
            ReasonCode::NotAFile,
            "not a plain file, expected a plugin file".to_owned(),
        );
    }
    match File::open(path) {
        Ok(file) => peek_reader(file, attributes.len(), host),
        Err(error) => refuse(ReasonCode::Unreadable, format!("cannot be read: {error}")),
    }
}

/// Looks into a file of `len` bytes.
pub fn peek_reader<R: Read + Seek>(reader: R, len: u64, host: HostProfile) -> Peek {
    if len == 0 {
        return Peek::rejected(Rejection::peek(
            ReasonCode::Empty,
            "the file is empty: copy or build the plugin again",
        ));
    }
    let mut facts = read_object(reader, len);
    let (metadata, bad_metadata) = match facts.section.take().map(|bytes| parse_metadata(&bytes)) {
        Some(Ok(metadata)) => (Some(metadata), None),
        Some(Err(error)) => (None, Some(error.to_string())),
        None => (None, None),
    };
    let rejection = platform_reason(&facts, host)
        .or(facts.damage)
        .or_else(|| bad_metadata.map(|text| Rejection::peek(ReasonCode::BadMetadata, text)))
        .or_else(|| match &metadata {
            None => Some(Rejection::peek(
                ReasonCode::NotAPlugin,
                "a shared library without mlxcel plugin metadata: remove it from the plugin folder",
            )),
            Some(metadata) => plugin_reason(&metadata.plugin, host),
        });
    Peek {
        metadata,
        rejection,
    }
}

/// The platform comes first: what else is wrong with a file for another machine does not matter.
fn platform_reason(facts: &ObjectFacts, host: HostProfile) -> Option<Rejection> {
    if let Some(os) = facts.os.filter(|&os| os != host.os) {
        let text = format!(
            "built for {os}, this host runs on {}: get the plugin for it",
            host.os
        );
        return Some(Rejection::peek(ReasonCode::WrongOs, text));
    }
    wrong_arch(facts.arch.as_deref()?, host)
}

fn wrong_arch(arch: &str, host: HostProfile) -> Option<Rejection> {
    (arch != host.arch).then(|| {
        let text = format!(
            "built for {arch}, this host runs on {}: get the plugin for it",
            host.arch
        );
        Rejection::peek(ReasonCode::WrongArch, text)
    })
}

fn plugin_reason(plugin: &PluginInfo, host: HostProfile) -> Option<Rejection> {
    let version = plugin.abi_version();
    if let Err(mismatch) = negotiate(version, host.abi_minor, host.oldest_plugin_minor) {
        return Some(Rejection::peek(
            ReasonCode::AbiMismatch,
            mismatch.to_string(),
        ));
    }
    if plugin.known_kind().is_none() {
        let text = format!(
            "a plugin of kind {}, this host knows family and backend: update mlxcel",
            plugin.kind
        );
        return Some(Rejection::peek(ReasonCode::UnknownKind, text));
    }
    if let Some(wrong) = wrong_arch(&plugin.arch, host) {
        return Some(wrong);
    }
    if plugin.os != host.os {
        let text = format!(
            "built for {}, this host runs on {}: get the plugin for it",
            plugin.os, host.os
        );
        return Some(Rejection::peek(ReasonCode::WrongOs, text));
    }
    if plugin.panic != "unwind" {
        let text = format!(
            "built with panic = \"{}\", which would end the host on a panic: rebuild it with panic = \"unwind\"",
            plugin.panic
        );
        return Some(Rejection::peek(ReasonCode::PanicAbort, text));
    }
    if let Some(extension) = plugin.requires_ext.first() {
        let text =
            format!("needs extension {extension:?}, which this host does not have: update mlxcel");
        return Some(Rejection::peek(ReasonCode::AbiMismatch, text));
    }
    missing_op(plugin).map(|op| {
        let text = format!(
            "needs operation {op:?}, which ABI {ABI_MAJOR}.{} of this host does not have: update mlxcel",
            host.abi_minor
        );
        Rejection::peek(ReasonCode::AbiMismatch, text)
    })
}

/// A required operation that this build's table does not have.
fn missing_op(plugin: &PluginInfo) -> Option<&str> {
    use mlxcel_abi::Table;
    use mlxcel_abi::ops::BackendOps;
    let known = |op: &&String| {
        !BackendOps::SLOTS
            .iter()
            .any(|slot| slot.name == op.as_str())
    };
    plugin.requires_ops.iter().find(known).map(String::as_str)
}
