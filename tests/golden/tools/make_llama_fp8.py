"""Writes tests/golden/llama/fp8-*/: weights of 8-bit floats as checkpoints ship them.

    python make_llama_fp8.py                every variant
    python make_llama_fp8.py --search NAME  print the first good salt

The golden is transformers' on the decoded weights, code (by torch's float8_e4m3fn) times scale in
float32: its own 8-bit kernels need a GPU and round activations too. Run it in the environment of
requirements.txt.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import make_llama_newer as newer
import numpy as np
import reference_torch as ref
import tiny
import torch
from llama_newer_variants import MINISTRAL3, SMALL, yarn
from safetensors.torch import save_file

LARGEST = 448.0

VARIANTS = {
    "fp8-blocks": dict(
        what="a scale for each block of 16 x 16, which the matrices of 40 rows or columns do not fill; lm_head and "
        "norms in bfloat16",
        config=SMALL | dict(model_type="llama", intermediate_size=40, max_position_embeddings=128)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        block=[16, 16],
        dtype="F32",
        salt=10,
    ),
    "fp8-tensor": dict(
        what="ministral3 with one scale a matrix, a scalar of bfloat16, and scales of activations, which are not used",
        config=MINISTRAL3 | yarn(0.5),
        block=None,
        dtype="F32",
        salt=10,
    ),
}


def quantize(value, block):
    """Codes, and the scales that decode them."""
    rows, columns = value.shape
    height, width = block or (rows, columns)
    scales = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scale = np.float32(np.abs(value[part]).max() / LARGEST)
            if block is None:
                scale = torch.tensor(scale).bfloat16().float().numpy()
            scales[i, j] = scale
            codes[part] = torch.from_numpy(value[part] / scale).to(torch.float8_e4m3fn)
    return codes, torch.from_numpy(scales)


def decode(codes, scales, block):
    plain = codes.float().numpy()
    height, width = block or plain.shape
    wide = np.repeat(np.repeat(scales.numpy(), height, axis=0), width, axis=1)
    return plain * wide[: plain.shape[0], : plain.shape[1]]


def write(directory, spec, salt):
    """The checkpoint, and the decoded weights."""
    model = newer.build(spec, newer.config_object(spec))
    stored, decoded = {}, {}
    for name, value in model.state_dict().items():
        filled = tiny.fill(salt, name, tuple(value.shape))
        if value.ndim == 2 and ".layers." in name:
            codes, scales = quantize(filled, spec["block"])
            stored[name] = codes
            decoded[name] = torch.from_numpy(decode(codes, scales, spec["block"]))
            if spec["block"]:
                stored[name + "_scale_inv"] = scales
            else:
                stored[name + "_scale_inv"] = scales.reshape([]).bfloat16()
                stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.25).bfloat16()
        else:
            stored[name] = torch.from_numpy(filled).bfloat16()
            decoded[name] = stored[name].float()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    with tempfile.TemporaryDirectory() as temp:
        newer.config_object(spec).save_pretrained(temp)
        config = json.loads((Path(temp) / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = dict(
        quant_method="fp8",
        activation_scheme="dynamic" if spec["block"] else "static",
        weight_block_size=spec["block"],
        modules_to_not_convert=["lm_head"],
    )
    tiny.write_json(directory / "config.json", config)
    return decoded


def make(name, directory, salt, final=True):
    spec = VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    decoded = write(directory, spec, salt)
    config = newer.config_object(spec)
    config._attn_implementation = "eager"
    model = newer.build(spec, config)
    model.load_state_dict(decoded)
    model.eval()
    prompts = [(label, tiny.prompt(salt, label, n, 64)) for label, n in (("short", 7), ("long", 40))]
    records = [newer.record(lambda: model, *p) for p in prompts]
    bad = newer.complaints(records)
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": ref.REFERENCE,
        "weights": {"dtype": "F8_E4M3", "salt": salt, "sha256": tiny.sha256(weights)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    print(f"{name:16} salt {salt:3} file {weights.stat().st_size}")


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or list(VARIANTS):
        if "--search" not in arguments:
            make(name, tiny.LLAMA / name, VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next(s for s in range(1, 3000) if not make(name, Path(temp) / "m", s, final=False))
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
