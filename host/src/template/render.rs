//! A compiled chat template and one render of it.

use std::io;

use minijinja::Environment;
use minijinja::value::Value;
use serde_json::{Map, Value as Json};

use super::clock::WallClock;
use super::environment::{self, NAME};
use super::error::TemplateError;
use super::messages::{self, ContinueFinal};
use super::scan;
use super::stack::on_deep_stack;
use super::trust::{Guard, Level, Marker};
use super::value::{AsGiven, each_string, to_value};
use crate::text::{ControlTokens, NamedTokens, Prompt};

/// Variables that the renderer sets itself.
const RESERVED: [&str; 6] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "strftime_now",
    "raise_exception",
];

/// Bounds on what a template may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size of a template. The largest published ones have about 20 kB.
    pub source_bytes: usize,
    /// Number of tags in a template. Large ones have some hundreds.
    pub tags: usize,
    /// Code in one tag, string literals aside: an expression nests at most this deep.
    pub tag_bytes: usize,
    /// Engine steps for one render; a step also pays for 64 bytes of text. Long chats need some 100,000.
    pub fuel: u64,
    /// Size of a rendered prompt.
    pub output_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            source_bytes: 1 << 20,
            tags: 4096,
            tag_bytes: 8192,
            fuel: 4_000_000,
            output_bytes: 64 << 20,
        }
    }
}

/// What a chat template is rendered with.
#[derive(Debug, Clone, Copy)]
pub struct RenderInput<'a> {
    /// The conversation, as OpenAI's API writes it.
    pub messages: &'a [Json],
    /// Tool definitions, or nothing.
    pub tools: Option<&'a Json>,
    /// Documents for retrieval templates, or nothing.
    pub documents: Option<&'a Json>,
    /// Whether the prompt ends with the header of the answer.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends inside the last message instead.
    pub continue_final: Option<ContinueFinal>,
    /// The tokenizer's named tokens (`bos_token`): trusted.
    pub named_tokens: &'a NamedTokens,
    /// Further variables (`enable_thinking`), from the request.
    pub variables: &'a Map<String, Json>,
    /// What `strftime_now` shows.
    pub now: WallClock,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    guard: Guard,
    limits: Limits,
}

impl ChatTemplate {
    /// Compiles `source` for a tokenizer with these control tokens.
    pub fn compile(
        source: &str,
        control: &ControlTokens,
        limits: Limits,
    ) -> Result<Self, TemplateError> {
        if source.len() > limits.source_bytes {
            return Err(TemplateError::TooLarge {
                what: "the chat template",
                limit_bytes: limits.source_bytes,
            });
        }
        let tags = scan::tags(source);
        if tags.len() > limits.tags {
            return Err(TemplateError::TooManyTags {
                tags: tags.len(),
                limit: limits.tags,
            });
        }
        if tags.iter().any(|tag| tag.code_bytes() > limits.tag_bytes) {
            return Err(TemplateError::TooLarge {
                what: "a tag of the chat template",
                limit_bytes: limits.tag_bytes,
            });
        }
        Ok(ChatTemplate {
            env: on_deep_stack(|| environment::compile(source, &tags, limits.fuel))?,
            guard: Guard::new(control, source, scan::sought_literals(source, &tags)),
            source: source.to_owned(),
            limits,
        })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template mentions a variable or key anywhere: a hint that it can use `tools`, for example.
    pub fn mentions(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// Renders a prompt. Control tokens that the request spells are listed in [`Prompt::literal`].
    pub fn render(&self, input: &RenderInput<'_>) -> Result<Prompt, TemplateError> {
        on_deep_stack(|| self.render_here(input))
    }

    fn render_here(&self, input: &RenderInput<'_>) -> Result<Prompt, TemplateError> {
        if let Some(name) = input
            .variables
            .keys()
            .find(|name| RESERVED.contains(&name.as_str()))
        {
            return Err(TemplateError::ReservedVariable { name: name.clone() });
        }
        if input.add_generation_prompt && input.continue_final.is_some() {
            let detail =
                "add_generation_prompt and continue_final_message exclude each other".to_owned();
            return Err(TemplateError::Messages { detail });
        }
        let mut messages = messages::normalize(input.messages)?;
        let marker = self.marker(input, &messages)?;
        let fragments = self.any_fragment(input, &messages, &marker);
        if let Some(wanted) = input.continue_final {
            messages::mark_final(
                &mut messages,
                wanted.field,
                &format!("{} ", marker.unused()),
            )?;
        }
        let rendered = self.run(input, &messages, &marker)?;
        let control = self.guard.tokens().find_in(&rendered);
        if !fragments || control.is_empty() {
            return Ok(marker.unmark(&rendered));
        }
        // See `trust`: fragments could have been joined into one of these tokens.
        let marked = self.run(input, &messages, &marker.at(Level::Fragments))?;
        let prompt = marker.unmark(&rendered);
        let strict = marker.unmark(&marked);
        if strict.text() == prompt.text() {
            return Ok(strict);
        }
        let strict_control = self.guard.tokens().find_in(&marked);
        let differs = control.iter().enumerate().find(|(n, spelling)| {
            strict_control.get(*n).map(|other| other.id) != Some(spelling.id)
        });
        match differs {
            None if control.len() == strict_control.len() => Ok(prompt),
            other => {
                let id = other.map_or(0, |(_, spelling)| spelling.id);
                let token = self
                    .guard
                    .tokens()
                    .spelling(id)
                    .unwrap_or_default()
                    .to_owned();
                Err(TemplateError::ControlFromInput { token })
            }
        }
    }

    fn marker(
        &self,
        input: &RenderInput<'_>,
        messages: &[Json],
    ) -> Result<Marker<'_>, TemplateError> {
        let mut texts: Vec<&str> = vec![&self.source];
        texts.extend(input.named_tokens.values().map(String::as_str));
        each_input(input, messages, &mut |text| texts.push(text));
        Marker::new(&self.guard, texts.into_iter()).ok_or_else(|| TemplateError::Messages {
            detail: "the messages use so many private-use characters that none are left to mark them with".to_owned(),
        })
    }

    fn any_fragment(
        &self,
        input: &RenderInput<'_>,
        messages: &[Json],
        marker: &Marker<'_>,
    ) -> bool {
        let mut any = false;
        each_input(input, messages, &mut |text| {
            any = any || marker.has_fragments(text)
        });
        any
    }

    /// Runs the template once and cuts the result where a message is to be continued.
    fn run(
        &self,
        input: &RenderInput<'_>,
        messages: &[Json],
        marker: &Marker<'_>,
    ) -> Result<String, TemplateError> {
        let failed = |error: &minijinja::Error| TemplateError::from_engine(error, self.limits.fuel);
        let template = self
            .env
            .get_template(NAME)
            .map_err(|error| failed(&error))?;
        let mut out = Bounded {
            bytes: Vec::new(),
            limit: self.limits.output_bytes,
            exceeded: false,
        };
        let result = template
            .render_captured_to(self.context(input, messages, marker), &mut out)
            .map(|_| ());
        if out.exceeded {
            let limit_bytes = self.limits.output_bytes;
            return Err(TemplateError::TooLarge {
                what: "the rendered prompt",
                limit_bytes,
            });
        }
        result.map_err(|error| failed(&error))?;
        let text = String::from_utf8_lossy(&out.bytes).into_owned();
        if input.continue_final.is_none() {
            return Ok(text);
        }
        let mark = marker.unused();
        let (before, after) = text
            .rsplit_once(mark)
            .ok_or_else(|| TemplateError::Messages {
                detail: "the chat template does not print the message that is to be continued"
                    .to_owned(),
            })?;
        // The blank behind the mark is gone if the template trims messages; then it would have trimmed this one too.
        Ok(if after.starts_with(' ') {
            before.to_owned()
        } else {
            before.trim_end().to_owned()
        })
    }

    fn context(&self, input: &RenderInput<'_>, messages: &[Json], marker: &Marker<'_>) -> Value {
        let optional =
            |value: Option<&Json>| value.map_or(Value::from(()), |value| to_value(value, marker));
        let now = input.now;
        let mut entries: Vec<(String, Value)> = Vec::new();
        for (name, text) in input.named_tokens {
            entries.push((
                name.clone(),
                to_value(&Json::String(text.clone()), &AsGiven),
            ));
        }
        for (name, value) in input.variables {
            entries.push((name.clone(), to_value(value, marker)));
        }
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| {
                let role = message.get("role").and_then(Json::as_str);
                to_value(message, &marker.for_role(role))
            })
            .collect();
        entries.extend([
            ("messages".to_owned(), Value::from(messages)),
            ("tools".to_owned(), optional(input.tools)),
            ("documents".to_owned(), optional(input.documents)),
            (
                "add_generation_prompt".to_owned(),
                Value::from(input.add_generation_prompt),
            ),
            (
                "strftime_now".to_owned(),
                Value::from_function(move |format: &str| now.strftime(format)),
            ),
        ]);
        Value::from_pairs(entries)
    }
}

/// Calls `visit` with every string of the request, keys included.
fn each_input<'a>(input: &RenderInput<'a>, messages: &'a [Json], visit: &mut impl FnMut(&'a str)) {
    for value in messages
        .iter()
        .chain(input.tools)
        .chain(input.documents)
        .chain(input.variables.values())
    {
        each_string(value, visit);
    }
}

/// A buffer that refuses to grow over its limit.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
    exceeded: bool,
}

impl io::Write for &mut Bounded {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + part.len() > self.limit {
            self.exceeded = true;
            return Err(io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
