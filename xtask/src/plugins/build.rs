//! Compiling plugin crates with cargo, and finding the libraries that it made.

use std::path::PathBuf;

use serde::Deserialize;

use super::select::{Kind, Selection};
use super::{Content, Request};
use crate::error::Error;
use crate::process::Run;
use crate::workspace::{Workspace, in_ci};

/// A compiled plugin.
#[derive(Debug)]
pub struct Built {
    pub package: String,
    pub kind: Kind,
    pub library: PathBuf,
}

/// The crate of the host's binaries.
pub const HOST_PACKAGE: &str = "mlxcel";

pub fn run(
    workspace: &Workspace,
    selection: &Selection,
    request: &Request,
) -> Result<Vec<Built>, Error> {
    let mut run = Run::cargo("build")
        .arg("--message-format=json-render-diagnostics")
        .dir(&workspace.root);
    if request.release {
        run = run.arg("--release");
    }
    if in_ci() {
        run = run.arg("--locked");
    }
    if request.content == Content::PluginsAndHost {
        run = run.args(["-p", HOST_PACKAGE]);
    }
    for plugin in &selection.plugins {
        run = run.args(["-p", plugin.package.as_str()]);
    }
    let messages = run.stdout()?;
    let libraries = libraries(&messages);
    let mut built = Vec::new();
    for plugin in &selection.plugins {
        let library_name = plugin.package.replace('-', "_");
        let library = libraries
            .iter()
            .find(|(name, _)| *name == library_name)
            .map(|(_, path)| path.clone())
            .ok_or_else(|| Error::Missing {
                path: PathBuf::from(&library_name),
                remedy: "cargo reported no such library; the cdylib of a plugin crate must carry the crate's name"
                    .to_owned(),
            })?;
        built.push(Built {
            package: plugin.package.clone(),
            kind: plugin.kind,
            library,
        });
    }
    Ok(built)
}

#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    target: Option<MessageTarget>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct MessageTarget {
    name: String,
    kind: Vec<String>,
}

/// (target name, shared library) of every cdylib in cargo's messages.
fn libraries(messages: &str) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let Ok(message) = serde_json::from_str::<Message>(line) else {
            continue;
        };
        let Some(target) = message.target else {
            continue;
        };
        let is_cdylib = target.kind.iter().any(|kind| kind == "cdylib");
        if message.reason != "compiler-artifact" || !is_cdylib {
            continue;
        }
        let shared = message.filenames.into_iter().find(|path| {
            path.extension()
                .is_some_and(|extension| extension == std::env::consts::DLL_EXTENSION)
        });
        found.extend(shared.map(|path| (target.name, path)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_shared_libraries_in_cargo_messages() {
        let extension = std::env::consts::DLL_EXTENSION;
        let messages = format!(
            r#"{{"reason":"compiler-artifact","target":{{"name":"serde","kind":["lib"]}},"filenames":["/t/libserde.rlib"]}}
not json
{{"reason":"build-finished","success":true}}
{{"reason":"compiler-artifact","target":{{"name":"mlxcel_family_llama","kind":["cdylib","rlib"]}},"filenames":["/t/libmlxcel_family_llama.rlib","/t/libmlxcel_family_llama.{extension}"]}}"#
        );
        assert_eq!(
            libraries(&messages),
            [(
                "mlxcel_family_llama".to_owned(),
                PathBuf::from(format!("/t/libmlxcel_family_llama.{extension}"))
            )]
        );
    }
}
