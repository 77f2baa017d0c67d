"""Writes tests/golden/deepseek/mlx-*/ (checkpoints saved by mlx-lm) and cross_check.json.

    python make_deepseek_mlx.py                 every MLX variant of deepseek_variants.py
    python make_deepseek_mlx.py --search NAME   print the first good salts
    python make_deepseek_mlx.py --cross-check   run mlx-lm on the checkpoints of make_deepseek.py

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import sys

import numpy as np

import deepseek_numpy
import reference_mlx as mlx
import tiny
from deepseek_variants import MLX_VARIANTS, VARIANTS, fill

CLASSES = {"deepseek": "Deepseek", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32"}


def published(decoded, cfg):
    """Published names -> float64 values."""
    out, by_head = {}, {}
    for name, value in decoded.items():
        value = value.astype(np.float64)
        if ".switch_mlp." in name:
            prefix, matrix = name.split("switch_mlp.")
            for e in range(cfg["n_routed_experts"]):
                out[f"{prefix}experts.{e}.{matrix}"] = value[e]
        elif "embed_q" in name or "unembed_out" in name:
            by_head[name.removesuffix(".weight")] = value
        else:
            out[name] = value
    for path, k in by_head.items():
        if path.endswith(".embed_q"):
            prefix = path.removesuffix("embed_q")
            joined = np.concatenate([k.swapaxes(1, 2), by_head[prefix + "unembed_out"]], axis=1)
            out[prefix + "kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    return out


class Exact:
    """The float64 computation on the values that the packed bytes mean, and how clear choices are."""

    def __init__(self, directory, cfg):
        self.cfg, self.weights = cfg, published(mlx.decoded(mlx.load(directory)), cfg)

    def promising(self, prompts):
        return deepseek_numpy.promising(self.cfg, self.weights, prompts)

    def extend(self, record, logits):
        error = np.abs(logits - deepseek_numpy.forward(self.cfg, self.weights, record["ids"])).max()
        assert error < 1e-4, error
        record["max_error_to_float64"] = tiny.short_float(error)
        gap = deepseek_numpy.min_gap(self.cfg, self.weights, record["ids"] + record["greedy"])
        record["min_choice_gap"] = tiny.short_float(gap)


class Deepseek(mlx.Line):
    folder = tiny.GOLDEN / "deepseek"
    variants = MLX_VARIANTS
    salts = 20000

    def values(self, spec):
        values = super().values(spec)
        values["architectures"] = [f"{CLASSES[values['model_type']]}ForCausalLM"]
        return values

    def tensors(self, model, values, salt):
        return model.sanitize({name: mlx.mx.array(value) for name, value in fill(salt, values).items()})

    def long(self, spec):
        return 80 if spec["config"].get("rope_scaling") else 24

    def judge(self, directory, values):
        return Exact(directory, values)

    def checkable(self, directory, temp):
        """Through the legacy config, where there is one."""
        legacy = directory / "config.legacy.json"
        (temp / "config.json").symlink_to(legacy if legacy.exists() else directory / "config.json")
        (temp / "model.safetensors").symlink_to(directory / "model.safetensors")


if __name__ == "__main__":
    Deepseek().main(sys.argv[1:], VARIANTS, Deepseek.folder / "cross_check.json")
