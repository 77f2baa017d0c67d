//! Rotary settings of `deepseek_v4`: how much of a head is rotated, and two embeddings, `main` for layers
//! with a window alone and `compress` for the others.

use mlxcel_sdk::nn::{RopeConfig, RopeScaling};
use mlxcel_sdk::prelude::*;

use crate::shared_kv::SharedConfig;

const NESTED: &str = "rope_parameters";
const LEGACY: &str = "rope_scaling";
const PART: &str = "partial_rotary_factor";
const BASE: &str = "rope_theta";
const BASES: core::ops::RangeInclusive<f64> = 1.0..=1e12;
/// The class's share of a head.
const PART_OF_CLASS: f64 = 0.125;

/// The features that a share of a head's `width` are, as transformers counts them.
fn part_of(width: usize, part: f64) -> usize {
    // Shares such as 6 / 14 are not exact.
    (width as f64 * part + 1e-6) as usize
}

/// Rotated features of a head: `qk_rope_head_dim` as published, a part of the head as transformers
/// saves it.
pub(crate) fn rotated(config: &Config<'_>, width: usize) -> Result<usize> {
    const PUBLISHED: &str = "qk_rope_head_dim";
    let published = config.opt_uint(PUBLISHED, 1..=65_536)?;
    let part = config.opt_float(PART, 1e-3..=1.0)?;
    let (key, rotated) = match (published, part) {
        (Some(rotated), Some(part)) if part_of(width, part) != rotated => {
            let other = part_of(width, part);
            let expected = format!(
                "{other}, as {PART} ({part}) beside it makes of head_dim ({width}), or only one of the two"
            );
            return Err(config.error(PUBLISHED, expected));
        }
        (Some(rotated), _) => (PUBLISHED, rotated),
        (None, Some(part)) => (PART, part_of(width, part)),
        (None, None) => (PUBLISHED, part_of(width, PART_OF_CLASS)),
    };
    if rotated == 0 || rotated > width || !rotated.is_multiple_of(2) {
        let expected = format!(
            "a value that makes an even number of rotated features up to head_dim ({width}) (this gives {rotated})"
        );
        return Err(config.error(key, expected));
    }
    Ok(rotated)
}

/// Settings of one of the two embeddings: nested under its name, or flat, where the scaling is that of
/// `compress` alone, without a factor on cosines and sines, and its base stands apart.
pub(crate) fn read_rope(
    config: &Config<'_>,
    name: &str,
    attention: &SharedConfig,
) -> Result<RopeConfig> {
    let main = name == "main";
    let (key, class) = if main {
        (BASE, 10_000.0)
    } else {
        ("compress_rope_theta", 160_000.0)
    };
    let base = config.float_or(key, class, BASES)?;
    let width = attention.width;
    let outer = config.section(NESTED)?;
    let nested = match &outer {
        Some(outer) => both(outer)?
            .then(|| outer.section(name))
            .transpose()?
            .flatten(),
        None => None,
    };
    let legacy = config.section(LEGACY)?;
    if !main && let Some(settings) = nested.as_ref().or(outer.as_ref()) {
        RopeConfig::check_older(config, settings)?;
    }
    let mut rope = match (&nested, main) {
        (Some(nested), _) => {
            let base = RopeConfig::read_base(config, key, Some(nested), class)?;
            check_part(nested, attention)?;
            RopeConfig::from_settings(config, Some(nested), base, width)?
        }
        (None, true) => {
            if let Some(flat) = outer.as_ref().or(legacy.as_ref()) {
                check_flat(flat, base, attention)?;
            }
            RopeConfig::from_settings(config, None, base, width)?
        }
        (None, false) => {
            let flat = outer.as_ref().or(legacy.as_ref());
            let mut rope = RopeConfig::from_settings(config, flat, base, width)?;
            rope.base = base;
            let given = flat.is_some_and(|flat| flat.get("attention_factor").is_some());
            if let RopeScaling::Yarn {
                attention_factor, ..
            } = &mut rope.scaling
                && !given
            {
                *attention_factor = 1.0;
            }
            rope
        }
    };
    rope.dims = attention.rotated;
    Ok(rope)
}

/// Whether settings are nested by embedding. One of the two alone would leave the other to be guessed.
fn both(outer: &Config<'_>) -> Result<bool> {
    let (main, compress) = (outer.section("main")?, outer.section("compress")?);
    match (main.is_some(), compress.is_some()) {
        (true, false) => Err(outer.error("compress", "an object, as there is one for main")),
        (false, true) => Err(outer.error("main", "an object, as there is one for compress")),
        (both, _) => Ok(both),
    }
}

/// A share inside the settings is the share of the whole model.
fn check_part(settings: &Config<'_>, attention: &SharedConfig) -> Result<()> {
    let (width, rotated) = (attention.width, attention.rotated);
    match settings.opt_float(PART, 1e-3..=1.0)? {
        Some(part) if part_of(width, part) != rotated => {
            let expected = format!(
                "a share of head_dim ({width}) that is the {rotated} rotated features of the model, or none"
            );
            Err(settings.error(PART, expected))
        }
        _ => Ok(()),
    }
}

/// The reference drops a base in flat settings for the one beside them.
fn check_flat(flat: &Config<'_>, base: f64, attention: &SharedConfig) -> Result<()> {
    check_part(flat, attention)?;
    match flat.opt_float(BASE, BASES)? {
        Some(inside) if inside != base => {
            let expected = format!("{base}, the base of layers with a window alone, or none");
            Err(flat.error(BASE, expected))
        }
        _ => Ok(()),
    }
}
