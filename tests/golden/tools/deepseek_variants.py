"""The table of tiny deepseek-line checkpoints: configs, salts, controls; their tensors' names and shapes.

As in `qwen_variants.py`: a control is a changed config run on the same weights, and must lie far
from the golden. The salts were found by `make_deepseek.py --search` and `make_deepseek_mlx.py --search`.
"""

import deepseek_v4_variants as v4
import tiny

BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    bos_token_id=1,
    eos_token_id=2,
    attention_bias=False,
    tie_word_embeddings=False,
)
LATENT = dict(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
GROUPS = dict(n_group=4, topk_group=2)
#: Beyond 32 positions the frequencies matter; prompts of 80 lie far beyond.
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=1.0)

DEEPSEEK = BASE | dict(model_type="deepseek", num_key_value_heads=2, norm_topk_prob=False)
V2 = BASE | LATENT | dict(model_type="deepseek_v2", topk_method="greedy", routed_scaling_factor=1.0, norm_topk_prob=False)
V3 = BASE | LATENT | GROUPS | dict(model_type="deepseek_v3", routed_scaling_factor=2.5, norm_topk_prob=True, num_experts_per_tok=3)
INDEXER = dict(index_n_heads=16, index_head_dim=12, index_topk=8)
V32 = V3 | INDEXER | dict(model_type="deepseek_v32")


def variant(what, config, salt=0, long=24, short=7, dtype="BF16", controls=None, **extra):
    return dict(
        what=what, config=config, salt=salt, long=long, short=short, dtype=dtype, controls=controls or {}, **extra
    )


VARIANTS = {
    "deepseek": variant(
        "grouped queries, softmax over 8 experts, 2 a token, scores as they are; two shared experts, a dense first layer",
        DEEPSEEK,
        79,
        dtype="F32",
        controls={"rope theta 500000": dict(rope_theta=500000.0)},
    ),
    "v2-lite": variant(
        "no query compression, greedy routing over all experts, plain rotary embedding, every layer with experts",
        V2 | dict(q_lora_rank=None, first_k_dense_replace=0),
        232,
        dtype="F32",
        controls={"scaled scores": dict(routed_scaling_factor=1.5)},
    ),
    "v2": variant(
        "compressed queries, group-limited greedy routing, scaled scores; yarn with mscale = mscale_all_dim",
        V2
        | GROUPS
        | dict(
            topk_method="group_limited_greedy",
            num_experts_per_tok=3,
            routed_scaling_factor=4.0,
            rope_scaling=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
        ),
        947,
        long=80,
        controls={
            "routing without groups": dict(topk_method="greedy"),
            "no mscale_all_dim": dict(rope_scaling=YARN | dict(mscale=0.707)),
            "default rope": dict(rope_scaling=None),
        },
    ),
    "v2-yarn-bias": variant(
        "biases on the compressions and the output, yarn whose mscale differs from mscale_all_dim, tied embedding",
        V2
        | dict(
            attention_bias=True,
            tie_word_embeddings=True,
            rope_scaling=YARN | dict(mscale=1.2, mscale_all_dim=0.5),
        ),
        441,
        long=80,
        dtype="F32",
        controls={"equal mscales": dict(rope_scaling=YARN | dict(mscale=0.5, mscale_all_dim=0.5))},
    ),
    "v3": variant(
        "sigmoid scores, selection bias, groups, scores made to sum to 1 and scaled, yarn; "
        "the file also holds a layer for multi-token prediction, which no text needs",
        V3 | dict(rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
        214,
        long=80,
        controls={
            "one group": dict(n_group=1, topk_group=1),
            "scores as they are": dict(norm_topk_prob=False),
            "no mscale_all_dim": dict(rope_scaling=YARN | dict(mscale=1.0)),
        },
        mtp=True,
        legacy_drops=("rope_interleave",),
    ),
    "v3-plain": variant(
        "no query compression, one group, scores as they are, rotary embedding by halves, tied embedding",
        V3
        | dict(
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rope_interleave=False,
            tie_word_embeddings=True,
        ),
        64,
        dtype="F32",
        controls={"rotary embedding by pairs": dict(rope_interleave=True)},
    ),
    "v3-fused": variant(
        "the tensor names transformers 5 uses in memory: all experts of a layer stacked "
        "[experts, 2 * intermediate, hidden], gate rows before up rows",
        V3,
        20,
        fused_experts=True,
    ),
    "v3-fp8": variant(
        "matrices as 8-bit floats e4m3 with a factor (weight_scale_inv) for each block of 128 x 128, "
        "also of ragged blocks; embedding, norms, router and head in bfloat16",
        V3 | dict(intermediate_size=160, moe_intermediate_size=24, hidden_size=136),
        134,
        fp8=True,
    ),
    "v32": variant(
        "an indexer that leaves 8 positions to each row",
        V32,
        95,
        long=40,
        dtype="F32",
        controls={"12 positions": dict(index_topk=12)},
    ),
    "v32-yarn": variant(
        "an indexer with room for 24 positions, yarn, no groups",
        V32
        | dict(n_group=1, topk_group=1, index_topk=24, rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
        315,
        long=80,
        controls={"all positions": dict(index_topk=256)},
    ),
} | v4.VARIANTS

#: 288 is the vocabulary of `gguf_tokenizer.py`; blocks have 32 elements.
GGUF_SIZES = dict(vocab_size=288, intermediate_size=32, moe_intermediate_size=32, tie_word_embeddings=True)
GGUF_LATENT = dict(kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=16)
BLOCKS = {
    "token_embd": "Q8_0",
    "output": "Q8_0",
    "ffn_gate_inp": "F32",
    "attn_q": "Q4_0",
    "attn_q_a": "Q5_0",
    "attn_q_b": "Q4_1",
    "attn_k_b": "Q8_0",
    "attn_v_b": "Q4_1",
    "attn_kv_b": "Q5_1",
    "attn_output": "F16",
    "ffn_gate": "Q4_1",
    "ffn_gate_exps": "Q4_0",
    "ffn_up_exps": "Q5_1",
}
GGUF_VARIANTS = {
    "gguf-deepseek": variant(
        "deepseek: rows of query and key in the order of interleaved pairs", DEEPSEEK | GGUF_SIZES, 3728
    ),
    "gguf-deepseek2-lite": variant(
        "deepseek2 as early converters wrote it: attn_kv_b whole, no key_length_mla, softmax; own head",
        V2 | GGUF_SIZES | GGUF_LATENT | dict(q_lora_rank=None, tie_word_embeddings=False),
        3214,
        whole_kv_b=True,
    ),
    "gguf-deepseek2": variant(
        "deepseek2: attn_k_b and attn_v_b, sigmoid, selection bias, groups, yarn",
        V3 | GGUF_SIZES | GGUF_LATENT | dict(rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0)),
        516,
        long=80,
    ),
}

WIDE = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
MLX_LATENT = dict(kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=16)
MLX_YARN = YARN | dict(type="yarn", mscale=1.0, mscale_all_dim=1.0)
MLX_VARIANTS = {
    "mlx-deepseek-4bit": dict(what="deepseek, affine, 4 bits, groups of 32, float16", bits=4, dtype="F16", config=DEEPSEEK | WIDE, salt=86),
    "mlx-v2-4bit": dict(
        what="deepseek_v2, affine, 4 bits, groups of 32, bfloat16; kv_b_proj whole and quantised",
        bits=4,
        dtype="BF16",
        config=V2 | WIDE | MLX_LATENT | dict(rope_scaling=MLX_YARN),
        salt=692,
    ),
    "mlx-v3-4bit": dict(
        what="deepseek_v3, affine, 4 bits, groups of 32, float16; kv_b_proj split into embed_q and unembed_out by head",
        bits=4,
        dtype="F16",
        config=V3 | WIDE | MLX_LATENT | dict(rope_scaling=MLX_YARN),
        salt=115,
    ),
    "mlx-v3-mxfp4": dict(
        what="deepseek_v3, mxfp4, groups of 32, bfloat16; split by head; routers not quantised",
        bits=4,
        mode="mxfp4",
        floats=("mlp.gate",),
        dtype="BF16",
        config=V3 | WIDE | MLX_LATENT | dict(rope_scaling=MLX_YARN),
        salt=36,
    ),
    "mlx-v3-bf16": dict(
        what="deepseek_v3, bfloat16, not quantised; embed_q, unembed_out, stacked experts",
        bits=None,
        dtype="BF16",
        config=V3 | WIDE | MLX_LATENT,
        salt=50,
    ),
    "mlx-v32-4bit": dict(
        what="deepseek_v32, affine, 4 bits, groups of 32, float16; an indexer that leaves 16 positions to each row",
        bits=4,
        dtype="F16",
        config=V32 | WIDE | MLX_LATENT | dict(index_head_dim=32, index_topk=16),
        salt=181,
    ),
}


def fill(salt, cfg):
    """Every tensor of the config by the rule of `tiny.py`; biases of norms are biases."""
    if cfg["model_type"] == "deepseek_v4":
        return v4.fill(salt, cfg)
    out = {}
    for name, shape in shapes(cfg).items():
        value = tiny.fill(salt, name, shape, cfg["tie_word_embeddings"])
        out[name] = value - 1 if name.endswith("norm.bias") else value
    return out


def is_sparse(cfg, layer):
    return layer >= cfg["first_k_dense_replace"]


def gated(prefix, hidden, inner):
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def dense_attention(cfg, prefix):
    hidden, heads = cfg["hidden_size"], cfg["num_attention_heads"]
    kv = cfg["num_key_value_heads"] * (hidden // heads)
    rows = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    out = {f"{prefix}{name}.weight": (n, hidden) for name, n in rows.items()}
    if cfg["attention_bias"]:
        out |= {f"{prefix}{name}.bias": (n,) for name, n in rows.items()}
    return out


def latent_attention(cfg, prefix):
    hidden, heads, rank, q_rank = (cfg[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank"))
    nope, rope, v = cfg["qk_nope_head_dim"], cfg["qk_rope_head_dim"], cfg["v_head_dim"]
    out, biased = {}, {"kv_a_proj_with_mqa": rank + rope, "o_proj": hidden}
    if q_rank:
        out[prefix + "q_a_proj.weight"] = (q_rank, hidden)
        out[prefix + "q_a_layernorm.weight"] = (q_rank,)
        out[prefix + "q_b_proj.weight"] = (heads * (nope + rope), q_rank)
        biased["q_a_proj"] = q_rank
    else:
        out[prefix + "q_proj.weight"] = (heads * (nope + rope), hidden)
    out[prefix + "kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
    out[prefix + "kv_a_layernorm.weight"] = (rank,)
    out[prefix + "kv_b_proj.weight"] = (heads * (nope + v), rank)
    out[prefix + "o_proj.weight"] = (hidden, heads * v)
    if cfg["attention_bias"]:
        out |= {f"{prefix}{name}.bias": (n,) for name, n in biased.items()}
    if "index_topk" in cfg:
        p, n, d = prefix + "indexer.", cfg["index_n_heads"], cfg["index_head_dim"]
        out[p + "wq_b.weight"] = (n * d, q_rank)
        out[p + "wk.weight"] = (d, hidden)
        out[p + "k_norm.weight"] = out[p + "k_norm.bias"] = (d,)
        out[p + "weights_proj.weight"] = (n, hidden)
    return out


def shapes(cfg):
    """Published tensor names and shapes of a deepseek-line config (a plain dict)."""
    hidden = cfg["hidden_size"]
    out = {"model.embed_tokens.weight": (cfg["vocab_size"], hidden)}
    for layer in range(cfg["num_hidden_layers"]):
        out |= layer_shapes(cfg, layer)
    out["model.norm.weight"] = (hidden,)
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = (cfg["vocab_size"], hidden)
    return out


def layer_shapes(cfg, layer):
    hidden, p = cfg["hidden_size"], f"model.layers.{layer}."
    out = {p + "input_layernorm.weight": (hidden,), p + "post_attention_layernorm.weight": (hidden,)}
    attention = dense_attention if cfg["model_type"] == "deepseek" else latent_attention
    out |= attention(cfg, p + "self_attn.")
    if not is_sparse(cfg, layer):
        return out | gated(p + "mlp.", hidden, cfg["intermediate_size"])
    out[p + "mlp.gate.weight"] = (cfg["n_routed_experts"], hidden)
    if cfg["model_type"] in ("deepseek_v3", "deepseek_v32"):
        out[p + "mlp.gate.e_score_correction_bias"] = (cfg["n_routed_experts"],)
    for expert in range(cfg["n_routed_experts"]):
        out |= gated(f"{p}mlp.experts.{expert}.", hidden, cfg["moe_intermediate_size"])
    return out | gated(p + "mlp.shared_experts.", hidden, cfg["moe_intermediate_size"] * cfg["n_shared_experts"])


def mtp_shapes(cfg):
    """What a layer for multi-token prediction adds behind the others, under published names."""
    hidden, layer = cfg["hidden_size"], cfg["num_hidden_layers"]
    p = f"model.layers.{layer}."
    out = {p + n + ".weight": (hidden,) for n in ("enorm", "hnorm", "shared_head.norm")}
    out[p + "eh_proj.weight"] = (hidden, 2 * hidden)
    out[p + "embed_tokens.weight"] = out[p + "shared_head.head.weight"] = (cfg["vocab_size"], hidden)
    return out | layer_shapes(cfg, layer)
