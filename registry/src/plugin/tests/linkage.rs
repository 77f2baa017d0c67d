//! What the linker would find for a plugin, on libraries made here.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::{elf_dynamic, elf_linked};
use crate::plugin::{SystemLibraries, linkage, needed_libraries};

const NEEDED: u64 = 1;
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
        ..SystemLibraries::default()
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

#[test]
fn a_file_with_its_place_is_looked_at_there_alone() {
    let place = Place::new();
    let needed = ["/no/libd.so", "$ORIGIN/k/libe.so", "${ORIGIN}/libf.so"];
    let plugin = place.linked("libp.so", &needed, RUNPATH, "$ORIGIN/k:/opt/v");
    place.linked("k/libe.so", &[], RPATH, "");
    place.linked("k/libf.so", &[], RPATH, "");
    insta::assert_snapshot!(place.told(&plugin, &SystemLibraries::default()), @r#"found ["k/libe.so"] missing ["/no/libd.so", "${ORIGIN}/libf.so"] damaged [] looked in []"#);
}

#[test]
fn what_may_be_in_an_unknown_folder_is_not_told_as_missing() {
    let place = Place::new();
    let long = format!("$ORIGIN/{}", "k".repeat(5000));
    for folders in [
        "$LIB:$ORIGIN",
        "/v/${PLATFORM}:$ORIGIN",
        "/$ORIGINAL:$ORIGIN",
        &long,
    ] {
        for tag in [RPATH, RUNPATH] {
            let plugin = place.linked("libp.so", &["liba.so", "libe.so"], tag, folders);
            place.write("libe.so", b"");
            let told = place.told(&plugin, &SystemLibraries::default());
            assert_eq!(
                told, "found [] missing [] damaged [] looked in []",
                "{folders}"
            );
        }
    }
    let plugin = place.linked("libp.so", &["liba.so"], RUNPATH, "");
    let system = SystemLibraries {
        environment: vec!["/v/$LIB".into()],
        ..SystemLibraries::default()
    };
    assert!(linkage(&plugin, &system).missing.is_empty());
}

#[test]
fn a_text_that_cannot_be_read_does_not_hide_the_others() {
    let place = Place::new();
    let texts = [b"\0liba.so\0".as_slice(), &[b'k'; 5000], b"\0"].concat();
    let entries = vec![(NEEDED, 9), (NEEDED, 1), (RUNPATH, 9)];
    let plugin = place.write("libp.so", &elf_dynamic(entries, &texts));
    let needed = needed_libraries(&plugin).unwrap();
    assert_eq!(needed.libraries, ["liba.so"]);
    assert_eq!(needed.runpath, [None]);
}

#[test]
fn a_small_file_that_names_millions_of_folders_is_read_at_once() {
    let place = Place::new();
    // All texts share these bytes.
    let texts = [b"\0".as_slice(), &b"a:".repeat(2000), b"\0libx.so\0"].concat();
    let names = (0..100).map(|at| (NEEDED, 4002 + at % 7));
    let folders = (0..2000).map(|at| (RPATH, 1 + at));
    let plugin = place.write(
        "libp.so",
        &elf_dynamic(names.chain(folders).collect(), &texts),
    );
    let needed = needed_libraries(&plugin).unwrap();
    assert_eq!(needed.rpath.len(), 257);
    assert_eq!(needed.rpath.last(), Some(&None));
    insta::assert_snapshot!(place.told(&plugin, &SystemLibraries::default()), @"found [] missing [] damaged [] looked in []");
}

#[test]
fn looking_ends_for_a_file_that_asks_for_too_much() {
    let place = Place::new();
    let names = "x".repeat(500);
    let folders: Vec<String> = (100..350)
        .map(|number| format!("$ORIGIN/{number}"))
        .collect();
    let texts = format!("\0{names}\0{}\0", folders.join(":"));
    let needed = (0..500).map(|at| (NEEDED, 1 + at));
    let entries = needed.chain([(RPATH, 502)]).collect();
    let plugin = place.write("libp.so", &elf_dynamic(entries, texts.as_bytes()));
    let linkage = linkage(&plugin, &SystemLibraries::default());
    assert_eq!(linkage.missing.len(), 100_000 / 250);
    assert_eq!(linkage.looked_in.len(), 250);
}

#[test]
fn libraries_for_this_processor_come_first() {
    let place = Place::new();
    let plugin = place.linked("libp.so", &["liba.so", "libb.so"], RUNPATH, "$ORIGIN/k");
    place.linked("k/fast/liba.so", &[], RPATH, "");
    place.linked("k/liba.so", &[], RPATH, "");
    place.linked("lib/fast/libb.so", &[], RPATH, "");
    let system = SystemLibraries {
        folders: vec![place.at("lib")],
        subfolders: vec!["faster", "fast"],
        ..SystemLibraries::default()
    };
    insta::assert_snapshot!(place.told(&plugin, &system), @r#"found ["k/fast/liba.so", "lib/fast/libb.so"] missing [] damaged [] looked in []"#);
}
