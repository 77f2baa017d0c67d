//! Tiny random checkpoints of the llama line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

use mlxcel_tests::goldens;

goldens! {
    "llama", f16 5e-3, bf16 4e-2;
    grouped_query_attention: "llama-gqa".halves(1.0);
    tied_embeddings: "llama-tied";
    biases: "llama-bias";
    explicit_head_dim: "llama-head-dim";
    bf16_weights: "llama-bf16";
    rope_linear: "rope-linear";
    rope_llama3: "rope-llama3";
    rope_yarn: "rope-yarn";
    rope_yarn_with_mscale: "rope-yarn-mscale";
    rope_yarn_with_explicit_factors: "rope-yarn-explicit";
    rope_llama3_beyond_its_original_context: "rope-llama3-beyond".halves(1.0);
    rope_yarn_beyond_its_original_context: "rope-yarn-beyond";
    mistral_with_a_window: "mistral-window".halves(1.0);
    mistral_without_a_window: "mistral-full";
    mixtral: "mixtral".halves(1.0);
    mixtral_with_fused_experts: "mixtral-fused";
    smollm3: "smollm3".halves(1.0);
    smollm3_with_a_list: "smollm3-list";
    smollm3_with_windows: "smollm3-window";
    // A temperature above 1 sharpens the rounding of scores too.
    ministral3: "ministral3".halves(2.0);
    ministral3_with_a_window: "ministral3-window";
    mistral3: "mistral3".halves(1.0);
    mistral3_around_ministral3: "mistral3-ministral";
    llama4: "llama4".halves(1.0);
    llama4_text: "llama4-text";
    llama4_beyond_its_original_context: "llama4-beyond";
    nemotron_nas: "nemotron-nas".halves(1.0);
    arcee: "arcee";
    iquestcoder: "iquestcoder".halves(1.0);
    iquestloopcoder: "iquestloopcoder".halves(1.0);
    mlx_ministral3: "mlx-ministral3-4bit";
    iquestcoder_4_bits: "iquestcoder-4bit".halves(1.0);
    arcee_4_bits: "arcee-4bit".halves(1.0);
    mlx_smollm3: "mlx-smollm3-4bit".halves(1.0);
    mlx_mistral3: "mlx-mistral3-4bit";
    mlx_iquestloopcoder: "mlx-iquestloopcoder-4bit";
    mlx_llama4: "mlx-llama4-4bit";
    mlx_nemotron_nas: "mlx-nemotron-nas-4bit";
    fp8_with_block_scales: "fp8-blocks".halves(1.0);
    fp8_with_a_scale_a_matrix: "fp8-tensor";
    mlx_3_bits: "mlx-3bit-g32";
    mlx_4_bits: "mlx-4bit-g32".halves(1.0);
    mlx_5_bits: "mlx-5bit-g32";
    mlx_6_bits: "mlx-6bit-g64";
    mlx_8_bits: "mlx-8bit-g32";
    mlx_mixed: "mlx-mixed";
    mlx_mixtral: "mlx-mixtral-4bit";
    mlx_mxfp4: "mlx-mxfp4";
    gguf_blocks_of_32: "gguf-blocks32";
    // Q6_K among them stays packed in groups of 16.
    gguf_k_quants: "gguf-kquants";
    gguf_llama3_frequencies: "gguf-llama3";
    gguf_smollm3: "gguf-smollm3";
    gguf_mixtral: "gguf-mixtral";
    gguf_ministral3: "gguf-ministral3";
    gguf_llama4: "gguf-llama4";
    gguf_deci: "gguf-deci";
    // The reference takes the frequencies from the longest position of the call; ours depend on each
    // row's own position (see `nn/rope.rs`). Within the original context both are the plain embedding.
    rope_dynamic_within_the_original_context: "rope-dynamic".short();
    // The reference chooses the factors by the length of the call, we by the context that is run.
    rope_longrope_within_the_original_context: "rope-longrope".short().context(24);
    rope_longrope_beyond_the_original_context: "rope-longrope".long();
}
