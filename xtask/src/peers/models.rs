//! The files that everybody runs.

use std::path::{Path, PathBuf};

use super::args::Model;
use super::install::{Llama, Scratch};
use crate::error::Error;
use crate::model;
use crate::process::Run;
use crate::workspace::Workspace;

const RANDOM_QWEN: &str = include_str!("python/random_qwen.py");

/// A file with what is known of it.
#[derive(Debug, Clone)]
pub struct Subject {
    /// For the table.
    pub name: String,
    pub path: PathBuf,
    /// How mlx-lm's script knows the shape; none leaves mlx-lm out.
    pub shape: Option<&'static str>,
}

impl Subject {
    pub fn of(
        model: Model,
        workspace: &Workspace,
        scratch: &Scratch,
        llama: &Llama,
    ) -> Result<Self, Error> {
        Ok(match model {
            Model::Smollm2 => Self {
                name: "SmolLM2-135M Q4_1".to_owned(),
                path: model::fetch(workspace)?,
                shape: Some("smollm2-135m"),
            },
            Model::Qwen => Self {
                name: "random weights, shape of Qwen2.5-0.5B, Q4_K_M".to_owned(),
                path: random_qwen(scratch, llama)?,
                shape: Some("qwen2.5-0.5b"),
            },
        })
    }

    /// A file that somebody names.
    pub fn file(path: &Path) -> Result<Self, Error> {
        if !path.is_file() {
            return Err(Error::Missing {
                path: path.to_path_buf(),
                remedy: "name a GGUF file".to_owned(),
            });
        }
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let small = name.to_ascii_lowercase();
        let is_gemma = small.contains("gemma-3-270m") || small.contains("gemma3-270m");
        Ok(Self {
            shape: is_gemma.then_some("gemma3-270m"),
            path: std::path::absolute(path).map_err(Error::io("resolve", path))?,
            name,
        })
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.path.metadata().map_or(0, |metadata| metadata.len())
    }
}

fn random_qwen(scratch: &Scratch, llama: &Llama) -> Result<PathBuf, Error> {
    let home = scratch.dir.join("models");
    let file = home.join("random-qwen2.5-0.5b.Q4_K_M.gguf");
    if file.is_file() {
        return Ok(file);
    }
    std::fs::create_dir_all(&home).map_err(Error::io("create", &home))?;
    scratch.gguf()?;
    let script = home.join("random_qwen.py");
    std::fs::write(&script, RANDOM_QWEN).map_err(Error::io("write", &script))?;
    let wide = home.join("random-qwen2.5-0.5b.f16.gguf");
    eprintln!("making random weights in the shape of Qwen2.5-0.5B");
    Run::new(scratch.python()?)
        .arg(&script)
        .arg(&wide)
        .capture()?
        .ok()?;
    let staging = home.join("staging.gguf");
    Run::new(llama.tool("llama-quantize"))
        .arg(&wide)
        .arg(&staging)
        .arg("Q4_K_M")
        .capture()?
        .ok()?;
    std::fs::remove_file(&wide).map_err(Error::io("remove", &wide))?;
    std::fs::rename(&staging, &file).map_err(Error::io("move into place", &staging))?;
    Ok(file)
}
