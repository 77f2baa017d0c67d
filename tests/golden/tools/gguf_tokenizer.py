"""The byte-level BPE tokenizer of the tiny GGUF files, and its golden by the `tokenizers` package."""

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = """h e|Ġ t|Ġt he|i n|e r|a n|r e|o n|Ġ a|i s|n d|Ġa nd|in g|o u|Ġ o|Ġo f|l l|he ll|hell o|Ġ w|o r|Ġw or
Ġwor l|Ġworl d|Ġ Ġ|ĠĠ ĠĠ|à ¤|1 2|Ċ Ċ""".replace("\n", "|").split("|")
VOCAB_SIZE = len(SPECIAL) + 256 + len(MERGES)

CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: Split pattern of Llama 3, which llama.cpp calls "llama-bpe".
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TEXTS = [
    "hello world",
    " the  and    of",
    "in 1234 and 12",
    "line one\n\nline two\r\n\ttab",
    "It's naïve: ça coûte 5€",
    "नमस्ते 你好 🙂",
    "<|im_start|>user\nhello<|im_end|>",
    "",
]

CHATS = [
    [{"role": "user", "content": "hello world"}],
    [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": " the answer "},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "and?"},
    ],
]


def byte_alphabet():
    """GPT-2's printable stand-ins of the 256 bytes, in byte order."""
    direct = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in direct else chr(next(spare)) for b in range(256)]


def tokens():
    return SPECIAL + byte_alphabet() + [m.replace(" ", "") for m in MERGES]


def build(pre):
    vocab = {t: i for i, t in enumerate(tokens())}
    assert len(vocab) == VOCAB_SIZE == 288
    merges = [tuple(m.split(" ")) for m in MERGES]
    out = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        steps = [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    out.pre_tokenizer = pre_tokenizers.Sequence(steps)
    out.decoder = decoders.ByteLevel()
    out.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return out


def golden(pre, add_bos):
    tokenizer = build(pre)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(CHAT_TEMPLATE)
    texts, chats = [], []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, text
        texts.append({"text": text, "ids": ids})
    for messages in CHATS:
        rendered = template.render(messages=messages, add_generation_prompt=True)
        ids = tokenizer.encode(rendered, add_special_tokens=False).ids
        chats.append({"messages": messages, "rendered": rendered, "ids": ids})
    return {"pre": pre, "add_bos_token": add_bos, "texts_without_bos": texts, "chats_without_bos": chats}


def write_metadata(writer, pre, add_bos):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (VOCAB_SIZE - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
