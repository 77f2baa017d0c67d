"""Writes tests/golden/gemma/mlx-*/: tiny gemma checkpoints quantised by mlx-lm, and what it computes.

    python make_gemma_mlx.py                every MLX variant of gemma_variants.py
    python make_gemma_mlx.py --search NAME  print the first good salts

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import sys

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import reference_mlx as mlx
import tiny
from gemma_variants import MIN_RELATIVE_MARGIN, MLX_VARIANTS, fill


class Gemma(mlx.Line):
    folder = tiny.GOLDEN / "gemma"
    variants = MLX_VARIANTS
    margin = MIN_RELATIVE_MARGIN

    def tensors(self, model, values, salt):
        if hasattr(model, "sanitize") and values["model_type"] != "gemma3n":
            model.sanitize({})  # no lm_head: the embedding is the head
        plain = values.get("text_config", values)["model_type"] in ("gemma3n_text", "gemma4_text")
        return {name: fill(tiny, salt, name, shape, not plain) for name, shape in mlx.shapes_of(model).items()}

    def predicate(self, spec, model):
        return getattr(model, "quant_predicate", None)

    def record(self, directory, spec, label, ids):
        if not spec.get("always_cached"):
            return super().record(directory, spec, label, ids)
        # Without a cache mlx-lm's gemma3n gives sharing layers keys and values of their own.
        model = mlx.load(directory)
        cached = mlx.greedy(model, ids, True)
        self.clear(label, cached)
        logits = np.array(model(mx.array([ids]), cache=make_prompt_cache(model))[0])
        return tiny.prompt_record(label, ids, logits, cached), logits


if __name__ == "__main__":
    Gemma().main(sys.argv[1:])
