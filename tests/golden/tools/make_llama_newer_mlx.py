"""Writes tests/golden/llama/ for what mlx-lm computes: architectures that transformers lacks, and
newer architectures quantised by mlx-lm. Also cross-checks the goldens of make_llama_newer.py.

    python make_llama_newer_mlx.py                 every variant
    python make_llama_newer_mlx.py --search NAME   print the first good salt
    python make_llama_newer_mlx.py --cross-check   run mlx-lm on the checkpoints of make_llama_newer.py

Tensors have mlx-lm's names and are filled by the rule of README.md. Run it in the environment of
requirements-mlx.txt.
"""

import json
import sys

import mlx.core as mx
import numpy as np

import reference_mlx as mlx
import tiny
from llama_newer_variants import LLAMA4, MINISTRAL3, SMALL, VARIANTS, yarn

NEMOTRON = SMALL | dict(
    model_type="nemotron-nas",
    num_hidden_layers=5,
    max_position_embeddings=256,
    rope_theta=2000.0,
    num_attention_heads=2,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    block_configs=[
        dict(attention=dict(n_heads_in_group=2), ffn=dict(replace_with_linear=True)),
        dict(attention=dict(replace_with_linear=True), ffn=dict(ffn_mult=2.625)),
        dict(attention=dict(n_heads_in_group=1), ffn=dict(no_op=True)),
        dict(attention=dict(no_op=True), ffn=dict(replace_with_linear=True)),
        dict(attention=dict(no_op=True), ffn=dict(no_op=True)),
    ],
)
NEMOTRON.pop("num_key_value_heads")

LOOP = SMALL | dict(
    model_type="iquestloopcoder",
    head_dim=8,
    max_position_embeddings=256,
    rope_theta=500000.0,
    loop_num=2,
    loop_window_size=8,
)

WIDE = dict(hidden_size=64)
LLAMA4_WIDE = LLAMA4 | dict(
    hidden_size=64,
    intermediate_size=32,
    intermediate_size_mlp=64,
    rope_theta=10000.0,
    rope_scaling=None,
    attention_bias=False,
)

MLX_VARIANTS = {
    "nemotron-nas": dict(
        what="five blocks: attention with 1 and 2 key heads, replaced by a linear layer, and left out; feed-forward of "
        "256 features, replaced, and left out; llama3 rotary scaling, beyond whose original context the long prompt goes",
        config=NEMOTRON,
        dtype="BF16",
        long=72,
        salt=8,
    ),
    "iquestloopcoder": dict(
        what="two rounds over two layers; the window of 8 of the second round is left by the long prompt",
        config=LOOP,
        dtype="BF16",
        long=40,
        salt=10,
    ),
    "mlx-ministral3-4bit": dict(
        what="ministral3, affine, 4 bits, groups of 32, float16; embedding and head at 8 bits",
        config=MINISTRAL3 | yarn(0.5) | WIDE,
        dtype="F16",
        bits=4,
        mixed={"model.embed_tokens": 8, "lm_head": 8},
        long=40,
        salt=10,
    ),
    "mlx-llama4-4bit": dict(
        what="llama4 in its wrapper, affine, 4 bits, groups of 32, bfloat16; router at 8 bits, experts stacked",
        config=dict(model_type="llama4", text_config=LLAMA4_WIDE),
        dtype="BF16",
        bits=4,
        mixed={f"language_model.model.layers.{i}.feed_forward.router": 8 for i in (1, 3)},
        long=40,
        salt=5,
    ),
    "mlx-nemotron-nas-4bit": dict(
        what="nemotron-nas, affine, 4 bits, groups of 32, float16; the linear layers in place of halves at 6 bits",
        config=NEMOTRON | dict(num_hidden_layers=3, block_configs=NEMOTRON["block_configs"][:3]),
        dtype="F16",
        bits=4,
        mixed={"model.layers.0.mlp.linear": 6, "model.layers.1.self_attn.linear": 6},
        long=24,
        salt=3,
    ),
    "mlx-smollm3-4bit": dict(
        what="smollm3, affine, 4 bits, groups of 32, bfloat16; tied, every second layer without positions",
        config=SMALL
        | dict(
            model_type="smollm3",
            num_hidden_layers=3,
            no_rope_layer_interval=2,
            rope_theta=5000.0,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        ),
        dtype="BF16",
        bits=4,
        salt=8,
    ),
    "mlx-mistral3-4bit": dict(
        what="mistral3 around a ministral3 decoder, affine, 4 bits, groups of 32, float16; embedding and head at 8 bits",
        config=dict(model_type="mistral3", text_config=MINISTRAL3 | yarn(0.5) | WIDE),
        dtype="F16",
        bits=4,
        mixed={"language_model.model.embed_tokens": 8, "language_model.lm_head": 8},
        long=40,
        salt=76,
    ),
    "mlx-iquestloopcoder-4bit": dict(
        what="iquestloopcoder, affine, 4 bits, groups of 32, bfloat16; the window of 8 is left by the long prompt",
        config=LOOP | dict(intermediate_size=32),
        dtype="BF16",
        bits=4,
        long=40,
        salt=32,
    ),
}


def record(directory, name, ids):
    model = mlx.load(directory)
    logits = mlx.full_logits(model, ids)
    plain, cached = mlx.greedy(model, ids, False), mlx.greedy(model, ids, True)
    out = tiny.prompt_record(name, ids, logits, plain)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(plain[1], cached[1]))
    out["cached_agrees"] = plain[0] == cached[0] and difference < 1e-4
    return out


class Newer(mlx.Line):
    folder = tiny.LLAMA
    variants = MLX_VARIANTS
    margin = 0.01

    def tensors(self, model, values, salt):
        tied = values.get("tie_word_embeddings", False)
        return {name: tiny.fill(salt, name, shape, tied) for name, shape in mlx.shapes_of(model).items()}

    def predicate(self, spec, model):
        mixed = spec.get("mixed", {})

        def chosen(path, _module):
            bits = mixed.get(path)
            return True if bits is None else dict(group_size=32, bits=bits, mode="affine")

        return chosen

    def record(self, directory, spec, label, ids):
        model = mlx.load(directory)
        self.clear(label, mlx.greedy(model, ids, False))
        return record(directory, label, ids), None

    def checkable(self, directory, temp):
        config = json.loads((directory / "config.json").read_text())
        text = config.get("text_config", config)
        if text["model_type"] not in ("ministral3",):
            settings = text.pop("rope_parameters")
            text["rope_theta"] = settings.pop("rope_theta")
            text["rope_scaling"] = None if settings["rope_type"] == "default" else settings
        tensors = mx.load(str(directory / "model.safetensors"))
        wrapped = config["model_type"] == "llama4_text"
        if wrapped:
            # Its own file here is MobileLLM's; the decoder of Llama 4 is known in the wrapper only.
            config = dict(model_type="llama4", text_config=config)
        (temp / "config.json").write_text(json.dumps(config))
        if wrapped:
            tensors = {f"language_model.{k}": v for k, v in tensors.items()}
        mx.save_safetensors(str(temp / "model.safetensors"), tensors, metadata={"format": "mlx"})


if __name__ == "__main__":
    Newer().main(sys.argv[1:], VARIANTS, tiny.LLAMA / "cross_check_newer.json")
