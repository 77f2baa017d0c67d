//! Header of one safetensors file, from bytes that nobody vouches for.
//!
//! The `safetensors` crate reads the header and has the last word; what is checked before it is what
//! it does not bound (count, rank, nesting, duplicate names) or does not name (the tensor at fault).
//! Owns the layout of one file. Must not know how files form a checkpoint.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::ops::Range;

use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::Number;

use super::dtype::{DType, TensorInfo};
use super::json::{self, JsonError, JsonLimits};

/// Bytes a header may have. The largest published headers (tens of thousands of experts in one file)
/// stay under 10 MiB.
pub const MAX_HEADER_BYTES: u64 = 32 << 20;
/// Tensors a file may hold.
pub const MAX_TENSORS: usize = 1 << 18;
/// Dimensions a tensor may have.
pub const MAX_RANK: usize = 8;
const MAX_DEPTH: usize = 8;
const LENGTH_BYTES: usize = 8;

/// Why a safetensors file was refused.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// Not even the length of the header is there.
    #[error("expected a safetensors file, found only {len} bytes")]
    TooShort {
        /// Bytes in the file.
        len: usize,
    },
    /// The header is longer than allowed.
    #[error("expected a header of at most {limit} bytes, found a length of {found}")]
    HeaderTooLong {
        /// Length the file states.
        found: u64,
        /// Length allowed.
        limit: u64,
    },
    /// The header ends after the file.
    #[error(
        "the header of {header_len} bytes does not fit into the file of {file_len} bytes (truncated download?)"
    )]
    HeaderOutsideFile {
        /// Length the file states.
        header_len: u64,
        /// Bytes in the file.
        file_len: usize,
    },
    /// The header is not the JSON it should be.
    #[error("header: {0}")]
    Json(#[from] JsonError),
    /// Two entries have one name.
    #[error("tensor `{name}` is listed twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// More tensors than allowed.
    #[error("expected at most {limit} tensors, found more")]
    TooManyTensors {
        /// Number allowed.
        limit: usize,
    },
    /// An element type that this reader does not carry.
    #[error("tensor `{name}` has element type `{dtype}`, which is not supported")]
    DType {
        /// The tensor.
        name: String,
        /// The type as the file spells it.
        dtype: String,
    },
    /// More dimensions than allowed.
    #[error("tensor `{name}` has more than {limit} dimensions")]
    Rank {
        /// The tensor.
        name: String,
        /// Number allowed.
        limit: usize,
    },
    /// A dimension or offset that is no count.
    #[error("tensor `{name}` has {what} {found}, expected a non-negative integer")]
    NotACount {
        /// The tensor.
        name: String,
        /// `dimension` or `offset`.
        what: &'static str,
        /// The number as the file spells it.
        found: String,
    },
    /// Shape times element size overflows.
    #[error("tensor `{name}` of shape {shape:?} is larger than memory can address")]
    Overflow {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The byte range has another length than shape and type ask for.
    #[error("tensor `{name}` needs {expected} bytes, but its offsets {start}..{end} span {found}", found = .end.saturating_sub(*.start))]
    Length {
        /// The tensor.
        name: String,
        /// Bytes that shape and type ask for.
        expected: usize,
        /// First offset.
        start: usize,
        /// Last offset.
        end: usize,
    },
    /// The byte range ends after the file.
    #[error(
        "tensor `{name}` ends at offset {end}, but the file holds {available} bytes of data (truncated download?)"
    )]
    OutsideFile {
        /// The tensor.
        name: String,
        /// Last offset.
        end: usize,
        /// Bytes after the header.
        available: usize,
    },
    /// Two tensors share bytes.
    #[error("tensors `{first}` and `{second}` overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other one.
        second: String,
    },
    /// Bytes that belong to no tensor, which the format forbids.
    #[error("bytes {start}..{end} of the data belong to no tensor")]
    Hole {
        /// First of them.
        start: usize,
        /// After the last of them.
        end: usize,
    },
    /// The `safetensors` crate refused what the checks above let pass.
    #[error(transparent)]
    Refused(#[from] safetensors::SafeTensorError),
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafetensorsEntry {
    /// Type, shape and size.
    pub info: TensorInfo,
    /// Where its bytes are in the file.
    pub range: Range<usize>,
}

/// The tensors of one file, by name.
pub type SafetensorsHeader = BTreeMap<String, SafetensorsEntry>;

/// Reads the header of a whole file in memory (or mapped); touches no byte of the data.
pub fn parse_header(file: &[u8]) -> Result<SafetensorsHeader, SafetensorsError> {
    let (text, data_start) = header_text(file)?;
    let available = file.len() - data_start;
    let mut entries = Vec::new();
    for (name, raw) in raw_entries(text)? {
        entries.push(checked_entry(name, raw, available)?);
    }
    refuse_overlaps_and_holes(&mut entries, available)?;
    // Now let the reference reader judge the same bytes, and take its word for what is where.
    let (_, metadata) = safetensors::SafeTensors::read_metadata(file)?;
    let mut header = SafetensorsHeader::new();
    for (name, mut entry) in entries {
        let Some(info) = metadata.info(&name) else {
            return Err(safetensors::SafeTensorError::TensorNotFound(name).into());
        };
        let (start, end) = info.data_offsets;
        entry.range = data_start + start..data_start + end;
        header.insert(name, entry);
    }
    Ok(header)
}

fn header_text(file: &[u8]) -> Result<(&[u8], usize), SafetensorsError> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(SafetensorsError::TooShort { len: file.len() });
    };
    let header_len = u64::from_le_bytes(*length);
    if header_len > MAX_HEADER_BYTES {
        return Err(SafetensorsError::HeaderTooLong {
            found: header_len,
            limit: MAX_HEADER_BYTES,
        });
    }
    let text = usize::try_from(header_len)
        .ok()
        .and_then(|len| rest.get(..len));
    match text {
        Some(text) => Ok((text, LENGTH_BYTES + text.len())),
        None => Err(SafetensorsError::HeaderOutsideFile {
            header_len,
            file_len: file.len(),
        }),
    }
}

fn raw_entries(text: &[u8]) -> Result<BTreeMap<String, RawEntry>, SafetensorsError> {
    let limits = JsonLimits {
        size_bytes: MAX_HEADER_BYTES,
        depth: MAX_DEPTH,
    };
    json::bounded(text, &limits)?;
    let entries: RawEntries = serde_json::from_slice(text).map_err(JsonError::from)?;
    if let Some(name) = entries.duplicate {
        return Err(SafetensorsError::Duplicate { name });
    }
    if entries.too_many {
        return Err(SafetensorsError::TooManyTensors { limit: MAX_TENSORS });
    }
    Ok(entries.by_name)
}

fn checked_entry(
    name: String,
    raw: RawEntry,
    available: usize,
) -> Result<(String, SafetensorsEntry), SafetensorsError> {
    let Ok(dtype) = raw.dtype.parse::<DType>() else {
        return Err(SafetensorsError::DType {
            name,
            dtype: raw.dtype,
        });
    };
    let Some(dims) = raw.shape.0 else {
        return Err(SafetensorsError::Rank {
            name,
            limit: MAX_RANK,
        });
    };
    let count = |what, number: &Number| {
        number
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| SafetensorsError::NotACount {
                name: name.clone(),
                what,
                found: number.to_string(),
            })
    };
    let shape = dims
        .iter()
        .map(|dim| count("dimension", dim))
        .collect::<Result<Vec<_>, _>>()?;
    let (start, end) = raw.data_offsets;
    let (start, end) = (count("offset", &start)?, count("offset", &end)?);
    let Some(info) = TensorInfo::new(dtype, shape.clone()) else {
        return Err(SafetensorsError::Overflow { name, shape });
    };
    if end.checked_sub(start) != Some(info.byte_len) {
        return Err(SafetensorsError::Length {
            name,
            expected: info.byte_len,
            start,
            end,
        });
    }
    if end > available {
        return Err(SafetensorsError::OutsideFile {
            name,
            end,
            available,
        });
    }
    Ok((
        name,
        SafetensorsEntry {
            info,
            range: start..end,
        },
    ))
}

/// The format wants every byte of the data in exactly one tensor.
fn refuse_overlaps_and_holes(
    entries: &mut [(String, SafetensorsEntry)],
    available: usize,
) -> Result<(), SafetensorsError> {
    entries.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    let (mut before, mut end) = ("", 0);
    for (name, entry) in entries.iter() {
        let Range { start, .. } = entry.range;
        if start < end {
            let (first, second) = (before.to_owned(), name.clone());
            return Err(SafetensorsError::Overlap { first, second });
        }
        if start > end {
            return Err(SafetensorsError::Hole {
                start: end,
                end: start,
            });
        }
        (before, end) = (name, entry.range.end);
    }
    if end < available {
        return Err(SafetensorsError::Hole {
            start: end,
            end: available,
        });
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(expecting = "an object with dtype, shape and data_offsets")]
struct RawEntry {
    dtype: String,
    shape: Dims,
    data_offsets: (Number, Number),
}

/// `None` when there are more than [`MAX_RANK`] numbers; those are skipped, not stored.
struct Dims(Option<Vec<Number>>);

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimsVisitor;
        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Dims;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut dims = Vec::new();
                while dims.len() < MAX_RANK {
                    match seq.next_element()? {
                        Some(dim) => dims.push(dim),
                        None => return Ok(Dims(Some(dims))),
                    }
                }
                let mut beyond = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    beyond = true;
                }
                Ok(Dims((!beyond).then_some(dims)))
            }
        }
        deserializer.deserialize_seq(DimsVisitor)
    }
}

#[derive(Default)]
struct RawEntries {
    by_name: BTreeMap<String, RawEntry>,
    duplicate: Option<String>,
    too_many: bool,
}

impl<'de> Deserialize<'de> for RawEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = RawEntries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with one entry per tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEntries, A::Error> {
                let mut entries = RawEntries::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let entry = map
                        .next_value()
                        .map_err(|e| de::Error::custom(format_args!("tensor `{name}`: {e}")))?;
                    if entries.by_name.len() >= MAX_TENSORS {
                        entries.too_many = true;
                        continue;
                    }
                    match entries.by_name.entry(name) {
                        Entry::Vacant(place) => {
                            place.insert(entry);
                        }
                        Entry::Occupied(place) => {
                            entries.duplicate.get_or_insert_with(|| place.key().clone());
                        }
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(EntriesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data_len: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data_len, 0);
        bytes
    }

    fn refusal(header: &str, data_len: usize) -> String {
        parse_header(&file(header, data_len))
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn reads_types_shapes_and_ranges() {
        let header = r#"{"__metadata__":{"format":"mlx"},"b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]},"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]},"e":{"dtype":"I64","shape":[0],"data_offsets":[16,16]},"s":{"dtype":"BOOL","shape":[],"data_offsets":[16,17]}}"#;
        let bytes = file(header, 17);
        let parsed = parse_header(&bytes).unwrap();
        let start = bytes.len() - 17;
        let listed: Vec<_> = parsed
            .iter()
            .map(|(name, e)| {
                (
                    name.as_str(),
                    e.info.dtype,
                    e.info.shape.clone(),
                    e.range.clone(),
                )
            })
            .collect();
        assert_eq!(
            listed,
            vec![
                ("a", DType::F8E4M3, vec![4], start..start + 4),
                ("b", DType::F16, vec![2, 3], start + 4..start + 16),
                ("e", DType::I64, vec![0], start + 16..start + 16),
                ("s", DType::Bool, vec![], start + 16..start + 17),
            ]
        );
    }

    #[test]
    fn lengths_are_bounded() {
        assert_eq!(
            parse_header(b"abc").unwrap_err().to_string(),
            "expected a safetensors file, found only 3 bytes"
        );
        assert_eq!(
            parse_header(&u64::MAX.to_le_bytes())
                .unwrap_err()
                .to_string(),
            "expected a header of at most 33554432 bytes, found a length of 18446744073709551615"
        );
        assert_eq!(
            parse_header(&100u64.to_le_bytes()).unwrap_err().to_string(),
            "the header of 100 bytes does not fit into the file of 8 bytes (truncated download?)"
        );
    }

    #[test]
    fn hostile_entries_are_named() {
        let one = |entry: &str| refusal(&format!("{{\"x\":{entry}}}"), 8);
        let found = [
            one(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#),
            one(r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#),
            one(r#"{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]}"#),
            one(r#"{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}"#),
            one(r#"{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}"#),
            one(r#"{"dtype":"F4","shape":[2],"data_offsets":[0,1]}"#),
            one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,5]}"#),
            one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#),
            one(r#"{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}"#),
            one(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,12]}"#),
            one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#),
            one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#),
            one(r#"{"dtype":"F32","shape":"1","data_offsets":[0,4]}"#),
            one(r#"{"dtype":"F32","shape":[[[[[[[[[[1]]]]]]]]]],"data_offsets":[0,4]}"#),
            refusal("[]", 0),
            refusal("", 0),
        ]
        .join("\n");
        insta::assert_snapshot!(found, @r#"
        tensor `x` has dimension -1, expected a non-negative integer
        tensor `x` has dimension 1.5, expected a non-negative integer
        tensor `x` has dimension 1e+20, expected a non-negative integer
        tensor `x` of shape [4611686018427387904, 4] is larger than memory can address
        tensor `x` has more than 8 dimensions
        tensor `x` has element type `F4`, which is not supported
        tensor `x` needs 4 bytes, but its offsets 0..5 span 5
        tensor `x` needs 4 bytes, but its offsets 4..0 span 0
        tensor `x` has offset -4, expected a non-negative integer
        tensor `x` ends at offset 12, but the file holds 8 bytes of data (truncated download?)
        bytes 0..4 of the data belong to no tensor
        bytes 4..8 of the data belong to no tensor
        header: expected json: tensor `x`: invalid type: string "1", expected a list of dimensions at line 1 column 31
        header: expected json nested at most 8 deep, found more at byte 34
        header: expected json: invalid type: sequence, expected an object with one entry per tensor at line 1 column 0
        header: expected json: EOF while parsing a value at line 1 column 0
        "#);
    }

    #[test]
    fn duplicates_and_overlaps_name_both() {
        let entry = |a, b| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":[{a},{b}]}}"#);
        assert_eq!(
            refusal(
                &format!(r#"{{"x":{},"x":{}}}"#, entry(0, 4), entry(4, 8)),
                8
            ),
            "tensor `x` is listed twice"
        );
        assert_eq!(
            refusal(
                &format!(r#"{{"x":{},"y":{}}}"#, entry(0, 4), entry(2, 6)),
                8
            ),
            "tensors `x` and `y` overlap"
        );
    }
}
