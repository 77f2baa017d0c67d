//! GGUF files of the deepseek line, as llama.cpp's converter writes them: `deepseek` for the first
//! generation, `deepseek2` for the second and third, which its scoring function tells apart.

use mlxcel_sdk::gguf::GgufOp;
use mlxcel_sdk::prelude::*;
use serde_json::Value;

/// Which generation of latent attention an architecture takes files of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Latent {
    /// Softmax scores.
    Second,
    /// Sigmoid scores with a selection bias.
    Third,
}

const NUMBERS: [(&str, &str); 6] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("leading_dense_block_count", "first_k_dense_replace"),
];

const EXPERT_NUMBERS: [(&str, &str); 4] = [
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
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
const LAYER_TENSORS: [(&str, &str); 24] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.embed_q"),
    ("attn_v_b", "self_attn.unembed_out"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// A file of the first generation. Its rotary embedding is by neighbours there and by halves here:
/// the rows of queries and keys are put back.
pub(crate) fn adapt_first(summary: &GgufSummary) -> Result<GgufAdapter> {
    let mut adapter = GgufAdapter::default();
    let n_layers = read_common(summary, &mut adapter, "deepseek")?;
    let heads = count(summary, "attention.head_count")?;
    let kv_heads = match summary.opt_number("attention.head_count_kv")? {
        Some(_) => count(summary, "attention.head_count_kv")?,
        None => heads,
    };
    adapter.set("num_key_value_heads", kv_heads);
    adapter.comes_from(summary, "num_key_value_heads", "attention.head_count_kv")?;
    let width = count(summary, "embedding_length")? / heads;
    let whole = "the width of a head, all features of which are rotated";
    summary.repeats("rope.dimension_count", width, whole)?;
    if let Some(scale) = summary.opt_number("expert_weights_scale")?
        && scale.as_f64() != Some(1.0)
    {
        return Err(unsupported(
            summary,
            "expert_weights_scale",
            scale,
            "scores of this architecture are not scaled",
        )?);
    }
    adapter.set("norm_topk_prob", flag(summary, "expert_weights_norm")?);
    refuse_scaling(summary)?;
    map_layers(summary, &mut adapter, n_layers, |name| match name {
        "attn_q" => vec![GgufOp::UnpermuteRope { heads }],
        "attn_k" => vec![GgufOp::UnpermuteRope { heads: kv_heads }],
        _ => Vec::new(),
    });
    Ok(adapter)
}

/// A file of the second or third generation.
pub(crate) fn adapt_latent(summary: &GgufSummary, generation: Latent) -> Result<GgufAdapter> {
    let model_type = match generation {
        Latent::Second => "deepseek_v2",
        Latent::Third => "deepseek_v3",
    };
    check_scoring(summary, generation)?;
    if let Some(scale) = summary.opt_number("attention.temperature_scale")? {
        let supported = "scores that change with the position are not implemented";
        return Err(unsupported(
            summary,
            "attention.temperature_scale",
            scale,
            supported,
        )?);
    }
    let mut adapter = GgufAdapter::default();
    let n_layers = read_common(summary, &mut adapter, model_type)?;
    read_latent(summary, &mut adapter)?;
    read_routing(summary, generation, &mut adapter)?;
    read_scaling(summary, &mut adapter)?;
    map_layers(summary, &mut adapter, n_layers, |_| Vec::new());
    Ok(adapter)
}

/// Files without the key are of the second generation, as in llama.cpp.
fn check_scoring(summary: &GgufSummary, generation: Latent) -> Result<()> {
    const SOFTMAX: u64 = 1;
    const SIGMOID: u64 = 2;
    let key = "expert_gating_func";
    let found = summary.opt_number(key)?;
    match (found.and_then(Value::as_u64), generation) {
        (None, Latent::Second) if found.is_none() => Ok(()),
        (Some(SOFTMAX), Latent::Second) | (Some(SIGMOID), Latent::Third) => Ok(()),
        _ => {
            let found = found.cloned().unwrap_or(Value::Null);
            let supported = match generation {
                Latent::Second => "1 (softmax), or no such key",
                Latent::Third => "2 (sigmoid)",
            };
            Err(unsupported(summary, key, &found, supported)?)
        }
    }
}

fn unsupported(summary: &GgufSummary, key: &str, value: &Value, supported: &str) -> Result<Error> {
    Ok(Error::Unsupported {
        what: format!("{}.{key} = {value}", summary.architecture()?),
        supported: supported.to_owned(),
    })
}

fn count(summary: &GgufSummary, key: &str) -> Result<usize> {
    summary.count(key, 1 << 20)
}

fn flag(summary: &GgufSummary, key: &str) -> Result<bool> {
    let full = format!("{}.{key}", summary.architecture()?);
    match summary.get(&full) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(Error::Config {
            key: full,
            found: other.to_string(),
            expected: "true or false in the GGUF metadata".to_owned(),
        }),
    }
}

/// What all generations have; gives the number of layers that are run.
fn read_common(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    model_type: &str,
) -> Result<usize> {
    adapter.set("model_type", model_type);
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    for (from, to) in EXPERT_NUMBERS {
        if !adapter.take_some(summary, from, to)? {
            adapter.set(to, Value::Null);
        }
    }
    adapter.take_some(summary, "rope.freq_base", "rope_theta")?;
    adapter.set("vocab_size", summary.vocab_size()?);
    adapter.map("token_embd.weight", "model.embed_tokens.weight");
    adapter.map("output_norm.weight", "model.norm.weight");
    let tied = !summary.has("output.weight");
    adapter.set("tie_word_embeddings", tied);
    if !tied {
        adapter.map("output.weight", "lm_head.weight");
    }
    let biased = ["attn_output", "attn_q", "attn_kv_a_mqa"]
        .iter()
        .any(|name| summary.has(&format!("blk.0.{name}.bias")));
    adapter.set("attention_bias", biased);
    // Layers that predict further tokens are counted in, where a file has them.
    let blocks = count(summary, "block_count")?;
    let draft = match summary.opt_number("nextn_predict_layers")? {
        Some(number) if number.as_u64() != Some(0) => count(summary, "nextn_predict_layers")?,
        _ => 0,
    };
    let n_layers = blocks.saturating_sub(draft);
    adapter.set("num_hidden_layers", n_layers);
    adapter.comes_from(summary, "num_hidden_layers", "block_count")?;
    for layer in n_layers..blocks {
        let prefix = format!("blk.{layer}.");
        let names = summary.tensors.keys();
        adapter
            .ignore
            .extend(names.filter(|name| name.starts_with(&prefix)).cloned());
    }
    Ok(n_layers)
}

/// Widths of the latent attention. `key_length` is that of the cached key where `key_length_mla`
/// stands beside it, and that of a head in early files.
fn read_latent(summary: &GgufSummary, adapter: &mut GgufAdapter) -> Result<()> {
    let either = |new: &str, old: &str| match summary.opt_number(new)? {
        Some(_) => count(summary, new),
        None => count(summary, old),
    };
    let head = either("attention.key_length_mla", "attention.key_length")?;
    let value = either("attention.value_length_mla", "attention.value_length")?;
    let rotated = count(summary, "rope.dimension_count")?;
    let full = summary.full_key("rope.dimension_count")?;
    let nope = head.checked_sub(rotated).ok_or_else(|| Error::Config {
        key: full,
        found: rotated.to_string(),
        expected: format!("at most the width of a head ({head})"),
    })?;
    adapter.set("qk_nope_head_dim", nope);
    adapter.set("qk_rope_head_dim", rotated);
    adapter.set("v_head_dim", value);
    adapter.set("kv_lora_rank", count(summary, "attention.kv_lora_rank")?);
    if summary.has("blk.0.attn_q_a.weight") {
        adapter.set("q_lora_rank", count(summary, "attention.q_lora_rank")?);
    } else {
        adapter.set("q_lora_rank", Value::Null);
    }
    let is_new = summary.opt_number("attention.key_length_mla")?.is_some();
    if is_new {
        // These are of what is cached, which all heads read.
        let rank = count(summary, "attention.kv_lora_rank")?;
        let key = "attention.kv_lora_rank and rope.dimension_count together";
        summary.repeats("attention.key_length", rank + rotated, key)?;
        summary.repeats(
            "attention.value_length",
            rank,
            "as attention.kv_lora_rank says",
        )?;
    }
    let kv_heads = summary.opt_number("attention.head_count_kv")?;
    if kv_heads.is_some_and(|n| n.as_u64() != Some(1)) {
        let heads = count(summary, "attention.head_count")?;
        let reason = "as attention.head_count says, or 1";
        summary.repeats("attention.head_count_kv", heads, reason)?;
    }
    let (k_dim, v_dim) = match is_new {
        true => ("attention.key_length_mla", "attention.value_length_mla"),
        false => ("attention.key_length", "attention.value_length"),
    };
    for (to, from) in [
        ("qk_nope_head_dim", k_dim),
        ("qk_rope_head_dim", "rope.dimension_count"),
        ("v_head_dim", v_dim),
        ("kv_lora_rank", "attention.kv_lora_rank"),
        ("q_lora_rank", "attention.q_lora_rank"),
    ] {
        adapter.comes_from(summary, to, from)?;
    }
    Ok(())
}

fn read_routing(
    summary: &GgufSummary,
    generation: Latent,
    adapter: &mut GgufAdapter,
) -> Result<()> {
    // 0 is "not scaled" there.
    let scale = summary.opt_number("expert_weights_scale")?;
    let scale = scale.filter(|scale| scale.as_f64() != Some(0.0)).cloned();
    adapter.set("routed_scaling_factor", scale.unwrap_or_else(|| 1.0.into()));
    adapter.set("norm_topk_prob", flag(summary, "expert_weights_norm")?);
    let groups = match summary.opt_number("expert_group_count")? {
        Some(groups) if groups.as_u64() != Some(0) => groups.clone(),
        _ => 1.into(),
    };
    if groups.as_u64() != Some(1) {
        // How groups rank is in no key: it follows from the generation.
        let used = summary.number("expert_group_used_count")?;
        adapter.set("topk_group", used.clone());
        if generation == Latent::Second {
            adapter.set("topk_method", "group_limited_greedy");
        }
    } else {
        adapter.set("topk_group", 1);
    }
    adapter.set("n_group", groups);
    for (to, from) in [
        ("n_group", "expert_group_count"),
        ("topk_group", "expert_group_used_count"),
        ("routed_scaling_factor", "expert_weights_scale"),
        ("norm_topk_prob", "expert_weights_norm"),
    ] {
        adapter.comes_from(summary, to, from)?;
    }
    Ok(())
}

fn refuse_scaling(summary: &GgufSummary) -> Result<()> {
    match summary.rope_scaling(&[])? {
        None => Ok(()),
        Some(scaling) => Err(unsupported(
            summary,
            "rope.scaling.type",
            scaling.get("rope_type").unwrap_or(&Value::Null),
            "files of this architecture have no scaled positions",
        )?),
    }
}

/// Yarn. Cosines and sines carry no factor in llama.cpp's graph of this architecture; the scores do,
/// by `yarn_log_multiplier`, a tenth of the published `mscale_all_dim`.
fn read_scaling(summary: &GgufSummary, adapter: &mut GgufAdapter) -> Result<()> {
    let Some(mut scaling) = summary.rope_scaling(&SCALING_NUMBERS)? else {
        return Ok(());
    };
    let kind = scaling.get("rope_type").cloned().unwrap_or_default();
    if kind != "yarn" {
        let supported = "files of this architecture are scaled by yarn or not at all";
        return Err(unsupported(summary, "rope.scaling.type", &kind, supported)?);
    }
    for key in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"] {
        if let Some(factor) = summary.opt_number(key)?.filter(|f| f.as_f64() != Some(1.0)) {
            let supported = "the attention factor follows from the scaling factor";
            return Err(unsupported(summary, key, factor, supported)?);
        }
    }
    scaling.insert("attention_factor".to_owned(), 1.0.into());
    let key = "rope.scaling.yarn_log_multiplier";
    if let Some(multiplier) = summary.opt_number(key)?.and_then(Value::as_f64) {
        if !(0.0..=100.0).contains(&multiplier) {
            return Err(Error::Config {
                key: summary.full_key(key)?,
                found: multiplier.to_string(),
                expected: "a number from 0 to 100 in the GGUF metadata".to_owned(),
            });
        }
        scaling.insert("mscale_all_dim".to_owned(), (10.0 * multiplier).into());
    }
    adapter.set_scaling(summary, scaling, &SCALING_NUMBERS)
}

fn map_layers(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    n_layers: usize,
    ops: impl Fn(&str) -> Vec<GgufOp>,
) {
    for layer in 0..n_layers {
        let split = summary.has(&format!("blk.{layer}.attn_k_b.weight"));
        for (name, to) in LAYER_TENSORS {
            for part in ["weight", "bias"] {
                let from = format!("blk.{layer}.{name}.{part}");
                if !summary.has(&from) {
                    continue;
                }
                if name == "attn_kv_b" && split {
                    // Some files have the matrix whole and in its two halves.
                    adapter.ignore.push(from);
                    continue;
                }
                adapter.map_with(from, format!("model.layers.{layer}.{to}.{part}"), ops(name));
            }
        }
        let bias = format!("blk.{layer}.exp_probs_b.bias");
        if summary.has(&bias) {
            let to = format!("model.layers.{layer}.mlp.gate.e_score_correction_bias");
            adapter.map(bias, to);
        }
    }
}
