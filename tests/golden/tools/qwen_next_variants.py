"""The table of tiny checkpoints of the qwen lines with linear attention: configs, salts, filling.

Filling is that of `tiny.py`, but for `A_log`, which is -2 + 0.5 z so that states last for some
tokens. The salts were found by `make_qwen_next.py --search` and `make_qwen_next_mlx.py --search`.
"""

import numpy as np

import tiny

BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
EXPERTS = dict(
    moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=24
)
NEXT = BASE | EXPERTS | dict(model_type="qwen3_next", norm_topk_prob=True)
MROPE = dict(
    rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True
)
QWEN35 = BASE | dict(model_type="qwen3_5_text", rope_parameters=MROPE)
QWEN35_MOE = BASE | EXPERTS | dict(model_type="qwen3_5_moe_text", rope_parameters=MROPE)
QWEN35_MOE.pop("intermediate_size")


def variant(what, config, salt=0, long=80, short=7, dtype="BF16", **extra):
    return dict(what=what, config=config, salt=salt, long=long, short=short, dtype=dtype, **extra)


VARIANTS = {
    "qwen3-next": variant(
        "three layers of the gated delta rule, one of gated attention, experts with a shared one", NEXT, 552, dtype="F32"
    ),
    "qwen3-next-mixed": variant(
        "layer_types of its own, a dense layer, three taps of convolution, biases, tied embeddings",
        NEXT
        | dict(
            num_hidden_layers=3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            mlp_only_layers=[1],
            linear_conv_kernel_dim=3,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            attention_bias=True,
            tie_word_embeddings=True,
            norm_topk_prob=False,
        ),
        418,
    ),
    "qwen3-5": variant("qwen3_5 dense, text alone, projections of the delta rule apart", QWEN35, 977),
    "qwen3-5-nested": variant(
        "qwen3_5 as published: text_config, tensors below model.language_model, a vision tower that is not used",
        QWEN35 | dict(tie_word_embeddings=True),
        955,
        nested="qwen3_5",
    ),
    "qwen3-5-moe": variant("qwen3_5_moe, text alone, stacked experts", QWEN35_MOE, 513),
}

QUANTISED = dict(linear_value_head_dim=8, linear_key_head_dim=16)
WIDE = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
MLX_VARIANTS = {
    "mlx-qwen3-next-4bit": variant(
        "4 bits in groups of 32, 8 for routers", NEXT | QUANTISED | WIDE, 4, long=40, bits=4
    ),
    "mlx-qwen3-5-4bit": variant("4 bits in groups of 32", QWEN35 | QUANTISED, 195, long=40, bits=4),
    "mlx-qwen3-5-moe-4bit": variant(
        "4 bits in groups of 32, 8 for routers", QWEN35_MOE | QUANTISED | WIDE, 206, long=40, bits=4
    ),
}


def fill(salt, name, shape, tied=False):
    if name.endswith("A_log"):
        return (-2.0 + 0.5 * tiny.seeded(salt, name).standard_normal(shape)).astype(np.float32)
    return tiny.fill(salt, name, shape, tied)
