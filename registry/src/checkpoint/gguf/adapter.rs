//! What a family says of a GGUF file: the config in Hugging Face's form, the new name of every tensor,
//! and what to do to its values.
//!
//! Owns the document. Must not know any architecture: that knowledge is in the family that writes it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::checkpoint::json::{self, JsonError, JsonLimits};

const LIMITS: JsonLimits = JsonLimits {
    size_bytes: 64 << 20,
    depth: 64,
};
/// Names that an error lists before it only counts.
const LISTED_NAMES: usize = 8;

/// The document that a family returns for a GGUF file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adapter {
    /// `config.json` as Hugging Face has it. Must not describe a quantisation: that follows from the
    /// types of the tensors.
    pub config: Map<String, Value>,
    /// The tensors that the family wants. One source may have several targets (a fused projection).
    pub tensors: Vec<AdapterTensor>,
    /// Tensors of the file that the family has no use for. Names that the file lacks are no error.
    #[serde(default)]
    pub ignore: Vec<String>,
}

/// Where one tensor comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterTensor {
    /// Name in the GGUF file.
    pub from: String,
    /// Name in the checkpoint. A quantised tensor stays packed when this ends in `.weight`.
    pub to: String,
    /// Applied in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<AdapterOp>,
}

/// A change of rows or values. Shapes are row-major, as in the checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum AdapterOp {
    /// Undoes the row order that GGUF has for interleaved rotary embedding: the rows of each head are
    /// `[dim / 2, 2]` and become `[2, dim / 2]`. For one or two dimensions. Keeps a tensor packed.
    UnpermuteRope {
        /// Heads that the rows are cut into.
        heads: usize,
    },
    /// Adds a constant to every value; the result is `F32` and not packed.
    Add {
        /// The constant.
        value: f32,
    },
    /// Another shape of as many elements. Keeps a tensor packed when the last dimension stays.
    Reshape {
        /// The shape.
        shape: Vec<usize>,
    },
    /// A part of the outermost dimension. Keeps a tensor packed.
    SliceRows {
        /// First index.
        start: usize,
        /// Number of indices.
        len: usize,
    },
    /// Swaps two dimensions; the result is not packed.
    Transpose {},
}

impl AdapterOp {
    /// The name in the document.
    pub fn name(&self) -> &'static str {
        match self {
            AdapterOp::UnpermuteRope { .. } => "unpermute_rope",
            AdapterOp::Add { .. } => "add",
            AdapterOp::Reshape { .. } => "reshape",
            AdapterOp::SliceRows { .. } => "slice_rows",
            AdapterOp::Transpose {} => "transpose",
        }
    }
}

impl Adapter {
    /// Reads the document from JSON; unknown keys and operations are refused.
    pub fn from_json(text: &[u8]) -> Result<Self, AdapterError> {
        let object = json::parse_object(text, &LIMITS).map_err(AdapterError::Json)?;
        serde_json::from_value(Value::Object(object))
            .map_err(|error| AdapterError::Json(JsonError::Syntax(error)))
    }
}

/// Why an adapter does not fit a GGUF file.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// Not the JSON it should be.
    #[error("adapter: {0}")]
    Json(#[source] JsonError),
    /// The config describes a quantisation.
    #[error(
        "adapter: the config must not have `{key}`: the quantisation follows from the types of the tensors"
    )]
    Quantization {
        /// The key.
        key: &'static str,
    },
    /// A source that the file does not have.
    #[error("adapter: the file has no tensor `{from}`, which should become `{to}`")]
    UnknownSource {
        /// The name in the file.
        from: String,
        /// The name in the checkpoint.
        to: String,
    },
    /// Two tensors with one name, where a packed tensor also takes the names of its scales and biases.
    #[error("adapter: `{name}` would exist twice; the second comes from `{from}`")]
    DuplicateTarget {
        /// The name in the checkpoint.
        name: String,
        /// The name in the file.
        from: String,
    },
    /// A tensor both wanted and ignored.
    #[error("adapter: tensor `{name}` is both used and ignored")]
    UsedAndIgnored {
        /// The name in the file.
        name: String,
    },
    /// Tensors of the file that the adapter does not mention.
    #[error("adapter: {count} tensors of the file are neither used nor ignored: {names}")]
    Leftover {
        /// How many.
        count: usize,
        /// The first of them.
        names: String,
    },
    /// An operation that its tensor does not allow.
    #[error("adapter: `{op}` on `{from}` of shape {shape:?}: {why}")]
    Op {
        /// The operation.
        op: &'static str,
        /// The name in the file.
        from: String,
        /// The shape before the operation.
        shape: Vec<usize>,
        /// What is wrong.
        why: String,
    },
}

impl AdapterError {
    pub(super) fn leftover(names: &[&str]) -> Self {
        let mut listed: Vec<&str> = names.iter().take(LISTED_NAMES).copied().collect();
        if names.len() > LISTED_NAMES {
            listed.push("...");
        }
        AdapterError::Leftover {
            count: names.len(),
            names: listed.join(", "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        Adapter::from_json(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn every_operation_is_read() {
        let text = r#"{"config":{"model_type":"llama"},"tensors":[
            {"from":"a","to":"b"},
            {"from":"c","to":"d","ops":[{"op":"unpermute_rope","heads":9},{"op":"add","value":-1.0},
                {"op":"reshape","shape":[2,3]},{"op":"slice_rows","start":1,"len":2},{"op":"transpose"}]}],
            "ignore":["rope_freqs.weight"]}"#;
        let adapter = Adapter::from_json(text.as_bytes()).unwrap();
        assert_eq!(
            adapter.tensors[1].ops,
            [
                AdapterOp::UnpermuteRope { heads: 9 },
                AdapterOp::Add { value: -1.0 },
                AdapterOp::Reshape { shape: vec![2, 3] },
                AdapterOp::SliceRows { start: 1, len: 2 },
                AdapterOp::Transpose {},
            ]
        );
        let written = serde_json::to_vec(&adapter).unwrap();
        assert_eq!(Adapter::from_json(&written).unwrap(), adapter);
    }

    #[test]
    fn nothing_unknown_is_accepted() {
        let with = |tensor: &str| format!(r#"{{"config":{{}},"tensors":[{tensor}]}}"#);
        let refusals = [
            refusal("[]"),
            refusal(r#"{"config":{},"tensors":[],"skip":[]}"#),
            refusal(r#"{"config":[],"tensors":[]}"#),
            refusal(r#"{"tensors":[]}"#),
            refusal(&with(r#"{"from":"a"}"#)),
            refusal(&with(r#"{"from":"a","to":"b","op":"transpose"}"#)),
            refusal(&with(r#"{"from":"a","to":"b","ops":[{"op":"negate"}]}"#)),
            refusal(&with(
                r#"{"from":"a","to":"b","ops":[{"op":"transpose","axes":[1,0]}]}"#,
            )),
            refusal(&with(
                r#"{"from":"a","to":"b","ops":[{"op":"unpermute_rope","heads":-1}]}"#,
            )),
        ];
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        adapter: expected a json object, found an array
        adapter: expected json: unknown field `skip`, expected one of `config`, `tensors`, `ignore`
        adapter: expected json: invalid type: sequence, expected a map
        adapter: expected json: missing field `config`
        adapter: expected json: missing field `to`
        adapter: expected json: unknown field `op`, expected one of `from`, `to`, `ops`
        adapter: expected json: unknown variant `negate`, expected one of `unpermute_rope`, `add`, `reshape`, `slice_rows`, `transpose`
        adapter: expected json: unknown field `axes`, there are no fields
        adapter: expected json: invalid value: integer `-1`, expected usize
        "#);
    }
}
