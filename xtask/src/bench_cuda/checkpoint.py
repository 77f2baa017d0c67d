"""Random checkpoints of real shapes in MLX's layout: checkpoint.py SHAPE BITS FOLDER."""

import argparse
import json
import math
import os
import sys

try:
    import torch
    from safetensors.torch import save_file
except ImportError as error:
    # What can be asked for is told without them.
    MISSING = error
else:
    MISSING = None

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES = {
    "llama8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "smollm2": LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    # Qwen3-30B-A3B.
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
GROUP = 64
SHARD_BYTES = 2 << 30


class Writer:
    """Tensors into files of a size that fits in memory, with an index."""

    def __init__(self, folder, bits):
        self.folder, self.bits = folder, bits
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.held, self.index, self.files = {}, {}, 0

    def put(self, name, tensor):
        self.held[name] = tensor.to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).cpu().contiguous()
        if sum(held.nbytes for held in self.held.values()) > SHARD_BYTES:
            self.flush()

    def flush(self):
        self.files += 1
        file = f"model-{self.files:05d}.safetensors"
        save_file(self.held, os.path.join(self.folder, file), metadata={"format": "mlx"})
        self.index |= {name: file for name in self.held}
        self.held = {}

    def linear(self, name, outputs, inputs, experts=()):
        """Outputs keep the inputs' size: values have a deviation of 1 / sqrt(inputs). `experts` are leading axes."""
        if self.bits == 16:
            self.put(f"{name}.weight", torch.randn(*experts, outputs, inputs, device=self.device) / math.sqrt(inputs))
            return
        words = torch.randint(
            -(2**31), 2**31 - 1, (*experts, outputs, inputs * self.bits // 32), device=self.device, dtype=torch.int32
        )
        levels = 2**self.bits - 1
        deviation = math.sqrt(((levels + 1) ** 2 - 1) / 12)
        scales = (0.9 + 0.2 * torch.rand(*experts, outputs, inputs // GROUP, device=self.device)) / (deviation * math.sqrt(inputs))
        self.put(f"{name}.weight", words.view(torch.uint32))
        self.put(f"{name}.scales", scales)
        self.put(f"{name}.biases", -scales * levels / 2)


def main(shape, bits, folder):
    config = dict(SHAPES[shape])
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(1)
    out = Writer(folder, bits)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    out.linear("model.embed_tokens", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, outputs, inputs in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
        ):
            out.linear(f"{at}.{name}", outputs, inputs)
        experts, mlp = (), "mlp"
        if "num_experts" in config:
            experts, mlp, inner = (config["num_experts"],), "mlp.switch_mlp", config["moe_intermediate_size"]
            out.linear(f"{at}.mlp.gate", *experts, hidden)
            for name in ("q_norm", "k_norm"):
                out.put(f"{at}.self_attn.{name}.weight", torch.ones(head))
        for name, outputs, inputs in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
            out.linear(f"{at}.{mlp}.{name}", outputs, inputs, experts)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out.put(f"{at}.{name}.weight", torch.ones(hidden))
    out.put("model.norm.weight", torch.ones(hidden))
    if not config["tie_word_embeddings"]:
        out.linear("lm_head", config["vocab_size"], hidden)
    out.flush()
    if bits < 16:
        config["quantization"] = {"group_size": GROUP, "bits": bits}
    write(folder, "config.json", config)
    write(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": out.index})
    write(folder, "tokenizer.json", tokenizer(config["vocab_size"]))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **ends})


def tokenizer(size):
    """Bytes that have a letter of their own, and as many more tokens as the model has."""
    letters = [chr(b) for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *letters, "\u0120"])}
    vocab |= {f"<t{i}>": i for i in range(len(vocab), size)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(["<s>", "</s>"])],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def write(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)


def arguments(text, bits, place):
    """Shape, bits and place of a checkpoint, once it is known that it can be made."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("bits", type=int, choices=bits, help="of a weight")
    parser.add_argument(place)
    asked = parser.parse_args()
    if MISSING:
        sys.exit(f"{sys.executable} lacks what makes random weights: {MISSING}: install torch and safetensors for it")
    return asked.shape, asked.bits, getattr(asked, place)


def written(make, shape, bits, place):
    """Makes a checkpoint; a full disk and the like are told in one line."""
    try:
        make(shape, bits, place)
    except Exception as error:
        # The classes of safetensors and torch for what the system refuses are their own.
        if isinstance(error, (OSError, RuntimeError)) or type(error).__name__ == "SafetensorError":
            sys.exit(f"{place} was not written: {error}")
        raise


if __name__ == "__main__":
    written(main, *arguments(__doc__, (2, 4, 8, 16), "folder"))
