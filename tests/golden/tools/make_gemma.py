"""Writes tests/golden/gemma/<variant>/ for the safetensors and GGUF checkpoints made with transformers.

    python make_gemma.py                    every variant of gemma_variants.py
    python make_gemma.py gemma3 gguf-gemma  only these
    python make_gemma.py --search NAME...   print the first salts whose margins are comfortable
    python make_gemma.py --check-mlx        run transformers on the decoded weights of mlx-gemma3n-* and mlx-gemma4-*

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
from gemma_variants import GGUF_VARIANTS, MIN_RELATIVE_MARGIN, MLX_VARIANTS, TYPES, VARIANTS, fill
from make_llama import MIN_CONTRAST, MIN_DISTINCT_TOKENS, check_legacy, config_object, contrasts
from make_llama_gguf import against_transformers_loader, encode, read_gguf, tensor_facts
from reference_numpy import dequantize_mlx

GEMMA = tiny.GOLDEN / "gemma"

#: Largest distance to double precision, relative to the range: a tenth of a test's tolerance.
MAX_FLOAT64_ERROR = 1e-5

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


#: gemma3n and gemma4 under llama.cpp's names, as the map of the `gguf` package has them.
ARCHS = {"gemma3n_text": gguf.MODEL_ARCH.GEMMA3N, "gemma4_text": gguf.MODEL_ARCH.GEMMA4}
STREAMS = {"altup_proj.weight": "altup_projections", "altup_unembd_proj.weight": "altup_unembed_projections"}


def is_plain(values):
    """Whether norms are stored as they are."""
    return values["model_type"] in ARCHS


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
    for key in ("rope_parameters", "per_layer_config", "dtype", "_sliding_window_pattern"):
        text.pop(key, None)
    for key in (
        "rope_theta",
        "rope_local_base_freq",
        "rope_scaling",
        "rope_parameters",
        "sliding_window_pattern",
        "global_head_dim",
        "num_global_key_value_heads",
    ):
        if key in values:
            text[key] = copy.deepcopy(values[key])
    for key in note.get("drop", ()):
        text.pop(key, None)
    text |= note.get("add", {})
    out["torch_dtype"] = current["dtype"]
    out["transformers_version"] = "4.46.0"
    return dict(sorted(out.items()))


def plain_to_gguf(published, values):
    """The same for gemma3n and gemma4: norms as they are; projections between streams in one tensor."""
    names = gguf.get_tensor_name_map(ARCHS[values["model_type"]], values["num_hidden_layers"])
    out = {}
    for name, value in published.items():
        if "altup_projections" in name or "altup_unembed_projections" in name:
            continue
        if name.endswith("router.scale") or name.endswith("per_expert_scale"):
            tensor = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            out[f"blk.{name.split('.')[2]}.{tensor}.scale"] = value
            continue
        out[names.get_name(name.removesuffix(".weight")) + ".weight"] = value
    for tensor, module in STREAMS.items():
        parts = [published.get(f"model.{module}.{n}.weight") for n in range(values.get("altup_num_inputs", 1) - 1)]
        if parts:
            out[tensor] = np.stack(parts)
    if values["model_type"] == "gemma4_text":
        half = values["global_head_dim"] // 2
        rotated = int(half * values["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        out["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)
    return out


def plain_from_gguf(held, published, values):
    """GGUF values under published names."""
    names = plain_to_gguf({n: n for n in published if "altup_proj" not in n and "altup_unembed" not in n}, values | dict(altup_num_inputs=1))
    out = {name: held[tensor] for tensor, name in names.items() if tensor != "rope_freqs.weight"}
    for tensor, module in STREAMS.items():
        for n, value in enumerate(held.get(tensor, ())):
            out[f"model.{module}.{n}.weight"] = value
    return out


def to_gguf(published, values):
    """Published names and values -> GGUF names and values: norms plus one, no change of order."""
    if is_plain(values):
        return plain_to_gguf(published, values)
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


def write_plain_keys(writer, values):
    """The keys that `Gemma3NModel` and `Gemma4Model` of the converter write."""
    sliding = [kind == "sliding_attention" for kind in values["layer_types"]]
    writer.add_sliding_window(values["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    if cap := values.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    writer.add_shared_kv_layers(values.get("num_kv_shared_layers", 0))
    writer.add_embedding_length_per_layer_input(values["hidden_size_per_layer_input"])
    if values["model_type"] == "gemma3n_text":
        writer.add_rope_freq_base(values["rope_theta"])
        writer.add_rope_freq_base_swa(values["rope_local_base_freq"])
        writer.add_head_count_kv(values["num_key_value_heads"])
        writer.add_key_length(values["head_dim"])
        writer.add_value_length(values["head_dim"])
        writer.add_feed_forward_length([values["intermediate_size"]] * len(sliding))
        writer.add_altup_active_idx(0)
        writer.add_altup_num_inputs(values["altup_num_inputs"])
        normal = torch.distributions.normal.Normal(0, 1)
        scales = [normal.icdf(torch.tensor(s, dtype=torch.float32)).item() for s in values["activation_sparsity_pattern"]]
        writer.add_activation_sparsity_scale(scales)
        return
    writer.add_rope_freq_base(values["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(values["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_key_length(values["global_head_dim"])
    writer.add_value_length(values["global_head_dim"])
    writer.add_key_length_swa(values["head_dim"])
    writer.add_value_length_swa(values["head_dim"])
    writer.add_rope_dimension_count(values["global_head_dim"])
    writer.add_rope_dimension_count_swa(values["head_dim"])
    width, kv_heads = values["intermediate_size"], values["num_key_value_heads"]
    if values.get("use_double_wide_mlp"):
        own = len(sliding) - values["num_kv_shared_layers"]
        width = [width if layer < own else 2 * width for layer in range(len(sliding))]
    writer.add_feed_forward_length(width)
    if full := values.get("num_global_key_value_heads"):
        kv_heads = [kv_heads if slides else full for slides in sliding]
    writer.add_head_count_kv(kv_heads)
    if values.get("enable_moe_block"):
        writer.add_expert_count(values["num_experts"])
        writer.add_expert_used_count(values["top_k_experts"])
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])


def encode_stack(value, kind):
    """`encode`, matrix by matrix."""
    return np.stack([encode(v, kind) for v in value]) if value.ndim == 3 else encode(value, kind)


def write_gguf(path, name, values, tensors):
    """The keys that `GemmaModel`, `Gemma2Model` and `Gemma3Model` of the converter write."""
    arch = values["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_vocab_size(values["vocab_size"])  # for the loader of transformers alone
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    if is_plain(values):
        write_plain_keys(writer, values)
    else:
        writer.add_feed_forward_length(values["intermediate_size"])
        writer.add_head_count_kv(values["num_key_value_heads"])
        writer.add_key_length(values["head_dim"])
        writer.add_value_length(values["head_dim"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_rope_freq_base(values["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(values["rope_scaling"]["factor"])
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(values["sliding_window"])
    for tensor, value in to_gguf(tensors, values).items():
        kind = "F32" if "norm" in tensor or value.ndim == 1 else TYPES.get(tensor.split(".")[-2], "F32")
        writer.add_tensor(tensor, encode_stack(value, kind), raw_dtype=Type[kind])
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
    for r in records:
        if r.get("max_error_to_float64", 0.0) > MAX_FLOAT64_ERROR * np.ptp(r["last_logits"]):
            bad.append(f"{r['name']}: {r['max_error_to_float64']} from double precision")
    weak = {label: change for label, change in contrast.items() if max(change.values()) < MIN_CONTRAST}
    return bad + [f"control '{label}' changes only {change} std" for label, change in weak.items()]


def write_nested(directory, spec, salt, workspace, tensors):
    """The text model as published: in text_config, beside towers, with what sharing layers do not use."""
    values = spec["config"]
    model_type = values["model_type"].removesuffix("_text")
    text = legacy_config(spec, json.loads((workspace / "config.json").read_text()))
    text = {k: v for k, v in text.items() if k not in ("architectures", "torch_dtype", "transformers_version")}
    tower = dict(hidden_size=8)
    config = dict(
        architectures=[f"Gem{model_type[3:]}ForConditionalGeneration"],
        model_type=model_type,
        dtype="float32",
        tie_word_embeddings=True,
        text_config=text,
        vision_config=tower,
        audio_config=tower,
    )
    tiny.write_json(directory / "config.json", config)
    owners = {kind: n for n, kind in enumerate(values["layer_types"][: -values["num_kv_shared_layers"]])}
    for layer in range(values["num_hidden_layers"] - values["num_kv_shared_layers"], values["num_hidden_layers"]):
        owner = owners[values["layer_types"][layer]]
        for part in ("k_proj", "v_proj", "k_norm"):
            name, own = (f"model.layers.{n}.self_attn.{part}.weight" for n in (layer, owner))
            tensors[name] = fill(tiny, salt, name, tensors[own].shape, minus_one=False)
    tensors = {n.replace("model.", "model.language_model.", 1): v for n, v in tensors.items()}
    for name in ("vision_tower.patch", "audio_tower.conv", "embed_vision.projection", "embed_audio.projection"):
        tensors[f"model.{name}.weight"] = np.ones((2, 2), np.float32)
    tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def add_float64_error(loadable, records):
    """How far the weights are from well conditioned: the same in double precision (norms stay single)."""
    model = ref.load(loadable).double()
    for r in records:
        exact = ref.full_logits(model, r["ids"])[-1]
        r["max_error_to_float64"] = tiny.short_float(np.abs(exact - np.array(r["last_logits"])).max())


def prepare(name, spec, salt, shapes, directory, workspace):
    """Writes the checkpoint; returns the folder that transformers can load."""
    values = spec["config"]
    tensors = {n: fill(tiny, salt, n, s, minus_one=not is_plain(values)) for n, s in shapes.items()}
    if spec.get("nested"):
        write_directory(workspace, values, torch.float32, tensors)
        write_nested(directory, spec, salt, workspace, tensors)
        return workspace, {}
    if name in VARIANTS:
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[spec["dtype"]]
        write_directory(directory, values, dtype, tensors)
        return directory, {}
    path = directory / "model.gguf"
    write_gguf(path, name, values, tensors)
    held = read_gguf(path)
    plain = {n: v for n, (_, v) in held.items()}
    plain = plain_from_gguf(plain, tensors, values) if is_plain(values) else from_gguf(plain, values)
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
            if is_plain(spec["config"]):
                add_float64_error(loadable, records)
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
        if is_plain(spec["config"]):
            add_float64_error(loadable, records)
        bad = complaints(records, contrast)
        assert not bad and steady(ref.load(loadable), spec, spec["salt"]), f"{name}: {bad}"
    second = ""
    if spec.get("nested"):
        weights = {"dtype": "F32", "sha256": tiny.sha256(directory / "model.safetensors")}
    elif name in VARIANTS:
        current = json.loads((directory / "config.json").read_text())
        tiny.write_json(directory / "config.legacy.json", legacy_config(spec, current))
        check_legacy(directory, records)
        weights = {"dtype": spec["dtype"], "sha256": tiny.sha256(directory / "model.safetensors")}
    else:
        weights = {"sha256": tiny.sha256(directory / "model.gguf")}
        facts = {"config": spec["config"]} | facts
        if not is_plain(spec["config"]):
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


def decoded_mlx(directory, values):
    """Published names and float values of a checkpoint of mlx-lm, with experts joined again."""
    config = json.loads((directory / "config.json").read_text())["quantization"]
    out, parts = {}, {}
    with safe_open(directory / "model.safetensors", "pt") as file:
        held = {n: file.get_tensor(n) for n in file.keys()}
    number = lambda t: t.numpy() if t.dtype in (torch.uint32, torch.uint8) else t.float().numpy()
    for name, value in held.items():
        path = name.rpartition(".")[0]
        if name.endswith((".scales", ".biases")):
            continue
        value = number(value)
        if name.endswith(".weight") and path + ".scales" in held:
            spec = config.get(path, config)
            scales, biases = number(held[path + ".scales"]), number(held[path + ".biases"])
            value = dequantize_mlx(value, scales, biases, spec["group_size"], spec["bits"], "affine")
        for prefix in ("model.language_model.", "language_model.model.", "model."):
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
                break
        if ".switch_glu." in name:
            parts[name] = value
        else:
            out[name] = value
    for name, gate in parts.items():
        at = name.partition("switch_glu.")[0]
        if name.endswith("gate_proj.weight"):
            out[at + "gate_up_proj"] = np.concatenate([gate, parts[name.replace("gate_proj", "up_proj")]], axis=1)
        if name.endswith("down_proj.weight"):
            out[at + "down_proj"] = gate
    return {n: np.asarray(v, np.float32) for n, v in out.items()}


def check_mlx():
    """A second opinion on the goldens of mlx-lm, whose caches of gemma3n have had faults."""
    for name, spec in MLX_VARIANTS.items():
        values = text_config(spec["config"])
        if values["model_type"] not in ARCHS:
            continue
        directory = GEMMA / name
        with tempfile.TemporaryDirectory() as temp:
            write_directory(Path(temp), values, torch.float32, decoded_mlx(directory, values))
            for record in json.loads((directory / "golden.json").read_text())["prompts"]:
                golden = np.array(record["last_logits"])
                logits = ref.full_logits(ref.load(temp), record["ids"])[-1]
                off = np.abs(logits - golden).max() / np.ptp(golden)
                greedy = ref.greedy_cached(ref.load(temp), record["ids"], tiny.GREEDY_TOKENS)[0]
                print(f"{name:20} {record['name']:6} {off:.1e} greedy {'equal' if greedy == record['greedy'] else greedy}")


def main(arguments):
    os.umask(0o022)
    if "--check-mlx" in arguments:
        return check_mlx()
    table = VARIANTS | GGUF_VARIANTS
    for name in [a for a in arguments if not a.startswith("--")] or list(table):
        (search if "--search" in arguments else make)(name, table[name])


if __name__ == "__main__":
    main(sys.argv[1:])
