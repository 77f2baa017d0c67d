//! Seeded mutations of good files and records: no panic, and no more bytes read than the budget allows.

use std::cell::Cell;
use std::io::{self, Cursor, Read, Seek, SeekFrom};

use proptest::prelude::*;

use super::files::{Described, elf_with, macho_with};
use crate::plugin::{HostProfile, METADATA_CAP_BYTES, parse_metadata, peek_reader};

/// Counts what is read through it.
struct Counting<'a> {
    inner: Cursor<&'a [u8]>,
    read_bytes: &'a Cell<u64>,
}

impl Read for Counting<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.read_bytes.set(self.read_bytes.get() + n as u64);
        Ok(n)
    }
}

impl Seek for Counting<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

/// Steele and others' SplitMix64, so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    const EXTREMES: [u64; 6] = [0, 1, u64::MAX, i64::MAX as u64, u32::MAX as u64, 1 << 40];
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(5) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => {
                let value = EXTREMES[random.below(EXTREMES.len())].to_le_bytes();
                let size = [2, 4, 8][random.below(3)].min(bytes.len() - at);
                bytes[at..at + size].copy_from_slice(&value[..size]);
            }
            3 => bytes.truncate(at.max(1)),
            _ => {
                let from = random.below(bytes.len());
                let size = random.below(32).min(bytes.len() - at.max(from));
                bytes.copy_within(from..from + size, at);
            }
        }
    }
}

#[test]
fn mutated_libraries_are_judged_without_a_panic_and_within_the_budget() {
    let text = Described::family("llama", &["llama", "mistral"]).metadata();
    let (elf, macho) = (elf_with(text.as_bytes()), macho_with(text.as_bytes()));
    let mac = HostProfile {
        arch: "aarch64",
        os: "macos",
        ..HostProfile::CURRENT
    };
    let mut random = Random(1);
    let mut accepted = 0;
    for round in 0..30_000 {
        let (source, host) = if round % 2 == 0 {
            (&elf, HostProfile::CURRENT)
        } else {
            (&macho, mac)
        };
        let mut bytes = source.clone();
        mutate(&mut bytes, &mut random);
        let read_bytes = Cell::new(0);
        let reader = Counting {
            inner: Cursor::new(&bytes),
            read_bytes: &read_bytes,
        };
        let peek = peek_reader(reader, bytes.len() as u64, host);
        accepted += u32::from(peek.rejection.is_none());
        assert!(
            read_bytes.get() <= 9 << 20,
            "round {round}: {} bytes read",
            read_bytes.get()
        );
    }
    // Many mutations hit nothing that matters; if none did, the files would not be read at all.
    assert!(accepted > 100, "{accepted} accepted");
}

#[test]
fn a_file_that_says_it_is_longer_than_it_is() {
    let bytes = elf_with(Described::backend("cpu").metadata().as_bytes());
    for len in [bytes.len() as u64 + 1, 1 << 40, u64::MAX] {
        for cut in [8, 64, 100, bytes.len()] {
            peek_reader(Cursor::new(&bytes[..cut]), len, HostProfile::CURRENT);
        }
    }
}

#[test]
fn mutated_records_are_parsed_without_a_panic() {
    let text = Described::family("llama", &["llama", "mistral"]).metadata();
    let mut random = Random(2);
    for _ in 0..20_000 {
        let mut bytes = text.clone().into_bytes();
        mutate(&mut bytes, &mut random);
        if let Ok(metadata) = parse_metadata(&bytes) {
            assert!(!metadata.plugin.name.is_empty());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_are_judged(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let peek = peek_reader(Cursor::new(&bytes), bytes.len() as u64, HostProfile::CURRENT);
        prop_assert!(peek.rejection.is_some());
        prop_assert!(bytes.len() > METADATA_CAP_BYTES || parse_metadata(&bytes).is_err());
    }

    #[test]
    fn any_bytes_behind_a_magic_are_judged(
        magic in prop_oneof![Just(&b"\x7fELF\x02\x01\x01\x00"[..]), Just(&b"\xcf\xfa\xed\xfe"[..]), Just(&b"\x7fELF\x02\x02\x01\x00"[..])],
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let bytes = [magic, &bytes].concat();
        prop_assert!(peek_reader(Cursor::new(&bytes), bytes.len() as u64, HostProfile::CURRENT).rejection.is_some());
    }
}
