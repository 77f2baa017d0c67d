//! What the linker would find for a plugin, on libraries made here.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::elf_linked;
use crate::plugin::{SystemLibraries, linkage};

const RPATH: u64 = 15;
const RUNPATH: u64 = 29;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, bytes: &[u8]) -> PathBuf {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn linked(&self, path: &str, needed: &[&str], tag: u64, folders: &str) -> PathBuf {
        self.write(path, &elf_linked(needed, tag, folders))
    }

    fn short(&self, path: &Path) -> String {
        let short = path.strip_prefix(self.0.path()).unwrap_or(path);
        short.display().to_string()
    }

    /// What is found, missing and damaged, and where the missing was looked for.
    fn told(&self, plugin: &Path, system: &SystemLibraries) -> String {
        let linkage = linkage(plugin, system);
        let found: Vec<String> = linkage.found.iter().map(|(_, p)| self.short(p)).collect();
        let damaged: Vec<String> = linkage
            .damaged
            .iter()
            .map(|(path, text)| format!("{} {text}", self.short(path)))
            .collect();
        let looked: Vec<String> = linkage.looked_in.iter().map(|p| self.short(p)).collect();
        format!(
            "found {found:?} missing {:?} damaged {damaged:?} looked in {looked:?}",
            linkage.missing
        )
    }
}

#[test]
fn all_that_is_missing_is_named_on_every_level() {
    let place = Place::new();
    let plugin = place.linked("p/libp.so", &["libm.so", "libx.so"], RUNPATH, "$ORIGIN/m");
    place.linked(
        "p/m/libm.so",
        &["liba.so", "libb.so", "libc.so"],
        RPATH,
        "$ORIGIN/../n:${ORIGIN}/../k",
    );
    place.linked("p/k/libb.so", &["libd.so", "libb.so"], RPATH, "");
    insta::assert_snapshot!(place.told(&plugin, &SystemLibraries::default()), @r#"found ["p/m/libm.so", "p/k/libb.so"] missing ["libx.so", "liba.so", "libc.so", "libd.so"] damaged [] looked in ["p/m", "p/n", "p/k"]"#);
}

#[test]
fn folders_of_a_file_hold_below_it_unless_that_has_its_own_way() {
    let place = Place::new();
    place.linked("k/libd.so", &[], RPATH, "");
    for (tag, words) in [(RPATH, "missing []"), (RUNPATH, "missing [\"libd.so\"]")] {
        let plugin = place.linked("libp.so", &["libb.so"], tag, "$ORIGIN/k");
        place.linked("k/libb.so", &["libd.so"], RPATH, "");
        let told = place.told(&plugin, &SystemLibraries::default());
        assert!(told.contains(words), "{told}");
    }
}

#[test]
fn files_that_cannot_be_used_are_told_with_their_fault() {
    let place = Place::new();
    let needed = [
        "libempty.so",
        "libtext.so",
        "libcut.so",
        "libdir.so",
        "libnowhere.so",
    ];
    let plugin = place.linked("libp.so", &needed, RUNPATH, "$ORIGIN");
    place.write("libempty.so", b"");
    place.write("libtext.so", b"INPUT(libother.so)");
    let whole = elf_linked(&["liba.so"], RPATH, "");
    place.write("libcut.so", &whole[..whole.len() - 9]);
    fs::create_dir(place.at("libdir.so")).unwrap();
    std::os::unix::fs::symlink("/nonexistent", place.at("libnowhere.so")).unwrap();
    insta::assert_snapshot!(place.told(&plugin, &SystemLibraries::default()), @r#"found [] missing [] damaged ["libempty.so is empty", "libtext.so is not a library", "libcut.so is truncated", "libdir.so is no file", "libnowhere.so is a link to nothing, or in a folder that cannot be read"] looked in []"#);
}

#[test]
fn the_linkers_own_places_are_looked_into() {
    let place = Place::new();
    let plugin = place.linked(
        "libp.so",
        &["liba.so", "libb.so", "libc.so", "/no/libd.so"],
        RPATH,
        "",
    );
    let cached = place.linked("cached/libb.so", &[], RPATH, "");
    place.linked("env/liba.so", &[], RPATH, "");
    place.linked("lib/libc.so", &[], RPATH, "");
    let system = SystemLibraries {
        environment: vec![place.at("env")],
        cache: [("libb.so".to_owned(), vec![cached])].into(),
        folders: vec![place.at("lib")],
    };
    insta::assert_snapshot!(place.told(&plugin, &system), @r#"found ["env/liba.so", "cached/libb.so", "lib/libc.so"] missing ["/no/libd.so"] damaged [] looked in []"#);
}

#[test]
fn what_this_process_runs_on_is_found() {
    let own = std::env::current_exe().unwrap();
    let linkage = linkage(&own, &SystemLibraries::of_process());
    assert!(linkage.missing.is_empty(), "{:?}", linkage.missing);
    assert!(linkage.damaged.is_empty(), "{:?}", linkage.damaged);
    if cfg!(target_os = "linux") && cfg!(target_env = "gnu") {
        assert!(linkage.found.iter().any(|(name, _)| name == "libc.so.6"));
    }
}
