"""What llama.cpp's samplers leave of fixed rows of logits: ../sampling/llama_cpp.json.

    PEER/bin/pip install llama-cpp-python==0.3.36 numpy
    PEER/bin/python make_sampling.py MODEL.gguf      # any model; only its vocabulary is read, for DRY

Rows are either given or a formula of integer arithmetic and multiplications (`wave`), which gives the same floats in
every language. The distribution of each chain is also computed in float64 by `reference`, which shares nothing with
llama.cpp but the definitions; both have to agree before anything is written.
"""

import ctypes
import json
import math
import pathlib
import sys

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as lib

OUT = pathlib.Path(__file__).parent.parent / "sampling" / "llama_cpp.json"
VOCAB = 151_936
DEFAULT = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
OFF = {
    "temperature": 1.0, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "typical_p": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "repeat_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repeat_last_n": 64, "samplers": DEFAULT,
}
SERVER = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def wave(count):
    ids = np.arange(count, dtype=np.uint64)
    hashed = (ids * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    u = (hashed.astype(np.float64) + 0.5) / 4294967296.0
    wide = u.copy()
    for _ in range(8):
        wide = wide * wide
    middle = wide.copy()
    for _ in range(4):
        middle = middle * middle
    narrow = middle.copy()
    for _ in range(4):
        narrow = narrow * narrow
    return (3.0 * narrow + 4.0 * middle + 5.0 * wide + 4.0 * u - 4.0).astype(np.float32)


SMALL = [1.0, 2.0, 0.5, -1.0, 2.5, 0.0, 1.75, -3.0, 2.25, 1.5, -0.5, 0.25]
FLAT = [0.3, 0.1, 0.2, 0.0, 0.15, 0.25, 0.05, 0.12]
PEAK = [9.0, 3.0, 2.0, 1.0, 0.0, -1.0]


class Array:
    """llama.cpp's list of candidates."""

    def __init__(self, logits):
        self.data = np.zeros(len(logits), dtype=np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
        self.data["id"] = np.arange(len(logits))
        self.data["logit"] = logits
        pointer = self.data.ctypes.data_as(lib.llama_token_data_p)
        self.array = lib.llama_token_data_array(data=pointer, size=len(logits), selected=-1, sorted=False)

    def apply(self, sampler):
        lib.llama_sampler_apply(sampler, ctypes.byref(self.array))

    def left(self):
        """Tokens that are not forbidden with their probability, likeliest first."""
        items = [self.array.data[i] for i in range(self.array.size)]
        items = [(item.id, item.logit, item.p) for item in items if item.logit > -math.inf]
        return sorted(items, key=lambda item: (-item[1], item[0]))


def stage(name, s, n_vocab, history):
    if name == "penalties":
        made = lib.llama_sampler_init_penalties(
            n_vocab, s["repeat_last_n"], s["repeat_penalty"], s["frequency_penalty"], s["presence_penalty"])
        for token in history:
            lib.llama_sampler_accept(made, token)
        return made
    return {
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(s["top_n_sigma"]),
        "top_k": lambda: lib.llama_sampler_init_top_k(s["top_k"]),
        "typ_p": lambda: lib.llama_sampler_init_typical(s["typical_p"], 0),
        "top_p": lambda: lib.llama_sampler_init_top_p(s["top_p"], 0),
        "min_p": lambda: lib.llama_sampler_init_min_p(s["min_p"], 0),
        "xtc": lambda: lib.llama_sampler_init_xtc(s["xtc_probability"], s["xtc_threshold"], 0, 1),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(s["temperature"], s["dynatemp_range"], s["dynatemp_exponent"]),
    }[name]()


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def reference(logits, s, history):
    """The same chain in float64."""
    ids = np.flatnonzero(np.isfinite(logits))
    x = logits[ids].astype(np.float64)
    for name in s["samplers"]:
        order = np.lexsort((ids, -x))
        ids, x = ids[order], x[order]
        p = softmax(x)
        if name == "penalties" and s["repeat_last_n"]:
            window = history[-s["repeat_last_n"]:]
            for at, token in enumerate(ids):
                count = window.count(int(token))
                if count:
                    x[at] = x[at] / s["repeat_penalty"] if x[at] > 0 else x[at] * s["repeat_penalty"]
                    x[at] -= count * s["frequency_penalty"] + s["presence_penalty"]
        elif name == "top_n_sigma" and s["top_n_sigma"] > 0:
            keep = x >= x.max() - s["top_n_sigma"] * x.std()
            ids, x = ids[keep], x[keep]
        elif name == "top_k" and s["top_k"] > 0:
            ids, x = ids[: s["top_k"]], x[: s["top_k"]]
        elif name == "typ_p" and s["typical_p"] < 1:
            entropy = -(p * np.log(p)).sum()
            order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
            count = int(np.argmax(np.cumsum(p[order]) > s["typical_p"])) + 1
            ids, x = ids[order[:count]], x[order[:count]]
        elif name == "top_p" and s["top_p"] < 1:
            count = int(np.argmax(np.cumsum(p) >= s["top_p"])) + 1
            ids, x = ids[:count], x[:count]
        elif name == "min_p" and s["min_p"] > 0:
            keep = p >= s["min_p"] * p.max()
            ids, x = ids[keep], x[keep]
        elif name == "xtc" and s["xtc_probability"] == 1.0:
            good = int((p >= s["xtc_threshold"]).sum())
            if good > 1:
                ids, x = ids[good - 1:], x[good - 1:]
        elif name == "temperature":
            t = s["temperature"]
            if s["dynatemp_range"] > 0 and len(x) > 1:
                share = -(p * np.log(p)).sum() / math.log(len(x))
                low, high = max(0.0, t - s["dynatemp_range"]), t + s["dynatemp_range"]
                t = low + (high - low) * share ** s["dynatemp_exponent"]
            ids, x = (ids[:1], x[:1]) if t <= 0 else (ids, x / t)
    order = np.lexsort((ids, -x))
    return ids[order], softmax(x[order])


def chain_case(name, row, changes, history=()):
    s = OFF | changes
    history = list(history)
    logits = wave(row) if isinstance(row, int) else np.array(row, dtype=np.float32)
    array = Array(logits)
    for sampler in s["samplers"]:
        if sampler != "dry":
            array.apply(stage(sampler, s, len(logits), history))
    array.apply(lib.llama_sampler_init_dist(1))
    left = array.left()
    ids, p = reference(logits, s, history)
    assert [int(i) for i in ids] == [item[0] for item in left], (name, ids, left)
    error = max(abs(a - b[2]) for a, b in zip(p, left))
    assert error < 2e-6, (name, error)
    print(f"{name}: {len(left)} left, float64 differs by {error:.1e}")
    assert len(left) <= 200, name
    return {
        "name": name, "row": row, "settings": changes, "history": history,
        "tokens": [item[0] for item in left], "p": [round(float(v), 9) for v in p],
    }


def mirostat_case(version, row, tau, eta, temperature, steps):
    logits = wave(row) if isinstance(row, int) else np.array(row, dtype=np.float32)
    n = len(logits)
    if version == 1:
        sampler = lib.llama_sampler_init_mirostat(n, 7, tau, eta, 100)
    else:
        sampler = lib.llama_sampler_init_mirostat_v2(7, tau, eta)
    out = []
    for _ in range(steps):
        array = Array(logits)
        array.apply(lib.llama_sampler_init_temp(temperature))
        array.apply(sampler)
        chosen = array.array.data[array.array.selected]
        left = array.left()
        out.append({"left": len(left), "p": [round(item[2], 7) for item in left[:3]],
                    "token": chosen.id, "token_p": round(chosen.p, 7)})
    print(f"mirostat {version}, {n} tokens:", [step["left"] for step in out])
    return {"version": version, "row": row, "tau": tau, "eta": eta, "temperature": temperature, "steps": out}


def adaptive_case(row, target, decay, steps):
    logits = np.array(row, dtype=np.float32)
    sampler = lib.llama_sampler_init_adaptive_p(target, decay, 7)
    out = []
    for _ in range(steps):
        array = Array(logits)
        array.apply(sampler)
        chosen = array.array.data[array.array.selected]
        out.append({"p": [round(item[2], 7) for item in sorted(array.left())], "token": chosen.id})
        lib.llama_sampler_accept(sampler, chosen.id)
    return {"row": row, "target": target, "decay": decay, "steps": out}


def dry_cases(model_file):
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(model_file).encode(), params)
    vocab = lib.llama_model_get_vocab(model)
    count = lib.llama_vocab_n_tokens(vocab)

    def tokens(text):
        buffer = (ctypes.c_int32 * 4096)()
        n = lib.llama_tokenize(vocab, text.encode(), len(text.encode()), buffer, 4096, False, False)
        return list(buffer[:n])

    def piece(token):
        buffer = ctypes.create_string_buffer(256)
        n = lib.llama_token_to_piece(vocab, token, buffer, 256, 0, True)
        return buffer.raw[:n]

    default = ["\n", ":", "\"", "*"]
    prose = "the cat sat on the mat and the cat sat on the"
    lines = "one two three four\none two three four\none two three"
    cases = []
    for name, text, s in [
        ("plain", prose, (0.8, 1.75, 2, -1)),
        ("window", prose, (0.8, 1.75, 2, 10)),
        ("long allowance", prose, (1.0, 2.0, 4, -1)),
        ("no allowance", prose, (1.0, 2.0, 0, -1)),
        ("breakers", lines, (0.8, 1.75, 2, -1)),
        ("loop", "la" + " la" * 60, (0.5, 3.0, 1, -1)),
        ("very long loop", "la" + " la" * 300, (0.5, 3.0, 1, -1)),
    ]:
        ids = tokens(text)
        multiplier, base, allowed, last_n = s
        window = len(ids) if last_n < 0 else last_n
        breakers = (ctypes.c_char_p * len(default))(*[text.encode() for text in default])
        sampler = lib.llama_sampler_init_dry(vocab, multiplier, base, allowed, window, breakers, len(default))
        for token in ids:
            lib.llama_sampler_accept(sampler, token)
        array = Array(np.zeros(count, dtype=np.float32))
        array.apply(sampler)
        changed = [(item[0], item[1]) for item in array.left() if item[1] != 0]
        # A breaker of one byte can only be inside of a token.
        whole = sorted({token for token in ids if any(b.encode() in piece(token) for b in default)})
        cases.append({
            "name": name, "ids": ids, "breakers": whole, "multiplier": multiplier, "base": base, "allowed_length": allowed,
            "penalty_last_n": last_n, "penalties": {str(token): round(-logit, 4) for token, logit in sorted(changed)},
        })
        print(f"dry {name}: {len(ids)} ids, {len(changed)} penalties")
    return cases


def main():
    lib.llama_backend_init()
    words = [4, 4, 1, 8, 4, 7, 99]
    small = [
        chain_case("top_k", SMALL, {"top_k": 3}),
        chain_case("top_p", SMALL, {"top_p": 0.6}),
        chain_case("top_p of nothing", SMALL, {"top_p": 0.0}),
        chain_case("min_p", SMALL, {"min_p": 0.3}),
        chain_case("typical", SMALL, {"typical_p": 0.5}),
        chain_case("typical, little", PEAK, {"typical_p": 0.2}),
        chain_case("top_n_sigma", SMALL, {"top_n_sigma": 0.8}),
        chain_case("xtc", SMALL, {"xtc_probability": 1.0, "xtc_threshold": 0.1}),
        chain_case("xtc, one good token", PEAK, {"xtc_probability": 1.0, "xtc_threshold": 0.1}),
        chain_case("temperature", SMALL, {"temperature": 1.7}),
        chain_case("temperature zero", SMALL, {"temperature": 0.0, "top_p": 0.9}),
        chain_case("dynatemp, flat", FLAT, {"temperature": 1.0, "dynatemp_range": 0.6}),
        chain_case("dynatemp, peak", PEAK, {"temperature": 1.0, "dynatemp_range": 0.6, "dynatemp_exponent": 0.5}),
        chain_case("dynatemp from zero", SMALL, {"temperature": 0.3, "dynatemp_range": 0.9, "dynatemp_exponent": 2.0}),
        chain_case("penalties", SMALL, {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}, words[:6]),
        chain_case("penalties, window", SMALL, {"repeat_penalty": 1.3, "repeat_last_n": 3}, words[:6]),
        chain_case("server", SMALL, SERVER),
        chain_case("all", SMALL, SERVER | {"typical_p": 0.97, "top_n_sigma": 2.5, "xtc_probability": 1.0, "repeat_penalty": 1.1,
                                           "dynatemp_range": 0.3}, words[:6]),
        chain_case("temperature first", SMALL, {"temperature": 2.5, "top_p": 0.6, "min_p": 0.4, "top_k": 9,
                                                "samplers": ["temperature", "top_k", "top_p", "min_p"]}),
        chain_case("typical after temperature", SMALL, {"temperature": 0.5, "typical_p": 0.5, "samplers": ["temperature", "typ_p"]}),
        chain_case("xtc after temperature", SMALL, {"temperature": 0.5, "xtc_probability": 1.0, "xtc_threshold": 0.15,
                                                    "samplers": ["temperature", "xtc"]}),
        chain_case("penalties last", SMALL, {"temperature": 1.5, "top_k": 5, "repeat_penalty": 2.0, "presence_penalty": 0.5,
                                             "samplers": ["top_k", "temperature", "penalties"]}, words[:6]),
        chain_case("no sampler", SMALL, {"temperature": 0.1, "top_k": 1, "samplers": []}),
    ]
    often = [int(i) for i in np.argsort(-wave(VOCAB))[:6]]
    large = [
        chain_case("server", VOCAB, SERVER),
        chain_case("hot", VOCAB, {"temperature": 1.5, "top_k": 100}),
        chain_case("min_p alone", VOCAB, {"min_p": 0.005}),
        chain_case("top_n_sigma alone", VOCAB, {"top_n_sigma": 5.0}),
        chain_case("top_p alone", VOCAB, {"top_p": 0.8, "temperature": 1.2}),
        chain_case("temperature first", VOCAB, {"temperature": 0.7, "top_p": 0.9, "samplers": ["temperature", "top_p"]}),
        chain_case("xtc", VOCAB, SERVER | {"xtc_probability": 1.0, "xtc_threshold": 0.12}),
        chain_case("dynatemp", VOCAB, SERVER | {"dynatemp_range": 0.5}),
        chain_case("penalties", VOCAB, SERVER | {"repeat_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
                   often * 2 + often[:3]),
    ]
    mirostat = [
        mirostat_case(1, SMALL, 2.0, 0.1, 1.0, 6),
        mirostat_case(1, VOCAB, 4.0, 0.2, 0.8, 6),
        mirostat_case(2, SMALL, 2.0, 0.1, 1.0, 6),
        mirostat_case(2, VOCAB, 4.0, 0.2, 0.8, 6),
    ]
    adaptive = [adaptive_case(SMALL, 0.2, 0.9, 8), adaptive_case(PEAK, 0.5, 0.5, 8), adaptive_case(FLAT, 1.0, 0.0, 4)]
    golden = {
        "made_by": f"llama-cpp-python {llama_cpp.__version__}, numpy {np.__version__}",
        "wave_sample": {str(i): float(wave(VOCAB)[i]) for i in (0, 1, 2, 1000, 75_968, VOCAB - 1)},
        "small": small, "large": large, "mirostat": mirostat, "adaptive": adaptive, "dry": dry_cases(sys.argv[1]),
    }
    lines = ["{"]
    for at, (key, value) in enumerate(golden.items()):
        last = "" if at == len(golden) - 1 else ","
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f" {json.dumps(key)}: [\n  {rows}\n ]{last}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}{last}")
    OUT.write_text("\n".join(lines) + "\n}\n")
    print(OUT, OUT.stat().st_size, "bytes")


main()
