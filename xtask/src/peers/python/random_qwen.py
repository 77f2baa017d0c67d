"""Writes a GGUF file in f16 with random weights and the shape of Qwen2.5-0.5B.

    random_qwen.py OUT.gguf

llama.cpp's own quantize program turns it into the types that it chooses for this shape. The tokenizer has as many tokens and
merges as the real one: the bytes, all pairs of bytes, and triples, so that loading it costs what loading the real one does.
"""

import itertools
import sys

import gguf
import numpy as np

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 24, 896, 4864, 14, 2
HEAD = HIDDEN // HEADS
VOCABULARY = 151_936
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def letters() -> list[str]:
    """GPT-2's alphabet: a printable character for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    alphabet = letters()
    tokens, merges = list(alphabet), []
    wanted = VOCABULARY - len(CONTROL)
    pairs = [(a, b) for a in alphabet for b in alphabet]
    triples = ((a + b, c) for c in alphabet for a, b in pairs)
    seen = set(tokens)
    for left, right in itertools.chain(pairs, triples):
        if len(tokens) == wanted:
            break
        if left + right not in seen:
            seen.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    return tokens + CONTROL, merges


def main() -> None:
    writer = gguf.GGUFWriter(sys.argv[1], "qwen2")
    writer.add_name("random weights, shape of Qwen2.5-0.5B")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(LAYERS)
    writer.add_context_length(32_768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    tokens, merges = vocabulary()
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if t in CONTROL else normal for t in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)

    random = np.random.default_rng(1)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(name, values.astype(np.float16))

    def vector(name: str, size: int, centre: float) -> None:
        values = centre + 0.02 * random.standard_normal(size, dtype=np.float32)
        writer.add_tensor(name, values)

    matrix("token_embd.weight", VOCABULARY, HIDDEN)
    vector("output_norm.weight", HIDDEN, 1.0)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm.weight", HIDDEN, 1.0)
        vector(f"{block}.ffn_norm.weight", HIDDEN, 1.0)
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            matrix(f"{block}.attn_{name}.weight", rows, HIDDEN)
            vector(f"{block}.attn_{name}.bias", rows, 0.0)
        matrix(f"{block}.attn_output.weight", HIDDEN, HEADS * HEAD)
        matrix(f"{block}.ffn_gate.weight", INNER, HIDDEN)
        matrix(f"{block}.ffn_up.weight", INNER, HIDDEN)
        matrix(f"{block}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
