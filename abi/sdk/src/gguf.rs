//! GGUF: how a file's metadata and tensors map to an architecture. The host reads the file; the
//! family says what its parts mean.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

use crate::config::MAX_COUNT;
use crate::gguf_names::{self, Names};
use crate::{Error, Result};

/// Factors by which positions may be stretched.
const ROPE_FACTOR: core::ops::RangeInclusive<f64> = 1e-3..=1e6;

/// Name of the factor in early files.
const EARLY_FACTOR: &str = "rope.scale_linear";

fn is_count(number: u64) -> bool {
    (1..=MAX_COUNT as u64).contains(&number)
}

/// What the host tells of a GGUF file: metadata (long arrays left out) and tensors.
#[derive(Debug, Clone, Deserialize)]
pub struct GgufSummary {
    /// Metadata keys; an array that was left out is `{"array_len": n}`.
    #[serde(flatten)]
    pub metadata: Map<String, Value>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, GgufTensor>,
}

/// One tensor of a GGUF file.
#[derive(Debug, Clone, Deserialize)]
pub struct GgufTensor {
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// ggml type name, such as `Q4_K`.
    #[serde(rename = "type")]
    pub ggml_type: String,
}

/// A change to a tensor on its way in.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum GgufOp {
    /// Undoes the row order of llama.cpp's interleaved rotary embedding.
    UnpermuteRope {
        /// Heads in the rows.
        heads: usize,
    },
    /// Adds a constant.
    Add {
        /// The constant.
        value: f64,
    },
    /// Gives a new shape.
    Reshape {
        /// Row-major.
        shape: Vec<usize>,
    },
    /// Takes some of the rows.
    SliceRows {
        /// First row.
        start: usize,
        /// Number of rows.
        len: usize,
    },
}

/// One tensor of the checkpoint to be, made from one of the file's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GgufMapping {
    /// Name in the file.
    pub from: String,
    /// Name for the family.
    pub to: String,
    /// Changes, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<GgufOp>,
}

/// The whole mapping.
#[derive(Debug, Clone, Default, Serialize)]
pub struct GgufAdapter {
    /// The configuration as `config.json` would have it.
    pub config: Map<String, Value>,
    /// Tensors.
    pub tensors: Vec<GgufMapping>,
    /// Tensors of the file that are not needed.
    pub ignore: Vec<String>,
    /// Keys of the file by the configuration's, for messages.
    #[serde(skip)]
    origins: BTreeMap<String, String>,
}

impl GgufSummary {
    /// Metadata value by key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// The file's architecture name.
    pub fn architecture(&self) -> Result<&str> {
        self.get("general.architecture")
            .and_then(Value::as_str)
            .ok_or_else(|| Error::Other("GGUF metadata has no \"general.architecture\"".to_owned()))
    }

    /// `<architecture>.<key>`, as the file has it.
    pub fn full_key(&self, key: &str) -> Result<String> {
        Ok(format!("{}.{key}", self.architecture()?))
    }

    /// A number under `<architecture>.<key>` that must be there.
    pub fn number(&self, key: &str) -> Result<&Value> {
        let full = self.full_key(key)?;
        self.metadata
            .get(&full)
            .filter(|value| value.is_number())
            .ok_or_else(|| Error::Config {
                key: full.clone(),
                found: self
                    .metadata
                    .get(&full)
                    .map_or_else(|| "missing".to_owned(), Value::to_string),
                expected: "a number in the GGUF metadata".to_owned(),
            })
    }

    /// A count under `<architecture>.<key>` that must be there, from 1 to `most`.
    pub fn count(&self, key: &str, most: usize) -> Result<usize> {
        let number = self.number(key)?;
        let count = number.as_u64().and_then(|n| usize::try_from(n).ok());
        match count.filter(|n| (1..=most).contains(n)) {
            Some(count) => Ok(count),
            None => Err(Error::Config {
                key: self.full_key(key)?,
                found: number.to_string(),
                expected: format!("an integer from 1 to {most}"),
            }),
        }
    }

    /// Checks that the number under `<architecture>.<key>`, if there, is `value`, which follows from `reason`: what
    /// repeats another fact is not read, and must not contradict it.
    pub fn repeats(&self, key: &str, value: usize, reason: &str) -> Result<()> {
        match self.opt_number(key)? {
            Some(found) if found.as_u64() != Some(value as u64) => Err(Error::Config {
                key: self.full_key(key)?,
                found: found.to_string(),
                expected: format!("{value}, {reason}, or no such key"),
            }),
            _ => Ok(()),
        }
    }

    /// A number under `<architecture>.<key>`, if there. Anything else under that key, a number that is
    /// not finite included, is an error and not an absent value.
    pub fn opt_number(&self, key: &str) -> Result<Option<&Value>> {
        self.typed(
            key,
            Value::is_number,
            "a finite number in the GGUF metadata",
        )
    }

    /// Text under `<architecture>.<key>`, if there. Anything else under that key is an error.
    pub fn opt_text(&self, key: &str) -> Result<Option<&str>> {
        let value = self.typed(key, Value::is_string, "a string in the GGUF metadata")?;
        Ok(value.and_then(Value::as_str))
    }

    fn typed(
        &self,
        key: &str,
        fits: impl Fn(&Value) -> bool,
        expected: &str,
    ) -> Result<Option<&Value>> {
        let full = self.full_key(key)?;
        match self.metadata.get(&full) {
            Some(value) if !fits(value) => Err(Error::Config {
                key: full,
                found: value.to_string(),
                expected: expected.to_owned(),
            }),
            found => Ok(found),
        }
    }

    /// Rows of the embedding. llama.cpp counts the tokenizer's tokens and not what `vocab_size` says, which
    /// is checked only for what no vocabulary has.
    pub fn vocab_size(&self) -> Result<usize> {
        let given = self.opt_number("vocab_size")?;
        if let Some(given) = given.filter(|n| !n.as_u64().is_some_and(is_count)) {
            return Err(Error::Config {
                key: self.full_key("vocab_size")?,
                found: given.to_string(),
                expected: format!("an integer from 1 to {MAX_COUNT} in the GGUF metadata"),
            });
        }
        let name = "token_embd.weight";
        let table = self.tensors.get(name);
        let rows = table.and_then(|table| table.shape.first().copied());
        if let Some(rows) = rows.filter(|rows| !is_count(*rows as u64)) {
            return Err(Error::TensorShape {
                name: name.to_owned(),
                found: format!("{rows} rows"),
                expected: format!("1 to {MAX_COUNT}"),
            });
        }
        rows.ok_or_else(|| Error::MissingTensor {
            name: name.to_owned(),
            expected: "[vocabulary, hidden]".to_owned(),
        })
    }

    /// How positions are stretched, as `rope_scaling` of a configuration: type, factor, and those of
    /// `numbers` (key of the file, key of the configuration) that are there. As llama.cpp reads them, a
    /// factor without a type is linear, and `none` is none whatever else the file says.
    pub fn rope_scaling(&self, numbers: &[(&str, &str)]) -> Result<Option<Map<String, Value>>> {
        let kind = self.opt_text("rope.scaling.type")?;
        if kind == Some("none") {
            return Ok(None);
        }
        let mut factor = None;
        for key in ["rope.scaling.factor", EARLY_FACTOR] {
            let Some(number) = self.opt_number(key)? else {
                continue;
            };
            let is_factor = |factor: &f64| ROPE_FACTOR.contains(factor);
            let Some(value) = number.as_f64().filter(is_factor) else {
                let (least, most) = (ROPE_FACTOR.start(), ROPE_FACTOR.end());
                return Err(Error::Config {
                    key: self.full_key(key)?,
                    found: number.to_string(),
                    expected: format!("a number from {least} to {most} in the GGUF metadata"),
                });
            };
            factor = factor.or(Some((value, number)));
        }
        let kind = match (kind, factor) {
            (Some(kind), _) => kind,
            (None, None | Some((1.0, _))) => return Ok(None),
            (None, Some(_)) => "linear",
        };
        let mut scaling = Map::new();
        scaling.insert("rope_type".to_owned(), kind.into());
        if let Some((_, number)) = factor {
            scaling.insert("factor".to_owned(), number.clone());
        }
        for (from, to) in numbers {
            if let Some(value) = self.opt_number(from)? {
                scaling.insert((*to).to_owned(), value.clone());
            }
        }
        Ok(Some(scaling))
    }

    /// Whether the file has a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

impl GgufAdapter {
    /// Sets a configuration key.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.config.insert(key.to_owned(), value.into());
    }

    /// Says which key of the file a key of the configuration comes from, so that messages have its name. A
    /// key of an object in the configuration is written with dots.
    pub fn comes_from(&mut self, summary: &GgufSummary, key: &str, from: &str) -> Result<()> {
        let full = summary.full_key(from)?;
        self.origins.insert(key.to_owned(), full);
        Ok(())
    }

    /// Sets a configuration key to the number under `<architecture>.<from>`, which must be there.
    pub fn take(&mut self, summary: &GgufSummary, from: &str, key: &str) -> Result<()> {
        self.set(key, summary.number(from)?.clone());
        self.comes_from(summary, key, from)
    }

    /// As [`GgufAdapter::take`], of a number that may be absent; says whether it is there.
    pub fn take_some(&mut self, summary: &GgufSummary, from: &str, key: &str) -> Result<bool> {
        let number = summary.opt_number(from)?;
        if let Some(number) = number {
            self.set(key, number.clone());
        }
        self.comes_from(summary, key, from)?;
        Ok(number.is_some())
    }

    /// Sets `rope_scaling` to what [`GgufSummary::rope_scaling`] gave for `numbers`.
    pub fn set_scaling(
        &mut self,
        summary: &GgufSummary,
        scaling: Map<String, Value>,
        numbers: &[(&str, &str)],
    ) -> Result<()> {
        let factor = match summary.opt_number(EARLY_FACTOR)? {
            Some(_) => EARLY_FACTOR,
            None => "rope.scaling.factor",
        };
        let own = [("rope.scaling.type", "rope_type"), (factor, "factor")];
        for (from, to) in own.iter().chain(numbers) {
            self.comes_from(summary, &format!("rope_scaling.{to}"), from)?;
        }
        self.set("rope_scaling", scaling);
        Ok(())
    }

    /// Leaves the names of keys and tensors in the configuration, for what refuses it later.
    pub(crate) fn with_names(mut self) -> Result<Self> {
        let names = Names::new(core::mem::take(&mut self.origins), &self.tensors);
        let names = serde_json::to_value(names).map_err(|e| Error::Other(e.to_string()))?;
        self.config.insert(gguf_names::KEY.to_owned(), names);
        Ok(self)
    }

    /// Maps a tensor as it is.
    pub fn map(&mut self, from: impl Into<String>, to: impl Into<String>) {
        self.map_with(from, to, Vec::new());
    }

    /// Maps a tensor with changes.
    pub fn map_with(&mut self, from: impl Into<String>, to: impl Into<String>, ops: Vec<GgufOp>) {
        self.tensors.push(GgufMapping {
            from: from.into(),
            to: to.into(),
            ops,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_of_another_type_is_an_error_and_never_absent() {
        let summary: GgufSummary = serde_json::from_value(json!({
            "general.architecture": "llama", "llama.rope.freq_base": "NaN",
            "llama.rope.scaling.type": 3, "llama.context_length": 8, "tensors": {},
        }))
        .unwrap();
        let error = summary
            .opt_number("rope.freq_base")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("llama.rope.freq_base") && error.contains("NaN"),
            "{error}"
        );
        assert!(summary.opt_text("rope.scaling.type").is_err());
        assert_eq!(
            summary.opt_number("context_length").unwrap(),
            Some(&json!(8))
        );
        assert_eq!(summary.opt_number("expert_count").unwrap(), None);
    }
    #[test]
    fn a_vocabulary_that_cannot_be_is_named() {
        let read = |vocab_size: Value| {
            let summary = serde_json::from_value::<GgufSummary>(json!({
                "general.architecture": "llama", "llama.vocab_size": vocab_size,
                "tensors": {"token_embd.weight": {"shape": [64, 8], "type": "F32"}},
            }));
            summary
                .unwrap()
                .vocab_size()
                .map_err(|error| error.to_string())
        };
        assert_eq!(read(json!(64)), Ok(64));
        for bad in [json!(0), json!(u32::MAX), json!(-1)] {
            let error = read(bad.clone()).unwrap_err();
            let said = ["llama.vocab_size", &bad.to_string(), "from 1 to 16777216"];
            assert!(said.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn scaling_of_positions_is_read_as_llama_cpp_reads_it() {
        let read = |metadata: Value| {
            let mut all = json!({"general.architecture": "llama", "tensors": {}});
            all.as_object_mut()
                .unwrap()
                .extend(metadata.as_object().unwrap().clone());
            let summary: GgufSummary = serde_json::from_value(all).unwrap();
            let scaling = summary.rope_scaling(&[("rope.scaling.yarn_beta_fast", "beta_fast")]);
            match scaling {
                Ok(scaling) => Ok(scaling.map(Value::Object)),
                Err(error) => Err(error.to_string()),
            }
        };
        assert_eq!(read(json!({})), Ok(None));
        assert_eq!(read(json!({"llama.rope.scaling.factor": 1.0})), Ok(None));
        let none = json!({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0});
        assert_eq!(read(none), Ok(None));
        for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
            let linear = json!({"rope_type": "linear", "factor": 4.0});
            assert_eq!(read(json!({key: 4.0})), Ok(Some(linear)));
            for bad in [0.0, -2.0, 1e9] {
                let error = read(json!({key: bad})).unwrap_err();
                let said = [key, &Value::from(bad).to_string(), "from 0.001 to 1000000"];
                assert!(said.iter().all(|part| error.contains(part)), "{error}");
            }
        }
        let yarn = read(json!({
            "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        }));
        let expected = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0});
        assert_eq!(yarn, Ok(Some(expected)));
    }
}
