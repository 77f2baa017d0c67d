#!/usr/bin/env python3
"""Checks `--deterministic` through the server: deterministic.py MLXCEL FOLDER [BACKEND [MOST]]. Takes about a minute; ends with 1 if something is wrong.

Answers with log probabilities alone, with prompts cut into steps of other sizes, and beside 7, 31 and 63 others (MOST at most) have to be the same to the last
digit, which JSON has of every bit. Without the flag, how many differ is told beside: it says what the check could have seen.
"""

import concurrent.futures
import json
import sys

import faults

TOKENS, TOP = 12, 5
# Tokens of the prompts that are watched.
LENGTHS = (1, 9, 70, 300)


def prompt(length, seed):
    return [(7 * i + 11 + 131 * seed) % 1000 + 100 for i in range(length)]


def ask(server, tokens, count=TOKENS):
    body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": TOP}
    status, text = server.ask("/v1/completions", body)
    if status != 200:
        raise SystemExit(f"{status}: {text}")
    return json.dumps(json.loads(text)["choices"][0]["logprobs"])


def alone(server):
    return [ask(server, prompt(length, 0)) for length in LENGTHS]


def in_company(server, others):
    """Beside so many others of any length."""
    with concurrent.futures.ThreadPoolExecutor(others + len(LENGTHS)) as pool:
        crowd = [pool.submit(ask, server, prompt(1 + 37 * i % 200, i + 1), 8 + 5 * i % 40) for i in range(others)]
        watched = [pool.submit(ask, server, prompt(length, 0)) for length in LENGTHS]
        found = [future.result() for future in watched]
        for future in crowd:
            future.result()
    return found


def differing(mlxcel, folder, backend, most, flags):
    """How many answers differ from those alone, by how they were asked for."""
    counts, want = {}, None
    for rows in (512, 1, 33):
        server = faults.Server(mlxcel, folder, backend, "--parallel", "1", "--prefill-chunk-size", str(rows), *flags)
        found = alone(server)
        server.end()
        want = want or found
        counts[f"{rows} rows a step"] = sum(a != b for a, b in zip(found, want))
    server = faults.Server(mlxcel, folder, backend, "--parallel", "64", "--max-queue-depth", "128", *flags)
    for others in (n for n in (7, 31, 63) if n <= most):
        counts[f"beside {others}"] = sum(a != b for a, b in zip(in_company(server, others), want))
    server.end()
    return counts


def main(mlxcel, folder, backend="cuda", most="63"):
    told, most = {}, faults.number("MOST", most, 0)
    for name, flags in (("with --deterministic", ["--deterministic"]), ("without", [])):
        told[name] = differing(mlxcel, folder, backend, most, flags)
        print(f"{name}: of {len(LENGTHS)} answers differ: {told[name]}", flush=True)
    passes = not any(told["with --deterministic"].values())
    print("ok" if passes else "WRONG")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main(*faults.arguments(__doc__, 2, 4)))
