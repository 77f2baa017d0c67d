"""Writes tests/golden/gemma3_270m.json: goldens of a real model whose weights are not checked in.

    python make_gemma3_270m.py MODEL.gguf

MODEL.gguf is Gemma 3 270M (base) in Q4_K_M, 253,113,024 bytes, under the Gemma terms: whoever runs the test
fetches it. Run it in the environment of requirements.txt.
"""

import hashlib
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import reference_torch as ref
import tiny
from make_gemma import NAMES_2, TOP
from make_llama import config_object

OUT = tiny.GOLDEN / "gemma3_270m.json"
GREEDY_TOKENS = 16
#: "The capital of France is", and ids at random, beyond the window of 512.
FACT = [2, 818, 5279, 529, 7001, 563]
LONG = 600
#: What an independent run found for the first prompt, on values rounded to bfloat16.
KNOWN_GREEDY = [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488, 3207, 528, 7001, 532]


def config_of(reader, rows):
    value = lambda key: reader.fields[f"gemma3.{key}"].contents()
    return dict(
        model_type="gemma3_text",
        vocab_size=rows,
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        sliding_window=value("attention.sliding_window"),
        rope_theta=value("rope.freq_base"),
        # Not in the file; as published.
        rope_local_base_freq=10000.0,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )


def weights_of(reader):
    """Published names and the values that the file holds. Norms are stored as they are used; the class adds one."""
    out = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        head, _, kind = tensor.name.rpartition(".")
        if head.startswith("blk."):
            _, layer, part = head.split(".")
            name = f"model.layers.{layer}.{NAMES_2[part]}.{kind}"
        else:
            name = f"{TOP[head]}.{kind}"
        out[name] = value - 1 if name.endswith("norm.weight") else value
    return out


def main(path):
    reader = gguf.GGUFReader(path)
    weights = weights_of(reader)
    config = config_object(config_of(reader, weights["model.embed_tokens.weight"].shape[0]))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    tensors = {k: torch.from_numpy(v) for k, v in weights.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    long = [2] + [int(i) for i in tiny.seeded(1, "prompt.long").integers(1000, 20000, LONG - 1)]
    prompts = []
    for name, ids in (("fact", FACT), ("beyond the window", long)):
        chosen, rows = ref.greedy_cached(model, ids, GREEDY_TOKENS)
        record = {"name": name, "ids": ids, "greedy": chosen, "greedy_margins": tiny.floats([tiny.margin(r) for r in rows])}
        prompts.append(record | {"top10": tiny.top(rows[0], 10), "range": tiny.short_float(np.ptp(rows[0]))})
        print(name, chosen, min(record["greedy_margins"]), flush=True)
    assert prompts[0]["greedy"] == KNOWN_GREEDY
    golden = {
        "model": "Gemma 3 270M, GGUF Q4_K_M (Gemma terms)",
        "gguf_sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "reference": ref.REFERENCE | {"weights": "values the GGUF holds, float32, no rounding"},
        "prompts": prompts,
    }
    tiny.write_json(OUT, golden)


if __name__ == "__main__":
    main(sys.argv[1])
