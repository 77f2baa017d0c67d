"""Writes tests/golden/gemma/<variant>/ for the safetensors and GGUF checkpoints made with transformers.

    python make_gemma.py                    every variant of gemma_variants.py
    python make_gemma.py gemma3 gguf-gemma  only these
    python make_gemma.py --search NAME...   print the first salts whose margins are comfortable

Run it in the environment of requirements.txt. See README.md.
"""

import copy
import json
import os
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import reference_torch as ref
import tiny
from gemma_variants import GGUF_VARIANTS, MIN_RELATIVE_MARGIN, TYPES, VARIANTS, fill
from make_llama import MIN_CONTRAST, MIN_DISTINCT_TOKENS, check_legacy, config_object, contrasts
from make_llama_gguf import against_transformers_loader, encode, read_gguf, tensor_facts

GEMMA = tiny.GOLDEN / "gemma"

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
NAMES_1 = NAMES | {"ffn_norm": "post_attention_layernorm"}
NAMES_2 = NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def text_config(values):
    return values.get("text_config", values)


def prompts(spec, salt):
    vocab = text_config(spec["config"])["vocab_size"] - 1  # the last id is the image token of gemma3-nested
    return [(label, tiny.prompt(salt, label, spec[label], vocab)) for label in ("short", "long")]


def published_shapes(values):
    """Names and shapes as transformers writes them to disk."""
    with tempfile.TemporaryDirectory() as temp:
        AutoModelForCausalLM.from_config(config_object(values)).save_pretrained(temp)
        with safe_open(Path(temp) / "model.safetensors", "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def write_directory(directory, values, dtype, tensors):
    config = config_object(values)
    config.dtype = dtype
    config.save_pretrained(directory)
    tensors = {k: torch.from_numpy(np.ascontiguousarray(v)).to(dtype) for k, v in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def legacy_config(spec, current):
    """The same config as transformers 4 wrote it: bases and scaling beside each other."""
    note = spec.get("legacy", {})
    out = {k: v for k, v in current.items() if k not in ("dtype", "transformers_version")}
    text, values = text_config(out), text_config(spec["config"])
    for key in ("rope_parameters", "dtype", "_sliding_window_pattern"):
        text.pop(key, None)
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"):
        if key in values:
            text[key] = copy.deepcopy(values[key])
    for key in note.get("drop", ()):
        text.pop(key, None)
    text |= note.get("add", {})
    out["torch_dtype"] = current["dtype"]
    out["transformers_version"] = "4.46.0"
    return dict(sorted(out.items()))


def to_gguf(published, values):
    """Published names and values -> GGUF names and values: norms plus one, no change of order."""
    names = NAMES_1 if values["model_type"] == "gemma" else NAMES_2
    names = {v: k for k, v in names.items()}
    top = {v: k for k, v in TOP.items()}
    out = {}
    for name, value in published.items():
        path = name.removesuffix(".weight")
        if path in top:
            new = top[path]
        else:
            _, _, layer, rest = path.split(".", 3)
            new = f"blk.{layer}.{names[rest]}"
        out[new + ".weight"] = value + np.float32(1) if "norm" in name else value
    return out


def from_gguf(held, values):
    names = NAMES_1 if values["model_type"] == "gemma" else NAMES_2
    out = {}
    for name, value in held.items():
        path = name.removesuffix(".weight")
        if path in TOP:
            new = TOP[path]
        else:
            _, layer, rest = path.split(".")
            new = f"model.layers.{layer}.{names[rest]}"
        out[new + ".weight"] = value - np.float32(1) if "norm" in name else value
    return out


def write_gguf(path, name, values, tensors):
    """The keys that `GemmaModel`, `Gemma2Model` and `Gemma3Model` of the converter write."""
    arch = values["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_vocab_size(values["vocab_size"])  # for the loader of transformers alone
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_rope_freq_base(values["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(values["rope_scaling"]["factor"])
    if arch != "gemma":
        writer.add_sliding_window(values["sliding_window"])
    for tensor, value in to_gguf(tensors, values).items():
        kind = "F32" if "norm" in tensor else TYPES[tensor.split(".")[-2]]
        writer.add_tensor(tensor, encode(value, kind), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def steady(model, spec, salt):
    """Whether greedy decoding has comfortable margins."""
    for _, ids in prompts(spec, salt):
        ids, chosen = list(ids), set()
        for _ in range(tiny.GREEDY_TOKENS):
            row = ref.full_logits(model, ids)[-1]
            if tiny.margin(row) < MIN_RELATIVE_MARGIN * np.ptp(row):
                return False
            ids.append(int(row.argmax()))
            chosen.add(ids[-1])
        if len(chosen) < MIN_DISTINCT_TOKENS:
            return False
    return True


def complaints(records, contrast):
    """Why a salt is not good enough, beside `steady`; empty if it is."""
    bad = [f"{r['name']}: cached and uncached differ" for r in records if not r["cached_agrees"]]
    weak = {label: change for label, change in contrast.items() if max(change.values()) < MIN_CONTRAST}
    return bad + [f"control '{label}' changes only {change} std" for label, change in weak.items()]


def prepare(name, spec, salt, shapes, directory, workspace):
    """Writes the checkpoint; returns the folder that transformers can load."""
    values = spec["config"]
    tensors = {n: fill(tiny, salt, n, s) for n, s in shapes.items()}
    if name in VARIANTS:
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[spec["dtype"]]
        write_directory(directory, values, dtype, tensors)
        return directory, {}
    path = directory / "model.gguf"
    write_gguf(path, name, values, tensors)
    held = read_gguf(path)
    plain = from_gguf({n: v for n, (_, v) in held.items()}, values)
    write_directory(workspace, values, torch.float32, plain)
    return workspace, {"tensors": tensor_facts(held)}


def search(name, spec):
    shapes = published_shapes(spec["config"])
    with tempfile.TemporaryDirectory() as temp:
        directory, workspace = Path(temp) / "a", Path(temp) / "b"
        directory.mkdir(), workspace.mkdir()
        for salt in range(1, 3000):
            loadable, _ = prepare(name, spec, salt, shapes, directory, workspace)
            if not steady(ref.load(loadable), spec, salt):
                continue
            records = [ref.record(lambda: ref.load(loadable), *p) for p in prompts(spec, salt)]
            bad = complaints(records, contrasts(loadable, spec, records))
            if not bad:
                print(f"{name}: salt {salt}", flush=True)
                return
            print(f"{name}: {salt} {bad}", flush=True)
    print(f"{name}: nothing found")


def make(name, spec):
    directory = GEMMA / name
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        shapes = published_shapes(spec["config"])
        loadable, facts = prepare(name, spec, spec["salt"], shapes, directory, Path(temp))
        records = [ref.record(lambda: ref.load(loadable), *p) for p in prompts(spec, spec["salt"])]
        contrast = contrasts(loadable, spec, records)
        bad = complaints(records, contrast)
        assert not bad and steady(ref.load(loadable), spec, spec["salt"]), f"{name}: {bad}"
    second = ""
    if name in VARIANTS:
        current = json.loads((directory / "config.json").read_text())
        tiny.write_json(directory / "config.legacy.json", legacy_config(spec, current))
        check_legacy(directory, records)
        weights = {"dtype": spec["dtype"], "sha256": tiny.sha256(directory / "model.safetensors")}
    else:
        weights = {"sha256": tiny.sha256(directory / "model.gguf")}
        facts = {"config": spec["config"]} | facts
        second = against_transformers_loader(directory / "model.gguf", records)
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": ref.REFERENCE,
        "weights": weights | {"salt": spec["salt"]},
    }
    if contrast:
        golden["contrast_in_std"] = contrast
    tiny.write_json(directory / "golden.json", golden | facts | {"prompts": records})
    size = sum(f.stat().st_size for f in directory.iterdir())
    worst = min(r["min_relative_margin"] for r in records)
    print(f"{name:18} salt {spec['salt']:4} folder {size:7} margin {worst:.3f} {second}", flush=True)


def main(arguments):
    os.umask(0o022)
    table = VARIANTS | GGUF_VARIANTS
    for name in [a for a in arguments if not a.startswith("--")] or list(table):
        (search if "--search" in arguments else make)(name, table[name])


if __name__ == "__main__":
    main(sys.argv[1:])
