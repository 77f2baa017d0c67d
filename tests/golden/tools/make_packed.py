"""Writes the goldens of packed_variants.py: tiny checkpoints that packing.py packs, with what transformers
computes on the weights that they decode to.

    python make_packed.py                 every variant
    python make_packed.py v4-4bit         only these
    python make_packed.py --search NAME   print the first good salts

Run it in the environment of requirements.txt. See README.md.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import make_deepseek as deepseek
import make_gemma as gemma
import make_llama_newer as newer
import make_qwen as qwen
import make_qwen_next as qwen_next
import packing
import reference_torch as ref
import tiny
from gemma_variants import fill as gemma_fill
from packed_variants import VARIANTS

#: make_qwen_next asks for more of its own goldens.
tiny.GREEDY_TOKENS = 12
GROUP, BITS, FP8_BLOCK = 32, 4, 16
FOLDERS = dict(llama="llama", gemma="gemma", qwen="qwen", qwen_next="qwen", deepseek="deepseek")
#: A tenth of a test's tolerance, relative to the range.
MAX_FLOAT64_ERROR = 1e-5
#: How transformers unpacks 4-bit experts: another reading of what packing.py wrote.
FP4 = Fp8Dequantize(None)
#: Never packed, whatever their shape.
FLOATS = re.compile(r"norm|conv1d|ape$|hc_|_scale$|tid2eid|vision|projector")


def write_llama(directory, spec, salt):
    newer.write_checkpoint(directory, spec, salt)


def write_gemma(directory, spec, salt):
    shapes = gemma.published_shapes(spec["config"])
    values = {name: gemma_fill(tiny, salt, name, shape, True) for name, shape in shapes.items()}
    gemma.write_directory(directory, spec["config"], torch.float32, values)


def write_qwen(directory, spec, salt):
    qwen.write_safetensors(directory, spec, qwen.filled(salt, spec["config"]))


def write_qwen_next(directory, spec, salt):
    qwen_next.write_config(directory, spec)
    tensors = qwen_next.published(qwen_next.model_of(spec, salt), spec)
    tensors.pop("mtp.norm.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_deepseek(directory, spec, salt):
    tensors, _ = deepseek.encoded({"dtype": "F32"}, deepseek.fill(salt, spec["config"]))
    deepseek.write_checkpoint(directory, {"dtype": "F32", "config": spec["config"]}, tensors)


WRITE = dict(llama=write_llama, gemma=write_gemma, qwen=write_qwen, qwen_next=write_qwen_next, deepseek=write_deepseek)


def is_fp4(spec, name):
    return "fp4" in spec and bool(re.search(spec["fp4"], name))


def wanted(spec, name, value):
    """Whether a tensor is packed."""
    if value.ndim != 2 or not value.is_floating_point() or FLOATS.search(name) or not name.endswith(".weight"):
        return False
    if spec["form"] == "fp8":
        return bool(re.search(spec["fp8"], name)) or is_fp4(spec, name)
    return value.shape[1] % GROUP == 0 and bool(re.search(spec.get("pack", ""), name))


def pack(spec, name, value):
    value = value.float().numpy()
    if is_fp4(spec, name):
        parts, exact = packing.fp4(value)
        assert np.array_equal(FP4._dequantize_one(*parts.values(), torch.float32).numpy(), exact), name
        return parts, exact
    if spec["form"] == "fp8":
        return packing.fp8(value, FP8_BLOCK, spec.get("published_v4", False))
    return packing.mxfp4(value) if spec["form"] == "mxfp4" else packing.affine(value, BITS, GROUP, spec["dtype"])


def split_experts(tensors):
    """Stacked experts, gate and up joined -> a tensor for each matrix, as published in 8-bit floats."""
    out = {}
    for name, value in tensors.items():
        base, _, last = name.rpartition(".")
        for e in range(value.shape[0]) if base.endswith(".experts") else ():
            if last == "down_proj":
                out[f"{base}.{e}.down_proj.weight"] = value[e].clone()
            else:
                gate, up = value[e].chunk(2)
                out[f"{base}.{e}.gate_proj.weight"], out[f"{base}.{e}.up_proj.weight"] = gate.clone(), up.clone()
        if not base.endswith(".experts"):
            out[name] = value
    return out


def stack_experts(tensors):
    """`experts.0.w1.weight` and its parts -> `switch_mlp.gate_proj.weight`, as mlx-lm names stacks."""
    out, stacks = {}, {}
    for name, value in tensors.items():
        found = re.fullmatch(r"(.*)\.experts\.(\d+)\.(w\d)\.(\w+)", name)
        if not found:
            out[name] = value
            continue
        at, e, part, kind = found.groups()
        matrix = dict(w1="gate_proj", w2="down_proj", w3="up_proj")[part]
        stacks.setdefault(f"{at}.switch_mlp.{matrix}.{kind}", {})[int(e)] = value
    return out | {name: torch.stack([rows[e] for e in sorted(rows)]) for name, rows in stacks.items()}


def quantization(spec):
    """The words of config.json."""
    if spec["form"] == "fp8":
        block = [FP8_BLOCK, FP8_BLOCK]
        method = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=block)
        words = dict(quantization_config=method | (dict(scale_fmt="ue8m0") if spec.get("published_v4") else {}))
        return words | (dict(expert_dtype="fp4") if "fp4" in spec else {})
    return dict(quantization=dict(group_size=GROUP, bits=BITS, mode=spec["form"]))


def write(directory, workspace, spec, salt):
    """The packed checkpoint in `directory`, and in `workspace` the floats that it means."""
    WRITE[spec["line"]](workspace, spec | dict(dtype="F32"), salt)
    held = load_file(workspace / "model.safetensors")
    if spec.get("unfuse"):
        held = split_experts(held)
    stored, decoded = {}, {}
    for name, value in held.items():
        if wanted(spec, name, value):
            parts, exact = pack(spec, name, value)
            decoded[name] = torch.from_numpy(np.ascontiguousarray(exact)).float()
            stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
            continue
        keep = not value.is_floating_point() or deepseek.IN_F32.search(name) and spec["line"] == "deepseek"
        stored[name] = value if keep else value.to(packing.HALVES[spec["dtype"]])
        decoded[name] = stored[name].float() if value.is_floating_point() else value
    if spec.get("stack"):
        stored = stack_experts(stored)
    save_file(decoded, workspace / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt" if spec["form"] == "fp8" else "mlx"})
    config = json.loads((workspace / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "dtype" in part:
            part["dtype"] = str(packing.HALVES[spec["dtype"]]).removeprefix("torch.")
    tiny.write_json(directory / "config.json", config | quantization(spec))


def steady(model, spec, ids):
    """A cheap look: whether every greedy step is decided clearly, with enough different tokens."""
    ids, start = list(ids), len(ids)
    for _ in range(tiny.GREEDY_TOKENS):
        row = ref.full_logits(model, ids)[-1]
        if tiny.margin(row) < spec["margin"] * np.ptp(row):
            return False
        ids.append(int(row.argmax()))
    return len(set(ids[start:])) >= 4


def complaints(spec, records):
    out = []
    for r in records:
        if not r["cached_agrees"]:
            out.append(f"{r['name']}: cached and uncached differ")
        if r.get("min_expert_margin", 1.0) < 1e-3:
            out.append(f"{r['name']}: expert margin {r['min_expert_margin']:.5f}")
        if r["max_error_to_float64"] > MAX_FLOAT64_ERROR * np.ptp(r["last_logits"]):
            out.append(f"{r['name']}: {r['max_error_to_float64']} from double precision")
    return out


def run(directory, workspace, spec, salt):
    """Records of both prompts, or none where a step is not clear."""
    write(directory, workspace, spec, salt)
    prompts = [(k, tiny.prompt(salt, k, spec[k], spec["config"]["vocab_size"])) for k in ("short", "long")]
    model = ref.load(workspace)
    if not all(steady(model, spec, ids) for _, ids in prompts):
        return None
    records = [ref.record(lambda: ref.load(workspace), *p) for p in prompts]
    double = ref.load(workspace).double()
    for r in records:
        exact = ref.full_logits(double, r["ids"])[-1]
        r["max_error_to_float64"] = tiny.short_float(np.abs(exact - np.array(r["last_logits"])).max())
    return records


def make(name, directory, salt, final=True):
    spec = VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        records = run(directory, Path(temp), spec, salt)
    bad = ["margin"] if records is None else complaints(spec, records)
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": ref.REFERENCE | dict(weights="decoded by packing.py"),
        "weights": {"form": spec["form"], "dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    worst = min(r["min_relative_margin"] for r in records)
    error = max(r["max_error_to_float64"] for r in records)
    print(f"{name:18} salt {salt:4} folder {size:7} margin {worst:.3f} f64 {error:.1e}", flush=True)


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or list(VARIANTS):
        if "--search" not in arguments:
            make(name, tiny.GOLDEN / FOLDERS[VARIANTS[name]["line"]] / name, VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next((s for s in range(1, 3000) if not make(name, Path(temp), s, final=False)), None)
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
