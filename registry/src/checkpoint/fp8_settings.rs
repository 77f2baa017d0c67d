//! What a `quantization_config` of method `fp8` says of the weights.
//!
//! Owns the reading of its keys. Must not know tensors: see `fp8`.

use serde_json::Value;

use super::quant::{Foreign, QuantError};
use crate::shown;

/// Key of the modules that stay as they are.
pub(super) const SKIPPED: &str = "modules_to_not_convert";

/// What `quantization_config` says of the weights.
pub(super) struct Settings<'c> {
    pub block: Block,
    /// Modules that are not 8-bit.
    pub plain: Vec<&'c str>,
    pub scale_format: ScaleFormat,
}

/// Key of the form of scales.
pub(super) const SCALE_FORMAT: &str = "scale_fmt";

/// How scales are stored: transformers' `float` (DeepSeek-V3) and `ue8m0`, a power of two by its exponent
/// (DeepSeek-V3.1 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleFormat {
    /// As their type says.
    Unsaid,
    Float,
    /// As a byte, or as floats that are powers of two.
    Exponent,
}

/// What a scale covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    /// So many rows and columns.
    Of([usize; 2]),
    /// A matrix: the size is null.
    Matrix,
    /// The size is not given. It is transformers' default, unless there is only one scale a matrix.
    Unsaid,
}

/// Rows and columns of a block where the configuration says nothing (`FineGrainedFP8Config`).
pub(super) const DEFAULT_BLOCK: [usize; 2] = [128, 128];

impl<'c> Settings<'c> {
    pub(super) fn read(described: &'c Foreign) -> Result<Self, QuantError> {
        // Activations stay as they are, so that their scheme changes nothing; a wrong one shows that
        // something else is meant.
        words(
            described,
            "activation_scheme",
            &["dynamic", "static"],
            "dynamic or static",
        )?;
        words(
            described,
            "fmt",
            &["e4m3", "e4m3fn", "float8_e4m3fn"],
            "e4m3",
        )?;
        words(described, "expert_dtype", &["fp8", "fp4"], "fp8 or fp4")?;
        let plain = names(described, SKIPPED)?;
        let plain = match plain.is_empty() {
            true => names(described, "ignored_layers")?,
            false => plain,
        };
        Ok(Self {
            block: read_block(described)?,
            plain,
            scale_format: read_scale_format(described)?,
        })
    }
}

fn wrong(described: &Foreign, key: &str, expected: &'static str) -> QuantError {
    let found = described.settings.get(key);
    QuantError::Key {
        place: described.place.clone(),
        key: key.to_owned(),
        expected,
        found: found.map_or_else(|| "nothing".to_owned(), shown),
    }
}

/// Checks that a setting, if it is there, is one of `known` words in any case.
fn words(
    described: &Foreign,
    key: &str,
    known: &[&str],
    expected: &'static str,
) -> Result<(), QuantError> {
    match described.settings.get(key) {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(word)) if known.contains(&word.to_ascii_lowercase().as_str()) => Ok(()),
        Some(_) => Err(wrong(described, key, expected)),
    }
}

fn names<'c>(described: &'c Foreign, key: &str) -> Result<Vec<&'c str>, QuantError> {
    match described.settings.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(value) => {
            let list = value.as_array();
            let list = list.and_then(|list| list.iter().map(Value::as_str).collect());
            list.ok_or_else(|| wrong(described, key, "null or a list of module names"))
        }
    }
}

fn read_scale_format(described: &Foreign) -> Result<ScaleFormat, QuantError> {
    words(
        described,
        SCALE_FORMAT,
        &["float", "ue8m0"],
        "float or ue8m0",
    )?;
    let word = described.settings.get(SCALE_FORMAT).and_then(Value::as_str);
    Ok(match word.map(str::to_ascii_lowercase).as_deref() {
        None => ScaleFormat::Unsaid,
        Some("float") => ScaleFormat::Float,
        Some(_) => ScaleFormat::Exponent,
    })
}

fn read_block(described: &Foreign) -> Result<Block, QuantError> {
    let key = "weight_block_size";
    let value = match described.settings.get(key) {
        None => return Ok(Block::Unsaid),
        Some(Value::Null) => return Ok(Block::Matrix),
        Some(value) => value,
    };
    let size = |value: &Value| {
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.filter(|n| (1..=1 << 20).contains(n))
    };
    if let Some([rows, columns]) = value.as_array().map(Vec::as_slice)
        && let (Some(rows), Some(columns)) = (size(rows), size(columns))
    {
        return Ok(Block::Of([rows, columns]));
    }
    Err(wrong(
        described,
        key,
        "null or a list of two positive integers",
    ))
}
