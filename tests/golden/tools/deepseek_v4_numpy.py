"""A forward pass of `deepseek_v4` in numpy float64; what `deepseek_numpy.py` is to the others."""

import numpy as np

from deepseek_numpy import softmax
from deepseek_v4_variants import HEAVY, SLIDING, SPARSE
from reference_numpy import rms_norm, silu


def frequencies(cfg, compressed):
    d, s = cfg["qk_rope_head_dim"], cfg.get("rope_scaling") if compressed else None
    base = cfg["compress_rope_theta" if compressed else "rope_theta"]
    plain = base ** (-np.arange(0, d, 2) / d)
    if not s:
        return plain
    original = s["original_max_position_embeddings"]
    low, high = (d * np.log(original / (2 * np.pi * s[k])) / (2 * np.log(base)) for k in ("beta_fast", "beta_slow"))
    low, high = max(np.floor(low), 0), min(np.ceil(high), d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
    return plain * (1 - ramp) + plain / s["factor"] * ramp


def rotate(x, positions, steps):
    """The last features of [T, heads, d], by neighbours."""
    angle = np.asarray(positions, dtype=np.float64)[:, None] * steps
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    still, turned = x[..., : -2 * len(steps)], x[..., -2 * len(steps) :]
    a, b = turned[..., ::2], turned[..., 1::2]
    out = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    return np.concatenate([still, out], axis=-1)


def entries(w, p, y, rate, width, eps, steps):
    """One compressed key for every full group of `rate` positions; overlapping where it has two series."""
    count = len(y) // rate
    kv, gate = (
        (y @ w[f"{p}{n}.weight"].T)[: count * rate].reshape(count, rate, len(w[f"{p}{n}.weight"])) for n in ("wkv", "wgate")
    )
    gate = gate + w[p + "ape"]
    if kv.shape[-1] == 2 * width:
        before_kv = np.concatenate([np.zeros((1, rate, width)), kv[:-1, :, :width]]) if count else kv[..., :width]
        before_gate = np.concatenate([np.full((1, rate, width), -np.inf), gate[:-1, :, :width]]) if count else gate[..., :width]
        kv = np.concatenate([before_kv, kv[..., width:]], axis=1)
        gate = np.concatenate([before_gate, gate[..., width:]], axis=1)
    gate = np.exp(gate - gate.max(axis=1, keepdims=True)) if count else gate
    pooled = (kv * gate / gate.sum(axis=1, keepdims=True)).sum(axis=1)
    pooled = rms_norm(pooled, w[p + "norm.weight"], eps)
    return rotate(pooled[:, None], np.arange(count) * rate, steps)[:, 0]


def attention(cfg, w, p, kind, y, gaps):
    length, heads, d, eps = len(y), cfg["num_attention_heads"], cfg["head_dim"], cfg["rms_norm_eps"]
    positions, steps = np.arange(length), frequencies(cfg, kind != SLIDING)
    low = rms_norm(y @ w[p + "wq_a.weight"].T, w[p + "q_norm.weight"], eps)
    q = (low @ w[p + "wq_b.weight"].T).reshape(length, heads, d)
    q = rotate(rms_norm(q, 1.0, eps), positions, steps)
    kv = rms_norm(y @ w[p + "wkv.weight"].T, w[p + "kv_norm.weight"], eps)
    kv = rotate(kv[:, None], positions, steps)[:, 0]
    distance = positions[:, None] - positions[None]
    visible = (distance >= 0) & (distance < cfg["sliding_window"])
    if kind != SLIDING:
        rate = cfg["compress_rates"][kind]
        long = entries(w, p + "compressor.", y, rate, d, eps, steps)
        seen = np.arange(len(long))[None] < ((positions + 1) // rate)[:, None]
        if kind == SPARSE and len(long):
            n, width = cfg["index_n_heads"], cfg["index_head_dim"]
            iq = rotate((low @ w[p + "indexer.wq_b.weight"].T).reshape(length, n, width), positions, steps)
            ik = entries(w, p + "indexer.compressor.", y, rate, width, eps, steps)
            scores = np.maximum(np.einsum("qhd,kd->qhk", iq, ik), 0) * width**-0.5
            scores = np.einsum("qhk,qh->qk", scores, y @ w[p + "indexer.weights_proj.weight"].T * n**-0.5)
            scores = np.where(seen, scores, -np.inf)
            top = min(cfg["index_topk"], len(long))
            gaps.note(scores, top)
            chosen = np.zeros_like(seen)
            np.put_along_axis(chosen, np.argsort(-scores, axis=-1, kind="stable")[:, :top], True, axis=-1)
            seen = seen & chosen
        kv, visible = np.concatenate([kv, long]), np.concatenate([visible, seen], axis=1)
    scores = np.where(visible, np.einsum("qhd,kd->hqk", q, kv) * d**-0.5, -np.inf)
    sinks = np.broadcast_to(w[p + "attn_sink"][:, None, None], (heads, length, 1))
    share = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
    out = rotate(np.einsum("hqk,kd->qhd", share, kv), -positions, steps)
    groups = cfg["o_groups"]
    grouped = out.reshape(length, groups, -1)
    mixed = np.einsum("tgi,goi->tgo", grouped, w[p + "wo_a.weight"].reshape(groups, -1, grouped.shape[-1]))
    return mixed.reshape(length, -1) @ w[p + "wo_b.weight"].T


def gated(cfg, w, p, y):
    limit = cfg["swiglu_limit"]
    gate, up = y @ w[p + "w1.weight"].T, y @ w[p + "w3.weight"].T
    return (silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)) @ w[p + "w2.weight"].T


def feed_forward(cfg, w, p, y, ids, gaps):
    scores = np.sqrt(np.logaddexp(0, y @ w[p + "gate.weight"].T))
    if p + "gate.tid2eid" in w:
        chosen = w[p + "gate.tid2eid"][ids].astype(int)
    else:
        choice = scores + w[p + "gate.bias"]
        gaps.note(choice, cfg["num_experts_per_tok"])
        chosen = np.argsort(-choice, axis=-1, kind="stable")[:, : cfg["num_experts_per_tok"]]
    share = np.take_along_axis(scores, chosen, axis=-1)
    share = share / share.sum(axis=-1, keepdims=True) * cfg["routed_scaling_factor"]
    out = gated(cfg, w, p + "shared_experts.", y)
    for expert in range(cfg["n_routed_experts"]):
        out += (share * (chosen == expert)).sum(axis=-1, keepdims=True) * gated(cfg, w, f"{p}experts.{expert}.", y)
    return out


def weights_of_streams(cfg, w, p, x):
    """(pre, post, comb) of manifold-constrained hyper-connections."""
    n, eps = cfg["hc_mult"], cfg["hc_eps"]
    mixes = rms_norm(x.reshape(len(x), -1), 1.0, cfg["rms_norm_eps"]) @ w[p + "_fn"].T
    scale, base = w[p + "_scale"], w[p + "_base"]

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    pre = sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    for _ in range(cfg["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    return pre, post, comb


def forward(cfg, w, ids, gaps):
    eps, n = cfg["rms_norm_eps"], cfg["hc_mult"]
    x = np.repeat(w["embed.weight"][ids][:, None], n, axis=1)
    for layer, kind in enumerate(cfg["layer_types"]):
        p = f"layers.{layer}."
        for half in ("attn", "ffn"):
            pre, post, comb = weights_of_streams(cfg, w, f"{p}hc_{half}", x)
            y = rms_norm(np.einsum("tn,tnd->td", pre, x), w[f"{p}{half}_norm.weight"], eps)
            if half == "attn":
                y = attention(cfg, w, p + "attn.", kind, y, gaps)
            else:
                y = feed_forward(cfg, w, p + "ffn.", y, ids, gaps)
            x = post[..., None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, x)
    mixes = rms_norm(x.reshape(len(x), -1), 1.0, eps) @ w["hc_head_fn"].T
    pre = 1 / (1 + np.exp(-(mixes * w["hc_head_scale"] + w["hc_head_base"]))) + cfg["hc_eps"]
    x = rms_norm(np.einsum("tn,tnd->td", pre, x), w["norm.weight"], eps)
    return x @ w["head.weight"].T
