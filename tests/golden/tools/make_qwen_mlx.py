"""Writes tests/golden/qwen/mlx-*/ (checkpoints quantised by mlx-lm) and cross_check.json.

    python make_qwen_mlx.py                 every MLX variant of qwen_variants.py
    python make_qwen_mlx.py --search NAME   print the first good salts
    python make_qwen_mlx.py --cross-check   run mlx-lm on the checkpoints of make_qwen.py

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import sys

import numpy as np

import qwen_numpy
import reference_mlx as mlx
import tiny
from qwen_variants import MLX_VARIANTS, VARIANTS, shapes

CLASSES = {"qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}


class Exact:
    """The float64 computation on the values that the packed bytes mean."""

    def __init__(self, directory, cfg):
        self.cfg, self.weights = cfg, {}
        for name, value in mlx.decoded(mlx.load(directory)).items():
            if ".switch_mlp." not in name:
                self.weights[name] = value.astype(np.float64)
                continue
            prefix, matrix = name.split("switch_mlp.")
            for e in range(cfg["num_experts"]):
                self.weights[f"{prefix}experts.{e}.{matrix}"] = value[e].astype(np.float64)

    def promising(self, prompts):
        return qwen_numpy.promising(self.cfg, self.weights, prompts)

    def extend(self, record, logits):
        error = np.abs(logits - qwen_numpy.forward(self.cfg, self.weights, record["ids"])).max()
        assert error < 1e-4, error
        record["max_error_to_float64"] = tiny.short_float(error)


class Qwen(mlx.Line):
    """Without a predicate of ours mlx-lm uses the model's own: routers of qwen3_moe have 8 bits."""

    folder = tiny.GOLDEN / "qwen"
    variants = MLX_VARIANTS
    salts = 5000

    def values(self, spec):
        values = super().values(spec)
        values.setdefault("mlp_only_layers", [])
        values.setdefault("decoder_sparse_step", 1)
        values["architectures"] = [f"{CLASSES[values['model_type']]}ForCausalLM"]
        return values

    def tensors(self, model, values, salt):
        tied = values["tie_word_embeddings"]
        filled = {n: mlx.mx.array(tiny.fill(salt, n, s, tied)) for n, s in shapes(values).items()}
        return model.sanitize(filled)

    def judge(self, directory, values):
        return Exact(directory, values)


if __name__ == "__main__":
    Qwen().main(sys.argv[1:], VARIANTS, Qwen.folder / "cross_check.json")
