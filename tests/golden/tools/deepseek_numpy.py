"""A deepseek-line forward pass in numpy float64, written from the papers' formulas.

It is no golden: it bounds the rounding error of the references, independently of them, and tells
quickly whether a salt may be good. Keys and values are expanded from the latent (the papers' own
form), where the runtime under test works on the latent.
"""

import numpy as np

import tiny
from deepseek_variants import is_sparse
from reference_numpy import rms_norm, silu, swiglu

#: Norms inside the attention have this epsilon, whatever `rms_norm_eps` says.
INNER_EPS = 1e-6
#: A choice (of an expert, a group, a position) that hangs on less is not clear-cut.
MIN_GAP = 2e-4


def yarn(cfg, frequencies, d):
    """YaRN paper, sections 3.2 and 3.4; DeepSeek-V2's two `mscale`: factor of cos and sin, factor of the scores."""
    s = cfg.get("rope_scaling")
    if not s:
        return frequencies, 1.0, 1.0
    factor, original, log_base = s["factor"], s["original_max_position_embeddings"], np.log(cfg["rope_theta"])
    low, high = (d * np.log(original / (2 * np.pi * s[k])) / (2 * log_base) for k in ("beta_fast", "beta_slow"))
    low, high = max(np.floor(low), 0), min(np.ceil(high), d - 1)
    ramp = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)

    def temperature(m):
        return 0.1 * m * np.log(factor) + 1

    both = s.get("mscale") and s.get("mscale_all_dim")
    cos = temperature(s["mscale"]) / temperature(s["mscale_all_dim"]) if both else temperature(1.0)
    scores = temperature(s["mscale_all_dim"]) ** 2 if s.get("mscale_all_dim") else 1.0
    return frequencies * (1 - ramp) + frequencies / factor * ramp, cos, scores


def rotate(cfg, x, pairs):
    """Rotary embedding of [T, heads, d], over neighbours (`pairs`) or halves."""
    d, positions = x.shape[-1], np.arange(len(x), dtype=np.float64)
    frequencies, scale, _ = yarn(cfg, cfg["rope_theta"] ** (-np.arange(0, d, 2) / d), d)
    angle = positions[:, None] * frequencies
    cos, sin = scale * np.cos(angle)[:, None], scale * np.sin(angle)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., : d // 2], x[..., d // 2 :])
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def attend(q, k, v, scale, visible):
    scores = np.where(visible, np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(q), -1)


class Gaps(list):
    """Smallest lead of what was chosen over what was not, over all choices of a pass."""

    def note(self, scores, count):
        ranked = np.sort(scores, axis=-1)[..., ::-1]
        if count < ranked.shape[-1]:
            last, first = ranked[..., count - 1], ranked[..., count]
            seen = np.isfinite(first)
            self.append(float((last[seen] - first[seen]).min(initial=np.inf)))


def dense_attention(cfg, linear, y):
    length, d = len(y), cfg["hidden_size"] // cfg["num_attention_heads"]
    q, k, v = (linear(y, f"{n}_proj").reshape(length, -1, d) for n in "qkv")
    q, k = (rotate(cfg, t, False) for t in (q, k))
    k, v = (np.repeat(t, q.shape[1] // k.shape[1], axis=1) for t in (k, v))
    return linear(attend(q, k, v, d**-0.5, np.tri(length, dtype=bool)), "o_proj")


def selected(cfg, linear, y, q_latent, gaps):
    """Which positions each row sees (DeepSeek-V3.2, section 2.1)."""
    length, n, d, rope = len(y), cfg["index_n_heads"], cfg["index_head_dim"], cfg["qk_rope_head_dim"]
    q = linear(q_latent, "indexer.wq_b").reshape(length, n, d)
    k = linear(y, "indexer.wk")
    k = (k - k.mean(axis=-1, keepdims=True)) / np.sqrt(k.var(axis=-1, keepdims=True) + 1e-6)
    k = linear.scale_and_shift(k, "indexer.k_norm")[:, None]
    q, k = (np.concatenate([rotate(cfg, t[..., :rope], False), t[..., rope:]], axis=-1) for t in (q, k))
    weights = linear(y, "indexer.weights_proj") * n**-0.5 * d**-0.5
    scores = np.einsum("qh,qhk->qk", weights, np.maximum(np.einsum("qhd,kd->qhk", q, k[:, 0]), 0))
    visible = np.tri(length, dtype=bool)
    scores = np.where(visible, scores, -np.inf)
    top = min(cfg["index_topk"], length)
    gaps.note(scores, top)
    chosen = np.zeros_like(visible)
    np.put_along_axis(chosen, np.argsort(-scores, axis=-1, kind="stable")[:, :top], True, axis=-1)
    return visible & chosen


def latent_attention(cfg, linear, y, gaps):
    length, heads = len(y), cfg["num_attention_heads"]
    rank, nope, rope, v_dim = (cfg[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    pairs = cfg.get("rope_interleave", True)
    q_latent = None
    if cfg["q_lora_rank"]:
        q_latent = rms_norm(linear(y, "q_a_proj"), linear.w("q_a_layernorm.weight"), INNER_EPS)
        q = linear(q_latent, "q_b_proj")
    else:
        q = linear(y, "q_proj")
    q = q.reshape(length, heads, nope + rope)
    latent = linear(y, "kv_a_proj_with_mqa")
    k_rope = rotate(cfg, latent[:, None, rank:], pairs)
    kv = linear(rms_norm(latent[:, :rank], linear.w("kv_a_layernorm.weight"), INNER_EPS), "kv_b_proj")
    kv = kv.reshape(length, heads, nope + v_dim)
    q = np.concatenate([q[..., :nope], rotate(cfg, q[..., nope:], pairs)], axis=-1)
    k = np.concatenate([kv[..., :nope], np.broadcast_to(k_rope, (length, heads, rope))], axis=-1)
    visible = selected(cfg, linear, y, q_latent, gaps) if "index_topk" in cfg else np.tri(length, dtype=bool)
    scale = (nope + rope) ** -0.5 * yarn(cfg, np.ones(rope // 2), rope)[2]
    return linear(attend(q, k, kv[..., nope:], scale, visible), "o_proj")


class Layer:
    """Linear maps of one layer by name."""

    def __init__(self, tensors, prefix):
        self.tensors, self.prefix = tensors, prefix

    def w(self, name):
        return self.tensors[self.prefix + name]

    def __call__(self, x, name):
        return x @ self.w(name + ".weight").T + self.tensors.get(f"{self.prefix}{name}.bias", 0.0)

    def scale_and_shift(self, x, name):
        return x * self.w(name + ".weight") + self.w(name + ".bias")


def routes(cfg, w, prefix, y, gaps):
    """[T, experts] share of every expert, 0 for those not chosen."""
    logits, count = y @ w[prefix + "gate.weight"].T, cfg["num_experts_per_tok"]
    third = cfg["model_type"] in ("deepseek_v3", "deepseek_v32")
    scores = 1 / (1 + np.exp(-logits)) if third else softmax(logits)
    choice = scores + w[prefix + "gate.e_score_correction_bias"] if third else scores
    if third or cfg.get("topk_method") == "group_limited_greedy":
        groups = choice.reshape(len(y), cfg["n_group"], -1)
        best = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1) if third else groups.max(axis=-1)
        gaps.note(best, cfg["topk_group"])
        order = np.argsort(-best, axis=-1, kind="stable")
        mask = np.zeros_like(best, dtype=bool)
        np.put_along_axis(mask, order[:, : cfg["topk_group"]], True, axis=-1)
        choice = np.where(mask[..., None], groups, -np.inf).reshape(len(y), -1)
    gaps.note(choice, count)
    chosen = np.argsort(-choice, axis=-1, kind="stable")[:, :count]
    share = np.take_along_axis(scores, chosen, axis=-1)
    if third and cfg["norm_topk_prob"]:
        share = share / share.sum(axis=-1, keepdims=True)
    out = np.zeros_like(scores)
    np.put_along_axis(out, chosen, share * cfg.get("routed_scaling_factor", 1.0), axis=-1)
    return out


def feed_forward(w, prefix, y):
    return swiglu(y, *(w[f"{prefix}{n}_proj.weight"] for n in ("gate", "up", "down")))


def experts(cfg, w, prefix, y, gaps):
    share = routes(cfg, w, prefix, y, gaps)
    gate, up, down = (
        np.stack([w[f"{prefix}experts.{e}.{n}_proj.weight"] for e in range(cfg["n_routed_experts"])])
        for n in ("gate", "up", "down")
    )
    inner = silu(np.einsum("td,eid->tei", y, gate)) * np.einsum("td,eid->tei", y, up)
    out = np.einsum("te,tei,edi->td", share, inner, down)
    return out + feed_forward(w, prefix + "shared_experts.", y)


def forward(cfg, w, ids, gaps=None):
    """Logits [T, vocab]; `w` holds float64 arrays under published names."""
    gaps = Gaps() if gaps is None else gaps
    if cfg["model_type"] == "deepseek_v4":
        return deepseek_v4_numpy.forward(cfg, w, ids, gaps)
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        linear = Layer(w, p + "self_attn.")
        y = rms_norm(x, w[p + "input_layernorm.weight"], cfg["rms_norm_eps"])
        if cfg["model_type"] == "deepseek":
            x = x + dense_attention(cfg, linear, y)
        else:
            x = x + latent_attention(cfg, linear, y, gaps)
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"], cfg["rms_norm_eps"])
        x = x + (experts(cfg, w, p + "mlp.", y, gaps) if is_sparse(cfg, layer) else feed_forward(w, p + "mlp.", y))
    x = rms_norm(x, w["model.norm.weight"], cfg["rms_norm_eps"])
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def min_gap(cfg, w, ids):
    gaps = Gaps()
    forward(cfg, w, ids, gaps)
    return min(gaps, default=np.inf)


def least_gap(cfg):
    """Scores of positions lie denser than those of experts."""
    return 2e-5 if "index_topk" in cfg else MIN_GAP


def promising(cfg, w, prompts):
    """Whether greedy decoding of every prompt is clear-cut and varied; gives up at the first doubt."""
    for ids in prompts:
        chosen = []
        for _ in range(tiny.GREEDY_TOKENS):
            row = forward(cfg, w, ids + chosen)[-1]
            if tiny.margin(row) < tiny.MIN_RELATIVE_MARGIN * np.ptp(row):
                return False
            chosen.append(int(row.argmax()))
        if len(set(chosen)) < 4 or min_gap(cfg, w, ids + chosen) < least_gap(cfg):
            return False
    return True


# Last, because it needs the functions above.
import deepseek_v4_numpy  # noqa: E402
