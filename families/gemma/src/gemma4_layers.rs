//! The layers of gemma4: which slide, which share a cache, how many and how wide their heads are.

use mlxcel_sdk::prelude::*;

use crate::config::Sizes;
use crate::layers::{FULL, read_owners, read_windows};

/// What differs between the layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerConfig {
    pub window: Option<usize>,
    /// The layer whose cache is read; the layer itself where it has its own.
    pub owner: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the feed-forward block.
    pub inner: usize,
}

/// Reads the layers; `value_is_key` decides which heads full layers have.
pub(crate) fn read_layers(
    config: &Config<'_>,
    sizes: &Sizes,
    value_is_key: bool,
) -> Result<Vec<LayerConfig>> {
    let n_layers = sizes.n_layers;
    let mut windows = read_windows(config, n_layers, 6, 512)?;
    // The last layer sees everything; a list that says otherwise is overruled by one reference and
    // followed by the other.
    if let Some(last @ Some(_)) = windows.last_mut() {
        if config.get("layer_types").is_some() {
            return Err(config.unsupported("layer_types", format!("the last layer is {FULL}")));
        }
        *last = None;
    }
    let owners = read_owners(config, &windows, 0)?;
    let double = config.bool_or("use_double_wide_mlp", false)?;
    let full = FullLayers::read(config, sizes, value_is_key)?;
    let mut layers = Vec::with_capacity(n_layers);
    for (layer, (window, owner)) in windows.into_iter().zip(owners).enumerate() {
        let (kv_heads, head_dim) = full.of(config, layer, window.is_some(), sizes)?;
        let shares = owner != layer;
        layers.push(LayerConfig {
            window,
            owner,
            kv_heads,
            head_dim,
            inner: if double && shares {
                2 * sizes.inner
            } else {
                sizes.inner
            },
        });
    }
    Ok(layers)
}

/// Heads of full layers: `global_head_dim` and `num_global_key_value_heads` as published, or in
/// `per_layer_config` as newer versions of transformers write them, a layer each.
struct FullLayers {
    kv_heads: usize,
    head_dim: usize,
}

impl FullLayers {
    fn read(config: &Config<'_>, sizes: &Sizes, value_is_key: bool) -> Result<Self> {
        let head_dim = config.opt_uint("global_head_dim", 2..=4096)?.unwrap_or(512);
        if !head_dim.is_multiple_of(2) {
            return Err(config.error(
                "global_head_dim",
                "an even number, as halves of a head are rotated",
            ));
        }
        const HEADS: &str = "num_global_key_value_heads";
        let kv_heads = config.opt_uint(HEADS, 1..=4096)?.filter(|_| value_is_key);
        if let Some(kv_heads) = kv_heads {
            config.divides((HEADS, kv_heads), ("num_attention_heads", sizes.heads))?;
        }
        Ok(Self {
            kv_heads: kv_heads.unwrap_or(sizes.kv_heads),
            head_dim,
        })
    }

    /// Key and value heads, and their width, of a layer.
    fn of(
        &self,
        config: &Config<'_>,
        layer: usize,
        slides: bool,
        sizes: &Sizes,
    ) -> Result<(usize, usize)> {
        const LIST: &str = "per_layer_config";
        let Some(listed) = config.section(LIST)? else {
            return Ok(if slides {
                (sizes.kv_heads, sizes.head_dim)
            } else {
                (self.kv_heads, self.head_dim)
            });
        };
        let name = layer.to_string();
        let Some(own) = listed.section(&name)? else {
            return Ok((sizes.kv_heads, sizes.head_dim));
        };
        let keys = config
            .get(LIST)
            .and_then(|list| list.get(&name)?.as_object());
        let known = |key: &String| matches!(key.as_str(), "head_dim" | "num_key_value_heads");
        if let Some(other) = keys.and_then(|keys| keys.keys().find(|key| !known(key))) {
            return Err(own.unsupported(
                other,
                "head_dim and num_key_value_heads differ between layers",
            ));
        }
        let kv_heads = own
            .opt_uint("num_key_value_heads", 1..=4096)?
            .unwrap_or(sizes.kv_heads);
        let head_dim = own
            .opt_uint("head_dim", 2..=4096)?
            .unwrap_or(sizes.head_dim);
        if !sizes.heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads ({})", sizes.heads);
            return Err(own.error("num_key_value_heads", expected));
        }
        Ok((kv_heads, head_dim))
    }
}
