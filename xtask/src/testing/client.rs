//! OpenAI's own Python client, which the server is tested with: installed into a folder of its own under `target`.

use std::path::PathBuf;

use crate::error::Error;
use crate::fetch::install::{self, Lock, Stamp};
use crate::fetch::{digest, pip};
use crate::workspace::Workspace;

const LAYOUT: u32 = 1;
const ALTERNATIVE: pip::Alternative =
    "only the test of the server with OpenAI's client needs it: run the other tests by name";

/// The folder to name in `PYTHONPATH`; what is in it is pinned by `tests/clients/requirements.txt`.
pub fn install(workspace: &Workspace) -> Result<PathBuf, Error> {
    let requirements = workspace.root.join("tests/clients/requirements.txt");
    let home = workspace.target.join("tools");
    let destination = home.join("openai-client");
    let stamp = Stamp {
        // Parts of it are compiled for one version of Python.
        sha256: format!("{} {}", digest::sha256_of(&requirements)?, pip::version()?),
        layout: LAYOUT,
    };
    if install::is_current(&destination, &stamp) {
        return Ok(destination);
    }
    let _lock = Lock::take(&home)?;
    if install::is_current(&destination, &stamp) {
        return Ok(destination);
    }
    let staging = install::staging(&destination);
    install::remove_tree(&staging)?;
    pip::install(&requirements, &staging, ALTERNATIVE)?;
    install::commit(&staging, &destination, &stamp)?;
    Ok(destination)
}
