#!/usr/bin/env python3
"""Speed of mlx-lm for one checkpoint: mlx_lm_speed.py FOLDER [SECONDS]. Ends after SECONDS (90), with what it has until then.

Its first prompt and first tokens make MLX compile kernels, which takes longer than all that is timed; so each step is told as it ends.
The tokenizer is not loaded: prompts are random tokens, and answers are as long as they are asked for.
"""

import json
import os
import signal
import statistics
import sys
import time

PROMPT, ANSWER, TIMES = 512, 128, 3


def main(folder, seconds):
    began = time.perf_counter()

    def tell(what):
        print(f"mlx-lm, {os.path.basename(os.path.normpath(folder))}: {what}, after {time.perf_counter() - began:.1f} s", flush=True)

    def end(*_):
        tell(f"not done within its {seconds} s")
        os._exit(1)

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    tell(f"MLX {mx.__version__} imported")
    model, config = load_model(Path(folder))
    tell("loaded")

    def step(tokens, cache):
        token = mx.argmax(model(tokens[None], cache=cache)[:, -1, :], axis=-1)
        mx.async_eval(token)
        return token

    def prompt():
        tokens = mx.random.randint(0, config["vocab_size"], (PROMPT,))
        cache = make_prompt_cache(model)
        mx.eval(tokens)
        start = time.perf_counter()
        token = step(tokens, cache)
        mx.eval(token)
        return PROMPT / (time.perf_counter() - start), token, cache

    def answer(token, cache, count):
        """As its generator: the next step is on its way before a token is read."""
        start = time.perf_counter()
        for _ in range(count):
            following = step(token, cache)
            token.item()
            token = following
        mx.eval(token)
        return count / (time.perf_counter() - start)

    _, token, cache = prompt()
    tell("first prompt")
    answer(token, cache, 4)
    tell("first tokens")
    prompts, answers = [], []
    for _ in range(TIMES):
        rate, token, cache = prompt()
        prompts.append(rate)
        answers.append(answer(token, cache, ANSWER))
        tell(f"pp{PROMPT} {prompts[-1]:.0f}, tg{ANSWER} {answers[-1]:.1f} tokens/s")
    rates = {f"pp{PROMPT}": prompts, f"tg{ANSWER}": answers}
    print(json.dumps({name: [statistics.mean(found), statistics.stdev(found)] for name, found in rates.items()}))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 90)
