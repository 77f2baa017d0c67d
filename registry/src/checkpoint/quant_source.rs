//! Where `config.json` describes quantised weights: beside everything else or in `text_config`, under MLX's
//! name or transformers'. Places that say different things are refused.
//!
//! Owns the order of the places. Must not know what the descriptions mean: see `quant` and `fp8`.

use serde_json::{Map, Value};

use super::json::kind;
use super::quant::{Foreign, QuantDisagreement, QuantError, QuantSpec, QuantTable};
use crate::shown;

const OWN: &str = "quantization";
const SHARED: &str = "quantization_config";
const TEXT: &str = "text_config";

/// Every place, the one that holds first. transformers writes the settings of a model with more parts beside
/// everything else; some checkpoints have them in the part that they are about, as mlx-lm knows too.
const PLACES: [(&str, Option<&str>, &str); 4] = [
    ("quantization", None, OWN),
    ("quantization_config", None, SHARED),
    ("text_config.quantization", Some(TEXT), OWN),
    ("text_config.quantization_config", Some(TEXT), SHARED),
];

impl QuantTable {
    /// Reads the description that `config.json` has, if it has one.
    pub fn from_config(config: &Map<String, Value>) -> Result<Self, QuantError> {
        let mut holds: Option<(&'static str, Self)> = None;
        for (place, part, key) in PLACES {
            let object = match part {
                None => Some(config),
                Some(part) => config.get(part).and_then(Value::as_object),
            };
            let found = match object.and_then(|object| object.get(key)) {
                None | Some(Value::Null) => continue,
                Some(Value::Object(own)) => read(place, key, own)?,
                Some(other) => {
                    return Err(QuantError::Key {
                        place: part.unwrap_or("<root>").to_owned(),
                        key: key.to_owned(),
                        expected: "an object",
                        found: kind(other).to_owned(),
                    });
                }
            };
            match &holds {
                None => holds = Some((place, found)),
                Some((first, table)) => agree((first, table), (place, &found))?,
            }
        }
        Ok(holds.map(|(_, table)| table).unwrap_or_default())
    }
}

fn read(place: &str, key: &str, own: &Map<String, Value>) -> Result<QuantTable, QuantError> {
    match own.get("quant_method") {
        Some(method) if key == SHARED && !method.is_null() => Ok(QuantTable {
            foreign: Some(Box::new(Foreign {
                method: match method {
                    Value::String(method) => method.clone(),
                    other => other.to_string(),
                },
                place: place.to_owned(),
                settings: own.clone(),
            })),
            ..QuantTable::default()
        }),
        _ => QuantTable::from_object(place, own),
    }
}

/// Whether two descriptions say the same. MLX's beside another library's does, whatever that says: it is
/// what converters leave of the checkpoint that they converted, and the tensors show which is right.
fn agree(
    (first, table): (&str, &QuantTable),
    (second, other): (&str, &QuantTable),
) -> Result<(), QuantError> {
    let (about, says) = match (&table.foreign, &other.foreign) {
        (None, Some(_)) => return Ok(()),
        (Some(own), Some(other)) => {
            let Some(key) = difference(&own.settings, &other.settings) else {
                return Ok(());
            };
            let of = |map: &Map<String, Value>| match map.get(key) {
                None => "nothing".to_owned(),
                Some(value) => shown(value),
            };
            (key.to_owned(), [of(&own.settings), of(&other.settings)])
        }
        (Some(foreign), None) => {
            let mlx = other
                .global
                .map_or_else(String::new, |spec| spec.to_string());
            ("the method".to_owned(), [foreign.method.clone(), mlx])
        }
        (None, None) => {
            if table.global != other.global {
                let of = |table: &QuantTable| said(table.global.map(Some));
                ("all modules".to_owned(), [of(table), of(other)])
            } else {
                let paths = table.overrides.keys().chain(other.overrides.keys());
                let differs =
                    |path: &&String| table.overrides.get(*path) != other.overrides.get(*path);
                let Some(path) = paths.into_iter().find(differs) else {
                    return Ok(());
                };
                let of = |table: &QuantTable| said(table.overrides.get(path).copied());
                (path.clone(), [of(table), of(other)])
            }
        }
    };
    Err(QuantError::Disagree(Box::new(QuantDisagreement {
        places: [first.to_owned(), second.to_owned()],
        about,
        says,
    })))
}

fn difference<'a>(one: &'a Map<String, Value>, other: &'a Map<String, Value>) -> Option<&'a str> {
    let differs = |key: &&String| one.get(*key) != other.get(*key);
    one.keys()
        .chain(other.keys())
        .find(differs)
        .map(String::as_str)
}

fn said(entry: Option<Option<QuantSpec>>) -> String {
    match entry {
        None => "as the others".to_owned(),
        Some(None) => "not quantised".to_owned(),
        Some(Some(spec)) => spec.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table(config: Value) -> Result<QuantTable, String> {
        QuantTable::from_config(config.as_object().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_description_may_stand_in_the_text_part() {
        for key in [OWN, SHARED] {
            let nested =
                table(json!({"text_config": {key: {"bits": 8, "group_size": 32}}})).unwrap();
            assert_eq!(nested.global.map(|spec| spec.bits), Some(8));
        }
        let fp8 = json!({"quant_method": "fp8", "weight_block_size": [2, 2]});
        let nested = table(json!({"text_config": {"quantization_config": fp8}})).unwrap();
        let foreign = nested.foreign.unwrap();
        assert_eq!(
            (foreign.method.as_str(), foreign.place.as_str()),
            ("fp8", "text_config.quantization_config")
        );
        assert_eq!(foreign.settings["weight_block_size"], json!([2, 2]));
    }

    #[test]
    fn places_that_say_the_same_agree() {
        let own = json!({"bits": 4, "group_size": 32, "lm_head": {"bits": 8, "group_size": 32}});
        let written_out = json!({"bits": 4, "group_size": 32, "mode": "affine", "norm": true,
            "lm_head": {"bits": 8, "group_size": 32, "mode": "affine"}});
        let fp8 = json!({"quant_method": "fp8"});
        for config in [
            json!({"quantization": own, "quantization_config": own}),
            json!({"quantization": own, "quantization_config": written_out}),
            json!({"quantization": own, "text_config": {"quantization": own}}),
            json!({"quantization": own, "quantization_config": fp8}),
            json!({"quantization_config": fp8, "text_config": {"quantization_config": fp8}}),
            json!({"quantization": own, "quantization_config": null, "text_config": null}),
        ] {
            assert!(table(config.clone()).is_ok(), "{config}");
        }
    }

    #[test]
    fn places_that_say_different_things_are_refused() {
        let four = json!({"bits": 4, "group_size": 32});
        let eight = json!({"bits": 8, "group_size": 32});
        let refusals = [
            json!({"quantization": four, "quantization_config": eight}),
            json!({"quantization": four, "text_config": {"quantization_config": eight}}),
            json!({"quantization": four,
                "quantization_config": {"bits": 4, "group_size": 32, "lm_head": false}}),
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]},
                "text_config": {"quantization_config": {"quant_method": "fp8"}}}),
            json!({"quantization_config": {"quant_method": "fp8"}, "text_config": {"quantization": four}}),
            json!({"text_config": {"quantization": 4}}),
        ]
        .map(|config| table(config).unwrap_err());
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        `quantization` and `quantization_config` in config.json disagree on all modules (affine bits 4 group_size 32 and affine bits 8 group_size 32): expected the same in both, or one of them alone
        `quantization` and `text_config.quantization_config` in config.json disagree on all modules (affine bits 4 group_size 32 and affine bits 8 group_size 32): expected the same in both, or one of them alone
        `quantization` and `quantization_config` in config.json disagree on lm_head (as the others and not quantised): expected the same in both, or one of them alone
        `quantization_config` and `text_config.quantization_config` in config.json disagree on weight_block_size ([2,2] and nothing): expected the same in both, or one of them alone
        `quantization_config` and `text_config.quantization` in config.json disagree on the method (fp8 and affine bits 4 group_size 32): expected the same in both, or one of them alone
        `text_config.quantization` in config.json: expected an object, found a number
        "#);
    }
}
