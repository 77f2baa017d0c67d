//! Messages of a chat request: checked, and in the form that templates expect.

use serde_json::{Value, json};

use crate::template::ChatTemplate;

use super::super::error::ApiError;
use super::super::fields::{expected, kind};

/// Roles that messages may have.
const ROLES: [&str; 6] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// Members that messages may have. Null ones are dropped by the template.
const MEMBERS: [&str; 11] = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "thinking",
    "refusal",
    "annotations",
    "audio",
];

/// Checks messages and turns parts of text into one text.
pub fn messages(list: Vec<Value>, template: Option<&ChatTemplate>) -> Result<Vec<Value>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::field(
            "messages",
            "messages is empty, expected at least one message",
        ));
    }
    list.into_iter()
        .enumerate()
        .map(|(index, message)| one(index, message, template))
        .collect()
}

fn one(index: usize, message: Value, template: Option<&ChatTemplate>) -> Result<Value, ApiError> {
    let place = |member: &str| format!("messages[{index}].{member}");
    let mut message = match message {
        Value::Object(message) => message,
        other => return Err(expected(format!("messages[{index}]"), "an object", &other)),
    };
    if let Some(name) = message
        .iter()
        .find(|(name, value)| !value.is_null() && !MEMBERS.contains(&name.as_str()))
        .map(|(name, _)| name)
    {
        return Err(ApiError::unsupported(
            &place(name),
            format!("{} is not supported by this server", place(name)),
        ));
    }
    let role = match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role.clone(),
        Some(Value::String(role)) => {
            let message = format!(
                "{} is {role:?}, expected one of {}",
                place("role"),
                ROLES.join(", ")
            );
            return Err(ApiError::field(place("role"), message));
        }
        Some(other) => return Err(expected(place("role"), "a text", other)),
        None => {
            return Err(ApiError::field(
                place("role"),
                format!("{} is missing", place("role")),
            ));
        }
    };
    let content = text_of(&place("content"), message.get("content"))?;
    if content.is_none() && role != "assistant" {
        return Err(ApiError::field(
            place("content"),
            format!("{} is missing", place("content")),
        ));
    }
    message.insert("content".to_owned(), json!(content));
    if role == "developer" && !template.is_some_and(|template| template.mentions("developer")) {
        // Templates from before that role know the same thing as "system".
        message.insert("role".to_owned(), json!("system"));
    }
    for silent in ["audio", "annotations"] {
        let value = message.remove(silent).unwrap_or_default();
        if !value.is_null() && value != json!([]) {
            return Err(ApiError::unsupported(
                &place(silent),
                format!("{} is not supported by this server", place(silent)),
            ));
        }
    }
    for text in ["name", "tool_call_id"] {
        match message.get(text) {
            None | Some(Value::Null | Value::String(_)) => {}
            Some(other) => return Err(expected(place(text), "a text", other)),
        }
    }
    match message.get("tool_calls") {
        None | Some(Value::Null) => {}
        // None at all: a template that asks whether the member is there would be told otherwise.
        Some(Value::Array(calls)) if calls.is_empty() => {
            message.remove("tool_calls");
        }
        Some(Value::Array(_)) => has_a_place(index, template)?,
        Some(other) => return Err(expected(place("tool_calls"), "a list", other)),
    }
    Ok(Value::Object(message))
}

/// Calls of tools that a template does not mention would be lost without a word.
fn has_a_place(index: usize, template: Option<&ChatTemplate>) -> Result<(), ApiError> {
    if template.is_some_and(|template| template.mentions("tool_calls")) {
        return Ok(());
    }
    let name = format!("messages[{index}].tool_calls");
    let text = format!(
        "{name} cannot be told to this model: its chat template has no place for tool calls"
    );
    Err(ApiError::unsupported(&name, text))
}

/// The text of a content: a text, parts of text, or nothing.
fn text_of(name: &str, content: Option<&Value>) -> Result<Option<String>, ApiError> {
    match content {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let texts = parts
                .iter()
                .enumerate()
                .map(|(index, part)| text_part(&format!("{name}[{index}]"), part));
            Ok(Some(texts.collect::<Result<Vec<_>, _>>()?.join("\n")))
        }
        Some(other) => Err(expected(name, "a text or a list of parts", other)),
    }
}

fn text_part<'a>(name: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let Some(part) = part.as_object() else {
        return Err(ApiError::field(
            name,
            format!("{name} is {}, expected an object", kind(part)),
        ));
    };
    let (kind, member) = match part.get("type").and_then(Value::as_str) {
        Some("text") => ("text", "text"),
        Some("refusal") => ("refusal", "refusal"),
        Some(other) => {
            let message = format!("{name} is of type {other:?}, this model takes text only");
            return Err(ApiError::unsupported(name, message).with_code("unsupported_content"));
        }
        None => return Err(ApiError::field(name, format!("{name} has no type"))),
    };
    let unknown = |(key, value): &(&String, &Value)| {
        !value.is_null() && key.as_str() != "type" && key.as_str() != member
    };
    if let Some((key, _)) = part.iter().find(unknown) {
        let name = format!("{name}.{key}");
        let message = format!("{name} is not supported by this server");
        return Err(ApiError::unsupported(&name, message));
    }
    match part.get(member) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(ApiError::field(
            name,
            format!("{name} of type {kind:?} has no text"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(list: Value) -> Result<Value, String> {
        let list = list.as_array().unwrap().clone();
        messages(list, None)
            .map(Value::Array)
            .map_err(|error| error.message().to_owned())
    }

    #[test]
    fn contents_become_text() {
        let list = json!([
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "content": null, "refusal": null, "annotations": [], "tool_calls": []},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ]);
        insta::assert_snapshot!(
            read(list).unwrap().to_string(),
            @r#"[{"role":"system","content":"be brief"},{"role":"user","content":"a\nb","name":"me"},{"role":"assistant","content":null,"refusal":null},{"role":"tool","content":"7","tool_call_id":"1"}]"#
        );
    }

    #[test]
    fn what_cannot_be_told_to_the_model_is_refused_by_place() {
        for (list, words) in [
            (json!([]), "empty"),
            (json!([1]), "messages[0] is a number"),
            (json!([{"content": "x"}]), "messages[0].role is missing"),
            (json!([{"role": "robot", "content": "x"}]), "\"robot\""),
            (json!([{"role": "user"}]), "messages[0].content is missing"),
            (
                json!([{"role": "user", "content": 5}]),
                "messages[0].content is a number",
            ),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
                "takes text only",
            ),
            (
                json!([{"role": "user", "content": "x", "images": ["y"]}]),
                "messages[0].images",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
                "messages[0].tool_calls",
            ),
            (
                json!([{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}]}]),
                "messages[0].content[0].foo is not supported",
            ),
            (
                json!([{"role": "user", "content": "x", "name": ["y"]}]),
                "messages[0].name is a list, expected a text",
            ),
            (
                json!([{"role": "assistant", "tool_calls": "x"}]),
                "messages[0].tool_calls is a text, expected a list",
            ),
        ] {
            let message = read(list).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
    }
}
