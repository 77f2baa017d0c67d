"""Rates of mlx-lm on MLX's CPU build, for a model of a known shape with random weights in 4 bits (groups of 64).

    mlx_lm_rates.py SHAPE PROMPT_TOKENS ANSWER_TOKENS

Speed does not depend on what the weights are. Activations are float32, which is by far the fastest type there.
Writes one JSON object.
"""

import importlib
import json
import resource
import sys
import time

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

SHAPES = {
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "sliding_window": 512,
        "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "rope_theta": 1000000.0,
    },
}


def main() -> None:
    shape, prompt_tokens, answer_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = SHAPES[shape]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())

    def step(tokens: mx.array, cache: list) -> mx.array:
        token = mx.argmax(model(tokens[None], cache=cache)[:, -1, :], axis=-1)
        mx.eval(token, [layer.state for layer in cache])
        return token

    step(mx.array([1, 2]), make_prompt_cache(model))
    cache = make_prompt_cache(model)
    prompt = mx.random.randint(0, config["vocab_size"], (prompt_tokens,))
    mx.eval(prompt)
    began = time.perf_counter()
    token = step(prompt, cache)
    prefill_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(answer_tokens):
        token = step(token, cache)
    decode_s = time.perf_counter() - began
    unit = 1 if sys.platform == "darwin" else 1024
    print(json.dumps({
        "prefill_tokens_per_second": prompt_tokens / prefill_s,
        "decode_tokens_per_second": answer_tokens / decode_s,
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }))


main()
