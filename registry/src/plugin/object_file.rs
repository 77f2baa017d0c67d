//! Reads the headers of a shared library and finds the metadata section, without mapping the file and
//! without reading more than a fixed number of bytes of it.
//!
//! Owns ELF and Mach-O. Backends are up to 150 MB, and hostile headers may claim any size, so every read
//! is paid from a budget.

use std::cell::Cell;
use std::ops::Range;

use mlxcel_abi::metadata::{SECTION, TARGET_OS};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use object::read::macho::{MachHeader, Section, Segment};
use object::read::{ReadCache, ReadCacheOps, ReadRef};
use object::{Endianness, elf, macho};

use super::metadata::METADATA_CAP_BYTES;
use super::reason::{ReasonCode, Rejection};

/// Bytes of headers and tables that may be read.
pub(super) const BUDGET_BYTES: u64 = 8 << 20;
/// Most sections or segments; real libraries have under a hundred.
const TABLE_CAP: usize = 4096;

/// What the headers say.
#[derive(Debug, Default)]
pub(super) struct ObjectFacts {
    /// Operating system, in the names of [`mlxcel_abi::metadata::TARGET_OS`].
    pub os: Option<&'static str>,
    /// Processor, in the names of [`mlxcel_abi::metadata::TARGET_ARCH`], or a description.
    pub arch: Option<String>,
    /// The metadata section's bytes, if it could be found.
    pub section: Option<Vec<u8>>,
    /// First thing that is wrong with the file itself.
    pub damage: Option<Rejection>,
}

impl ObjectFacts {
    fn damaged(mut self, code: ReasonCode, text: impl AsRef<str>) -> Self {
        if self.damage.is_none() {
            self.damage = Some(Rejection::peek(code, text));
        }
        self
    }
}

/// Reads of a file, bounded in sum.
pub(super) struct Budgeted<'a, R: ReadCacheOps> {
    pub(super) cache: &'a ReadCache<R>,
    pub(super) left: &'a Cell<u64>,
}

impl<R: ReadCacheOps> Clone for Budgeted<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: ReadCacheOps> Copy for Budgeted<'_, R> {}

impl<R: ReadCacheOps> Budgeted<'_, R> {
    fn spend(self, bytes: u64) -> Result<(), ()> {
        self.left.set(self.left.get().checked_sub(bytes).ok_or(())?);
        Ok(())
    }
}

impl<'a, R: ReadCacheOps> ReadRef<'a> for Budgeted<'a, R> {
    fn len(self) -> Result<u64, ()> {
        self.cache.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        self.spend(size)?;
        self.cache.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        // The cache reads at most 4096 bytes for one string.
        self.spend(4096)?;
        self.cache.read_bytes_at_until(range, delimiter)
    }
}

/// Reads an object file of `len` bytes.
pub(super) fn read_object<R: ReadCacheOps>(reader: R, len: u64) -> ObjectFacts {
    let cache = ReadCache::new(reader);
    let left = Cell::new(BUDGET_BYTES);
    let data = Budgeted {
        cache: &cache,
        left: &left,
    };
    let facts = ObjectFacts::default();
    let Ok(magic) = data.read_bytes_at(0, len.min(8)) else {
        return facts.damaged(ReasonCode::Unreadable, "the first bytes cannot be read");
    };
    match magic {
        [0x7f, b'E', b'L', b'F', 2, ..] => read_elf(data, len),
        [0x7f, b'E', b'L', b'F', 1, ..] => ObjectFacts {
            arch: Some("a 32-bit processor".to_owned()),
            ..facts
        },
        [0x7f, b'E', b'L', b'F', ..] | [0x7f, b'E', b'L'] | [0x7f, b'E'] | [0x7f] => facts.damaged(
            ReasonCode::Truncated,
            format!("truncated: {len} bytes end inside the ELF header; copy the file again"),
        ),
        [0xcf, 0xfa, 0xed, 0xfe, ..] => read_macho(data, len),
        [0xca, 0xfe, 0xba, 0xbe | 0xbf, ..] => ObjectFacts {
            os: Some("macos"),
            ..facts
        }
        .damaged(
            ReasonCode::NotALibrary,
            "a universal Mach-O file: extract the part for this processor with lipo -thin",
        ),
        [b'M', b'Z', ..] => ObjectFacts {
            os: Some("windows"),
            ..facts
        },
        _ => facts.damaged(ReasonCode::NotAnObject, not_an_object(magic)),
    }
}

fn not_an_object(magic: &[u8]) -> String {
    let wanted = match TARGET_OS {
        "macos" => "a Mach-O library",
        _ => "an ELF library",
    };
    let text = magic
        .iter()
        .all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace());
    let found = if text {
        format!("text that starts with {:?}", String::from_utf8_lossy(magic))
    } else {
        let hex: Vec<String> = magic.iter().map(|b| format!("{b:02x}")).collect();
        format!("bytes {}", hex.join(" "))
    };
    format!("expected {wanted}, found {found}: the file is not a plugin, remove or rename it")
}

fn truncated(what: &str, end: u64, len: u64) -> String {
    format!("truncated: {what} ends at byte {end}, the file has {len}; copy the file again")
}

fn elf_arch(machine: elf::Machine) -> String {
    match machine {
        elf::EM_X86_64 => "x86_64".to_owned(),
        elf::EM_AARCH64 => "aarch64".to_owned(),
        elf::EM_RISCV => "riscv64".to_owned(),
        elf::EM_386 => "x86".to_owned(),
        elf::EM_ARM => "arm".to_owned(),
        elf::EM_PPC64 => "powerpc64".to_owned(),
        elf::EM_S390 => "s390x".to_owned(),
        elf::EM_LOONGARCH => "loongarch64".to_owned(),
        other => format!("ELF machine {}", other.0),
    }
}

fn read_elf<'a, R: ReadCacheOps>(data: Budgeted<'a, R>, len: u64) -> ObjectFacts {
    let mut facts = ObjectFacts::default();
    let Ok(header) = elf::FileHeader64::<Endianness>::parse(data) else {
        let end = size_of::<elf::FileHeader64<Endianness>>() as u64;
        return if len < end {
            facts.damaged(ReasonCode::Truncated, truncated("the ELF header", end, len))
        } else {
            facts.damaged(ReasonCode::Malformed, "the ELF header is malformed")
        };
    };
    let Ok(endian) = header.endian() else {
        return facts.damaged(
            ReasonCode::Malformed,
            "the ELF header has an unknown byte order",
        );
    };
    facts.os = match header.e_ident().os_abi {
        // Linux libraries carry 0, or 3 when they use GNU extensions.
        elf::ELFOSABI_SYSV | elf::ELFOSABI_GNU => Some("linux"),
        _ => Some("another Unix"),
    };
    facts.arch = Some(elf_arch(header.e_machine(endian)));
    if header.e_type(endian) != elf::ET_DYN {
        facts = facts.damaged(
            ReasonCode::NotALibrary,
            "an ELF file that is not a shared library: build the plugin as a cdylib",
        );
    }

    let table_end = |offset: u64, count: u16, size: u16| {
        offset.saturating_add(u64::from(count) * u64::from(size))
    };
    let segments_end = table_end(
        header.e_phoff(endian),
        header.e_phnum(endian),
        header.e_phentsize(endian),
    );
    let sections_end = table_end(
        header.e_shoff(endian),
        header.e_shnum(endian),
        header.e_shentsize(endian),
    );
    for (what, end) in [
        ("the segment table", segments_end),
        ("the section table", sections_end),
    ] {
        if end > len {
            return facts.damaged(ReasonCode::Truncated, truncated(what, end, len));
        }
    }
    let Ok(segments) = header.program_headers(endian, data) else {
        return facts.damaged(ReasonCode::Malformed, "the segment table is malformed");
    };
    for (index, segment) in segments.iter().enumerate() {
        let end = segment
            .p_offset(endian)
            .saturating_add(segment.p_filesz(endian));
        if segment.p_type(endian) == elf::PT_LOAD && end > len {
            facts = facts.damaged(
                ReasonCode::Truncated,
                truncated(&format!("segment {index}"), end, len),
            );
        }
    }
    read_elf_sections(facts, header, endian, data, len)
}

fn read_elf_sections<'a, R: ReadCacheOps>(
    mut facts: ObjectFacts,
    header: &elf::FileHeader64<Endianness>,
    endian: Endianness,
    data: Budgeted<'a, R>,
    len: u64,
) -> ObjectFacts {
    let Ok(sections) = header.section_headers(endian, data) else {
        return facts.damaged(ReasonCode::Malformed, "the section table is malformed");
    };
    if sections.len() > TABLE_CAP {
        return facts.damaged(
            ReasonCode::Malformed,
            format!("{} sections, the limit is {TABLE_CAP}", sections.len()),
        );
    }
    for (index, section) in sections.iter().enumerate() {
        let end = section
            .sh_offset(endian)
            .saturating_add(section.sh_size(endian));
        if section.sh_type(endian) != elf::SHT_NOBITS && end > len {
            facts = facts.damaged(
                ReasonCode::Truncated,
                truncated(&format!("section {index}"), end, len),
            );
        }
    }
    let names = header
        .shstrndx(endian, data)
        .ok()
        .and_then(|index| sections.get(index as usize))
        .and_then(|names| names.data(endian, data).ok());
    let Some(names) = names else {
        return facts;
    };
    let name_of = |section: &elf::SectionHeader64<Endianness>| {
        let tail = names.get(section.sh_name(endian) as usize..)?;
        tail.split(|&byte| byte == 0).next()
    };
    let found = sections
        .iter()
        .find(|section| name_of(section) == Some(SECTION.as_bytes()));
    match found {
        Some(section) => take_section(facts, section.sh_size(endian), || {
            section.data(endian, data).ok()
        }),
        None => facts,
    }
}

fn take_section<'a>(
    mut facts: ObjectFacts,
    size: u64,
    bytes: impl FnOnce() -> Option<&'a [u8]>,
) -> ObjectFacts {
    if size > METADATA_CAP_BYTES as u64 {
        return facts.damaged(
            ReasonCode::BadMetadata,
            format!("metadata has {size} bytes, the limit is {METADATA_CAP_BYTES}"),
        );
    }
    facts.section = bytes().map(<[u8]>::to_vec);
    facts
}

fn macho_arch(cpu: macho::CpuType) -> String {
    match cpu {
        macho::CPU_TYPE_X86_64 => "x86_64".to_owned(),
        macho::CPU_TYPE_ARM64 => "aarch64".to_owned(),
        other => format!("Mach-O processor {}", other.0),
    }
}

fn read_macho<'a, R: ReadCacheOps>(data: Budgeted<'a, R>, len: u64) -> ObjectFacts {
    let mut facts = ObjectFacts {
        os: Some("macos"),
        ..ObjectFacts::default()
    };
    let header = macho::MachHeader64::<Endianness>::parse(data, 0);
    let Some((header, endian)) = header.ok().and_then(|h| Some((h, h.endian().ok()?))) else {
        return facts.damaged(
            ReasonCode::Truncated,
            "truncated: the file ends inside the Mach-O header",
        );
    };
    facts.arch = Some(macho_arch(header.cputype(endian)));
    if !matches!(header.filetype(endian), macho::MH_DYLIB | macho::MH_BUNDLE) {
        facts = facts.damaged(
            ReasonCode::NotALibrary,
            "a Mach-O file that is not a shared library: build the plugin as a cdylib",
        );
    }
    let Ok(mut commands) = header.load_commands(endian, data, 0) else {
        return facts.damaged(
            ReasonCode::Truncated,
            "truncated: the load commands are not in the file",
        );
    };
    let mut count = 0;
    while let Ok(Some(command)) = commands.next() {
        count += 1;
        if count > TABLE_CAP {
            return facts.damaged(
                ReasonCode::Malformed,
                format!("more than {TABLE_CAP} load commands"),
            );
        }
        let Ok(Some((segment, section_data))) = command.segment_64() else {
            continue;
        };
        let (offset, size) = segment.file_range(endian);
        let end = offset.saturating_add(size);
        if end > len {
            facts = facts.damaged(ReasonCode::Truncated, truncated("a segment", end, len));
        }
        let Ok(sections) = segment.sections(endian, section_data) else {
            continue;
        };
        for section in sections {
            if section.name() == SECTION.as_bytes() && facts.section.is_none() {
                let read = || {
                    section
                        .data(endian, data, section.offset(endian).into())
                        .ok()
                };
                facts = take_section(facts, section.size(endian), read);
            }
        }
    }
    facts
}
