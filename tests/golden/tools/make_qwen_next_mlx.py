"""Writes tests/golden/qwen/mlx-qwen3-{next,5}*/, checkpoints quantised by mlx-lm.

    python make_qwen_next_mlx.py                 every MLX variant of qwen_next_variants.py
    python make_qwen_next_mlx.py --search NAME   print the first good salts

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import sys

import reference_mlx as mlx
import tiny
from qwen_next_variants import MLX_VARIANTS, fill

tiny.GREEDY_TOKENS = 16
CLASSES = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}


class QwenNext(mlx.Line):
    folder = tiny.GOLDEN / "qwen"
    variants = MLX_VARIANTS
    margin = 0.015

    def values(self, spec):
        """The text model's settings, in the spelling of its publishers."""
        values = super().values(spec)
        values["architectures"] = [f"{CLASSES[values['model_type']]}ForCausalLM"]
        values["model_type"] = values["model_type"].removesuffix("_text")
        values["full_attention_interval"] = 4
        if values["model_type"] == "qwen3_next":
            values |= values.pop("rope_parameters")
            values.pop("rope_type")
            values |= dict(mlp_only_layers=[], decoder_sparse_step=1)
        values.setdefault("intermediate_size", 32)
        return values

    def tensors(self, model, values, salt):
        tied, shapes = values["tie_word_embeddings"], mlx.shapes_of(model)
        return {name: fill(salt, name.removeprefix("language_model."), shape, tied) for name, shape in shapes.items()}

    def predicate(self, spec, model):
        # The model's own would quantise routers in groups of 64, which these are too small for.
        eight = {"group_size": 32, "bits": 8}
        routers = ("mlp.gate", "shared_expert_gate")
        return lambda path, module: hasattr(module, "to_quantized") and (eight if path.endswith(routers) else True)


if __name__ == "__main__":
    QwenNext().main(sys.argv[1:])
