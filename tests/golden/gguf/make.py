#!/usr/bin/env python3
"""Golden vectors for the GGUF block types. Development only; needs the packages gguf, mlx[cpu] and numpy.

For every type: random blocks, their values by `gguf.quants.dequantize`, and, where the arithmetic is
MLX's affine form, the packed codes, scales and biases. The packing is done here bit by bit, and
`mlx.core.dequantize` must give the same values from it, bit for bit, before anything is written.
With an argument N, N random blocks of each type are checked and nothing is written.
"""
import json
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

mx.set_default_device(mx.cpu)

EXTREME = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF], np.uint16)
# Byte offsets of the halves in a block.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}


def random_blocks(name, count, rng):
    elements, size = GGML_QUANT_SIZES[Type[name]]
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(count).astype(np.float32)
        if name == "F32":
            return values.view(np.uint8).reshape(count, 4)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8).reshape(count, 2)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(count, 2)
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for at in HALVES[name]:
        half = (rng.standard_normal(count) * 0.05).astype(np.float16).view(np.uint16)
        half = np.where(rng.random(count) < 0.2, rng.choice(EXTREME, count), half)
        blocks[:, at:at + 2] = half.astype("<u2").view(np.uint8).reshape(count, 2)
    return blocks


def half(blocks, at):
    return blocks[:, at:at + 2].copy().view(np.float16).astype(np.float32)[:, 0]


def nibbles(qs):
    """Low nibbles of a run of bytes, then the high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def bits_of(words):
    return np.unpackbits(words, axis=1, bitorder="little")


def k_scales(packed):
    """Scale and minimum of the eight groups, from the bit string of the twelve bytes."""
    scales, minima = [], []
    for i in range(8):
        if i < 4:
            scales.append(packed[:, i] & 63)
            minima.append(packed[:, 4 + i] & 63)
        else:
            scales.append((packed[:, 4 + i] & 15) | (packed[:, i - 4] >> 6 << 4))
            minima.append((packed[:, 4 + i] >> 4) | (packed[:, i] >> 6 << 4))
    return np.stack(scales, 1).astype(np.float32), np.stack(minima, 1).astype(np.float32)


def affine(name, blocks):
    """Codes [blocks, elements], scales and biases [blocks, groups]."""
    d = half(blocks, 0)
    if name == "Q4_0":
        return nibbles(blocks[:, 2:]), d[:, None], -8 * d[:, None]
    if name == "Q4_1":
        return nibbles(blocks[:, 4:]), d[:, None], half(blocks, 2)[:, None]
    if name == "Q5_0":
        return nibbles(blocks[:, 6:]) | bits_of(blocks[:, 2:6]) << 4, d[:, None], -16 * d[:, None]
    if name == "Q5_1":
        return nibbles(blocks[:, 8:]) | bits_of(blocks[:, 4:8]) << 4, d[:, None], half(blocks, 2)[:, None]
    if name == "Q8_0":
        return blocks[:, 2:] ^ 128, d[:, None], -128 * d[:, None]
    scales, minima = k_scales(blocks[:, 4:16])
    scales, biases = d[:, None] * scales, -(half(blocks, 2)[:, None] * minima)
    qs = blocks[:, 16:] if name == "Q4_K" else blocks[:, 48:]
    codes = np.concatenate([nibbles(qs[:, at:at + 32]) for at in range(0, 128, 32)], axis=1)
    if name == "Q5_K":
        fifth = np.concatenate([blocks[:, 16:48] >> group & 1 for group in range(8)], axis=1)
        codes = codes | fifth << 4
    return codes, scales, biases


def checked(name, blocks):
    """Values by gguf, and the affine parts once MLX agrees."""
    values = dequantize(blocks, Type[name]).reshape(blocks.shape[0], -1).astype(np.float32)
    if name not in BITS:
        return values, None
    bits = BITS[name]
    codes, scales, biases = affine(name, blocks)
    stream = (codes[:, :, None] >> np.arange(bits)) & 1
    weight = np.packbits(stream.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")
    scales, biases = (np.ascontiguousarray(x, np.float32) for x in (scales, biases))
    by_mlx = np.array(mx.dequantize(
        mx.array(weight.view(np.uint32)), mx.array(scales), mx.array(biases), group_size=32, bits=bits))
    assert by_mlx.dtype == np.float32 and np.array_equal(by_mlx, values), name
    return values, {"bits": bits, "weight": weight, "scales": scales, "biases": biases}


def text(array):
    return np.ascontiguousarray(array).tobytes().hex()


def main():
    names = ["F32", "F16", "BF16", *HALVES]
    if len(sys.argv) > 1:
        count = int(sys.argv[1])
        for name in names:
            checked(name, random_blocks(name, count, np.random.default_rng()))
            print(name, count, "blocks agree")
        return
    made_with = {package: version(package) for package in ("gguf", "mlx", "numpy")}
    types = []
    for number, name in enumerate(names):
        blocks = random_blocks(name, 4 if name.endswith("K") else 16, np.random.default_rng(number))
        values, packed = checked(name, blocks)
        entry = {"type": name, "blocks": text(blocks), "values": text(values)}
        if packed:
            entry["affine"] = {k: v if k == "bits" else text(v) for k, v in packed.items()}
        types.append(entry)
    path = Path(__file__).with_name("blocks.json")
    path.write_text(json.dumps({"made_with": made_with, "types": types}, indent=1) + "\n")


if __name__ == "__main__":
    main()
