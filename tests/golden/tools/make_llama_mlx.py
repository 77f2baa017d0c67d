"""Writes tests/golden/llama/mlx-*/ (checkpoints quantised by mlx-lm) and cross_check.json.

    python make_llama_mlx.py                 every MLX variant
    python make_llama_mlx.py --search NAME   print the first good salts
    python make_llama_mlx.py --cross-check   run mlx-lm on the checkpoints of make_llama.py

Run it in the environment of requirements-mlx.txt. See README.md.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils
from mlx_lm.models.cache import make_prompt_cache

import reference_numpy
import tiny
from llama_variants import BASE, VARIANTS

mx.set_default_device(mx.cpu)

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

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
REFERENCE = {
    "name": "mlx-lm",
    "version": mlx_lm.__version__,
    "mlx": mx.__version__,
    "device": "cpu",
    "dtype": "float32 (scales, biases, norms and unquantised weights upcast)",
}


def load(directory):
    """mlx-lm's model of a directory with every float tensor upcast; packed tensors stay."""
    model, _ = mlx_utils.load_model(Path(directory))
    model.set_dtype(mx.float32)
    return model


def full_logits(model, ids):
    return np.array(model(mx.array([ids]))[0])


def greedy(model, ids, cached):
    ids, chosen, rows = list(ids), [], []
    cache = make_prompt_cache(model) if cached else None
    step = ids
    for _ in range(tiny.GREEDY_TOKENS):
        row = np.array(model(mx.array([step if cached else ids]), cache=cache)[0, -1])
        token = int(row.argmax())
        ids.append(token)
        step = [token]
        chosen.append(token)
        rows.append(row)
    return chosen, rows


def write_checkpoint(directory, spec, salt):
    """The model filled by the rule, cast, quantised by mlx-lm and saved by it."""
    values = copy.deepcopy(spec.get("config", MLX_BASE))
    values["architectures"] = [{"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}[values["model_type"]]]
    model_class, args_class = mlx_utils._get_classes(values)
    model = model_class(args_class.from_dict(values))
    weights = {k: mx.array(v) for k, v in tiny.fill_all(salt, values).items()}
    model.load_weights(list(model.sanitize(weights).items()))
    model.set_dtype(DTYPES[spec["dtype"]])
    mixed = spec.get("mixed", {})

    def predicate(path, _module):
        chosen = mixed.get(path, True)
        return bool(chosen) and (chosen if chosen is True else dict(chosen, mode="affine"))

    mode = spec.get("mode", "affine")
    model, config = mlx_utils.quantize_model(
        model, values, spec["group"], spec["bits"], mode=mode, quant_predicate=predicate
    )
    for path, chosen in mixed.items():
        if chosen is False:
            config["quantization"][path] = False
    mlx_utils.save_model(directory, model)
    mlx_utils.save_config(config, directory / "config.json")
    (directory / "model.safetensors.index.json").unlink()
    return values


def exact_weights(model, cfg):
    """Published names -> float64 values, decoded from the packed bytes by our own code."""
    flat = {k: np.array(v) for k, v in tree_flatten(model.parameters())}
    modules = dict(model.named_modules())
    out = {}
    for name, value in flat.items():
        path, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        module = modules[path]
        if hasattr(module, "bits") and kind == "weight":
            value = reference_numpy.dequantize_mlx(
                value, flat[path + ".scales"], flat.get(path + ".biases"), module.group_size, module.bits, module.mode
            )
        if ".switch_mlp." in name:
            prefix, matrix = name.split("switch_mlp.")
            part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[matrix.split(".")[0]]
            for e in range(cfg["num_local_experts"]):
                out[f"{prefix}experts.{e}.{part}.weight"] = value[e]
        else:
            out[name] = value
    return out


def record(directory, cfg, name, ids):
    model = load(directory)
    logits = full_logits(model, ids)
    plain, cached = greedy(model, ids, False), greedy(model, ids, True)
    assert plain[0] == cached[0], f"{directory}: {name}: cached and uncached differ"
    out = tiny.prompt_record(name, ids, logits, plain)
    exact = reference_numpy.forward(cfg, exact_weights(model, cfg), ids)
    out["max_error_to_float64"] = tiny.short_float(np.abs(logits - exact).max())
    return out


def complaints(records):
    out = []
    for r in records:
        if r["min_relative_margin"] < tiny.MIN_RELATIVE_MARGIN:
            out.append(f"{r['name']}: margin {r['min_relative_margin']:.4f}")
        if len(set(r["greedy"])) < 4:
            out.append(f"{r['name']}: only {len(set(r['greedy']))} distinct tokens")
        assert r["max_error_to_float64"] < 1e-4, r["max_error_to_float64"]
    return out


def samples(model, cfg):
    """The first 8 values of row 0 of every matrix, to find a decoding fault by tensor."""
    exact = exact_weights(model, cfg)
    return {k: tiny.floats(v[0, :8]) for k, v in sorted(exact.items()) if v.ndim == 2}


def make(name, directory, salt, final=True):
    spec = MLX_VARIANTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    cfg = write_checkpoint(directory, spec, salt)
    prompts = [(label, tiny.prompt(salt, label, n, cfg["vocab_size"])) for label, n in (("short", 7), ("long", 24))]
    records = [record(directory, cfg, *p) for p in prompts]
    bad = complaints(records)
    if not final:
        return bad
    assert not bad, f"{name}: {bad}"
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": REFERENCE,
        "weights": {"dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
        "first_values": samples(load(directory), cfg),
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    size = sum(f.stat().st_size for f in directory.iterdir())
    error = max(r["max_error_to_float64"] for r in records)
    worst = min(r["min_relative_margin"] for r in records)
    print(
        f"{name:18} salt {salt:3} weights {weights.stat().st_size:6} folder {size:6} margin {worst:.3f} f64 {error:.1e}"
    )


def cross_check():
    """mlx-lm on the checkpoints made by transformers, through their legacy configs."""
    out = {"reference": REFERENCE, "variants": {}}
    for name in VARIANTS:
        directory = tiny.LLAMA / name
        golden = json.loads((directory / "golden.json").read_text())
        with tempfile.TemporaryDirectory() as temp:
            config = json.loads((directory / "config.legacy.json").read_text())
            if "original_max_position_embeddings" in config:  # mlx-lm looks for it inside only
                config["rope_scaling"]["original_max_position_embeddings"] = config["original_max_position_embeddings"]
            (Path(temp) / "config.json").write_text(json.dumps(config))
            (Path(temp) / "model.safetensors").symlink_to(directory / "model.safetensors")
            entry = {}
            try:
                for p in golden["prompts"]:
                    model = load(temp)
                    logits = full_logits(model, p["ids"])[-1]
                    difference = float(np.abs(logits - np.array(p["last_logits"], dtype=np.float32)).max())
                    same = greedy(model, p["ids"], False)[0] == p["greedy"]
                    entry[p["name"]] = {"max_logit_difference": tiny.short_float(difference), "greedy_equal": same}
            except Exception as e:  # noqa: BLE001 - the message is the result
                entry["error"] = str(e).splitlines()[0][:160]
        out["variants"][name] = entry
        print(f"{name:20} {entry}")
    tiny.write_json(tiny.LLAMA / "cross_check.json", out)


def main(arguments):
    if "--cross-check" in arguments:
        return cross_check()
    for name in [a for a in arguments if not a.startswith("--")] or list(MLX_VARIANTS):
        if "--search" not in arguments:
            make(name, tiny.LLAMA / name, MLX_VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next(s for s in range(1, 2000) if not make(name, Path(temp) / "m", s, final=False))
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
