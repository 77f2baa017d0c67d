//! Loading a tokenizer from the files of a checkpoint directory.
//!
//! `tokenizer.json` is the tokenizer. `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` only
//! add tokens that it lacks, mark tokens as special, give names to them and say whether BOS and EOS are added.

use std::collections::BTreeMap;
use std::path::Path;

use mlxcel_registry::checkpoint::json::{self, JsonLimits};
use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::TextError;
use super::guard::{guarded, plain_words};
use super::tokenizer::{Framing, NamedTokens, Tokenizer};

/// The largest published `tokenizer.json` have about 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
const SIDE_FILES: JsonLimits = JsonLimits {
    size_bytes: 32 << 20,
    depth: 64,
};

/// The names under which `transformers` stores special tokens.
const TOKEN_NAMES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
const TOKEN_LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The only parts of `tokenizer.json` that the library does not check or that need a decision here.
#[derive(Deserialize)]
struct Shell {
    #[serde(default)]
    added_tokens: Vec<ShellToken>,
    #[serde(default)]
    model: ShellModel,
}

#[derive(Deserialize)]
struct ShellToken {
    id: u64,
    content: String,
}

#[derive(Deserialize, Default)]
struct ShellModel {
    #[serde(default)]
    dropout: Option<f64>,
}

impl Tokenizer {
    /// Loads the tokenizer of the checkpoint in `dir`.
    pub fn from_directory(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let Some(json) = read_optional(&path, MAX_TOKENIZER_BYTES)? else {
            return Err(TextError::NoTokenizer {
                dir: dir.to_owned(),
                hint: other_format(dir),
            });
        };
        let config = read_json(&dir.join("tokenizer_config.json"))?;
        let map = read_json(&dir.join("special_tokens_map.json"))?;
        let added = read_json(&dir.join("added_tokens.json"))?;
        Tokenizer::from_files(&json, &config, &map, &added)
    }

    /// As [`Tokenizer::from_directory`], from the contents of the files; absent ones are `Value::Null`.
    pub fn from_files(
        tokenizer_json: &[u8],
        tokenizer_config: &Value,
        special_tokens_map: &Value,
        added_tokens: &Value,
    ) -> Result<Self, TextError> {
        let shell: Shell = serde_json::from_slice(tokenizer_json).map_err(|error| {
            TextError::invalid("tokenizer.json", plain_words(&error.to_string()))
        })?;
        if let Some(dropout) = shell.model.dropout.filter(|&dropout| dropout != 0.0) {
            let detail = format!(
                "model.dropout is {dropout}, expected none: the same text would give varying ids"
            );
            return Err(TextError::invalid("tokenizer.json", detail));
        }
        let mut library = guarded("read tokenizer.json", || {
            tokenizers::Tokenizer::from_bytes(tokenizer_json)
        })?;
        for token in &shell.added_tokens {
            check_id(&library, "tokenizer.json", &token.content, token.id)?;
        }
        add_declared(&mut library, tokenizer_config, added_tokens)?;
        let named = named_tokens(&library, tokenizer_config, special_tokens_map);
        mark_special(&mut library, tokenizer_config, special_tokens_map, &named)?;
        let flag = |key: &str| tokenizer_config.get(key).and_then(Value::as_bool);
        let framing = Framing {
            add_bos: flag("add_bos_token"),
            add_eos: flag("add_eos_token"),
        };
        Tokenizer::assemble(library, named, framing)
    }
}

/// Adds tokens that the side files declare and `tokenizer.json` lacks. They must get exactly the declared ids.
fn add_declared(
    library: &mut tokenizers::Tokenizer,
    config: &Value,
    added: &Value,
) -> Result<(), TextError> {
    let mut missing: BTreeMap<u64, (&'static str, AddedToken)> = BTreeMap::new();
    for (content, id) in added.as_object().into_iter().flatten() {
        let id = id.as_u64().ok_or_else(|| {
            TextError::invalid(
                "added_tokens.json",
                format!("id of `{content}` is {id}, expected a whole number"),
            )
        })?;
        missing.insert(
            id,
            (
                "added_tokens.json",
                AddedToken::from(content.clone(), false).normalized(false),
            ),
        );
    }
    for (id, entry) in config
        .get("added_tokens_decoder")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let bad = |detail: String| TextError::invalid("tokenizer_config.json", detail);
        let content = entry
            .get("content")
            .and_then(Value::as_str)
            .ok_or_else(|| bad(format!("added_tokens_decoder.{id} has no text `content`")))?;
        let id: u64 = id.parse().map_err(|_| {
            bad(format!(
                "added_tokens_decoder has key `{id}`, expected a token id"
            ))
        })?;
        let flag = |key: &str| entry.get(key).and_then(Value::as_bool).unwrap_or(false);
        let token = AddedToken::from(content, flag("special"))
            .normalized(flag("normalized"))
            .lstrip(flag("lstrip"))
            .rstrip(flag("rstrip"))
            .single_word(flag("single_word"));
        missing.insert(id, ("tokenizer_config.json", token));
    }
    missing.retain(|_, (_, token)| library.token_to_id(&token.content).is_none());
    // Ascending ids: the library gives the next free id to each new token.
    for (id, (file, token)) in missing {
        let content = token.content.clone();
        guarded("add a token", || {
            library.add_tokens(&[token]);
            Ok(())
        })?;
        check_id(library, file, &content, id)?;
    }
    Ok(())
}

fn check_id(
    library: &tokenizers::Tokenizer,
    file: &str,
    token: &str,
    declared: u64,
) -> Result<(), TextError> {
    let actual = library.token_to_id(token);
    if actual.map(u64::from) == Some(declared) {
        return Ok(());
    }
    Err(TextError::TokenId {
        what: file.to_owned(),
        token: token.to_owned(),
        declared,
        actual: actual.map_or_else(|| "none".to_owned(), |id| id.to_string()),
    })
}

/// Named tokens that the vocabulary has. `special_tokens_map.json` is the older file, so the config wins.
///
/// A name whose text is not in the vocabulary is left out: `transformers` would give it an id behind the model's last
/// one, which no model can use.
fn named_tokens(library: &tokenizers::Tokenizer, config: &Value, map: &Value) -> NamedTokens {
    let mut named = NamedTokens::new();
    for name in TOKEN_NAMES {
        let text = [config, map]
            .into_iter()
            .find_map(|file| file.get(name).and_then(token_text));
        if let Some(text) = text.filter(|text| library.token_to_id(text).is_some()) {
            named.insert(name.to_owned(), text.to_owned());
        }
    }
    named
}

/// The text of a special token, which is written as a string or as an object with `content`.
pub(super) fn token_text(value: &Value) -> Option<&str> {
    value
        .as_str()
        .or_else(|| value.get("content").and_then(Value::as_str))
}

/// Makes every named and listed special token special in the library, where it exists but was not marked.
fn mark_special(
    library: &mut tokenizers::Tokenizer,
    config: &Value,
    map: &Value,
    named: &NamedTokens,
) -> Result<(), TextError> {
    let mut texts: Vec<String> = named.values().cloned().collect();
    for file in [config, map] {
        for list in TOKEN_LISTS {
            match file.get(list) {
                Some(Value::Array(items)) => {
                    texts.extend(items.iter().filter_map(token_text).map(str::to_owned))
                }
                Some(Value::Object(items)) => {
                    texts.extend(items.values().filter_map(token_text).map(str::to_owned))
                }
                _ => {}
            }
        }
    }
    let known = library.get_added_tokens_decoder();
    let unmarked: Vec<AddedToken> = texts
        .into_iter()
        .filter(|text| !text.is_empty())
        .filter_map(|text| {
            let id = library.token_to_id(&text)?;
            match known.get(&id) {
                Some(token) if token.special => None,
                Some(token) => Some(AddedToken {
                    special: true,
                    ..token.clone()
                }),
                None => Some(AddedToken::from(text, true)),
            }
        })
        .collect();
    guarded("mark special tokens", || {
        library.add_special_tokens(&unmarked);
        Ok(())
    })
}

fn other_format(dir: &Path) -> String {
    let found: Vec<&str> = [
        "tokenizer.model",
        "vocab.json",
        "tekken.json",
        "vocab.txt",
        "tiktoken.model",
    ]
    .into_iter()
    .filter(|name| dir.join(name).is_file())
    .collect();
    if found.is_empty() {
        String::new()
    } else {
        format!(
            "; found {}, which must be converted to `tokenizer.json` first",
            found.join(", ")
        )
    }
}

pub(super) fn read_json(path: &Path) -> Result<Value, TextError> {
    match read_optional(path, SIDE_FILES.size_bytes)? {
        None => Ok(Value::Null),
        Some(bytes) => json::parse_object(&bytes, &SIDE_FILES)
            .map(Value::Object)
            .map_err(|error| TextError::invalid(path.display().to_string(), error.to_string())),
    }
}

fn read_optional(path: &Path, limit_bytes: u64) -> Result<Option<Vec<u8>>, TextError> {
    let failed = |source| TextError::Read {
        path: path.to_owned(),
        source,
    };
    let bytes = match std::fs::metadata(path) {
        // A pipe would be waited for, a device read without end.
        Ok(metadata) if !metadata.is_file() => {
            let kind = std::io::ErrorKind::InvalidInput;
            return Err(failed(std::io::Error::new(kind, "expected a regular file")));
        }
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if bytes > limit_bytes {
        return Err(TextError::TooLarge {
            what: path.display().to_string(),
            bytes,
            limit_bytes,
        });
    }
    std::fs::read(path).map(Some).map_err(failed)
}
