#!/usr/bin/env python3
"""The table of a run: table.py FOLDER. FOLDER holds what run.sh wrote of us and of both peers, by checkpoint.

    CASE.json           `mlxcel bench -o json`            CASE.KEY.json     the same with other options, named by KEY
    CASE.llama.json     `llama-bench -o json`             CASE.llama.jsonl  `llama-batched-bench --output-format jsonl`
    CASE.mlx-lm.json    rates of mlx_lm_speed.py by name
    machine.json        where and with what this was measured, as machine.py tells it

What is not there was not measured, and its places are empty. Ends with 1 where a result of ours is an error, or where there are none.
"""

import glob
import json
import os
import re
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
GOALS_OF = "H200"
LIMITS = {"llama8b-4": {"tg128": "950, bytes", "pp512": "37,000, arithmetic"}, "llama8b-16": {"tg128": "267, bytes"}}


def loaded(path):
    """What a program wrote, or nothing where it wrote nothing whole."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()] if path.endswith(".jsonl") else json.load(file)
    except (OSError, ValueError):
        return None


def of_ours(path):
    """Rates by name, or why there are none."""
    report = loaded(path)
    if not isinstance(report, dict) or "results" not in report:
        said = report.get("error") if isinstance(report, dict) else None
        return {}, str(said or "nothing was written")
    return {row["test"]: (row["tokens_per_second"], row["deviation"]) for row in report["results"]}, None


def llama_bench(folder, case):
    report = loaded(os.path.join(folder, f"{case}.llama.json"))
    return [row for row in report if "avg_ts" in row] if isinstance(report, list) else []


def of_llama(folder, case):
    rates = {}
    for row in llama_bench(folder, case):
        name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        rates[name] = (row["avg_ts"], row["stddev_ts"])
    for row in loaded(os.path.join(folder, f"{case}.llama.jsonl")) or []:
        if "speed_tg" in row:
            rates[f"tg{row['tg']} x{row['pl']}"] = (row["speed_tg"], None)
    return rates


def of_mlx_lm(folder, case):
    rates = loaded(os.path.join(folder, f"{case}.mlx-lm.json"))
    return rates if isinstance(rates, dict) and "error" not in rates else {}


def rate(found):
    if found is None:
        return ""
    mean, deviation = found
    digits = 0 if mean >= 1000 else 1
    spread = f" ± {deviation:,.{digits}f}" if deviation else ""
    return f"{mean:,.{digits}f}{spread}"


def ratio(ours, theirs):
    return f"{ours[0] / theirs[0]:.2f}" if ours and theirs else ""


def goal(case, test, ours, is_for_this):
    wanted = GOALS[case].get(test)
    if wanted is None:
        return ""
    is_missed = is_for_this and ours is not None and ours[0] < wanted
    return f"{wanted:,}{', missed' if is_missed else ''}"


def devices(folder, machine):
    """Descriptions of the devices that a run had, one of which was measured."""
    reports = [loaded(os.path.join(folder, f"{case}.json")) for case in TITLES]
    return machine.get("devices") or [report["device"] for report in reports if isinstance(report, dict) and report.get("device")][:1]


def peers(folder, machine):
    """Both with their versions, or that they were not measured."""
    built = next((row for case in TITLES for row in llama_bench(folder, case)), None)
    if built is None:
        llama = "llama.cpp was not measured"
    else:
        llama = f"llama.cpp build {built.get('build_number', 'unknown')} ({built.get('build_commit', 'unknown')})"
    if not any(of_mlx_lm(folder, case) for case in TITLES):
        return f"{llama}; mlx-lm was not measured"
    return f"{llama}; mlx-lm {machine.get('mlx_lm') or 'of unknown version'} on MLX {machine.get('mlx_lm_mlx') or 'of unknown version'}"


def head(folder, machine):
    def known(key):
        return machine.get(key) or "unknown"

    found = devices(folder, machine)
    kinds = ", ".join(f"{found.count(kind)} x {kind}" for kind in dict.fromkeys(found)) or "an unknown device"
    print(f"{known('date')}, {kinds}; driver {known('driver')}, CUDA {known('cuda')}, {known('cores')} cores")
    print(f"mlxcel {known('mlxcel')}, commit {known('commit')}, MLX {known('mlx')}; {peers(folder, machine)}")
    other = "" if is_goals_device(found) else ", and this is none, so that no goal is called missed"
    print(f"goals and limits are an {GOALS_OF}'s{other}\n")


def is_goals_device(found):
    # A GH200 has another processor.
    return bool(found) and re.search(rf"\b{GOALS_OF}\b", found[0]) is not None


def beside(folder, is_for_this):
    print("| tokens per second | | ours | llama.cpp | ratio | mlx-lm | ratio | goal | limit |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for case, title in TITLES.items():
        ours, llama, mlx_lm = of_ours(os.path.join(folder, f"{case}.json"))[0], of_llama(folder, case), of_mlx_lm(folder, case)
        for test in TESTS:
            own, first, second = ours.get(test), llama.get(test), mlx_lm.get(test)
            if own or first or second:
                limit = LIMITS.get(case, {}).get(test, "")
                print(f"| {title} | {test} | {rate(own)} | {rate(first)} | {ratio(own, first)} | {rate(second)} | {ratio(own, second)} "
                      f"| {goal(case, test, own, is_for_this)} | {limit} |")
                title = ""


def own_files(folder):
    """Reports of ours: path, checkpoint, and what the options are called."""
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.json"))):
        case, _, key = os.path.basename(path)[: -len(".json")].partition(".")
        if case in TITLES and key not in ("llama", "mlx-lm"):
            yield path, case, key


def variants(folder):
    rows = []
    for path, case, key in own_files(folder):
        if key:
            base = of_ours(os.path.join(folder, f"{case}.json"))[0]
            rows += [(TITLES[case], key, test, base.get(test), found) for test, found in of_ours(path)[0].items()]
    if rows:
        print("\n| tokens per second, with options | | default | | ratio |\n|---|---|---:|---:|---:|")
    for title, key, test, base, found in rows:
        print(f"| {title}, {key} | {test} | {rate(base)} | {rate(found)} | {ratio(found, base)} |")


def main(folder):
    if not os.path.isdir(folder):
        sys.exit(f"{folder} is not a folder: expected FOLDER/results of run.sh")
    reports = list(own_files(folder))
    if not reports:
        sys.exit(f"{folder} has no results: expected FOLDER/results of run.sh, after its step `measure`")
    machine = loaded(os.path.join(folder, "machine.json"))
    machine = machine if isinstance(machine, dict) else {}
    head(folder, machine)
    beside(folder, is_goals_device(devices(folder, machine)))
    variants(folder)
    problems = [(os.path.basename(path), problem) for path, _, _ in reports if (problem := of_ours(path)[1])]
    for name, problem in problems:
        print(f"\n{name} has no rates: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    elif len(sys.argv) != 2:
        sys.exit(__doc__)
    else:
        sys.exit(main(sys.argv[1]))
