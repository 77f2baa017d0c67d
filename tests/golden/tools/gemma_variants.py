"""The table of tiny gemma checkpoints: configs, salts, controls, legacy spellings.

As in llama_variants.py: a control is a changed config that a runtime would compute which ignores
the feature under test, and must lie far from the golden. Salts were found by
`make_gemma.py --search`.
"""

BASE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)

GEMMA = BASE | dict(model_type="gemma", num_key_value_heads=1, head_dim=16, rope_theta=10000.0)

GEMMA2 = BASE | dict(
    model_type="gemma2",
    num_hidden_layers=3,
    rope_theta=10000.0,
    query_pre_attn_scalar=20,
    sliding_window=8,
    attn_logit_softcapping=3.0,
    final_logit_softcapping=5.0,
)

GEMMA3 = BASE | dict(
    model_type="gemma3_text",
    num_hidden_layers=3,
    rope_theta=50000.0,
    rope_local_base_freq=100.0,
    sliding_window=8,
    sliding_window_pattern=3,
    query_pre_attn_scalar=20,
)

#: A vision tower that no golden computes with: its tensors are in the file, as in published ones.
VISION = dict(
    model_type="siglip_vision_model",
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)

#: Shapes that divide into blocks of 32, and few enough weights for the seven layers that the
#: fixed pattern of GGUF files needs.
SMALL = dict(
    intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16
)


def variant(what, config, salt=0, long=24, short=7, dtype="F32", controls=None, **extra):
    return dict(
        what=what, config=config, salt=salt, long=long, short=short, dtype=dtype, controls=controls or {}, **extra
    )


VARIANTS = {
    "gemma": variant(
        "one key/value head, heads wider than hidden_size / heads, tied embedding scaled by sqrt(hidden_size)",
        GEMMA,
        1,
        controls={"rope theta 500000": dict(rope_theta=500000.0), "gelu of another kind": dict(hidden_act="silu")},
        legacy=dict(add=dict(hidden_act="gelu"), drop=("tie_word_embeddings",)),
    ),
    "gemma2": variant(
        "windows of 8 in layers 0 and 2, soft caps on scores and logits, query_pre_attn_scalar that is not head_dim",
        GEMMA2,
        7,
        controls={
            "no window": dict(sliding_window=4096),
            "no cap of scores": dict(attn_logit_softcapping=None),
            "no cap of logits": dict(final_logit_softcapping=None),
            "scaled by head_dim": dict(query_pre_attn_scalar=8),
            "sliding layers swapped": dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        },
        legacy=dict(drop=("layer_types", "tie_word_embeddings")),
    ),
    "gemma2-uncapped": variant(
        "caps that are null in the config are no caps, whatever their defaults; layer_types as a list, BF16 weights",
        GEMMA2
        | dict(
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
        ),
        450,
        dtype="BF16",
        controls={"default caps": dict(final_logit_softcapping=30.0, attn_logit_softcapping=50.0)},
    ),
    "gemma3": variant(
        "norms of query and key heads, windows of 8 in all but every third layer, a rotary base for each kind of layer",
        GEMMA3,
        12,
        controls={
            "no window": dict(sliding_window=4096),
            "one rotary base": dict(rope_local_base_freq=50000.0),
            "scaled by head_dim": dict(query_pre_attn_scalar=8),
            "pattern 2": dict(sliding_window_pattern=2),
        },
        legacy=dict(drop=("layer_types", "tie_word_embeddings")),
    ),
    "gemma3-linear": variant(
        "linear rotary scaling, which holds for full layers alone; irregular layer_types, own output head, biases of "
        "attention, cap of logits",
        GEMMA3
        | dict(
            num_hidden_layers=2,
            layer_types=["full_attention", "sliding_attention"],
            rope_scaling=dict(rope_type="linear", factor=8.0),
            tie_word_embeddings=False,
            attention_bias=True,
            final_logit_softcapping=5.0,
        ),
        79,
        controls={
            "no scaling": dict(rope_scaling=None),
            "no cap of logits": dict(final_logit_softcapping=None),
            "sliding layers swapped": dict(layer_types=["sliding_attention", "full_attention"]),
        },
    ),
    "gemma3-sixth": variant(
        "seven layers and neither pattern nor layer_types in config.legacy.json: every sixth layer sees everything; "
        "rotary bases left to their defaults; BF16 weights",
        BASE
        | SMALL
        | dict(model_type="gemma3_text", num_hidden_layers=7, vocab_size=64, sliding_window=8, query_pre_attn_scalar=20),
        3,
        dtype="BF16",
        controls={"no window": dict(sliding_window=4096), "one rotary base": dict(rope_theta=10000.0)},
        legacy=dict(drop=("layer_types", "tie_word_embeddings", "rope_theta", "rope_local_base_freq")),
    ),
    "gemma3-nested": variant(
        "model_type gemma3: the text model in text_config, published tensor names under language_model, a vision tower "
        "beside it that text does not need",
        dict(
            model_type="gemma3",
            text_config=GEMMA3 | dict(num_hidden_layers=2, sliding_window_pattern=2),
            vision_config=VISION,
            mm_tokens_per_image=4,
            boi_token_index=4,
            eoi_token_index=5,
            image_token_index=95,
            tie_word_embeddings=True,
        ),
        142,
    ),
}

#: Two kinds of layers before those that share: each sharing layer must take the last of its kind.
SHARING = dict(
    num_hidden_layers=5,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    num_kv_shared_layers=2,
    sliding_window=8,
    hidden_size_per_layer_input=8,
    final_logit_softcapping=5.0,
)

GEMMA3N = BASE | SHARING | dict(
    model_type="gemma3n_text",
    intermediate_size=[48, 48, 64, 48, 64],
    rope_theta=50000.0,
    rope_local_base_freq=100.0,
    vocab_size_per_layer_input=90,
    altup_num_inputs=3,
    laurel_rank=4,
    activation_sparsity_pattern=[0.8, 0.0, 0.3, 0.0, 0.6],
)

ROPE4 = dict(
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=5000.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)

GEMMA4 = BASE | SHARING | dict(
    model_type="gemma4_text",
    num_key_value_heads=1,
    global_head_dim=16,
    vocab_size_per_layer_input=96,
    use_double_wide_mlp=True,
    rope_parameters=ROPE4,
)

GEMMA4_MOE = BASE | dict(
    model_type="gemma4_text",
    num_hidden_layers=3,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=8,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=16,
    rope_parameters=ROPE4,
)

NO_WINDOW = dict(sliding_window=4096)
ROTATED4 = dict(ROPE4, full_attention=dict(rope_type="default", rope_theta=5000.0))

VARIANTS |= {
    "gemma3n": variant(
        "three streams, a low-rank path beside attention, inputs of layers for 90 of 96 tokens, widths and sparsity "
        "by layer, two last layers that read the caches of others; cap of logits",
        GEMMA3N,
        3,
        controls={
            "no window": NO_WINDOW,
            "one rotary base": dict(rope_local_base_freq=50000.0),
            "nothing dropped": dict(activation_sparsity_pattern=[0.0] * 5),
            "no cap of logits": dict(final_logit_softcapping=1000.0),
            "unscaled active stream": dict(altup_correct_scale=False),
            "other active stream": dict(altup_active_idx=1),
        },
        legacy=dict(drop=("tie_word_embeddings",)),
    ),
    "gemma3n-twelve": variant(
        "twelve layers and neither layer_types nor sparsity in config.legacy.json: every fifth layer sees everything, "
        "the first ten drop 95 % of their activations; no sharing, unscaled second stream active; BF16 weights",
        BASE
        | dict(
            model_type="gemma3n_text",
            vocab_size=64,
            hidden_size=16,
            intermediate_size=96,
            num_hidden_layers=12,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size_per_layer_input=64,
            hidden_size_per_layer_input=4,
            sliding_window=8,
            num_kv_shared_layers=0,
            altup_num_inputs=2,
            altup_active_idx=1,
            altup_correct_scale=False,
            laurel_rank=2,
            rms_norm_eps=0.01,  # where nearly all activations are dropped, norms would blow up rounding errors
        ),
        25,
        dtype="BF16",
        controls={
            "no window": NO_WINDOW,
            "nothing dropped": dict(activation_sparsity_pattern=[0.0] * 12),
            "first stream active": dict(altup_active_idx=0),
        },
        legacy=dict(drop=("layer_types", "activation_sparsity_pattern", "tie_word_embeddings")),
    ),
    "gemma3n-nested": variant(
        "model_type gemma3n: the text model in text_config under model.language_model, towers beside it, and keys and "
        "values of sharing layers that nothing reads, as published",
        GEMMA3N | dict(altup_num_inputs=2),
        21,
        nested=True,
    ),
    "gemma4": variant(
        "full layers with heads of 16 of which half is rotated, sliding ones with heads of 8; inputs of layers; two last "
        "layers that read the caches of others and are twice as wide; cap of logits",
        GEMMA4,
        10,
        controls={
            "no window": NO_WINDOW,
            "whole heads rotated": dict(rope_parameters=ROTATED4),
            "no cap of logits": dict(final_logit_softcapping=None),
            "one rotary base": dict(rope_parameters=dict(ROPE4, sliding_attention=dict(rope_type="default", rope_theta=5000.0))),
        },
    ),
    "gemma4-moe": variant(
        "four experts beside the feed-forward block, two a token; full layers take their keys for values and have one "
        "key head; neither inputs of layers nor shared caches; BF16 weights",
        GEMMA4_MOE,
        4,
        dtype="BF16",
        controls={"no window": NO_WINDOW, "one expert": dict(top_k_experts=1)},
    ),
    "gemma4-sixth": variant(
        "seven layers, no layer_types and no rotary settings in config.legacy.json: every sixth layer and the last see "
        "everything; biases of attention, own output head",
        BASE
        | dict(
            model_type="gemma4_text",
            vocab_size=64,
            num_hidden_layers=7,
            intermediate_size=32,
            num_attention_heads=2,
            sliding_window=8,
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        4,
        controls={"no window": NO_WINDOW},
        legacy=dict(drop=("layer_types", "rope_parameters")),
    ),
    "gemma4-nested": variant(
        "model_type gemma4: the text model in text_config under model.language_model, towers beside it, and keys and "
        "values of sharing layers that nothing reads, as published",
        GEMMA4 | dict(use_double_wide_mlp=False),
        3,
        nested=True,
    ),
}

#: Types of the layers' matrices by name, one of each kind that MLX's form holds exactly.
TYPES = dict(
    token_embd="Q8_0",
    attn_q="Q4_0",
    attn_k="Q5_0",
    attn_v="Q8_0",
    attn_output="Q4_1",
    ffn_gate="Q5_1",
    ffn_up="F16",
    ffn_down="Q4_0",
)

TYPES |= dict(
    per_layer_token_embd="Q4_0",
    per_layer_model_proj="F16",
    inp_gate="Q8_0",
    proj="Q4_1",
    altup_proj="F16",
    altup_unembd_proj="F16",
    laurel_l="Q5_0",
    laurel_r="Q8_0",
    ffn_gate_up_exps="Q4_0",
    ffn_down_exps="Q8_0",
)

#: The file names no pattern, no divisor of scores and no base for sliding layers: these are what
#: llama.cpp takes.
GGUF_VARIANTS = {
    "gguf-gemma": variant("gemma as llama.cpp's converter writes it", GEMMA | SMALL, 18),
    "gguf-gemma2": variant(
        "gemma2 as llama.cpp's converter writes it",
        GEMMA2 | SMALL,
        1,
        controls={
            "no window": dict(sliding_window=4096),
            "no cap of scores": dict(attn_logit_softcapping=None),
            "no cap of logits": dict(final_logit_softcapping=None),
        },
    ),
    "gguf-gemma3": variant(
        "gemma3 as llama.cpp's converter writes it, with linear scaling of full layers",
        GEMMA3
        | SMALL
        | dict(
            num_hidden_layers=7,
            sliding_window_pattern=6,
            rope_theta=5000.0,
            rope_local_base_freq=10000.0,
            rope_scaling=dict(rope_type="linear", factor=8.0),
        ),
        3,
        controls={
            "no window": dict(sliding_window=4096),
            "no scaling": dict(rope_scaling=None),
            "pattern 2": dict(sliding_window_pattern=2),
        },
    ),
}

WIDE = dict(
    intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, hidden_size_per_layer_input=32
)

GGUF_VARIANTS |= {
    "gguf-gemma3n": variant(
        "gemma3n as llama.cpp's converter writes it: deviations for shares, projections of streams in one tensor",
        GEMMA3N | WIDE | dict(vocab_size_per_layer_input=96, laurel_rank=32, altup_num_inputs=4),
        3,
        controls={
            "no window": NO_WINDOW,
            "one rotary base": dict(rope_local_base_freq=50000.0),
            "nothing dropped": dict(activation_sparsity_pattern=[0.0] * 5),
        },
    ),
    "gguf-gemma4": variant(
        "gemma4 as llama.cpp's converter writes it: widths by layer, rotated part of heads as a tensor",
        GEMMA4 | WIDE | dict(global_head_dim=32),
        9,
        controls={"no window": NO_WINDOW, "whole heads rotated": dict(rope_parameters=ROTATED4)},
    ),
    "gguf-gemma4-moe": variant(
        "gemma4 with experts as llama.cpp's converter writes it: gate and up rows in one tensor, scales of router and "
        "experts beside them, key heads by layer",
        GEMMA4_MOE | dict(intermediate_size=32, moe_intermediate_size=32),
        1,
        controls={"no window": NO_WINDOW, "one expert": dict(top_k_experts=1)},
    ),
}

#: Quantised by mlx-lm. A width whose root bfloat16 holds: mlx-lm rounds the scale of the embedding to
#: that type whatever the activations are. It ignores the windows of gemma2, hence a wide one there.
MLX_VARIANTS = {
    "mlx-gemma3-4bit": dict(
        what="gemma3_text, affine, 4 bits, groups of 32, bfloat16",
        config=GEMMA3 | dict(hidden_size=64, intermediate_size=64, head_dim=16, query_pre_attn_scalar=20),
        bits=4,
        group=32,
        dtype="BF16",
        salt=116,
    ),
    "mlx-gemma3-mxfp4": dict(
        what="gemma3_text, mxfp4, groups of 32, bfloat16",
        config=GEMMA3 | dict(hidden_size=64, intermediate_size=64, head_dim=16, query_pre_attn_scalar=20),
        bits=4,
        mode="mxfp4",
        dtype="BF16",
        salt=106,
    ),
    "mlx-gemma2-8bit": dict(
        what="gemma2, affine, 8 bits, groups of 64, float16",
        config=GEMMA2 | dict(hidden_size=64, intermediate_size=64, head_dim=16, sliding_window=128, num_hidden_layers=2),
        bits=8,
        group=64,
        dtype="F16",
        salt=1607,
    ),
}


MLX_WIDE = WIDE | dict(hidden_size=64, intermediate_size=64)
MLX_VARIANTS |= {
    "mlx-gemma3n-4bit": dict(
        what="gemma3n with its text_config, affine, 4 bits, groups of 32, bfloat16; the table of the layers' inputs too",
        config=dict(
            model_type="gemma3n",
            text_config=GEMMA3N
            | MLX_WIDE
            | dict(laurel_rank=32, altup_num_inputs=2, altup_coef_clip=120.0, altup_correct_scale=True, altup_active_idx=0),
        ),
        bits=4,
        group=32,
        dtype="BF16",
        salt=3,
        always_cached=True,
    ),
    "mlx-gemma4-4bit": dict(
        what="gemma4 with its text_config, affine, 4 bits, groups of 32, bfloat16; the table of the layers' inputs too",
        config=dict(model_type="gemma4", vocab_size=96, text_config=GEMMA4 | MLX_WIDE | dict(global_head_dim=32)),
        bits=4,
        group=32,
        dtype="BF16",
        salt=5,
    ),
    "mlx-gemma4-moe-4bit": dict(
        what="gemma4_text with experts, affine, 4 bits, groups of 32, the router at 8 bits in groups of 64; float16",
        config=GEMMA4_MOE
        | dict(
            hidden_size=64,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_kv_shared_layers=0,
            use_double_wide_mlp=False,
            final_logit_softcapping=5.0,
        ),
        bits=4,
        group=32,
        dtype="F16",
        salt=6,
    ),
}


#: Least lead of the best logit in a greedy step, as a share of the logit range: 50 times the
#: tolerance of a test. Small vocabularies with a tied head rarely give more.
MIN_RELATIVE_MARGIN = 0.005


def fill(tiny, salt, name, shape, minus_one=True):
    """Float32 values of a tensor. The embedding is scaled up when read; the norms of the first three
    generations are stored minus one."""
    z = tiny.seeded(salt, name).standard_normal(shape)
    if not minus_one:
        return fill_plain(z, name).astype("float32")
    columns = z[0].size
    if len(shape) == 1:
        factor = 0.2 if "norm" in name else 0.1
    elif "embed_tokens" in name:
        factor = 0.6 / columns**0.5  # so small that the tied head does not repeat its input
    elif name == "lm_head.weight":
        factor = 0.5
    else:
        factor = 1.5 / columns**0.5
    return (factor * z).astype("float32")


def fill_plain(z, name):
    """gemma3n and gemma4: norms and scales are factors. Scores are not scaled, so queries and keys are
    small."""
    if z.ndim == 1 and not name.endswith(".bias"):
        return (0.6 if "q_norm" in name or "k_norm" in name else 1.0) + 0.2 * z
    if z.ndim == 1:
        return 0.1 * z
    if "embed_tokens_per_layer" in name:
        return 0.3 * z
    if "embed_tokens" in name:
        return 0.6 / z.shape[-1] ** 0.5 * z
    return (0.5 if name.endswith("lm_head.weight") else 1.5 / z.shape[-1] ** 0.5) * z
