"""The table of tiny checkpoints of the llama line's newer architectures: configs, salts, controls.

As `llama_variants.py`. `wrapper` names the class of a checkpoint with images, whose decoder the
config holds under `text_config`. The best logit leads by 1 % of the range or more.
"""

from llama_variants import BASE

SMALL = {k: v for k, v in BASE.items() if k not in ("model_type", "rope_theta", "max_position_embeddings")}


def yarn(beta, **extra):
    return dict(
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1000.0,
            factor=8.0,
            original_max_position_embeddings=16,
            max_position_embeddings=128,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=beta,
            **extra,
        )
    )


MINISTRAL3 = SMALL | dict(
    model_type="ministral3", head_dim=16, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128
)

#: An encoder as small as its class allows, so that the file has its tensors.
PIXTRAL = dict(
    model_type="pixtral",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=8,
    patch_size=4,
    image_size=16,
)

LLAMA4 = SMALL | dict(
    model_type="llama4_text",
    head_dim=8,
    intermediate_size=16,
    intermediate_size_mlp=32,
    num_hidden_layers=4,
    num_local_experts=4,
    num_experts_per_tok=1,
    interleave_moe_layer_step=2,
    attention_chunk_size=8,
    floor_scale=8,
    attn_scale=0.4,
    attn_temperature_tuning=True,
    no_rope_layer_interval=4,
    use_qk_norm=True,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)

LLAMA4_VISION = dict(
    hidden_size=16,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=4,
    vision_output_dim=16,
    projector_input_dim=16,
    projector_output_dim=16,
    pixel_shuffle_ratio=0.5,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)


def variant(what, config, salt=0, long=40, short=7, dtype="F32", controls=None, **extra):
    return dict(
        what=what, config=config, salt=salt, long=long, short=short, dtype=dtype, controls=controls or {}, **extra
    )


VARIANTS = {
    "ministral3": variant(
        "yarn with queries that grow sharper in steps of the original context, which the long prompt leaves",
        MINISTRAL3 | yarn(0.5),
        21,
        controls={"without temperature": yarn(0.0)},
    ),
    "ministral3-window": variant(
        "the same with a sliding window of 8 and a tied head",
        MINISTRAL3 | yarn(0.5) | dict(sliding_window=8, tie_word_embeddings=True),
        8,
        controls={"no window": dict(sliding_window=None)},
    ),
    "mistral3": variant(
        "a mistral decoder in a checkpoint with images, as published: weights below language_model",
        SMALL | dict(model_type="mistral", head_dim=8, max_position_embeddings=128, sliding_window=None)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        8,
        dtype="BF16",
        wrapper="mistral3",
    ),
    "mistral3-ministral": variant(
        "a ministral3 decoder in a checkpoint with images",
        MINISTRAL3 | yarn(0.5),
        22,
        dtype="BF16",
        wrapper="mistral3",
    ),
    "llama4": variant(
        "the decoder of a checkpoint with images: chunks of 8, three layers with rotary embedding and one without, "
        "experts in every second layer, one a token beside the shared one",
        LLAMA4,
        5,
        dtype="BF16",
        wrapper="llama4",
        controls={
            "no chunks": dict(attention_chunk_size=None, layer_types=["full_attention"] * 4),
            "chunks of 9": dict(attention_chunk_size=9),
            "without temperature": dict(attn_temperature_tuning=False),
            "without head norms": dict(use_qk_norm=False),
        },
    ),
    "llama4-text": variant(
        "no wrapper; a list of layers with experts, two a token; an irregular list of rotary layers; biases; llama3 "
        "rotary scaling with equal bounds, as published; no head norms",
        LLAMA4
        | dict(
            num_hidden_layers=3,
            moe_layers=[0, 2],
            num_experts_per_tok=2,
            no_rope_layers=[0, 1, 1],
            attention_bias=True,
            use_qk_norm=False,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=2000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=1.0,
                original_max_position_embeddings=64,
            ),
        ),
        13,
        dtype="BF16",
        controls={
            "one expert a token": dict(num_experts_per_tok=1),
            "no chunks": dict(attention_chunk_size=None, layer_types=["full_attention"] * 3),
            "default rope": dict(rope_parameters=dict(rope_type="default", rope_theta=2000.0)),
        },
    ),
    "llama4-beyond": variant(
        "llama3 rotary scaling beyond its original context, without a wrapper",
        LLAMA4
        | dict(
            num_hidden_layers=2,
            no_rope_layers=[1, 0],
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=2000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
        46,
        dtype="BF16",
        controls={"default rope": dict(rope_parameters=dict(rope_type="default", rope_theta=2000.0))},
    ),
    "rope-llama3-beyond": variant(
        "llama3 rotary scaling beyond its original context",
        SMALL
        | dict(
            model_type="llama",
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=2000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
        5,
        long=72,
        dtype="BF16",
        controls={"default rope": dict(rope_parameters=dict(rope_type="default", rope_theta=2000.0))},
    ),
    "rope-yarn-beyond": variant(
        "yarn beyond its original context",
        SMALL
        | dict(
            model_type="llama",
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=32
            ),
        ),
        1,
        long=72,
        dtype="BF16",
        controls={"default rope": dict(rope_parameters=dict(rope_type="default", rope_theta=1000.0))},
    ),
    "arcee": variant(
        "a feed-forward block of two matrices and a squared ReLU; biases",
        SMALL | dict(model_type="arcee", hidden_act="relu2", max_position_embeddings=128, attention_bias=True, mlp_bias=True)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        4,
        dtype="BF16",
        long=24,
    ),
    "iquestcoder": variant(
        "llama with the name of iquestcoder and heads wider than hidden size over heads",
        SMALL | dict(model_type="iquestcoder", head_dim=16, max_position_embeddings=128)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
        9,
        dtype="BF16",
        long=24,
    ),
}
