//! The element types of ggml: number, name and block geometry.
//!
//! Owns what the GGUF header needs to know of a type. Must not know how a block is decoded.

use std::fmt;

/// A ggml element type that this reader can turn into numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types, reason = "the names are ggml's own")]
pub enum GgmlType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// 4 bits, scale per 32.
    Q4_0,
    /// 4 bits, scale and minimum per 32.
    Q4_1,
    /// 5 bits, scale per 32.
    Q5_0,
    /// 5 bits, scale and minimum per 32.
    Q5_1,
    /// 8 bits, scale per 32.
    Q8_0,
    /// 2 bits, 4-bit scale and minimum per 16, in blocks of 256.
    Q2_K,
    /// 3 bits, 6-bit scale per 16, in blocks of 256.
    Q3_K,
    /// 4 bits, 6-bit scale and minimum per 32, in blocks of 256.
    Q4_K,
    /// 5 bits, 6-bit scale and minimum per 32, in blocks of 256.
    Q5_K,
    /// 6 bits, 8-bit scale per 16, in blocks of 256.
    Q6_K,
}

impl GgmlType {
    /// Every supported type.
    pub const ALL: [GgmlType; 13] = [
        GgmlType::F32,
        GgmlType::F16,
        GgmlType::BF16,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q2_K,
        GgmlType::Q3_K,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
        GgmlType::Q6_K,
    ];

    /// Number in the file, elements and bytes of a block (ggml's `ggml_type` and block structs).
    const fn layout(self) -> (u32, usize, usize) {
        match self {
            GgmlType::F32 => (0, 1, 4),
            GgmlType::F16 => (1, 1, 2),
            GgmlType::BF16 => (30, 1, 2),
            GgmlType::Q4_0 => (2, 32, 2 + 16),
            GgmlType::Q4_1 => (3, 32, 2 + 2 + 16),
            GgmlType::Q5_0 => (6, 32, 2 + 4 + 16),
            GgmlType::Q5_1 => (7, 32, 2 + 2 + 4 + 16),
            GgmlType::Q8_0 => (8, 32, 2 + 32),
            GgmlType::Q2_K => (10, 256, 16 + 64 + 2 + 2),
            GgmlType::Q3_K => (11, 256, 32 + 64 + 12 + 2),
            GgmlType::Q4_K => (12, 256, 2 + 2 + 12 + 128),
            GgmlType::Q5_K => (13, 256, 2 + 2 + 12 + 32 + 128),
            GgmlType::Q6_K => (14, 256, 128 + 64 + 16 + 2),
        }
    }

    /// The number in the file.
    pub const fn id(self) -> u32 {
        self.layout().0
    }

    /// Elements of a block; a row is a whole number of blocks.
    pub const fn block_elements(self) -> usize {
        self.layout().1
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        self.layout().2
    }

    /// The type with this number, if supported.
    pub fn from_id(id: u32) -> Option<Self> {
        GgmlType::ALL.into_iter().find(|ty| ty.id() == id)
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// ggml's name of any type number, for messages about types that are not supported.
pub fn type_name(id: u32) -> &'static str {
    match id {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        4 => "Q4_2 (removed from ggml)",
        5 => "Q4_3 (removed from ggml)",
        6 => "Q5_0",
        7 => "Q5_1",
        8 => "Q8_0",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        30 => "BF16",
        31..=33 => "Q4_0 in a removed interleaved layout",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36..=38 => "IQ4_NL in a removed interleaved layout",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_names_and_types_agree() {
        for ty in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(ty.id()), Some(ty));
            assert_eq!(type_name(ty.id()), ty.to_string());
        }
        assert_eq!(GgmlType::from_id(39), None);
        assert_eq!(type_name(99), "unknown");
    }
}
