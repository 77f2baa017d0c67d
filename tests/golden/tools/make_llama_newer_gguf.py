"""Writes tests/golden/llama/gguf-*/ for the newer architectures that llama.cpp's converter defines.

    python make_llama_newer_gguf.py                every variant of this environment
    python make_llama_newer_gguf.py --search NAME  print the first good salts

`gguf-ministral3` and `gguf-llama4` are computed by transformers (environment of requirements.txt),
`gguf-deci` by mlx-lm (environment of requirements-mlx.txt with gguf 0.19.0), each on the weights as
the file holds them: decoded by the `gguf` package, query and key rows put back where the converter
moves them. Names and metadata keys are those of the converter; llama-cpp-python 0.3.36 loads the
files, see README.md.
"""

import copy
import os
import sys
import tempfile
from pathlib import Path

import gguf
import gguf_tokenizer
import numpy as np
import tiny
from gguf import GGMLQuantizationType as Type
from llama_newer_variants import LLAMA4, MINISTRAL3, SMALL, yarn

MIN_RELATIVE_MARGIN = 0.01
VOCAB = dict(vocab_size=gguf_tokenizer.VOCAB_SIZE)

DECI = SMALL | VOCAB | dict(
    model_type="nemotron-nas",
    num_hidden_layers=3,
    num_attention_heads=2,
    max_position_embeddings=256,
    rope_theta=10000.0,
    rope_scaling=None,
    block_configs=[
        dict(attention=dict(n_heads_in_group=2), ffn=dict(ffn_mult=2.625)),
        dict(attention=dict(replace_with_linear=True), ffn=dict(ffn_mult=2.625)),
        dict(attention=dict(n_heads_in_group=1), ffn=dict(ffn_mult=2.625)),
    ],
)
DECI.pop("num_key_value_heads")

VARIANTS = {
    "gguf-ministral3": dict(
        what="architecture mistral3: yarn with a temperature of the queries",
        arch="mistral3",
        config=MINISTRAL3 | VOCAB | yarn(0.5) | dict(hidden_size=32, tie_word_embeddings=True),
        default="Q8_0",
        long=40,
        salt=4,
    ),
    "gguf-llama4": dict(
        what="architecture llama4: experts in every second layer; chunks and temperature are the loader's constants",
        arch="llama4",
        config=LLAMA4
        | VOCAB
        | dict(
            tie_word_embeddings=True,
            intermediate_size=32,
            attention_chunk_size=8192,
            floor_scale=8192,
            attn_scale=0.1,
            num_local_experts=4,
        ),
        default="Q8_0",
        long=24,
        salt=36,
    ),
    "gguf-deci": dict(
        what="architecture deci: layers with one key head, without attention but a linear layer, and with two",
        arch="deci",
        config=DECI | dict(tie_word_embeddings=True),
        default="Q8_0",
        long=24,
        salt=53,
    ),
}

MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.linear": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def file_name(name):
    path, _, kind = name.rpartition(".")
    if path in TOP:
        return f"{TOP[path]}.{kind}"
    _, _, layer, module = path.split(".", 3)
    return f"blk.{layer}.{MODULES[module]}.{kind}"


def split_experts(tensors):
    """Published `[E, hidden, 2 inner]` and `[E, inner, hidden]` -> a matrix per name, outputs first."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base, half = name.removesuffix("gate_up_proj"), value.shape[-1] // 2
            out[f"{base}gate_proj.weight"] = value[..., :half].swapaxes(1, 2)
            out[f"{base}up_proj.weight"] = value[..., half:].swapaxes(1, 2)
        elif name.endswith("experts.down_proj"):
            out[f"{name}.weight"] = value.swapaxes(1, 2)
        else:
            out[name] = value
    return out


def join_experts(tensors):
    out = dict(tensors)
    for name in [n for n in tensors if n.endswith("experts.gate_proj.weight")]:
        base = name.removesuffix("gate_proj.weight")
        gate, up, down = (out.pop(f"{base}{m}_proj.weight") for m in ("gate", "up", "down"))
        out[f"{base}gate_up_proj"] = np.concatenate([gate, up], axis=1).swapaxes(1, 2)
        out[f"{base}down_proj"] = down.swapaxes(1, 2)
    return out


def heads_of(name, spec):
    """Heads of rows that the converter interleaves; none where it leaves them."""
    cfg = spec["config"]
    if spec["arch"] == "llama4" or not name.endswith((".q_proj.weight", ".k_proj.weight")):
        return None
    if name.endswith(".q_proj.weight"):
        return cfg["num_attention_heads"]
    if spec["arch"] == "deci":
        layer = int(name.split(".")[2])
        return cfg["num_attention_heads"] // cfg["block_configs"][layer]["attention"]["n_heads_in_group"]
    return cfg["num_key_value_heads"]


def interleave(rows, heads):
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows, heads):
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def metadata(writer, spec):
    cfg, arch = spec["config"], spec["arch"]
    writer.add_vocab_size(cfg["vocab_size"])
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    head_dim = cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    settings = cfg.get("rope_parameters") or cfg
    writer.add_rope_freq_base(settings["rope_theta"])
    if arch == "deci":
        blocks = [b["attention"] for b in cfg["block_configs"]]
        heads = cfg["num_attention_heads"]
        writer.add_head_count([heads] * len(blocks))
        writer.add_head_count_kv([heads // b["n_heads_in_group"] if "n_heads_in_group" in b else 0 for b in blocks])
        writer.add_feed_forward_length([256] * len(blocks))
        return
    writer.add_head_count(cfg["num_attention_heads"])
    writer.add_head_count_kv(cfg["num_key_value_heads"])
    if arch == "llama4":
        writer.add_feed_forward_length(cfg["intermediate_size_mlp"])
        writer.add_expert_feed_forward_length(cfg["intermediate_size"])
        writer.add_interleave_moe_layer_step(cfg["interleave_moe_layer_step"])
        writer.add_expert_count(cfg["num_local_experts"])
        writer.add_expert_used_count(cfg["num_experts_per_tok"])
        return
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(settings["factor"])
    writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(settings["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(settings["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(settings["mscale_all_dim"])
    writer.add_attn_temperature_scale(settings["llama_4_scaling_beta"])


def write_gguf(path, name, spec, shapes, salt):
    writer = gguf.GGUFWriter(path, spec["arch"])
    writer.add_name(name)
    metadata(writer, spec)
    gguf_tokenizer.write_metadata(writer, "smollm", False)
    tied = spec["config"]["tie_word_embeddings"]
    filled = {n: tiny.fill(salt, n, s, tied) for n, s in shapes.items()}
    for published, value in split_experts(filled).items():
        heads = heads_of(published, spec)
        value = np.ascontiguousarray(interleave(value, heads) if heads else value)
        kind = "F32" if "norm" in published or "router" in published else spec["default"]
        writer.add_tensor(file_name(published), gguf.quants.quantize(value, Type[kind]), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def held_tensors(path, spec, shapes):
    """Published names and the values that the file holds."""
    held = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        for t in gguf.GGUFReader(path).tensors
    }
    names = split_experts({n: np.zeros(s, np.int8) for n, s in shapes.items()})
    out = {}
    for name in names:
        value, heads = held[file_name(name)], heads_of(name, spec)
        out[name] = deinterleave(value, heads) if heads else value
    return join_experts(out)


class Torch:
    """transformers on the held weights."""

    def __init__(self):
        import make_llama_newer
        import reference_torch

        self.ref, self.newer = reference_torch, make_llama_newer
        self.reference = reference_torch.REFERENCE | {"gguf": "0.19.0"}

    def shapes(self, spec):
        model = self.newer.build(spec, self.newer.config_object(spec))
        tied = spec["config"]["tie_word_embeddings"]
        state = {n: tuple(v.shape) for n, v in model.state_dict().items()}
        return {n: s for n, s in state.items() if not (tied and n == "lm_head.weight")}

    def records(self, spec, tensors, prompts):
        import torch

        config = self.newer.config_object(spec)
        config._attn_implementation = "eager"
        model = self.newer.build(spec, config)
        state = {n: torch.from_numpy(np.ascontiguousarray(v)) for n, v in tensors.items()}
        missing = model.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
        model.tie_weights()
        model.eval()
        return [self.newer.record(lambda: model, *p) for p in prompts]


class Mlx:
    """mlx-lm on the held weights."""

    def __init__(self):
        import make_llama_newer_mlx

        self.newer = make_llama_newer_mlx
        self.reference = self.newer.mlx.REFERENCE | {"gguf": "0.19.0"}

    def shapes(self, spec):
        return self.newer.mlx.shapes_of(self.newer.mlx.build(spec["config"]))

    def records(self, spec, tensors, prompts):
        import mlx.core as mx
        from mlx_lm import utils

        out = []
        with tempfile.TemporaryDirectory() as temp:
            utils.save_config(copy.deepcopy(spec["config"]), Path(temp) / "config.json")
            arrays = {n: mx.array(np.ascontiguousarray(v)) for n, v in tensors.items()}
            mx.save_safetensors(str(Path(temp) / "model.safetensors"), arrays, metadata={"format": "mlx"})
            for name, ids in prompts:
                out.append(self.newer.record(temp, name, ids))
        return out


def make(name, directory, salt, reference, final=True):
    spec = VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.gguf"
    shapes = reference.shapes(spec)
    write_gguf(path, name, spec, shapes, salt)
    vocab = spec["config"]["vocab_size"]
    prompts = [(label, tiny.prompt(salt, label, n, vocab)) for label, n in (("short", 7), ("long", spec["long"]))]
    records = reference.records(spec, held_tensors(path, spec, shapes), prompts)
    bad = [r["name"] for r in records if r["min_relative_margin"] < MIN_RELATIVE_MARGIN or not r["cached_agrees"]]
    bad += [r["name"] for r in records if len(set(r["greedy"])) < 4 or r.get("min_expert_margin", 1.0) < 1e-3]
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": reference.reference,
        "config": spec["config"],
        "weights": {"salt": salt, "sha256": tiny.sha256(path)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    print(f"{name:16} salt {salt:3} file {path.stat().st_size}")


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or list(VARIANTS):
        try:
            reference = Mlx() if name == "gguf-deci" else Torch()
        except ImportError as missing:
            print(f"{name}: not in this environment ({missing})")
            continue
        if "--search" not in arguments:
            make(name, tiny.LLAMA / name, VARIANTS[name]["salt"], reference)
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next(s for s in range(1, 3000) if not make(name, Path(temp) / "m", s, reference, final=False))
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
