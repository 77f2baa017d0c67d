//! Why a GGUF file was refused.

use super::meta::MetaType;

/// Why a GGUF file was refused, or a metadata value could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The file does not begin with `GGUF`.
    #[error("expected a gguf file, which begins with `GGUF`, found {found:?}")]
    Magic {
        /// The first bytes, as text.
        found: String,
    },
    /// The file was written for a big-endian machine.
    #[error(
        "expected a little-endian gguf file, found a big-endian one: convert it again for this machine"
    )]
    BigEndian,
    /// A version that this reader does not know.
    #[error("expected gguf version 2 or 3, found {found}")]
    Version {
        /// The version.
        found: u32,
    },
    /// The file ends too early.
    #[error(
        "the file ends inside {what}: {needed} bytes needed at byte {at}, {left} left (truncated download?)"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it starts.
        at: usize,
        /// Bytes it needs.
        needed: u64,
        /// Bytes that are there.
        left: usize,
    },
    /// A count or length beyond our limits.
    #[error("expected at most {limit} for {what}, found {found}")]
    Limit {
        /// What is counted.
        what: String,
        /// What the file says.
        found: u64,
        /// What is allowed.
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{what} is not utf-8")]
    Utf8 {
        /// Which text.
        what: String,
    },
    /// A metadata type number that does not exist.
    #[error("metadata `{key}` has the unknown type number {found}")]
    UnknownMetaType {
        /// The key.
        key: String,
        /// The number.
        found: u32,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("metadata `{key}` should be 0 or 1, found {found}")]
    NotABool {
        /// The key.
        key: String,
        /// The byte.
        found: u8,
    },
    /// One key twice.
    #[error("metadata `{key}` is there twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// An alignment that is none.
    #[error("expected `general.alignment` to be a power of two up to {limit}, found {found}")]
    Alignment {
        /// What the file says.
        found: u64,
        /// What is allowed.
        limit: u64,
    },
    /// An element type that this reader does not have.
    #[error(
        "tensor `{tensor}` has ggml type {name} ({id}), which is not supported; supported are {supported}"
    )]
    TensorType {
        /// The tensor.
        tensor: String,
        /// ggml's name.
        name: &'static str,
        /// ggml's number.
        id: u32,
        /// Our list.
        supported: String,
    },
    /// A shape that is none, or whose size overflows.
    #[error("tensor `{tensor}` has the shape {dims:?} (innermost first): {why}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its dimensions as the file has them.
        dims: Vec<u64>,
        /// What is wrong with them.
        why: String,
    },
    /// One tensor name twice.
    #[error("tensor `{tensor}` is there twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A tensor does not start on the alignment.
    #[error(
        "tensor `{tensor}` starts at offset {offset}, which is no multiple of the alignment {alignment}"
    )]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Its offset in the data.
        offset: u64,
        /// The alignment of the file.
        alignment: usize,
    },
    /// A tensor ends after the file.
    #[error(
        "tensor `{tensor}` needs {needed} bytes at offset {offset} of the data, but the file holds {available} (truncated download?)"
    )]
    OutsideFile {
        /// The tensor.
        tensor: String,
        /// Its offset in the data.
        offset: u64,
        /// Its size.
        needed: usize,
        /// Bytes of data in the file.
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
    /// The file does not say what it holds.
    #[error(
        "metadata `general.architecture` {what}: expected the name of the model's architecture, such as those that `mlxcel arch --json` lists under `gguf`"
    )]
    NoArchitecture {
        /// What there is in its place.
        what: &'static str,
    },
    /// A metadata value of another type than asked for.
    #[error("metadata `{key}` should be {expected}, found {found}")]
    WrongType {
        /// The key.
        key: String,
        /// What was asked for.
        expected: &'static str,
        /// What is there.
        found: MetaType,
    },
    /// A metadata number that does not fit the type asked for.
    #[error("metadata `{key}` should be {expected}, found {found}")]
    OutOfRange {
        /// The key.
        key: String,
        /// What was asked for.
        expected: &'static str,
        /// The number.
        found: String,
    },
    /// The files of a split GGUF do not belong together.
    #[error("split gguf: {why}")]
    Split {
        /// What is wrong.
        why: String,
    },
}
