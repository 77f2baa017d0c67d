//! The layers of gemma4: which slide, which share a cache, how many and how wide their heads are.

use std::collections::BTreeMap;

use mlxcel_sdk::prelude::*;

use crate::config::Sizes;
use crate::layers::{FULL, SLIDING, read_owners, read_windows};

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
            let supported = format!("the last layer is {FULL}");
            return Err(config.unsupported_entry("layer_types", n_layers - 1, supported));
        }
        *last = None;
    }
    let owners = read_owners(config, &windows, 0)?;
    let double = config.bool_or("use_double_wide_mlp", false)?;
    let full = FullLayers::read(config, sizes, value_is_key)?;
    let listed = Listed::read(config, sizes)?;
    let mut layers = Vec::with_capacity(n_layers);
    for (layer, (window, owner)) in windows.into_iter().zip(owners).enumerate() {
        let heads = match &listed {
            Some(listed) => listed.of(layer, sizes),
            None if window.is_some() => Heads::of_sizes(sizes),
            None => full.heads(sizes),
        };
        let shares = owner != layer;
        layers.push(LayerConfig {
            window,
            owner,
            kv_heads: heads.kv_heads,
            head_dim: heads.head_dim,
            inner: if double && shares {
                2 * sizes.inner
            } else {
                sizes.inner
            },
        });
    }
    if listed.is_some() {
        full.check_listed(config, &layers)?;
        check_alike(config, &layers)?;
    }
    Ok(layers)
}

/// Key and value heads of a layer, and the width of all its heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Heads {
    kv_heads: usize,
    head_dim: usize,
}

impl Heads {
    fn of_sizes(sizes: &Sizes) -> Self {
        Self {
            kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
        }
    }
}

const WIDTH: &str = "head_dim";
const FULL_WIDTH: &str = "global_head_dim";
const FULL_HEADS: &str = "num_global_key_value_heads";
const LIST: &str = "per_layer_config";
const HALVES: &str = "an even number, as halves of a head are rotated";

/// Heads of full layers as published.
struct FullLayers {
    head_dim: Option<usize>,
    kv_heads: Option<usize>,
}

impl FullLayers {
    fn read(config: &Config<'_>, sizes: &Sizes, value_is_key: bool) -> Result<Self> {
        let head_dim = config.opt_uint(FULL_WIDTH, 2..=4096)?;
        if head_dim.is_some_and(|width| !width.is_multiple_of(2)) {
            return Err(config.error(FULL_WIDTH, HALVES));
        }
        // Without keys for values the reference leaves their number as it is in other layers.
        let kv_heads = config
            .opt_uint(FULL_HEADS, 1..=4096)?
            .filter(|_| value_is_key);
        if let Some(kv_heads) = kv_heads {
            config.divides((FULL_HEADS, kv_heads), ("num_attention_heads", sizes.heads))?;
        }
        Ok(Self { head_dim, kv_heads })
    }

    fn heads(&self, sizes: &Sizes) -> Heads {
        Heads {
            kv_heads: self.kv_heads.unwrap_or(sizes.kv_heads),
            head_dim: self.head_dim.unwrap_or(512),
        }
    }

    /// Refuses numbers that stand beside a list by layer which says otherwise.
    fn check_listed(&self, config: &Config<'_>, layers: &[LayerConfig]) -> Result<()> {
        let full = || {
            layers
                .iter()
                .enumerate()
                .filter(|(_, l)| l.window.is_none())
        };
        let differs = |found: usize, layer: usize| {
            format!("{found}, as layer {layer} has by {LIST} beside it, or only one of the two")
        };
        if let Some(width) = self.head_dim
            && let Some((n, layer)) = full().find(|(_, l)| l.head_dim != width)
        {
            return Err(config.error(FULL_WIDTH, differs(layer.head_dim, n)));
        }
        if let Some(heads) = self.kv_heads
            && let Some((n, layer)) = full().find(|(_, l)| l.kv_heads != heads)
        {
            return Err(config.error(FULL_HEADS, differs(layer.kv_heads, n)));
        }
        Ok(())
    }
}

/// Heads by layer, `per_layer_config`, as newer versions of transformers write them; layers that are not
/// in it have the heads of the whole model.
struct Listed(BTreeMap<usize, Heads>);

impl Listed {
    fn read(config: &Config<'_>, sizes: &Sizes) -> Result<Option<Self>> {
        let Some(listed) = config.section(LIST)? else {
            return Ok(None);
        };
        let mut heads = BTreeMap::new();
        for (name, _) in listed.entries() {
            let layer = name.parse().ok().filter(|layer| *layer < sizes.n_layers);
            let (Some(layer), Some(own)) = (layer, listed.section(name)?) else {
                let last = sizes.n_layers - 1;
                let expected = format!("no such key: layers are 0 to {last}");
                return Err(listed.error(name, expected));
            };
            if heads.insert(layer, heads_of(&own, sizes)?).is_some() {
                return Err(listed.error(name, format!("one entry for layer {layer}")));
            }
        }
        Ok(Some(Self(heads)))
    }

    fn of(&self, layer: usize, sizes: &Sizes) -> Heads {
        let own = self.0.get(&layer).copied();
        own.unwrap_or_else(|| Heads::of_sizes(sizes))
    }
}

/// What one layer has of its own.
fn heads_of(own: &Config<'_>, sizes: &Sizes) -> Result<Heads> {
    const HEADS: &str = "num_key_value_heads";
    if let Some((other, _)) = own.entries().find(|(key, _)| ![WIDTH, HEADS].contains(key)) {
        let supported = format!("{WIDTH} and {HEADS} differ between layers");
        return Err(own.unsupported(other, supported));
    }
    let kv_heads = own.opt_uint(HEADS, 1..=4096)?.unwrap_or(sizes.kv_heads);
    let head_dim = own.opt_uint(WIDTH, 2..=4096)?.unwrap_or(sizes.head_dim);
    if !sizes.heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of num_attention_heads ({})", sizes.heads);
        return Err(own.error(HEADS, expected));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(own.error(WIDTH, HALVES));
    }
    Ok(Heads { kv_heads, head_dim })
}

/// Refuses a list by which layers cannot work together: a layer reads the cache of another with other heads,
/// or two layers with one rotary embedding have heads of different widths.
fn check_alike(config: &Config<'_>, layers: &[LayerConfig]) -> Result<()> {
    let Some(listed) = config.section(LIST)? else {
        return Ok(());
    };
    let mut first: [Option<(usize, usize)>; 2] = [None; 2];
    for (n, layer) in layers.iter().enumerate() {
        let name = n.to_string();
        if let Some(owner) = layers.get(layer.owner)
            && (owner.kv_heads, owner.head_dim) != (layer.kv_heads, layer.head_dim)
        {
            let expected = format!(
                "{WIDTH} {} and num_key_value_heads {}, as the layer reads the cache of layer {} (it has {} and {})",
                owner.head_dim, owner.kv_heads, layer.owner, layer.head_dim, layer.kv_heads
            );
            return Err(listed.error(&name, expected));
        }
        let [sliding, full] = &mut first;
        let (kind, first) = match layer.window {
            Some(_) => (SLIDING, sliding),
            None => (FULL, full),
        };
        match *first {
            Some((other, width)) if width != layer.head_dim => {
                let found = layer.head_dim;
                let expected = format!(
                    "{WIDTH} {width} as layer {other}, as layers with {kind} share a rotary embedding (it has {found})"
                );
                return Err(listed.error(&name, expected));
            }
            Some(_) => {}
            None => *first = Some((n, layer.head_dim)),
        }
    }
    Ok(())
}
