//! Which libraries an ELF file asks the dynamic linker for, and where it says to look. Reads headers alone.

use std::cell::Cell;
use std::fs::File;
use std::path::Path;

use object::read::elf::{FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadRef};
use object::{Endianness, elf};

use super::object_file::{BUDGET_BYTES, Budgeted};

/// More than any real library has; a damaged one may claim any number.
const ENTRY_CAP: usize = 4096;

/// What an ELF file asks of the dynamic linker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needed {
    /// Names of libraries, in the file's order (`DT_NEEDED`).
    pub libraries: Vec<String>,
    /// Folders for these and for what they need in turn (`DT_RPATH`), as written in the file.
    pub rpath: Vec<String>,
    /// Folders for these alone (`DT_RUNPATH`), as written in the file.
    pub runpath: Vec<String>,
}

/// What the file at `path` needs; `None` for what is no ELF library of 64 bits, or a damaged one: [`super::peek()`] says why.
pub fn needed_libraries(path: &Path) -> Option<Needed> {
    // Opening anything else may wait for ever.
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    let cache = ReadCache::new(File::open(path).ok()?);
    let left = Cell::new(BUDGET_BYTES);
    let data = Budgeted {
        cache: &cache,
        left: &left,
    };
    let header = elf::FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let segments = header.program_headers(endian, data).ok()?;
    let entries = segments
        .iter()
        .find_map(|segment| segment.dynamic(endian, data).ok().flatten())?;
    let (mut texts_at, mut texts) = (None, Vec::new());
    for entry in entries.iter().take(ENTRY_CAP) {
        let value = entry.d_val.get(endian);
        match entry.d_tag.get(endian) {
            elf::DT_NULL => break,
            elf::DT_STRTAB => texts_at = Some(value),
            tag @ (elf::DT_NEEDED | elf::DT_RPATH | elf::DT_RUNPATH) => texts.push((tag, value)),
            _ => (),
        }
    }
    // The table's place is written as an address in memory.
    let address = texts_at?;
    let table = segments.iter().find_map(|segment| {
        let inside = address.checked_sub(segment.p_vaddr(endian))?;
        (segment.p_type(endian) == elf::PT_LOAD && inside < segment.p_filesz(endian))
            .then(|| segment.p_offset(endian).checked_add(inside))?
    })?;
    let mut needed = Needed::default();
    for (tag, at) in texts {
        let start = table.checked_add(at)?;
        let text = data.read_bytes_at_until(start..data.len().ok()?, 0).ok()?;
        let text = String::from_utf8_lossy(text).into_owned();
        let folders = || {
            text.split(':')
                .filter(|part| !part.is_empty())
                .map(str::to_owned)
        };
        match tag {
            elf::DT_NEEDED => needed.libraries.push(text),
            elf::DT_RPATH => needed.rpath.extend(folders()),
            _ => needed.runpath.extend(folders()),
        }
    }
    Some(needed)
}
