"""Writes tests/golden/tokenizers/<line>/: small tokenizers built as each line of models builds its own,
and what transformers makes of a corpus and of conversations with them.

    python make_tokenizers.py

The vocabularies are trained here on `tokenizer_corpus.TRAINING`; normaliser, pre-tokenizer, decoder
and post-processor have the settings of the published tokenizers. Chat templates are those of
`../templates`. Run it in the environment of requirements.txt.
"""

import datetime as real_datetime
import json
import sys

import tiny
import transformers
from tokenizer_corpus import CONVERSATIONS, TEXTS, TRAINING
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

OUT = tiny.GOLDEN / "tokenizers"
TEMPLATES = tiny.GOLDEN / "templates"
MERGES = 160
NOW = real_datetime.datetime(2024, 2, 29, 12, 35, 3)


class FixedClock(real_datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = FixedClock

LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
TEKKEN_SPLIT = rf"{CASED}|{UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA4_SPLIT = (
    rf"{CASED}{SHORT_FORMS}|{UPPER}{SHORT_FORMS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_SPLIT = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def bytes_after(*steps):
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, last])


def byte_level(pre_tokenizer, special, normalizer=None, ignore_merges=False):
    """Byte-level BPE; special tokens come last, as in published files."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def pieces(special, normalizer, pre_tokenizer, decoder):
    """Pieces with U+2581 for blanks and bytes for the rest, the way SentencePiece models are converted."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    if pre_tokenizer:
        trained.pre_tokenizer = pre_tokenizer
    trained.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=MERGES + 90, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = special + [f"<0x{b:02X}>" for b in range(256)]
    tokens += [t for t in sorted(model["vocab"], key=model["vocab"].get) if t not in tokens]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def begins_with(tokenizer, token):
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, tokenizer.token_to_id(token))]
    )


def llama2(prepend):
    special = ["<unk>", "<s>", "</s>"]
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    out = pieces(
        special,
        normalizers.Sequence(steps) if prepend else normalizers.Sequence([]),
        None if prepend else pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    )
    out.post_processor = begins_with(out, "<s>")
    return out


def gemma():
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    out = pieces(
        special,
        normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )
    out.post_processor = begins_with(out, "<bos>")
    return out


def llama3(pattern, special, **extra):
    out = byte_level(bytes_after(split(pattern)), special, **extra)
    out.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), begins_with(out, special[0])]
    )
    return out


LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
LLAMA4_SPECIAL = ["<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEEPSEEK_SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
DEEPSEEK_STEPS = (split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_SPLIT))


def deepseek():
    out = byte_level(bytes_after(*DEEPSEEK_STEPS), DEEPSEEK_SPECIAL)
    out.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), begins_with(out, DEEPSEEK_SPECIAL[0])]
    )
    return out


def tekken():
    out = byte_level(bytes_after(split(TEKKEN_SPLIT)), ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    out.post_processor = begins_with(out, "<s>")
    return out


def smollm():
    step = pre_tokenizers.Digits(individual_digits=True)
    return byte_level(
        pre_tokenizers.Sequence([step, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]), CHATML
    )


#: line -> (tokenizer, begin, end, template)
LINES = {
    "llama2": (lambda: llama2(True), "<s>", "</s>", "alternating"),
    "mistral-metaspace": (lambda: llama2(False), "<s>", "</s>", "alternating"),
    "mistral-tekken": (tekken, "<s>", "</s>", "alternating"),
    "llama3": (
        lambda: llama3(LLAMA3_SPLIT, LLAMA3_SPECIAL, ignore_merges=True),
        "<|begin_of_text|>",
        "<|eot_id|>",
        "dated_tools",
    ),
    "llama4": (lambda: llama3(LLAMA4_SPLIT, LLAMA4_SPECIAL), "<|begin_of_text|>", "<|eot|>", "dated_tools"),
    "smollm": (smollm, "<|im_start|>", "<|im_end|>", "chatml"),
    "qwen": (
        lambda: byte_level(bytes_after(split(QWEN_SPLIT)), CHATML, normalizer=normalizers.NFC()),
        None,
        "<|im_end|>",
        "reasoning",
    ),
    "gemma": (gemma, "<bos>", "<eos>", "turns"),
    "deepseek": (deepseek, DEEPSEEK_SPECIAL[0], DEEPSEEK_SPECIAL[1], "wide_marks"),
}


def read(tokenizer, directory):
    """transformers' reading of a text, as ids and back."""
    out = []
    for text in TEXTS:
        plain = tokenizer.encode(text, add_special_tokens=False)
        framed = tokenizer.encode(text, add_special_tokens=True)
        out.append(
            {
                "text": text,
                "ids": plain,
                "framed": framed,
                "decoded": tokenizer.decode(plain, clean_up_tokenization_spaces=False),
                "decoded_all": tokenizer.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False),
                "decoded_text": tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            }
        )
        entry = out[-1]
        assert entry.pop("decoded") == entry["decoded_all"]
    return out


def chats(tokenizer):
    out = []
    for name, case in CONVERSATIONS.items():
        options = dict(case)
        messages = options.pop("messages")
        options.setdefault("add_generation_prompt", True)
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # noqa: BLE001 - that a template refuses a conversation is the result
            out.append({"name": name, "raises": str(error)})
            continue
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        out.append({"name": name, "rendered": rendered, "ids": ids})
    return out


def make(name):
    build, begin, end, template = LINES[name]
    directory = OUT / name
    directory.mkdir(parents=True, exist_ok=True)
    build().save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": (TEMPLATES / f"{template}.jinja").read_text(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    golden = {
        "reference": {"name": "transformers", "version": transformers.__version__},
        "template": template,
        "unix_seconds": int(NOW.replace(tzinfo=real_datetime.timezone.utc).timestamp()),
        "conversations": CONVERSATIONS,
        "texts": read(tokenizer, directory),
        "chats": chats(tokenizer),
    }
    (directory / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
    size = sum(f.stat().st_size for f in directory.iterdir())
    refused = [c["name"] for c in golden["chats"] if "raises" in c]
    print(f"{name:18} {tokenizer.vocab_size:4} pieces, folder {size:6}, refuses {refused}")


if __name__ == "__main__":
    for line in sys.argv[1:] or LINES:
        make(line)
