//! Messages as templates expect them.

use serde_json::{Map, Value};

use super::TemplateError;

/// The names under which a message's reasoning is passed. The first is the one that most templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A text field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MessageField {
    /// `content`, a string or a list of parts.
    #[default]
    Content,
    /// `reasoning_content`.
    Reasoning,
}

/// Ask for a prompt that ends inside the last message, for the model to continue it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContinueFinal {
    /// The field to continue.
    pub field: MessageField,
}

/// Checks that every message is an object, drops null fields and fills in the usual names of reasoning.
///
/// A null field (`content` beside `tool_calls`) is dropped because templates handle a missing key and would print
/// "None" for a null one; `transformers` does the same.
pub(super) fn normalize(messages: &[Value]) -> Result<Vec<Value>, TemplateError> {
    if messages.is_empty() {
        return Err(bad(
            "the conversation is empty, expected at least one message",
        ));
    }
    messages
        .iter()
        .enumerate()
        .map(|(index, message)| {
            let fields = message.as_object().ok_or_else(|| {
                bad(format!(
                    "message {index} is {}, expected an object",
                    kind(message)
                ))
            })?;
            let kept = fields.iter().filter(|(_, value)| !value.is_null());
            Ok(Value::Object(with_reasoning(
                kept.map(|(key, value)| (key.clone(), value.clone()))
                    .collect(),
            )))
        })
        .collect()
}

fn with_reasoning(mut message: Map<String, Value>) -> Map<String, Value> {
    let Some(reasoning) = REASONING
        .iter()
        .find_map(|name| message.get(*name))
        .cloned()
    else {
        return message;
    };
    message
        .entry("thinking")
        .or_insert_with(|| reasoning.clone());
    message.insert("reasoning_content".to_owned(), reasoning);
    message
}

/// Appends `mark` to the text that is to be continued.
pub(super) fn mark_final(
    messages: &mut [Value],
    field: MessageField,
    mark: &str,
) -> Result<(), TemplateError> {
    let last = messages
        .last_mut()
        .and_then(Value::as_object_mut)
        .ok_or_else(|| bad("the conversation is empty, there is no message to continue"))?;
    match field {
        MessageField::Content => {
            let content = last
                .get_mut("content")
                .ok_or_else(|| bad("the last message has no content to continue"))?;
            mark_content(content, mark)
        }
        MessageField::Reasoning => {
            let text = last
                .get("reasoning_content")
                .and_then(Value::as_str)
                .ok_or_else(|| bad("the last message has no reasoning to continue"))?
                .to_owned();
            // The same text is there under several names; a template reads one of them.
            for name in REASONING {
                if last.get(name).and_then(Value::as_str) == Some(text.as_str()) {
                    last.insert(name.to_owned(), Value::String(format!("{text}{mark}")));
                }
            }
            Ok(())
        }
    }
}

fn mark_content(content: &mut Value, mark: &str) -> Result<(), TemplateError> {
    let text = match content {
        Value::String(text) => Some(text),
        Value::Array(parts) => parts
            .iter_mut()
            .rev()
            .find_map(|part| match part.get_mut("text") {
                Some(Value::String(text)) => Some(text),
                _ => None,
            }),
        _ => None,
    };
    text.map(|text| text.push_str(mark))
        .ok_or_else(|| bad("the last message has no text to continue"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn bad(detail: impl Into<String>) -> TemplateError {
    TemplateError::Messages {
        detail: detail.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nulls_go_and_reasoning_gets_its_names() {
        let messages =
            normalize(&[json!({"role": "assistant", "content": null, "reasoning": "because"})])
                .unwrap();
        assert_eq!(
            messages,
            [
                json!({"role": "assistant", "reasoning": "because", "thinking": "because", "reasoning_content": "because"})
            ]
        );
        assert_eq!(
            normalize(&[json!("x")]).unwrap_err().to_string(),
            "message 0 is a string, expected an object"
        );
        assert!(normalize(&[]).is_err());
    }

    #[test]
    fn the_last_text_part_is_continued() {
        let mut messages = [json!({"content": [{"text": "a"}, {"text": "b"}, {"image": 1}]})];
        mark_final(&mut messages, MessageField::Content, "|").unwrap();
        assert_eq!(
            messages,
            [json!({"content": [{"text": "a"}, {"text": "b|"}, {"image": 1}]})]
        );
        assert!(mark_final(&mut messages, MessageField::Reasoning, "|").is_err());
    }
}
