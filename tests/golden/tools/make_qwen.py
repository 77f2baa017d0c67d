"""Writes tests/golden/qwen/<variant>/ for the checkpoints made by transformers and by `gguf`.

    python make_qwen.py                 every variant of these two kinds in qwen_variants.py
    python make_qwen.py qwen3 gguf-qwen3
    python make_qwen.py --search NAME...    print the first good salts

Run it in the environment of requirements.txt. See README.md.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

import gguf_tokenizer
import make_llama
import qwen_numpy
import reference_torch as ref
import tiny
from make_llama_gguf import against_transformers_loader, read_gguf, tensor_facts
from qwen_variants import BLOCKS, GGUF_VARIANTS, VARIANTS, is_sparse, shapes

QWEN = tiny.GOLDEN / "qwen"
ARCHITECTURES = {"qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


def filled(salt, cfg):
    return {n: tiny.fill(salt, n, s, cfg["tie_word_embeddings"]) for n, s in shapes(cfg).items()}


def stored(values, dtype):
    """Values as the file will hold them, float64."""
    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    return {k: torch.from_numpy(v).to(kind).double().numpy() for k, v in values.items()}


def fuse_experts(tensors, cfg):
    """Published per-expert tensors -> the stacked tensors transformers 5 holds in memory."""
    out = {k: v for k, v in tensors.items() if ".experts." not in k}
    for layer in range(cfg["num_hidden_layers"]):
        if not is_sparse(cfg, layer):
            continue
        p = f"model.layers.{layer}.mlp.experts."
        part = {
            n: [tensors[f"{p}{e}.{n}_proj.weight"] for e in range(cfg["num_experts"])] for n in ("gate", "up", "down")
        }
        out[p + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(part["gate"], part["up"])])
        out[p + "down_proj"] = torch.stack(part["down"])
    return out


def write_safetensors(directory, spec, values):
    config = make_llama.config_object(spec["config"])
    config.dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[spec["dtype"]]
    config.save_pretrained(directory)
    tensors = {k: torch.from_numpy(np.ascontiguousarray(v)).to(config.dtype) for k, v in values.items()}
    if spec.get("fused_experts"):
        tensors = fuse_experts(tensors, spec["config"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_legacy(directory, name, spec):
    """The config as transformers 4 and the publishers wrote it."""
    current = json.loads((directory / "config.json").read_text())
    legacy = make_llama.legacy_config(name, spec["config"], current)
    if "num_local_experts" in legacy:
        legacy["num_experts"] = legacy.pop("num_local_experts")
    for key in spec.get("legacy_drops", ()):
        legacy.pop(key, None)
    tiny.write_json(directory / "config.legacy.json", dict(sorted(legacy.items())))


def gguf_tensors(values, cfg):
    """Published names -> names of the `gguf` package, as llama.cpp's converter asks it."""
    arch = gguf.MODEL_ARCH[ARCHITECTURES[cfg["model_type"]].upper()]
    names = gguf.get_tensor_name_map(arch, cfg["num_hidden_layers"])
    out = {}
    for name, value in values.items():
        if ".experts." in name:
            head, tail = name.split(".experts.")
            name = f"{head}.experts.{tail.split('.', 1)[1]}"
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target, name
        out.setdefault(target, []).append(value)
    return {k: np.stack(v) if "_exps." in k else v[0].squeeze() for k, v in out.items()}


def kind_of(name, value):
    matrix = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return "F32" if value.ndim == 1 else BLOCKS.get(matrix, "Q8_0")


def write_gguf(path, name, spec, values):
    cfg = spec["config"]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[cfg["model_type"]])
    writer.add_name(name)
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_head_count(cfg["num_attention_heads"])
    writer.add_head_count_kv(cfg["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_rope_freq_base(cfg["rope_theta"])
    if cfg.get("head_dim"):
        writer.add_key_length(cfg["head_dim"])
        writer.add_value_length(cfg["head_dim"])
    if cfg.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(cfg["rope_scaling"]["factor"])
        writer.add_rope_scaling_orig_ctx_len(cfg["rope_scaling"]["original_max_position_embeddings"])
    if "num_experts" in cfg:
        writer.add_expert_count(cfg["num_experts"])
        writer.add_expert_used_count(cfg["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(cfg["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in cfg:
        writer.add_expert_shared_feed_forward_length(cfg["shared_expert_intermediate_size"])
    gguf_tokenizer.write_metadata(writer, "qwen2", False)
    for tensor, value in gguf_tensors(values, cfg).items():
        kind = kind_of(tensor, value)
        writer.add_tensor(tensor, gguf.quants.quantize(value, Type[kind]), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded_by_gguf(values, cfg):
    """Published names -> the values that the file holds, float64."""
    held = {}
    for name, value in gguf_tensors(values, cfg).items():
        kind = Type[kind_of(name, value)]
        held[name] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind).astype(np.float64)
    out = {}
    for name, value in values.items():
        (target,) = gguf_tensors({name: value}, cfg)
        expert = int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None
        out[name] = (held[target] if expert is None else held[target][expert]).reshape(value.shape)
    return out


def spec_of(name):
    return VARIANTS.get(name) or GGUF_VARIANTS[name]


def prompts_of(name, salt):
    spec = spec_of(name)
    return [(label, tiny.prompt(salt, label, spec[label], spec["config"]["vocab_size"])) for label in ("short", "long")]


def make(name, directory, salt, final=True):
    spec, cfg = spec_of(name), spec_of(name)["config"]
    values = filled(salt, cfg)
    is_gguf = name in GGUF_VARIANTS
    exact = rounded_by_gguf(values, cfg) if is_gguf else stored(values, spec["dtype"])
    prompts = prompts_of(name, salt)
    if not final and not qwen_numpy.promising(cfg, exact, [ids for _, ids in prompts]):
        return ["numpy"]
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        source = directory
        if is_gguf:
            write_gguf(directory / "model.gguf", name, spec, values)
            source = Path(temp)
            write_safetensors(source, spec | dict(dtype="F32"), {k: v.astype(np.float32) for k, v in exact.items()})
        else:
            write_safetensors(source, spec, values)
        records = [ref.record(lambda: ref.load(source), *p) for p in prompts]
        contrast = make_llama.contrasts(source, spec, records)
    bad = make_llama.complaints(records, contrast)
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    for r in records:
        error = float(np.abs(qwen_numpy.forward(cfg, exact, r["ids"])[-1] - np.array(r["last_logits"])).max())
        assert error < 1e-4, error
        r["max_error_to_float64"] = tiny.short_float(error)
    finish(name, directory, salt, records, contrast)


def finish(name, directory, salt, records, contrast):
    spec, is_gguf = spec_of(name), name in GGUF_VARIANTS
    weights = directory / ("model.gguf" if is_gguf else "model.safetensors")
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": ref.REFERENCE,
        "weights": {"dtype": "GGUF" if is_gguf else spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
    }
    if contrast:
        golden["contrast_in_std"] = contrast
    second = ""
    if is_gguf:
        golden["config"] = spec["config"]
        golden["tensors"] = tensor_facts(read_gguf(weights))
        second = f" hf loader {against_transformers_loader(weights, records)}"
    else:
        write_legacy(directory, name, spec)
        make_llama.check_legacy(directory, records)
    golden["prompts"] = records
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    error = max(r["max_error_to_float64"] for r in records)
    worst = min(r["min_relative_margin"] for r in records)
    print(f"{name:18} salt {salt:4} folder {size:6} margin {worst:.3f} f64 {error:.1e}{second}", flush=True)


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or [*VARIANTS, *GGUF_VARIANTS]:
        if "--search" not in arguments:
            make(name, QWEN / name, spec_of(name)["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next((s for s in range(1, 5000) if not make(name, Path(temp), s, final=False)), None)
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
