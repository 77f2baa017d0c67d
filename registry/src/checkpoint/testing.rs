//! Builders of tiny checkpoint files, for tests of this crate and of those that stand on it.
//!
//! They write what they are told, so that a test can also write what is wrong.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::dtype::DType;
use super::gguf::{GgmlType, MetaType};

/// Writes a safetensors file in memory.
#[derive(Debug, Default, Clone)]
pub struct SafetensorsBuilder {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl SafetensorsBuilder {
    /// A file without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor of any type from its bytes.
    #[must_use]
    pub fn tensor(mut self, name: &str, dtype: DType, shape: &[usize], bytes: &[u8]) -> Self {
        let start = self.data.len();
        self.data.extend_from_slice(bytes);
        let entry = json!({
            "dtype": dtype.name(), "shape": shape, "data_offsets": [start, self.data.len()]
        });
        self.header.insert(name.to_owned(), entry);
        self
    }

    /// Adds an `F32` tensor.
    #[must_use]
    pub fn f32(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.tensor(name, DType::F32, shape, &bytes)
    }

    /// Adds a `U32` tensor, as packed codes are.
    #[must_use]
    pub fn u32(self, name: &str, shape: &[usize], values: &[u32]) -> Self {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.tensor(name, DType::U32, shape, &bytes)
    }

    /// The file, with the header padded so that the data is aligned to 8.
    pub fn build(self) -> Vec<u8> {
        let mut header = Value::Object(self.header).to_string();
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(&self.data);
        file
    }
}

#[derive(Debug, Clone)]
struct GgufEntry {
    name: String,
    type_id: u32,
    /// Innermost first, as in the file.
    dims: Vec<u64>,
    bytes: Vec<u8>,
}

/// Writes a GGUF file in memory.
#[derive(Debug, Clone)]
pub struct GgufBuilder {
    version: u32,
    alignment: usize,
    meta_count: u64,
    meta: Vec<u8>,
    tensors: Vec<GgufEntry>,
}

impl Default for GgufBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufBuilder {
    /// A file of version 3 without metadata and tensors.
    pub fn new() -> Self {
        GgufBuilder {
            version: 3,
            alignment: 32,
            meta_count: 0,
            meta: Vec::new(),
            tensors: Vec::new(),
        }
    }

    /// Sets the version.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets `general.alignment` and aligns by it.
    #[must_use]
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = usize::try_from(alignment).unwrap_or(1).max(1);
        self.u32("general.alignment", alignment)
    }

    /// Adds a metadata value from its type number and bytes.
    #[must_use]
    pub fn raw(mut self, key: &str, type_number: u32, value: &[u8]) -> Self {
        self.meta_count += 1;
        self.meta.extend_from_slice(&text(key));
        self.meta.extend_from_slice(&type_number.to_le_bytes());
        self.meta.extend_from_slice(value);
        self
    }

    /// Adds text.
    #[must_use]
    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, MetaType::Str.number(), &text(value))
    }

    /// Adds an unsigned integer.
    #[must_use]
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, MetaType::U32.number(), &value.to_le_bytes())
    }

    /// Adds an unsigned 16-bit integer.
    #[must_use]
    pub fn u16(self, key: &str, value: u16) -> Self {
        self.raw(key, MetaType::U16.number(), &value.to_le_bytes())
    }

    /// Adds a signed integer.
    #[must_use]
    pub fn i32(self, key: &str, value: i32) -> Self {
        self.raw(key, MetaType::I32.number(), &value.to_le_bytes())
    }

    /// Adds a float.
    #[must_use]
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, MetaType::F32.number(), &value.to_le_bytes())
    }

    /// Adds a boolean.
    #[must_use]
    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, MetaType::Bool.number(), &[u8::from(value)])
    }

    /// Adds an array from its element type and the bytes of its elements.
    #[must_use]
    pub fn array(self, key: &str, element: MetaType, len: u64, elements: &[u8]) -> Self {
        let mut value = element.number().to_le_bytes().to_vec();
        value.extend_from_slice(&len.to_le_bytes());
        value.extend_from_slice(elements);
        self.raw(key, MetaType::Array.number(), &value)
    }

    /// Adds a list of text.
    #[must_use]
    pub fn strs(self, key: &str, values: &[&str]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| text(value)).collect();
        self.array(key, MetaType::Str, values.len() as u64, &bytes)
    }

    /// Adds a list of integers.
    #[must_use]
    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.array(key, MetaType::I32, values.len() as u64, &bytes)
    }

    /// Adds a list of floats.
    #[must_use]
    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.array(key, MetaType::F32, values.len() as u64, &bytes)
    }

    /// Adds a tensor of row-major `shape` from its blocks.
    #[must_use]
    pub fn tensor(self, name: &str, ty: GgmlType, shape: &[usize], bytes: &[u8]) -> Self {
        let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
        self.raw_tensor(name, ty.id(), &dims, bytes)
    }

    /// Adds an `F32` tensor of row-major `shape`.
    #[must_use]
    pub fn f32_tensor(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.tensor(name, GgmlType::F32, shape, &bytes)
    }

    /// Adds a tensor from its type number and its dimensions, innermost first.
    #[must_use]
    pub fn raw_tensor(mut self, name: &str, type_id: u32, dims: &[u64], bytes: &[u8]) -> Self {
        self.tensors.push(GgufEntry {
            name: name.to_owned(),
            type_id,
            dims: dims.to_vec(),
            bytes: bytes.to_vec(),
        });
        self
    }

    /// The file, with every tensor at the next aligned offset.
    pub fn build(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend_from_slice(&self.version.to_le_bytes());
        file.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        file.extend_from_slice(&self.meta_count.to_le_bytes());
        file.extend_from_slice(&self.meta);
        let mut data = Vec::new();
        for tensor in &self.tensors {
            file.extend_from_slice(&text(&tensor.name));
            file.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                file.extend_from_slice(&dim.to_le_bytes());
            }
            file.extend_from_slice(&tensor.type_id.to_le_bytes());
            file.extend_from_slice(&(data.len() as u64).to_le_bytes());
            data.extend_from_slice(&tensor.bytes);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend_from_slice(&data);
        file
    }
}

fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(value.as_bytes());
    bytes
}

/// A directory that is removed when this is dropped. A file that cannot be written panics: this is
/// for tests.
#[derive(Debug)]
pub struct TempCheckpoint {
    dir: tempfile::TempDir,
}

impl Default for TempCheckpoint {
    fn default() -> Self {
        Self::new()
    }
}

#[expect(clippy::expect_used, reason = "used by tests only")]
impl TempCheckpoint {
    /// An empty directory.
    pub fn new() -> Self {
        TempCheckpoint {
            dir: tempfile::tempdir().expect("a temporary directory"),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Path of a file in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file.
    #[must_use]
    pub fn file(self, name: &str, bytes: &[u8]) -> Self {
        std::fs::write(self.join(name), bytes).expect("a writable temporary directory");
        self
    }

    /// Writes a JSON file.
    #[must_use]
    pub fn json(self, name: &str, value: &Value) -> Self {
        self.file(name, value.to_string().as_bytes())
    }
}
