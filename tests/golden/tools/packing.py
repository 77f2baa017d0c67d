"""Packs float tensors into the forms that checkpoints ship, and says what they decode to.

Written from the layouts (`reference_numpy.py` reads them back independently), for architectures
that no tool at hand quantises. Needs torch, for halves and 8-bit floats.
"""

import numpy as np
import torch

import reference_numpy

HALVES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
FP8_LARGEST = 448.0


def pack_bits(codes, bits):
    """Codes `[..., n]` as one little-endian bit stream of 32-bit words along the last axis."""
    planes = (codes[..., None] >> np.arange(bits)) & 1
    stream = planes.astype(np.uint8).reshape(*codes.shape[:-1], -1)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)


def affine(value, bits, group, dtype):
    """`weight`, `scales` and `biases`: scale and bias of a group are its range and its least value."""
    groups = value.reshape(*value.shape[:-1], -1, group).astype(np.float32)
    half = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(HALVES[dtype])
    least = groups.min(axis=-1)
    scales, biases = half((groups.max(axis=-1) - least) / (2**bits - 1)), half(least)
    s, b = scales.float().numpy()[..., None], biases.float().numpy()[..., None]
    codes = np.clip(np.rint((groups - b) / s), 0, 2**bits - 1).astype(np.int64).reshape(value.shape)
    parts = dict(weight=torch.from_numpy(pack_bits(codes, bits)), scales=scales, biases=biases)
    return parts, decode(parts, group, bits, "affine")


def mxfp4(value):
    """`weight` and `scales`: 4-bit floats with a power of two for each 32, as the byte of its exponent."""
    groups = value.reshape(*value.shape[:-1], -1, 32).astype(np.float64)
    exponent = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    scaled = groups / np.exp2(exponent)[..., None]
    codes = np.abs(scaled[..., None] - reference_numpy.E2M1).argmin(axis=-1).astype(np.int64).reshape(value.shape)
    parts = dict(weight=torch.from_numpy(pack_bits(codes, 4)), scales=torch.from_numpy((exponent + 127).astype(np.uint8)))
    return parts, decode(parts, 32, 4, "mxfp4")


def fp4(value):
    """As DeepSeek-V4 ships experts: `weight`, two codes of `mxfp4` in a signed byte, the first in the lower
    half, and `scale`, its powers of two."""
    parts, decoded = mxfp4(value)
    codes = parts["weight"].view(torch.int8)
    return dict(weight=codes, scale=parts["scales"].view(torch.float8_e8m0fnu)), decoded


def decode(parts, group, bits, mode):
    number = lambda t: t.numpy() if t.dtype in (torch.uint32, torch.uint8) else t.float().numpy()
    biases = number(parts["biases"]) if "biases" in parts else None
    return reference_numpy.dequantize_mlx(number(parts["weight"]), number(parts["scales"]), biases, group, bits, mode)


def fp8(value, block, published_v4=False):
    """`weight` of 8-bit floats and `weight_scale_inv`, a factor for each block of rows and columns.

    DeepSeek-V4 calls the factors `scale`; they are powers of two, stored as the byte of their exponent."""
    rows, columns = (-(-n // block) for n in value.shape)
    scales, codes = np.ones((rows, columns), np.float32), torch.zeros(value.shape, dtype=torch.float8_e4m3fn)
    decoded = np.zeros(value.shape, np.float64)
    for i in range(rows):
        for j in range(columns):
            place = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scales[i, j] = np.abs(value[place]).max() / FP8_LARGEST
            if published_v4:
                scales[i, j] = np.exp2(np.ceil(np.log2(scales[i, j])))
            codes[place] = torch.from_numpy(value[place] / scales[i, j]).to(torch.float8_e4m3fn)
            decoded[place] = codes[place].float().numpy() * scales[i, j]
    if published_v4:
        return dict(weight=codes, scale=torch.from_numpy(scales).to(torch.float8_e8m0fnu)), decoded
    return dict(weight=codes, weight_scale_inv=torch.from_numpy(scales)), decoded
