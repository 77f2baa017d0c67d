//! Packing a folder with the system's tar, and the digest that goes with it.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::fetch::digest;
use crate::process::Run;

/// Makes `<home>/<name>.tar.gz` of `<home>/<name>`, and `<name>.tar.gz.sha256` beside it.
pub fn pack(home: &Path, name: &str) -> Result<PathBuf, Error> {
    let archive = home.join(format!("{name}.tar.gz"));
    let version = Run::new("tar").arg("--version").capture()?.stdout;
    let mut run = Run::new("tar").arg("-C").arg(home);
    if version.contains("GNU tar") {
        // The same content gives the same order and owners, whoever packs it.
        run = run.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    }
    run.arg("-czf").arg(&archive).arg(name).run()?;
    let sum = digest::sha256_of(&archive)?;
    let sum_path = home.join(format!("{name}.tar.gz.sha256"));
    std::fs::write(&sum_path, format!("{sum}  {name}.tar.gz\n"))
        .map_err(Error::io("write", &sum_path))?;
    Ok(archive)
}
