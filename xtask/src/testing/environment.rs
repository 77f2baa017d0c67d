//! What black-box tests are told: where the host binary, the plugins and the model are.
//!
//! A test reads these variables and fails with a word about `cargo xtask test` if one is missing; it builds nothing itself.

use std::path::PathBuf;

use super::client;
use crate::error::Error;
use crate::model;
use crate::plugins;
use crate::process::Run;
use crate::workspace::Workspace;

/// The host binary under test.
pub const BINARY: &str = "MLXCEL_TEST_BIN";
/// A plugins folder with every family and the CPU backend.
pub const PLUGINS_DIR: &str = "MLXCEL_TEST_PLUGINS_DIR";
/// The small real model, a GGUF file.
pub const MODEL_GGUF: &str = "MLXCEL_TEST_MODEL_GGUF";
/// A folder with OpenAI's Python client, for `PYTHONPATH`.
pub const OPENAI_CLIENT: &str = "MLXCEL_TEST_OPENAI_CLIENT";

#[derive(Debug)]
pub struct Environment {
    binary: PathBuf,
    plugins_dir: PathBuf,
    model_gguf: PathBuf,
    openai_client: PathBuf,
}

impl Environment {
    /// Fetches the model and the client if need be; the rest must have been built by the step `plugins`.
    pub fn of(workspace: &Workspace) -> Result<Self, Error> {
        let environment = Environment {
            binary: workspace.host_binary(false),
            plugins_dir: plugins::default_dir(workspace, false),
            model_gguf: model::fetch(workspace)?,
            openai_client: client::install(workspace)?,
        };
        for path in [&environment.binary, &environment.plugins_dir] {
            if !path.exists() {
                return Err(Error::Missing {
                    path: path.clone(),
                    remedy: "build it first: cargo xtask test --only plugins".to_owned(),
                });
            }
        }
        Ok(environment)
    }

    pub fn on(&self, run: Run) -> Run {
        run.env(BINARY, &self.binary)
            .env(PLUGINS_DIR, &self.plugins_dir)
            .env(MODEL_GGUF, &self.model_gguf)
            .env(OPENAI_CLIENT, &self.openai_client)
    }
}
