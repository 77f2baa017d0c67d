//! Which libraries an ELF file asks the dynamic linker for, and where it says to look. Reads headers alone.

use std::cell::Cell;
use std::fs::File;
use std::path::Path;

use object::read::elf::{FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadRef};
use object::{Endianness, elf};

use super::object_file::Budgeted;

/// Bytes that may be read: the headers, and some hundred texts, which are paid as 4096 bytes each.
const BUDGET_BYTES: u64 = 2 << 20;
/// More texts than any real library has; a damaged one may claim any number.
const TEXT_CAP: usize = 4096;
/// More folders than any real library names. Many texts may share their bytes, so a small file can name millions.
pub(super) const FOLDER_CAP: usize = 256;

/// What an ELF file asks of the dynamic linker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needed {
    /// Names of libraries, in the file's order (`DT_NEEDED`), without those that cannot be read.
    pub libraries: Vec<String>,
    /// Folders for these and for what they need in turn (`DT_RPATH`), as written in the file. `None` stands for some that cannot
    /// be read, or are too many.
    pub rpath: Vec<Option<String>>,
    /// Folders for these alone (`DT_RUNPATH`), likewise.
    pub runpath: Vec<Option<String>>,
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
    let (mut texts_at, mut texts, mut is_cut) = (None, Vec::new(), false);
    for entry in entries {
        let value = entry.d_val.get(endian);
        match entry.d_tag.get(endian) {
            elf::DT_NULL => break,
            elf::DT_STRTAB => texts_at = Some(value),
            elf::DT_NEEDED | elf::DT_RPATH | elf::DT_RUNPATH if texts.len() >= TEXT_CAP => {
                is_cut = true;
            }
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
    let text = |at: u64| {
        let range = table.checked_add(at)?..data.len().ok()?;
        let text = data.read_bytes_at_until(range, 0).ok()?;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    let mut needed = Needed::default();
    for (tag, at) in texts {
        match tag {
            elf::DT_NEEDED => needed.libraries.extend(text(at)),
            elf::DT_RPATH => add_folders(&mut needed.rpath, || text(at)),
            _ => add_folders(&mut needed.runpath, || text(at)),
        }
    }
    if is_cut {
        needed.rpath.push(None);
        needed.runpath.push(None);
    }
    Some(needed)
}

/// Adds the folders of one text. After the last that is taken stands one that is not known.
fn add_folders(folders: &mut Vec<Option<String>>, text: impl FnOnce() -> Option<String>) {
    if folders.len() > FOLDER_CAP {
        return;
    }
    match text() {
        Some(text) => {
            let parts = text.split(':').filter(|part| !part.is_empty());
            let room = FOLDER_CAP + 1 - folders.len();
            folders.extend(parts.take(room).map(|part| Some(part.to_owned())));
        }
        None => folders.push(None),
    }
    if let Some(last) = folders.get_mut(FOLDER_CAP) {
        *last = None;
    }
}
