"""A llama-line forward pass in numpy float64, written from the papers' formulas.

It is no golden: it bounds the rounding error of the float32 references and decodes quantised
tensors from their bytes, independently of the libraries that made them. Rotary scaling other
than plain and linear is left to the two references.
"""

import numpy as np

#: Values of the 4-bit float e2m1 (OCP Microscaling Formats, table 5), by code.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack_bits(words, bits):
    """Codes of MLX's packing: one little-endian bit stream along the last axis."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*stream.shape[:-1], -1, bits).astype(np.int64)
    return (codes << np.arange(bits)).sum(axis=-1)


def dequantize_mlx(words, scales, biases, group_size, bits, mode="affine"):
    """Exact (float64) value of an MLX-quantised matrix."""
    codes = unpack_bits(words, bits)
    groups = codes.reshape(*codes.shape[:-1], -1, group_size)
    if mode == "mxfp4":
        exponent = scales.astype(np.int64) - 127
        return (E2M1[groups] * np.exp2(exponent)[..., None]).reshape(codes.shape)
    assert mode == "affine", mode
    s, b = scales.astype(np.float64)[..., None], biases.astype(np.float64)[..., None]
    return (groups * s + b).reshape(codes.shape)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta, factor):
    """Half-split rotary embedding of [T, heads, d]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / factor * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def supports(cfg):
    return (cfg.get("rope_scaling") or {}).get("rope_type", "linear") == "linear"


def rope_layers(cfg):
    count, interval = cfg["num_hidden_layers"], cfg.get("no_rope_layer_interval")
    if cfg.get("no_rope_layers"):
        return cfg["no_rope_layers"]
    return [not interval or (i + 1) % interval != 0 for i in range(count)]


def forward(cfg, weights, ids):
    """Logits [T, vocab] in float64; `cfg` is the variant's plain dict, `weights` published names."""
    assert supports(cfg), "only plain and linear rotary embedding here"
    factor = (cfg.get("rope_scaling") or {}).get("factor", 1.0)
    uses_rope = rope_layers(cfg)
    w = {k: v.astype(np.float64) for k, v in weights.items()}
    length, heads, kv_heads = len(ids), cfg["num_attention_heads"], cfg["num_key_value_heads"]
    d = cfg.get("head_dim") or cfg["hidden_size"] // heads
    positions = np.arange(length, dtype=np.float64)
    distance = positions[:, None] - positions[None]
    x = w["model.embed_tokens.weight"][ids]

    def linear(y, name):
        out = y @ w[name + ".weight"].T
        return out + w[name + ".bias"] if name + ".bias" in w else out

    for layer in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        y = rms_norm(x, w[p + "input_layernorm.weight"], cfg["rms_norm_eps"])
        q, k, v = (linear(y, f"{p}self_attn.{n}_proj").reshape(length, -1, d) for n in "qkv")
        if uses_rope[layer]:
            q, k = (rotate(t, positions, cfg["rope_theta"], factor) for t in (q, k))
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
        visible = distance >= 0
        if cfg.get("sliding_window") and not (cfg["model_type"] == "smollm3" and uses_rope[layer]):
            visible &= distance < cfg["sliding_window"]
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", scores, v).reshape(length, -1)
        x = x + linear(attended, p + "self_attn.o_proj")
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"], cfg["rms_norm_eps"])
        if cfg["model_type"] == "mixtral":
            x = x + experts(cfg, w, p + "block_sparse_moe.", y)
        else:
            hidden = silu(linear(y, p + "mlp.gate_proj")) * linear(y, p + "mlp.up_proj")
            x = x + linear(hidden, p + "mlp.down_proj")
    x = rms_norm(x, w["model.norm.weight"], cfg["rms_norm_eps"])
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def experts(cfg, w, prefix, y):
    """The best experts of each row, weighted by the softmax over those alone."""
    router = y @ w[prefix + "gate.weight"].T
    out = np.zeros_like(y)
    for row, logits in enumerate(router):
        best = np.argsort(-logits)[: cfg["num_experts_per_tok"]]
        share = np.exp(logits[best] - logits[best].max())
        share /= share.sum()
        for e, s in zip(best, share):
            gate, down, up = (w[f"{prefix}experts.{e}.{m}.weight"] for m in ("w1", "w2", "w3"))
            out[row] += s * swiglu(y[row], gate, up, down)
    return out
