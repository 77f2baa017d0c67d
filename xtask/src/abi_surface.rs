//! `abi/surface.txt`: the plugin interface as text, so that a change of it is seen in review.
//!
//! The text is made by an example of the abi crate, which alone knows its layout.

use crate::error::Error;
use crate::process::Run;
use crate::workspace::Workspace;

pub fn run(workspace: &Workspace, check: bool) -> Result<(), Error> {
    let path = workspace.root.join("abi/surface.txt");
    let fresh = Run::cargo("run")
        .args(["--quiet", "-p", "mlxcel-abi", "--example", "surface"])
        .dir(&workspace.root)
        .stdout()?;
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    if old == fresh {
        println!("{} is up to date", workspace.relative(&path).display());
        return Ok(());
    }
    if check {
        return Err(Error::SurfaceDiffers { path });
    }
    std::fs::write(&path, fresh).map_err(Error::io("write", &path))?;
    println!("{} written", workspace.relative(&path).display());
    Ok(())
}
