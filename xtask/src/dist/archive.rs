//! Packing a folder with the system's tar, and the digest that goes with it.

use std::path::Path;

use crate::disk;
use crate::error::Error;
use crate::fetch::digest;
use crate::process::Run;

/// Names of what was packed, in the folder that holds both.
#[derive(Debug)]
pub struct Packed {
    pub archive: String,
    pub digest: String,
}

/// Makes `<name>.tar.gz` of the folder `<name>` in `home`, and `<name>.tar.gz.sha256` beside it.
///
/// The same content gives the same bytes with GNU tar: sorted, with one time, without owners or the packer's umask.
pub fn pack(home: &Path, name: &str, time: u64) -> Result<Packed, Error> {
    let archive = format!("{name}.tar.gz");
    let path = home.join(&archive);
    let version = Run::new("tar").arg("--version").capture()?.stdout;
    let mut run = Run::new("tar").arg("-C").arg(home).env("LC_ALL", "C");
    if version.contains("GNU tar") {
        run = run
            .args([
                "--format=gnu",
                "--sort=name",
                "--owner=0",
                "--group=0",
                "--numeric-owner",
                "--mode=u+rw,go+r,go-w,a+X",
                // Without a name and a time of its own.
                "--use-compress-program=gzip -n",
            ])
            .arg(format!("--mtime=@{time}"))
            .arg("-cf");
    } else {
        run = run.arg("-czf");
    }
    let outcome = run.arg(&path).arg(name).capture()?;
    if !outcome.status.success() && disk::says_full(&outcome.stderr) {
        let needed = disk::size_of(&home.join(name));
        return Err(disk::full("pack", &path, Some(needed)));
    }
    outcome.ok()?;
    let sum = digest::sha256_of(&path)?;
    let digest = format!("{archive}.sha256");
    let sum_path = home.join(&digest);
    std::fs::write(&sum_path, format!("{sum}  {archive}\n"))
        .map_err(Error::io("write", &sum_path))?;
    Ok(Packed { archive, digest })
}
