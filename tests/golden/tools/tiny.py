"""Rules shared by every golden generator: filling, prompts, statistics, JSON layout.

Needs numpy only, so that the torch, the MLX and the GGUF generators, which live in
different virtual environments, fill the same tensors with the same bytes.
"""

import hashlib
import json
import re
import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent
LLAMA = GOLDEN / "llama"

GREEDY_TOKENS = 12
#: A golden whose greedy choice hangs on less than this share of the logit range is refused.
MIN_RELATIVE_MARGIN = 0.02


def seeded(salt, name):
    """Generator of one tensor: its values depend on the salt and the tensor's name only."""
    return np.random.default_rng([salt, zlib.crc32(name.encode())])


def fill(salt, name, shape, tied=False):
    """Float32 values of the tensor `name`, by the rule written in README.md."""
    z = seeded(salt, name).standard_normal(shape)
    if len(shape) == 1:
        offset = 1.0 if "norm" in name else 0.0
        return (offset + 0.1 * z).astype(np.float32)
    if "embed_tokens" in name:
        return ((0.25 if tied else 0.5) * z).astype(np.float32)
    if name == "lm_head.weight":
        return (0.5 * z).astype(np.float32)
    return (1.5 * z / np.sqrt(shape[-1])).astype(np.float32)


def prompt(salt, label, length, vocab_size):
    """Token ids: the beginning-of-text id 1, then ids that are no special token (0, 1, 2)."""
    body = seeded(salt, f"prompt.{label}").integers(3, vocab_size, length - 1)
    return [1] + [int(i) for i in body]


def llama_shapes(cfg):
    """Published tensor names and shapes of a llama-line config (a plain dict)."""
    hidden, inter = cfg["hidden_size"], cfg["intermediate_size"]
    head_dim = cfg.get("head_dim") or hidden // cfg["num_attention_heads"]
    q = cfg["num_attention_heads"] * head_dim
    kv = cfg["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (cfg["vocab_size"], hidden)}
    for layer in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes[p + "input_layernorm.weight"] = (hidden,)
        shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, cols in (
            ("q_proj", q, hidden),
            ("k_proj", kv, hidden),
            ("v_proj", kv, hidden),
            ("o_proj", hidden, q),
        ):
            shapes[f"{p}self_attn.{name}.weight"] = (rows, cols)
            if cfg.get("attention_bias"):
                shapes[f"{p}self_attn.{name}.bias"] = (rows,)
        if cfg["model_type"] == "mixtral":
            moe = p + "block_sparse_moe."
            shapes[moe + "gate.weight"] = (cfg["num_local_experts"], hidden)
            for expert in range(cfg["num_local_experts"]):
                shapes[f"{moe}experts.{expert}.w1.weight"] = (inter, hidden)
                shapes[f"{moe}experts.{expert}.w2.weight"] = (hidden, inter)
                shapes[f"{moe}experts.{expert}.w3.weight"] = (inter, hidden)
            continue
        for name, rows, cols in (
            ("gate_proj", inter, hidden),
            ("up_proj", inter, hidden),
            ("down_proj", hidden, inter),
        ):
            shapes[f"{p}mlp.{name}.weight"] = (rows, cols)
            if cfg.get("mlp_bias"):
                shapes[f"{p}mlp.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not cfg.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (cfg["vocab_size"], hidden)
    return shapes


def fill_all(salt, cfg):
    """Every tensor of the config, as float32 arrays under published names."""
    tied = cfg.get("tie_word_embeddings", False)
    return {n: fill(salt, n, s, tied) for n, s in llama_shapes(cfg).items()}


def short_float(x):
    """The shortest decimal that reads back as the same float32."""
    x = np.float32(x)
    out = float(str(x))
    assert np.float32(out) == x
    return out


def floats(values):
    return [short_float(v) for v in values]


def margin(row):
    """Distance of the best logit to the second best."""
    top = np.sort(np.asarray(row, dtype=np.float64))[-2:]
    return float(top[1] - top[0])


def position_statistics(logits):
    """One column per statistic over the positions of a prompt, from logits [T, vocab]."""
    return {
        "argmax": [int(r.argmax()) for r in logits],
        "max": floats(logits.max(axis=1)),
        "margin": floats([margin(r) for r in logits]),
        "mean": floats(logits.astype(np.float64).mean(axis=1)),
        "std": floats(logits.astype(np.float64).std(axis=1)),
    }


def prompt_record(name, ids, logits, greedy):
    """JSON record of one prompt. `greedy` is (ids, list of logit rows that chose them)."""
    chosen, rows = greedy
    spread = [float(np.ptp(r)) for r in rows]
    margins = [margin(r) for r in rows]
    return {
        "name": name,
        "ids": ids,
        "last_logits": floats(logits[-1]),
        "last_top5": top(logits[-1], 5),
        "positions": position_statistics(logits),
        "greedy": chosen,
        "greedy_margins": floats(margins),
        "min_margin": short_float(min(margins)),
        "min_relative_margin": short_float(min(m / s for m, s in zip(margins, spread))),
    }


def top(row, count):
    order = np.argsort(-row, kind="stable")[:count]
    return [[int(i), short_float(row[i])] for i in order]


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write_json(path, value):
    """Indented JSON in which a list of scalars (or of pairs of scalars) stays on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    flat = re.compile(r"\[[^\[\]{}]*\]")
    text = flat.sub(lambda m: re.sub(r"\s*\n\s*", " ", m.group()).replace("[ ", "[").replace(" ]", "]"), text)
    pairs = re.compile(r"\[\s*(\[[^\[\]{}\n]*\],?\s*)+\]")
    text = pairs.sub(lambda m: re.sub(r"\s*\n\s*", " ", m.group()).replace("[ [", "[[").replace("] ]", "]]"), text)
    assert json.loads(text) == value
    Path(path).write_text(text + "\n")
