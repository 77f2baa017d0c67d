"""Writes tests/golden/deepseek/<variant>/ for the checkpoints made by transformers and by `gguf`.

    python make_deepseek.py                 every variant of these two kinds in deepseek_variants.py
    python make_deepseek.py v3 gguf-deepseek2
    python make_deepseek.py --search NAME...    print the first good salts

Run it in the environment of requirements.txt. See README.md.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

import deepseek_numpy
import deepseek_v4_variants as v4
import gguf_tokenizer
import make_llama
import reference_torch as ref
import tiny
from deepseek_variants import BLOCKS, GGUF_VARIANTS, VARIANTS, fill, is_sparse, mtp_shapes
from make_llama_gguf import read_gguf, tensor_facts

DEEPSEEK = tiny.GOLDEN / "deepseek"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
FP8_LARGEST, FP8_BLOCK = 448.0, 128
IN_F32 = re.compile(r"correction_bias$|gate\.bias$|hc_|attn_sink$|ape$")
#: transformers has no class for it.
FIRST = "llama's attention with the experts of deepseek_v2"


def spec_of(name):
    return VARIANTS.get(name) or GGUF_VARIANTS[name]


def is_fp8(name):
    """What DeepSeek's converter stores as 8-bit floats: the matrices inside layers, without the router."""
    return "_proj" in name and name.endswith("weight")


def to_fp8(value):
    """(bytes, factor of each block) as DeepSeek's converter makes them."""
    rows, columns = (-(-n // FP8_BLOCK) for n in value.shape)
    scales, out = torch.ones(rows, columns), torch.zeros(value.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            place = np.s_[i * FP8_BLOCK : (i + 1) * FP8_BLOCK, j * FP8_BLOCK : (j + 1) * FP8_BLOCK]
            block = value[place]
            scales[i, j] = block.abs().max() / FP8_LARGEST
            out[place] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return out, scales


def from_fp8(codes, scales):
    grown = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return codes.float() * grown[: codes.shape[0], : codes.shape[1]]


def encoded(spec, values):
    """Tensors as the file holds them, and float64 values of the same."""
    kind, tensors, exact = DTYPES[spec["dtype"]], {}, {}
    for name, value in values.items():
        value = torch.from_numpy(np.ascontiguousarray(value))
        if value.dtype == torch.int64:
            tensors[name], exact[name] = value, value.numpy()
            continue
        value = value.float()
        if spec.get("fp8") and is_fp8(name):
            codes, scales = to_fp8(value)
            tensors[name], tensors[name + "_scale_inv"] = codes, scales
            exact[name] = from_fp8(codes, scales).double().numpy()
            continue
        # What is small and delicate stays in f32, as published.
        tensors[name] = value if IN_F32.search(name) else value.to(kind)
        exact[name] = tensors[name].double().numpy()
    return tensors, exact


def fuse_experts(tensors, cfg):
    """Published per-expert tensors -> the stacked tensors transformers holds in memory."""
    out = {k: v for k, v in tensors.items() if ".experts." not in k}
    for layer in range(cfg["num_hidden_layers"]):
        if not is_sparse(cfg, layer):
            continue
        p = f"model.layers.{layer}.mlp.experts."
        part = {
            n: [tensors[f"{p}{e}.{n}_proj.weight"] for e in range(cfg["n_routed_experts"])] for n in ("gate", "up", "down")
        }
        out[p + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(part["gate"], part["up"])])
        out[p + "down_proj"] = torch.stack(part["down"])
    return out


def load_first(directory):
    """The model of `deepseek` from transformers' parts."""
    cfg = json.loads((Path(directory) / "config.json").read_text())
    model = LlamaForCausalLM(
        LlamaConfig(
            **{k: cfg[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rope_theta")},
            **{k: cfg[k] for k in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")},
            rms_norm_eps=cfg["rms_norm_eps"],
            tie_word_embeddings=cfg["tie_word_embeddings"],
            attn_implementation="eager",
        )
    )
    keys = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    experts = DeepseekV2Config(**{k: cfg[k] for k in keys}, experts_implementation="eager")
    for layer in range(cfg["first_k_dense_replace"], cfg["num_hidden_layers"]):
        model.model.layers[layer].mlp = DeepseekV2Moe(experts)
    tensors = {k: v.float() for k, v in fuse_experts(load_file(Path(directory) / "model.safetensors"), cfg).items()}
    if cfg["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.float().eval()


def write_config(directory, spec):
    cfg = spec["config"]
    if cfg["model_type"] == "deepseek":
        published = cfg | dict(architectures=["DeepseekForCausalLM"], torch_dtype="float32", rope_scaling=None)
        tiny.write_json(directory / "config.json", dict(sorted(published.items())))
        return
    config = make_llama.config_object(cfg)
    config.dtype = DTYPES[spec["dtype"]]
    config.save_pretrained(directory)


def legacy_v4(cfg):
    """The publisher's spelling."""
    ratio = {v4.SLIDING: 0, v4.SPARSE: 4, v4.HEAVY: 128}
    out = {k: v for k, v in cfg.items() if k not in ("layer_types", "compress_rates", "rope_scaling")}
    scaling = dict(cfg["rope_scaling"])
    out["rope_scaling"] = {"type": scaling.pop("rope_type")} | scaling
    rates = cfg["compress_rates"]
    return out | dict(
        architectures=["DeepseekV4ForCausalLM"],
        compress_ratios=[ratio[kind] for kind in cfg["layer_types"]],
        compress_rate_csa=rates[v4.SPARSE],
        compress_rate_hca=rates[v4.HEAVY],
        scoring_func="sqrtsoftplus",
        norm_topk_prob=True,
    )


def write_checkpoint(directory, spec, tensors):
    write_config(directory, spec)
    if spec.get("fused_experts"):
        tensors = fuse_experts(tensors, spec["config"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def reference(directory, spec):
    return load_first(directory) if spec["config"]["model_type"] == "deepseek" else ref.load(directory)


def write_legacy(directory, name, spec):
    """The config as transformers 4 and the publisher wrote it."""
    cfg = spec["config"]
    if cfg["model_type"] == "deepseek_v4":
        tiny.write_json(directory / "config.legacy.json", dict(sorted(legacy_v4(cfg).items())))
        return
    legacy = make_llama.legacy_config(name, cfg, json.loads((directory / "config.json").read_text()))
    if legacy["rope_scaling"]:
        legacy["rope_scaling"]["type"] = legacy["rope_scaling"].pop("rope_type")
    third = cfg["model_type"] != "deepseek_v2"
    legacy |= dict(scoring_func="sigmoid" if third else "softmax", moe_layer_freq=1, ep_size=1, aux_loss_alpha=0.001)
    legacy |= {k: cfg[k] for k in ("first_k_dense_replace", "n_routed_experts")}
    if third:
        legacy["topk_method"] = "noaux_tc"
    for key in ("mlp_layer_types", "layer_types", "head_dim", "qk_head_dim", *spec.get("legacy_drops", ())):
        legacy.pop(key, None)
    if "num_mtp_layers" in legacy:
        legacy["num_nextn_predict_layers"] = legacy.pop("num_mtp_layers")
    tiny.write_json(directory / "config.legacy.json", dict(sorted(legacy.items())))


def with_mtp(directory, spec, salt):
    """Adds a layer for multi-token prediction, which the reference refuses to see."""
    cfg = spec["config"]
    extra = {n: torch.from_numpy(tiny.fill(salt, n, s)).to(DTYPES[spec["dtype"]]) for n, s in mtp_shapes(cfg).items()}
    held = load_file(directory / "model.safetensors")
    save_file(held | extra, directory / "model.safetensors", metadata={"format": "pt"})


def interleave(value, heads):
    """Row order of llama.cpp's converter for `deepseek`."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def gguf_tensors(values, spec):
    """Published names -> names of the `gguf` package and values, as llama.cpp's converter makes them."""
    cfg = spec["config"]
    first, heads = cfg["model_type"] == "deepseek", cfg["num_attention_heads"]
    arch = gguf.MODEL_ARCH.DEEPSEEK if first else gguf.MODEL_ARCH.DEEPSEEK2
    names = gguf.get_tensor_name_map(arch, cfg["num_hidden_layers"])
    out = {}

    def put(name, value):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target, name
        out.setdefault(target, []).append(value)

    for name, value in values.items():
        if ".experts." in name:
            head, tail = name.split(".experts.")
            put(f"{head}.experts.{tail.split('.', 1)[1]}", value)
        elif name.endswith("kv_b_proj.weight") and not spec.get("whole_kv_b"):
            kv = value.reshape(heads, -1, cfg["kv_lora_rank"])
            k, v = np.split(kv, [cfg["qk_nope_head_dim"]], axis=1)
            put(name.replace("kv_b", "k_b"), k.swapaxes(1, 2))
            put(name.replace("kv_b", "v_b"), v)
        elif name.endswith("e_score_correction_bias"):
            put(name.replace("_bias", ".bias"), value)
        elif first and ("q_proj" in name or "k_proj" in name):
            put(name, interleave(value, heads if "q_proj" in name else cfg["num_key_value_heads"]))
        else:
            put(name, value)
    return {k: np.stack(v) if "_exps." in k else v[0] for k, v in out.items()}


def kind_of(name, value):
    matrix = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return "F32" if value.ndim == 1 else BLOCKS.get(matrix, "Q8_0")


def rounded_by_gguf(values, spec):
    """Published names -> the values that the file holds, float64."""
    cfg, first, out = spec["config"], spec["config"]["model_type"] == "deepseek", {}

    def held(target, value):
        kind = Type[kind_of(target, value)]
        return gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind).astype(np.float64)

    for name, value in values.items():
        parts = gguf_tensors({name: value}, spec)
        back = {k.rsplit(".", 2)[-2]: held(k, v).reshape(v.shape) for k, v in parts.items()}
        if "attn_k_b" in back:
            joined = np.concatenate([back["attn_k_b"].swapaxes(1, 2), back["attn_v_b"]], axis=1)
            out[name] = joined.reshape(value.shape)
            continue
        (only,) = back.values()
        if first and ("q_proj" in name or "k_proj" in name):
            heads = cfg["num_attention_heads"] if "q_proj" in name else cfg["num_key_value_heads"]
            only = only.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2)
        out[name] = only.reshape(value.shape)
    return out


def write_gguf(path, name, spec, values):
    cfg, first = spec["config"], spec["config"]["model_type"] == "deepseek"
    writer = gguf.GGUFWriter(path, "deepseek" if first else "deepseek2")
    writer.add_name(name)
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_head_count(cfg["num_attention_heads"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_rope_freq_base(cfg["rope_theta"])
    writer.add_vocab_size(cfg["vocab_size"])
    writer.add_leading_dense_block_count(cfg["first_k_dense_replace"])
    writer.add_expert_count(cfg["n_routed_experts"])
    writer.add_expert_used_count(cfg["num_experts_per_tok"])
    writer.add_expert_shared_count(cfg["n_shared_experts"])
    writer.add_expert_feed_forward_length(cfg["moe_intermediate_size"])
    writer.add_expert_weights_scale(cfg.get("routed_scaling_factor", 1.0))
    if first:
        writer.add_head_count_kv(cfg["num_key_value_heads"])
        writer.add_rope_dimension_count(cfg["hidden_size"] // cfg["num_attention_heads"])
    else:
        write_latent(writer, spec)
    gguf_tokenizer.write_metadata(writer, "llama-bpe", False)
    for tensor, value in gguf_tensors(values, spec).items():
        kind = kind_of(tensor, value)
        writer.add_tensor(tensor, gguf.quants.quantize(np.ascontiguousarray(value), Type[kind]), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_latent(writer, spec):
    cfg = spec["config"]
    head, rank = cfg["qk_nope_head_dim"] + cfg["qk_rope_head_dim"], cfg["kv_lora_rank"]
    writer.add_kv_lora_rank(rank)
    if cfg["q_lora_rank"]:
        writer.add_q_lora_rank(cfg["q_lora_rank"])
    writer.add_rope_dimension_count(cfg["qk_rope_head_dim"])
    if spec.get("whole_kv_b"):
        writer.add_head_count_kv(cfg["num_attention_heads"])
        writer.add_key_length(head)
        writer.add_value_length(cfg["v_head_dim"])
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + cfg["qk_rope_head_dim"])
        writer.add_value_length(rank)
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(cfg["v_head_dim"])
    if cfg["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if cfg["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(cfg["n_group"])
        writer.add_expert_group_used_count(cfg["topk_group"])
    if scaling := cfg.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def prompts_of(name, salt):
    spec = spec_of(name)
    return [(label, tiny.prompt(salt, label, spec[label], spec["config"]["vocab_size"])) for label in ("short", "long")]


def contrasts(directory, spec, records, exact):
    if spec["config"]["model_type"] != "deepseek":
        return make_llama.contrasts(directory, spec, records)
    out = {}
    for label, change in spec["controls"].items():
        out[label] = {}
        for r in records:
            golden = np.array(r["last_logits"], dtype=np.float64)
            changed = deepseek_numpy.forward(spec["config"] | change, exact, r["ids"])[-1]
            out[label][r["name"]] = tiny.short_float(np.abs(changed - golden).max() / golden.std())
    return out


def make(name, directory, salt, final=True):
    spec, cfg = spec_of(name), spec_of(name)["config"]
    values, is_gguf = fill(salt, cfg), name in GGUF_VARIANTS
    if is_gguf:
        exact = rounded_by_gguf(values, spec)
        plain = {k: torch.from_numpy(v).float() for k, v in exact.items()}
    else:
        tensors, exact = encoded(spec, values)
        plain = {k: torch.from_numpy(v).float() for k, v in exact.items()} if spec.get("fp8") else tensors
    prompts = prompts_of(name, salt)
    if not final and not deepseek_numpy.promising(cfg, exact, [ids for _, ids in prompts]):
        return ["numpy"]
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        source = Path(temp) if is_gguf or spec.get("fp8") else directory
        write_checkpoint(source, spec if source == directory else spec | dict(dtype="F32"), plain)
        records = [ref.record(lambda: reference(source, spec), *p) for p in prompts]
        contrast = contrasts(source, spec, records, exact)
    bad = make_llama.complaints(records, contrast)
    bad += [f"{r['name']}: cached and uncached differ" for r in records if not r["cached_agrees"]]
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    for r in records:
        error = float(np.abs(deepseek_numpy.forward(cfg, exact, r["ids"])[-1] - np.array(r["last_logits"])).max())
        assert error < 1e-4, error
        r["max_error_to_float64"] = tiny.short_float(error)
        r["min_choice_gap"] = tiny.short_float(deepseek_numpy.min_gap(cfg, exact, r["ids"] + r["greedy"]))
    if is_gguf:
        write_gguf(directory / "model.gguf", name, spec, values)
    elif spec.get("fp8"):
        write_checkpoint(directory, spec, tensors)
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = dict(
            activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[FP8_BLOCK, FP8_BLOCK]
        )
        tiny.write_json(directory / "config.json", config)
    finish(name, directory, salt, records, contrast)


def finish(name, directory, salt, records, contrast):
    spec, is_gguf = spec_of(name), name in GGUF_VARIANTS
    first = spec["config"]["model_type"] == "deepseek"
    golden = {"variant": name, "what": spec["what"], "reference": ref.REFERENCE | (dict(model=FIRST) if first else {})}
    if contrast:
        golden["contrast_in_std"] = contrast
    if not is_gguf and not first and not spec.get("fp8"):
        write_legacy(directory, name, spec)
        make_llama.check_legacy(directory, records)
    if spec.get("mtp"):
        with_mtp(directory, spec, salt)
    weights = directory / ("model.gguf" if is_gguf else "model.safetensors")
    dtype = "GGUF" if is_gguf else "F8_E4M3" if spec.get("fp8") else spec["dtype"]
    golden["weights"] = {"dtype": dtype, "salt": salt, "sha256": tiny.sha256(weights)}
    if is_gguf:
        golden |= dict(config=spec["config"], tensors=tensor_facts(read_gguf(weights)))
    golden["prompts"] = records
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    error = max(r["max_error_to_float64"] for r in records)
    worst = min(r["min_relative_margin"] for r in records)
    gap = min(r["min_choice_gap"] for r in records)
    print(f"{name:20} salt {salt:4} folder {size:6} margin {worst:.3f} gap {gap:.1e} f64 {error:.1e}", flush=True)


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or [*VARIANTS, *GGUF_VARIANTS]:
        if "--search" not in arguments:
            make(name, DEEPSEEK / name, spec_of(name)["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next((s for s in range(1, 20000) if not make(name, Path(temp), s, final=False)), None)
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
