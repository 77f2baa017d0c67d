//! JSON of untrusted files: size and nesting are bounded before anything is built.
//!
//! Owns the limits of JSON text. Must not know what the documents mean.

use std::borrow::Cow;
use std::io;
use std::path::Path;

use serde_json::{Map, Value};

/// What a JSON document may look like at most.
#[derive(Debug, Clone, Copy)]
pub struct JsonLimits {
    /// Bytes of text.
    pub size_bytes: u64,
    /// Nesting of arrays and objects.
    pub depth: usize,
}

/// Limits for `config.json` and its like.
pub const CONFIG_LIMITS: JsonLimits = JsonLimits {
    size_bytes: 16 << 20,
    depth: 64,
};

/// Limits for `model.safetensors.index.json`.
pub const INDEX_LIMITS: JsonLimits = JsonLimits {
    size_bytes: 64 << 20,
    depth: 8,
};

/// Of UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Why a JSON document was refused.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The file could not be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The text is longer than allowed.
    #[error("expected at most {limit} bytes of json, found {found}")]
    TooLarge {
        /// Bytes found.
        found: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// Arrays and objects are nested more deeply than allowed.
    #[error("expected json nested at most {limit} deep, found more at byte {at}")]
    TooDeep {
        /// Depth allowed.
        limit: usize,
        /// Byte where the limit was passed.
        at: usize,
    },
    /// Not JSON.
    #[error("expected json: {0}")]
    Syntax(#[from] serde_json::Error),
    /// The top level is no object.
    #[error("expected a json object, found {found}")]
    NotAnObject {
        /// What was found instead.
        found: &'static str,
    },
}

/// Parses a document whose top level must be an object.
///
/// Bare `NaN`, `Infinity` and `-Infinity`, which Python's writer puts into real config files, are read
/// as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. A byte order mark of UTF-8, which editors put in
/// front, is left out.
pub fn parse_object(text: &[u8], limits: &JsonLimits) -> Result<Map<String, Value>, JsonError> {
    let text = bounded(text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text), limits)?;
    match serde_json::from_slice(&text)? {
        Value::Object(map) => Ok(map),
        other => Err(JsonError::NotAnObject {
            found: kind(&other),
        }),
    }
}

/// Reads and parses a file whose top level must be an object; never reads more than the limit.
pub fn read_object(path: &Path, limits: &JsonLimits) -> Result<Map<String, Value>, JsonError> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected a regular file").into());
    }
    let too_large = |found| JsonError::TooLarge {
        found,
        limit: limits.size_bytes,
    };
    if metadata.len() > limits.size_bytes {
        return Err(too_large(metadata.len()));
    }
    // The file may have grown since it was asked for its size.
    let mut text = Vec::new();
    let file = std::fs::File::open(path)?;
    io::Read::read_to_end(&mut io::Read::take(file, limits.size_bytes + 1), &mut text)?;
    parse_object(&text, limits)
}

/// JSON's name for a value.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Checks size and depth, and quotes the non-finite numbers of Python.
pub(super) fn bounded<'a>(text: &'a [u8], limits: &JsonLimits) -> Result<Cow<'a, [u8]>, JsonError> {
    if text.len() as u64 > limits.size_bytes {
        return Err(JsonError::TooLarge {
            found: text.len() as u64,
            limit: limits.size_bytes,
        });
    }
    let mut quoted: Vec<u8> = Vec::new();
    let mut copied = 0;
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match byte {
            b'"' => at = string_end(text, at),
            b'[' | b'{' => {
                depth += 1;
                if depth > limits.depth {
                    return Err(JsonError::TooDeep {
                        limit: limits.depth,
                        at,
                    });
                }
                at += 1;
            }
            b']' | b'}' => {
                depth = depth.saturating_sub(1);
                at += 1;
            }
            b'N' | b'I' | b'-' => match python_number(text.get(at..).unwrap_or(&[])) {
                Some(word) => {
                    quoted.extend_from_slice(text.get(copied..at).unwrap_or(&[]));
                    quoted.push(b'"');
                    quoted.extend_from_slice(word);
                    quoted.push(b'"');
                    at += word.len();
                    copied = at;
                }
                None => at += 1,
            },
            _ => at += 1,
        }
    }
    if copied == 0 {
        return Ok(Cow::Borrowed(text));
    }
    quoted.extend_from_slice(text.get(copied..).unwrap_or(&[]));
    Ok(Cow::Owned(quoted))
}

/// Index after the closing quote of the string that opens at `at`.
fn string_end(text: &[u8], at: usize) -> usize {
    let mut next = at + 1;
    while let Some(&byte) = text.get(next) {
        match byte {
            b'"' => return next + 1,
            b'\\' => next += 2,
            _ => next += 1,
        }
    }
    next
}

fn python_number(text: &[u8]) -> Option<&'static [u8]> {
    [&b"NaN"[..], b"Infinity", b"-Infinity"]
        .into_iter()
        .find(|word| text.starts_with(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Value, String> {
        parse_object(text.as_bytes(), &CONFIG_LIMITS)
            .map(Value::Object)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_top_level_is_an_object() {
        assert_eq!(parse(r#"{"a":[1]}"#), Ok(serde_json::json!({"a": [1]})));
        assert_eq!(
            parse("[]").unwrap_err(),
            "expected a json object, found an array"
        );
        assert_eq!(
            parse("null").unwrap_err(),
            "expected a json object, found null"
        );
        assert!(parse("").unwrap_err().starts_with("expected json: EOF"));
    }

    #[test]
    fn a_byte_order_mark_is_left_out() {
        assert_eq!(parse("\u{feff}{\"a\":1}"), Ok(serde_json::json!({"a": 1})));
        assert!(parse("\u{feff}\u{feff}{}").is_err());
    }

    #[test]
    fn depth_is_bounded_outside_strings() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(64), "]".repeat(64));
        assert_eq!(
            parse(&deep).unwrap_err(),
            "expected json nested at most 64 deep, found more at byte 68"
        );
        let fine = format!("{{\"a\":{}{}}}", "[".repeat(63), "]".repeat(63));
        assert!(parse(&fine).is_ok());
        let text = format!("{{\"a\":\"\\\"{}\"}}", "[".repeat(500));
        assert!(parse(&text).is_ok());
        let endless = "[".repeat(1 << 20);
        assert!(parse(&endless).is_err());
    }

    #[test]
    fn size_is_bounded() {
        let limits = JsonLimits {
            size_bytes: 8,
            depth: 4,
        };
        let error = parse_object(b"{\"a\": 123}", &limits).unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected at most 8 bytes of json, found 10"
        );
    }

    #[test]
    fn python_numbers_become_strings() {
        assert_eq!(
            parse(
                r#"{"limit":[0.0, Infinity],"low":-Infinity,"n":NaN,"s":"NaN -Infinity","x":-1}"#
            ),
            Ok(serde_json::json!({
                "limit": [0.0, "Infinity"], "low": "-Infinity", "n": "NaN", "s": "NaN -Infinity", "x": -1
            }))
        );
    }
}
