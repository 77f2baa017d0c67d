"""The tiny checkpoints of `deepseek_v4`: configs, salts, controls; their tensors' published names and shapes.

Part of the table of `deepseek_variants.py`; apart because nearly every name is another.
"""

import numpy as np

import tiny

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=1.0)
V4 = dict(
    model_type="deepseek_v4",
    vocab_size=64,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=12,
    n_routed_experts=6,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    swiglu_limit=1.5,
    num_hash_layers=1,
    layer_types=[SLIDING, SPARSE, HEAVY, SPARSE],
    compress_rates={SPARSE: 4, HEAVY: 8},
    sliding_window=8,
    index_n_heads=16,
    index_head_dim=12,
    index_topk=3,
    hc_mult=3,
    hc_sinkhorn_iters=4,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=40000.0,
    rope_scaling=YARN,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)


def variant(what, config, salt=0, long=40, short=7, dtype="F32", controls=None):
    return dict(what=what, config=config, salt=salt, long=long, short=short, dtype=dtype, controls=controls or {})


VARIANTS = {
    "v4": variant(
        "three residual streams; layers with a window of 8 alone, and with it entries of 4 positions (overlapping, 3 chosen "
        "by an indexer) or of 8; experts by token id in the first layer",
        V4,
        36,
        controls={
            "all entries": dict(index_topk=64),
            "no limit on activations": dict(swiglu_limit=100.0),
            "one iteration": dict(hc_sinkhorn_iters=1),
        },
    ),
    "v4-long": variant(
        "prompts far beyond the original context of the compressed layers' yarn; bfloat16",
        V4 | dict(layer_types=[HEAVY, SPARSE, SLIDING], num_hidden_layers=3, num_hash_layers=0, index_topk=8),
        213,
        long=80,
        dtype="BF16",
        controls={"default rope": dict(rope_scaling=None)},
    ),
}


def matrices(prefix, shapes):
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def compressor(prefix, hidden, rate, width, overlapping):
    columns = width * (2 if overlapping else 1)
    out = matrices(prefix, dict(wkv=(columns, hidden), wgate=(columns, hidden), norm=(width,)))
    return out | {prefix + "ape": (rate, columns)}


def attention_shapes(cfg, layer, p):
    hidden, heads, d, rank, groups = (
        cfg[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups")
    )
    kind, inner = cfg["layer_types"][layer], groups * cfg["o_lora_rank"]
    out = matrices(
        p,
        dict(wq_a=(rank, hidden), q_norm=(rank,), wq_b=(heads * d, rank), wkv=(d, hidden), kv_norm=(d,))
        | dict(wo_a=(inner, heads * d // groups), wo_b=(hidden, inner)),
    )
    out[p + "attn_sink"] = (heads,)
    if kind == SLIDING:
        return out
    rate = cfg["compress_rates"][kind]
    out |= compressor(p + "compressor.", hidden, rate, d, kind == SPARSE)
    if kind == SPARSE:
        n, width = cfg["index_n_heads"], cfg["index_head_dim"]
        out |= matrices(p + "indexer.", dict(wq_b=(n * width, rank), weights_proj=(n, hidden)))
        out |= compressor(p + "indexer.compressor.", hidden, rate, width, True)
    return out


def shapes(cfg):
    hidden, n, inner = cfg["hidden_size"], cfg["hc_mult"], cfg["moe_intermediate_size"]
    out = {"embed.weight": (cfg["vocab_size"], hidden)}
    gated = dict(w1=(inner, hidden), w2=(hidden, inner), w3=(inner, hidden))
    for layer in range(cfg["num_hidden_layers"]):
        p = f"layers.{layer}."
        out |= matrices(p, dict(attn_norm=(hidden,), ffn_norm=(hidden,)))
        out |= attention_shapes(cfg, layer, p + "attn.")
        out[p + "ffn.gate.weight"] = (cfg["n_routed_experts"], hidden)
        if layer < cfg["num_hash_layers"]:
            out[p + "ffn.gate.tid2eid"] = (cfg["vocab_size"], cfg["num_experts_per_tok"])
        else:
            out[p + "ffn.gate.bias"] = (cfg["n_routed_experts"],)
        for part in [f"experts.{e}." for e in range(cfg["n_routed_experts"])] + ["shared_experts."]:
            out |= matrices(f"{p}ffn.{part}", gated)
        for half in ("attn", "ffn"):
            out[f"{p}hc_{half}_fn"] = ((2 + n) * n, n * hidden)
            out[f"{p}hc_{half}_base"] = ((2 + n) * n,)
            out[f"{p}hc_{half}_scale"] = (3,)
    out |= {"norm.weight": (hidden,), "head.weight": (cfg["vocab_size"], hidden)}
    return out | {"hc_head_fn": (n, n * hidden), "hc_head_base": (n,), "hc_head_scale": (1,)}


def fill(salt, cfg):
    """Every tensor by the rule of `tiny.py`, but: the embedding and the head as there under their
    usual names, scales 1 + 0.1 z, and distinct experts for every token."""
    out = {}
    for name, shape in shapes(cfg).items():
        z = tiny.seeded(salt, name).standard_normal(shape)
        if name.endswith("tid2eid"):
            out[name] = np.argsort(tiny.seeded(salt, name).random((shape[0], cfg["n_routed_experts"])))[:, : shape[1]]
        elif name in ("embed.weight", "head.weight"):
            out[name] = (0.5 * z).astype(np.float32)
        elif name.endswith("_scale"):
            out[name] = (1 + 0.1 * z).astype(np.float32)
        else:
            out[name] = tiny.fill(salt, name, shape)
    return out
