//! Control tokens and a short way to render for tests.

use serde_json::{Map, Value};

use super::*;
use crate::text::{ControlTokens, NamedTokens, Prompt};

pub(super) const CONTROL: [&str; 8] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<s>",
    "</s>",
    "<|channel>",
];

pub(super) const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content \
     | trim }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}";

pub(super) fn control() -> ControlTokens {
    ControlTokens::new((0..).zip(CONTROL).map(|(id, text)| (id, text.to_owned())))
}

pub(super) fn render(source: &str, messages: &Value) -> Result<Prompt, TemplateError> {
    render_with(source, messages, Limits::default(), &Map::new())
}

pub(super) fn render_with(
    source: &str,
    messages: &Value,
    limits: Limits,
    variables: &Map<String, Value>,
) -> Result<Prompt, TemplateError> {
    let input = RenderInput {
        messages: messages.as_array().unwrap(),
        tools: None,
        documents: None,
        add_generation_prompt: false,
        continue_final: None,
        named_tokens: &NamedTokens::from([("bos_token".to_owned(), "<s>".to_owned())]),
        variables,
        now: WallClock {
            unix_seconds: 0,
            utc_offset_seconds: 0,
        },
    };
    ChatTemplate::compile(source, &control(), limits)?.render(&input)
}

/// The control tokens of a prompt that count, in order.
pub(super) fn trusted(prompt: &Prompt) -> Vec<String> {
    let literal = prompt.literal();
    control()
        .find_in(prompt.text())
        .into_iter()
        .filter(|spelling| !literal.contains(&spelling.range))
        .map(|spelling| prompt.text()[spelling.range].to_owned())
        .collect()
}
