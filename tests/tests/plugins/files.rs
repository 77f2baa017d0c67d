//! Files that are not good plugins: each is refused without running any of its code, with one line that says what is
//! wrong and what to do.

use std::fs;
use std::path::{Path, PathBuf};

use mlxcel_registry::plugin::{ReasonCode, Stage, State};
use mlxcel_tests::plugins::{Healthy, catalogue_of, record_of, replaced};

fn write(dir: &Path, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join("libmlxcel_family_bad.so");
    fs::write(&path, bytes).expect("written");
    path
}

/// `code: text` of a file that is refused by the peek.
fn refusal(path: &Path) -> String {
    let record = record_of(path).expect("listed");
    match record.state {
        State::Rejected(rejection) => {
            assert_eq!(rejection.stage, Stage::Peek, "{rejection}");
            assert!(!rejection.text.contains('\n'), "{rejection}");
            format!("{}: {rejection}", rejection.code)
        }
        other => panic!("expected a rejection, found {other:?}"),
    }
}

fn refusal_of(bytes: impl AsRef<[u8]>) -> String {
    let dir = tempfile::tempdir().expect("folder");
    refusal(&write(dir.path(), bytes))
}

#[test]
fn healthy_plugins_pass_the_peek() {
    for healthy in [Healthy::Family, Healthy::Backend, Healthy::Faulty] {
        let dir = tempfile::tempdir().expect("folder");
        let record = record_of(&healthy.copy_to(dir.path()).expect("copied")).expect("listed");
        assert_eq!(record.state, State::Available, "{healthy:?}");
    }
}

#[test]
fn text_renamed_to_so() {
    insta::assert_snapshot!(refusal_of("#!/bin/sh\necho hello\n"), @r##"not_an_object: expected an ELF library, found text that starts with "#!/bin/s": the file is not a plugin, remove or rename it"##);
}

#[test]
fn bytes_renamed_to_so() {
    insta::assert_snapshot!(refusal_of([0x89, b'P', b'N', b'G', 13, 10, 26, 10, 0]), @"not_an_object: expected an ELF library, found bytes 89 50 4e 47 0d 0a 1a 0a: the file is not a plugin, remove or rename it");
}

#[test]
fn an_empty_file() {
    insta::assert_snapshot!(refusal_of(""), @"empty: the file is empty: copy or build the plugin again");
}

#[test]
fn a_folder() {
    let dir = tempfile::tempdir().expect("folder");
    let path = dir.path().join("libmlxcel_family_bad.so");
    fs::create_dir(&path).expect("folder");
    insta::assert_snapshot!(refusal(&path), @"not_a_file: a folder, expected a plugin file: for a folder of plugins use --plugins-dir");
}

#[test]
fn a_missing_file() {
    insta::assert_snapshot!(refusal(Path::new("/nonexistent/libmlxcel_family_bad.so")), @"unreadable: cannot be read: No such file or directory (os error 2)");
}

#[test]
fn a_library_cut_at_any_length() {
    let whole = Healthy::Family.bytes().expect("built");
    let mut lengths = vec![1, 2, 3, 4, 15, 16, 63, 64, 65, 200, whole.len() - 1];
    lengths.extend((1..40).map(|part| whole.len() * part / 40));
    for len in lengths {
        let text = refusal_of(&whole[..len]);
        assert!(text.starts_with("truncated: "), "{len}: {text}");
    }
    let text = refusal_of(&whole[..60_000]);
    assert!(
        text.contains("the file has 60000; copy the file again"),
        "{text}"
    );
}

/// The library that holds the C functions of this process.
fn foreign_library() -> Vec<u8> {
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| {
            path.contains("libgcc_s") || path.contains("libc.so") || path.contains("libc-")
        })
        .expect("a shared library");
    fs::read(path).expect("read")
}

#[test]
fn a_library_that_is_not_a_plugin() {
    insta::assert_snapshot!(refusal_of(foreign_library()), @"not_a_plugin: a shared library without mlxcel plugin metadata: remove it from the plugin folder");
}

#[test]
fn an_object_that_is_not_a_library() {
    let mut bytes = Healthy::Family.bytes().expect("built");
    bytes[16] = 1; // e_type ET_REL
    insta::assert_snapshot!(refusal_of(bytes), @"not_a_library: an ELF file that is not a shared library: build the plugin as a cdylib");
}

#[test]
fn a_library_for_another_processor() {
    let mut bytes = Healthy::Family.bytes().expect("built");
    bytes[18] = 183; // e_machine EM_AARCH64
    insta::assert_snapshot!(refusal_of(&bytes), @"wrong_arch: built for aarch64, this host runs on x86_64: get the plugin for it");
    bytes[4] = 1; // ELFCLASS32
    insta::assert_snapshot!(refusal_of(bytes), @"wrong_arch: built for a 32-bit processor, this host runs on x86_64: get the plugin for it");
}

#[test]
fn a_library_for_another_system() {
    let mut bytes = Healthy::Family.bytes().expect("built");
    bytes[7] = 9; // ELFOSABI_FREEBSD
    insta::assert_snapshot!(refusal_of(bytes), @"wrong_os: built for another Unix, this host runs on linux: get the plugin for it");
    insta::assert_snapshot!(refusal_of("MZ\x00\x00\x00\x00\x00\x00"), @"wrong_os: built for windows, this host runs on linux: get the plugin for it");
    insta::assert_snapshot!(refusal_of([0xca, 0xfe, 0xba, 0xbe, 0, 0, 0, 2]), @"wrong_os: built for macos, this host runs on linux: get the plugin for it");
}

fn patched(from: &str, to: &str) -> String {
    let bytes = Healthy::Family.bytes().expect("built");
    refusal_of(replaced(bytes, from.as_bytes(), to.as_bytes()))
}

#[test]
fn another_abi() {
    insta::assert_snapshot!(patched(r#""abi":[1,4]"#, r#""abi":[2,0]"#), @"abi_mismatch: plugin uses ABI major 2, this host has 1: update mlxcel");
    insta::assert_snapshot!(patched(r#""abi":[1,4]"#, r#""abi":[0,9]"#), @"abi_mismatch: plugin uses ABI major 0, this host has 1: update the plugin");
    insta::assert_snapshot!(patched(r#""abi":[1,4],"needs_minor":0"#, r#""abi":[1,9],"needs_minor":9"#), @"abi_mismatch: plugin needs ABI 1.9, this host has 1.4: update mlxcel");
    insta::assert_snapshot!(patched(r#""needs_minor":0"#, r#""needs_minor":5"#), @"abi_mismatch: plugin says it needs ABI minor 5 but was built at 4: rebuild it with a current mlxcel-sdk");
}

#[test]
fn metadata_that_cannot_be_used() {
    insta::assert_snapshot!(patched(r#"{"plugin":{"#, r#"{"plugin":["#), @"bad_metadata: metadata record 2: invalid type: sequence, expected struct PluginInfo at column 10");
    insta::assert_snapshot!(patched(r#"{"plugin":{"#, r#"{"plug__":{"#), @"bad_metadata: metadata has 0 plugin records, expected 1");
    insta::assert_snapshot!(patched(r#""format":1"#, r#""format":7"#), @"bad_metadata: metadata format 7 is newer than 1, the newest this host reads: update mlxcel");
    insta::assert_snapshot!(patched(r#""name":"mock""#, r#""name":"m/ck""#), @r#"bad_metadata: metadata key name is "m/ck": expected 1 to 64 of a-z, A-Z, 0-9, _, - and ., starting with a letter or digit"#);
    insta::assert_snapshot!(patched(r#""name":"mock""#, r#""name":"\u1b""#), @"bad_metadata: metadata record 2: invalid escape at column 80");
    insta::assert_snapshot!(patched(r#""kind":"family""#, r#""kind":"kernel""#), @"unknown_kind: a plugin of kind kernel, this host knows family and backend: update mlxcel");
    insta::assert_snapshot!(patched(r#""panic":"unwind""#, r#""panic":"abort_""#), @r#"panic_abort: built with panic = "abort_", which would end the host on a panic: rebuild it with panic = "unwind""#);
    insta::assert_snapshot!(patched(r#""arch":"x86_64""#, r#""arch":"mips__""#), @"wrong_arch: built for mips__, this host runs on x86_64: get the plugin for it");
    insta::assert_snapshot!(patched(r#""model_types":["mock"]"#, r#""model_types":{"m":00}"#), @"bad_metadata: metadata record 1: invalid type: map, expected a sequence at column 101");
}

#[test]
fn a_rejected_plugin_still_tells_what_it_would_serve() {
    let dir = tempfile::tempdir().expect("folder");
    let bytes = Healthy::Family.bytes().expect("built");
    let path = write(
        dir.path(),
        replaced(bytes, br#""abi":[1,4]"#, br#""abi":[3,0]"#),
    );
    let record = record_of(&path).expect("listed");
    assert_eq!((record.name(), record.archs().len()), ("mock", 1));
    assert!(matches!(&record.state, State::Rejected(r) if r.code == ReasonCode::AbiMismatch));
}

#[test]
fn one_bad_file_does_not_touch_the_others() {
    let dir = tempfile::tempdir().expect("folder");
    write(dir.path(), "text");
    fs::write(dir.path().join("README"), "not looked at").expect("written");
    Healthy::Family.copy_to(dir.path()).expect("copied");
    Healthy::Backend.copy_to(dir.path()).expect("copied");
    let catalogue = catalogue_of(dir.path()).expect("built");
    let states: Vec<(&str, &str)> = catalogue
        .records()
        .iter()
        .map(|record| (record.name(), record.state.name()))
        .collect();
    assert_eq!(
        states,
        [
            ("mock", "available"),
            ("bad", "rejected"),
            ("mock", "available")
        ]
    );
    catalogue
        .require_explicit()
        .expect("a bad file in a folder is not fatal");
}
