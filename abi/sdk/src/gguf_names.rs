//! Names of a GGUF file in messages. A family reads a configuration and tensors in the names of published
//! checkpoints; whoever has a file knows them by others. The adapter leaves both in the configuration that it
//! makes, and what refuses that is translated where it leaves the plugin.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Error;
use crate::gguf::GgufMapping;

/// Where the names stand in a configuration that was made of a file.
pub(crate) const KEY: &str = "gguf_names";
/// Stands for a number in the name of a tensor.
const NUMBER: &str = "{}";

/// Names of the file by those of the configuration and the checkpoint.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Names {
    keys: BTreeMap<String, String>,
    /// With a placeholder for every number.
    tensors: BTreeMap<String, String>,
}

/// A name with placeholders, and the numbers that they stand for.
fn pattern(name: &str) -> (String, Vec<&str>) {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let numbers = name.split('.').filter(|part| is_number(part)).collect();
    let part = |part| if is_number(part) { NUMBER } else { part };
    let parts: Vec<&str> = name.split('.').map(part).collect();
    (parts.join("."), numbers)
}

/// An error about a configuration in the names of the file that it was made of, if it was.
pub(crate) fn own_names(config: &Value, error: Error) -> Error {
    match Names::of(config) {
        Some(names) => names.translate(error),
        None => error,
    }
}

impl Names {
    pub(crate) fn new(keys: BTreeMap<String, String>, tensors: &[GgufMapping]) -> Self {
        let patterns = |mapping: &GgufMapping| {
            let ((to, to_numbers), (from, from_numbers)) =
                (pattern(&mapping.to), pattern(&mapping.from));
            // One tensor of the file may be several of the checkpoint, with numbers of their own.
            from_numbers
                .iter()
                .all(|n| to_numbers.contains(n))
                .then_some((to, from))
        };
        let tensors = tensors.iter().filter_map(patterns).collect();
        Self { keys, tensors }
    }

    /// The names in a configuration; none in one that no adapter made.
    pub(crate) fn of(config: &Value) -> Option<Self> {
        Self::deserialize(config.get(KEY)?).ok()
    }

    fn tensor(&self, name: &str) -> Option<String> {
        let (to, numbers) = pattern(name);
        let from = self.tensors.get(&to).or_else(|| {
            let (path, _) = to.rsplit_once('.')?;
            // Parts of a packed weight, and modules.
            let whole = |path: &str| self.tensors.get(&format!("{path}.weight"));
            whole(path).or_else(|| whole(&to))
        })?;
        let mut numbers = numbers.into_iter();
        let part = |part| match part {
            NUMBER => numbers.next().unwrap_or(NUMBER),
            part => part,
        };
        Some(from.split('.').map(part).collect::<Vec<_>>().join("."))
    }

    /// A text in which every name is the file's.
    fn words(&self, text: &str) -> String {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find(is_name) {
            let (before, from) = rest.split_at(start);
            let end = from.find(|c| !is_name(c)).unwrap_or(from.len());
            let (word, after) = from.split_at(end);
            let name = word.trim_end_matches('.');
            out.push_str(before);
            match self.keys.get(name).cloned().or_else(|| self.tensor(name)) {
                Some(own) => {
                    out.push_str(&own);
                    out.push_str(word.strip_prefix(name).unwrap_or_default());
                }
                None => out.push_str(word),
            }
            rest = after;
        }
        out + rest
    }

    /// The error in the file's names. What was found stays as it is.
    pub(crate) fn translate(&self, error: Error) -> Error {
        match error {
            Error::Config {
                key,
                found,
                expected,
            } => Error::Config {
                key: self.words(&key),
                found,
                expected: self.words(&expected),
            },
            Error::Unsupported { what, supported } => Error::Unsupported {
                what: self.words(&what),
                supported: self.words(&supported),
            },
            Error::MissingTensor { name, expected } => Error::MissingTensor {
                name: self.words(&name),
                expected,
            },
            Error::TensorShape {
                name,
                found,
                expected,
            } => Error::TensorShape {
                name: self.words(&name),
                found,
                expected,
            },
            Error::Quantization { name, message } => Error::Quantization {
                name: self.words(&name),
                message,
            },
            Error::ExtraTensors { count, names } => Error::ExtraTensors {
                count,
                names: self.words(&names),
            },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn names() -> Names {
        let keys = [
            ("num_attention_heads", "llama.attention.head_count"),
            ("rope_scaling.factor", "llama.rope.scaling.factor"),
        ];
        let keys = keys.map(|(to, from)| (to.to_owned(), from.to_owned()));
        let tensor = |from: &str, to: &str| GgufMapping {
            from: from.to_owned(),
            to: to.to_owned(),
            ops: Vec::new(),
        };
        let tensors = [
            tensor(
                "blk.0.attn_q.weight",
                "model.layers.0.self_attn.q_proj.weight",
            ),
            tensor("altup_proj.weight", "model.altup_projections.0.weight"),
        ];
        Names::new(keys.into(), &tensors)
    }

    #[test]
    fn names_in_messages_are_the_files() {
        let names = Names::of(&json!({ KEY: serde_json::to_value(names()).unwrap() })).unwrap();
        for (said, own) in [
            (
                "a multiple of num_attention_heads (4).",
                "a multiple of llama.attention.head_count (4).",
            ),
            ("rope_scaling.factor", "llama.rope.scaling.factor"),
            (
                "hidden_size, num_attention_heads.",
                "hidden_size, llama.attention.head_count.",
            ),
            (
                "model.layers.7.self_attn.q_proj.weight",
                "blk.7.attn_q.weight",
            ),
            (
                "model.layers.7.self_attn.q_proj.scales",
                "blk.7.attn_q.weight",
            ),
            ("model.layers.7.self_attn.q_proj", "blk.7.attn_q.weight"),
            ("model.altup_projections.1.weight", "altup_proj.weight"),
            ("model.layers.7.self_attn", "model.layers.7.self_attn"),
            (
                "größer als num_attention_heads…",
                "größer als llama.attention.head_count…",
            ),
        ] {
            assert_eq!(names.words(said), own);
        }
        assert!(Names::of(&json!({"model_type": "llama"})).is_none());
    }

    #[test]
    fn what_was_found_stays() {
        let error = Error::Config {
            key: "num_attention_heads".to_owned(),
            found: "\"num_attention_heads\"".to_owned(),
            expected: "an integer".to_owned(),
        };
        let expected = "config key \"llama.attention.head_count\" is \"num_attention_heads\": expected an integer";
        assert_eq!(names().translate(error).to_string(), expected);
    }
}
