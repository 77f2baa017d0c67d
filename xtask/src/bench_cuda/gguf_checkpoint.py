"""Random GGUF checkpoints of the shapes of checkpoint.py, for llama.cpp: gguf_checkpoint.py SHAPE BITS FILE.

Weights of 4 bits are Q4_0 (blocks of 32: an f16 scale and 16 bytes of nibbles), of 16 bits bf16, norms f32, no tokenizer: llama-bench feeds ids.
The format is that of llama.cpp's docs on GGUF, version 3.
"""

import math
import struct

from checkpoint import MISSING, SHAPES, arguments, written

if not MISSING:
    import torch

ALIGNMENT = 32
U32, F32, TEXT = 4, 6, 8
TYPE_F32, TYPE_Q4_0, TYPE_BF16 = 0, 2, 30


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def field(key, kind, value):
    body = {U32: lambda: struct.pack("<I", value), F32: lambda: struct.pack("<f", value), TEXT: lambda: text(value)}[kind]()
    return text(key) + struct.pack("<I", kind) + body


def fields(config, arch):
    has_experts = "num_experts" in config
    yield "general.architecture", TEXT, arch
    yield "tokenizer.ggml.model", TEXT, "none"
    for key, value in (
        ("vocab_size", config["vocab_size"]),
        ("context_length", config["max_position_embeddings"]),
        ("embedding_length", config["hidden_size"]),
        ("block_count", config["num_hidden_layers"]),
        ("feed_forward_length", config["intermediate_size"]),
        ("attention.head_count", config["num_attention_heads"]),
        ("attention.head_count_kv", config["num_key_value_heads"]),
        ("attention.key_length", config["head_dim"]),
        ("attention.value_length", config["head_dim"]),
        ("rope.dimension_count", config["head_dim"]),
        *(
            (
                ("expert_count", config["num_experts"]),
                ("expert_used_count", config["num_experts_per_tok"]),
                ("expert_feed_forward_length", config["moe_intermediate_size"]),
            )
            if has_experts
            else ()
        ),
    ):
        yield f"{arch}.{key}", U32, value
    yield f"{arch}.rope.freq_base", F32, config["rope_theta"]
    yield f"{arch}.attention.layer_norm_rms_epsilon", F32, config["rms_norm_eps"]


def tensors(config):
    """Names with dimensions, fastest first, and whether they are of the weights' type."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "token_embd.weight", (hidden, config["vocab_size"]), True
    for i in range(config["num_hidden_layers"]):
        at = f"blk.{i}"
        yield f"{at}.attn_q.weight", (hidden, q), True
        yield f"{at}.attn_k.weight", (hidden, kv), True
        yield f"{at}.attn_v.weight", (hidden, kv), True
        yield f"{at}.attn_output.weight", (q, hidden), True
        if "num_experts" in config:
            n, own = config["num_experts"], config["moe_intermediate_size"]
            yield f"{at}.attn_q_norm.weight", (head,), False
            yield f"{at}.attn_k_norm.weight", (head,), False
            yield f"{at}.ffn_gate_inp.weight", (hidden, n), False
            yield f"{at}.ffn_gate_exps.weight", (hidden, own, n), True
            yield f"{at}.ffn_up_exps.weight", (hidden, own, n), True
            yield f"{at}.ffn_down_exps.weight", (own, hidden, n), True
        else:
            yield f"{at}.ffn_gate.weight", (hidden, inner), True
            yield f"{at}.ffn_up.weight", (hidden, inner), True
            yield f"{at}.ffn_down.weight", (inner, hidden), True
        yield f"{at}.attn_norm.weight", (hidden,), False
        yield f"{at}.ffn_norm.weight", (hidden,), False
    yield "output_norm.weight", (hidden,), False
    if not config["tie_word_embeddings"]:
        yield "output.weight", (hidden, config["vocab_size"]), True


def size_of(dims, kind):
    count = math.prod(dims)
    return {TYPE_F32: 4 * count, TYPE_BF16: 2 * count, TYPE_Q4_0: count // 32 * 18}[kind]


def data_of(dims, kind, device):
    if kind == TYPE_F32:
        values = torch.ones(dims) if len(dims) == 1 else torch.randn(dims) / math.sqrt(dims[0])
        return values.float().numpy().tobytes()
    if kind == TYPE_BF16:
        values = torch.randn(math.prod(dims), device=device, dtype=torch.bfloat16) / math.sqrt(dims[0])
        return values.view(torch.int16).cpu().numpy().tobytes()
    blocks = math.prod(dims) // 32
    made = torch.randint(0, 256, (blocks, 18), device=device, dtype=torch.uint8)
    # Whole numbers from -8 to 7 have a deviation of 4.6.
    scales = (0.9 + 0.2 * torch.rand(blocks, device=device)) / (4.6 * math.sqrt(dims[0]))
    made[:, :2] = scales.half().view(torch.uint8).view(blocks, 2)
    return made.cpu().numpy().tobytes()


def main(shape, bits, path):
    weights = {4: TYPE_Q4_0, 16: TYPE_BF16}[bits]
    config = SHAPES[shape]
    arch = "qwen3moe" if "num_experts" in config else "llama"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(2)
    made = [(name, dims, weights if is_weight else TYPE_F32) for name, dims, is_weight in tensors(config)]
    all_fields = list(fields(config, arch))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(made), len(all_fields))
    head += b"".join(field(*each) for each in all_fields)
    offset = 0
    for name, dims, kind in made:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        offset += -(-size_of(dims, kind) // ALIGNMENT) * ALIGNMENT
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for _, dims, kind in made:
            data = data_of(dims, kind, device)
            file.write(data)
            file.write(bytes(-len(data) % ALIGNMENT))


if __name__ == "__main__":
    written(main, *arguments(__doc__, (4, 16), "file"))
