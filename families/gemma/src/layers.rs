//! Which layers slide, and the rotary settings of the two kinds of layer.

use mlxcel_sdk::nn::RopeConfig;
use mlxcel_sdk::prelude::*;

use crate::config::check_whole_head;

pub(crate) const SLIDING: &str = "sliding_attention";
pub(crate) const FULL: &str = "full_attention";

/// Windows by layer: from `layer_types`, or where there is none, every `pattern`-th layer sees
/// everything and the others slide.
pub(crate) fn read_windows(
    config: &Config<'_>,
    n_layers: usize,
    pattern: usize,
) -> Result<Vec<Option<usize>>> {
    let slides: Vec<bool> = match config.opt_strs("layer_types")? {
        None => (1..=n_layers).map(|n| !n.is_multiple_of(pattern)).collect(),
        Some(types) if types.len() == n_layers => types
            .iter()
            .map(|&kind| match kind {
                SLIDING => Ok(true),
                FULL => Ok(false),
                other => Err(Error::Unsupported {
                    what: format!("layer_types with {other:?}"),
                    supported: format!("known types are {SLIDING} and {FULL}"),
                }),
            })
            .collect::<Result<_>>()?,
        Some(types) => {
            let expected = format!(
                "one entry for each of {n_layers} layers, not {}",
                types.len()
            );
            return Err(config.error("layer_types", expected));
        }
    };
    if !slides.contains(&true) {
        return Ok(vec![None; n_layers]);
    }
    if config.is_null("sliding_window") {
        let expected = format!("an integer, as there are layers with {SLIDING}");
        return Err(config.error("sliding_window", expected));
    }
    let window = config.opt_uint("sliding_window", 1..=1 << 30)?;
    let window = window.unwrap_or(4096);
    Ok(slides.into_iter().map(|s| s.then_some(window)).collect())
}

/// Rotary settings of full and of sliding layers. Newer files nest them by type of layer in
/// `rope_parameters`; older ones have `rope_theta` and `rope_scaling` for full layers and
/// `rope_local_base_freq` for sliding ones, which are never scaled.
pub(crate) fn read_ropes(config: &Config<'_>, head_dim: usize) -> Result<(RopeConfig, RopeConfig)> {
    let bases = 1.0..=1e12;
    let full_base = config.float_or("rope_theta", 1e6, bases.clone())?;
    let sliding_base = config.float_or("rope_local_base_freq", 1e4, bases)?;
    let outer = config.section("rope_parameters")?;
    let (full, sliding) = match &outer {
        Some(outer) => {
            let (full, sliding) = (outer.section(FULL)?, outer.section(SLIDING)?);
            if full.is_none() && sliding.is_none() {
                let expected = format!("an object with {FULL} and {SLIDING}");
                return Err(config.error("rope_parameters", expected));
            }
            (full, sliding)
        }
        None => (config.section("rope_scaling")?, None),
    };
    let full = RopeConfig::from_settings(config, full.as_ref(), full_base, head_dim)?;
    let sliding = RopeConfig::from_settings(config, sliding.as_ref(), sliding_base, head_dim)?;
    check_whole_head(config, &full, head_dim)?;
    check_whole_head(config, &sliding, head_dim)?;
    Ok((full, sliding))
}
