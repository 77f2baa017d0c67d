//! Sliding windows: which layers have one. The settings are shared, their meaning is not: it is that
//! of transformers' configuration and model classes of each architecture.

use mlxcel_sdk::prelude::*;

/// Layers that have the window when `layer_types` does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowRule {
    /// Those from `max_window_layers` on (`Qwen2Config`, `Qwen3Config`).
    FromLayer,
    /// Every other one of those before `max_window_layers` (`Qwen2MoeConfig`).
    EveryOther,
    /// All, and there are no layer types (`Qwen3MoeModel`).
    Everywhere,
}

const MAX_WINDOW: usize = 1 << 30;
/// Of a configuration without the key; one with a null has no window.
const DEFAULT_WINDOW: usize = 4096;

/// Most keys a row sees, by layer; none is all.
pub(crate) fn windows(
    config: &Config<'_>,
    n_layers: usize,
    rule: WindowRule,
) -> Result<Vec<Option<usize>>> {
    // A window beside `use_sliding_window: false` is a left-over, which published files have.
    let slides = config.bool_or("use_sliding_window", false)? && !config.is_null("sliding_window");
    let window = if slides {
        let given = config.opt_uint("sliding_window", 1..=MAX_WINDOW)?;
        Some(given.unwrap_or(DEFAULT_WINDOW))
    } else {
        None
    };
    let first = config
        .opt_uint("max_window_layers", 0..=4096)?
        .unwrap_or(28);
    let by_rule: Vec<Option<usize>> = (0..n_layers)
        .map(|layer| match rule {
            WindowRule::FromLayer => window.filter(|_| layer >= first),
            WindowRule::EveryOther => window.filter(|_| layer < first && layer.is_multiple_of(2)),
            WindowRule::Everywhere => window,
        })
        .collect();
    let Some(types) = config.opt_strs("layer_types")? else {
        return Ok(by_rule);
    };
    let by_type = of_types(config, &types, n_layers, window)?;
    if rule == WindowRule::Everywhere && by_type != by_rule {
        let supported =
            "layers of this architecture are all alike: they slide when use_sliding_window is true";
        return Err(config.unsupported("layer_types", supported));
    }
    Ok(by_type)
}

fn of_types(
    config: &Config<'_>,
    types: &[&str],
    n_layers: usize,
    window: Option<usize>,
) -> Result<Vec<Option<usize>>> {
    if types.len() != n_layers {
        let expected = format!("one entry for each of {n_layers} layers");
        return Err(config.error("layer_types", expected));
    }
    types
        .iter()
        .enumerate()
        .map(|(layer, &kind)| match kind {
            "full_attention" => Ok(None),
            "sliding_attention" if window.is_some() => Ok(window),
            "sliding_attention" => Err(config.error(
                "layer_types",
                "full_attention only, as there is no window (use_sliding_window, sliding_window)",
            )),
            _ => Err(config.unsupported_entry(
                "layer_types",
                layer,
                "known types are full_attention and sliding_attention",
            )),
        })
        .collect()
}
