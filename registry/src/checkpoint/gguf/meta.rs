//! Typed metadata of a GGUF file.
//!
//! Values stay in the file and are decoded when asked for: a vocabulary of 256k strings costs nothing
//! until a tokenizer wants it. Owns the value types. Must not know which keys there are.

use std::fmt;
use std::ops::Range;

use super::cursor::Cursor;
use super::error::GgufError;

/// Bytes a string value may have.
pub(super) const MAX_STRING_BYTES: u64 = 64 << 20;
/// Elements an array may have.
const MAX_ARRAY_LEN: u64 = 1 << 26;
/// How deep arrays may be nested.
const MAX_NESTING: usize = 4;

/// Type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaType {
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// Single precision.
    F32,
    /// One byte, 0 or 1.
    Bool,
    /// UTF-8 text.
    Str,
    /// A list of values of one type.
    Array,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// Double precision.
    F64,
}

impl MetaType {
    /// In the order of their numbers in the file.
    const BY_NUMBER: [MetaType; 13] = [
        MetaType::U8,
        MetaType::I8,
        MetaType::U16,
        MetaType::I16,
        MetaType::U32,
        MetaType::I32,
        MetaType::F32,
        MetaType::Bool,
        MetaType::Str,
        MetaType::Array,
        MetaType::U64,
        MetaType::I64,
        MetaType::F64,
    ];

    /// The number in the file.
    pub fn number(self) -> u32 {
        self as u32
    }

    fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, GgufError> {
        let found = cursor.u32("a metadata type")?;
        usize::try_from(found)
            .ok()
            .and_then(|number| MetaType::BY_NUMBER.get(number).copied())
            .ok_or_else(|| GgufError::UnknownMetaType {
                key: key.to_owned(),
                found,
            })
    }

    /// Bytes of a scalar; `None` for strings and arrays.
    fn size_bytes(self) -> Option<u64> {
        match self {
            MetaType::U8 | MetaType::I8 | MetaType::Bool => Some(1),
            MetaType::U16 | MetaType::I16 => Some(2),
            MetaType::U32 | MetaType::I32 | MetaType::F32 => Some(4),
            MetaType::U64 | MetaType::I64 | MetaType::F64 => Some(8),
            MetaType::Str | MetaType::Array => None,
        }
    }
}

impl fmt::Display for MetaType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MetaType::U8 => "u8",
            MetaType::I8 => "i8",
            MetaType::U16 => "u16",
            MetaType::I16 => "i16",
            MetaType::U32 => "u32",
            MetaType::I32 => "i32",
            MetaType::F32 => "f32",
            MetaType::Bool => "bool",
            MetaType::Str => "a string",
            MetaType::Array => "an array",
            MetaType::U64 => "u64",
            MetaType::I64 => "i64",
            MetaType::F64 => "f64",
        })
    }
}

/// Where a value is in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    ty: MetaType,
    /// Bytes of the scalar, of the text without its length, or of the elements of the array.
    range: Range<usize>,
    /// Element type and count of an array.
    elements: Option<(MetaType, usize)>,
}

impl Slot {
    /// Steps over a type and a value of it.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, GgufError> {
        let ty = MetaType::read(cursor, key)?;
        Self::value(cursor, key, ty, 0)
    }

    fn value(
        cursor: &mut Cursor<'_>,
        key: &str,
        ty: MetaType,
        nesting: usize,
    ) -> Result<Self, GgufError> {
        let what = format_args!("the value of metadata `{key}`");
        if let Some(size) = ty.size_bytes() {
            return Ok(Slot {
                ty,
                range: cursor.skip(size, what)?,
                elements: None,
            });
        }
        if ty == MetaType::Str {
            let range = cursor.string(MAX_STRING_BYTES, what)?;
            return Ok(Slot {
                ty,
                range,
                elements: None,
            });
        }
        if nesting == MAX_NESTING {
            let what = format!("the nesting of metadata `{key}`");
            let (found, limit) = (nesting as u64 + 1, MAX_NESTING as u64);
            return Err(GgufError::Limit { what, found, limit });
        }
        let element = MetaType::read(cursor, key)?;
        let len = cursor.u64(what)?;
        if len > MAX_ARRAY_LEN {
            let what = format!("the number of elements of metadata `{key}`");
            return Err(GgufError::Limit {
                what,
                found: len,
                limit: MAX_ARRAY_LEN,
            });
        }
        let start = cursor.at();
        match element.size_bytes() {
            Some(size) => {
                cursor.skip(len * size, what)?;
            }
            // Each element takes at least eight bytes of the file, so this ends with the file.
            None => {
                for _ in 0..len {
                    Self::value(cursor, key, element, nesting + 1)?;
                }
            }
        }
        let count = usize::try_from(len).unwrap_or(usize::MAX);
        Ok(Slot {
            ty,
            range: start..cursor.at(),
            elements: Some((element, count)),
        })
    }

    /// Decodes the value from the file it was read from.
    pub(super) fn decode<'a>(
        &self,
        file: &'a [u8],
        key: &'a str,
    ) -> Result<MetaValue<'a>, GgufError> {
        let bytes = file.get(self.range.clone()).unwrap_or(&[]);
        match self.elements {
            Some((element, len)) => Ok(MetaValue::Array(MetaArray {
                key,
                element,
                len,
                bytes,
            })),
            None => scalar(self.ty, bytes, key),
        }
    }
}

/// A metadata value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetaValue<'a> {
    /// Any of the unsigned integers, with its type in the file.
    Unsigned(u64, MetaType),
    /// Any of the signed integers, with its type in the file.
    Signed(i64, MetaType),
    /// Single precision.
    F32(f32),
    /// Double precision.
    F64(f64),
    /// Boolean.
    Bool(bool),
    /// Text.
    Str(&'a str),
    /// A list.
    Array(MetaArray<'a>),
}

impl<'a> MetaValue<'a> {
    /// The type in the file.
    pub fn ty(&self) -> MetaType {
        match self {
            MetaValue::Unsigned(_, ty) | MetaValue::Signed(_, ty) => *ty,
            MetaValue::F32(_) => MetaType::F32,
            MetaValue::F64(_) => MetaType::F64,
            MetaValue::Bool(_) => MetaType::Bool,
            MetaValue::Str(_) => MetaType::Str,
            MetaValue::Array(_) => MetaType::Array,
        }
    }

    fn integer(&self, key: &str, expected: &'static str) -> Result<i128, GgufError> {
        match self {
            MetaValue::Unsigned(n, _) => Ok(i128::from(*n)),
            MetaValue::Signed(n, _) => Ok(i128::from(*n)),
            other => Err(other.wrong(key, expected)),
        }
    }

    pub(super) fn as_u32(&self, key: &str) -> Result<u32, GgufError> {
        let n = self.integer(key, "an unsigned integer")?;
        u32::try_from(n).map_err(|_| out_of_range(key, "a u32", n))
    }

    fn as_i32(&self, key: &str) -> Result<i32, GgufError> {
        let n = self.integer(key, "an integer")?;
        i32::try_from(n).map_err(|_| out_of_range(key, "an i32", n))
    }

    pub(super) fn as_f32(&self, key: &str) -> Result<f32, GgufError> {
        match self {
            MetaValue::F32(x) => Ok(*x),
            MetaValue::F64(x) => Ok(*x as f32),
            other => Err(other.wrong(key, "a float")),
        }
    }

    pub(super) fn as_bool(&self, key: &str) -> Result<bool, GgufError> {
        match self {
            MetaValue::Bool(x) => Ok(*x),
            other => Err(other.wrong(key, "a bool")),
        }
    }

    pub(super) fn as_str(&self, key: &str) -> Result<&'a str, GgufError> {
        match self {
            MetaValue::Str(x) => Ok(x),
            other => Err(other.wrong(key, "a string")),
        }
    }

    pub(super) fn as_array(&self, key: &str) -> Result<MetaArray<'a>, GgufError> {
        match self {
            MetaValue::Array(array) => Ok(*array),
            other => Err(other.wrong(key, "an array")),
        }
    }

    fn wrong(&self, key: &str, expected: &'static str) -> GgufError {
        GgufError::WrongType {
            key: key.to_owned(),
            expected,
            found: self.ty(),
        }
    }
}

fn out_of_range(key: &str, expected: &'static str, found: i128) -> GgufError {
    GgufError::OutOfRange {
        key: key.to_owned(),
        expected,
        found: found.to_string(),
    }
}

/// A list of metadata values of one type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MetaArray<'a> {
    key: &'a str,
    element: MetaType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> MetaArray<'a> {
    /// Type of the elements.
    pub fn element(&self) -> MetaType {
        self.element
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements one by one.
    pub fn values(&self) -> impl Iterator<Item = Result<MetaValue<'a>, GgufError>> + use<'a> {
        let MetaArray {
            key,
            element,
            len,
            bytes,
        } = *self;
        let mut cursor = Cursor::new(bytes);
        (0..len).map(move |_| Slot::value(&mut cursor, key, element, 1)?.decode(bytes, key))
    }

    /// All elements as text.
    pub fn strs(&self) -> Result<Vec<&'a str>, GgufError> {
        self.values().map(|value| value?.as_str(self.key)).collect()
    }

    /// All elements as 32-bit integers; other integer types are converted where they fit.
    pub fn i32s(&self) -> Result<Vec<i32>, GgufError> {
        self.values().map(|value| value?.as_i32(self.key)).collect()
    }

    /// All elements as single precision.
    pub fn f32s(&self) -> Result<Vec<f32>, GgufError> {
        self.values().map(|value| value?.as_f32(self.key)).collect()
    }
}

fn scalar<'a>(ty: MetaType, bytes: &'a [u8], key: &str) -> Result<MetaValue<'a>, GgufError> {
    fn le<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes.first_chunk::<N>().copied().unwrap_or([0; N])
    }
    Ok(match ty {
        MetaType::U8 => MetaValue::Unsigned(u8::from_le_bytes(le(bytes)).into(), ty),
        MetaType::U16 => MetaValue::Unsigned(u16::from_le_bytes(le(bytes)).into(), ty),
        MetaType::U32 => MetaValue::Unsigned(u32::from_le_bytes(le(bytes)).into(), ty),
        MetaType::U64 => MetaValue::Unsigned(u64::from_le_bytes(le(bytes)), ty),
        MetaType::I8 => MetaValue::Signed(i8::from_le_bytes(le(bytes)).into(), ty),
        MetaType::I16 => MetaValue::Signed(i16::from_le_bytes(le(bytes)).into(), ty),
        MetaType::I32 => MetaValue::Signed(i32::from_le_bytes(le(bytes)).into(), ty),
        MetaType::I64 => MetaValue::Signed(i64::from_le_bytes(le(bytes)), ty),
        MetaType::F32 => MetaValue::F32(f32::from_le_bytes(le(bytes))),
        MetaType::F64 => MetaValue::F64(f64::from_le_bytes(le(bytes))),
        MetaType::Bool => match le(bytes) {
            [0] => MetaValue::Bool(false),
            [1] => MetaValue::Bool(true),
            [found] => {
                return Err(GgufError::NotABool {
                    key: key.to_owned(),
                    found,
                });
            }
        },
        MetaType::Str => {
            let what = || format!("the text of metadata `{key}`");
            MetaValue::Str(
                std::str::from_utf8(bytes).map_err(|_| GgufError::Utf8 { what: what() })?,
            )
        }
        // Arrays have a slot with elements and never come here.
        MetaType::Array => MetaValue::Array(MetaArray {
            key: "",
            element: ty,
            len: 0,
            bytes: &[],
        }),
    })
}
