"""Writes tests/golden/qwen/gguf-qwen3*/ from the checked-in checkpoints of the hybrids.

    python make_qwen_next_gguf.py

The GGUF files hold the same values as the safetensors, laid out as llama.cpp's converter lays them out, so the goldens
are those of the source. Run it in the environment of requirements.txt. See README.md.
"""

import json
import os
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

import tiny
from qwen_next_variants import VARIANTS

QWEN = tiny.GOLDEN / "qwen"
FILES = {"gguf-qwen3next": "qwen3-next", "gguf-qwen35": "qwen3-5", "gguf-qwen35moe": "qwen3-5-moe"}


def tiled(value, cfg, axis, width, first=0):
    """Value heads from side by side to one of every key head in turn, behind `first` entries of the axis."""
    groups, heads = cfg["linear_num_key_heads"], cfg["linear_num_value_heads"]
    value = np.moveaxis(value, axis, 0)
    head, tail = value[:first], value[first:]
    tail = tail.reshape(groups, heads // groups, width, *tail.shape[1:]).swapaxes(0, 1).reshape(tail.shape)
    return np.moveaxis(np.concatenate([head, tail]), 0, axis)


def apart(value, cfg):
    """Queries, keys and values, and gates, from rows interleaved by key head."""
    groups, each = cfg["linear_num_key_heads"], cfg["linear_num_value_heads"] // cfg["linear_num_key_heads"]
    key, dim = cfg["linear_key_head_dim"], each * cfg["linear_value_head_dim"]
    rows = value.reshape(groups, 2 * key + 2 * dim, -1)
    q, k, v, z = np.split(rows, [key, 2 * key, 2 * key + dim], axis=1)
    flat = [part.reshape(-1, value.shape[1]) for part in (q, k, v, z)]
    return np.concatenate(flat[:3]), flat[3]


def converted(tensors, cfg, arch):
    """Name in the file -> values."""
    out, experts = {}, {}
    keys = 2 * cfg["linear_num_key_heads"] * cfg["linear_key_head_dim"]
    dim = cfg["linear_value_head_dim"]
    retile = arch != "qwen3next"
    for name, value in tensors.items():
        if name.startswith("mtp."):
            continue
        value = value.float().numpy()
        if not name.startswith("model.layers."):
            target = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
            out[target[name] + ".weight"] = value + 1 if name == "model.norm.weight" else value
            continue
        _, _, layer, rest = name.split(".", 3)
        block = f"blk.{layer}."
        if rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(value, 2, axis=1)
            out[block + "ffn_gate_exps.weight"], out[block + "ffn_up_exps.weight"] = gate, up
        elif rest == "mlp.experts.down_proj":
            out[block + "ffn_down_exps.weight"] = value
        elif rest.startswith("mlp.experts."):
            _, _, expert, matrix, _ = rest.split(".")
            experts.setdefault((block, matrix.removesuffix("_proj")), {})[int(expert)] = value
        elif rest == "linear_attn.in_proj_qkvz.weight":
            out[block + "attn_qkv.weight"], out[block + "attn_gate.weight"] = apart(value, cfg)
        elif rest == "linear_attn.in_proj_ba.weight":
            out[block + "ssm_ba.weight"] = value
        elif rest == "linear_attn.in_proj_qkv.weight":
            out[block + "attn_qkv.weight"] = tiled(value, cfg, 0, dim, keys)
        elif rest == "linear_attn.in_proj_z.weight":
            out[block + "attn_gate.weight"] = tiled(value, cfg, 0, dim)
        elif rest in ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"):
            target = "ssm_beta" if "_b." in rest else "ssm_alpha"
            out[block + target + ".weight"] = tiled(value, cfg, 0, 1)
        elif rest == "linear_attn.conv1d.weight":
            value = value.squeeze(1)
            out[block + "ssm_conv1d.weight"] = tiled(value, cfg, 0, dim, keys) if retile else value
        elif rest == "linear_attn.out_proj.weight":
            out[block + "ssm_out.weight"] = tiled(value, cfg, 1, dim) if retile else value
        elif rest == "linear_attn.A_log":
            value = -np.exp(value)
            out[block + "ssm_a"] = tiled(value, cfg, 0, 1) if retile else value
        elif rest == "linear_attn.dt_bias":
            out[block + "ssm_dt.bias"] = tiled(value, cfg, 0, 1) if retile else value
        elif rest == "linear_attn.norm.weight":
            out[block + "ssm_norm.weight"] = value
        elif rest == "mlp.shared_expert_gate.weight":
            out[block + "ffn_gate_inp_shexp.weight"] = value.squeeze(0)
        else:
            plain = {
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "post_attention_norm",
                "self_attn.q_proj": "attn_q",
                "self_attn.k_proj": "attn_k",
                "self_attn.v_proj": "attn_v",
                "self_attn.o_proj": "attn_output",
                "self_attn.q_norm": "attn_q_norm",
                "self_attn.k_norm": "attn_k_norm",
                "mlp.gate": "ffn_gate_inp",
                "mlp.gate_proj": "ffn_gate",
                "mlp.up_proj": "ffn_up",
                "mlp.down_proj": "ffn_down",
                "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
                "mlp.shared_expert.up_proj": "ffn_up_shexp",
                "mlp.shared_expert.down_proj": "ffn_down_shexp",
            }
            target = plain[rest.removesuffix(".weight")]
            out[block + target + ".weight"] = value + 1 if target.endswith("norm") else value
    for (block, matrix), parts in experts.items():
        out[f"{block}ffn_{matrix}_exps.weight"] = np.stack([parts[e] for e in sorted(parts)])
    return out


def write(path, name, arch, cfg, values, dtype):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_head_count(cfg["num_attention_heads"])
    writer.add_head_count_kv(cfg["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_key_length(cfg["head_dim"])
    writer.add_value_length(cfg["head_dim"])
    writer.add_rope_freq_base(cfg["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(int(cfg["head_dim"] * cfg["rope_parameters"]["partial_rotary_factor"]))
    if arch != "qwen3next":
        writer.add_rope_dimension_sections([*cfg["rope_parameters"]["mrope_section"], 0])
    writer.add_ssm_conv_kernel(cfg["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(cfg["linear_key_head_dim"])
    writer.add_ssm_group_count(cfg["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(cfg["linear_num_value_heads"])
    writer.add_ssm_inner_size(cfg["linear_num_value_heads"] * cfg["linear_value_head_dim"])
    writer.add_full_attention_interval(4)
    if "num_experts" in cfg:
        writer.add_expert_count(cfg["num_experts"])
        writer.add_expert_used_count(cfg["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(cfg["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(cfg["shared_expert_intermediate_size"])
    if "intermediate_size" in cfg:
        writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(cfg["vocab_size"])
    for tensor, value in values.items():
        # The converter keeps kernels, decays and biases in f32 as well as norms.
        whole = value.ndim == 1 or "conv1d" in tensor or dtype == "F32"
        kind = Type.F32 if whole else Type.BF16
        writer.add_tensor(tensor, gguf.quants.quantize(np.ascontiguousarray(value, dtype=np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(name, source):
    spec, directory = VARIANTS[source], QWEN / name
    arch = name.removeprefix("gguf-")
    values = converted(load_file(QWEN / source / "model.safetensors"), spec["config"], arch)
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "model.gguf", name, arch, spec["config"], values, spec["dtype"])
    golden = json.loads((QWEN / source / "golden.json").read_text())
    golden |= {"variant": name, "what": f"the values of {source}"}
    golden["weights"] |= {"dtype": "GGUF", "sha256": tiny.sha256(directory / "model.gguf")}
    tiny.write_json(directory / "golden.json", golden)
    print(name, (directory / "model.gguf").stat().st_size, flush=True)


def main(arguments):
    os.umask(0o022)
    torch.set_grad_enabled(False)
    for name in arguments or FILES:
        make(name, FILES[name])


if __name__ == "__main__":
    main(sys.argv[1:])
