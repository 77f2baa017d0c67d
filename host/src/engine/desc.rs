//! What a family says of a model (`FamilyTable::describe`), as the host reads it.
//!
//! The host plans pages, memory and limits from this alone and never from a model's name.

use serde::Deserialize;

use super::error::EngineError;

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
    /// No cache.
    None,
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
            Self::None => None,
        }
    }

    /// Most keys a row sees; 0 is no limit.
    pub fn window(&self) -> usize {
        match *self {
            Self::Window { window, .. } => window,
            _ => 0,
        }
    }

    /// Elements that one position takes.
    pub fn elements_per_token(&self) -> usize {
        self.dims().map_or(0, |(heads, k, v)| heads * (k + v))
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
}

/// Largest layer count and width that a description may have: beyond them the family is wrong.
const MAX_LAYERS: usize = 4096;
const MAX_WIDTH: usize = 1 << 24;

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
        let per_token = desc
            .layers
            .iter()
            .map(|layer| layer.dims().unwrap_or((1, 1, 1)));
        let per_token = per_token.flat_map(|(heads, k, v)| [heads, k, v]);
        // Contexts may be longer than widths, but not by much.
        if let Some(value) = widths
            .into_iter()
            .chain(per_token)
            .find(|w| *w == 0 || *w > MAX_WIDTH)
        {
            return Err(bad(format!("a size of {value}, expected 1 to {MAX_WIDTH}")));
        }
        Ok(desc)
    }

    /// Bytes of keys and values that one position takes over all layers.
    pub fn kv_bytes_per_token(&self, element_bytes: usize) -> usize {
        self.layers
            .iter()
            .map(CacheDesc::elements_per_token)
            .sum::<usize>()
            * element_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_bytes_follow_from_the_layers() {
        let desc = ModelDesc::parse(
            r#"{"arch":"a","task":"text-generation","vocab_size":8,"hidden_size":4,"context_length":16,
                "layers":[{"kind":"dense","kv_heads":2,"k_dim":3,"v_dim":5},
                          {"kind":"window","kv_heads":1,"k_dim":4,"v_dim":4,"window":8},{"kind":"none"}],
                "activation_width":12,"a_later_key":1}"#,
        )
        .unwrap();
        assert_eq!(desc.kv_bytes_per_token(2), (16 + 8) * 2);
        assert_eq!(desc.layers[1].window(), 8);
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
}
