//! Which ids end an answer.
//!
//! Checkpoints name them in several files that often disagree (a chat model's `config.json` may still carry the base
//! model's id). All of them end the answer; each is kept with where it came from, for `inspect`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::Value;

use super::directory::{read_json, token_text};
use super::{GgufTokenizer, TextError, Tokenizer};

/// Where an end-of-sequence id was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EosSource {
    /// `eos_token_id` in `generation_config.json`.
    GenerationConfig,
    /// `eos_token_id` in `config.json`.
    Config,
    /// `text_config.eos_token_id` in `config.json`.
    TextConfig,
    /// `eos_token` in `tokenizer_config.json` or `special_tokens_map.json`.
    TokenizerConfig,
    /// `tokenizer.ggml.eos_token_id`.
    GgufEos,
    /// `tokenizer.ggml.eot_token_id`, end of turn.
    GgufEot,
    /// `tokenizer.ggml.eom_token_id`, end of message.
    GgufEom,
    /// A GGUF file without an end-of-turn id has a control token with a usual end-of-turn name.
    UsualName,
}

impl fmt::Display for EosSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EosSource::GenerationConfig => "generation_config.json eos_token_id",
            EosSource::Config => "config.json eos_token_id",
            EosSource::TextConfig => "config.json text_config.eos_token_id",
            EosSource::TokenizerConfig => "tokenizer eos_token",
            EosSource::GgufEos => "GGUF tokenizer.ggml.eos_token_id",
            EosSource::GgufEot => "GGUF tokenizer.ggml.eot_token_id",
            EosSource::GgufEom => "GGUF tokenizer.ggml.eom_token_id",
            EosSource::UsualName => "usual end-of-turn name",
        })
    }
}

/// One end-of-sequence id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EosEntry {
    /// The id.
    pub id: u32,
    /// How the vocabulary writes it, if it is in there.
    pub token: Option<String>,
    /// Every place that names it, in order.
    pub sources: Vec<EosSource>,
}

impl fmt::Display for EosEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sources: Vec<String> = self.sources.iter().map(EosSource::to_string).collect();
        write!(f, "{} ({})", self.id, sources.join(", "))
    }
}

/// All ids that end an answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EosSet {
    entries: Vec<EosEntry>,
}

/// The turn ends of models whose GGUF files often lack `eot_token_id`: Llama 3, ChatML, Gemma, Phi and GLM, Cohere.
const USUAL_TURN_ENDS: [&str; 6] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
];

impl EosSet {
    /// The set of the checkpoint in `dir`.
    pub fn from_directory(dir: &Path, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let generation = read_json(&dir.join("generation_config.json"))?;
        let config = read_json(&dir.join("config.json"))?;
        let tokenizer_config = read_json(&dir.join("tokenizer_config.json"))?;
        EosSet::from_configs(&generation, &config, &tokenizer_config, tokenizer)
    }

    /// As [`EosSet::from_directory`], from the contents of the files; absent ones are `Value::Null`.
    pub fn from_configs(
        generation_config: &Value,
        config: &Value,
        tokenizer_config: &Value,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TextError> {
        let mut found = Found::default();
        let text_config = config.get("text_config").unwrap_or(&Value::Null);
        for (file, value, source) in [
            (
                "generation_config.json",
                generation_config,
                EosSource::GenerationConfig,
            ),
            ("config.json", config, EosSource::Config),
            (
                "config.json text_config",
                text_config,
                EosSource::TextConfig,
            ),
        ] {
            found.add_json(file, value.get("eos_token_id"), source)?;
            check_bos(file, value.get("bos_token_id"))?;
        }
        let spelled = tokenizer_config
            .get("eos_token")
            .and_then(token_text)
            .and_then(|text| tokenizer.id_of(text));
        if let Some(id) = spelled.or_else(|| tokenizer.named_id("eos_token")) {
            found.add(id, EosSource::TokenizerConfig);
        }
        Ok(found.finish(tokenizer))
    }

    /// The set of a GGUF file.
    pub fn from_gguf(gguf: &GgufTokenizer, tokenizer: &Tokenizer) -> Self {
        let mut found = Found::default();
        for (id, source) in [
            (gguf.eos, EosSource::GgufEos),
            (gguf.eot, EosSource::GgufEot),
            (gguf.eom, EosSource::GgufEom),
        ] {
            if let Some(id) = id {
                found.add(id, source);
            }
        }
        if gguf.eot.is_none() {
            let usual = USUAL_TURN_ENDS
                .iter()
                .find_map(|name| tokenizer.id_of(name));
            if let Some(id) = usual.filter(|&id| tokenizer.control().contains(id)) {
                found.add(id, EosSource::UsualName);
            }
        }
        found.finish(tokenizer)
    }

    /// Whether `id` ends an answer.
    pub fn contains(&self, id: u32) -> bool {
        self.entries.iter().any(|entry| entry.id == id)
    }

    /// The ids with their sources, by id.
    pub fn entries(&self) -> &[EosEntry] {
        &self.entries
    }

    /// Takes out the ids that a model of `vocab_size` tokens cannot give and returns them.
    pub fn take_beyond(&mut self, vocab_size: usize) -> Vec<EosEntry> {
        let is_beyond = |entry: &mut EosEntry| entry.id as usize >= vocab_size;
        self.entries.extract_if(.., is_beyond).collect()
    }

    /// The ids alone.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().map(|entry| entry.id)
    }

    /// Whether no source names an id: answers then end only by length or stop string.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// The beginning is the tokenizer's affair. A value that is no id shows a file that was not written for a
/// model.
fn check_bos(file: &str, value: Option<&Value>) -> Result<(), TextError> {
    match value {
        None | Some(Value::Null | Value::Number(_) | Value::Array(_)) => Ok(()),
        Some(other) => Err(TextError::invalid(
            file,
            format!("bos_token_id has {other}, expected a token id"),
        )),
    }
}

#[derive(Default)]
struct Found(BTreeMap<u32, Vec<EosSource>>);

impl Found {
    fn add(&mut self, id: u32, source: EosSource) {
        let sources = self.0.entry(id).or_default();
        if !sources.contains(&source) {
            sources.push(source);
        }
    }

    /// A number, a list of numbers, or null.
    fn add_json(
        &mut self,
        file: &str,
        value: Option<&Value>,
        source: EosSource,
    ) -> Result<(), TextError> {
        match value {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Array(items)) => items
                .iter()
                .try_for_each(|item| self.add_number(file, item, source)),
            Some(item) => self.add_number(file, item, source),
        }
    }

    fn add_number(
        &mut self,
        file: &str,
        value: &Value,
        source: EosSource,
    ) -> Result<(), TextError> {
        let id = value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| {
                TextError::invalid(
                    file,
                    format!("eos_token_id has {value}, expected a token id or a list of them"),
                )
            })?;
        self.add(id, source);
        Ok(())
    }

    fn finish(self, tokenizer: &Tokenizer) -> EosSet {
        let entries = self
            .0
            .into_iter()
            .map(|(id, sources)| EosEntry {
                id,
                token: tokenizer.piece(id),
                sources,
            })
            .collect();
        EosSet { entries }
    }
}
