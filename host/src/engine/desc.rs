//! What a family says of a model (`FamilyTable::describe`), as the host reads it.
//!
//! The host plans pages, memory and limits from this alone and never from a model's name.

use serde::Deserialize;

use mlxcel_abi::types::MAX_DIMS;

use super::cross::CROSS_PAGE_SIZE;
use super::error::EngineError;
use super::kv_types::KvType;

/// Which cache one layer needs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CacheDesc {
    /// Keys and values of every position.
    Dense {
        /// Key and value heads.
        kv_heads: usize,
        /// Width of a key.
        k_dim: usize,
        /// Width of a value.
        v_dim: usize,
    },
    /// Keys and values of the last `window` positions.
    Window {
        /// Key and value heads.
        kv_heads: usize,
        /// Width of a key.
        k_dim: usize,
        /// Width of a value.
        v_dim: usize,
        /// Positions a row sees, itself included.
        window: usize,
    },
    /// One compressed key per position, whose first elements are its value.
    Latent {
        /// Width of a key.
        k_dim: usize,
        /// Elements of it that are the value.
        v_dim: usize,
        /// Width of the index keys, if there are any.
        #[serde(default)]
        index_dim: Option<usize>,
    },
    /// States of fixed size that move on with every row.
    Recurrent {
        /// The layer's states, in order of their numbers.
        states: Vec<StateDesc>,
    },
    /// Keys and values of an encoder's output, the same for every position of the sequence.
    Cross {
        /// Key and value heads.
        kv_heads: usize,
        /// Width of a key.
        k_dim: usize,
        /// Width of a value.
        v_dim: usize,
    },
    /// No cache, or another layer's.
    None,
}

/// What the encoder of a model with cross-attention takes and gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct EncoderDesc {
    /// Width of a row of features.
    pub width: usize,
    /// Most rows of one request.
    pub max_rows: usize,
    /// Rows that become one position of the cross-attention layers.
    pub stride: usize,
}

/// One recurrent state of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct StateDesc {
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Element type; `f32` is the one there is.
    pub dtype: String,
}

impl StateDesc {
    /// Elements of one sequence's state.
    pub fn elements(&self) -> usize {
        self.shape
            .iter()
            .fold(1, |product: usize, n| product.saturating_mul(*n))
    }

    fn check(&self) -> Result<(), String> {
        let Self { shape, dtype } = self;
        if dtype != "f32" {
            return Err(format!("a state of type {dtype}, expected f32"));
        }
        // One axis more is the pool's.
        let has_dims = (1..MAX_DIMS).contains(&shape.len()) && !shape.contains(&0);
        if has_dims && self.elements() <= MAX_STATE {
            Ok(())
        } else {
            Err(format!(
                "a state of shape {shape:?}, expected 1 to {} dimensions and 1 to {MAX_STATE} elements",
                MAX_DIMS - 1
            ))
        }
    }
}

impl CacheDesc {
    /// Heads and widths of keys and values, where there are any.
    pub fn dims(&self) -> Option<(usize, usize, usize)> {
        match *self {
            Self::Dense {
                kv_heads,
                k_dim,
                v_dim,
            }
            | Self::Window {
                kv_heads,
                k_dim,
                v_dim,
                ..
            } => Some((kv_heads, k_dim, v_dim)),
            Self::Latent { .. } | Self::Recurrent { .. } | Self::Cross { .. } | Self::None => None,
        }
    }

    /// Heads and widths of keys and values of an encoder's output.
    pub fn cross(&self) -> Option<(usize, usize, usize)> {
        match *self {
            Self::Cross {
                kv_heads,
                k_dim,
                v_dim,
            } => Some((kv_heads, k_dim, v_dim)),
            _ => None,
        }
    }

    /// Most keys a row sees; 0 is no limit.
    pub fn window(&self) -> usize {
        match *self {
            Self::Window { window, .. } => window,
            _ => 0,
        }
    }

    /// Width of latent keys and of their values, and of the index keys if there are any.
    pub fn latent(&self) -> Option<(usize, usize, Option<usize>)> {
        match *self {
            Self::Latent {
                k_dim,
                v_dim,
                index_dim,
            } => Some((k_dim, v_dim, index_dim)),
            _ => None,
        }
    }

    /// States of every sequence.
    pub fn states(&self) -> &[StateDesc] {
        match self {
            Self::Recurrent { states } => states,
            _ => &[],
        }
    }

    /// Bytes that one position takes.
    pub fn bytes_per_token(&self, kind: KvType) -> usize {
        let row = |width: usize| kind.row_bytes(width);
        let latent = |(k, _, index): (usize, usize, Option<usize>)| row(k) + index.map_or(0, row);
        let pair = |(heads, k, v): (usize, usize, usize)| heads * (row(k) + row(v));
        self.dims().map_or(0, pair) + self.latent().map_or(0, latent)
    }

    /// Bytes that one sequence takes whatever its length.
    pub fn state_bytes(&self) -> usize {
        let bytes = |state: &StateDesc| state.elements().saturating_mul(STATE_ELEMENT_BYTES);
        self.states().iter().map(bytes).sum()
    }

    /// Whether a sequence may go on from any position whose rows are kept. A state is that of one
    /// position only.
    pub fn is_exact_everywhere(&self) -> bool {
        self.states().is_empty()
    }

    fn check(&self) -> Result<(), String> {
        match self {
            Self::Latent { k_dim, v_dim, .. } if v_dim == &0 || v_dim > k_dim => Err(format!(
                "latent values of {v_dim} elements in keys of {k_dim}"
            )),
            Self::Recurrent { states } if !(1..=MAX_STATES).contains(&states.len()) => {
                Err(format!(
                    "{} states of a layer, expected 1 to {MAX_STATES}",
                    states.len()
                ))
            }
            Self::Recurrent { states } => states.iter().try_for_each(StateDesc::check),
            _ => Ok(()),
        }
    }
}

/// Description of a model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ModelDesc {
    /// Architecture id.
    pub arch: String,
    /// What the model does.
    pub task: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context_length: usize,
    /// One entry per layer.
    pub layers: Vec<CacheDesc>,
    /// Elements of intermediate values alive at once, per row of a step.
    pub activation_width: usize,
    /// The encoder, where there are layers of cross-attention.
    #[serde(default)]
    pub encoder: Option<EncoderDesc>,
}

/// Largest layer count and width that a description may have: beyond them the family is wrong.
const MAX_LAYERS: usize = 4096;
const MAX_WIDTH: usize = 1 << 24;
const MAX_STATES: usize = 8;
const MAX_STATE: usize = 1 << 28;

/// States are f32.
pub(super) const STATE_ELEMENT_BYTES: usize = 4;

impl ModelDesc {
    /// Reads and bounds-checks a description.
    pub fn parse(json: &str) -> Result<Self, EngineError> {
        let bad = |message: String| EngineError::Description { message };
        let desc: Self = serde_json::from_str(json).map_err(|e| bad(e.to_string()))?;
        if desc.layers.is_empty() || desc.layers.len() > MAX_LAYERS {
            return Err(bad(format!(
                "{} layers, expected 1 to {MAX_LAYERS}",
                desc.layers.len()
            )));
        }
        let widths = [
            desc.vocab_size,
            desc.hidden_size,
            desc.context_length,
            desc.activation_width,
        ];
        desc.layers
            .iter()
            .try_for_each(CacheDesc::check)
            .map_err(bad)?;
        let per_token = desc.layers.iter().flat_map(|layer| match *layer {
            CacheDesc::Latent {
                k_dim, index_dim, ..
            } => [k_dim, index_dim.unwrap_or(1), 1],
            _ => layer
                .dims()
                .or(layer.cross())
                .map_or([1; 3], |(heads, k, v)| [heads, k, v]),
        });
        let has_cross = desc.layers.iter().any(|layer| layer.cross().is_some());
        if has_cross != desc.encoder.is_some() {
            return Err(bad(format!(
                "layers of cross-attention: {has_cross}, an encoder: {}; one needs the other",
                desc.encoder.is_some()
            )));
        }
        let encoder = desc.encoder.map_or([1; 3], |encoder| {
            [encoder.width, encoder.max_rows, encoder.stride]
        });
        // Contexts may be longer than widths, but not by much.
        if let Some(value) = widths
            .into_iter()
            .chain(per_token)
            .chain(encoder)
            .find(|w| *w == 0 || *w > MAX_WIDTH)
        {
            return Err(bad(format!("a size of {value}, expected 1 to {MAX_WIDTH}")));
        }
        Ok(desc)
    }

    /// What one of `ranks` ranks keeps, by the rule of the extension `mlxcel.ext.collectives/1`: key and value heads are
    /// divided; where there are fewer than ranks, each rank has one.
    pub fn of_rank(&self, ranks: usize) -> Result<Self, EngineError> {
        if ranks <= 1 {
            return Ok(self.clone());
        }
        let refused = |reason: String| EngineError::CannotSplit {
            arch: self.arch.clone(),
            ranks,
            reason,
        };
        let part = |(index, layer): (usize, &CacheDesc)| {
            let mut layer = layer.clone();
            match &mut layer {
                CacheDesc::None => {}
                CacheDesc::Dense { kv_heads, .. } | CacheDesc::Window { kv_heads, .. } => {
                    *kv_heads = match *kv_heads {
                        heads if ranks > 0 && heads.is_multiple_of(ranks) => heads / ranks,
                        heads if heads > 0 && ranks.is_multiple_of(heads) => 1,
                        heads => {
                            return Err(refused(format!(
                                "layer {index} has {heads} key and value heads, which have to divide by the ranks, or the ranks by them"
                            )));
                        }
                    };
                }
                CacheDesc::Latent { .. }
                | CacheDesc::Recurrent { .. }
                | CacheDesc::Cross { .. } => {
                    return Err(refused(format!(
                        "layer {index} has a cache of another kind than keys and values by position"
                    )));
                }
            }
            Ok(layer)
        };
        let layers = self.layers.iter().enumerate().map(part);
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            ..self.clone()
        })
    }

    /// Bytes of the recurrent states of one sequence over all layers.
    pub fn state_bytes_per_sequence(&self) -> usize {
        let bytes = self.layers.iter().map(CacheDesc::state_bytes);
        bytes.fold(0, usize::saturating_add)
    }

    /// Whether a sequence may go on from any position whose rows are kept.
    pub fn is_exact_everywhere(&self) -> bool {
        self.layers.iter().all(CacheDesc::is_exact_everywhere)
    }

    /// Oldest ABI minor of a backend that has what the caches need. States can be composed.
    pub fn needs_backend_minor(&self) -> u32 {
        let is_newer =
            |layer: &CacheDesc| matches!(layer, CacheDesc::Latent { .. } | CacheDesc::Cross { .. });
        u32::from(self.layers.iter().any(is_newer))
    }

    /// Bytes that one position of an encoder's output takes over all layers of cross-attention.
    pub fn cross_bytes_per_position(&self, element_bytes: usize) -> usize {
        let of_layer = |(heads, k, v): (usize, usize, usize)| heads * (k + v) * element_bytes;
        let layers = self.layers.iter().filter_map(CacheDesc::cross);
        layers.map(of_layer).fold(0, usize::saturating_add)
    }

    /// Pages for the longest output of the encoder.
    pub fn cross_pages_per_sequence(&self) -> usize {
        self.encoder.map_or(0, |encoder| {
            encoder
                .positions(encoder.max_rows)
                .div_ceil(CROSS_PAGE_SIZE)
        })
    }

    /// Bytes of the longest output of the encoder, in pages.
    pub fn cross_bytes_per_sequence(&self, element_bytes: usize) -> usize {
        self.cross_bytes_per_position(element_bytes)
            .saturating_mul(CROSS_PAGE_SIZE)
            .saturating_mul(self.cross_pages_per_sequence())
    }

    /// Bytes of keys and values that one position takes over all layers.
    pub fn kv_bytes_per_token(&self, kind: impl Into<KvType>) -> usize {
        let kind = kind.into();
        let bytes = self.layers.iter().map(|layer| layer.bytes_per_token(kind));
        bytes.fold(0, usize::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::DType;

    #[test]
    fn kv_bytes_follow_from_the_layers() {
        let desc = ModelDesc::parse(
            r#"{"arch":"a","task":"text-generation","vocab_size":8,"hidden_size":4,"context_length":16,
                "layers":[{"kind":"dense","kv_heads":2,"k_dim":3,"v_dim":5},
                          {"kind":"window","kv_heads":1,"k_dim":4,"v_dim":4,"window":8},{"kind":"none"}],
                "activation_width":12,"a_later_key":1}"#,
        )
        .unwrap();
        assert_eq!(desc.kv_bytes_per_token(DType::F16), (16 + 8) * 2);
        // Two heads of 3 and of 5, one of 4 and of 4, each with a scale.
        let q8 = 2 * (5 + 7) + 2 * 6;
        assert_eq!(desc.kv_bytes_per_token(KvType::Q8_0), q8);
        assert_eq!(desc.layers[1].window(), 8);
    }

    fn with_layers(layers: &str) -> Result<ModelDesc, EngineError> {
        ModelDesc::parse(&format!(
            r#"{{"arch":"a","task":"t","vocab_size":4,"hidden_size":4,"context_length":16,"layers":[{layers}],"activation_width":1}}"#
        ))
    }

    #[test]
    fn latent_keys_count_once_and_states_by_sequence() {
        let desc = with_layers(
            r#"{"kind":"latent","k_dim":6,"v_dim":4,"index_dim":3},{"kind":"latent","k_dim":6,"v_dim":6}"#,
        )
        .unwrap();
        assert_eq!(desc.kv_bytes_per_token(DType::F16), (6 + 3 + 6) * 2);
        assert!(desc.is_exact_everywhere());
        assert_eq!(desc.needs_backend_minor(), 1);
        let desc = with_layers(
            r#"{"kind":"recurrent","states":[{"shape":[3,8],"dtype":"f32"},{"shape":[2,4,4],"dtype":"f32"}]},{"kind":"none"}"#,
        )
        .unwrap();
        assert_eq!(desc.kv_bytes_per_token(DType::F16), 0);
        assert_eq!(desc.state_bytes_per_sequence(), (24 + 32) * 4);
        assert!(!desc.is_exact_everywhere());
    }

    #[test]
    fn impossible_caches_are_refused_with_their_numbers() {
        for (layer, part) in [
            (
                r#"{"kind":"latent","k_dim":4,"v_dim":5}"#,
                "5 elements in keys of 4",
            ),
            (
                r#"{"kind":"latent","k_dim":99999999,"v_dim":5}"#,
                "a size of 99999999",
            ),
            (
                r#"{"kind":"cross","kv_heads":1,"k_dim":2,"v_dim":2}"#,
                "one needs the other",
            ),
            (r#"{"kind":"recurrent","states":[]}"#, "0 states"),
            (
                r#"{"kind":"recurrent","states":[{"shape":[2],"dtype":"f16"}]}"#,
                "type f16",
            ),
            (
                r#"{"kind":"recurrent","states":[{"shape":[2,0],"dtype":"f32"}]}"#,
                "shape [2, 0]",
            ),
            (
                r#"{"kind":"recurrent","states":[{"shape":[65536,65536],"dtype":"f32"}]}"#,
                "shape [65536, 65536]",
            ),
        ] {
            let text = with_layers(layer).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn absurd_descriptions_are_refused() {
        for json in [
            "{}",
            r#"{"arch":"a","task":"t","vocab_size":0,"hidden_size":4,"context_length":16,"layers":[{"kind":"none"}],"activation_width":1}"#,
            r#"{"arch":"a","task":"t","vocab_size":4,"hidden_size":4,"context_length":16,"layers":[],"activation_width":1}"#,
            r#"{"arch":"a","task":"t","vocab_size":4,"hidden_size":4,"context_length":16,"layers":[{"kind":"strange"}],"activation_width":1}"#,
        ] {
            assert!(ModelDesc::parse(json).is_err(), "{json}");
        }
    }

    #[test]
    fn ranks_divide_heads_or_share_them() {
        let desc = |layer: &str| {
            let text = format!(
                r#"{{"arch": "x", "task": "text-generation", "vocab_size": 8, "hidden_size": 4, "context_length": 16,
                    "layers": [{layer}], "activation_width": 12}}"#
            );
            ModelDesc::parse(&text).unwrap()
        };
        let heads = |kv_heads: usize, ranks: usize| -> Result<usize, EngineError> {
            let layer =
                format!(r#"{{"kind": "dense", "kv_heads": {kv_heads}, "k_dim": 8, "v_dim": 4}}"#);
            let part = desc(&layer).of_rank(ranks)?;
            Ok(part.layers[0].dims().unwrap().0)
        };
        let error = |found: Result<usize, EngineError>| found.unwrap_err().to_string();
        assert_eq!(heads(8, 1).unwrap(), 8);
        assert_eq!(heads(8, 4).unwrap(), 2);
        assert_eq!(heads(2, 8).unwrap(), 1);
        assert!(error(heads(3, 2)).starts_with(
            "--tensor-parallel 2: x cannot be split: layer 0 has 3 key and value heads"
        ));
        let latent = desc(r#"{"kind": "latent", "k_dim": 8, "v_dim": 4}"#);
        assert!(latent.of_rank(2).is_err() && latent.of_rank(1).is_ok());
        let none = desc(r#"{"kind": "none"}"#);
        assert_eq!(none.of_rank(7).unwrap(), none);
    }
}
