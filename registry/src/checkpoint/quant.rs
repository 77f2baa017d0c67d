//! MLX's description of quantised weights in `config.json`: one global spec and overrides by path.
//!
//! Owns the reading of `quantization`. Must not know tensors: see `quant_check`.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::json::kind;
use crate::{quoted, shown};

/// How the codes of a group become numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QuantMode {
    /// `scale * code + bias`, a scale and a bias per group.
    Affine,
    /// `scale * (code - 2^(bits - 1))`, a scale per group. No mode of MLX's: made of GGUF for backends that take it.
    Centred,
    /// 4-bit E2M1 codes, an E8M0 scale per 32.
    Mxfp4,
    /// 8-bit E4M3 codes, an E8M0 scale per 32.
    Mxfp8,
    /// 4-bit E2M1 codes, an E4M3 scale per 16.
    Nvfp4,
}

impl QuantMode {
    /// Every mode of MLX's.
    pub const ALL: [QuantMode; 4] = [
        QuantMode::Affine,
        QuantMode::Mxfp4,
        QuantMode::Mxfp8,
        QuantMode::Nvfp4,
    ];

    /// MLX's spelling where it has the mode.
    pub const fn name(self) -> &'static str {
        match self {
            QuantMode::Affine => "affine",
            QuantMode::Centred => "centred",
            QuantMode::Mxfp4 => "mxfp4",
            QuantMode::Mxfp8 => "mxfp8",
            QuantMode::Nvfp4 => "nvfp4",
        }
    }

    /// Widths and group sizes that MLX has for the mode (table "quantization modes" of
    /// `mlx.core.quantize`).
    pub const fn supported(self) -> (&'static [u32], &'static [u32]) {
        match self {
            QuantMode::Affine => (&[1, 2, 3, 4, 5, 6, 8], &[32, 64, 128]),
            QuantMode::Centred => (&[4, 5, 8], &[32]),
            QuantMode::Mxfp4 => (&[4], &[32]),
            QuantMode::Mxfp8 => (&[8], &[32]),
            QuantMode::Nvfp4 => (&[4], &[16]),
        }
    }

    /// Width and group size that MLX takes when none is given.
    pub const fn defaults(self) -> (u32, u32) {
        match self {
            QuantMode::Affine => (4, 64),
            QuantMode::Centred => (8, 32),
            QuantMode::Mxfp4 => (4, 32),
            QuantMode::Mxfp8 => (8, 32),
            QuantMode::Nvfp4 => (4, 16),
        }
    }
}

impl fmt::Display for QuantMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How one weight is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantSpec {
    /// Meaning of codes and scales.
    pub mode: QuantMode,
    /// Bits per code.
    pub bits: u32,
    /// Consecutive elements of a row that share a scale.
    pub group_size: u32,
}

impl fmt::Display for QuantSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bits {} group_size {}",
            self.mode, self.bits, self.group_size
        )
    }
}

/// Why the quantisation of a checkpoint was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// A key of the description that means nothing to us, or has the wrong type.
    #[error("`{place}.{key}` in config.json: expected {expected}, found {found}")]
    Key {
        /// Where the object is.
        place: String,
        /// The key.
        key: String,
        /// What would be right.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A mode with a width or group size it does not have.
    #[error(
        "`{place}` in config.json asks for {spec}; {mode} has bits {bits:?} and group_size {groups:?}",
        mode = .spec.mode, bits = .spec.mode.supported().0, groups = .spec.mode.supported().1
    )]
    Unsupported {
        /// Where the object is.
        place: String,
        /// What it asks for.
        spec: QuantSpec,
    },
    /// Packed tensors without a description.
    #[error(
        "`{weight}` of shape {weight_shape:?} with scales {scales_shape:?} is packed, but config.json \
         has no `quantization` that says how: {fits}"
    )]
    Undescribed {
        /// The packed tensor.
        weight: String,
        /// Its shape.
        weight_shape: Vec<usize>,
        /// Shape of its scales.
        scales_shape: Vec<usize>,
        /// Descriptions that would fit.
        fits: String,
    },
    /// The shapes of a packed weight and its scales contradict the description.
    #[error(transparent)]
    Mismatch(Box<QuantMismatch>),
    /// One of the parts of a packed weight is missing, superfluous or of the wrong kind.
    #[error("`{tensor}`: expected {expected} for {spec}, found {found}")]
    Part {
        /// The part.
        tensor: String,
        /// What the mode asks for.
        expected: String,
        /// What is there.
        found: String,
        /// What config.json says.
        spec: QuantSpec,
    },
    /// A part of a weight of 8-bit floats is missing or of the wrong kind.
    #[error("`{tensor}`: expected {expected}, found {found}")]
    Fp8 {
        /// The tensor.
        tensor: String,
        /// What it should be.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Two places say different things.
    #[error(transparent)]
    Disagree(Box<QuantDisagreement>),
    /// 8-bit floats without a description.
    #[error(
        "`{tensor}` is {dtype}, but config.json has no `quantization_config` that says how: expected \
         quant_method fp8 with F8_E4M3 weights and scales beside them, or weights of F32, F16 or BF16"
    )]
    UndescribedFp8 {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: &'static str,
    },
    /// A method of another library that is not implemented.
    #[error(
        "`{place}.quant_method` in config.json is {}: expected fp8, or MLX's form with \
         group_size and bits",
        quoted(method)
    )]
    Method {
        /// Where the object is.
        place: String,
        /// The method.
        method: String,
    },
    /// An override says "not quantised", the tensors say otherwise.
    #[error("config.json says that `{path}` is not quantised, but `{path}.scales` exists")]
    NotQuantised {
        /// The module.
        path: String,
    },
}

/// Two descriptions of the same weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{}` and `{}` in config.json disagree on {about} ({} and {}): expected the same in both, or one of \
     them alone",
    places[0], places[1], says[0], says[1]
)]
pub struct QuantDisagreement {
    /// Where they are.
    pub places: [String; 2],
    /// A module or a key.
    pub about: String,
    /// What each says of it.
    pub says: [String; 2],
}

/// Shapes of a packed weight that its description does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{weight}` of shape {weight_shape:?} with scales {scales_shape:?} cannot be {spec}, as \
     config.json says: expected {expected_bits} bits a group, found {found}; {fits}"
)]
pub struct QuantMismatch {
    /// The packed tensor.
    pub weight: String,
    /// Its shape.
    pub weight_shape: Vec<usize>,
    /// Shape of its scales.
    pub scales_shape: Vec<usize>,
    /// What config.json says.
    pub spec: QuantSpec,
    /// Bits of a group by the description.
    pub expected_bits: u32,
    /// Bits of a group by the shapes, or why there are none.
    pub found: String,
    /// Descriptions that would fit.
    pub fits: String,
}

/// The description in `config.json`: a global spec and overrides by module path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuantTable {
    /// For every module that has scales and no override.
    pub global: Option<QuantSpec>,
    /// By module path; `None` means "not quantised".
    pub overrides: BTreeMap<String, Option<QuantSpec>>,
    /// A `quantization_config` that is not MLX's.
    pub foreign: Option<Box<Foreign>>,
}

/// A description in the form of another library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    /// Its `quant_method` (`fp8`, `gptq`, `mxfp4`, ...).
    pub method: String,
    /// Where it stands.
    pub place: String,
    /// What it says.
    pub settings: Map<String, Value>,
}

impl QuantTable {
    /// Reads MLX's form, which stands at `place`.
    pub(super) fn from_object(
        place: &str,
        object: &Map<String, Value>,
    ) -> Result<Self, QuantError> {
        let mut table = QuantTable::default();
        for (key, value) in object {
            let entry = match value {
                _ if SPEC_KEYS.contains(&key.as_str()) => continue,
                Value::Bool(false) => None,
                // `true` means "as the global spec says", which no entry says too.
                Value::Bool(true) => continue,
                Value::Object(own) => Some(spec(&format!("{place}.{key}"), own, OVERRIDE_KEYS)?),
                other => {
                    let expected = if place.ends_with("quantization_config") {
                        "quant_method beside it (fp8 is known), or MLX's form: group_size, bits, mode, and an \
                         object, true or false for a module path"
                    } else {
                        "an object, true or false for a module path"
                    };
                    return Err(wrong_key(place, key, expected, other));
                }
            };
            table.overrides.insert(key.clone(), entry);
        }
        let own: Map<String, Value> = object
            .iter()
            .filter(|(key, _)| SPEC_KEYS.contains(&key.as_str()))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        table.global = Some(spec(place, &own, SPEC_KEYS)?);
        Ok(table)
    }
}

const SPEC_KEYS: &[&str] = &["group_size", "bits", "mode", "quant_method"];
const OVERRIDE_KEYS: &[&str] = &["group_size", "bits", "mode", "quantize_input"];

/// A spec from its keys. What is missing has the default of the mode, and a missing mode is affine,
/// in an override too: MLX hands an override to `to_quantized` as it stands, without the global keys.
fn spec(place: &str, object: &Map<String, Value>, known: &[&str]) -> Result<QuantSpec, QuantError> {
    let mode = match object.get("mode") {
        None => QuantMode::Affine,
        Some(value) => QuantMode::ALL
            .into_iter()
            .find(|mode| value.as_str() == Some(mode.name()))
            .ok_or_else(|| wrong_key(place, "mode", "affine, mxfp4, mxfp8 or nvfp4", value))?,
    };
    let number = |key: &str, default: u32| match object.get(key) {
        None => Ok(default),
        Some(value) => value
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| wrong_key(place, key, "a small positive integer", value)),
    };
    let (bits, group_size) = mode.defaults();
    let spec = QuantSpec {
        mode,
        bits: number("bits", bits)?,
        group_size: number("group_size", group_size)?,
    };
    for (key, value) in object {
        let allowed = match key.as_str() {
            "quantize_input" => value == &Value::Bool(false),
            other => known.contains(&other),
        };
        if !allowed {
            return Err(wrong_key(
                place,
                key,
                "only group_size, bits and mode",
                value,
            ));
        }
    }
    let (bits, groups) = mode.supported();
    if !bits.contains(&spec.bits) || !groups.contains(&spec.group_size) {
        return Err(QuantError::Unsupported {
            place: place.to_owned(),
            spec,
        });
    }
    Ok(spec)
}

fn wrong_key(place: &str, key: &str, expected: &'static str, found: &Value) -> QuantError {
    let found = match found {
        Value::Object(_) | Value::Array(_) => kind(found).to_owned(),
        scalar => shown(scalar),
    };
    QuantError::Key {
        place: place.to_owned(),
        key: key.to_owned(),
        expected,
        found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn table(config: Value) -> Result<QuantTable, String> {
        let Value::Object(config) = config else {
            panic!("an object")
        };
        QuantTable::from_config(&config).map_err(|error| error.to_string())
    }

    const fn affine(bits: u32, group_size: u32) -> QuantSpec {
        QuantSpec {
            mode: QuantMode::Affine,
            bits,
            group_size,
        }
    }

    #[test]
    fn global_and_overrides() {
        let table = table(json!({"quantization": {
            "group_size": 32, "bits": 4, "mode": "mxfp4",
            "model.embed_tokens": {"group_size": 32, "bits": 8},
            "model.norm": false,
            "lm_head": {},
            "model.layers.0": true,
            "x": {"mode": "nvfp4", "quantize_input": false}
        }}))
        .unwrap();
        assert_eq!(
            table.global,
            Some(QuantSpec {
                mode: QuantMode::Mxfp4,
                bits: 4,
                group_size: 32
            })
        );
        // An override without a mode is affine even when the global mode is not.
        assert_eq!(table.overrides["model.embed_tokens"], Some(affine(8, 32)));
        assert_eq!(table.overrides["lm_head"], Some(affine(4, 64)));
        assert_eq!(table.overrides["model.norm"], None);
        assert_eq!(
            table.overrides["x"],
            Some(QuantSpec {
                mode: QuantMode::Nvfp4,
                bits: 4,
                group_size: 16
            })
        );
        assert!(!table.overrides.contains_key("model.layers.0"));
    }

    #[test]
    fn the_mlx_form_of_quantization_config_is_read_and_others_are_named() {
        let own = table(json!({"quantization_config": {"group_size": 64, "bits": 3}})).unwrap();
        assert_eq!(own.global, Some(affine(3, 64)));
        let foreign = table(json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}));
        assert_eq!(foreign.unwrap().foreign.unwrap().method, "gptq");
        let both = table(json!({
            "quantization": {"bits": 8},
            "quantization_config": {"quant_method": "fp8"}
        }));
        assert_eq!(both.unwrap().global, Some(affine(8, 64)));
        assert_eq!(
            table(json!({"quantization": null})).unwrap(),
            QuantTable::default()
        );
        assert_eq!(table(json!({})).unwrap(), QuantTable::default());
    }

    #[test]
    fn contradictions_are_named() {
        let refusals = [
            json!({"quantization": {"bits": 7}}),
            json!({"quantization": {"bits": 4, "group_size": 48}}),
            json!({"quantization": {"mode": "mxfp4", "bits": 8}}),
            json!({"quantization": {"mode": "nf4"}}),
            json!({"quantization": {"bits": -4}}),
            json!({"quantization": {"bits": null, "group_size": 32}}),
            json!({"quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3"}}),
            json!({"quantization": {"bits": 4, "lm_head": 8}}),
            json!({"quantization": {"lm_head": {"bit": 8}}}),
            json!({"quantization": {"lm_head": {"mode": "nvfp4", "quantize_input": true}}}),
            json!({"quantization": [4]}),
            json!({"quantization_config": "4bit"}),
        ]
        .map(|config| table(config).unwrap_err());
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        `quantization` in config.json asks for affine bits 7 group_size 64; affine has bits [1, 2, 3, 4, 5, 6, 8] and group_size [32, 64, 128]
        `quantization` in config.json asks for affine bits 4 group_size 48; affine has bits [1, 2, 3, 4, 5, 6, 8] and group_size [32, 64, 128]
        `quantization` in config.json asks for mxfp4 bits 8 group_size 32; mxfp4 has bits [4] and group_size [32]
        `quantization.mode` in config.json: expected affine, mxfp4, mxfp8 or nvfp4, found "nf4"
        `quantization.bits` in config.json: expected a small positive integer, found -4
        `quantization.bits` in config.json: expected a small positive integer, found null
        `quantization_config.activation_scheme` in config.json: expected quant_method beside it (fp8 is known), or MLX's form: group_size, bits, mode, and an object, true or false for a module path, found "dynamic"
        `quantization.lm_head` in config.json: expected an object, true or false for a module path, found 8
        `quantization.lm_head.bit` in config.json: expected only group_size, bits and mode, found 8
        `quantization.lm_head.quantize_input` in config.json: expected only group_size, bits and mode, found true
        `<root>.quantization` in config.json: expected an object, found an array
        `<root>.quantization_config` in config.json: expected an object, found a string
        "#);
    }
}
