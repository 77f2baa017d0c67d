//! A GGUF checkpoint on disk: one file, or the parts of a split one as if they were one.
//!
//! Owns the mapped files and the lookup of tensors and metadata by name. Must not know what a family
//! makes of them.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::GgufError;
use super::header::{GgufHeader, GgufTensor, parse_header};
use super::meta::MetaValue;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::map::MappedFile;

/// What says which architecture a file is of.
const ARCHITECTURE: &str = "general.architecture";

/// Parts a split file may have.
const MAX_PARTS: u64 = 4096;

#[derive(Debug)]
struct Part {
    file: Arc<MappedFile>,
    header: GgufHeader,
}

/// An opened GGUF checkpoint.
#[derive(Debug)]
pub struct GgufFile {
    parts: Vec<Part>,
    /// Tensor name to part and place in its list.
    by_name: BTreeMap<String, (usize, usize)>,
}

impl GgufFile {
    /// Opens a file and, when it is part of a split checkpoint, all its other parts.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let part = open_part(path)?;
        let count = part
            .split_number("split.count")
            .map_err(|e| gguf(path, e))?
            .unwrap_or(1);
        let parts = if count > 1 {
            open_parts(path, count)?
        } else {
            vec![part]
        };

        let mut by_name = BTreeMap::new();
        for (number, part) in parts.iter().enumerate() {
            for (place, tensor) in part.header.tensors().iter().enumerate() {
                if by_name
                    .insert(tensor.name.clone(), (number, place))
                    .is_some()
                {
                    let error = GgufError::DuplicateTensor {
                        tensor: tensor.name.clone(),
                    };
                    return Err(gguf(part.file.path(), error));
                }
            }
        }
        let file = GgufFile { parts, by_name };
        file.check_tensor_count().map_err(|e| gguf(path, e))?;
        Ok(file)
    }

    fn check_tensor_count(&self) -> Result<(), GgufError> {
        let expected = match self.meta("split.tensors.count")? {
            Some(MetaValue::Unsigned(n, _)) => i128::from(n),
            Some(MetaValue::Signed(n, _)) => i128::from(n),
            _ => return Ok(()),
        };
        if self.parts.len() > 1 && expected != self.by_name.len() as i128 {
            let found = self.by_name.len();
            let why = format!("expected {expected} tensors in all parts, found {found}");
            return Err(GgufError::Split { why });
        }
        Ok(())
    }

    /// Path of the file, or of the first part.
    pub fn path(&self) -> &Path {
        self.parts
            .first()
            .map_or(Path::new(""), |part| part.file.path())
    }

    /// Paths of all parts.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| part.file.path())
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &GgufTensor> {
        self.by_name.keys().filter_map(|name| self.tensor(name))
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        let (part, place) = *self.by_name.get(name)?;
        self.parts.get(part)?.header.tensors().get(place)
    }

    /// The file that holds a tensor, and where.
    pub(super) fn place(&self, name: &str) -> Option<(&Arc<MappedFile>, Range<usize>)> {
        let (part, _) = *self.by_name.get(name)?;
        Some((
            &self.parts.get(part)?.file,
            self.tensor(name)?.range.clone(),
        ))
    }

    /// All metadata keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.parts
            .first()
            .into_iter()
            .flat_map(|part| part.header.keys())
    }

    /// A metadata value of any type.
    pub fn meta(&self, key: &str) -> Result<Option<MetaValue<'_>>, GgufError> {
        match self.parts.first() {
            Some(part) => part.header.value(part.file.bytes(), key),
            None => Ok(None),
        }
    }

    /// The architecture that the file says it is of, which it has to.
    pub fn architecture(&self) -> Result<&str, CheckpointError> {
        let name = self
            .str(ARCHITECTURE)
            .map_err(|error| gguf(self.path(), error))?;
        let missing = |what| gguf(self.path(), GgufError::NoArchitecture { what });
        match name {
            None => Err(missing("is missing")),
            Some("") => Err(missing("is empty")),
            Some(name) => Ok(name),
        }
    }

    /// Text, for example `general.name` or `tokenizer.chat_template`.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.meta(key)?.map(|value| value.as_str(key)).transpose()
    }

    /// An integer of any type that fits, for example `tokenizer.ggml.eos_token_id`.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.meta(key)?.map(|value| value.as_u32(key)).transpose()
    }

    /// A float.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.meta(key)?.map(|value| value.as_f32(key)).transpose()
    }

    /// A boolean, for example `tokenizer.ggml.add_bos_token`.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.meta(key)?.map(|value| value.as_bool(key)).transpose()
    }

    /// A list of text, for example `tokenizer.ggml.tokens`.
    pub fn strs(&self, key: &str) -> Result<Option<Vec<&str>>, GgufError> {
        self.meta(key)?
            .map(|value| value.as_array(key)?.strs())
            .transpose()
    }

    /// A list of integers, for example `tokenizer.ggml.token_type`.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, GgufError> {
        self.meta(key)?
            .map(|value| value.as_array(key)?.i32s())
            .transpose()
    }

    /// A list of floats, for example `tokenizer.ggml.scores`.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        self.meta(key)?
            .map(|value| value.as_array(key)?.f32s())
            .transpose()
    }
}

impl Part {
    fn split_number(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.header
            .value(self.file.bytes(), key)?
            .map(|value| value.as_u32(key))
            .transpose()
    }
}

fn open_part(path: &Path) -> Result<Part, CheckpointError> {
    let file = MappedFile::open(path).map_err(|source| CheckpointError::Io {
        path: path.to_owned(),
        source,
    })?;
    let header = parse_header(file.bytes()).map_err(|error| gguf(path, error))?;
    Ok(Part {
        file: Arc::new(file),
        header,
    })
}

fn open_parts(path: &Path, count: u32) -> Result<Vec<Part>, CheckpointError> {
    if u64::from(count) > MAX_PARTS {
        let what = "the number of parts".to_owned();
        let (found, limit) = (count.into(), MAX_PARTS);
        return Err(gguf(path, GgufError::Limit { what, found, limit }));
    }
    let split = |path: &Path, why: String| gguf(path, GgufError::Split { why });
    let Some(stem) = split_stem(path, count) else {
        let why = format!(
            "the file is one of {count} parts, so its name must end in -<number>-of-{count:05}.gguf"
        );
        return Err(split(path, why));
    };
    let mut parts = Vec::new();
    for number in 0..count {
        let path = stem.with_file_name(part_name(&stem, number, count));
        let part = match open_part(&path) {
            Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                let required_by = format!("the checkpoint has {count} parts");
                return Err(CheckpointError::MissingShard {
                    shard: path,
                    required_by,
                });
            }
            other => other?,
        };
        let own = part.split_number("split.no").map_err(|e| gguf(&path, e))?;
        let own_count = part
            .split_number("split.count")
            .map_err(|e| gguf(&path, e))?;
        if own != Some(number) || own_count != Some(count) {
            let word = |n: Option<u32>| n.map_or("none".to_owned(), |n| n.to_string());
            let why = format!(
                "expected split.no {number} and split.count {count}, found {} and {}",
                word(own),
                word(own_count)
            );
            return Err(split(&path, why));
        }
        parts.push(part);
    }
    Ok(parts)
}

/// Path without `-<number>-of-<count>.gguf`.
fn split_stem(path: &Path, count: u32) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let rest = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, number) = rest.rsplit_once('-')?;
    let is_number = number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| path.with_file_name(stem))
}

fn part_name(stem: &Path, number: u32, count: u32) -> String {
    let stem = stem
        .file_name()
        .map(|name| name.to_string_lossy())
        .unwrap_or_default();
    format!("{stem}-{:05}-of-{count:05}.gguf", number + 1)
}

fn gguf(path: &Path, source: GgufError) -> CheckpointError {
    CheckpointError::Gguf {
        path: path.to_owned(),
        source: Box::new(source),
    }
}
