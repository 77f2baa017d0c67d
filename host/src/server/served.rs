//! The model that is served, and what requests need of it: plain data and the engine's handle.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use crate::chat::ModelText;
use crate::engine::{EngineFacts, EngineHandle};
use crate::sampling::SamplingParams;
use crate::template::{ChatTemplate, ContinueFinal, RenderInput, TemplateError, WallClock};
use crate::text::Prompt;

use super::error::{ApiError, Kind};

/// What is taken when a request does not say.
#[derive(Debug, Clone)]
pub struct Defaults {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Whether the model's own ends do not end an answer.
    pub ignore_eos: bool,
    /// Most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Variables of the chat template.
    pub template_variables: Map<String, Value>,
}

/// A loaded model.
pub struct Served {
    /// The engine.
    pub engine: EngineHandle,
    /// Facts of loading.
    pub facts: EngineFacts,
    /// Tokenizer and ends of answers.
    pub text: ModelText,
    /// The chat template; none for base models.
    pub template: Option<ChatTemplate>,
    /// The name that answers carry.
    pub id: String,
    /// Other names that requests may use.
    pub aliases: Vec<String>,
    /// Its files.
    pub path: PathBuf,
    /// Context of the checkpoint.
    pub trained_context_tokens: usize,
    /// Width of the model.
    pub hidden_size: usize,
    /// Bytes of keys and values of one token.
    pub kv_token_bytes: usize,
    /// What is taken when a request does not say.
    pub defaults: Defaults,
    /// When it was ready, in seconds of Unix time.
    pub created_s: u64,
}

/// What a chat prompt is made of.
#[derive(Debug, Default)]
pub struct ChatPrompt {
    /// The conversation.
    pub messages: Vec<Value>,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// Whether the prompt ends inside the last message.
    pub continue_final: Option<ContinueFinal>,
    /// Whether the prompt ends with the header of the answer.
    pub add_generation_prompt: bool,
}

impl Served {
    /// Checks the name of the model in a request.
    pub fn check_name(&self, name: Option<&str>) -> Result<(), ApiError> {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Ok(());
        };
        let is_known = name == self.id || self.aliases.iter().any(|alias| alias == name);
        if is_known {
            return Ok(());
        }
        let message = format!("the model {name:?} is not served here, only {:?}", self.id);
        Err(ApiError::new(Kind::NotFound, message)
            .with_code("model_not_found")
            .with_param("model"))
    }

    /// The prompt of a conversation as text.
    pub fn render(&self, chat: &ChatPrompt) -> Result<Prompt, ApiError> {
        let template = self.template.as_ref().ok_or(TemplateError::None)?;
        let mut variables = self.defaults.template_variables.clone();
        variables.extend(chat.variables.clone());
        Ok(template.render(&RenderInput {
            messages: &chat.messages,
            tools: None,
            documents: None,
            add_generation_prompt: chat.add_generation_prompt,
            continue_final: chat.continue_final,
            named_tokens: self.text.tokenizer.named(),
            variables: &variables,
            now: WallClock::now(),
        })?)
    }

    /// The prompt of a conversation as tokens.
    pub fn encode_chat(&self, chat: &ChatPrompt) -> Result<Vec<u32>, ApiError> {
        Ok(self.text.encode_rendered(&self.render(chat)?)?)
    }

    /// Refuses prompts of a field that the engine could never run.
    pub fn check_prompt(&self, field: &str, tokens: &[u32]) -> Result<(), ApiError> {
        if tokens.is_empty() {
            return Err(ApiError::field(
                field,
                "the prompt is empty, at least one token is needed",
            ));
        }
        let vocabulary = self.facts.vocab_size;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            let message = format!("the prompt has token {token}, the model has {vocabulary}");
            return Err(ApiError::field(field, message));
        }
        let context_tokens = self.facts.context_tokens.min(self.facts.kv_tokens);
        if tokens.len() > context_tokens {
            return Err(ApiError::too_long(tokens.len(), context_tokens));
        }
        Ok(())
    }

    /// Bytes of one page of the caches.
    pub fn page_bytes(&self) -> usize {
        self.kv_token_bytes * self.engine.figures().page_tokens
    }
}

/// Now, in seconds of Unix time.
pub fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
