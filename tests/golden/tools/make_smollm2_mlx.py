"""Adds mlx-lm's results on the lossless MLX repack to tests/golden/smollm2.json.

    python make_smollm2_mlx.py SOURCE [DIRECTORY]

A Q4_1 block is MLX's affine 4 bits in groups of 32, a Q8_0 block is its 8 bits with bias
-128 d: only the order of bits changes. With DIRECTORY the repacked checkpoint is kept there.
Run it in the environment of requirements-mlx.txt, after make_smollm2.py.
"""

import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import tiny
from reference_mlx import REFERENCE, full_logits, load
from smollm2_gguf import GREEDY_TOKENS, SmolLM2

OUT = tiny.GOLDEN / "smollm2.json"


def pack(codes, bits):
    """Codes [rows, n] -> uint32 words; element i of a word sits at bit i * bits."""
    per_word = 32 // bits
    words = codes.astype(np.uint32).reshape(codes.shape[0], -1, per_word)
    return (words << (np.arange(per_word, dtype=np.uint32) * bits)).sum(axis=-1, dtype=np.uint32)


def repack_q4_1(raw):
    blocks = raw.reshape(raw.shape[0], -1, 20)
    scale, bias = (np.ascontiguousarray(blocks[..., i : i + 2]).view(np.float16)[..., 0] for i in (0, 2))
    codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return pack(codes.reshape(raw.shape[0], -1), 4), scale, bias


def repack_q8_0(raw):
    blocks = raw.reshape(raw.shape[0], -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.int16) + 128
    bias = (np.float32(-128) * scale.astype(np.float32)).astype(np.float16)
    assert np.array_equal(bias.astype(np.float32), np.float32(-128) * scale.astype(np.float32)), "bias not exact in f16"
    return pack(codes.reshape(raw.shape[0], -1), 8), scale, bias


def write_checkpoint(source, directory):
    tensors = {}
    for path, kind, t, order in source.rows():
        name = t.tensor_type.name
        if name == "F32":
            tensors[f"{path}.{kind}"] = mx.array(np.array(t.data, dtype=np.float32)[order])
            continue
        words, scale, bias = {"Q4_1": repack_q4_1, "Q8_0": repack_q8_0}[name](np.array(t.data)[order])
        tensors[path + ".weight"] = mx.array(words)
        tensors[path + ".scales"], tensors[path + ".biases"] = mx.array(scale), mx.array(bias)
    mx.save_safetensors(str(directory / "model.safetensors"), tensors, metadata={"format": "mlx"})
    quantization = {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
    config = source.config() | {"quantization": quantization, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def greedy(model, ids):
    cache, step, chosen, rows = make_prompt_cache(model), ids, [], []
    for _ in range(GREEDY_TOKENS):
        row = np.array(model(mx.array([step]), cache=cache)[0, -1])
        step = [int(row.argmax())]
        chosen += step
        rows.append(row)
    return chosen, rows


def main(source, directory=None):
    golden = json.loads(OUT.read_text())
    source = SmolLM2(source)
    assert source.sha256 == golden["gguf_sha256"]
    tokenizer = source.tokenizer()
    with tempfile.TemporaryDirectory() as temp:
        directory = Path(directory or temp)
        directory.mkdir(parents=True, exist_ok=True)
        write_checkpoint(source, directory)
        model = load(directory)
    golden["references"]["mlx"] = REFERENCE | {"weights": "lossless MLX repack of the GGUF"}
    for prompt in golden["prompts"]:
        last = full_logits(model, prompt["ids"])[-1]
        chosen, rows = greedy(model, prompt["ids"])
        exact = prompt["exact"]
        prompt["mlx"] = {
            "greedy": chosen,
            "greedy_text": tokenizer.decode(chosen, skip_special_tokens=False),
            "greedy_margins": tiny.floats([tiny.margin(r) for r in rows]),
            "top10": tiny.top(last, 10),
            "mean": tiny.short_float(last.astype(np.float64).mean()),
            "std": tiny.short_float(last.astype(np.float64).std()),
        }
        difference = max(abs(float(last[i]) - x) for i, x in exact["top10"])
        prompt["mlx"]["max_top10_difference_to_exact"] = tiny.short_float(difference)
        print(prompt["name"], "greedy equal:", chosen == exact["greedy"], "top-10 difference:", difference)
    tiny.write_json(OUT, golden)


if __name__ == "__main__":
    main(*sys.argv[1:])
