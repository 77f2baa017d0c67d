#!/usr/bin/env python3
"""Checks that a split model answers as a whole one: split.py MLXCEL MODEL [BACKEND [RANKS [FLAG ...]]]. Ends with 1 if something is wrong.

Sums over ranks are made in another order than on one device, so that results differ in the last bits, and greedy text as soon as two
tokens are near enough to each other. So three things are looked at, for every prompt:

- the greedy text of both, and where it goes apart;
- the next token after every beginning of the whole model's answer, which both are asked for: it has to be the same, or the two
  likeliest have to be nearer to each other than the differences seen;
- log probabilities there: those of the split model may be off by as much as those of the whole one are from its own when it reads
  the same text in one step instead of token by token, times ROOM, or by LEAST.
"""

import json
import sys

import faults

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain, because",
)
TOKENS, TOP = 40, 2
ROOM, LEAST = 4, 2e-3


class Asked:
    """A server, and what it says of tokens: `(id, log probability, lead over the second)`."""

    def __init__(self, mlxcel, model, backend, ranks, flags):
        split = ["--tensor-parallel", str(ranks)] if ranks > 1 else []
        self.server = faults.Server(mlxcel, model, backend, "--parallel", "1", *split, *flags)

    def ids(self, text):
        return self.answer("/tokenize", {"content": text, "add_special": True})["tokens"]

    def next(self, ids, count):
        body = {"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True, "n_probs": TOP}
        found = self.answer("/completion", body)["completion_probabilities"]
        return [(one["id"], one["logprob"], one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"]) for one in found]

    def answer(self, route, body):
        status, text = self.server.ask(route, body)
        if status != 200:
            raise SystemExit(f"{route}: {status}: {text}\n{self.server.said()}")
        return json.loads(text)

    def after_each(self, ids, answer):
        """What comes after every beginning of an answer, each read in one step."""
        return [self.next(ids + [one[0] for one in answer[:n]], 1)[0] for n in range(len(answer))]

    def end(self):
        self.server.end()


def largest(found, wanted):
    """Largest difference of log probabilities where tokens are the same."""
    return max((abs(a[1] - b[1]) for a, b in zip(found, wanted) if a[0] == b[0]), default=0.0)


def common(found, wanted):
    """Tokens before texts go apart."""
    return next((n for n, (a, b) in enumerate(zip(found, wanted)) if a[0] != b[0]), len(wanted))


def main(mlxcel, model, backend="cuda", ranks="2", *flags):
    ranks = faults.number("RANKS", ranks, 2)
    whole = Asked(mlxcel, model, backend, 1, flags)
    prompts = [whole.ids(text) for text in TEXTS]
    answers = [whole.next(ids, TOKENS) for ids in prompts]
    wanted = [whole.after_each(ids, answer) for ids, answer in zip(prompts, answers)]
    whole.end()
    noise = max(largest(read, answer) for read, answer in zip(wanted, answers))
    allowed = max(ROOM * noise, LEAST)
    split = Asked(mlxcel, model, backend, ranks, flags)
    passes = True
    print(f"allowed are {allowed:.4f} nats: the whole model differs from itself by {noise:.4f}")
    for text, ids, answer, expected in zip(TEXTS, prompts, answers, wanted):
        own = split.next(ids, TOKENS)
        found = split.after_each(ids, answer)
        others = [b[2] for a, b in zip(found, expected) if a[0] != b[0]]
        off = largest(found, expected)
        is_right = off <= allowed and all(lead <= 2 * allowed for lead in others)
        passes = passes and is_right
        same = common(own, answer)
        until = "the same text" if same == len(answer) else f"the same for {same} tokens, then two that are {answer[same][2]:.4f} apart"
        told = f"{len(found) - len(others)} of {len(found)} next tokens are the same"
        told += f", the others lead by up to {max(others):.4f}" if others else ""
        print(f"{'ok' if is_right else 'WRONG'}: {text[:30]!r}: {until}; {told}; log probabilities differ by up to {off:.4f}", flush=True)
    split.end()
    print("ok" if passes else "WRONG")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main(*faults.arguments(__doc__, 2, 100)))
