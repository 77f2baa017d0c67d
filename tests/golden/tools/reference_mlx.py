"""The second reference: mlx-lm on CPU, float32. What the makers of its checkpoints share.

A maker (`make_*_mlx.py`) is a `Line`: where its goldens are, how a config is spelled, which tensors fill the
model, and what a salt must satisfy beside clear greedy steps.
"""

import copy
import json
import os
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

mx.set_default_device(mx.cpu)

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
REFERENCE = {
    "name": "mlx-lm",
    "version": mlx_lm.__version__,
    "mlx": mx.__version__,
    "device": "cpu",
    "dtype": "float32 (scales, biases, norms and unquantised weights upcast)",
}
MIN_DISTINCT_TOKENS = 4


def build(values):
    model_class, args_class = mlx_utils._get_classes(values)
    return model_class(args_class.from_dict(copy.deepcopy(values)))


def load(directory):
    """mlx-lm's model of a directory with every float tensor upcast; packed tensors stay."""
    model, _ = mlx_utils.load_model(Path(directory))
    model.set_dtype(mx.float32)
    return model


def shapes_of(model):
    return {name: value.shape for name, value in tree_flatten(model.parameters())}


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


def decoded(model):
    """mlx-lm's names -> values, packed ones decoded from their bytes by our own code."""
    number = lambda v: np.array(v.astype(mx.float32) if v.dtype == mx.bfloat16 else v)
    flat = {k: number(v) for k, v in tree_flatten(model.parameters())}
    modules, out = dict(model.named_modules()), {}
    for name, value in flat.items():
        path, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        module = modules[path]
        if hasattr(module, "bits") and kind == "weight":
            scales, biases = flat[path + ".scales"], flat.get(path + ".biases")
            value = reference_numpy.dequantize_mlx(value, scales, biases, module.group_size, module.bits, module.mode)
        out[name] = value
    return out


class Refused(Exception):
    """Why a salt is not good enough."""


class Line:
    """One family's checkpoints."""

    folder = None
    variants = {}
    #: The best logit leads by this share of the range or more.
    margin = tiny.MIN_RELATIVE_MARGIN
    #: Salts that `--search` tries.
    salts = 3000

    def values(self, spec):
        """config.json as mlx-lm reads it."""
        return copy.deepcopy(spec["config"])

    def tensors(self, model, values, salt):
        """Every tensor of the model, under mlx-lm's names."""
        raise NotImplementedError

    def predicate(self, spec, model):
        """What mlx-lm quantises and how; none leaves it to mlx-lm."""
        floats = spec.get("floats")
        return floats and (lambda path, module: hasattr(module, "to_quantized") and not path.endswith(floats))

    def finish(self, spec, config):
        """Last changes of the config."""

    def long(self, spec):
        return spec.get("long", 24)

    def vocab(self, values):
        return values.get("text_config", values)["vocab_size"]

    def judge(self, directory, values):
        """A second opinion, or none: has `promising(prompts)` and `extend(record, logits)`."""
        return None

    def facts(self, directory, values):
        """More entries of golden.json, before the prompts."""
        return {}

    def write_checkpoint(self, directory, spec, salt):
        """The model filled, cast, quantised by mlx-lm and saved by it."""
        values = self.values(spec)
        model = build(values)
        model.load_weights([(name, mx.array(value)) for name, value in self.tensors(model, values, salt).items()])
        model.set_dtype(DTYPES[spec["dtype"]])
        config = values
        if spec.get("bits"):
            model, config = mlx_utils.quantize_model(
                model,
                values,
                spec.get("group", 32),
                spec["bits"],
                mode=spec.get("mode", "affine"),
                quant_predicate=self.predicate(spec, model),
            )
        self.finish(spec, config)
        mlx_utils.save_model(directory, model)
        mlx_utils.save_config(config, directory / "config.json")
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
        return values

    def record(self, directory, spec, label, ids):
        """A prompt's record, and the logits of all its positions."""
        model = load(directory)
        cached = greedy(model, ids, True)
        self.clear(label, cached)
        plain = greedy(model, ids, False)
        if plain[0] != cached[0]:
            raise Refused(f"{label}: cached and uncached differ")
        logits = full_logits(model, ids)
        return tiny.prompt_record(label, ids, logits, plain), logits

    def clear(self, label, chosen):
        ids, rows = chosen
        least = min(tiny.margin(row) / np.ptp(row) for row in rows)
        if least < self.margin:
            raise Refused(f"{label}: margin {least:.4f}")
        if len(set(ids)) < MIN_DISTINCT_TOKENS:
            raise Refused(f"{label}: only {len(set(ids))} distinct tokens")

    def run(self, spec, directory, salt):
        directory.mkdir(parents=True, exist_ok=True)
        values = self.write_checkpoint(directory, spec, salt)
        lengths = (("short", 7), ("long", self.long(spec)))
        prompts = [(label, tiny.prompt(salt, label, n, self.vocab(values))) for label, n in lengths]
        judge = self.judge(directory, values)
        if judge and not judge.promising([ids for _, ids in prompts]):
            raise Refused("a step is not clear in double precision")
        records = []
        for label, ids in prompts:
            record, logits = self.record(directory, spec, label, ids)
            if judge:
                judge.extend(record, logits)
            records.append(record)
        return values, records

    def make(self, name):
        spec, directory = self.variants[name], self.folder / name
        values, records = self.run(spec, directory, spec["salt"])
        weights = directory / "model.safetensors"
        golden = {
            "variant": name,
            "what": spec["what"],
            "reference": REFERENCE,
            "weights": {"dtype": spec["dtype"], "salt": spec["salt"], "sha256": tiny.sha256(weights)},
        }
        tiny.write_json(directory / "golden.json", golden | self.facts(directory, values) | {"prompts": records})
        size = sum(f.stat().st_size for f in directory.iterdir())
        worst = min(r["min_relative_margin"] for r in records)
        print(f"{name:22} salt {spec['salt']:4} folder {size:7} margin {worst:.3f}", flush=True)

    def search(self, name):
        with tempfile.TemporaryDirectory() as temp:
            for salt in range(1, self.salts):
                try:
                    self.run(self.variants[name], Path(temp) / "m", salt)
                except Refused:
                    continue
                print(f"{name}: salt {salt}", flush=True)
                return
        print(f"{name}: nothing found", flush=True)

    def checkable(self, directory, temp):
        """Makes a checkpoint of transformers readable for mlx-lm, in `temp`."""
        (temp / "config.json").symlink_to(directory / "config.legacy.json")
        (temp / "model.safetensors").symlink_to(directory / "model.safetensors")

    def cross_check(self, names, path):
        """mlx-lm on checkpoints made by transformers."""
        out = {"reference": REFERENCE, "variants": {}}
        for name in names:
            golden, entry = json.loads((self.folder / name / "golden.json").read_text()), {}
            with tempfile.TemporaryDirectory() as temp:
                self.checkable(self.folder / name, Path(temp))
                try:
                    for p in golden["prompts"]:
                        model = load(temp)
                        logits = full_logits(model, p["ids"])[-1]
                        difference = float(np.abs(logits - np.array(p["last_logits"], dtype=np.float32)).max())
                        same = greedy(model, p["ids"], False)[0] == p["greedy"]
                        entry[p["name"]] = {"max_logit_difference": tiny.short_float(difference), "greedy_equal": same}
                except Exception as e:  # noqa: BLE001 - the message is the result
                    entry["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
            out["variants"][name] = entry
            print(f"{name:20} {entry}", flush=True)
        tiny.write_json(path, out)

    def main(self, arguments, checked=(), path=None):
        os.umask(0o022)
        if "--cross-check" in arguments:
            return self.cross_check(checked, path)
        for name in [a for a in arguments if not a.startswith("--")] or list(self.variants):
            (self.search if "--search" in arguments else self.make)(name)
