"""Writes tests/golden/llama/ for what mlx-lm computes: architectures that transformers lacks, and
newer architectures quantised by mlx-lm. Also cross-checks the goldens of make_llama_newer.py.

    python make_llama_newer_mlx.py                 every variant
    python make_llama_newer_mlx.py --search NAME   print the first good salt
    python make_llama_newer_mlx.py --cross-check   run mlx-lm on the checkpoints of make_llama_newer.py

Tensors have mlx-lm's names and are filled by the rule of README.md. Run it in the environment of
requirements-mlx.txt.
"""

import copy
import json
import os
import sys
import tempfile
from pathlib import Path

import make_llama_mlx as mlx
import mlx.core as mx
import numpy as np
import tiny
from llama_newer_variants import LLAMA4, MINISTRAL3, SMALL, VARIANTS, yarn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils

MIN_RELATIVE_MARGIN = 0.01

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
        quant=dict(bits=4, group=32),
        mixed={"model.embed_tokens": 8, "lm_head": 8},
        long=40,
        salt=10,
    ),
    "mlx-llama4-4bit": dict(
        what="llama4 in its wrapper, affine, 4 bits, groups of 32, bfloat16; router at 8 bits, experts stacked",
        config=dict(model_type="llama4", text_config=LLAMA4_WIDE),
        dtype="BF16",
        quant=dict(bits=4, group=32),
        mixed={f"language_model.model.layers.{i}.feed_forward.router": 8 for i in (1, 3)},
        long=40,
        salt=5,
    ),
    "mlx-nemotron-nas-4bit": dict(
        what="nemotron-nas, affine, 4 bits, groups of 32, float16; the linear layers in place of halves at 6 bits",
        config=NEMOTRON | dict(num_hidden_layers=3, block_configs=NEMOTRON["block_configs"][:3]),
        dtype="F16",
        quant=dict(bits=4, group=32),
        mixed={"model.layers.0.mlp.linear": 6, "model.layers.1.self_attn.linear": 6},
        long=24,
        salt=3,
    ),
}


def build(values):
    model_class, args_class = mlx_utils._get_classes(values)
    return model_class(args_class.from_dict(copy.deepcopy(values)))


def write_checkpoint(directory, spec, salt):
    values = copy.deepcopy(spec["config"])
    model = build(values)
    tied = values.get("tie_word_embeddings", False)
    filled = {
        name: mx.array(tiny.fill(salt, name, value.shape, tied)) for name, value in tree_flatten(model.parameters())
    }
    model.load_weights(list(filled.items()))
    model.set_dtype(mlx.DTYPES[spec["dtype"]])
    config = values
    if quant := spec.get("quant"):
        mixed = spec.get("mixed", {})

        def predicate(path, _module):
            bits = mixed.get(path)
            return True if bits is None else dict(group_size=quant["group"], bits=bits, mode="affine")

        model, config = mlx_utils.quantize_model(
            model, values, quant["group"], quant["bits"], quant_predicate=predicate
        )
    mlx_utils.save_model(directory, model)
    mlx_utils.save_config(config, directory / "config.json")
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)


def record(directory, name, ids):
    model = mlx.load(directory)
    logits = mlx.full_logits(model, ids)
    plain, cached = mlx.greedy(model, ids, False), mlx.greedy(model, ids, True)
    out = tiny.prompt_record(name, ids, logits, plain)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(plain[1], cached[1]))
    out["cached_agrees"] = plain[0] == cached[0] and difference < 1e-4
    return out


def make(name, directory, salt, final=True):
    spec = MLX_VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(directory, spec, salt)
    records, bad = [], []
    for label, length in (("short", 7), ("long", spec["long"])):
        r = record(directory, label, tiny.prompt(salt, label, length, 64))
        if r["min_relative_margin"] < MIN_RELATIVE_MARGIN:
            bad.append(f"{label}: margin {r['min_relative_margin']:.4f}")
        if len(set(r["greedy"])) < 4:
            bad.append(f"{label}: only {len(set(r['greedy']))} distinct tokens")
        records.append(r)
        if bad and not final:
            return bad
    assert not bad, f"{name}: {bad}"
    if not final:
        return bad
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": mlx.REFERENCE,
        "weights": {"dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{name:22} salt {salt:3} folder {size:6} cached {[r['cached_agrees'] for r in records]}")


def cross_check():
    """mlx-lm on the checkpoints made by transformers."""
    out = {"reference": mlx.REFERENCE, "variants": {}}
    for name in VARIANTS:
        directory = tiny.LLAMA / name
        golden = json.loads((directory / "golden.json").read_text())
        entry = {}
        with tempfile.TemporaryDirectory() as temp:
            config = json.loads((directory / "config.json").read_text())
            text = config.get("text_config", config)
            if text["model_type"] not in ("ministral3",):
                settings = text.pop("rope_parameters")
                text["rope_theta"] = settings.pop("rope_theta")
                text["rope_scaling"] = None if settings["rope_type"] == "default" else settings
            if config["model_type"] == "llama4_text":
                # Its own file here is MobileLLM's; the decoder of Llama 4 is known in the wrapper only.
                config = dict(model_type="llama4", text_config=config)
            (Path(temp) / "config.json").write_text(json.dumps(config))
            tensors = mx.load(str(directory / "model.safetensors"))
            if golden["variant"] == "llama4-text":
                tensors = {f"language_model.{k}": v for k, v in tensors.items()}
            mx.save_safetensors(str(Path(temp) / "model.safetensors"), tensors, metadata={"format": "mlx"})
            try:
                for p in golden["prompts"]:
                    model = mlx.load(temp)
                    logits = mlx.full_logits(model, p["ids"])[-1]
                    difference = float(np.abs(logits - np.array(p["last_logits"], dtype=np.float32)).max())
                    same = mlx.greedy(model, p["ids"], False)[0] == p["greedy"]
                    entry[p["name"]] = {"max_logit_difference": tiny.short_float(difference), "greedy_equal": same}
            except Exception as e:  # noqa: BLE001 - the message is the result
                entry["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
        out["variants"][name] = entry
        print(f"{name:20} {entry}")
    tiny.write_json(tiny.LLAMA / "cross_check_newer.json", out)


def main(arguments):
    os.umask(0o022)
    if "--cross-check" in arguments:
        return cross_check()
    for name in [a for a in arguments if not a.startswith("--")] or list(MLX_VARIANTS):
        if "--search" not in arguments:
            make(name, tiny.LLAMA / name, MLX_VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next(s for s in range(1, 2000) if not make(name, Path(temp) / "m", s, final=False))
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
