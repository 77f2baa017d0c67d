"""Writes tests/golden/llama/gguf-*/: tiny GGUF files and their goldens.

    python make_llama_gguf.py                every GGUF variant
    python make_llama_gguf.py --search NAME  print the first good salts

The golden is transformers' on the weights as the file holds them: decoded by the `gguf`
package, query and key rows put back from the interleaved order. See README.md.
"""

import math
import sys
import tempfile
import zlib
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import gguf_blocks
import gguf_tokenizer
import reference_numpy
import reference_torch as ref
import tiny
from llama_variants import BASE
from make_llama import config_object

GGUF_BASE = BASE | dict(vocab_size=gguf_tokenizer.VOCAB_SIZE)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LAYER0 = dict(zip(MATRICES, ("F16", "F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")))
LAYER1 = dict(zip(MATRICES, ("Q4_0", "Q8_0", "F16", "Q5_1", "Q4_1", "F32", "Q5_0")))

VARIANTS = {
    "gguf-blocks32": dict(
        what="every type with blocks of 32 and the float types, one a tensor",
        config=GGUF_BASE,
        salt=134,
        types={"token_embd": "Q8_0", "output": "Q4_1"}
        | {f"blk.{i}.{k}": t for i, layer in enumerate((LAYER0, LAYER1)) for k, t in layer.items()},
    ),
    "gguf-kquants": dict(
        what="Q4_K and Q6_K; no output.weight: the embedding is the output head",
        config=GGUF_BASE
        | dict(
            hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_key_value_heads=1, tie_word_embeddings=True
        ),
        salt=563,
        types={"token_embd": "Q6_K", "blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K"},
        default="Q4_K",
    ),
    "gguf-llama3": dict(
        what="llama3 rotary scaling, which GGUF holds as rope_freqs.weight; llama-bpe pre-tokenizer, begins with bos",
        config=GGUF_BASE
        | dict(
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=1,
            rope_theta=2000.0,
            rope_scaling=LLAMA3,
            tie_word_embeddings=True,
        ),
        salt=468,
        types={"token_embd": "Q8_0"},
        default="F16",
        pre="llama-bpe",
        add_bos=True,
    ),
    "gguf-smollm3": dict(
        what="smollm3: every fourth layer without positions, which no key of the file says",
        config=GGUF_BASE
        | dict(
            model_type="smollm3",
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            no_rope_layer_interval=4,
            tie_word_embeddings=False,
            pad_token_id=0,
        ),
        margin=0.01,
        salt=5,
        types={"token_embd": "Q8_0"},
        default="Q4_0",
    ),
    "gguf-mixtral": dict(
        what="mixture of experts: 4 experts stacked in ffn_*_exps.weight, 2 a token",
        config=GGUF_BASE
        | dict(
            model_type="mixtral",
            intermediate_size=32,
            num_hidden_layers=1,
            num_local_experts=4,
            num_experts_per_tok=2,
            tie_word_embeddings=True,
        ),
        salt=1705,
        types={
            "token_embd": "Q8_0",
            "blk.0.ffn_gate_inp": "F32",
            "blk.0.ffn_gate_exps": "Q4_0",
            "blk.0.ffn_up_exps": "Q5_1",
        },
        default="Q8_0",
    ),
}

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT_NAMES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def interleave(rows, heads):
    """Half-split rotary row order -> llama.cpp's interleaved one (its converter's `permute`)."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows, heads):
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def heads_of(name, cfg):
    if name.endswith(".attn_q.weight"):
        return cfg["num_attention_heads"]
    return cfg["num_key_value_heads"] if name.endswith(".attn_k.weight") else None


def gguf_tensors(published, cfg):
    """Published names and values -> GGUF names and values, in file order."""
    out = {}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in published.items():
        path, _, kind = name.rpartition(".")
        if path in top:
            out[f"{top[path]}.{kind}"] = value
            continue
        _, _, layer, rest = path.split(".", 3)
        if ".experts." in path:
            expert = f"blk.{layer}.{EXPERT_NAMES[path.rsplit('.', 1)[1]]}.{kind}"
            out.setdefault(expert, []).append(value)
        else:
            out[f"blk.{layer}.{NAMES[rest]}.{kind}"] = value
    for name, value in out.items():
        if isinstance(value, list):
            out[name] = np.stack(value)
        elif heads_of(name, cfg):
            out[name] = interleave(value, heads_of(name, cfg))
    return out


def published_tensors(held, cfg):
    """The way back, from the values the file holds."""
    out, names = {}, {v: k for k, v in NAMES.items()}
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for name, value in held.items():
        path, _, kind = name.rpartition(".")
        if path == "rope_freqs":
            continue
        if path in top:
            out[f"{top[path]}.{kind}"] = value
            continue
        _, layer, rest = path.split(".")
        matrix = next((w for w, n in EXPERT_NAMES.items() if n == rest), None)
        if matrix:
            for e, part in enumerate(value):
                out[f"model.layers.{layer}.block_sparse_moe.experts.{e}.{matrix}.{kind}"] = part
        else:
            heads = heads_of(name, cfg)
            out[f"model.layers.{layer}.{names[rest]}.{kind}"] = deinterleave(value, heads) if heads else value
    return out


def encode(value, kind):
    """Bytes of a tensor in the GGUF type `kind`; K-blocks are checked against the decoder."""
    if kind in ("Q4_K", "Q6_K"):
        raw, meant = {"Q4_K": gguf_blocks.quantize_q4_k, "Q6_K": gguf_blocks.quantize_q6_k}[kind](value)
        decoded = gguf.quants.dequantize(raw, Type[kind])
        assert np.abs(decoded - meant).max() < 1e-6 and np.abs(meant - value).max() < 0.1 * np.abs(value).max()
        return raw
    return gguf.quants.quantize(value, Type[kind])


def rope_freqs(cfg):
    """Divisors of the rotary frequencies for llama3 scaling, as llama.cpp's converter computes them."""
    s, d = cfg["rope_scaling"], cfg["hidden_size"] // cfg["num_attention_heads"]
    out = []
    for i in range(0, d, 2):
        wavelength = 2 * math.pi * cfg["rope_theta"] ** (i / d)
        turns = s["original_max_position_embeddings"] / wavelength
        smooth = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        out.append(1 / ((1 - smooth) / s["factor"] + smooth))
    divisors = np.array(out, dtype=np.float32)
    plain = cfg["rope_theta"] ** (-np.arange(0, d, 2) / d)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config_object(cfg))
    assert np.allclose(plain / divisors, scaled.numpy(), rtol=1e-6), "not the frequencies of the reference"
    return divisors


def write_gguf(path, name, spec, salt):
    cfg = spec["config"]
    writer = gguf.GGUFWriter(path, cfg["model_type"].replace("mixtral", "llama"))
    writer.add_name(name)
    writer.add_vocab_size(cfg["vocab_size"])
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_head_count(cfg["num_attention_heads"])
    writer.add_head_count_kv(cfg["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_rope_freq_base(cfg["rope_theta"])
    writer.add_rope_dimension_count(cfg["hidden_size"] // cfg["num_attention_heads"])
    if cfg["model_type"] == "mixtral":
        writer.add_expert_count(cfg["num_local_experts"])
        writer.add_expert_used_count(cfg["num_experts_per_tok"])
    gguf_tokenizer.write_metadata(writer, spec.get("pre", "smollm"), spec.get("add_bos", False))
    tensors = gguf_tensors(tiny.fill_all(salt, cfg), cfg)
    if cfg.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", rope_freqs(cfg))
    for tensor, value in tensors.items():
        kind = "F32" if "norm" in tensor else spec["types"].get(tensor.removesuffix(".weight"), spec.get("default"))
        writer.add_tensor(tensor, encode(value, kind), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path):
    """Name -> (type, float32 values) as the `gguf` package decodes them."""
    reader = gguf.GGUFReader(path)
    return {
        t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32))
        for t in reader.tensors
    }


def tensor_facts(held):
    out = {}
    for name, (kind, value) in held.items():
        row = value.reshape(-1, value.shape[-1])[0]
        crc = zlib.crc32(np.ascontiguousarray(value).tobytes())
        out[name] = {"type": kind, "shape": list(value.shape), "crc32_f32": crc, "first8": tiny.floats(row[:8])}
    return out


def against_transformers_loader(path, records):
    """Largest difference to transformers' own GGUF reader, a second opinion on names and row order."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        logits = [ref.full_logits(model, r["ids"])[-1] for r in records]
    except Exception as e:  # noqa: BLE001 - the message is the result
        return f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"
    return max(float(np.abs(a - np.array(r["last_logits"])).max()) for a, r in zip(logits, records))


def make(name, directory, salt, final=True):
    spec = VARIANTS[name]
    cfg = spec["config"]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.gguf"
    write_gguf(path, name, spec, salt)
    held = read_gguf(path)
    published = published_tensors({n: v for n, (_, v) in held.items()}, cfg)
    prompts = [(label, tiny.prompt(salt, label, n, cfg["vocab_size"])) for label, n in (("short", 7), ("long", 24))]
    with tempfile.TemporaryDirectory() as temp:
        config_object(cfg).save_pretrained(temp)
        tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in published.items()}
        save_file(tensors, Path(temp) / "model.safetensors", metadata={"format": "pt"})
        records = [ref.record(lambda: ref.load(temp), *p) for p in prompts]
    for r in records:
        if reference_numpy.supports(cfg):
            exact = reference_numpy.forward(cfg, published, r["ids"])[-1]
            error = float(np.abs(exact - np.array(r["last_logits"])).max())
            assert error < 1e-4, error
            r["max_error_to_float64"] = tiny.short_float(error)
    worst = min(r["min_relative_margin"] for r in records)
    good = worst >= spec.get("margin", tiny.MIN_RELATIVE_MARGIN) and all(len(set(r["greedy"])) >= 4 and r["cached_agrees"] for r in records)
    good = good and all(r.get("min_expert_margin", 1.0) > 1e-3 for r in records)
    if not final:
        return good
    assert good, f"{name}: margin {worst}"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": ref.REFERENCE | {"gguf": "0.19.0"},
        "config": cfg,
        "weights": {"salt": salt, "sha256": tiny.sha256(path)},
        "tensors": tensor_facts(held),
        "tokenizer": gguf_tokenizer.golden(spec.get("pre", "smollm"), spec.get("add_bos", False)),
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    loader = against_transformers_loader(path, records)
    print(f"{name:14} salt {salt:3} file {path.stat().st_size:6} folder {size:6} margin {worst:.3f} hf loader {loader}")


def main(arguments):
    for name in [a for a in arguments if not a.startswith("--")] or list(VARIANTS):
        if "--search" not in arguments:
            make(name, tiny.LLAMA / name, VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next(s for s in range(1, 3000) if make(name, Path(temp), s, final=False))
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
