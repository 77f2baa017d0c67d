"""The table of tiny qwen-line checkpoints: configs, salts, controls; their tensors' names and shapes.

As in `llama_variants.py`: a control is a changed config run on the same weights, and must lie far
from the golden. The salts were found by `make_qwen.py --search` and `make_qwen_mlx.py --search`.
"""

BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    use_sliding_window=False,
)

QWEN2 = BASE | dict(model_type="qwen2")
QWEN3 = BASE | dict(model_type="qwen3", head_dim=16, num_attention_heads=2, num_key_value_heads=1)
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
QWEN2_MOE = BASE | EXPERTS | dict(model_type="qwen2_moe", shared_expert_intermediate_size=24, norm_topk_prob=False)
QWEN3_MOE = QWEN3 | EXPERTS | dict(model_type="qwen3_moe", norm_topk_prob=True)

WINDOW = dict(use_sliding_window=True, sliding_window=8)
NO_WINDOW = dict(use_sliding_window=False)


def variant(what, config, salt=0, long=24, short=7, dtype="BF16", controls=None, **extra):
    return dict(
        what=what, config=config, salt=salt, long=long, short=short, dtype=dtype, controls=controls or {}, **extra
    )


VARIANTS = {
    "qwen2": variant(
        "biases on q, k and v; separate output head; a sliding_window that use_sliding_window switches off",
        QWEN2 | dict(sliding_window=8),
        20,
        dtype="F32",
        controls={"rope theta 500000": dict(rope_theta=500000.0)},
    ),
    "qwen2-tied": variant(
        "tied embeddings, multi-head attention",
        QWEN2 | dict(tie_word_embeddings=True, num_key_value_heads=4, vocab_size=96),
        428,
        legacy_drops=("layer_types", "sliding_window"),
    ),
    "qwen2-window": variant(
        "a sliding window of 8 from layer 1 on; config.legacy.json says so by max_window_layers alone",
        QWEN2 | WINDOW | dict(max_window_layers=1, num_hidden_layers=3),
        104,
        long=40,
        controls={
            "no window": NO_WINDOW | dict(layer_types=["full_attention"] * 3),
            "window 7": dict(sliding_window=7),
            "window everywhere": dict(max_window_layers=0),
        },
        legacy_drops=("layer_types",),
    ),
    "qwen2-types": variant(
        "layer_types that max_window_layers does not give",
        QWEN2
        | WINDOW
        | dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        424,
        long=40,
        controls={"by max_window_layers": dict(layer_types=None)},
    ),
    "qwen2-yarn": variant(
        "yarn rotary scaling, as the model cards say to switch it on",
        QWEN2
        | dict(
            num_attention_heads=2,
            num_key_value_heads=1,
            rope_theta=1000.0,
            max_position_embeddings=2048,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
        ),
        73,
        long=40,
        controls={"default rope": dict(rope_scaling=None)},
    ),
    "qwen3-yarn": variant(
        "yarn beyond its original context",
        QWEN3
        | dict(
            rope_theta=1000.0,
            max_position_embeddings=128,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
        ),
        109,
        long=72,
        controls={"default rope": dict(rope_scaling=None)},
    ),
    "qwen3": variant(
        "norms on q and k heads, head_dim 24 where hidden_size / heads is 16, no biases",
        QWEN3 | dict(head_dim=24),
        302,
        dtype="F32",
        controls={"rope theta 500000": dict(rope_theta=500000.0)},
    ),
    "qwen3-bias-tied": variant(
        "attention_bias (q, k, v and o), tied embeddings",
        QWEN3 | dict(attention_bias=True, tie_word_embeddings=True),
        9,
    ),
    "qwen3-window": variant(
        "a sliding window of 8 from layer 1 on",
        QWEN3 | WINDOW | dict(max_window_layers=1),
        427,
        long=40,
        controls={"no window": NO_WINDOW | dict(layer_types=["full_attention"] * 2)},
        legacy_drops=("layer_types",),
    ),
    "qwen2-moe": variant(
        "4 experts, 2 a token, scores as they are, beside a shared expert behind a sigmoid gate",
        QWEN2_MOE,
        62,
        controls={"scores made to sum to 1": dict(norm_topk_prob=True)},
    ),
    "qwen2-moe-mixed": variant(
        "experts in every second layer less one that mlp_only_layers lists, scores made to sum to 1; "
        "sliding windows of 8 in every other layer below max_window_layers",
        QWEN2_MOE
        | WINDOW
        | dict(
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=True,
            max_window_layers=3,
        ),
        640,
        long=40,
        controls={
            "scores as they are": dict(norm_topk_prob=False),
            "no window": NO_WINDOW | dict(layer_types=["full_attention"] * 4),
            "one window": dict(max_window_layers=1),
        },
        legacy_drops=("layer_types",),
    ),
    "qwen3-moe": variant(
        "4 experts, 2 a token, scores made to sum to 1; num_local_experts in config.json, num_experts in the legacy one",
        QWEN3_MOE,
        74,
        controls={
            "scores as they are": dict(norm_topk_prob=False),
            "one expert a token": dict(num_experts_per_tok=1),
        },
    ),
    "qwen3-moe-fused": variant(
        "as qwen3-moe, with the tensor names transformers 5 uses in memory: all experts of a layer stacked "
        "[experts, 2 * intermediate, hidden], gate rows before up rows",
        QWEN3_MOE,
        74,
        fused_experts=True,
    ),
    "qwen3-moe-mixed": variant(
        "experts in every second layer less one that mlp_only_layers lists, scores as they are; a window of 8 everywhere",
        QWEN3_MOE
        | WINDOW
        | dict(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1], norm_topk_prob=False),
        196,
        long=40,
        controls={
            "scores made to sum to 1": dict(norm_topk_prob=True),
            "no window": NO_WINDOW,
        },
    ),
}

#: 288 is the vocabulary of `gguf_tokenizer.py`.
GGUF_BASE = dict(vocab_size=288, tie_word_embeddings=True)
BLOCKS = {
    "token_embd": "Q8_0",
    "output": "Q8_0",
    "ffn_gate_inp": "F32",
    "attn_q": "Q4_0",
    "attn_k": "Q8_0",
    "attn_v": "Q5_1",
    "attn_output": "F16",
    "ffn_gate": "Q4_1",
    "ffn_gate_exps": "Q4_0",
    "ffn_up_exps": "Q5_1",
}
GGUF_VARIANTS = {
    "gguf-qwen2": variant("biases, own head", QWEN2 | GGUF_BASE | dict(tie_word_embeddings=False), 788),
    "gguf-qwen2-yarn": variant(
        "yarn rotary scaling in the metadata",
        QWEN2
        | GGUF_BASE
        | dict(
            num_attention_heads=2,
            num_key_value_heads=1,
            rope_theta=1000.0,
            max_position_embeddings=2048,
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
        ),
        228,
        long=40,
    ),
    "gguf-qwen3": variant("head norms, key_length; no output.weight: tied", QWEN3 | GGUF_BASE | dict(head_dim=32), 1189),
    "gguf-qwen2moe": variant(
        "experts and a shared expert, whose gate the file holds as a vector",
        QWEN2_MOE | GGUF_BASE | dict(moe_intermediate_size=32, shared_expert_intermediate_size=32),
        642,
    ),
    "gguf-qwen3moe": variant("experts", QWEN3_MOE | GGUF_BASE | dict(moe_intermediate_size=32), 2019),
}

WIDE = dict(hidden_size=64, intermediate_size=64)
MLX_VARIANTS = {
    "mlx-qwen2-4bit": dict(what="affine, 4 bits, groups of 32, float16; own head", bits=4, dtype="F16", config=QWEN2 | WIDE, salt=398),
    "mlx-qwen3-8bit": dict(
        what="affine, 8 bits, groups of 32, bfloat16; tied: the embedding is the head",
        bits=8,
        dtype="BF16",
        config=QWEN3 | WIDE | dict(tie_word_embeddings=True),
        salt=223,
    ),
    "mlx-qwen2-moe-4bit": dict(
        what="affine, 4 bits, groups of 32, float16; the experts stacked under switch_mlp, router and shared gate too",
        bits=4,
        dtype="F16",
        config=QWEN2_MOE | WIDE | dict(moe_intermediate_size=32, shared_expert_intermediate_size=32),
        salt=8,
    ),
    "mlx-qwen3-moe-4bit": dict(
        what="affine, 4 bits, groups of 32, bfloat16; stacked experts, router at 8 bits in groups of 64, a dense layer",
        bits=4,
        dtype="BF16",
        config=QWEN3_MOE | WIDE | dict(moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[0]),
        salt=148,
    ),
    "mlx-qwen3-moe-mxfp4": dict(
        what="mxfp4, groups of 32, bfloat16; stacked experts, router not quantised",
        bits=4,
        mode="mxfp4",
        floats=("mlp.gate",),
        dtype="BF16",
        config=QWEN3_MOE | WIDE | dict(moe_intermediate_size=32),
        salt=55,
    ),
}


def is_sparse(cfg, layer):
    """transformers' rule: every `decoder_sparse_step`-th layer, unless listed."""
    if "num_experts" not in cfg or layer in (cfg.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % cfg.get("decoder_sparse_step", 1) == 0


def gated(prefix, hidden, inner):
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def attention_shapes(cfg, prefix):
    hidden, heads, kv_heads = cfg["hidden_size"], cfg["num_attention_heads"], cfg["num_key_value_heads"]
    d = cfg.get("head_dim") or hidden // heads
    second = cfg["model_type"].startswith("qwen2")
    out = {}
    for name, rows, columns in (
        ("q_proj", heads * d, hidden),
        ("k_proj", kv_heads * d, hidden),
        ("v_proj", kv_heads * d, hidden),
        ("o_proj", hidden, heads * d),
    ):
        out[f"{prefix}{name}.weight"] = (rows, columns)
        if cfg.get("attention_bias") or (second and name != "o_proj"):
            out[f"{prefix}{name}.bias"] = (rows,)
    if not second:
        out[f"{prefix}q_norm.weight"] = out[f"{prefix}k_norm.weight"] = (d,)
    return out


def shapes(cfg):
    """Published tensor names and shapes of a qwen-line config (a plain dict)."""
    hidden = cfg["hidden_size"]
    out = {"model.embed_tokens.weight": (cfg["vocab_size"], hidden)}
    for layer in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        out[p + "input_layernorm.weight"] = out[p + "post_attention_layernorm.weight"] = (hidden,)
        out |= attention_shapes(cfg, p + "self_attn.")
        if not is_sparse(cfg, layer):
            out |= gated(p + "mlp.", hidden, cfg["intermediate_size"])
            continue
        out[p + "mlp.gate.weight"] = (cfg["num_experts"], hidden)
        for expert in range(cfg["num_experts"]):
            out |= gated(f"{p}mlp.experts.{expert}.", hidden, cfg["moe_intermediate_size"])
        if cfg["model_type"] == "qwen2_moe":
            out[p + "mlp.shared_expert_gate.weight"] = (1, hidden)
            out |= gated(p + "mlp.shared_expert.", hidden, cfg["shared_expert_intermediate_size"])
    out["model.norm.weight"] = (hidden,)
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = (cfg["vocab_size"], hidden)
    return out
