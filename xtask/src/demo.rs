//! From a fresh clone to an answer of a real model, in one command.

use std::time::Instant;

use crate::backend::Backend;
use crate::error::Error;
use crate::mlx::whole::Depth;
use crate::model;
use crate::plugins::{self, Content, Request};
use crate::process::Run;
use crate::workspace::Workspace;

pub fn run(workspace: &Workspace, prompt: &str) -> Result<(), Error> {
    let start = Instant::now();
    let model = model::fetch(workspace)?;
    eprintln!("building the host and its plugins; the first time takes some minutes");
    let plugins = plugins::build_and_assemble(
        workspace,
        &Request {
            release: true,
            out: None,
            backends: vec![Backend::Cpu],
            content: Content::PluginsAndHost,
            depth: Depth::Sizes,
        },
    )?;
    eprintln!("ready after {:.0} s", start.elapsed().as_secs_f64());
    let run = Run::new(workspace.host_binary(true))
        .arg("run")
        .arg(&model)
        .arg("-p")
        .arg(prompt)
        .arg("--plugins-dir")
        .arg(&plugins)
        .without_cargo_library_path();
    eprintln!("$ {}", run.shown());
    run.run_interactive()?;
    Ok(())
}
