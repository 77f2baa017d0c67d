"""The table of tiny checkpoints that `packing.py` packs: those that no tool at hand quantises, and 8-bit
floats where publishers ship them.

`line` says whose filling and names: that of `make_llama_newer.py`, `make_gemma.py` and so on. `form`:
`affine` and `mxfp4` as MLX lays them out, or `fp8`, with a factor for each block of 16 x 16, beside which `fp4`
names matrices in 4 bits.
"""

from deepseek_v4_variants import HEAVY, SLIDING, SPARSE, V4
from deepseek_variants import V32
from gemma_variants import GEMMA
from llama_newer_variants import SMALL
from qwen_next_variants import NEXT, QUANTISED, QWEN35, QWEN35_MOE
from qwen_variants import QWEN3, QWEN3_MOE

DEFAULT_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))
#: Every matrix of a group of 32 or more, and one layer of each kind.
V4_WIDE = V4 | dict(
    q_lora_rank=32,
    o_lora_rank=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_hidden_layers=3,
    layer_types=[SLIDING, SPARSE, HEAVY],
)
MOST = r"_proj\.weight$"


def variant(line, form, what, config, salt=0, long=24, short=7, dtype="BF16", margin=0.01, **extra):
    return dict(line=line, form=form, what=what, config=config, salt=salt, long=long, short=short, dtype=dtype) | dict(
        margin=margin, **extra
    )


VARIANTS = {
    "iquestcoder-4bit": variant(
        "llama", "affine", "iquestcoder, affine, 4 bits, groups of 32, float16",
        SMALL | dict(model_type="iquestcoder", head_dim=16, max_position_embeddings=128) | DEFAULT_ROPE,
        10, dtype="F16",
    ),
    "arcee-4bit": variant(
        "llama", "affine", "arcee, affine, 4 bits, groups of 32, bfloat16; biases",
        SMALL | dict(model_type="arcee", hidden_act="relu2", max_position_embeddings=128, attention_bias=True, mlp_bias=True)
        | DEFAULT_ROPE,
        20,
    ),
    "gemma-4bit": variant(
        "gemma", "affine", "gemma, affine, 4 bits, groups of 32, float16; tied embedding",
        GEMMA | dict(intermediate_size=64), 9, dtype="F16", margin=0.005,
    ),
    "qwen3-fp8": variant("qwen", "fp8", "qwen3, 8-bit floats", QWEN3 | dict(head_dim=24), 7, fp8=MOST),
    "qwen3-moe-fp8": variant(
        "qwen", "fp8", "qwen3_moe, 8-bit floats; router in bfloat16", QWEN3_MOE, 1, fp8=MOST
    ),
    "qwen3-next-fp8": variant(
        "qwen_next", "fp8", "qwen3_next, 8-bit floats; routers, short convolution and in_proj_ba in bfloat16",
        NEXT, 17, long=40, fp8=r"(?<!in_proj_ba)(_proj|_proj_qkvz)\.weight$",
    ),
    "qwen3-5-fp8": variant(
        "qwen_next", "fp8", "qwen3_5, 8-bit floats; gates of the delta rule in bfloat16",
        QWEN35, 51, long=40, fp8=r"(_proj|_proj_qkv|_proj_z)\.weight$",
    ),
    "qwen3-5-moe-fp8": variant(
        "qwen_next", "fp8", "qwen3_5_moe, 8-bit floats, a tensor for each expert; gates of the delta rule in bfloat16",
        QWEN35_MOE, 13, long=40, fp8=r"(_proj|_proj_qkv|_proj_z)\.weight$", unfuse=True,
    ),
    "v32-fp8": variant(
        "deepseek", "fp8", "deepseek_v32, 8-bit floats; the indexer's head weights in bfloat16",
        V32, 14, fp8=r"(_proj(_with_mqa)?|wq_b|wk)\.weight$",
    ),
    "v4-4bit": variant(
        "deepseek", "affine", "deepseek_v4, affine, 4 bits, groups of 32, float16; experts stacked, routers not packed",
        V4_WIDE, 1, long=40, dtype="F16", stack=True, pack=r"^(?!.*ffn\.gate\.)",
    ),
    "v4-mxfp4": variant(
        "deepseek", "mxfp4", "deepseek_v4, experts alone in mxfp4, a tensor each", V4_WIDE, 10, long=40, pack=r"experts\.\d+\.w\d\.weight$",
    ),
    "v4-fp8": variant(
        "deepseek", "fp8", "deepseek_v4, 8-bit floats with powers of two as factors, in the publisher's spelling; routers, "
        "compressors and head weights in bfloat16",
        V4_WIDE, 1, long=40, fp8=r"attn\.(indexer\.)?w[qko]\w+\.weight$|experts\..*w\d\.weight$", published_v4=True,
    ),
    "v4-fp4": variant(
        "deepseek", "fp8", "deepseek_v4 as published: experts in 4 bits, two codes in a signed byte, the rest as in v4-fp8",
        V4_WIDE, 19, long=40, fp8=r"attn\.(indexer\.)?w[qko]\w+\.weight$|shared_experts\..*w\d\.weight$",
        fp4=r"experts\.\d+\.w\d\.weight$", published_v4=True,
    ),
}
