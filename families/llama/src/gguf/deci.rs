//! Files of DeciLM (`deci`), whose layers differ: head counts and widths are lists with an entry a
//! layer. No heads means no attention, no key heads one linear layer, no width no feed-forward block.

use mlxcel_sdk::gguf::GgufOp;
use mlxcel_sdk::prelude::*;
use serde_json::{Value, json};

use super::{count, map_frame, read_scaling, read_sizes};

const NUMBERS: [(&str, &str); 4] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
];

const TENSORS: [(&str, &str); 6] = [
    ("attn_v", "self_attn.v_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// An entry a layer under `<architecture>.<key>`; one number is for all layers.
fn per_layer(summary: &GgufSummary, key: &str, n_layers: usize) -> Result<Vec<usize>> {
    let full = format!("{}.{key}", summary.architecture()?);
    let as_count = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let list = match summary.get(&full) {
        Some(Value::Array(list)) if list.len() == n_layers => {
            list.iter().map(as_count).collect::<Option<Vec<_>>>()
        }
        Some(value @ Value::Number(_)) => as_count(value).map(|n| vec![n; n_layers]),
        _ => None,
    };
    list.ok_or_else(|| Error::Config {
        key: full.clone(),
        found: summary
            .get(&full)
            .map_or_else(|| "missing".to_owned(), Value::to_string),
        expected: format!("an integer, or a list of {n_layers} integers"),
    })
}

pub(crate) fn adapt(summary: &GgufSummary) -> Result<GgufAdapter> {
    let mut adapter = GgufAdapter::default();
    adapter.set("model_type", "nemotron-nas");
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    read_sizes(summary, &mut adapter)?;
    read_scaling(summary, &mut adapter)?;
    map_frame(summary, &mut adapter);
    let n_layers = count(summary, "block_count")?;
    let head_counts = per_layer(summary, "attention.head_count", n_layers)?;
    let kv_counts = per_layer(summary, "attention.head_count_kv", n_layers)?;
    let widths = per_layer(summary, "feed_forward_length", n_layers)?;
    let heads = head_counts.iter().copied().max().unwrap_or(0);
    adapter.set("num_attention_heads", heads);
    adapter.comes_from(summary, "num_attention_heads", "attention.head_count")?;
    let mut blocks = Vec::with_capacity(n_layers);
    let layers = head_counts.iter().zip(&kv_counts).zip(&widths).enumerate();
    for (layer, ((&layer_heads, &kv_heads), &width)) in layers {
        if layer_heads != 0 && layer_heads != heads {
            return Err(Error::Unsupported {
                what: format!("{layer_heads} heads in layer {layer}"),
                supported: format!("layers with {heads} heads or none"),
            });
        }
        let attention = match (layer_heads, kv_heads) {
            (0, _) => json!({"no_op": true}),
            (_, 0) => json!({"replace_with_linear": true}),
            (_, kv_heads) if heads.is_multiple_of(kv_heads) => {
                json!({"n_heads_in_group": heads / kv_heads})
            }
            (_, kv_heads) => {
                return Err(Error::Config {
                    key: summary.full_key("attention.head_count_kv")?,
                    found: kv_heads.to_string(),
                    expected: format!("divisors of {heads} heads"),
                });
            }
        };
        let feed_forward = match width {
            0 => json!({"no_op": true}),
            width => json!({"intermediate_size": width}),
        };
        blocks.push(json!({"attention": attention, "ffn": feed_forward}));
        map_layer(summary, &mut adapter, layer, heads, kv_heads);
    }
    adapter.set("block_configs", blocks);
    Ok(adapter)
}

fn map_layer(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    layer: usize,
    heads: usize,
    kv_heads: usize,
) {
    let source = |name: &str| format!("blk.{layer}.{name}.weight");
    let target = |name: &str| format!("model.layers.{layer}.{name}.weight");
    for (from, to, heads) in [("attn_q", "q_proj", heads), ("attn_k", "k_proj", kv_heads)] {
        if summary.has(&source(from)) {
            let to = target(&format!("self_attn.{to}"));
            adapter.map_with(source(from), to, vec![GgufOp::UnpermuteRope { heads }]);
        }
    }
    let output = if kv_heads == 0 {
        "self_attn.linear_attn"
    } else {
        "self_attn.o_proj"
    };
    if summary.has(&source("attn_output")) {
        adapter.map(source("attn_output"), target(output));
    }
    for (from, to) in TENSORS {
        if summary.has(&source(from)) {
            adapter.map(source(from), target(to));
        }
    }
}
