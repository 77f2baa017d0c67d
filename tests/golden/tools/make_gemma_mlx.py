"""Writes tests/golden/gemma/mlx-*/: tiny gemma checkpoints quantised by mlx-lm, and what it computes.

    python make_gemma_mlx.py                every MLX variant of gemma_variants.py
    python make_gemma_mlx.py --search NAME  print the first good salts

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import copy
import os
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils
from mlx_lm.models.cache import make_prompt_cache

import tiny
from gemma_variants import MIN_RELATIVE_MARGIN, MLX_VARIANTS, fill
from make_llama_mlx import DTYPES, REFERENCE, full_logits, greedy, load

GEMMA = tiny.GOLDEN / "gemma"


def write_checkpoint(directory, spec, salt):
    values = copy.deepcopy(spec["config"])
    model_class, args_class = mlx_utils._get_classes(values)
    model = model_class(args_class.from_dict(values))
    if hasattr(model, "sanitize") and values["model_type"] != "gemma3n":
        model.sanitize({})  # no lm_head: the embedding is the head
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    plain = text_config(values)["model_type"] in ("gemma3n_text", "gemma4_text")
    weights = {name: mx.array(fill(tiny, salt, name, shape, not plain)) for name, shape in shapes.items()}
    model.load_weights(list(weights.items()))
    model.set_dtype(DTYPES[spec["dtype"]])
    predicate = getattr(model, "quant_predicate", None)
    model, config = mlx_utils.quantize_model(model, values, spec["group"], spec["bits"], quant_predicate=predicate)
    mlx_utils.save_model(directory, model)
    mlx_utils.save_config(config, directory / "config.json")
    (directory / "model.safetensors.index.json").unlink()


def text_config(values):
    return values.get("text_config", values)


def record(directory, name, ids, always_cached):
    model = load(directory)
    cached = greedy(model, ids, True)
    if always_cached:
        # Without a cache mlx-lm's gemma3n gives sharing layers keys and values of their own.
        logits = np.array(model(mx.array([ids]), cache=make_prompt_cache(model))[0])
        return tiny.prompt_record(name, ids, logits, cached)
    plain = greedy(model, ids, False)
    assert plain[0] == cached[0], f"{directory}: {name}: cached and uncached differ"
    return tiny.prompt_record(name, ids, full_logits(model, ids), plain)


def make(name, directory, salt, final=True):
    spec = MLX_VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(directory, spec, salt)
    vocab = text_config(spec["config"])["vocab_size"]
    prompts = [(label, tiny.prompt(salt, label, n, vocab)) for label, n in (("short", 7), ("long", 24))]
    records = []
    for prompt in prompts:
        r = record(directory, *prompt, spec.get("always_cached", False))
        if r["min_relative_margin"] < MIN_RELATIVE_MARGIN or len(set(r["greedy"])) < 4:
            assert not final, f"{name}: {r['min_relative_margin']}, {r['greedy']}"
            return False
        records.append(r)
    if not final:
        return True
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": REFERENCE,
        "weights": {"dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{name:18} salt {salt:4} folder {size:7}")


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or list(MLX_VARIANTS):
        if "--search" not in arguments:
            make(name, GEMMA / name, MLX_VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next(s for s in range(1, 3000) if make(name, Path(temp) / "m", s, final=False))
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
