"""Writes tests/golden/qwen/mlx-qwen3-{next,5}*/, checkpoints quantised by mlx-lm.

    python make_qwen_next_mlx.py                 every MLX variant of qwen_next_variants.py
    python make_qwen_next_mlx.py --search NAME   print the first good salts

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import copy
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils

import make_llama_mlx as base
import tiny
from qwen_next_variants import MLX_VARIANTS, fill

tiny.GREEDY_TOKENS = 16
tiny.MIN_RELATIVE_MARGIN = 0.015
QWEN = tiny.GOLDEN / "qwen"
CLASSES = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}
GROUP = 32


def arguments_of(cfg):
    """The config as mlx-lm reads it: the text model's settings, in the spelling of its publishers."""
    values = copy.deepcopy(cfg)
    values["architectures"] = [f"{CLASSES[values['model_type']]}ForCausalLM"]
    values["model_type"] = values["model_type"].removesuffix("_text")
    values["full_attention_interval"] = 4
    if values["model_type"] == "qwen3_next":
        values |= values.pop("rope_parameters")
        values.pop("rope_type")
        values |= dict(mlp_only_layers=[], decoder_sparse_step=1)
    values.setdefault("intermediate_size", 32)
    return values


def write_checkpoint(directory, spec, salt):
    """The model filled by the rule under mlx-lm's own names, cast, quantised by mlx-lm and saved by it."""
    values = arguments_of(spec["config"])
    model_class, args_class = mlx_utils._get_classes(values)
    model = model_class(args_class.from_dict(copy.deepcopy(values)))
    tied = values["tie_word_embeddings"]
    weights = {}
    for name, tensor in tree_flatten(model.parameters()):
        rule = name.removeprefix("language_model.")
        weights[name] = mx.array(fill(salt, rule, tensor.shape, tied))
    model.load_weights(list(weights.items()))
    model.set_dtype(base.DTYPES[spec["dtype"]])
    # The model's own predicate would quantise routers in groups of 64, which these are too small for.
    eight = {"group_size": GROUP, "bits": 8}
    predicate = lambda path, module: (
        hasattr(module, "to_quantized")
        and (eight if path.endswith(("mlp.gate", "shared_expert_gate")) else True)
    )
    model, config = mlx_utils.quantize_model(model, values, GROUP, spec["bits"], quant_predicate=predicate)
    mlx_utils.save_model(directory, model)
    mlx_utils.save_config(config, directory / "config.json")
    (directory / "model.safetensors.index.json").unlink()


def make(name, directory, salt, final=True):
    spec = MLX_VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(directory, spec, salt)
    cfg = spec["config"]
    prompts = [(label, tiny.prompt(salt, label, spec[label], cfg["vocab_size"])) for label in ("short", "long")]
    records = []
    for label, ids in prompts:
        model = base.load(directory)
        cached = base.greedy(model, ids, True)
        clear = all(tiny.margin(r) >= tiny.MIN_RELATIVE_MARGIN * np.ptp(r) for r in cached[1])
        if not final and (not clear or len(set(cached[0])) < 4):
            return ["margin"]
        assert clear, f"{name}: {label}"
        plain = base.greedy(model, ids, False)
        if not final and plain[0] != cached[0]:
            return ["cached"]
        assert plain[0] == cached[0], f"{name}: cached and uncached differ"
        records.append(tiny.prompt_record(label, ids, base.full_logits(model, ids), plain))
    if not final:
        return []
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": base.REFERENCE,
        "weights": {"dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    print(f"{name:22} salt {salt:4} margin {min(r['min_relative_margin'] for r in records):.3f}", flush=True)


def main(arguments):
    for name in [a for a in arguments if not a.startswith("--")] or list(MLX_VARIANTS):
        if "--search" not in arguments:
            make(name, QWEN / name, MLX_VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next((s for s in range(1, 3000) if not make(name, Path(temp) / "m", s, final=False)), None)
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
