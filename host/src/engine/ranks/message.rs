//! What rank 0 and the others say to each other.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::sampling::RowDraw;

use super::super::pack::{PackedStep, Wants};

/// Version of these messages: both sides are the same program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// From rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// What to load. The first message.
    Load(Box<Setup>),
    /// A step to run.
    Step(Box<StepOrder>),
}

/// A step, and what a rank has to know besides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepOrder {
    /// What every rank runs.
    pub step: PackedStep,
    /// Size of the pool.
    pub capacity: Capacity,
    /// How every rank chooses the tokens after it, where the next step may follow before they are read: one for each row of logits.
    pub draws: Vec<Draw>,
    /// Tokens that the last step whose tokens were chosen so gave on rank 0, as far as it has read any.
    pub told: Option<Told>,
}

/// A [`RowDraw`], whose numbers go as bits: the same on all ranks to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draw {
    top_k: u32,
    bits: [u32; 4],
}

impl Draw {
    /// Those of spans that all want tokens, or nothing.
    pub fn of_all<'a>(wants: impl IntoIterator<Item = &'a Wants>) -> Vec<Self> {
        let draw = |wants: &Wants| match wants {
            Wants::Token(draw) => Some(Self {
                top_k: draw.top_k,
                bits: [draw.top_p, draw.min_p, draw.temperature, draw.uniform].map(f32::to_bits),
            }),
            _ => None,
        };
        wants.into_iter().filter_map(draw).collect()
    }

    /// What a span wants of it.
    pub fn wants(self) -> Wants {
        let [top_p, min_p, temperature, uniform] = self.bits.map(f32::from_bits);
        Wants::Token(RowDraw {
            top_k: self.top_k,
            top_p,
            min_p,
            temperature,
            uniform,
        })
    }
}

/// Tokens of a step, which all ranks choose for themselves: they have to be the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// Of the step, among those whose tokens were chosen so.
    pub number: u64,
    /// One for each row, none where it has none.
    pub tokens: Vec<Option<u32>>,
}

/// Size of the pool that a step needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Pages that exist, page 0 included.
    pub pages: usize,
    /// Most pages there will be.
    pub most_pages: usize,
}

/// To rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The model is loaded.
    Ready,
    /// It is over, and why.
    Failed(String),
}

/// What a rank loads, and how: all that rank 0 has decided.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// [`VERSION`] of rank 0.
    pub version: String,
    /// Number of the rank that this is for.
    pub rank: usize,
    /// An address for every rank.
    pub addresses: Vec<String>,
    /// Directory or file of the model.
    pub model: PathBuf,
    /// Folders with plugins.
    pub plugins_dir: Vec<PathBuf>,
    /// Plugin files.
    pub plugin: Vec<PathBuf>,
    /// Family plugin and its version.
    pub family: (String, String),
    /// Architecture.
    pub arch: String,
    /// Backend plugin and its version.
    pub backend: (String, String),
    /// Name of the device; empty for the first.
    pub device: String,
    /// Float type of activations.
    pub dtype: String,
    /// Type of keys and values.
    pub kv_type: String,
    /// How products are computed; empty lets the backend decide.
    pub precision: String,
    /// Compute threads; 0 lets the backend decide.
    pub threads: usize,
    /// Longest sequence, in tokens.
    pub context_tokens: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_arrive_to_the_last_bit() {
        let draw = RowDraw {
            top_k: 40,
            top_p: 0.9,
            min_p: f32::MIN_POSITIVE / 3.0,
            temperature: 1.0 / 3.0,
            uniform: 0.999_999_94,
        };
        let wants = [
            Wants::Token(draw),
            Wants::Nothing,
            Wants::Token(RowDraw::GREEDY),
        ];
        let draws = Draw::of_all(&wants);
        let text = serde_json::to_string(&draws).unwrap();
        let read: Vec<Draw> = serde_json::from_str(&text).unwrap();
        let back: Vec<Wants> = read.into_iter().map(Draw::wants).collect();
        assert_eq!(back, [wants[0], wants[2]]);
    }
}
