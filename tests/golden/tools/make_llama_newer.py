"""Writes tests/golden/llama/<variant>/ for the newer architectures that transformers has.

    python make_llama_newer.py                   every variant of llama_newer_variants.py
    python make_llama_newer.py llama4 mistral3   only these
    python make_llama_newer.py --search NAME...  print the first salts whose margins are comfortable

Tensors are named by transformers' `save_pretrained` and filled by the rule of README.md. Run it in
the environment of requirements.txt.
"""

import copy
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import reference_torch as ref
import tiny
import torch
import transformers
from llama_newer_variants import LLAMA4_VISION, PIXTRAL, VARIANTS
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

MIN_RELATIVE_MARGIN = 0.01
MIN_CONTRAST = 0.02
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def model_class(spec):
    wrapper = spec.get("wrapper")
    if wrapper == "mistral3":
        return transformers.Mistral3ForConditionalGeneration
    if wrapper == "llama4":
        return transformers.Llama4ForConditionalGeneration
    if spec["config"]["model_type"] == "llama4_text":
        return transformers.Llama4ForCausalLM
    return transformers.AutoModelForCausalLM


def config_object(spec, changes=None):
    values = copy.deepcopy(spec["config"] | (changes or {}))
    wrapper = spec.get("wrapper")
    if wrapper == "mistral3":
        config = transformers.Mistral3Config(
            vision_config=copy.deepcopy(PIXTRAL),
            text_config=values,
            image_token_index=3,
            tie_word_embeddings=values["tie_word_embeddings"],
        )
    elif wrapper == "llama4":
        config = transformers.Llama4Config(
            vision_config=copy.deepcopy(LLAMA4_VISION), text_config=values, image_token_index=3
        )
    else:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.dtype = torch.float32
    return config


def build(spec, config):
    kind = model_class(spec)
    if kind is transformers.AutoModelForCausalLM:
        return kind.from_config(config)
    return kind(config)


def write_checkpoint(directory, spec, salt):
    """config.json and model.safetensors under the names that transformers publishes."""
    config = config_object(spec)
    config.dtype = DTYPES[spec["dtype"]]
    tied = spec["config"]["tie_word_embeddings"]
    with tempfile.TemporaryDirectory() as temp:
        torch.manual_seed(0)
        build(spec, config_object(spec)).save_pretrained(temp)
        with safe_open(Path(temp) / "model.safetensors", "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        (directory / "config.json").write_bytes((Path(temp) / "config.json").read_bytes())
    current = json.loads((directory / "config.json").read_text())
    for part in (current, current.get("text_config", {}), current.get("vision_config", {})):
        if "dtype" in part:
            part["dtype"] = str(DTYPES[spec["dtype"]]).removeprefix("torch.")
    tiny.write_json(directory / "config.json", current)
    tensors = {
        name: torch.from_numpy(tiny.fill(salt, name, shape, tied)).to(DTYPES[spec["dtype"]])
        for name, shape in sorted(shapes.items())
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return current


def load(directory, spec, config=None):
    model, info = model_class(spec).from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], f"{directory}: {kind} {info[kind]}"
    assert all(p.dtype == torch.float32 for p in model.parameters())
    # The wrapper's own `forward` fails in 5.24.0 (it asks the text output for `image_outputs`).
    return (model.language_model if spec.get("wrapper") == "llama4" else model).eval()


def router_margin(make_model, ids):
    """Smallest gap of router logits between the last expert taken and the first one left out."""
    gaps, hooks, model = [], [], make_model()
    for module in model.modules():
        if type(module).__name__ == "Llama4Router":

            def hook(router, _inputs, output):
                ranked = np.sort(output[1].numpy(), axis=-1)[:, ::-1]
                gaps.append(float((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min()))

            hooks.append(module.register_forward_hook(hook))
    ref.full_logits(model, ids)
    return min(gaps) if gaps else None


def record(make_model, name, ids):
    out = ref.record(make_model, name, ids)
    gap = router_margin(make_model, ids + out["greedy"])
    if gap is not None:
        out["min_expert_margin"] = tiny.short_float(gap)
    return out


def legacy(values):
    """The spelling of transformers 4: rope_theta and rope_scaling side by side."""
    out = {k: v for k, v in values.items() if k not in ("rope_parameters", "dtype", "transformers_version")}
    settings = copy.deepcopy(values.get("rope_parameters"))
    if settings:
        out["rope_theta"] = settings.pop("rope_theta")
        out["rope_scaling"] = settings if settings.get("rope_type") != "default" else None
    if "text_config" in out:
        out["text_config"] = legacy(out["text_config"])
    if values.get("model_type") == "llama4_text":
        # As published: a number for the switch, and no lists that follow from other keys.
        out["attn_temperature_tuning"] = 4
        out.pop("layer_types", None)
    return dict(sorted(out.items()))


def complaints(records):
    out = []
    for r in records:
        if r["min_relative_margin"] < MIN_RELATIVE_MARGIN:
            out.append(f"{r['name']}: margin {r['min_relative_margin']:.4f} of the logit range")
        if len(set(r["greedy"])) < 4:
            out.append(f"{r['name']}: only {len(set(r['greedy']))} distinct tokens")
        if r.get("min_expert_margin", 1.0) < 1e-3:
            out.append(f"{r['name']}: expert margin {r['min_expert_margin']:.5f}")
        if not r["cached_agrees"]:
            out.append(f"{r['name']}: the cache gives other tokens")
    return out


def contrasts(directory, spec, records):
    out = {}
    for label, change in spec["controls"].items():
        model = load(directory, spec, config_object(spec, change))
        out[label] = {}
        for r in records:
            golden = np.array(r["last_logits"], dtype=np.float64)
            logits = ref.full_logits(model, r["ids"])[-1]
            out[label][r["name"]] = tiny.short_float(np.abs(logits - golden).max() / golden.std())
    return out


def make(name, directory, salt, final=True):
    spec = VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    current = write_checkpoint(directory, spec, salt)
    vocab = spec["config"]["vocab_size"]
    model = load(directory, spec)
    records = []
    for label in ("short", "long"):
        ids = tiny.prompt(salt, label, spec[label], vocab)
        # A cheap look first: most salts fall here.
        chosen, rows = ref.greedy_uncached(model, ids, tiny.GREEDY_TOKENS)
        if min(tiny.margin(r) / np.ptp(r) for r in rows) < MIN_RELATIVE_MARGIN and not final:
            return [f"{label}: margin"]
        records.append(record(lambda: model, label, ids))
    bad = complaints(records)
    if bad and not final:
        return bad
    contrast = contrasts(directory, spec, records)
    for label, change in contrast.items():
        if max(change.values()) < MIN_CONTRAST:
            bad.append(f"control '{label}' changes only {change} std")
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    tiny.write_json(directory / "config.legacy.json", legacy(current))
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
    size = sum(f.stat().st_size for f in directory.iterdir())
    worst = min(r["min_relative_margin"] for r in records)
    print(f"{name:20} salt {salt:3} weights {weights.stat().st_size:7} folder {size:7} margin {worst:.3f} {contrast}")


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or list(VARIANTS):
        if "--search" not in arguments:
            make(name, tiny.LLAMA / name, VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next(s for s in range(1, 3000) if not make(name, Path(temp) / "m", s, final=False))
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
