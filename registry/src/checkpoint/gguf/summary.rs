//! What a family sees of a GGUF file: metadata and tensor shapes as JSON, without the vocabulary.
//!
//! Owns the form of the summary. Must not know which keys mean what.

use serde_json::{Map, Number, Value, json};

use super::error::GgufError;
use super::file::GgufFile;
use super::meta::{MetaArray, MetaValue};

/// Longer arrays are given as their length.
const MAX_ARRAY_LEN: usize = 64;

impl GgufFile {
    /// All metadata and all tensors as one JSON object.
    ///
    /// Each metadata key is a key of the object; arrays of more than 64 elements are
    /// `{"array_len": n}`. `tensors` maps each name to `{"shape": [outermost, ...], "type": "Q4_K"}`.
    /// Numbers that JSON lacks are the strings `NaN`, `Infinity` and `-Infinity`.
    pub fn summary_json(&self) -> Result<Value, GgufError> {
        let mut summary = Map::new();
        for key in self.keys() {
            if let Some(value) = self.meta(key)? {
                summary.insert(key.to_owned(), to_json(&value)?);
            }
        }
        let mut tensors = Map::new();
        for tensor in self.tensors() {
            let entry = json!({"shape": tensor.shape, "type": tensor.ty.to_string()});
            tensors.insert(tensor.name.clone(), entry);
        }
        summary.insert("tensors".to_owned(), Value::Object(tensors));
        Ok(Value::Object(summary))
    }
}

fn to_json(value: &MetaValue<'_>) -> Result<Value, GgufError> {
    Ok(match value {
        MetaValue::Unsigned(n, _) => Value::from(*n),
        MetaValue::Signed(n, _) => Value::from(*n),
        // The shortest decimal of the single, so that 1e-5 is 0.00001 and not 0.00000999999974.
        MetaValue::F32(x) => float(x.to_string().parse().unwrap_or(f64::from(*x))),
        MetaValue::F64(x) => float(*x),
        MetaValue::Bool(x) => Value::from(*x),
        MetaValue::Str(x) => Value::from(*x),
        MetaValue::Array(array) => array_json(array)?,
    })
}

fn array_json(array: &MetaArray<'_>) -> Result<Value, GgufError> {
    if array.len() > MAX_ARRAY_LEN {
        return Ok(json!({"array_len": array.len()}));
    }
    array
        .values()
        .map(|value| to_json(&value?))
        .collect::<Result<Vec<_>, _>>()
        .map(Value::Array)
}

fn float(x: f64) -> Value {
    match Number::from_f64(x) {
        Some(number) => Value::Number(number),
        None if x.is_nan() => Value::from("NaN"),
        None if x > 0.0 => Value::from("Infinity"),
        None => Value::from("-Infinity"),
    }
}
