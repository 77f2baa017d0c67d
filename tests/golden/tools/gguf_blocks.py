"""Encoders for Q4_K and Q6_K, which the `gguf` package can only decode.

Plain round-to-nearest: the aim is a valid block with every field in use, not the best fit.
Field order follows ggml-common.h (block_q4_K, block_q6_K) and is checked against the package's
decoder by the caller.
"""

import numpy as np

BLOCK = 256


def half(x):
    return x.astype(np.float16).astype(np.float64)


def divide(a, b):
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape), where=b != 0)


def quantize_q4_k(x):
    """Rows of a multiple of 256 values -> (bytes, the values they stand for)."""
    sub = x.astype(np.float64).reshape(-1, 8, 32)
    low = np.maximum(-sub.min(axis=-1), 0)
    step = (sub.max(axis=-1) + low) / 15
    d, dmin = half(step.max(axis=-1) / 63), half(low.max(axis=-1) / 63)
    sc = np.clip(np.rint(divide(step, d[:, None])), 0, 63).astype(np.uint8)
    mn = np.clip(np.rint(divide(low, dmin[:, None])), 0, 63).astype(np.uint8)
    scale, offset = (d[:, None] * sc)[..., None], (dmin[:, None] * mn)[..., None]
    q = np.clip(np.rint(divide(sub + offset, scale)), 0, 15).astype(np.uint8)
    value = (scale * q - offset).reshape(x.shape)

    packed_scales = np.concatenate(
        [
            sc[:, :4] | (sc[:, 4:] >> 4 << 6),
            mn[:, :4] | (mn[:, 4:] >> 4 << 6),
            (sc[:, 4:] & 15) | ((mn[:, 4:] & 15) << 4),
        ],
        axis=-1,
    )
    pairs = q.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    raw = [d.astype(np.float16)[:, None].view(np.uint8), dmin.astype(np.float16)[:, None].view(np.uint8)]
    return np.concatenate([*raw, packed_scales, nibbles], axis=-1).reshape(*x.shape[:-1], -1), value


def quantize_q6_k(x):
    """Rows of a multiple of 256 values -> (bytes, the values they stand for)."""
    sub = x.astype(np.float64).reshape(-1, 16, 16)
    step = np.abs(sub).max(axis=-1) / 31
    d = half(step.max(axis=-1) / 127)
    # Scales are signed in the format: every second one is made negative to use the sign.
    sign = np.where(np.arange(16) % 2, -1.0, 1.0)
    sc = (sign * np.clip(np.rint(divide(step, d[:, None])), 0, 127)).astype(np.int8)
    scale = (d[:, None] * sc)[..., None]
    q = np.clip(np.rint(divide(sub, scale)), -32, 31)
    value = (scale * q).reshape(x.shape)

    u = (q + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate(
        [(u[:, :, 0] & 15) | ((u[:, :, 2] & 15) << 4), (u[:, :, 1] & 15) | ((u[:, :, 3] & 15) << 4)], axis=-1
    )
    high = (u[:, :, 0] >> 4) | (u[:, :, 1] >> 4 << 2) | (u[:, :, 2] >> 4 << 4) | (u[:, :, 3] >> 4 << 6)
    parts = [
        low.reshape(-1, 128),
        high.reshape(-1, 64),
        sc.view(np.uint8),
        d.astype(np.float16)[:, None].view(np.uint8),
    ]
    return np.concatenate(parts, axis=-1).reshape(*x.shape[:-1], -1), value
