#!/usr/bin/env python3
"""The table of a run: table.py FOLDER. FOLDER holds what run.sh wrote of us and of both peers, by checkpoint.

    CASE.json           `mlxcel bench -o json`            CASE.KEY.json     the same with other options, named by KEY
    CASE.llama.json     `llama-bench -o json`             CASE.llama.jsonl  `llama-batched-bench --output-format jsonl`
    CASE.mlx-lm.json    rates of mlx_lm_speed.py by name

What is not there was not measured, and its places are empty.
"""

import glob
import json
import os
import sys

TITLES = {
    "llama8b-4": "Llama-3.1-8B shape, 4 bits",
    "llama8b-16": "Llama-3.1-8B shape, bf16",
    "qwen3moe-4": "Qwen3-30B-A3B shape, 4 bits",
    "smollm2-4": "SmolLM2-135M shape, 4 bits",
}
TESTS = ("tg128", "tg128 x8", "tg128 x32", "tg128 x64", "pp512", "pp4096")
# What an H200 is to reach, and what bounds one stream there: bytes of the weights over 4.3 TB/s, or arithmetic at 600 TFLOP/s.
GOALS = {
    "llama8b-4": {"tg128": 570, "tg128 x32": 8000, "tg128 x64": 12000, "pp512": 20000, "pp4096": 25000},
    "llama8b-16": {"tg128": 230, "tg128 x32": 5000},
    "qwen3moe-4": {"tg128": 300, "tg128 x32": 4000, "pp4096": 12000},
    "smollm2-4": {"tg128": 1000},
}
LIMITS = {"llama8b-4": {"tg128": "950, bytes", "pp512": "37,000, arithmetic"}, "llama8b-16": {"tg128": "267, bytes"}}


def loaded(path):
    """What a program wrote, or nothing where it wrote nothing whole."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()] if path.endswith(".jsonl") else json.load(file)
    except (OSError, ValueError):
        return None


def of_ours(path):
    report = loaded(path) or {"results": []}
    return {row["test"]: (row["tokens_per_second"], row["deviation"]) for row in report["results"]}


def of_llama(folder, case):
    rates = {}
    for row in loaded(os.path.join(folder, f"{case}.llama.json")) or []:
        name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        rates[name] = (row["avg_ts"], row["stddev_ts"])
    for row in loaded(os.path.join(folder, f"{case}.llama.jsonl")) or []:
        rates[f"tg{row['tg']} x{row['pl']}"] = (row["speed_tg"], None)
    return rates


def rate(found):
    if found is None:
        return ""
    mean, deviation = found
    digits = 0 if mean >= 1000 else 1
    spread = f" ± {deviation:,.{digits}f}" if deviation else ""
    return f"{mean:,.{digits}f}{spread}"


def ratio(ours, theirs):
    return f"{ours[0] / theirs[0]:.2f}" if ours and theirs else ""


def goal(case, test, ours):
    wanted = GOALS[case].get(test)
    if wanted is None or ours is None:
        return "" if wanted is None else f"{wanted:,}"
    return f"{wanted:,}{'' if ours[0] >= wanted else ', missed'}"


def beside(folder):
    print("| tokens per second | | ours | llama.cpp | ratio | mlx-lm | ratio | goal | limit |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for case, title in TITLES.items():
        ours, llama = of_ours(os.path.join(folder, f"{case}.json")), of_llama(folder, case)
        mlx_lm = loaded(os.path.join(folder, f"{case}.mlx-lm.json")) or {}
        for test in TESTS:
            own, first, second = ours.get(test), llama.get(test), mlx_lm.get(test)
            if own or first or second:
                limit = LIMITS.get(case, {}).get(test, "")
                print(f"| {title} | {test} | {rate(own)} | {rate(first)} | {ratio(own, first)} | {rate(second)} | {ratio(own, second)} "
                      f"| {goal(case, test, own)} | {limit} |")
                title = ""


def variants(folder):
    rows = []
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        case, _, key = os.path.basename(path)[: -len(".json")].partition(".")
        if case not in TITLES or key in ("", "llama", "mlx-lm"):
            continue
        base = of_ours(os.path.join(folder, f"{case}.json"))
        rows += [(TITLES[case], key, test, base.get(test), found) for test, found in of_ours(path).items()]
    if rows:
        print("\n| tokens per second, with options | | default | | ratio |\n|---|---|---:|---:|---:|")
    for title, key, test, base, found in rows:
        print(f"| {title}, {key} | {test} | {rate(base)} | {rate(found)} | {ratio(found, base)} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    beside(sys.argv[1])
    variants(sys.argv[1])
