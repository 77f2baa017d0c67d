"""Writes tests/golden/qwen/mlx-*/ (checkpoints quantised by mlx-lm) and cross_check.json.

    python make_qwen_mlx.py                 every MLX variant of qwen_variants.py
    python make_qwen_mlx.py --search NAME   print the first good salts
    python make_qwen_mlx.py --cross-check   run mlx-lm on the checkpoints of make_qwen.py

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils

import make_llama_mlx as base
import qwen_numpy
import reference_numpy
import tiny
from qwen_variants import MLX_VARIANTS, VARIANTS, shapes

QWEN = tiny.GOLDEN / "qwen"
CLASSES = {"qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
GROUP = 32


def write_checkpoint(directory, spec, salt):
    """The model filled by the rule, cast, quantised by mlx-lm and saved by it."""
    values = copy.deepcopy(spec["config"])
    values.setdefault("mlp_only_layers", [])
    values.setdefault("decoder_sparse_step", 1)
    values["architectures"] = [f"{CLASSES[values['model_type']]}ForCausalLM"]
    model_class, args_class = mlx_utils._get_classes(values)
    model = model_class(args_class.from_dict(values))
    tied = values["tie_word_embeddings"]
    weights = {n: mx.array(tiny.fill(salt, n, s, tied)) for n, s in shapes(values).items()}
    model.load_weights(list(model.sanitize(weights).items()))
    model.set_dtype(base.DTYPES[spec["dtype"]])
    # Without a predicate of ours mlx-lm uses the model's own: routers of qwen3_moe have 8 bits.
    model, config = mlx_utils.quantize_model(model, values, GROUP, spec["bits"])
    mlx_utils.save_model(directory, model)
    mlx_utils.save_config(config, directory / "config.json")
    (directory / "model.safetensors.index.json").unlink()
    return values


def exact_weights(model, cfg):
    """Published names -> float64 values, decoded from the packed bytes by our own code."""
    flat = {k: np.array(v.astype(mx.float32) if v.dtype == mx.bfloat16 else v) for k, v in tree_flatten(model.parameters())}
    modules = dict(model.named_modules())
    out = {}
    for name, value in flat.items():
        path, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        module = modules[path]
        if hasattr(module, "bits") and kind == "weight":
            value = reference_numpy.dequantize_mlx(
                value, flat[path + ".scales"], flat[path + ".biases"], module.group_size, module.bits, module.mode
            )
        if ".switch_mlp." in name:
            prefix, matrix = name.split("switch_mlp.")
            for e in range(cfg["num_experts"]):
                out[f"{prefix}experts.{e}.{matrix}"] = value[e].astype(np.float64)
        else:
            out[name] = value.astype(np.float64)
    return out


def record(directory, cfg, exact, name, ids):
    model = base.load(directory)
    logits = base.full_logits(model, ids)
    plain, cached = base.greedy(model, ids, False), base.greedy(model, ids, True)
    assert plain[0] == cached[0], f"{directory}: {name}: cached and uncached differ"
    out = tiny.prompt_record(name, ids, logits, plain)
    error = np.abs(logits - qwen_numpy.forward(cfg, exact, ids)).max()
    out["max_error_to_float64"] = tiny.short_float(error)
    return out


def make(name, directory, salt, final=True):
    spec = MLX_VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    cfg = write_checkpoint(directory, spec, salt)
    exact = exact_weights(base.load(directory), cfg)
    prompts = [(label, tiny.prompt(salt, label, n, cfg["vocab_size"])) for label, n in (("short", 7), ("long", 24))]
    if not final and not qwen_numpy.promising(cfg, exact, [ids for _, ids in prompts]):
        return ["numpy"]
    records = [record(directory, cfg, exact, *p) for p in prompts]
    bad = base.complaints(records)
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": base.REFERENCE,
        "weights": {"dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    error = max(r["max_error_to_float64"] for r in records)
    worst = min(r["min_relative_margin"] for r in records)
    print(f"{name:18} salt {salt:3} folder {size:6} margin {worst:.3f} f64 {error:.1e}", flush=True)


def cross_check():
    """mlx-lm on the checkpoints made by transformers, through their legacy configs."""
    out = {"reference": base.REFERENCE, "variants": {}}
    for name in VARIANTS:
        directory = QWEN / name
        golden = json.loads((directory / "golden.json").read_text())
        entry = {}
        with tempfile.TemporaryDirectory() as temp:
            (Path(temp) / "config.json").symlink_to(directory / "config.legacy.json")
            (Path(temp) / "model.safetensors").symlink_to(directory / "model.safetensors")
            try:
                for p in golden["prompts"]:
                    model = base.load(temp)
                    logits = base.full_logits(model, p["ids"])[-1]
                    difference = float(np.abs(logits - np.array(p["last_logits"], dtype=np.float32)).max())
                    same = base.greedy(model, p["ids"], False)[0] == p["greedy"]
                    entry[p["name"]] = {"max_logit_difference": tiny.short_float(difference), "greedy_equal": same}
            except Exception as e:  # noqa: BLE001 - the message is the result
                entry["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
        out["variants"][name] = entry
        print(f"{name:20} {entry}")
    tiny.write_json(QWEN / "cross_check.json", out)


def main(arguments):
    if "--cross-check" in arguments:
        return cross_check()
    for name in [a for a in arguments if not a.startswith("--")] or list(MLX_VARIANTS):
        if "--search" not in arguments:
            make(name, QWEN / name, MLX_VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next((s for s in range(1, 5000) if not make(name, Path(temp) / "m", s, final=False)), None)
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
