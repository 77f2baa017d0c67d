"""A qwen-line forward pass in numpy float64, written from the papers' formulas.

It is no golden: it bounds the rounding error of the references, independently of them, and tells
quickly whether a salt may be good.
"""

import numpy as np

import tiny
from qwen_variants import is_sparse
from reference_numpy import rms_norm, swiglu


def windows(cfg):
    """Most keys a row sees, by layer; None is all."""
    count = cfg["num_hidden_layers"]
    if not cfg.get("use_sliding_window"):
        return [None] * count
    window, first = cfg["sliding_window"], cfg.get("max_window_layers", 28)
    if cfg.get("layer_types"):
        slides = [kind == "sliding_attention" for kind in cfg["layer_types"]]
    elif cfg["model_type"] == "qwen3_moe":
        slides = [True] * count
    elif cfg["model_type"] == "qwen2_moe":
        slides = [i % 2 == 0 and i < first for i in range(count)]
    else:
        slides = [i >= first for i in range(count)]
    return [window if s else None for s in slides]


def yarn(cfg, frequencies, d):
    """Interpolation by parts and temperature of the YaRN paper (sections 3.2 and 3.4), its default bounds."""
    settings, theta = cfg["rope_scaling"], cfg["rope_theta"]
    factor, original = settings["factor"], settings["original_max_position_embeddings"]
    low, high = (d * np.log(original / (2 * np.pi * turns)) / (2 * np.log(theta)) for turns in (32.0, 1.0))
    low, high = max(np.floor(low), 0), min(np.ceil(high), d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
    return frequencies * (1 - ramp) + frequencies / factor * ramp, 0.1 * np.log(factor) + 1


def rotate(cfg, x, positions):
    """Half-split rotary embedding of [T, heads, d]."""
    d = x.shape[-1]
    frequencies, scale = cfg["rope_theta"] ** (-np.arange(0, d, 2) / d), 1.0
    if cfg.get("rope_scaling"):
        frequencies, scale = yarn(cfg, frequencies, d)
    angle = positions[:, None] * frequencies
    cos, sin = scale * np.cos(angle)[:, None], scale * np.sin(angle)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(cfg, w, prefix, y, window):
    length, d = len(y), cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
    positions = np.arange(length, dtype=np.float64)
    distance = positions[:, None] - positions[None]

    def linear(x, name):
        return x @ w[f"{prefix}{name}.weight"].T + w.get(f"{prefix}{name}.bias", 0.0)

    q, k, v = (linear(y, f"{n}_proj").reshape(length, -1, d) for n in "qkv")
    if f"{prefix}q_norm.weight" in w:
        q = rms_norm(q, w[prefix + "q_norm.weight"], cfg["rms_norm_eps"])
        k = rms_norm(k, w[prefix + "k_norm.weight"], cfg["rms_norm_eps"])
    q, k = (rotate(cfg, t, positions) for t in (q, k))
    k, v = (np.repeat(t, q.shape[1] // k.shape[1], axis=1) for t in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
    visible = (distance >= 0) & (distance < (window or length))
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return linear(np.einsum("hqk,khd->qhd", scores, v).reshape(length, -1), "o_proj")


def feed_forward(w, prefix, y):
    return swiglu(y, *(w[f"{prefix}{n}_proj.weight"] for n in ("gate", "up", "down")))


def experts(cfg, w, prefix, y):
    router = y @ w[prefix + "gate.weight"].T
    router = np.exp(router - router.max(axis=-1, keepdims=True))
    router /= router.sum(axis=-1, keepdims=True)
    out = np.zeros_like(y)
    for row, scores in enumerate(router):
        best = np.argsort(-scores)[: cfg["num_experts_per_tok"]]
        share = scores[best] / (scores[best].sum() if cfg["norm_topk_prob"] else 1.0)
        for expert, s in zip(best, share):
            out[row] += s * feed_forward(w, f"{prefix}experts.{expert}.", y[row])
    if prefix + "shared_expert_gate.weight" in w:
        share = 1 / (1 + np.exp(-(y @ w[prefix + "shared_expert_gate.weight"].T)))
        out += share * feed_forward(w, prefix + "shared_expert.", y)
    return out


def forward(cfg, w, ids):
    """Logits [T, vocab]; `w` holds float64 arrays under published names."""
    x = w["model.embed_tokens.weight"][ids]
    for layer, window in enumerate(windows(cfg)):
        p = f"model.layers.{layer}."
        y = rms_norm(x, w[p + "input_layernorm.weight"], cfg["rms_norm_eps"])
        x = x + attention(cfg, w, p + "self_attn.", y, window)
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"], cfg["rms_norm_eps"])
        x = x + (experts(cfg, w, p + "mlp.", y) if is_sparse(cfg, layer) else feed_forward(w, p + "mlp.", y))
    x = rms_norm(x, w["model.norm.weight"], cfg["rms_norm_eps"])
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def promising(cfg, w, prompts):
    """Whether greedy decoding of every prompt is clear-cut and varied; gives up at the first doubt."""
    for ids in prompts:
        chosen = []
        for _ in range(tiny.GREEDY_TOKENS):
            row = forward(cfg, w, ids + chosen)[-1]
            if tiny.margin(row) < tiny.MIN_RELATIVE_MARGIN * np.ptp(row):
                return False
            chosen.append(int(row.argmax()))
        if len(set(chosen)) < 4:
            return False
    return True
