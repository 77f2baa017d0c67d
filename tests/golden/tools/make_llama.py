"""Writes tests/golden/llama/<variant>/ for the safetensors checkpoints made by transformers.

    python make_llama.py                   every variant of llama_variants.py
    python make_llama.py rope-yarn mixtral only these
    python make_llama.py --search NAME...  print the first salts whose margins are comfortable

Run it in the environment of requirements.txt. See README.md.
"""

import copy
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import reference_numpy
import reference_torch as ref
import tiny
from llama_variants import LEGACY_NOTE, VARIANTS

#: A control closer to the golden than this share of the logits' standard deviation proves nothing.
MIN_CONTRAST = 0.02
MIN_DISTINCT_TOKENS = 4


def config_object(values):
    values = copy.deepcopy(values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = torch.float32
    return config


def legacy_config(name, values, current):
    """The same config as transformers 4 wrote it: rope_theta and rope_scaling side by side."""
    note = LEGACY_NOTE.get(name, {})
    out = {k: v for k, v in current.items() if k not in ("rope_parameters", "dtype", "transformers_version")}
    out["rope_theta"] = values["rope_theta"]
    scaling = copy.deepcopy(values.get("rope_scaling"))
    if scaling and note.get("type_key"):
        scaling = {"type": scaling.pop("rope_type"), **scaling}
    if scaling and note.get("original_outside"):
        out["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    out["rope_scaling"] = scaling
    out["torch_dtype"] = current["dtype"]
    out["transformers_version"] = "4.46.0"
    for key in note.get("drop", ()):
        out.pop(key, None)
    return dict(sorted(out.items()))


def fuse_experts(tensors, cfg):
    """Published per-expert tensors -> the stacked tensors transformers 5 holds in memory."""
    out = {k: v for k, v in tensors.items() if ".experts." not in k}
    for layer in range(cfg["num_hidden_layers"]):
        moe, mlp = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        out[mlp + "gate.weight"] = out.pop(moe + "gate.weight")
        part = {
            w: [tensors[f"{moe}experts.{e}.{w}.weight"] for e in range(cfg["num_local_experts"])]
            for w in ("w1", "w2", "w3")
        }
        out[mlp + "experts.gate_up_proj"] = torch.stack([torch.cat(p) for p in zip(part["w1"], part["w3"])])
        out[mlp + "experts.down_proj"] = torch.stack(part["w2"])
    return out


def write_checkpoint(directory, spec, salt):
    """config.json and model.safetensors; returns the config as written."""
    values = spec["config"]
    config = config_object(values)
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[spec["dtype"]]
    config.dtype = dtype
    config.save_pretrained(directory)
    tensors = {k: torch.from_numpy(v).to(dtype) for k, v in tiny.fill_all(salt, values).items()}
    if spec.get("fused_experts"):
        tensors = fuse_experts(tensors, values)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return json.loads((directory / "config.json").read_text())


def prompts(name, spec, salt):
    vocab = spec["config"]["vocab_size"]
    return [(label, tiny.prompt(salt, label, spec[label], vocab)) for label in ("short", "long")]


def contrasts(directory, spec, records):
    """Largest change of the last logits of each prompt under each control config."""
    out = {}
    for label, change in spec["controls"].items():
        config = config_object(spec["config"] | change)
        out[label] = {}
        for r in records:
            golden = np.array(r["last_logits"], dtype=np.float64)
            logits = ref.full_logits(ref.load(directory, config), r["ids"])[-1]
            out[label][r["name"]] = tiny.short_float(np.abs(logits - golden).max() / golden.std())
    return out


def check_legacy(directory, records):
    """transformers reads both spellings to bit-equal logits."""
    with tempfile.TemporaryDirectory() as temp:
        shutil.copy(directory / "config.legacy.json", Path(temp) / "config.json")
        shutil.copy(directory / "model.safetensors", temp)
        for record in records:
            logits = ref.full_logits(ref.load(temp), record["ids"])[-1]
            assert tiny.floats(logits) == record["last_logits"], f"{directory}: legacy config differs"


def add_float64_error(spec, salt, records):
    """Distance to an independent float64 computation, where that one knows the rotary rule."""
    if not reference_numpy.supports(spec["config"]):
        return
    stored = tiny.fill_all(salt, spec["config"])
    if spec["dtype"] == "BF16":
        stored = {k: torch.from_numpy(v).bfloat16().double().numpy() for k, v in stored.items()}
    for r in records:
        exact = reference_numpy.forward(spec["config"], stored, r["ids"])[-1]
        error = float(np.abs(exact - np.array(r["last_logits"])).max())
        assert error < 1e-4, f"float64 computation differs by {error}"
        r["max_error_to_float64"] = tiny.short_float(error)


def complaints(records, contrast):
    """Why a salt is not good enough; empty if it is."""
    out = []
    for r in records:
        if r["min_relative_margin"] < tiny.MIN_RELATIVE_MARGIN:
            out.append(f"{r['name']}: margin {r['min_relative_margin']:.4f} of the logit range")
        cached = r.get("greedy_cached_margins")
        if cached and min(cached) < tiny.MIN_RELATIVE_MARGIN * np.ptp(r["last_logits"]):
            out.append(f"{r['name']}: cached margin {min(cached):.4f}")
        if len(set(r["greedy"])) < MIN_DISTINCT_TOKENS:
            out.append(f"{r['name']}: only {len(set(r['greedy']))} distinct tokens")
        if r.get("min_expert_margin", 1.0) < 1e-3:
            out.append(f"{r['name']}: expert margin {r['min_expert_margin']:.5f}")
    for label, change in contrast.items():
        if max(change.values()) < MIN_CONTRAST:
            out.append(f"control '{label}' changes only {change} std")
    return out


def make(name, directory, salt, final=True):
    spec = VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    current = write_checkpoint(directory, spec, salt)
    records = [ref.record(lambda: ref.load(directory), *p) for p in prompts(name, spec, salt)]
    contrast = contrasts(directory, spec, records)
    bad = complaints(records, contrast)
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    tiny.write_json(directory / "config.legacy.json", legacy_config(name, spec["config"], current))
    check_legacy(directory, records)
    add_float64_error(spec, salt, records)
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": ref.REFERENCE,
        "weights": {"dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
    }
    if contrast:
        golden["contrast_in_std"] = contrast
    golden["prompts"] = records
    tiny.write_json(directory / "golden.json", golden)
    error = max(r.get("max_error_to_float64", 0.0) for r in records)
    worst = min(r["min_relative_margin"] for r in records)
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(
        f"{name:20} salt {salt:3} weights {weights.stat().st_size:7} folder {size:7} margin {worst:.3f} f64 {error:.1e}"
    )


def search(name):
    with tempfile.TemporaryDirectory() as temp:
        for salt in range(1, 2000):
            bad = make(name, Path(temp), salt, final=False)
            if not bad:
                print(f"{name}: salt {salt}", flush=True)
                return
    print(f"{name}: nothing found")


def main(arguments):
    os.umask(0o022)
    wanted = [a for a in arguments if not a.startswith("--")] or list(VARIANTS)
    for name in wanted:
        if "--search" in arguments:
            search(name)
        else:
            make(name, tiny.LLAMA / name, VARIANTS[name]["salt"])


if __name__ == "__main__":
    main(sys.argv[1:])
