//! Reading of rotary embedding settings, in both spellings: `rope_theta` + `rope_scaling`, and the
//! newer `rope_parameters`. Formulas are in `rope.rs`.

use crate::{Config, Result};

/// Key of the base, in the settings and beside them.
const BASE_KEY: &str = "rope_theta";
const NEWER: &str = "rope_parameters";
const OLDER: &str = "rope_scaling";

/// Settings of a rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub base: f64,
    /// Features rotated.
    pub dims: usize,
    /// How positions beyond the original context are handled.
    pub scaling: RopeScaling,
}

/// The known ways to stretch a context.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// None.
    Plain,
    /// Positions divided by a factor (Chen et al. 2023).
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Base raised with the length, "dynamic NTK".
    Dynamic {
        /// Stretch at the limit.
        factor: f64,
        /// Context before stretching.
        original: f64,
    },
    /// Interpolation by parts with a temperature (Peng et al. 2023).
    Yarn {
        /// Stretch.
        factor: f64,
        /// Context before stretching.
        original: f64,
        /// Rotations above which nothing is interpolated.
        beta_fast: f64,
        /// Rotations below which everything is.
        beta_slow: f64,
        /// Factor on queries and keys.
        attention_factor: f64,
        /// Whether the bounds of the ramp are rounded outwards.
        truncate: bool,
    },
    /// Llama 3.1's interpolation by wavelength.
    Llama3 {
        /// Stretch of long wavelengths.
        factor: f64,
        /// Bound of long wavelengths, in contexts.
        low: f64,
        /// Bound of short wavelengths, in contexts.
        high: f64,
        /// Context before stretching.
        original: f64,
    },
    /// A factor per frequency, one list for short and one for long contexts (Ding et al. 2024).
    LongRope {
        /// Used when the model is run within the original context.
        short: Vec<f64>,
        /// Used otherwise.
        long: Vec<f64>,
        /// Context before stretching.
        original: usize,
        /// Longest context of the configuration.
        limit: usize,
        /// Factor on queries and keys.
        attention_factor: f64,
    },
}

const FACTOR: core::ops::RangeInclusive<f64> = 1e-3..=1e6;
/// Base where neither the configuration nor the architecture says.
const DEFAULT_BASE: f64 = 10_000.0;
const BASE: core::ops::RangeInclusive<f64> = 1.0..=1e12;
const PARTIAL: &str = "partial_rotary_factor";
const PARTIAL_RANGE: core::ops::RangeInclusive<f64> = 1e-3..=1.0;
const KNOWN: &str = "known rope types are default, linear, dynamic, yarn, llama3 and longrope";

impl RopeConfig {
    /// Reads the settings of a model whose heads are `head_dim` wide. `layer_type` picks one of
    /// several settings where the configuration nests them by type of layer.
    pub fn read(config: &Config<'_>, head_dim: usize, layer_type: Option<&str>) -> Result<Self> {
        Settings::find(config, layer_type, |place| {
            Self::at(config, place, DEFAULT_BASE, head_dim, 1.0)
        })
    }

    /// As [`RopeConfig::read`] of a model that rotates all features of a head: a smaller share is refused
    /// where it stands.
    pub fn read_whole(config: &Config<'_>, head_dim: usize) -> Result<Self> {
        Self::read_whole_or(config, head_dim, DEFAULT_BASE)
    }

    /// As [`RopeConfig::read_whole`] of a model whose base is `base` where the configuration does not say.
    pub fn read_whole_or(config: &Config<'_>, head_dim: usize, base: f64) -> Result<Self> {
        Settings::find(config, None, |place| {
            let rope = Self::at(config, place, base, head_dim, 1.0)?;
            rope.check_whole(config, place.inner, head_dim)?;
            Ok(rope)
        })
    }

    /// As [`RopeConfig::read`] of a model that rotates the share `share` of a head's features where the
    /// configuration does not say.
    pub fn read_share(config: &Config<'_>, head_dim: usize, share: f64) -> Result<Self> {
        Settings::find(config, None, |place| {
            Self::at(config, place, DEFAULT_BASE, head_dim, share)
        })
    }

    /// Reads one object of settings that the caller has found. `base` is what holds where the object
    /// names none; `config` has the model's context lengths.
    pub fn from_settings(
        config: &Config<'_>,
        settings: Option<&Config<'_>>,
        base: f64,
        head_dim: usize,
    ) -> Result<Self> {
        let place = Settings {
            inner: settings,
            outer_base: false,
        };
        Self::at(config, &place, base, head_dim, 1.0)
    }

    /// Base of the frequencies: `rope_theta` in `settings`, or `key` beside them, or `default`. The reference
    /// drops the one beside where both are there, so that two different ones are refused.
    pub fn read_base(
        config: &Config<'_>,
        key: &str,
        settings: Option<&Config<'_>>,
        default: f64,
    ) -> Result<f64> {
        let base = config.number_once(key, settings, BASE_KEY, BASE)?;
        Ok(base.unwrap_or(default))
    }

    /// Refuses a `rope_scaling` that says something else than `settings`, a part of `rope_parameters`: some
    /// versions of the reference take the one, some the other, some both.
    pub fn check_older(config: &Config<'_>, settings: &Config<'_>) -> Result<()> {
        let Some(older) = config.section(OLDER)? else {
            return Ok(());
        };
        for (key, value) in older.entries() {
            let is_type = matches!(key, "type" | "rope_type");
            let beside = if is_type {
                settings.spelled(&["rope_type", "type"])
            } else {
                Some(key)
            };
            let key = beside.unwrap_or(key);
            let beside = settings.get(key);
            let same_number = || Some(beside?.as_f64()? == value.as_f64()?);
            let is_default = is_type && beside.is_none() && value == "default";
            if beside != Some(value) && !is_default && same_number() != Some(true) {
                let said = beside.map_or_else(|| "missing".to_owned(), ToString::to_string);
                let expected = format!(
                    "what {} says ({said}), or only one of the two",
                    settings.name(key)
                );
                return Err(config.error(OLDER, expected));
            }
        }
        Ok(())
    }

    /// Refuses a share of rotated features in `settings` or beside them.
    pub fn check_whole(
        &self,
        config: &Config<'_>,
        settings: Option<&Config<'_>>,
        head_dim: usize,
    ) -> Result<()> {
        if self.dims == head_dim {
            return Ok(());
        }
        // The reference either ignores the factor or fails, so nothing says what is meant.
        let supported = "this line of models rotates all features of a head";
        Err(place_of(PARTIAL, config, settings).unsupported(PARTIAL, supported))
    }

    fn at(
        config: &Config<'_>,
        place: &Settings<'_>,
        base: f64,
        head_dim: usize,
        share: f64,
    ) -> Result<Self> {
        let settings = place.inner;
        let base = if place.outer_base {
            Self::read_base(config, BASE_KEY, settings, base)?
        } else {
            match settings {
                Some(settings) => settings.float_or(BASE_KEY, base, BASE)?,
                None => base,
            }
        };
        let given = config.number_once(PARTIAL, settings, PARTIAL, PARTIAL_RANGE)?;
        let partial_place = place_of(PARTIAL, config, settings);
        let dims = (head_dim as f64 * given.unwrap_or(share)) as usize;
        if dims == 0 || !dims.is_multiple_of(2) {
            let expected = format!(
                "a value with which an even, non-zero part of a head's {head_dim} features is rotated (this gives {dims})"
            );
            return Err(match given {
                Some(_) => partial_place.error(PARTIAL, expected),
                None => config.error("head_dim", expected),
            });
        }
        let scaling = match settings {
            Some(settings) => read_scaling(config, settings, dims)?,
            None => RopeScaling::Plain,
        };
        Ok(Self {
            base,
            dims,
            scaling,
        })
    }
}

/// The object of settings that holds, if there is one.
struct Settings<'c> {
    inner: Option<&'c Config<'c>>,
    /// Whether a `rope_theta` beside the object holds where it has none.
    outer_base: bool,
}

impl Settings<'_> {
    fn find<T>(
        config: &Config<'_>,
        layer_type: Option<&str>,
        read: impl FnOnce(&Settings<'_>) -> Result<T>,
    ) -> Result<T> {
        let outer = config.section(NEWER)?;
        let nested = match (&outer, layer_type) {
            (Some(outer), Some(kind)) => outer.section(kind)?,
            _ => None,
        };
        let legacy = config.section(OLDER)?;
        if let (Some(outer), None) = (&outer, &nested) {
            one_set_of_settings(config, outer, layer_type)?;
        }
        if let Some(settings) = nested.as_ref().or(outer.as_ref()) {
            RopeConfig::check_older(config, settings)?;
        }
        read(&Settings {
            inner: nested.as_ref().or(outer.as_ref()).or(legacy.as_ref()),
            outer_base: true,
        })
    }
}

/// Where `key` stands: in the settings, which win as in the reference, or beside them.
fn place_of<'c>(
    key: &str,
    config: &'c Config<'c>,
    settings: Option<&'c Config<'c>>,
) -> &'c Config<'c> {
    settings
        .filter(|settings| settings.get(key).is_some())
        .unwrap_or(config)
}

/// Refuses settings that would have to be dropped: those of layer types that nobody asked for.
fn one_set_of_settings(
    config: &Config<'_>,
    settings: &Config<'_>,
    layer_type: Option<&str>,
) -> Result<()> {
    let is_settings = |value: &serde_json::Value| {
        let names = [BASE_KEY, "rope_type", "type", "factor", PARTIAL];
        names.iter().any(|name| value.get(name).is_some())
    };
    if settings.entries().any(|(_, value)| is_settings(value)) {
        let expected = match layer_type {
            Some(kind) => format!("an entry {kind} beside those of other layer types"),
            None => "one set of settings, as all layers of this architecture share it".to_owned(),
        };
        return Err(config.error(NEWER, expected));
    }
    Ok(())
}

/// The type of the settings, by the one name or the other. A factor means nothing without it.
fn type_of<'c>(settings: &Config<'c>) -> Result<(&'static str, &'c str)> {
    let same = |kind: &'c str| if kind == "su" { "longrope" } else { kind };
    let (newer, older) = (settings.opt_str("rope_type")?, settings.opt_str("type")?);
    match (newer, older) {
        (Some(newer), Some(older)) if same(newer) != same(older) => {
            let expected = format!("{newer:?}, as rope_type beside it, or only one of the two");
            Err(settings.error("type", expected))
        }
        (Some(kind), _) => Ok(("rope_type", same(kind))),
        (None, Some(kind)) => Ok(("type", same(kind))),
        (None, None) if settings.get("factor").is_some() => {
            let expected = format!("a rope_type beside it that says what it stretches; {KNOWN}");
            Err(settings.error("factor", expected))
        }
        (None, None) => Ok(("rope_type", "default")),
    }
}

fn read_scaling(config: &Config<'_>, settings: &Config<'_>, dims: usize) -> Result<RopeScaling> {
    let (key, kind) = type_of(settings)?;
    let limit = config.uint_or("max_position_embeddings", 2048)?;
    let original = |fallback: usize| -> Result<f64> {
        let name = "original_max_position_embeddings";
        let given = config.number_once(name, Some(settings), name, 1.0..=1e9)?;
        Ok(given.unwrap_or(fallback as f64))
    };
    match kind {
        "default" => match settings.opt_float("factor", FACTOR)? {
            None | Some(1.0) => Ok(RopeScaling::Plain),
            Some(_) => {
                let expected = format!("1, or another {key} than default; {KNOWN}");
                Err(settings.error("factor", expected))
            }
        },
        "linear" => Ok(RopeScaling::Linear {
            factor: settings.float_in("factor", FACTOR)?,
        }),
        "dynamic" => Ok(RopeScaling::Dynamic {
            factor: settings.float_in("factor", FACTOR)?,
            original: original(limit)?,
        }),
        "yarn" => {
            // Without a factor it follows from the two lengths, of which one would be made up.
            let length = "original_max_position_embeddings";
            if settings.get("factor").is_none()
                && settings.get(length).is_none()
                && config.get(length).is_none()
            {
                return Err(
                    settings.error("factor", format!("a number, or {length} to take it from"))
                );
            }
            read_yarn(settings, original(limit)?, limit)
        }
        "llama3" => {
            let scaling = RopeScaling::Llama3 {
                factor: settings.float_in("factor", FACTOR)?,
                low: settings.float_in("low_freq_factor", FACTOR)?,
                high: settings.float_in("high_freq_factor", FACTOR)?,
                original: original(limit)?,
            };
            if let RopeScaling::Llama3 { low, high, .. } = scaling
                && low > high
            {
                // Equal in Llama 4 Scout: nothing is between the two bands.
                return Err(settings.error(
                    "high_freq_factor",
                    format!("at least low_freq_factor ({low})"),
                ));
            }
            Ok(scaling)
        }
        "longrope" => read_longrope(config, settings, dims, limit, original(limit)?),
        _ => Err(settings.unsupported(key, KNOWN)),
    }
}

fn read_yarn(settings: &Config<'_>, original: f64, limit: usize) -> Result<RopeScaling> {
    let factor = match settings.opt_float("factor", FACTOR)? {
        Some(factor) => factor,
        None => limit as f64 / original,
    };
    // Temperature of the softmax: section 3.4 of the YaRN paper; the two `mscale` keys are
    // DeepSeek's generalisation of it.
    let mscale = |m: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * m * factor.ln() + 1.0
        }
    };
    let scale_range = 0.0..=1e3;
    let attention_factor = match settings.opt_float("attention_factor", 1e-3..=1e3)? {
        Some(given) => given,
        None => {
            let own = settings
                .opt_float("mscale", scale_range.clone())?
                .filter(|m| *m > 0.0);
            let all = settings
                .opt_float("mscale_all_dim", scale_range)?
                .filter(|m| *m > 0.0);
            match (own, all) {
                (Some(own), Some(all)) => mscale(own) / mscale(all),
                _ => mscale(1.0),
            }
        }
    };
    Ok(RopeScaling::Yarn {
        factor,
        original,
        beta_fast: settings.float_or("beta_fast", 32.0, FACTOR)?,
        beta_slow: settings.float_or("beta_slow", 1.0, FACTOR)?,
        attention_factor,
        truncate: settings.bool_or("truncate", true)?,
    })
}

fn read_longrope(
    config: &Config<'_>,
    settings: &Config<'_>,
    dims: usize,
    limit: usize,
    original: f64,
) -> Result<RopeScaling> {
    let list = |key: &str| -> Result<Vec<f64>> {
        let expected = format!("a list of {} positive numbers", dims / 2);
        match settings.opt_floats(key)? {
            Some(list) if list.len() == dims / 2 && list.iter().all(|f| *f > 0.0) => Ok(list),
            _ => Err(settings.error(key, expected)),
        }
    };
    let factor = match settings.opt_float("factor", FACTOR)? {
        Some(factor) => factor,
        None => limit as f64 / original,
    };
    let attention_factor = match settings.opt_float("attention_factor", 1e-3..=1e3)? {
        Some(given) => given,
        None if factor <= 1.0 => 1.0,
        None if original <= 1.0 => {
            return Err(config.error("original_max_position_embeddings", "more than 1"));
        }
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    Ok(RopeScaling::LongRope {
        short: list("short_factor")?,
        long: list("long_factor")?,
        original: original as usize,
        limit,
        attention_factor,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: &Value, layer_type: Option<&str>) -> core::result::Result<f64, String> {
        let config = Config::root(value).unwrap();
        RopeConfig::read(&config, 16, layer_type)
            .map(|rope| rope.base)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn settings_of_layer_types_are_taken_or_refused() {
        let nested = json!({"rope_parameters": {
            "full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4},
        }});
        assert_eq!(read(&nested, Some("full_attention")), Ok(5e5));
        for kind in [None, Some("other")] {
            let error = read(&nested, kind).unwrap_err();
            assert!(error.contains("rope_parameters"), "{error}");
        }
    }

    #[test]
    fn settings_that_contradict_themselves_are_refused_where_they_stand() {
        for (settings, place, said) in [
            (json!({"factor": 4}), "rope_scaling.factor", "a rope_type"),
            (json!({"factor": 0}), "rope_scaling.factor", "a rope_type"),
            (
                json!({"type": "default", "factor": 4}),
                "rope_scaling.factor",
                "1, or another type",
            ),
            (
                json!({"rope_type": "linear", "type": "yarn", "factor": 4}),
                "rope_scaling.type",
                "\"linear\", as rope_type",
            ),
            (
                json!({"rope_type": "linear", "factor": -4}),
                "rope_scaling.factor\" is -4",
                "a number from 0.001",
            ),
            (
                json!({"rope_type": "yarn", "factor": 0}),
                "rope_scaling.factor\" is 0",
                "a number from 0.001",
            ),
        ] {
            let error = read(&json!({"rope_scaling": settings}), None).unwrap_err();
            assert!(error.contains(place) && error.contains(said), "{error}");
        }
        for settings in [
            json!({"rope_type": "default", "type": "default", "factor": 1.0}),
            json!({"rope_type": "linear", "type": "linear", "factor": 4.0}),
            json!({"mrope_section": [1, 1, 0], "rope_theta": 1e4}),
        ] {
            assert_eq!(read(&json!({"rope_parameters": settings}), None), Ok(1e4));
        }
    }

    #[test]
    fn a_share_of_the_head_is_read_and_refused_where_it_stands() {
        let inside = json!({"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5}}});
        let inside = Config::root(&inside).unwrap();
        let text = inside.section("text_config").unwrap().unwrap();
        let whole = RopeConfig::read_whole(&text, 16).unwrap_err().to_string();
        let place = "text_config.rope_parameters.partial_rotary_factor = 0.5";
        assert!(whole.starts_with(place), "{whole}");
        let odd = RopeConfig::read(&text, 6, None).unwrap_err().to_string();
        assert!(
            odd.contains("text_config.rope_parameters.partial_rotary_factor\" is 0.5"),
            "{odd}"
        );
        assert_eq!(RopeConfig::read_share(&text, 16, 0.25).unwrap().dims, 8);

        let beside =
            json!({"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "default"}});
        let beside = Config::root(&beside).unwrap();
        assert_eq!(RopeConfig::read_share(&beside, 16, 0.25).unwrap().dims, 8);
        let whole = RopeConfig::read_whole(&beside, 16).unwrap_err().to_string();
        assert!(whole.starts_with("partial_rotary_factor = 0.5"), "{whole}");
        let old = json!({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}});
        let old = Config::root(&old).unwrap();
        assert_eq!(RopeConfig::read_share(&old, 16, 0.25).unwrap().dims, 8);

        let none = json!({});
        let none = Config::root(&none).unwrap();
        assert_eq!(RopeConfig::read_share(&none, 16, 0.25).unwrap().dims, 4);
        let odd = RopeConfig::read_share(&none, 12, 0.25)
            .unwrap_err()
            .to_string();
        assert!(odd.contains("\"head_dim\" is missing"), "{odd}");
    }

    #[test]
    fn a_number_inside_and_beside_the_settings_must_be_the_same() {
        let scaled = |inside: Value| {
            let mut settings = json!({"rope_type": "yarn", "factor": 2.0});
            settings
                .as_object_mut()
                .unwrap()
                .extend(inside.as_object().unwrap().clone());
            settings
        };
        let all = |key: &str, inside: &Value, beside: &Value| {
            let inside = scaled(json!({ key: inside }));
            let nested = json!({"full_attention": inside, "sliding_attention": {}});
            let of = |name: &str, settings: &Value, kind| {
                let result = read(&json!({ name: settings, key: beside }), kind);
                result.map(|_| ())
            };
            [
                of("rope_parameters", &inside, None),
                of("rope_scaling", &inside, None),
                of("rope_parameters", &nested, Some("full_attention")),
            ]
        };
        for (key, number, other) in [
            ("rope_theta", json!(5e5), json!(1e6)),
            ("partial_rotary_factor", json!(0.5), json!(1)),
            ("original_max_position_embeddings", json!(32), json!(64)),
        ] {
            assert_eq!(
                all(key, &number, &number),
                [Ok(()), Ok(()), Ok(())],
                "{key}"
            );
            assert_eq!(
                all(key, &number, &Value::Null),
                [Ok(()), Ok(()), Ok(())],
                "{key}"
            );
            let places = [
                "rope_parameters",
                "rope_scaling",
                "rope_parameters.full_attention",
            ];
            for (result, place) in all(key, &number, &other).into_iter().zip(places) {
                let error = result.unwrap_err();
                let place = format!("{place}.{key}");
                let both = [
                    format!("\"{key}\" is {other}"),
                    format!("expected {}, as {place} says", number.as_f64().unwrap()),
                ];
                assert!(both.iter().all(|part| error.contains(part)), "{error}");
            }
        }
    }

    /// The reference merges the two, or takes either, by version and architecture.
    #[test]
    fn older_settings_beside_those_of_a_layer_type_must_say_the_same() {
        let both = |older: Value| {
            json!({"rope_scaling": older, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}})
        };
        let full = |older: Value| read(&both(older), Some("full_attention"));
        assert_eq!(full(json!({"type": "linear", "factor": 8})), Ok(1e6));
        assert_eq!(full(Value::Null), Ok(1e6));
        for (older, said) in [
            (
                json!({"factor": 4.0}),
                "rope_parameters.full_attention.factor says (8.0)",
            ),
            (
                json!({"rope_type": "yarn"}),
                "full_attention.rope_type says (\"linear\")",
            ),
            (
                json!({"beta_fast": 32}),
                "full_attention.beta_fast says (missing)",
            ),
        ] {
            let error = full(older.clone()).unwrap_err();
            let key = format!("\"rope_scaling\" is {older}");
            assert!(error.contains(said) && error.contains(&key), "{error}");
        }
    }

    #[test]
    fn two_spellings_may_stand_beside_each_other_where_they_agree() {
        let linear = json!({"rope_type": "linear", "factor": 2.0});
        let both = |beside: Value| json!({"rope_parameters": linear, "rope_scaling": beside});
        assert!(read(&both(json!({"type": "linear", "factor": 2.0})), None).is_ok());
        assert!(read(&both(Value::Null), None).is_ok());
        for other in [
            json!({"type": "linear", "factor": 4.0}),
            json!({"type": "dynamic", "factor": 2.0}),
            json!({"type": "default"}),
        ] {
            let error = read(&both(other), None).unwrap_err();
            assert!(error.contains("rope_scaling"), "{error}");
        }
        let plain =
            json!({"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"type": "default"}});
        assert_eq!(read(&plain, None), Ok(7.0));
    }
}
