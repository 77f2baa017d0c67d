"""The first reference: transformers on CPU, float32, eager attention, eager experts."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import torch
import transformers

import tiny

torch.set_num_threads(1)
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

REFERENCE = {
    "name": "transformers",
    "version": transformers.__version__,
    "torch": torch.__version__.split("+")[0],
    "device": "cpu",
    "dtype": "float32",
    "attention": "eager",
}


def load(directory, config=None):
    """Model of a checkpoint directory; every tensor must be used and none may be missing."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], f"{directory}: {kind} {info[kind]}"
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return model.eval()


def full_logits(model, ids):
    """Logits of every position, [T, vocab], in one pass without cache."""
    out = model(torch.tensor([ids]), use_cache=False)
    return out.logits[0].numpy()


def greedy_uncached(model, ids, count):
    """Greedy ids, the whole sequence recomputed at each step; the end-of-text id is no stop."""
    ids, chosen, rows = list(ids), [], []
    for _ in range(count):
        row = full_logits(model, ids)[-1]
        token = int(row.argmax())
        ids.append(token)
        chosen.append(token)
        rows.append(row)
    return chosen, rows


def greedy_cached(model, ids, count):
    """Greedy ids with the key/value cache: one prefill, then one token a step."""
    out = model(torch.tensor([ids]), use_cache=True)
    chosen, rows = [], []
    for step in range(count):
        row = out.logits[0, -1].numpy()
        token = int(row.argmax())
        chosen.append(token)
        rows.append(row)
        if step + 1 < count:
            out = model(torch.tensor([[token]]), cache=out.cache, use_cache=True)
    return chosen, rows


def expert_margins(model, ids):
    """Smallest gap of router logits between the last expert taken and the first one left out."""
    gaps, hooks = [], []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):

            def hook(mod, _inputs, output):
                ranked = np.sort(output[0].numpy(), axis=-1)[:, ::-1]
                gaps.append(float((ranked[:, mod.top_k - 1] - ranked[:, mod.top_k]).min()))

            hooks.append(module.register_forward_hook(hook))
    full_logits(model, ids)
    for h in hooks:
        h.remove()
    return min(gaps) if gaps else None


def record(make_model, name, ids):
    """Golden record of one prompt. A new model per use: some rotary types keep state."""
    logits = full_logits(make_model(), ids)
    plain = greedy_uncached(make_model(), ids, tiny.GREEDY_TOKENS)
    cached = greedy_cached(make_model(), ids, tiny.GREEDY_TOKENS)
    out = tiny.prompt_record(name, ids, logits, plain)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(plain[1], cached[1]))
    if plain[0] == cached[0] and difference < 1e-4:
        out["cached_agrees"] = True
    else:
        # The rotary frequencies depend on the length so far, and keys already in the cache
        # keep those of their own step: recomputing and caching are two different functions.
        out["cached_agrees"] = False
        out["greedy_cached"] = cached[0]
        out["greedy_cached_margins"] = tiny.floats([tiny.margin(r) for r in cached[1]])
        out["greedy_cached_last_logits"] = tiny.floats(cached[1][-1])
    gap = expert_margins(make_model(), ids + plain[0])
    if gap is not None:
        out["min_expert_margin"] = tiny.short_float(gap)
    return out
