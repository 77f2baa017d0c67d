#!/usr/bin/env python3
"""Speed of mlx-lm for one checkpoint: mlx_lm_speed.py FOLDER [--seconds S] [--prompts N,..] [--streams N,..] [--times N] [--out FILE].

Ends after S seconds (90), with what it has until then. Its first prompt and first tokens make MLX compile kernels, which takes longer than all that
is timed; so each step is told as it ends. Ends with 0 where the time is over, with 1 where something failed. The tokenizer is not loaded: prompts are random tokens, and answers are as long as they are asked for.
Streams are rows of one batch. FILE gets the rates by name, as `{"pp512": [mean, deviation], "tg128 x8": ...}`, and is complete after every line.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time

ANSWER, CHUNK = 128, 2048
# Prompt of a stream among several.
SHORT = 16


def numbers(text):
    return [int(part) for part in text.split(",") if part]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--prompts", type=numbers, default=[512])
    parser.add_argument("--streams", type=numbers, default=[1])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out")
    return parser.parse_args()


def main(asked):
    began = time.perf_counter()
    name = os.path.basename(os.path.normpath(asked.folder))
    rates, failed = {}, []

    def tell(what):
        print(f"mlx-lm, {name}: {what}, after {time.perf_counter() - began:.1f} s", flush=True)

    def end(*_):
        tell(f"not done within its {asked.seconds} s")
        os._exit(1 if failed else 0)

    signal.signal(signal.SIGALRM, end)
    signal.alarm(asked.seconds)
    if not os.path.exists(os.path.join(asked.folder, "config.json")):
        raise SystemExit(f"{asked.folder} has no config.json: expected a checkpoint of checkpoint.py")
    from pathlib import Path

    try:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model
    except ImportError as error:
        raise SystemExit(f"mlx-lm cannot be imported: {error}: install mlx-lm, and mlx for CUDA, for {sys.executable}") from error

    tell(f"MLX {mx.__version__} imported")
    model, config = load_model(Path(asked.folder))
    tell("loaded")

    def step(tokens, cache):
        token = mx.argmax(model(tokens, cache=cache)[:, -1, :], axis=-1)
        mx.async_eval(token)
        return token

    def prompt(length, streams=1):
        """As its generator: in chunks, of which the last gives the token."""
        tokens = mx.random.randint(0, config["vocab_size"], (streams, length))
        cache = make_prompt_cache(model)
        mx.eval(tokens)
        start = time.perf_counter()
        while tokens.shape[1] > CHUNK:
            model(tokens[:, :CHUNK], cache=cache)
            mx.eval([layer.state for layer in cache])
            tokens = tokens[:, CHUNK:]
        token = step(tokens, cache)
        mx.eval(token)
        return streams * length / (time.perf_counter() - start), token, cache

    def answer(token, cache, count):
        """As its generator: the next step is on its way before a token is read."""
        start = time.perf_counter()
        for _ in range(count):
            following = step(token[:, None], cache)
            token.tolist()
            token = following
        mx.eval(token)
        return token.shape[0] * count / (time.perf_counter() - start)

    def timed(what, once):
        """Once more than is counted; a size at which MLX fails does not keep the next from being measured."""
        try:
            once()
            tell(f"{what} warm")
            found = [once() for _ in range(asked.times)]
        except (RuntimeError, ValueError) as error:
            tell(f"{what} failed: {error}")
            failed.append(what)
            return
        rates[what] = [statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0]
        tell(f"{what} {rates[what][0]:.1f} ± {rates[what][1]:.1f} tokens/s")
        if asked.out:
            with open(f"{asked.out}.part", "w", encoding="utf-8") as file:
                json.dump(rates, file)
            os.replace(f"{asked.out}.part", asked.out)

    for streams in asked.streams:
        timed(f"tg{ANSWER}" if streams == 1 else f"tg{ANSWER} x{streams}", lambda: answer(*prompt(SHORT, streams)[1:], ANSWER))
    for length in asked.prompts:
        timed(f"pp{length}", lambda: prompt(length)[0])
    print(json.dumps(rates))
    if failed:
        raise SystemExit(f"mlx-lm, {name}: not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main(arguments())
