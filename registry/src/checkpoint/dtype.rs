//! Element types of tensors and what is known of a tensor from headers alone.
//!
//! Owns the list of types that a checkpoint may hold. Must not know any file format.

use std::fmt;
use std::str::FromStr;

/// Element type of a tensor, spelled as safetensors spells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer, also the carrier of packed quantised codes.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// 8-bit float with 4 exponent bits; the bytes are handed out as they are.
    F8E4M3,
    /// 8-bit float with 5 exponent bits; the bytes are handed out as they are.
    F8E5M2,
    /// 8-bit power-of-two scale; the bytes are handed out as they are.
    F8E8M0,
}

impl DType {
    /// Every type, in declaration order.
    pub const ALL: [DType; 16] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::U16,
        DType::I16,
        DType::U32,
        DType::I32,
        DType::U64,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::F8E8M0,
    ];

    /// The safetensors spelling.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "BOOL",
            DType::U8 => "U8",
            DType::I8 => "I8",
            DType::U16 => "U16",
            DType::I16 => "I16",
            DType::U32 => "U32",
            DType::I32 => "I32",
            DType::U64 => "U64",
            DType::I64 => "I64",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::F32 => "F32",
            DType::F64 => "F64",
            DType::F8E4M3 => "F8_E4M3",
            DType::F8E5M2 => "F8_E5M2",
            DType::F8E8M0 => "F8_E8M0",
        }
    }

    /// Bytes of one element, which is also the alignment it needs.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::I8 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => {
                1
            }
            DType::U16 | DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 => 8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A type name that is none of [`DType::ALL`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown element type `{0}`")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        DType::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

/// What the headers say of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type. [`Checkpoint::load`](super::Checkpoint::load) may hand out `F32` where this says
    /// `F16` when [`may_widen`](Self::may_widen) is set.
    pub dtype: DType,
    /// Row-major shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Bytes of the whole tensor in `dtype`.
    pub byte_len: usize,
    /// The values are made from GGUF blocks, and a value beyond the range of `F16` (seen only when the
    /// bytes are read) makes the whole tensor `F32`.
    pub may_widen: bool,
}

impl TensorInfo {
    /// Info of a plain tensor, or `None` when the size overflows.
    pub fn new(dtype: DType, shape: Vec<usize>) -> Option<Self> {
        let byte_len = element_count(&shape)?.checked_mul(dtype.size_bytes())?;
        isize::try_from(byte_len).ok()?;
        Some(TensorInfo {
            dtype,
            shape,
            byte_len,
            may_widen: false,
        })
    }
}

/// Number of elements of a shape, or `None` on overflow.
pub fn element_count(shape: &[usize]) -> Option<usize> {
    shape
        .iter()
        .try_fold(1usize, |count, &dim| count.checked_mul(dim))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        assert_eq!("F4".parse::<DType>(), Err(UnknownDType("F4".to_owned())));
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        assert_eq!(
            TensorInfo::new(DType::F32, vec![]).map(|i| i.byte_len),
            Some(4)
        );
        assert_eq!(
            TensorInfo::new(DType::F32, vec![3, 0]).map(|i| i.byte_len),
            Some(0)
        );
        assert_eq!(TensorInfo::new(DType::F32, vec![usize::MAX, 2]), None);
        assert_eq!(TensorInfo::new(DType::F64, vec![1 << 60, 1]), None);
    }
}
