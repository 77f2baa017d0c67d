"""Writes tests/golden/llama/mlx-*/ (checkpoints quantised by mlx-lm) and cross_check.json.

    python make_llama_mlx.py                 every MLX variant
    python make_llama_mlx.py --search NAME   print the first good salts
    python make_llama_mlx.py --cross-check   run mlx-lm on the checkpoints of make_llama.py

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import json
import sys

import numpy as np

import reference_mlx as mlx
import reference_numpy
import tiny
from llama_variants import BASE, VARIANTS

MLX_BASE = BASE | dict(hidden_size=64)
MLX_MIXTRAL = MLX_BASE | dict(
    model_type="mixtral", intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, rope_theta=1000000.0
)

MIXED_TENSORS = {
    "model.embed_tokens": dict(group_size=32, bits=8),
    "model.layers.0.mlp.down_proj": dict(group_size=64, bits=6),
    "model.layers.1.self_attn.v_proj": False,
    "model.layers.1.mlp.gate_proj": None,
}

#: `mixed`: tensor -> its own parameters, False (not quantised and said so in the config), or
#: None (not quantised, and the config does not name it: only the missing scales tell).
MLX_VARIANTS = {
    "mlx-4bit-g32": dict(what="affine, 4 bits, groups of 32, float16", bits=4, group=32, dtype="F16", salt=131),
    "mlx-8bit-g32": dict(what="affine, 8 bits, groups of 32, bfloat16", bits=8, group=32, dtype="BF16", salt=24),
    "mlx-3bit-g32": dict(what="affine, 3 bits, groups of 32, float16", bits=3, group=32, dtype="F16", salt=39),
    "mlx-5bit-g32": dict(what="affine, 5 bits, groups of 32, float32", bits=5, group=32, dtype="F32", salt=97),
    "mlx-6bit-g64": dict(what="affine, 6 bits, groups of 64, bfloat16", bits=6, group=64, dtype="BF16", salt=159),
    "mlx-mxfp4": dict(
        what="mxfp4: 4-bit floats e2m1, groups of 32 with one exponent byte, no biases; bfloat16",
        bits=4,
        group=32,
        mode="mxfp4",
        dtype="BF16",
        salt=100,
    ),
    "mlx-mixed": dict(
        what="affine, 4 bits, groups of 32, float32; tied embedding (also the output head) at 8 bits, one matrix at "
        "6 bits in groups of 64, one not quantised by a false in the config, one not quantised without a word",
        bits=4,
        group=32,
        dtype="F32",
        salt=37,
        config=MLX_BASE | dict(tie_word_embeddings=True),
        mixed=MIXED_TENSORS,
    ),
    "mlx-mixtral-4bit": dict(
        what="mixtral, affine, 4 bits, groups of 32, float16; the experts stacked under switch_mlp, router at 8 bits",
        bits=4,
        group=32,
        dtype="F16",
        salt=115,
        config=MLX_MIXTRAL,
        mixed={f"model.layers.{i}.block_sparse_moe.gate": dict(group_size=64, bits=8) for i in range(2)},
    ),
}
for spec in MLX_VARIANTS.values():
    spec.setdefault("config", MLX_BASE)


class Exact:
    """The float64 computation on the values that the packed bytes mean, decoded by our own code."""

    def __init__(self, directory, cfg):
        self.cfg, self.weights = cfg, {}
        for name, value in mlx.decoded(mlx.load(directory)).items():
            if ".switch_mlp." not in name:
                self.weights[name] = value
                continue
            prefix, matrix = name.split("switch_mlp.")
            part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[matrix.split(".")[0]]
            for e in range(cfg["num_local_experts"]):
                self.weights[f"{prefix}experts.{e}.{part}.weight"] = value[e]

    def promising(self, prompts):
        return True

    def extend(self, record, logits):
        error = np.abs(logits - reference_numpy.forward(self.cfg, self.weights, record["ids"])).max()
        assert error < 1e-4, error
        record["max_error_to_float64"] = tiny.short_float(error)


class Llama(mlx.Line):
    folder = tiny.LLAMA
    variants = MLX_VARIANTS

    def values(self, spec):
        values = super().values(spec)
        values["architectures"] = [{"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}[values["model_type"]]]
        return values

    def tensors(self, model, values, salt):
        return model.sanitize({name: mlx.mx.array(value) for name, value in tiny.fill_all(salt, values).items()})

    def predicate(self, spec, model):
        mixed = spec.get("mixed", {})

        def chosen(path, _module):
            own = mixed.get(path, True)
            return bool(own) and (own if own is True else dict(own, mode="affine"))

        return chosen

    def finish(self, spec, config):
        for path, chosen in spec.get("mixed", {}).items():
            if chosen is False:
                config["quantization"][path] = False

    def judge(self, directory, values):
        return Exact(directory, values)

    def facts(self, directory, values):
        """The first 8 values of row 0 of every matrix, to find a decoding fault by tensor."""
        exact = sorted(Exact(directory, values).weights.items())
        return {"first_values": {k: tiny.floats(v[0, :8]) for k, v in exact if v.ndim == 2}}

    def checkable(self, directory, temp):
        config = json.loads((directory / "config.legacy.json").read_text())
        if "original_max_position_embeddings" in config:  # mlx-lm looks for it inside only
            config["rope_scaling"]["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        (temp / "config.json").write_text(json.dumps(config))
        (temp / "model.safetensors").symlink_to(directory / "model.safetensors")


if __name__ == "__main__":
    Llama().main(sys.argv[1:], VARIANTS, tiny.LLAMA / "cross_check.json")
