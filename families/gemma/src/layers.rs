//! Which layers slide, and the rotary settings of the two kinds of layer.

use mlxcel_sdk::nn::RopeConfig;
use mlxcel_sdk::prelude::*;

pub(crate) const SLIDING: &str = "sliding_attention";
pub(crate) const FULL: &str = "full_attention";

/// Windows by layer: from `layer_types`, or where there is none, every `pattern`-th layer sees
/// everything and the others slide.
pub(crate) fn read_windows(
    config: &Config<'_>,
    n_layers: usize,
    pattern: usize,
    default_window: usize,
) -> Result<Vec<Option<usize>>> {
    let slides: Vec<bool> = match config.opt_strs("layer_types")? {
        None => (1..=n_layers).map(|n| !n.is_multiple_of(pattern)).collect(),
        Some(types) if types.len() == n_layers => types
            .iter()
            .enumerate()
            .map(|(layer, &kind)| match kind {
                SLIDING => Ok(true),
                FULL => Ok(false),
                _ => {
                    let known = format!("known types are {SLIDING} and {FULL}");
                    Err(config.unsupported_entry("layer_types", layer, known))
                }
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
    let window = window.unwrap_or(default_window);
    Ok(slides.into_iter().map(|s| s.then_some(window)).collect())
}

/// The layer whose cache each layer attends over. The last `num_kv_shared_layers` have no keys and
/// values of their own: each takes those of the last layer of its kind before them.
pub(crate) fn read_owners(
    config: &Config<'_>,
    windows: &[Option<usize>],
    default_shared: usize,
) -> Result<Vec<usize>> {
    const KEY: &str = "num_kv_shared_layers";
    let n_layers = windows.len();
    let shared = config.opt_uint(KEY, 0..=n_layers.saturating_sub(1))?;
    let own = match shared {
        Some(shared) => n_layers - shared,
        None => n_layers
            .checked_sub(default_shared)
            .filter(|own| *own > 0)
            .ok_or_else(|| {
                config.error(
                    KEY,
                    format!(
                        "an integer below the {n_layers} layers, as its default is {default_shared}"
                    ),
                )
            })?,
    };
    let owner_of = |layer: usize, window: &Option<usize>| {
        if layer < own {
            return Ok(layer);
        }
        let owners = windows.get(..own).unwrap_or_default();
        owners.iter().rposition(|w| w == window).ok_or_else(|| {
            let kind = if window.is_some() { SLIDING } else { FULL };
            config.error(
                KEY,
                format!("a number that leaves a layer with {kind} before the layers that share"),
            )
        })
    };
    windows
        .iter()
        .enumerate()
        .map(|(layer, window)| owner_of(layer, window))
        .collect()
}

/// Rotary settings of full and of sliding layers. Newer files nest them by type of layer in
/// `rope_parameters`; older ones have `rope_theta` and `rope_scaling` for full layers and
/// `rope_local_base_freq` for sliding ones, which are never scaled.
pub(crate) fn read_ropes(config: &Config<'_>, head_dim: usize) -> Result<(RopeConfig, RopeConfig)> {
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
    if let (Some(outer), full) = (&outer, &full) {
        // The reference puts it into the settings of full layers.
        RopeConfig::check_older(config, full.as_ref().unwrap_or(outer))?;
    }
    let read = |settings: Option<&Config<'_>>, key: &str, base: f64| -> Result<RopeConfig> {
        let base = RopeConfig::read_base(config, key, settings, base)?;
        let rope = RopeConfig::from_settings(config, settings, base, head_dim)?;
        rope.check_whole(config, settings, head_dim)?;
        Ok(rope)
    };
    Ok((
        read(full.as_ref(), "rope_theta", 1e6)?,
        read(sliding.as_ref(), "rope_local_base_freq", 1e4)?,
    ))
}
