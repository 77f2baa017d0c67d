//! Bringing a folder to a wanted content: copies what changed, removes what does not belong, replaces files whole.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// One file of a package.
///
/// Always a copy, never a hard link: who changes a file of a package (strips it, say) must not change what later packages are
/// made from. On file systems that can, the copy shares its blocks with the source until one of them is written.
#[derive(Debug)]
pub struct Placement {
    pub from: PathBuf,
    pub to: PathBuf,
}

/// Makes `dir` hold exactly the placements, all of which are inside it, and what is there under the names `kept`.
pub fn all(dir: &Path, placements: &[Placement], kept: &[&str]) -> Result<(), Error> {
    for placement in placements {
        place(placement)?;
    }
    let kept: Vec<PathBuf> = kept.iter().map(|name| dir.join(name)).collect();
    let wanted: BTreeSet<&Path> = placements
        .iter()
        .map(|one| one.to.as_path())
        .chain(kept.iter().map(PathBuf::as_path))
        .collect();
    remove_others(dir, &wanted).map(|_| ())
}

fn place(placement: &Placement) -> Result<(), Error> {
    let Placement { from, to } = placement;
    let source = from.metadata().map_err(Error::io("read", from))?;
    if to
        .metadata()
        .is_ok_and(|existing| is_same(&source, &existing) && !is_one_file(&source, &existing))
    {
        return Ok(());
    }
    let parent = to.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
    let mut name = to.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.new", std::process::id()));
    let fresh = to.with_file_name(name);
    // A process that has the old file open keeps it.
    let placed = copy_with_time(from, &fresh, &source)
        .and_then(|()| std::fs::rename(&fresh, to).map_err(Error::io("move into place", to)));
    if placed.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    placed
}

fn copy_with_time(from: &Path, to: &Path, source: &Metadata) -> Result<(), Error> {
    std::fs::copy(from, to).map_err(Error::io("copy to", to))?;
    let modified = source.modified().map_err(Error::io("read", from))?;
    std::fs::File::options()
        .write(true)
        .open(to)
        .and_then(|file| file.set_modified(modified))
        .map_err(Error::io("set the time of", to))
}

/// Size and time of last change, as build tools compare; a copy is given its source's time.
fn is_same(a: &Metadata, b: &Metadata) -> bool {
    let times = (a.modified(), b.modified());
    a.len() == b.len() && matches!(times, (Ok(a), Ok(b)) if a == b)
}

/// Whether both are names of one file: earlier versions of this program placed hard links.
fn is_one_file(a: &Metadata, b: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        a.dev() == b.dev() && a.ino() == b.ino()
    }
    #[cfg(not(unix))]
    {
        let _ = (a, b);
        false
    }
}

/// Whether anything wanted was in `dir`; folders that hold nothing wanted go too.
fn remove_others(dir: &Path, wanted: &BTreeSet<&Path>) -> Result<bool, Error> {
    let mut any_wanted = false;
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(Error::io("read", &path))?;
        if wanted.contains(path.as_path()) {
            any_wanted = true;
        } else if kind.is_dir() {
            if remove_others(&path, wanted)? {
                any_wanted = true;
            } else {
                std::fs::remove_dir(&path).map_err(Error::io("remove", &path))?;
            }
        } else {
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
    }
    Ok(any_wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(from: &Path, to: &Path) -> Placement {
        Placement {
            from: from.to_path_buf(),
            to: to.to_path_buf(),
        }
    }

    #[test]
    fn a_folder_is_brought_to_the_wanted_content() {
        let base = std::env::temp_dir().join(format!("xtask-place-{}", std::process::id()));
        let (source, out) = (base.join("source"), base.join("out"));
        std::fs::create_dir_all(out.join("stale/deep")).expect("creates");
        std::fs::create_dir_all(&source).expect("creates");
        std::fs::write(out.join("stale/deep/old.so"), "old").expect("writes");
        std::fs::write(source.join("a.so"), "one").expect("writes");
        std::fs::write(source.join("big.so"), "vendor").expect("writes");
        let placements = [
            copy(&source.join("a.so"), &out.join("a.so")),
            copy(&source.join("big.so"), &out.join("lib/big.so")),
        ];
        all(&out, &placements, &[]).expect("places");
        assert!(!out.join("stale").exists());
        let text = |name: &str| std::fs::read_to_string(out.join(name)).expect("reads");
        assert_eq!(
            (text("a.so"), text("lib/big.so")),
            ("one".into(), "vendor".into())
        );

        let before = out.join("a.so").metadata().expect("reads");
        all(&out, &placements, &[]).expect("nothing to do");
        assert!(is_same(
            &before,
            &out.join("a.so").metadata().expect("reads")
        ));

        std::fs::write(source.join("a.so"), "longer").expect("writes");
        all(&out, &placements, &[]).expect("updates");
        assert_eq!(text("a.so"), "longer");
        std::fs::remove_dir_all(&base).expect("removes");
    }

    #[cfg(unix)]
    #[test]
    fn a_change_of_a_package_leaves_its_source_alone() {
        let base = std::env::temp_dir().join(format!("xtask-share-{}", std::process::id()));
        let (source, out) = (base.join("libmlx.so"), base.join("package"));
        std::fs::create_dir_all(&out).expect("creates");
        std::fs::write(&source, "as it was fetched").expect("writes");
        let placed = out.join("libmlx.so");
        // As an earlier version left it.
        std::fs::hard_link(&source, &placed).expect("links");
        all(&out, &[copy(&source, &placed)], &[]).expect("places");
        std::fs::write(&placed, "stripped").expect("writes in place");
        let text = std::fs::read_to_string(&source).expect("reads");
        assert_eq!(text, "as it was fetched");
        std::fs::remove_dir_all(&base).expect("removes");
    }

    #[test]
    fn what_the_user_put_beside_is_kept() {
        let base = std::env::temp_dir().join(format!("xtask-kept-{}", std::process::id()));
        let (source, out) = (base.join("a.so"), base.join("package"));
        std::fs::create_dir_all(out.join("nvidia/nccl/lib")).expect("creates");
        std::fs::create_dir_all(out.join("other/nvidia")).expect("creates");
        std::fs::write(out.join("nvidia/nccl/lib/libnccl.so.2"), "large").expect("writes");
        std::fs::write(&source, "x").expect("writes");
        all(&out, &[copy(&source, &out.join("a.so"))], &["nvidia"]).expect("places");
        assert!(out.join("nvidia/nccl/lib/libnccl.so.2").exists());
        assert!(!out.join("other").exists());
        std::fs::remove_dir_all(&base).expect("removes");
    }

    #[test]
    fn a_missing_source_is_named() {
        let gone = Path::new("/no/such/file.so");
        let out = Path::new("/no/such/package");
        let error = all(out, &[copy(gone, &out.join("file.so"))], &[]).expect_err("missing");
        assert!(error.to_string().contains("/no/such/file.so"), "{error}");
    }
}
