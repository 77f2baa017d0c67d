//! GGUF files of the qwen line, as llama.cpp's converter writes them: names and metadata keys. Its
//! rotary embedding for these architectures is split in halves as ours, so no rows are reordered.

use mlxcel_sdk::gguf::GgufOp;
use mlxcel_sdk::prelude::*;

/// Which architecture the file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
}

impl Kind {
    fn model_type(self) -> &'static str {
        match self {
            Self::Qwen2 => "qwen2",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3_moe",
        }
    }

    fn has_experts(self) -> bool {
        matches!(self, Self::Qwen2Moe | Self::Qwen3Moe)
    }
}

const NUMBERS: [(&str, &str); 5] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
];

const SCALING_NUMBERS: [(&str, &str); 3] = [
    (
        "rope.scaling.original_context_length",
        "original_max_position_embeddings",
    ),
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
];

/// Tensors of every layer; those that a file lacks are not mapped, and named if the model needs them.
const LAYER_TENSORS: [(&str, &str); 11] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

pub(crate) const EXPERT_TENSORS: [(&str, &str); 7] = [
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

pub(crate) fn adapt(summary: &GgufSummary, kind: Kind) -> Result<GgufAdapter> {
    refuse_pooling(summary)?;
    let mut adapter = GgufAdapter::default();
    read_config(summary, kind, &mut adapter)?;
    read_scaling(summary, &mut adapter)?;
    adapter.map("token_embd.weight", "model.embed_tokens.weight");
    adapter.map("output_norm.weight", "model.norm.weight");
    let tied = !summary.has("output.weight");
    adapter.set("tie_word_embeddings", tied);
    if !tied {
        adapter.map("output.weight", "lm_head.weight");
    }
    let hidden = count(summary, "embedding_length")?;
    for layer in 0..count(summary, "block_count")? {
        map_tensors(summary, &mut adapter, layer, &LAYER_TENSORS);
        if !kind.has_experts() {
            continue;
        }
        map_tensors(summary, &mut adapter, layer, &EXPERT_TENSORS);
        map_shared_gate(summary, &mut adapter, layer, hidden);
    }
    Ok(adapter)
}

/// The gate of the shared expert; the converter drops its axis of length 1.
pub(crate) fn map_shared_gate(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    layer: usize,
    hidden: usize,
) {
    let gate = format!("blk.{layer}.ffn_gate_inp_shexp.weight");
    if summary.has(&gate) {
        let shape = vec![1, hidden];
        adapter.map_with(
            gate,
            format!("model.layers.{layer}.mlp.shared_expert_gate.weight"),
            vec![GgufOp::Reshape { shape }],
        );
    }
}

/// Embedding and rerank models carry the same architecture's name.
pub(crate) fn refuse_pooling(summary: &GgufSummary) -> Result<()> {
    const NONE: u64 = 0;
    match summary.opt_number("pooling_type")? {
        Some(pooling) if pooling.as_u64() != Some(NONE) => Err(Error::Unsupported {
            what: format!("{}.pooling_type = {pooling}", summary.architecture()?),
            supported: "GGUF files for text generation have no pooling".to_owned(),
        }),
        _ => Ok(()),
    }
}

pub(crate) fn count(summary: &GgufSummary, key: &str) -> Result<usize> {
    summary.count(key, 1 << 20)
}

fn read_config(summary: &GgufSummary, kind: Kind, adapter: &mut GgufAdapter) -> Result<()> {
    adapter.set("model_type", kind.model_type());
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    adapter.set("vocab_size", summary.vocab_size()?);
    for (from, to) in [
        ("attention.head_count_kv", "num_key_value_heads"),
        ("rope.freq_base", "rope_theta"),
    ] {
        adapter.take_some(summary, from, to)?;
    }
    // llama.cpp's default, which is not that of the configuration class of qwen3.
    let head_dim = match summary.opt_number("attention.key_length")? {
        Some(width) => width.clone(),
        None => {
            (count(summary, "embedding_length")? / count(summary, "attention.head_count")?).into()
        }
    };
    if let Some(width) = head_dim.as_u64().and_then(|n| usize::try_from(n).ok()) {
        let whole = "the width of a head, all features of which are rotated";
        summary.repeats("rope.dimension_count", width, whole)?;
        summary.repeats("attention.value_length", width, "as wide as keys")?;
    }
    adapter.set("head_dim", head_dim);
    adapter.comes_from(summary, "head_dim", "attention.key_length")?;
    let biased = summary.has("blk.0.attn_q.bias");
    adapter.set("attention_bias", biased);
    adapter.set("qkv_bias", biased);
    if !kind.has_experts() {
        return adapter.take(summary, "feed_forward_length", "intermediate_size");
    }
    adapter.take(summary, "expert_count", "num_experts")?;
    adapter.take(summary, "expert_used_count", "num_experts_per_tok")?;
    // There is no key: llama.cpp's graph of the one renormalises and of the other does not.
    adapter.set("norm_topk_prob", kind == Kind::Qwen3Moe);
    // Early files lack the keys of the two widths; the tensors always tell.
    read_expert_widths(summary, adapter, kind == Kind::Qwen2Moe)
}

/// Widths of the experts, from the tensors.
pub(crate) fn read_expert_widths(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    shared: bool,
) -> Result<()> {
    let mut read = |to: &str, from: &str, tensor: &str, axis| {
        let width = rows_of(summary, tensor, axis)?;
        adapter.set(to, width);
        adapter.comes_from(summary, to, from)?;
        summary.repeats(from, width, &format!("as the shape of {tensor} says"))
    };
    read(
        "moe_intermediate_size",
        "expert_feed_forward_length",
        "blk.0.ffn_gate_exps.weight",
        1,
    )?;
    if shared {
        read(
            "shared_expert_intermediate_size",
            "expert_shared_feed_forward_length",
            "blk.0.ffn_gate_shexp.weight",
            0,
        )?;
    }
    Ok(())
}

/// Length of a tensor's axis.
pub(crate) fn rows_of(summary: &GgufSummary, name: &str, axis: usize) -> Result<usize> {
    let tensor = summary.tensors.get(name);
    let length = tensor.and_then(|t| t.shape.get(axis).copied());
    length.ok_or_else(|| Error::MissingTensor {
        name: name.to_owned(),
        expected: format!("{} axes", axis + 2),
    })
}

pub(crate) fn read_scaling(summary: &GgufSummary, adapter: &mut GgufAdapter) -> Result<()> {
    let Some(scaling) = summary.rope_scaling(&SCALING_NUMBERS)? else {
        return Ok(());
    };
    for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"] {
        // It multiplies a temperature that llama.cpp computes itself, ours would replace it.
        if let Some(factor) = summary.opt_number(key)?.filter(|f| f.as_f64() != Some(1.0)) {
            return Err(Error::Unsupported {
                what: format!("{}.{key} = {factor}", summary.architecture()?),
                supported: "the attention factor follows from the scaling factor".to_owned(),
            });
        }
    }
    adapter.set_scaling(summary, scaling, &SCALING_NUMBERS)
}

pub(crate) fn map_tensors(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    layer: usize,
    names: &[(&str, &str)],
) {
    for (from, to) in names {
        for part in ["weight", "bias"] {
            let from = format!("blk.{layer}.{from}.{part}");
            if summary.has(&from) {
                adapter.map(from, format!("model.layers.{layer}.{to}.{part}"));
            }
        }
    }
}
