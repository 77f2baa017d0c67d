"""Writes tests/golden/deepseek/mlx-*/ (checkpoints saved by mlx-lm) and cross_check.json.

    python make_deepseek_mlx.py                 every MLX variant of deepseek_variants.py
    python make_deepseek_mlx.py --search NAME   print the first good salts
    python make_deepseek_mlx.py --cross-check   run mlx-lm on the checkpoints of make_deepseek.py

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

import deepseek_numpy
import make_llama_mlx as base
import reference_numpy
import tiny
from deepseek_variants import MLX_VARIANTS, VARIANTS, fill

DEEPSEEK = tiny.GOLDEN / "deepseek"
CLASSES = {"deepseek": "Deepseek", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32"}
GROUP = 32


def write_checkpoint(directory, spec, salt):
    """The model filled by the rule, cast, quantised by mlx-lm and saved by it."""
    values = copy.deepcopy(spec["config"])
    values["architectures"] = [f"{CLASSES[values['model_type']]}ForCausalLM"]
    model_class, args_class = mlx_utils._get_classes(values)
    model = model_class(args_class.from_dict(values))
    weights = {n: mx.array(v) for n, v in fill(salt, values).items()}
    model.load_weights(list(model.sanitize(weights).items()))
    model.set_dtype(base.DTYPES[spec["dtype"]])
    config = values
    if spec["bits"]:
        model, config = mlx_utils.quantize_model(model, values, GROUP, spec["bits"])
    mlx_utils.save_model(directory, model)
    mlx_utils.save_config(config, directory / "config.json")
    (directory / "model.safetensors.index.json").unlink()
    return values


def exact_weights(model, cfg):
    """Published names -> float64 values, decoded from the packed bytes by our own code."""
    flat = {k: np.array(v.astype(mx.float32) if v.dtype == mx.bfloat16 else v) for k, v in tree_flatten(model.parameters())}
    modules = dict(model.named_modules())
    out, by_head = {}, {}
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
            for e in range(cfg["n_routed_experts"]):
                out[f"{prefix}experts.{e}.{matrix}"] = value[e].astype(np.float64)
        elif "embed_q" in name or "unembed_out" in name:
            by_head[path] = value.astype(np.float64)
        else:
            out[name] = value.astype(np.float64)
    for path, k in by_head.items():
        if path.endswith("embed_q") and not path.endswith("unembed_q"):
            prefix = path.removesuffix("embed_q")
            joined = np.concatenate([k.swapaxes(1, 2), by_head[prefix + "unembed_out"]], axis=1)
            out[prefix + "kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    return out


def record(directory, cfg, exact, name, ids):
    model = base.load(directory)
    logits = base.full_logits(model, ids)
    plain, cached = base.greedy(model, ids, False), base.greedy(model, ids, True)
    assert plain[0] == cached[0], f"{directory}: {name}: cached and uncached differ"
    out = tiny.prompt_record(name, ids, logits, plain)
    error = np.abs(logits - deepseek_numpy.forward(cfg, exact, ids)).max()
    out["max_error_to_float64"] = tiny.short_float(error)
    out["min_choice_gap"] = tiny.short_float(deepseek_numpy.min_gap(cfg, exact, ids + plain[0]))
    return out


def make(name, directory, salt, final=True):
    spec = MLX_VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    cfg = write_checkpoint(directory, spec, salt)
    exact = exact_weights(base.load(directory), cfg)
    long = 80 if cfg.get("rope_scaling") else 24
    prompts = [(label, tiny.prompt(salt, label, n, cfg["vocab_size"])) for label, n in (("short", 7), ("long", long))]
    if not final and not deepseek_numpy.promising(cfg, exact, [ids for _, ids in prompts]):
        return ["numpy"]
    records = [record(directory, cfg, exact, *p) for p in prompts]
    bad = base.complaints(records)
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    assert all(r["max_error_to_float64"] < 1e-3 for r in records), f"{name}: far from the float64 computation"
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
    """mlx-lm on the checkpoints of make_deepseek.py, through their legacy configs where they have one."""
    out = {"reference": base.REFERENCE, "variants": {}}
    for name in VARIANTS:
        directory = DEEPSEEK / name
        golden = json.loads((directory / "golden.json").read_text())
        legacy, entry = directory / "config.legacy.json", {}
        with tempfile.TemporaryDirectory() as temp:
            (Path(temp) / "config.json").symlink_to(legacy if legacy.exists() else directory / "config.json")
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
    tiny.write_json(DEEPSEEK / "cross_check.json", out)


def main(arguments):
    if "--cross-check" in arguments:
        return cross_check()
    for name in [a for a in arguments if not a.startswith("--")] or list(MLX_VARIANTS):
        if "--search" not in arguments:
            make(name, DEEPSEEK / name, MLX_VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next((s for s in range(1, 20000) if not make(name, Path(temp) / "m", s, final=False)), None)
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
