"""Writes tests/golden/qwen/<variant>/ for the qwen lines with linear attention, by transformers.

    python make_qwen_next.py                 every variant of qwen_next_variants.py
    python make_qwen_next.py --search NAME   print the first good salts

Run it in the environment of requirements.txt. See README.md.
"""

import copy
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import reference_torch as ref
import tiny
from qwen_next_variants import VARIANTS, fill

tiny.GREEDY_TOKENS = 16
# Four steps more than elsewhere, and prompts long enough for two chunks: clear ones are rarer.
tiny.MIN_RELATIVE_MARGIN = 0.015
QWEN = tiny.GOLDEN / "qwen"
MIN_DISTINCT_TOKENS = 4
MIN_EXPERT_MARGIN = 0.001


def config_object(values):
    values = copy.deepcopy(values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def model_of(spec, salt):
    """The model, every tensor filled by the rule and rounded as the file will hold it."""
    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[spec["dtype"]]
    model = AutoModelForCausalLM.from_config(config_object(spec["config"]), dtype=torch.float32)
    tied = spec["config"]["tie_word_embeddings"]
    for name, tensor in model.named_parameters():
        values = torch.from_numpy(fill(salt, name, tuple(tensor.shape), tied))
        tensor.copy_(values.to(kind).float())
    return model.float().eval()


def published(model, spec):
    """Names and types of the file: experts one by one where the publishers have them so."""
    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[spec["dtype"]]
    out = {}
    for name, value in model.named_parameters():
        value = value.detach().to(kind)
        if name.endswith("experts.gate_up_proj") and spec["config"]["model_type"] == "qwen3_next":
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                base = name.removesuffix("gate_up_proj")
                out[f"{base}{e}.gate_proj.weight"] = gate
                out[f"{base}{e}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj") and spec["config"]["model_type"] == "qwen3_next":
            for e, down in enumerate(value):
                out[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down
        elif name == "lm_head.weight" and spec["config"]["tie_word_embeddings"]:
            continue
        else:
            out[name] = value
    # Files carry heads for drafts, which plain generation does not use.
    out["mtp.norm.weight"] = torch.ones(spec["config"]["hidden_size"], dtype=kind)
    if "nested" in spec:
        out = {k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k: v for k, v in out.items()}
        out["model.visual.patch_embed.proj.bias"] = torch.zeros(8, dtype=kind)
    return {k: v.contiguous().clone() for k, v in out.items()}


def write_config(directory, spec):
    config = config_object(spec["config"])
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[spec["dtype"]]
    config.save_pretrained(directory)
    path = directory / "config.json"
    values = json.loads(path.read_text())
    if "nested" in spec:
        # As Qwen publishes it: the text model below one key, beside the vision tower's.
        text = {k: v for k, v in values.items() if k not in ("architectures", "transformers_version")}
        values = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": spec["nested"],
            "text_config": text,
            "tie_word_embeddings": spec["config"]["tie_word_embeddings"],
            "vision_config": {"model_type": "qwen3_5_vision", "hidden_size": 8, "depth": 1},
        }
    tiny.write_json(path, values)


def promising(model, ids):
    """Whether every greedy step is decided clearly; stops at the first that is not."""
    out = model(torch.tensor([ids]), use_cache=True)
    for _ in range(tiny.GREEDY_TOKENS):
        row = out.logits[0, -1].numpy()
        if tiny.margin(row) < tiny.MIN_RELATIVE_MARGIN * (row.max() - row.min()):
            return False
        out = model(torch.tensor([[int(row.argmax())]]), cache=out.cache, use_cache=True)
    return True


def make(name, directory, salt, final=True):
    spec = VARIANTS[name]
    model = model_of(spec, salt)
    prompts = [(label, tiny.prompt(salt, label, spec[label], spec["config"]["vocab_size"])) for label in ("short", "long")]
    records = []
    if not final and not all(promising(model, ids) for _, ids in prompts):
        return ["margin"]
    for label, ids in prompts:
        records.append(ref.record(lambda: model, label, ids))
        r = records[-1]
        bad = []
        if r["min_relative_margin"] < tiny.MIN_RELATIVE_MARGIN:
            bad.append(f"{label}: margin {r['min_relative_margin']}")
        if len(set(r["greedy"])) < MIN_DISTINCT_TOKENS:
            bad.append(f"{label}: tokens {r['greedy']}")
        if r.get("min_expert_margin", 1.0) < MIN_EXPERT_MARGIN:
            bad.append(f"{label}: experts {r['min_expert_margin']}")
        if not r["cached_agrees"]:
            bad.append(f"{label}: the chunked and the stepwise rule differ")
        if bad and not final:
            return bad
        assert not bad, f"{name}: {bad}"
    if not final:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, spec)
    save_file(published(model, spec), directory / "model.safetensors", metadata={"format": "pt"})
    weights = directory / "model.safetensors"
    golden = {
        "variant": name,
        "what": spec["what"],
        "reference": ref.REFERENCE,
        "weights": {"dtype": spec["dtype"], "salt": salt, "sha256": tiny.sha256(weights)},
        "prompts": records,
    }
    tiny.write_json(directory / "golden.json", golden)
    worst = min(r["min_relative_margin"] for r in records)
    print(f"{name:18} salt {salt:4} margin {worst:.3f}", flush=True)


def main(arguments):
    os.umask(0o022)
    for name in [a for a in arguments if not a.startswith("--")] or VARIANTS:
        if "--search" not in arguments:
            make(name, QWEN / name, VARIANTS[name]["salt"])
            continue
        with tempfile.TemporaryDirectory() as temp:
            salt = next((s for s in range(1, 3000) if not make(name, Path(temp), s, final=False)), None)
        print(f"{name}: salt {salt}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
