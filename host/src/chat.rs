//! A conversation: messages to a prompt, the engine's tokens to text, and when an answer ends.
//!
//! Sits between the command line and the engine. Owns the messages; knows no terminal.

use mlxcel_registry::checkpoint::{Checkpoint, GgufFile};
use serde_json::{Map, Value, json};

use crate::engine::{
    CancelToken, EngineError, EngineFacts, EngineHandle, Event, FinishReason, GenerateRequest,
    GenerateStats, OpenedModel,
};
use crate::sampling::{BreakerCache, Breakers, SamplingParams};
use crate::template::{ChatTemplate, Limits, RenderInput, TemplateError, TemplateSet, WallClock};
use crate::text::{
    BosRule, Boundary, DetokenizerOptions, EosSet, GgufTokenizer, Prompt, StopError, StopMatcher,
    StopText, StreamStart, TextError, Tokenizer,
};

/// Why a turn failed. The conversation is as before.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The engine, the family or the backend.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The stop strings.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// Metadata of a GGUF file.
    #[error("tokenizer metadata: {message}")]
    Metadata {
        /// What is wrong.
        message: String,
    },
    /// Tokenizer and model do not belong together.
    #[error(
        "the tokenizer has {tokenizer} ids and the model {model}: tokenizer files and weights are of different models"
    )]
    Vocabulary {
        /// Ids of the tokenizer.
        tokenizer: usize,
        /// Rows of the embedding.
        model: usize,
    },
    /// The model cannot give what would end its answers.
    #[error(
        "no answer would end: the end-of-sequence ids {ids} are all outside the model's {model} tokens"
    )]
    EndOfAnswer {
        /// The ids, with where each was found.
        ids: String,
        /// Rows of the embedding.
        model: usize,
    },
}

/// What a checkpoint says about text: tokenizer, ends of answers, chat template.
#[derive(Clone)]
pub struct ModelText {
    /// Characters to ids and back.
    pub tokenizer: Tokenizer,
    /// Ids that end an answer.
    pub eos: EosSet,
    /// The checkpoint's templates; none for base models.
    pub templates: Option<TemplateSet>,
    /// Whether the prompt gets the beginning-of-sequence id that the template left out.
    bos: BosRule,
    /// Sequence breakers as tokens, once somebody asked for them.
    breakers: BreakerCache,
}

impl ModelText {
    /// Reads the text side of an opened checkpoint.
    pub fn of(opened: &OpenedModel) -> Result<Self, ChatError> {
        let mut text = match opened.checkpoint.gguf() {
            Some(file) => Self::of_gguf(file)?,
            None => Self::of_directory(&opened.checkpoint)?,
        };
        // A model may have more rows than ids, padded for speed, but not fewer.
        let (tokenizer, model) = (text.tokenizer.vocab_size(), opened.desc.vocab_size);
        if tokenizer > model {
            return Err(ChatError::Vocabulary { tokenizer, model });
        }
        let beyond: Vec<String> = text
            .eos
            .take_beyond(model)
            .iter()
            .map(ToString::to_string)
            .collect();
        if !beyond.is_empty() {
            let ids = beyond.join(", ");
            if text.eos.is_empty() {
                return Err(ChatError::EndOfAnswer { ids, model });
            }
            tracing::warn!(%ids, model, "ids that end an answer and that the model does not have are left out");
        }
        Ok(text)
    }

    /// The ids of a rendered conversation.
    pub fn encode_rendered(&self, prompt: &Prompt) -> Result<Vec<u32>, TextError> {
        self.tokenizer.encode_template(prompt, self.bos)
    }

    /// Turns what sampling parameters say as text into tokens. Reads the whole vocabulary the first time.
    pub fn resolve(&self, params: &mut SamplingParams) -> Result<(), TextError> {
        if !params.looks_for_repetitions() || params.dry_sequence_breakers.tokens().is_some() {
            return Ok(());
        }
        let breakers = &mut params.dry_sequence_breakers;
        let tokenizer = &self.tokenizer;
        let vocab_size = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let tokens = self.breakers.get(breakers.texts(), || {
            Breakers::find(
                breakers.texts(),
                vocab_size,
                |id| tokenizer.token_bytes(id),
                |text| tokenizer.encode_text(text, Boundary::Bare),
            )
        })?;
        breakers.resolve(tokens);
        Ok(())
    }

    fn of_directory(checkpoint: &Checkpoint) -> Result<Self, ChatError> {
        let dir = checkpoint.path();
        let tokenizer = Tokenizer::from_directory(dir)?;
        let eos = EosSet::from_directory(dir, &tokenizer)?;
        let templates = optional(TemplateSet::from_directory(dir))?;
        Ok(Self {
            tokenizer,
            eos,
            templates,
            bos: BosRule::FromTemplate,
            breakers: BreakerCache::default(),
        })
    }

    fn of_gguf(file: &GgufFile) -> Result<Self, ChatError> {
        let metadata = gguf_tokenizer(file)?;
        let tokenizer = Tokenizer::from_gguf(&metadata)?;
        let eos = EosSet::from_gguf(&metadata, &tokenizer);
        let prefix = "tokenizer.chat_template.";
        let named = file.keys().filter_map(|key| {
            let name = key.strip_prefix(prefix)?.to_owned();
            Some((name, file.str(key).ok()??.to_owned()))
        });
        let named: Vec<(String, String)> = named.collect();
        let default = file
            .str("tokenizer.chat_template")
            .map_err(metadata_error)?;
        let templates = optional(TemplateSet::from_gguf(default, named))?;
        Ok(Self {
            tokenizer,
            eos,
            templates,
            bos: BosRule::IfMissing,
            breakers: BreakerCache::default(),
        })
    }
}

/// A checkpoint without a template is none that is broken.
fn optional(set: Result<TemplateSet, TemplateError>) -> Result<Option<TemplateSet>, TemplateError> {
    match set {
        Ok(set) => Ok(Some(set)),
        Err(TemplateError::None) => Ok(None),
        Err(error) => Err(error),
    }
}

fn metadata_error(error: impl std::fmt::Display) -> ChatError {
    ChatError::Metadata {
        message: error.to_string(),
    }
}

fn gguf_tokenizer(file: &GgufFile) -> Result<GgufTokenizer, ChatError> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let id = |name: &str| file.u32(&key(name)).map_err(metadata_error);
    let flag = |name: &str| file.bool(&key(name)).map_err(metadata_error);
    let text = |name: &str| file.str(&key(name)).map_err(metadata_error);
    let texts = |name: &str| -> Result<Vec<String>, ChatError> {
        let list = file.strs(&key(name)).map_err(metadata_error)?;
        Ok(list
            .unwrap_or_default()
            .into_iter()
            .map(str::to_owned)
            .collect())
    };
    let model = text("model")?.ok_or_else(|| ChatError::Metadata {
        message: "the file has no \"tokenizer.ggml.model\": it holds no tokenizer".to_owned(),
    })?;
    Ok(GgufTokenizer {
        model: model.to_owned(),
        pre: text("pre")?.map(str::to_owned),
        tokens: texts("tokens")?,
        scores: file
            .f32s(&key("scores"))
            .map_err(metadata_error)?
            .unwrap_or_default(),
        token_types: file
            .i32s(&key("token_type"))
            .map_err(metadata_error)?
            .unwrap_or_default(),
        merges: texts("merges")?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
    })
}

/// How a conversation is held.
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// First message, by the system.
    pub system: Option<String>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens of an answer; none is until the model ends it or the context is full.
    pub max_new_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// Whether the model's own ends do not end it.
    pub ignore_eos: bool,
    /// Template in place of the checkpoint's.
    pub template: Option<TemplateSet>,
    /// Whether the text given is a whole prompt, not a message.
    pub is_raw: bool,
}

/// A finished answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its text, without a stop string.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// Figures.
    pub stats: GenerateStats,
}

/// A conversation with a loaded model.
pub struct ChatSession {
    engine: EngineHandle,
    text: ModelText,
    options: ChatOptions,
    template: Option<ChatTemplate>,
    stops: StopMatcher,
    messages: Vec<Value>,
    cancel: CancelToken,
}

impl ChatSession {
    /// Begins a conversation. A template that does not compile and stop strings that are not
    /// possible are told now.
    pub fn new(
        engine: EngineHandle,
        facts: &EngineFacts,
        text: ModelText,
        mut options: ChatOptions,
    ) -> Result<Self, ChatError> {
        let (tokenizer, model) = (text.tokenizer.vocab_size(), facts.vocab_size);
        if tokenizer > model {
            return Err(ChatError::Vocabulary { tokenizer, model });
        }
        let stops = StopMatcher::new(options.stops.iter().cloned(), StopText::Exclude)?;
        text.resolve(&mut options.sampling)?;
        if options.ignore_eos {
            options.sampling.forbid(text.eos.ids());
        }
        let template = if options.is_raw {
            None
        } else {
            let set = options
                .template
                .as_ref()
                .or(text.templates.as_ref())
                .ok_or(TemplateError::None)?;
            let source = set.select(None, false)?;
            Some(ChatTemplate::compile(
                source,
                text.tokenizer.control(),
                Limits::default(),
            )?)
        };
        let mut session = Self {
            engine,
            text,
            options,
            template,
            stops,
            messages: Vec::new(),
            cancel: CancelToken::default(),
        };
        session.clear();
        Ok(session)
    }

    /// Forgets everything but the system message.
    pub fn clear(&mut self) {
        self.messages.clear();
        if let Some(system) = &self.options.system {
            self.messages
                .push(json!({"role": "system", "content": system}));
        }
    }

    /// What ends the answer to the next [`ChatSession::ask`] early, from any thread.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// Asks and hands out text as it comes. After an error the conversation is as before.
    pub fn ask(&mut self, text: &str, on_text: &mut dyn FnMut(&str)) -> Result<Answer, ChatError> {
        let cancel = std::mem::take(&mut self.cancel);
        let asked_before = self.messages.len();
        let answer = self
            .prompt(text)
            .and_then(|prompt| self.answer(prompt, cancel, on_text));
        match &answer {
            Ok(answer) if !self.options.is_raw => {
                self.messages
                    .push(json!({"role": "assistant", "content": answer.text}));
            }
            _ => self.messages.truncate(asked_before),
        }
        answer
    }

    fn prompt(&mut self, text: &str) -> Result<Vec<u32>, ChatError> {
        let Some(template) = &self.template else {
            return Ok(self
                .text
                .tokenizer
                .encode_markup(text, Boundary::AsTrained)?);
        };
        self.messages.push(json!({"role": "user", "content": text}));
        let prompt = template.render(&RenderInput {
            messages: &self.messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            continue_final: None,
            named_tokens: self.text.tokenizer.named(),
            variables: &Map::new(),
            now: WallClock::now(),
        })?;
        Ok(self.text.encode_rendered(&prompt)?)
    }

    fn answer(
        &self,
        prompt: Vec<u32>,
        cancel: CancelToken,
        on_text: &mut dyn FnMut(&str),
    ) -> Result<Answer, ChatError> {
        let start = if self.options.is_raw {
            StreamStart::Continuation
        } else {
            StreamStart::Text
        };
        let mut detokenizer = self.text.tokenizer.detokenizer(DetokenizerOptions {
            skip_control: true,
            start,
        });
        let mut stops = self.stops.clone();
        let mut text = String::new();
        let mut give = |piece: &str, text: &mut String| {
            if !piece.is_empty() {
                text.push_str(piece);
                on_text(piece);
            }
        };
        let request = GenerateRequest {
            prompt,
            sampling: self.options.sampling.clone(),
            max_new_tokens: self.options.max_new_tokens,
            eos: match self.options.ignore_eos {
                true => Vec::new(),
                false => self.text.eos.ids().collect(),
            },
            ..GenerateRequest::default()
        };
        let mut is_stopped = false;
        for event in self.engine.generate(request, cancel.clone())? {
            match event {
                Event::Prefill { .. } => {}
                // Tokens that were on their way when a stop string ended the answer.
                Event::Token { .. } if is_stopped => {}
                Event::Token { id, .. } => {
                    let output = stops.push(&detokenizer.push(id));
                    give(&output.text, &mut text);
                    if output.stopped.is_some() {
                        is_stopped = true;
                        cancel.cancel();
                    }
                }
                Event::Done { reason, stats } => {
                    if !is_stopped {
                        let mut last = stops.push(&detokenizer.finish());
                        if last.stopped.is_none() {
                            last.text.push_str(&stops.finish().text);
                        }
                        give(&last.text, &mut text);
                    }
                    let reason = if is_stopped {
                        FinishReason::StopText
                    } else {
                        reason
                    };
                    return Ok(Answer {
                        text,
                        reason,
                        stats,
                    });
                }
                Event::Failed(error) => return Err(error.into()),
            }
        }
        Err(EngineError::Stopped {
            reason: "the answer ended without a word".to_owned(),
        }
        .into())
    }
}
