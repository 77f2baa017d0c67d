"""The table of tiny llama-line checkpoints: configs, salts, controls.

`controls` are changed configs run on the same weights: a runtime that ignored the feature under
test would compute the control, so each must lie far from the golden on at least one prompt. The
salts were found by `make_llama.py --search`: the first whose greedy margins are comfortable.
"""

BASE = dict(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)

#: Rotary variants: a head of 16 gives 8 frequencies, enough for every regime of a scaling rule.
ROPE = BASE | dict(num_attention_heads=2, num_key_value_heads=1)

MISTRAL = BASE | dict(model_type="mistral", vocab_size=96)

MIXTRAL = BASE | dict(
    model_type="mixtral",
    intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=None,
    rope_theta=1000000.0,
)

SMOLLM3 = BASE | dict(model_type="smollm3", rope_theta=5000.0, tie_word_embeddings=True, pad_token_id=0)

DEFAULT_ROPE = dict(rope_scaling=None)

SHORT_FACTOR = [1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5]
LONG_FACTOR = [1.0, 1.5, 2.25, 3.0, 4.5, 6.0, 8.0, 12.0]


def longrope(short, long):
    return dict(
        rope_scaling=dict(
            rope_type="longrope", original_max_position_embeddings=24, short_factor=short, long_factor=long
        )
    )


def yarn(**extra):
    return dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, **extra))


#: Yarn looks at the two context lengths and never at the prompt, so a large context is no burden.
YARN = ROPE | dict(rope_theta=1000.0, max_position_embeddings=2048)


def variant(what, config, salt=0, long=24, short=7, dtype="F32", controls=None, **extra):
    return dict(
        what=what, config=config, salt=salt, long=long, short=short, dtype=dtype, controls=controls or {}, **extra
    )


VARIANTS = {
    "llama-gqa": variant(
        "grouped-query attention (4 heads, 2 key/value heads), separate output head",
        BASE | dict(vocab_size=96),
        85,
        controls={"rope theta 500000": dict(rope_theta=500000.0)},
    ),
    "llama-bf16": variant(
        "as llama-gqa with weights stored as BF16; the golden is computed in float32 from the stored values",
        BASE | dict(vocab_size=96),
        85,
        dtype="BF16",
    ),
    "llama-tied": variant(
        "tied embeddings: no lm_head.weight in the file; multi-head attention (4 heads, 4 key/value heads)",
        BASE | dict(vocab_size=128, tie_word_embeddings=True, num_key_value_heads=4),
        387,
    ),
    "llama-bias": variant(
        "attention_bias (q, k, v and o) and mlp_bias (gate, up and down)",
        BASE | dict(attention_bias=True, mlp_bias=True),
        16,
    ),
    "llama-head-dim": variant(
        "head_dim 16 where hidden_size / heads is 8",
        BASE | dict(head_dim=16),
        44,
    ),
    "rope-linear": variant(
        "linear rotary scaling",
        ROPE | dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
        120,
        controls={"default rope": DEFAULT_ROPE},
    ),
    "rope-dynamic": variant(
        "dynamic (NTK) rotary scaling: the short prompt and its 12 tokens stay inside "
        "max_position_embeddings 24, the long prompt starts beyond it",
        ROPE | dict(max_position_embeddings=24, rope_scaling=dict(rope_type="dynamic", factor=4.0)),
        716,
        long=40,
        controls={"default rope": DEFAULT_ROPE},
    ),
    "rope-yarn": variant(
        "yarn rotary scaling with its default betas and attention factor",
        YARN | yarn(),
        26,
        long=40,
        controls={"default rope": DEFAULT_ROPE, "attention factor 1": yarn(attention_factor=1.0)},
    ),
    "rope-yarn-mscale": variant(
        "yarn with mscale and mscale_all_dim (attention factor is the ratio of the two)",
        YARN | yarn(mscale=2.0, mscale_all_dim=0.5),
        111,
        long=40,
        controls={"without mscale fields": yarn(), "attention factor 1": yarn(attention_factor=1.0)},
    ),
    "rope-yarn-explicit": variant(
        "yarn with attention_factor, beta_fast, beta_slow and truncate false",
        YARN | yarn(attention_factor=1.3, beta_fast=16.0, beta_slow=2.0, truncate=False),
        199,
        long=40,
        controls={
            "truncated range": yarn(attention_factor=1.3, beta_fast=16.0, beta_slow=2.0),
            "default betas": yarn(attention_factor=1.3, truncate=False),
            "default attention factor": yarn(beta_fast=16.0, beta_slow=2.0, truncate=False),
        },
    ),
    "rope-llama3": variant(
        "llama3 rotary scaling; the 8 frequencies fall into all three of its bands",
        ROPE
        | dict(
            rope_theta=2000.0,
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        34,
        long=40,
        controls={"default rope": DEFAULT_ROPE},
    ),
    "rope-longrope": variant(
        "longrope without `factor` (taken from the two context lengths): the short prompt and its 12 tokens use "
        "short_factor, the long prompt long_factor; the attention factor is applied to both",
        ROPE | dict(rope_theta=1000.0, max_position_embeddings=96) | longrope(SHORT_FACTOR, LONG_FACTOR),
        119,
        long=32,
        controls={
            "default rope": DEFAULT_ROPE,
            "short factors everywhere": longrope(SHORT_FACTOR, SHORT_FACTOR),
            "long factors everywhere": longrope(LONG_FACTOR, LONG_FACTOR),
        },
    ),
    "mistral-window": variant(
        "mistral, sliding window of 8 tokens (a token sees itself and the 7 before it)",
        MISTRAL | dict(sliding_window=8),
        53,
        long=40,
        controls={
            "no window": dict(sliding_window=None),
            "window 7": dict(sliding_window=7),
            "window 9": dict(sliding_window=9),
        },
    ),
    "mistral-full": variant(
        "mistral with sliding_window null",
        MISTRAL | dict(sliding_window=None, rope_theta=1000000.0),
        462,
        long=40,
    ),
    "mixtral": variant(
        "mixture of 4 experts, 2 a token, one tensor per expert and matrix as published (w1 gate, w2 down, w3 up)",
        MIXTRAL,
        194,
        dtype="BF16",
        controls={"one expert a token": dict(num_experts_per_tok=1)},
    ),
    "mixtral-fused": variant(
        "as mixtral, with the tensor names transformers 5 uses in memory: all experts of a layer stacked "
        "[experts, 2 * intermediate, hidden], gate rows before up rows",
        MIXTRAL,
        194,
        dtype="BF16",
        fused_experts=True,
    ),
    "smollm3": variant(
        "no rotary embedding in every second layer; config.json lists no_rope_layers, config.legacy.json "
        "has only no_rope_layer_interval",
        SMOLLM3 | dict(num_hidden_layers=2, no_rope_layer_interval=2),
        180,
        controls={"rotary everywhere": dict(no_rope_layers=[1, 1])},
    ),
    "smollm3-list": variant(
        "no_rope_layers as an irregular list that no interval gives, untied head",
        SMOLLM3 | dict(num_hidden_layers=3, no_rope_layers=[0, 1, 0], tie_word_embeddings=False),
        34,
        controls={"rotary everywhere": dict(no_rope_layers=[1, 1, 1])},
    ),
    "smollm3-window": variant(
        "layers without rotary embedding use a sliding window of 8, the others see everything",
        SMOLLM3 | dict(num_hidden_layers=2, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=8),
        17,
        long=40,
        controls={"no window": dict(use_sliding_window=False, sliding_window=None)},
    ),
}

#: What an older config holds beside the variant's own keys; published files differ just so.
LEGACY_NOTE = {
    "llama-gqa": dict(drop=("head_dim",)),
    "llama-tied": dict(drop=("head_dim", "num_key_value_heads")),
    "rope-linear": dict(type_key=True),
    "rope-dynamic": dict(type_key=True),
    "rope-longrope": dict(type_key=True, original_outside=True),
    "smollm3": dict(drop=("no_rope_layers", "layer_types")),
}
