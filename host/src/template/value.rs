//! JSON as template values.

use std::borrow::Cow;

use minijinja::value::Value;
use serde_json::Value as Json;

/// Rewrites the strings of a value on their way into a template. `key` is the key they stand under, if any.
pub(super) trait Strings {
    fn text<'a>(&self, key: Option<&str>, text: &'a str) -> Cow<'a, str>;
    fn key<'a>(&self, key: &'a str) -> Cow<'a, str>;
}

/// Leaves every string as it is.
pub(super) struct AsGiven;

impl Strings for AsGiven {
    fn text<'a>(&self, _key: Option<&str>, text: &'a str) -> Cow<'a, str> {
        Cow::Borrowed(text)
    }

    fn key<'a>(&self, key: &'a str) -> Cow<'a, str> {
        Cow::Borrowed(key)
    }
}

/// Converts `json`, keeping the order of keys.
pub(super) fn to_value(json: &Json, strings: &impl Strings) -> Value {
    convert(None, json, strings)
}

fn convert(key: Option<&str>, json: &Json, strings: &impl Strings) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(signed), _) => Value::from(signed),
            (None, Some(unsigned)) => Value::from(unsigned),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(strings.text(key, text)),
        Json::Array(items) => Value::from(
            items
                .iter()
                .map(|item| convert(key, item, strings))
                .collect::<Vec<Value>>(),
        ),
        Json::Object(entries) => Value::from_pairs(entries.iter().map(|(name, item)| {
            (
                Value::from(strings.key(name)),
                convert(Some(name), item, strings),
            )
        })),
    }
}

/// Calls `visit` with every string of `json`, keys included.
pub(super) fn each_string<'a>(json: &'a Json, visit: &mut impl FnMut(&'a str)) {
    match json {
        Json::String(text) => visit(text),
        Json::Array(items) => items.iter().for_each(|item| each_string(item, visit)),
        Json::Object(entries) => {
            for (key, item) in entries {
                visit(key);
                each_string(item, visit);
            }
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}
