//! Tolerant, typed reading of `config.json`: unknown keys are ignored, `null` is absent, an
//! integral float is an integer; everything else that does not fit is an error that names the key,
//! the value and what is allowed.

use core::fmt::Display;
use core::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Largest count that a configuration may give: beyond it the file is damaged or hostile.
pub const MAX_COUNT: usize = 1 << 24;

/// A JSON object with its place in the whole, for messages.
#[derive(Debug, Clone, Copy)]
pub struct Config<'a> {
    map: &'a Map<String, Value>,
    /// The root has none.
    parent: Option<Parent<'a>>,
}

/// The object that another is in: under which key, and where in the list under it.
#[derive(Debug, Clone, Copy)]
struct Parent<'a> {
    object: &'a Config<'a>,
    key: &'a str,
    index: Option<usize>,
}

fn shorten(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        text
    } else {
        text.chars().take(57).chain("...".chars()).collect()
    }
}

fn allowed<T: Display>(range: &RangeInclusive<T>, what: &str) -> String {
    format!("{what} from {} to {}", range.start(), range.end())
}

impl<'a> Config<'a> {
    /// The root of a configuration.
    pub fn root(value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { map, parent: None }),
            other => Err(Error::Config {
                key: "(root)".to_owned(),
                found: shorten(other),
                expected: "a JSON object".to_owned(),
            }),
        }
    }

    /// Path of a key of this object from the root.
    pub fn name(&self, key: &str) -> String {
        match self.parent {
            None => key.to_owned(),
            Some(Parent {
                object,
                key: own,
                index,
            }) => {
                let index = index.map_or_else(String::new, |index| format!("[{index}]"));
                format!("{}{index}.{key}", object.name(own))
            }
        }
    }

    fn found(&self, key: &str) -> String {
        self.map
            .get(key)
            .map_or_else(|| "missing".to_owned(), shorten)
    }

    /// Error about a key of this object.
    pub fn error(&self, key: &str, expected: impl Into<String>) -> Error {
        Error::Config {
            key: self.name(key),
            found: self.found(key),
            expected: expected.into(),
        }
    }

    /// Error about a variant that is recognised and not implemented.
    pub fn unsupported(&self, key: &str, supported: impl Into<String>) -> Error {
        Error::Unsupported {
            what: format!("{} = {}", self.name(key), self.found(key)),
            supported: supported.into(),
        }
    }

    /// As [`Config::unsupported`], about one entry of the list under `key`.
    pub fn unsupported_entry(
        &self,
        key: &str,
        index: usize,
        supported: impl Into<String>,
    ) -> Error {
        let entry = self.map.get(key).and_then(|list| list.get(index));
        let found = entry.map_or_else(|| "missing".to_owned(), shorten);
        Error::Unsupported {
            what: format!("{}[{index}] = {found}", self.name(key)),
            supported: supported.into(),
        }
    }

    /// The value, unless it is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there and null, for settings where that is "none" and not the default.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// First of several spellings that is present.
    pub fn spelled<'k>(&self, keys: &[&'k str]) -> Option<&'k str> {
        keys.iter().copied().find(|key| self.get(key).is_some())
    }

    /// Optional integer in a range.
    pub fn opt_uint(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = match value {
            Value::Number(n) => n
                .as_u64()
                .or_else(|| {
                    n.as_f64()
                        .filter(|f| f.fract() == 0.0 && (0.0..1e15).contains(f))
                        .map(|f| f as u64)
                })
                .and_then(|n| usize::try_from(n).ok()),
            _ => None,
        };
        match number {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => Err(self.error(key, allowed(&range, "an integer"))),
        }
    }

    /// Integer in a range.
    pub fn uint_in(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize> {
        self.opt_uint(key, range.clone())?
            .ok_or_else(|| self.error(key, allowed(&range, "an integer")))
    }

    /// Count from 1 to [`MAX_COUNT`].
    pub fn uint(&self, key: &str) -> Result<usize> {
        self.uint_in(key, 1..=MAX_COUNT)
    }

    /// Count from 1 to [`MAX_COUNT`], or a default.
    pub fn uint_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.opt_uint(key, 1..=MAX_COUNT)?.unwrap_or(default))
    }

    /// Count under the first spelling that is present.
    pub fn uint_spelled(&self, keys: &[&str]) -> Result<usize> {
        let key = self
            .spelled(keys)
            .or(keys.first().copied())
            .unwrap_or_default();
        self.uint(key)
    }

    /// Optional finite number in a range.
    pub fn opt_float(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value
            .as_f64()
            .filter(|f| f.is_finite() && range.contains(f))
        {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(key, allowed(&range, "a number"))),
        }
    }

    /// Number in a range, or a default.
    pub fn float_or(&self, key: &str, default: f64, range: RangeInclusive<f64>) -> Result<f64> {
        Ok(self.opt_float(key, range)?.unwrap_or(default))
    }

    /// Number in a range.
    pub fn float_in(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64> {
        self.opt_float(key, range.clone())?
            .ok_or_else(|| self.error(key, allowed(&range, "a number")))
    }

    /// Number under `key` of this object or under `other` of one inside it, which wins in the references. Where
    /// both are there they must be equal.
    pub fn number_once(
        &self,
        key: &str,
        inside: Option<&Config<'_>>,
        other: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>> {
        let beside = self.opt_float(key, range.clone())?;
        let Some(inside) = inside else {
            return Ok(beside);
        };
        match (beside, inside.opt_float(other, range)?) {
            (Some(beside), Some(number)) if beside != number => {
                let place = inside.name(other);
                let expected = format!("{number}, as {place} says, or only one of the two");
                Err(self.error(key, expected))
            }
            (beside, number) => Ok(number.or(beside)),
        }
    }

    /// Bool, or a default.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => Err(self.error(key, "true or false")),
        }
    }

    /// As [`Config::bool_or`], for keys whose null is false in the references and means nothing by itself: it
    /// is refused where the default is true.
    pub fn bool_not_null(&self, key: &str, default: bool) -> Result<bool> {
        if self.is_null(key) && default {
            let expected = "true or false: the reference takes null for false, which is not what no such key means";
            return Err(self.error(key, expected));
        }
        self.bool_or(key, default)
    }

    /// Optional text.
    pub fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.error(key, "a string")),
        }
    }

    /// Optional object.
    pub fn section<'s>(&'s self, key: &'s str) -> Result<Option<Config<'s>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Config {
                map,
                parent: Some(Parent {
                    object: self,
                    key,
                    index: None,
                }),
            })),
            Some(_) => Err(self.error(key, "an object")),
        }
    }

    /// Optional list of objects.
    pub fn sections<'s>(&'s self, key: &'s str) -> Result<Option<Vec<Config<'s>>>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let item = |(index, value): (usize, &'s Value)| {
            let parent = Some(Parent {
                object: self,
                key,
                index: Some(index),
            });
            value.as_object().map(|map| Config { map, parent })
        };
        let list = value
            .as_array()
            .and_then(|list| list.iter().enumerate().map(item).collect());
        list.map(Some)
            .ok_or_else(|| self.error(key, "a list of objects"))
    }

    /// The decoder's settings of a model with more parts, which are an object under `key`. Where it says
    /// of what type the decoder is, that must be one of `model_types`.
    pub fn text_section<'s>(
        &'s self,
        key: &'s str,
        model_types: &[&str],
    ) -> Result<Option<Config<'s>>> {
        let Some(text) = self.section(key)? else {
            return Ok(None);
        };
        match text.opt_str("model_type")? {
            Some(kind) if !model_types.contains(&kind) => {
                let known = format!("the known decoder is {}", model_types.join(" or "));
                Err(text.unsupported("model_type", known))
            }
            _ => Ok(Some(text)),
        }
    }

    /// Every key of this object with its value, null ones left out.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        let present = self.map.iter().filter(|(_, value)| !value.is_null());
        present.map(|(key, value)| (key.as_str(), value))
    }

    /// Optional list of finite numbers.
    pub fn opt_floats(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let list = value
            .as_array()
            .map(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<_>>>());
        match list.flatten() {
            Some(list) if list.iter().all(|f| f.is_finite()) => Ok(Some(list)),
            _ => Err(self.error(key, "a list of numbers")),
        }
    }

    /// Optional list of integers up to [`MAX_COUNT`].
    pub fn opt_uints(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let list = value.as_array().map(|list| {
            list.iter()
                .map(|v| {
                    v.as_u64()
                        .and_then(|n| usize::try_from(n).ok())
                        .filter(|&n| n <= MAX_COUNT)
                })
                .collect::<Option<Vec<_>>>()
        });
        list.flatten()
            .map(Some)
            .ok_or_else(|| self.error(key, "a list of integers"))
    }

    /// Optional list of texts.
    pub fn opt_strs(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let list = value
            .as_array()
            .map(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        list.flatten()
            .map(Some)
            .ok_or_else(|| self.error(key, "a list of strings"))
    }

    /// Checks that `part` divides `whole`, both keys of this object.
    pub fn divides(&self, part: (&str, usize), whole: (&str, usize)) -> Result<()> {
        if part.1 > 0 && whole.1.is_multiple_of(part.1) {
            return Ok(());
        }
        Err(Error::Config {
            key: self.name(whole.0),
            found: whole.1.to_string(),
            expected: format!("a multiple of {} ({})", self.name(part.0), part.1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message<T: core::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn numbers_are_read_as_json_writers_spell_them() {
        let value = json!({"a": 5, "b": 1e5, "c": 2.0, "d": null});
        let config = Config::root(&value).unwrap();
        assert_eq!(config.uint("a").unwrap(), 5);
        assert_eq!(config.uint("b").unwrap(), 100_000);
        assert_eq!(config.uint("c").unwrap(), 2);
        assert_eq!(config.uint_or("d", 7).unwrap(), 7);
    }

    #[test]
    fn errors_name_key_value_and_what_is_allowed() {
        let value = json!({"heads": "8", "zero": 0, "neg": -1, "half": 1.5, "s": {"t": []}});
        let config = Config::root(&value).unwrap();
        assert_eq!(
            message(config.uint("heads")),
            "config key \"heads\" is \"8\": expected an integer from 1 to 16777216"
        );
        for key in ["zero", "neg", "half", "missing"] {
            assert!(config.uint(key).is_err(), "{key}");
        }
        let section = config.section("s").unwrap().unwrap();
        assert_eq!(
            message(section.opt_str("t")),
            "config key \"s.t\" is []: expected a string"
        );
        assert!(message(config.divides(("kv", 3), ("heads", 8))).contains("a multiple of kv (3)"));
    }

    #[test]
    fn errors_have_the_whole_path() {
        let value = json!({"a": {"b": {"c": {"n": -1, "list": ["x", "y"], "of": [{}, {"k": 0}]}}}});
        let root = Config::root(&value).unwrap();
        let a = root.section("a").unwrap().unwrap();
        let b = a.section("b").unwrap().unwrap();
        let c = b.section("c").unwrap().unwrap();
        let said = [
            message(c.uint("n")),
            message(c.uint("missing")),
            c.unsupported("n", "known is 1").to_string(),
            c.unsupported_entry("list", 1, "known is x").to_string(),
            message(c.divides(("kv", 3), ("heads", 8))),
            message(b.section("c").and(c.section("list"))),
            message(c.sections("of").unwrap().unwrap()[1].uint("k")),
            message(c.sections("list")),
        ];
        let places = [
            "a.b.c.n",
            "a.b.c.missing",
            "a.b.c.n",
            "a.b.c.list[1]",
            "a.b.c.kv",
            "a.b.c.list",
            "a.b.c.of[1].k",
            "a.b.c.list",
        ];
        for (said, place) in said.iter().zip(places) {
            assert!(said.contains(place), "{said}");
        }
    }

    #[test]
    fn a_decoder_of_another_type_is_refused_by_name() {
        let value = json!({"text_config": {"model_type": "wavy_text"}});
        let config = Config::root(&value).unwrap();
        assert_eq!(
            message(config.text_section("text_config", &["flat_text", "flat"])),
            "text_config.model_type = \"wavy_text\" is not supported by this plugin: the known decoder is flat_text or flat"
        );
        assert!(
            config
                .text_section("text_config", &["wavy_text"])
                .unwrap()
                .is_some()
        );
        let untyped = json!({"text_config": {}});
        let untyped = Config::root(&untyped).unwrap();
        assert!(
            untyped
                .text_section("text_config", &["flat"])
                .unwrap()
                .is_some()
        );
        assert!(
            untyped
                .text_section("decoder", &["flat"])
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn the_root_must_be_an_object() {
        assert!(message(Config::root(&json!([1])).map(|_| ())).contains("a JSON object"));
    }
}
