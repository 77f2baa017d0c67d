//! JSON of clients in which no name comes twice: of two values only one could be honoured.

use std::fmt::{self, Write as _};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// A value, and where in it a name came a second time, if one did.
#[derive(Debug)]
pub struct Parsed {
    /// The value; of names that came twice it has the first.
    pub value: Value,
    /// The place of the first such name, as in `messages[0].content`.
    pub twice: Option<String>,
}

/// Reads a text to its end. How deep it may be is bounded by the parser.
pub fn parse(text: &[u8]) -> Result<Parsed, serde_json::Error> {
    let mut twice = Vec::new();
    let mut parser = serde_json::Deserializer::from_slice(text);
    let value = Once { twice: &mut twice }.deserialize(&mut parser)?;
    parser.end()?;
    Ok(Parsed {
        value,
        twice: (!twice.is_empty()).then(|| place(&twice)),
    })
}

/// A step from a value to one inside of it.
#[derive(Debug)]
enum Step {
    Name(String),
    Index(usize),
}

/// Steps from the inside to the outside as a place.
fn place(steps: &[Step]) -> String {
    let mut place = String::new();
    for step in steps.iter().rev() {
        match step {
            Step::Name(name) if place.is_empty() => place.push_str(name),
            Step::Name(name) => {
                place.push('.');
                place.push_str(name);
            }
            // Writing to a text cannot fail.
            Step::Index(index) => drop(write!(place, "[{index}]")),
        }
    }
    place
}

/// Reads a value. The steps to a name that came twice are noted on the way back, so that others cost nothing.
struct Once<'a> {
    twice: &'a mut Vec<Step>,
}

impl<'de> DeserializeSeed<'de> for Once<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Once<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = access.next_key::<String>()? {
            let was_found = !self.twice.is_empty();
            let value = access.next_value_seed(Once { twice: self.twice })?;
            let is_inside = !was_found && !self.twice.is_empty();
            let is_here = self.twice.is_empty() && map.contains_key(&name);
            if is_inside || is_here {
                self.twice.push(Step::Name(name.clone()));
            }
            map.entry(name).or_insert(value);
        }
        Ok(Value::Object(map))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        loop {
            let was_found = !self.twice.is_empty();
            let Some(item) = access.next_element_seed(Once { twice: self.twice })? else {
                return Ok(Value::Array(items));
            };
            if !was_found && !self.twice.is_empty() {
                self.twice.push(Step::Index(items.len()));
            }
            items.push(item);
        }
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_json_library() {
        for text in [
            "null",
            " [ ] ",
            r#"{"b": [1, -1, 1.5, 1e3, 18446744073709551615, true, null, "x\n\u00e9"], "a": {"": {}}}"#,
        ] {
            let parsed = parse(text.as_bytes()).unwrap();
            let library: Value = serde_json::from_str(text).unwrap();
            assert_eq!(parsed.value.to_string(), library.to_string());
            assert_eq!(parsed.twice, None);
        }
        let deep = |count: usize| ["[".repeat(count), "]".repeat(count)].concat();
        let nested =
            |count: usize| [r#"{"a":"#.repeat(count), "1".to_owned(), "}".repeat(count)].concat();
        for text in [
            "",
            "{",
            "1 2",
            "[1,]",
            "1e999",
            r#""\ud800""#,
            &deep(128),
            &deep(100_000),
            &deep(127),
            &nested(127),
            &nested(128),
        ] {
            let library = serde_json::from_str::<Value>(text).map_err(|error| error.to_string());
            let own = parse(text.as_bytes())
                .map(|parsed| parsed.value)
                .map_err(|error| error.to_string());
            assert_eq!(own, library, "{text:.20}");
        }
    }

    #[test]
    fn the_first_name_that_comes_twice_is_found_at_every_depth() {
        for (text, place) in [
            (r#"{"a": 1, "a": 1}"#, "a"),
            (r#"{"a": null, "b": 2, "a": 1, "b": 1}"#, "a"),
            (r#"{"a": {"b": 1, "b": 2}, "c": 1, "c": 1}"#, "a.b"),
            (r#"{"a": 1, "a": {"b": 1, "b": 2}}"#, "a.b"),
            (
                r#"{"a": [1, {}, [{"b": 1, "c": 1, "c": 2}, {"d": 1}]]}"#,
                "a[2][0].c",
            ),
            (r#"[0, {"a": 1, "\u0061": 1}]"#, "[1].a"),
        ] {
            let parsed = parse(text.as_bytes()).unwrap();
            assert_eq!(parsed.twice.as_deref(), Some(place), "{text}");
        }
        // What is no JSON has no places.
        assert!(parse(br#"{"a": 1, "a": 1"#).is_err());
    }
}
