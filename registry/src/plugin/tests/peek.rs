//! The reading of object files.

use std::io::Cursor;

use super::files::{Described, elf_with, macho_with};
use crate::plugin::{HostProfile, Peek, ReasonCode, peek_reader};

const HOST: HostProfile = HostProfile::CURRENT;
const MAC: HostProfile = HostProfile {
    arch: "aarch64",
    os: "macos",
    ..HOST
};

fn peeked(bytes: &[u8], host: HostProfile) -> Peek {
    peek_reader(Cursor::new(bytes), bytes.len() as u64, host)
}

fn refusal(bytes: &[u8], host: HostProfile) -> String {
    let rejection = peeked(bytes, host).rejection.expect("refused");
    format!("{}: {rejection}", rejection.code)
}

fn good() -> Vec<u8> {
    elf_with(Described::family("llama", &["llama"]).metadata().as_bytes())
}

#[test]
fn a_small_library_is_read() {
    let peek = peeked(&good(), HOST);
    assert_eq!(peek.rejection, None);
    assert_eq!(peek.metadata.unwrap().plugin.name, "llama");
}

#[test]
fn a_mac_library_is_read_anywhere_and_accepted_on_a_mac() {
    let mut text = Described::family("llama", &["llama"]).metadata();
    text = text.replace(
        &format!("\"arch\":\"{}\",\"os\":\"{}\"", HOST.arch, HOST.os),
        r#""arch":"aarch64","os":"macos""#,
    );
    let bytes = macho_with(text.as_bytes());
    assert_eq!(peeked(&bytes, MAC).rejection, None);
    assert_eq!(peeked(&bytes, MAC).metadata.unwrap().archs.len(), 1);
    let intel = HostProfile {
        arch: "x86_64",
        ..MAC
    };
    insta::assert_snapshot!(refusal(&bytes, intel), @"wrong_arch: built for aarch64, this host runs on x86_64: get the plugin for it");
    let linux = HostProfile { os: "linux", ..MAC };
    insta::assert_snapshot!(refusal(&bytes, linux), @"wrong_os: built for macos, this host runs on linux: get the plugin for it");
    insta::assert_snapshot!(refusal(&bytes[..bytes.len() - 1], MAC), @"truncated: truncated: a segment ends at byte 410, the file has 409; copy the file again");
    insta::assert_snapshot!(refusal(&bytes[..40], MAC), @"truncated: truncated: the load commands are not in the file");
    insta::assert_snapshot!(refusal(&good(), HostProfile { os: "macos", ..HOST }), @"wrong_os: built for linux, this host runs on macos: get the plugin for it");
}

#[test]
fn every_cut_is_noticed() {
    let whole = good();
    for len in 1..whole.len() {
        let rejection = peeked(&whole[..len], HOST).rejection.expect("refused");
        assert_eq!(rejection.code, ReasonCode::Truncated, "{len}: {rejection}");
    }
}

#[test]
fn requirements_that_this_host_lacks() {
    let requiring = |keys: &str| {
        let text = Described::family("x", &[])
            .metadata()
            .replace(r#""panic""#, &format!("{keys},\"panic\""));
        elf_with(text.as_bytes())
    };
    assert_eq!(
        peeked(&requiring(r#""requires_ops":["rope","take"]"#), HOST).rejection,
        None
    );
    insta::assert_snapshot!(refusal(&requiring(r#""requires_ops":["rope","warp"]"#), HOST), @r#"abi_mismatch: needs operation "warp", which ABI 1.4 of this host does not have: update mlxcel"#);
    insta::assert_snapshot!(refusal(&requiring(r#""requires_ext":["mlxcel.ext.collectives/1"]"#), HOST), @r#"abi_mismatch: needs extension "mlxcel.ext.collectives/1", which this host does not have: update mlxcel"#);
}

#[test]
fn abi_versions_are_negotiated_with_the_host_that_asks() {
    let text = Described::family("x", &[])
        .metadata()
        .replace("[1,0],\"needs_minor\":0", "[1,7],\"needs_minor\":3");
    let bytes = elf_with(text.as_bytes());
    let host = |abi_minor, oldest_plugin_minor| HostProfile {
        abi_minor,
        oldest_plugin_minor,
        ..HOST
    };
    assert_eq!(peeked(&bytes, host(3, 0)).rejection, None);
    insta::assert_snapshot!(refusal(&bytes, host(2, 0)), @"abi_mismatch: plugin needs ABI 1.3, this host has 1.2: update mlxcel");
    insta::assert_snapshot!(refusal(&bytes, host(9, 8)), @"abi_mismatch: plugin was built at ABI 1.7, this host loads 1.8 and newer: update the plugin");
}

#[test]
fn headers_that_claim_too_much_are_refused_without_being_believed() {
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    };
    // Where the section table lies, in the header.
    assert!(refusal(&with(40, &[0xff; 8]), HOST).starts_with("truncated: "));
    // Number of sections: more than fit.
    assert!(refusal(&with(60, &[0xff, 0xff]), HOST).starts_with("truncated: "));
    // Size of an entry of the section table.
    assert!(refusal(&with(58, &[7, 0]), HOST).starts_with("malformed: "));
    // Size of the segment in the file.
    assert!(refusal(&with(64 + 32, &[0xff; 8]), HOST).starts_with("truncated: "));
    // A metadata section of a size that is there, but above the limit.
    let huge = elf_with(&vec![b' '; (1 << 20) + 1]);
    insta::assert_snapshot!(refusal(&huge, HOST), @"bad_metadata: metadata has 1048577 bytes, the limit is 1048576");
}
