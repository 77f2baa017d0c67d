//! Smallest files that are what they claim to be: an ELF library and a Mach-O library with a metadata section.

use std::fs;
use std::path::{Path, PathBuf};

use mlxcel_abi::metadata::{SECTION, TARGET_ARCH, TARGET_OS};

/// A plugin to be described in metadata.
#[derive(Clone)]
pub struct Described {
    pub kind: &'static str,
    pub name: &'static str,
    pub version: &'static str,
    /// Architecture ids; each is also its own model type.
    pub archs: Vec<&'static str>,
}

impl Described {
    pub fn family(name: &'static str, archs: &[&'static str]) -> Self {
        Self {
            kind: "family",
            name,
            version: "1.0.0",
            archs: archs.to_vec(),
        }
    }

    pub fn backend(name: &'static str) -> Self {
        Self {
            kind: "backend",
            name,
            version: "1.0.0",
            archs: Vec::new(),
        }
    }

    pub fn version(mut self, version: &'static str) -> Self {
        self.version = version;
        self
    }

    pub fn metadata(&self) -> String {
        let mut text = format!(
            r#"{{"plugin":{{"format":1,"abi":[1,0],"needs_minor":0,"kind":"{}","name":"{}","version":"{}","vendor":"us","arch":"{TARGET_ARCH}","os":"{TARGET_OS}","panic":"unwind"}}}}"#,
            self.kind, self.name, self.version
        );
        for arch in &self.archs {
            text.push_str(&format!(
                "\n{{\"arch\":{{\"id\":\"{arch}\",\"model_types\":[\"{arch}\"],\"gguf\":[\"{arch}\"]}}}}"
            ));
        }
        text
    }

    /// Writes the plugin into `dir` under the name that discovery looks for.
    pub fn write_to(&self, dir: &Path) -> PathBuf {
        fs::create_dir_all(dir).unwrap();
        let path = dir.join(format!("libmlxcel_{}_{}.so", self.kind, self.name));
        fs::write(&path, elf_with(self.metadata().as_bytes())).unwrap();
        path.canonicalize().unwrap()
    }
}

fn put<const N: usize>(bytes: &mut Vec<u8>, values: [u64; N], sizes: [usize; N]) {
    for (value, size) in values.into_iter().zip(sizes) {
        bytes.extend_from_slice(&value.to_le_bytes()[..size]);
    }
}

/// An ELF64 library for this machine with `metadata` in the metadata section.
pub fn elf_with(metadata: &[u8]) -> Vec<u8> {
    let machine = if TARGET_ARCH == "aarch64" { 183 } else { 62 };
    let names = format!("\0{SECTION}\0.shstrtab\0").into_bytes();
    let (metadata_at, names_at) = (64 + 56, 64 + 56 + metadata.len() as u64);
    let sections_at = names_at + names.len() as u64;
    let mut bytes = b"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00".to_vec();
    put(
        &mut bytes,
        [3, machine, 1, 0, 64, sections_at, 0, 64, 56, 1, 64, 3, 2],
        [2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2],
    );
    let segment = [1, 4, 0, 0, 0, names_at, names_at, 4096];
    put(&mut bytes, segment, [4, 4, 8, 8, 8, 8, 8, 8]);
    bytes.extend_from_slice(metadata);
    bytes.extend_from_slice(&names);
    let sizes = [4, 4, 8, 8, 8, 8, 4, 4, 8, 8];
    put(&mut bytes, [0; 10], sizes);
    let len = metadata.len() as u64;
    put(
        &mut bytes,
        [1, 1, 2, metadata_at, metadata_at, len, 0, 0, 1, 0],
        sizes,
    );
    let name = 2 + SECTION.len() as u64;
    put(
        &mut bytes,
        [name, 3, 0, 0, names_at, names.len() as u64, 0, 0, 1, 0],
        sizes,
    );
    bytes
}

/// A Mach-O library for an ARM Mac with `metadata` in the section that is called as on this system.
pub fn macho_with(metadata: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let command_len = 72 + 80;
    put(
        &mut bytes,
        [0xfeed_facf, 0x0100_000c, 0, 6, 1, command_len, 0, 0],
        [4, 4, 4, 4, 4, 4, 4, 4],
    );
    let data_at = 32 + command_len;
    let len = metadata.len() as u64;
    put(&mut bytes, [0x19, command_len], [4, 4]);
    bytes.extend_from_slice(b"__DATA\0\0\0\0\0\0\0\0\0\0");
    put(
        &mut bytes,
        [0, len, data_at, len, 3, 3, 1, 0],
        [8, 8, 8, 8, 4, 4, 4, 4],
    );
    let mut section = SECTION.as_bytes().to_vec();
    section.resize(16, 0);
    bytes.extend_from_slice(&section);
    bytes.extend_from_slice(b"__DATA\0\0\0\0\0\0\0\0\0\0");
    put(
        &mut bytes,
        [0, len, data_at, 0, 0, 0, 0, 0, 0, 0],
        [8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
    );
    bytes.extend_from_slice(metadata);
    bytes
}

/// An ELF64 library for this machine that needs others. `path_tag` is 15 for folders that hold for what is below too, 29 for others.
pub fn elf_linked(needed: &[&str], path_tag: u64, folders: &str) -> Vec<u8> {
    let mut texts = vec![0];
    let mut entries = Vec::new();
    let written = needed.iter().map(|name| (1, *name));
    let folders = Some((path_tag, folders)).filter(|(_, folders)| !folders.is_empty());
    for (tag, text) in written.chain(folders) {
        entries.push((tag, texts.len() as u64));
        texts.extend_from_slice(text.as_bytes());
        texts.push(0);
    }
    elf_dynamic(entries, &texts)
}

/// An ELF64 library for this machine with these tags and places in `texts` for the dynamic linker.
pub fn elf_dynamic(mut entries: Vec<(u64, u64)>, texts: &[u8]) -> Vec<u8> {
    let machine = if TARGET_ARCH == "aarch64" { 183 } else { 62 };
    let dynamic_at = 64 + 2 * 56;
    let dynamic_len = (entries.len() as u64 + 2) * 16;
    let texts_at = dynamic_at + dynamic_len;
    let len = texts_at + texts.len() as u64;
    entries.extend([(5, texts_at), (0, 0)]);
    let mut bytes = b"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00".to_vec();
    put(
        &mut bytes,
        [3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0],
        [2, 2, 4, 8, 8, 8, 4, 2, 2, 2, 2, 2, 2],
    );
    for (kind, at, len) in [(1, 0, len), (2, dynamic_at, dynamic_len)] {
        put(
            &mut bytes,
            [kind, 4, at, at, at, len, len, 4096],
            [4, 4, 8, 8, 8, 8, 8, 8],
        );
    }
    for (tag, value) in entries {
        put(&mut bytes, [tag, value], [8, 8]);
    }
    bytes.extend_from_slice(texts);
    bytes
}
