//! Header of one GGUF file (version 2 or 3, little-endian), from bytes that nobody vouches for.
//!
//! Nothing is allocated by a count of the file: lists grow as entries are really found, so memory is
//! bounded by the file. Owns the layout of one file. Must not know what the tensors are for.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::cursor::Cursor;
use super::error::GgufError;
use super::ggml_type::{GgmlType, type_name};
use super::meta::{MetaValue, Slot};

const MAX_META: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 18;
const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
/// ggml itself allows 63; builds with longer names exist.
const MAX_NAME_BYTES: u64 = 255;
const MAX_DIMS: u32 = 4;
const MAX_ALIGNMENT: u64 = 1 << 20;
const DEFAULT_ALIGNMENT: usize = 32;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    /// Row-major shape, outermost dimension first (the reverse of the file's order).
    pub shape: Vec<usize>,
    /// Where its bytes are in the file.
    pub range: Range<usize>,
}

/// Header of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufHeader {
    version: u32,
    meta: BTreeMap<String, Slot>,
    tensors: Vec<GgufTensor>,
}

impl GgufHeader {
    /// Version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The tensors in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// All metadata keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.meta.keys().map(String::as_str)
    }

    /// A metadata value. `file` must be the bytes that this header was parsed from.
    pub fn value<'a>(
        &'a self,
        file: &'a [u8],
        key: &str,
    ) -> Result<Option<MetaValue<'a>>, GgufError> {
        match self.meta.get_key_value(key) {
            Some((key, slot)) => slot.decode(file, key).map(Some),
            None => Ok(None),
        }
    }
}

/// Reads the header of a whole file in memory (or mapped); touches no byte of the data.
pub fn parse_header(file: &[u8]) -> Result<GgufHeader, GgufError> {
    let mut cursor = Cursor::new(file);
    let magic = file.get(..file.len().min(4)).unwrap_or(&[]);
    if magic != b"GGUF" {
        return Err(GgufError::Magic {
            found: String::from_utf8_lossy(magic).into_owned(),
        });
    }
    cursor.skip(4, "the magic")?;
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        swapped if matches!(swapped.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
        found => return Err(GgufError::Version { found }),
    }
    let tensor_count = limited(cursor.u64("the number of tensors")?, MAX_TENSORS, "tensors")?;
    let meta_count = limited(cursor.u64("the number of keys")?, MAX_META, "metadata keys")?;

    let mut meta = BTreeMap::new();
    for _ in 0..meta_count {
        let key = cursor.text(MAX_KEY_BYTES, "a metadata key")?;
        let slot = Slot::read(&mut cursor, key)?;
        if meta.insert(key.to_owned(), slot).is_some() {
            return Err(GgufError::DuplicateKey {
                key: key.to_owned(),
            });
        }
    }
    let alignment = alignment(file, &meta)?;

    let mut infos = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..tensor_count {
        let info = RawInfo::read(&mut cursor)?;
        if !names.insert(info.name) {
            return Err(GgufError::DuplicateTensor {
                tensor: info.name.to_owned(),
            });
        }
        infos.push(info);
    }
    // With no tensors the padding may be missing; the data is then empty.
    let data_start = cursor.at().next_multiple_of(alignment).min(file.len());
    let available = file.len() - data_start;
    let mut tensors = Vec::new();
    for info in infos {
        tensors.push(info.checked(alignment, data_start, available)?);
    }
    refuse_overlaps(&tensors)?;
    Ok(GgufHeader {
        version,
        meta,
        tensors,
    })
}

fn limited(found: u64, limit: u64, what: &str) -> Result<u64, GgufError> {
    if found > limit {
        let what = format!("the number of {what}");
        return Err(GgufError::Limit { what, found, limit });
    }
    Ok(found)
}

fn alignment(file: &[u8], meta: &BTreeMap<String, Slot>) -> Result<usize, GgufError> {
    const KEY: &str = "general.alignment";
    let Some(slot) = meta.get(KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    let found = u64::from(slot.decode(file, KEY)?.as_u32(KEY)?);
    if !found.is_power_of_two() || found > MAX_ALIGNMENT {
        return Err(GgufError::Alignment {
            found,
            limit: MAX_ALIGNMENT,
        });
    }
    Ok(usize::try_from(found).unwrap_or(DEFAULT_ALIGNMENT))
}

fn refuse_overlaps(tensors: &[GgufTensor]) -> Result<(), GgufError> {
    let mut by_place: Vec<&GgufTensor> = tensors.iter().collect();
    by_place.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
    for pair in by_place.windows(2) {
        if let [a, b] = pair
            && a.range.end > b.range.start
        {
            return Err(GgufError::Overlap {
                first: a.name.clone(),
                second: b.name.clone(),
            });
        }
    }
    Ok(())
}

/// A tensor info as the file has it.
struct RawInfo<'a> {
    name: &'a str,
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

impl<'a> RawInfo<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Result<Self, GgufError> {
        let name = cursor.text(MAX_NAME_BYTES, "a tensor name")?;
        let rank = cursor.u32("the rank of a tensor")?;
        if rank > MAX_DIMS {
            let what = format!("the rank of tensor `{name}`");
            return Err(GgufError::Limit {
                what,
                found: rank.into(),
                limit: MAX_DIMS.into(),
            });
        }
        let mut dims = Vec::new();
        for _ in 0..rank {
            dims.push(cursor.u64("the shape of a tensor")?);
        }
        let type_id = cursor.u32("the type of a tensor")?;
        let offset = cursor.u64("the offset of a tensor")?;
        Ok(RawInfo {
            name,
            dims,
            type_id,
            offset,
        })
    }

    fn checked(
        self,
        alignment: usize,
        data_start: usize,
        available: usize,
    ) -> Result<GgufTensor, GgufError> {
        let tensor = self.name.to_owned();
        let Some(ty) = GgmlType::from_id(self.type_id) else {
            let (id, name) = (self.type_id, type_name(self.type_id));
            let supported = GgmlType::ALL.map(|ty| ty.to_string()).join(", ");
            return Err(GgufError::TensorType {
                tensor,
                name,
                id,
                supported,
            });
        };
        let needed = match self.size_bytes(ty) {
            Ok(needed) => needed,
            Err(why) => {
                return Err(GgufError::Shape {
                    tensor,
                    dims: self.dims,
                    why,
                });
            }
        };
        let offset = self.offset;
        if !offset.is_multiple_of(alignment as u64) {
            return Err(GgufError::Unaligned {
                tensor,
                offset,
                alignment,
            });
        }
        let end = usize::try_from(offset)
            .ok()
            .and_then(|start| start.checked_add(needed));
        let Some(end) = end.filter(|end| *end <= available) else {
            return Err(GgufError::OutsideFile {
                tensor,
                offset,
                needed,
                available,
            });
        };
        // The dimensions fit: their product does.
        let shape = self
            .dims
            .iter()
            .rev()
            .map(|dim| usize::try_from(*dim).unwrap_or(0))
            .collect();
        let range = data_start + end - needed..data_start + end;
        Ok(GgufTensor {
            name: tensor,
            ty,
            shape,
            range,
        })
    }

    fn size_bytes(&self, ty: GgmlType) -> Result<usize, String> {
        let overflow = || "its size is beyond what memory can address".to_owned();
        let row = self.dims.first().copied().unwrap_or(1);
        let block = ty.block_elements() as u64;
        if !row.is_multiple_of(block) {
            return Err(format!("rows of {ty} must be a multiple of {block} long"));
        }
        let mut elements = 1u64;
        for dim in &self.dims {
            if *dim == 0 {
                return Err("every dimension must be at least 1".to_owned());
            }
            elements = elements.checked_mul(*dim).ok_or_else(overflow)?;
        }
        let bytes = (elements / block)
            .checked_mul(ty.block_bytes() as u64)
            .ok_or_else(overflow)?;
        // Converted, a tensor takes at most four bytes an element.
        let widest = elements.checked_mul(4).ok_or_else(overflow)?;
        isize::try_from(bytes.max(widest)).map_err(|_| overflow())?;
        usize::try_from(bytes).map_err(|_| overflow())
    }
}
