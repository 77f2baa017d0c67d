//! Reading of rotary embedding settings, in both spellings: `rope_theta` + `rope_scaling`, and the
//! newer `rope_parameters`. Formulas are in `rope.rs`.

use crate::{Config, Result};

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
const BASE: core::ops::RangeInclusive<f64> = 1.0..=1e12;

impl RopeConfig {
    /// Reads the settings of a model whose heads are `head_dim` wide. `layer_type` picks one of
    /// several settings where the configuration nests them by type of layer.
    pub fn read(config: &Config<'_>, head_dim: usize, layer_type: Option<&str>) -> Result<Self> {
        let outer = config.section("rope_parameters")?;
        let nested = match (&outer, layer_type) {
            (Some(outer), Some(kind)) => outer.section(kind)?,
            _ => None,
        };
        let legacy = config.section("rope_scaling")?;
        if let (Some(outer), None) = (&outer, &nested) {
            one_set_of_settings(config, outer, legacy.as_ref(), layer_type)?;
        }
        let settings = nested.or(outer).or(legacy);
        let inside = settings.is_some_and(|s| s.get("rope_theta").is_some());
        let base = if inside {
            10_000.0
        } else {
            config.float_or("rope_theta", 10_000.0, BASE)?
        };
        Self::from_settings(config, settings.as_ref(), base, head_dim)
    }

    /// Reads one object of settings that the caller has found. `base` is what holds where the object
    /// names none; `config` has the model's context lengths.
    pub fn from_settings(
        config: &Config<'_>,
        settings: Option<&Config<'_>>,
        base: f64,
        head_dim: usize,
    ) -> Result<Self> {
        let base = match settings {
            Some(settings) => settings.float_or("rope_theta", base, BASE)?,
            None => base,
        };
        let partial_range = 1e-3..=1.0;
        let partial = match settings
            .map(|s| s.opt_float("partial_rotary_factor", partial_range.clone()))
            .transpose()?
            .flatten()
        {
            Some(partial) => partial,
            None => config.float_or("partial_rotary_factor", 1.0, partial_range)?,
        };
        let dims = (head_dim as f64 * partial) as usize;
        if dims == 0 || !dims.is_multiple_of(2) {
            let expected = format!(
                "a value with which an even, non-zero part of a head's {head_dim} features is rotated (this gives {dims})"
            );
            let key = if partial == 1.0 {
                "head_dim"
            } else {
                "partial_rotary_factor"
            };
            return Err(config.error(key, expected));
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

/// Refuses settings that would have to be dropped: those of layer types that nobody asked for, and a
/// `rope_scaling` beside `rope_parameters` that says something else.
fn one_set_of_settings(
    config: &Config<'_>,
    settings: &Config<'_>,
    legacy: Option<&Config<'_>>,
    layer_type: Option<&str>,
) -> Result<()> {
    let is_settings = |value: &serde_json::Value| {
        let names = [
            "rope_theta",
            "rope_type",
            "type",
            "factor",
            "partial_rotary_factor",
        ];
        names.iter().any(|name| value.get(name).is_some())
    };
    if settings.entries().any(|(_, value)| is_settings(value)) {
        let expected = match layer_type {
            Some(kind) => format!("an entry {kind} beside those of other layer types"),
            None => "one set of settings, as all layers of this architecture share it".to_owned(),
        };
        return Err(config.error("rope_parameters", expected));
    }
    for (key, value) in legacy.into_iter().flat_map(Config::entries) {
        let beside = match key {
            "type" | "rope_type" => settings
                .spelled(&["rope_type", "type"])
                .and_then(|key| settings.get(key)),
            key => settings.get(key),
        };
        let is_default = beside.is_none() && value == "default";
        if beside != Some(value) && !is_default {
            let expected = format!("what rope_parameters says of {key}, or only one of the two");
            return Err(config.error("rope_scaling", expected));
        }
    }
    Ok(())
}

fn read_scaling(config: &Config<'_>, settings: &Config<'_>, dims: usize) -> Result<RopeScaling> {
    let key = settings.spelled(&["rope_type", "type"]);
    let kind = match key {
        Some(key) => settings.opt_str(key)?.unwrap_or("default"),
        None => "default",
    };
    let limit = config.uint_or("max_position_embeddings", 2048)?;
    // Beside the settings it wins over the one inside, as in the reference.
    let original = |fallback: usize| -> Result<f64> {
        let name = "original_max_position_embeddings";
        let range = 1.0..=1e9;
        let beside = config.opt_float(name, range.clone())?;
        let inside = settings.opt_float(name, range)?;
        Ok(beside.or(inside).unwrap_or(fallback as f64))
    };
    match kind {
        "default" => Ok(RopeScaling::Plain),
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
        "longrope" | "su" => read_longrope(config, settings, dims, limit, original(limit)?),
        _ => Err(settings.unsupported(
            key.unwrap_or("rope_type"),
            "known rope types are default, linear, dynamic, yarn, llama3 and longrope",
        )),
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
