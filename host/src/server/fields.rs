//! The fields of a request body, each read once and by name.
//!
//! Every dialect takes what it knows; [`Fields::finish`] refuses what is left. A null counts as absent.

use serde_json::{Map, Value};

use super::error::{ApiError, Kind};
use super::json::{self, Parsed};

/// How whole numbers are asked for; more may follow.
const WHOLE: &str = "a whole number";

/// A JSON object that is being read.
#[derive(Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// In front of names in errors: where the object is.
    place: String,
    /// Names under which settings of several names were given.
    spelled: Vec<&'static str>,
}

impl Fields {
    /// Reads a body, which has to be an object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let Parsed { value, twice } = json::parse(body)
            .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))?;
        match (value, twice) {
            (Value::Object(map), None) => Ok(Self::of(map, "")),
            (Value::Object(_), Some(name)) => Err(ApiError::field(
                &name,
                format!("the body has {name:?} twice, expected it once"),
            )),
            (other, _) => Err(ApiError::invalid(format!(
                "the body is {}, expected a JSON object",
                kind(&other)
            ))),
        }
    }

    /// An object inside of another field, whose name is put before those of its members.
    pub fn of(map: Map<String, Value>, field: &str) -> Self {
        Self {
            map,
            place: match field {
                "" => String::new(),
                field => format!("{field}."),
            },
            spelled: Vec::new(),
        }
    }

    /// Takes a field as it is.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.swap_remove(name).filter(|value| !value.is_null())
    }

    /// Takes the first of several names of one field; two that differ are refused.
    pub fn take_any(
        &mut self,
        names: &[&'static str],
    ) -> Result<Option<(&'static str, Value)>, ApiError> {
        let mut found: Option<(&'static str, Value)> = None;
        for name in names {
            let Some(value) = self.take(name) else {
                continue;
            };
            match &found {
                Some((other, first)) if *first != value => {
                    return Err(ApiError::field(
                        *name,
                        format!("{other} and {name} are names of one setting and differ"),
                    ));
                }
                Some(_) => {}
                None => {
                    self.spelled.push(name);
                    found = Some((name, value));
                }
            }
        }
        Ok(found)
    }

    /// The name of a setting as the request has it; the first one where it does not.
    pub fn spelling(&self, names: &[&'static str]) -> &'static str {
        let mut names = names.iter().copied();
        let first = names.clone().next().unwrap_or_default();
        names
            .find(|name| self.spelled.contains(name))
            .unwrap_or(first)
    }

    /// A number.
    pub fn number(&mut self, names: &[&'static str]) -> Result<Option<f32>, ApiError> {
        let Some((name, value)) = self.take_any(names)? else {
            return Ok(None);
        };
        let number = value
            .as_f64()
            .ok_or_else(|| self.wrong(name, "a number", &value))?;
        Ok(Some(number as f32))
    }

    /// A whole number.
    pub fn integer(&mut self, names: &[&'static str]) -> Result<Option<i64>, ApiError> {
        let Some((name, value)) = self.take_any(names)? else {
            return Ok(None);
        };
        whole(&value)
            .map(Some)
            .ok_or_else(|| self.wrong(name, WHOLE, &value))
    }

    /// A whole number within bounds.
    pub fn integer_in(
        &mut self,
        names: &[&'static str],
        low: i64,
        high: i64,
    ) -> Result<Option<i64>, ApiError> {
        match self.integer(names)? {
            Some(value) if !(low..=high).contains(&value) => {
                let name = format!("{}{}", self.place, self.spelling(names));
                let message = format!("{name} is {value}, expected {low} to {high}");
                Err(ApiError::field(name, message))
            }
            value => Ok(value),
        }
    }

    /// True or false.
    pub fn boolean(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.wrong(name, "true or false", &value))
    }

    /// A text.
    pub fn text(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong(name, "a text", &value)),
        }
    }

    /// A text or a list of texts.
    pub fn texts(&mut self, name: &'static str) -> Result<Option<Vec<String>>, ApiError> {
        let wanted = "a text or a list of texts";
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(vec![text])),
            Some(Value::Array(items)) => items
                .into_iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text),
                    other => {
                        let found = format!("a list with {}", kind(&other));
                        let name = format!("{}{name}", self.place);
                        let message = format!("{name} is {found}, expected {wanted}");
                        Err(ApiError::field(name, message))
                    }
                })
                .collect::<Result<_, _>>()
                .map(Some),
            Some(value) => Err(self.wrong(name, wanted, &value)),
        }
    }

    /// An object.
    pub fn object(&mut self, name: &'static str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(value) => Err(self.wrong(name, "an object", &value)),
        }
    }

    /// A list.
    pub fn list(&mut self, name: &'static str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(value) => Err(self.wrong(name, "a list", &value)),
        }
    }

    fn wrong(&self, name: &str, wanted: &str, found: &Value) -> ApiError {
        expected(format!("{}{name}", self.place), wanted, found)
    }

    /// Refuses what nobody took.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.map.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name = format!("{}{name}", self.place);
                let message = format!(
                    "unknown field {name:?}: it is not supported here and would have no effect"
                );
                Err(ApiError::unsupported(&name, message))
            }
        }
    }
}

/// A whole number, also where it is written with a point.
pub fn whole(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
    })
}

/// A field of the wrong type.
pub fn expected(name: impl Into<String>, wanted: &str, found: &Value) -> ApiError {
    let name = name.into();
    let message = match found {
        Value::Number(number) if wanted.starts_with(WHOLE) => {
            let is_whole = number.as_f64().is_some_and(|number| number.fract() == 0.0);
            let bits = if is_whole { " of at most 63 bits" } else { "" };
            let rest = wanted.strip_prefix(WHOLE).unwrap_or_default();
            format!("{name} is {number}, expected {WHOLE}{bits}{rest}")
        }
        _ => format!("{name} is {}, expected {wanted}", kind(found)),
    };
    ApiError::new(Kind::Invalid, message).with_param(name)
}

/// The type of a value in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn fields_are_typed_and_what_is_left_is_refused_by_name() {
        let mut all = fields(r#"{"a": 1.5, "b": 2.0, "c": null, "d": ["x"], "e": true, "f": {}}"#);
        assert_eq!(all.number(&["a"]).unwrap(), Some(1.5));
        assert_eq!(all.integer(&["b"]).unwrap(), Some(2));
        assert_eq!(all.boolean("c").unwrap(), None);
        assert_eq!(all.texts("d").unwrap(), Some(vec!["x".to_owned()]));
        assert_eq!(
            all.text("e").unwrap_err().message(),
            "e is true or false, expected a text"
        );
        assert!(all.finish().unwrap_err().message().contains("\"f\""));
        let wrong = fields(r#"{"a": ["x", 1]}"#).texts("a").unwrap_err();
        assert_eq!(
            wrong.message(),
            "a is a list with a number, expected a text or a list of texts"
        );
        let inner = || {
            let map = fields(r#"{"a": 1}"#).map;
            Fields::of(map, "outer")
        };
        assert_eq!(
            inner().text("a").unwrap_err().message(),
            "outer.a is a number, expected a text"
        );
        assert!(
            inner()
                .finish()
                .unwrap_err()
                .message()
                .contains("\"outer.a\"")
        );
    }

    #[test]
    fn names_of_one_setting_must_agree() {
        assert_eq!(
            fields(r#"{"x": 1, "y": 1}"#).integer(&["x", "y"]).unwrap(),
            Some(1)
        );
        assert!(fields(r#"{"x": 1, "y": 2}"#).integer(&["x", "y"]).is_err());
        assert!(fields(r#"{"x": 0}"#).integer_in(&["x"], 1, 5).is_err());
        let mut other = fields(r#"{"y": 0}"#);
        assert_eq!(
            other.integer_in(&["x", "y"], 1, 5).unwrap_err().message(),
            "y is 0, expected 1 to 5"
        );
        assert_eq!(
            (other.spelling(&["x", "y"]), other.spelling(&["a", "b"])),
            ("y", "a")
        );
        let wrong = |text: &str| {
            fields(text)
                .integer(&["x"])
                .unwrap_err()
                .message()
                .to_owned()
        };
        assert_eq!(wrong(r#"{"x": 0.5}"#), "x is 0.5, expected a whole number");
        assert_eq!(
            wrong(r#"{"x": 18446744073709551615}"#),
            "x is 18446744073709551615, expected a whole number of at most 63 bits"
        );
        assert_eq!(
            wrong(r#"{"x": "1"}"#),
            "x is a text, expected a whole number"
        );
    }

    #[test]
    fn bodies_that_are_no_objects_are_refused() {
        let deep = "[".repeat(100_000);
        for text in [
            "[]",
            "1",
            "null",
            "\"x\"",
            "{",
            "",
            r#"{"a": "\ud800"}"#,
            &deep,
        ] {
            assert!(Fields::parse(text.as_bytes()).is_err(), "{text:.20}");
        }
        assert!(Fields::parse(b"{\"a\": \"\xff\"}").is_err());
        let message = |text: &str| {
            Fields::parse(text.as_bytes())
                .unwrap_err()
                .message()
                .to_owned()
        };
        assert_eq!(message("[1]"), "the body is a list, expected a JSON object");
        assert_eq!(
            message(r#"{"a": 1, "a": 2}"#),
            "the body has \"a\" twice, expected it once"
        );
        assert_eq!(
            message(r#"{"a": [{"b": 1, "b": 2}]}"#),
            "the body has \"a[0].b\" twice, expected it once"
        );
        assert_eq!(
            message(r#"[{"b": 1, "b": 2}]"#),
            "the body is a list, expected a JSON object"
        );
    }
}
