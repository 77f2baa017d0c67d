//! Frozen sizes and offsets of ABI 1, asserted by the compiler on 64-bit targets.
//!
//! Written by `cargo xtask abi-dump`. A line may be added when a field or slot is appended;
//! no line may ever change within a major.

#![cfg(target_pointer_width = "64")]

use core::mem::offset_of;

macro_rules! frozen {
    ($ty:path: $($field:ident @ $offset:literal),* $(,)?) => {
        $(const _: () = assert!(offset_of!($ty, $field) == $offset);)*
    };
}

frozen! {crate::types::TensorInfo: dtype @ 0, ndim @ 4, dims @ 8}
frozen! {crate::ops_args::FromHostArgs: struct_size @ 0, data @ 8, byte_len @ 16, dtype @ 24, ndim @ 28, dims @ 32, release @ 40, owner @ 48}
frozen! {crate::ops_args::SliceArgs: struct_size @ 0, ndim @ 8, reserved @ 12, starts @ 16, stops @ 24, strides @ 32}
frozen! {crate::ops_args::GatherArgs: struct_size @ 0, indices @ 8, axes @ 16, n_indices @ 24, ndim @ 28, slice_sizes @ 32}
frozen! {crate::ops_args::QuantSpec: struct_size @ 0, mode @ 8, bits @ 12, group_size @ 16, reserved @ 20}
frozen! {crate::ops_args::QuantizedWeight: struct_size @ 0, weight @ 8, scales @ 16, biases @ 24, spec @ 32}
frozen! {crate::ops_args::QuantizedMatmulArgs: struct_size @ 0, x @ 8, w @ 16, transpose @ 72, sorted_indices @ 76, lhs_indices @ 80, rhs_indices @ 88}
frozen! {crate::ops_args::ConvArgs: struct_size @ 0, x @ 8, w @ 16, n_spatial @ 24, groups @ 28, transposed @ 32, reserved @ 36, stride @ 40, padding_low @ 64, padding_high @ 88, dilation @ 112, output_padding @ 136}
frozen! {crate::ops_args::RopeArgs: struct_size @ 0, x @ 8, positions @ 16, dims @ 24, interleaved @ 28, base @ 32, scale @ 36, freqs @ 40}
frozen! {crate::ops_args::AttentionArgs: struct_size @ 0, q @ 8, k @ 16, v @ 24, scale @ 32, softcap @ 36, mask_kind @ 40, window @ 44, mask @ 48, sinks @ 56}
frozen! {crate::ops_args::PagedAttentionArgs: struct_size @ 0, q @ 8, k @ 16, v @ 24, k_pool @ 32, v_pool @ 40, slots @ 48, row_sequences @ 56, positions @ 64, page_table @ 72, row_starts @ 80, n_sequences @ 88, window @ 92, scale @ 96, softcap @ 100, sinks @ 104, selection @ 112, latent_dim @ 120, read_only @ 124, chunk @ 128, reserved @ 132}
frozen! {crate::ops_args::RandomArgs: struct_size @ 0, kind @ 8, dtype @ 12, key @ 16, dims @ 24, ndim @ 32, reserved @ 36, a @ 40, b @ 48, logits @ 56}
frozen! {crate::ops_args::MemoryInfo: struct_size @ 0, active_bytes @ 8, peak_bytes @ 16, cache_bytes @ 24, limit_bytes @ 32, total_bytes @ 40, live_tensors @ 48}
frozen! {crate::ops_args::MemoryLimits: struct_size @ 0, limit_bytes @ 8, cache_limit_bytes @ 16, wired_limit_bytes @ 24, reset_peak @ 32, reserved @ 36}
frozen! {crate::backend::OpenArgs: struct_size @ 0, device @ 8, options @ 24, host @ 40}
frozen! {crate::family::LoadArgs: struct_size @ 0, arch @ 8, config @ 24, ops @ 40, weights @ 48, host @ 56, compute_dtype @ 64, context_length @ 68}
frozen! {crate::family::AttendArgs: struct_size @ 0, q @ 8, k @ 16, v @ 24, scale @ 32, softcap @ 36, sinks @ 40, window @ 48, reserved @ 52, selection @ 56, chunk @ 64, reserved2 @ 68}
frozen! {crate::family::StepArgs: struct_size @ 0, tokens @ 8, positions @ 16, logit_rows @ 24, n_rows @ 32, n_sequences @ 36, kv @ 40}
frozen! {crate::family::StepOutput: struct_size @ 0, logits @ 8}
frozen! {crate::family::EncodeArgs: struct_size @ 0, features @ 8, n_rows @ 16, reserved @ 20, kv @ 24}
frozen! {crate::family::IndexArgs: struct_size @ 0, q @ 8, k @ 16, weights @ 24, top_k @ 32, scale @ 36}
frozen! {crate::family::ShortConvArgs: struct_size @ 0, x @ 8, weight @ 16, bias @ 24, activation @ 32, reserved @ 36}
frozen! {crate::family::GatedDeltaArgs: struct_size @ 0, q @ 8, k @ 16, v @ 24, g @ 32, beta @ 40}
frozen! {crate::cache_args::StateRows: struct_size @ 0, sources @ 8, targets @ 16, row_sequences @ 24, row_starts @ 32, host_row_starts @ 40, n_sequences @ 48, reserved @ 52}
frozen! {crate::cache_args::ShortConvPoolArgs: struct_size @ 0, x @ 8, weight @ 16, bias @ 24, pool @ 32, rows @ 40, activation @ 96, reserved @ 100}
frozen! {crate::cache_args::GatedDeltaPoolArgs: struct_size @ 0, q @ 8, k @ 16, v @ 24, g @ 32, beta @ 40, pool @ 48, rows @ 56}
frozen! {crate::cache_args::SparseIndexArgs: struct_size @ 0, q @ 8, k @ 16, weights @ 24, pool @ 32, slots @ 40, row_sequences @ 48, positions @ 56, page_table @ 64, row_starts @ 72, n_sequences @ 80, top_k @ 84, scale @ 88, reserved @ 92}
frozen! {crate::fused_args::LinearWeight: struct_size @ 0, plain @ 8, quantized @ 16, bias @ 72}
frozen! {crate::fused_args::InputNorm: struct_size @ 0, normed @ 8, eps @ 12, weight @ 16}
frozen! {crate::fused_args::ProjectArgs: struct_size @ 0, x @ 8, norm @ 16, layers @ 40, n_layers @ 48, reserved @ 52, residual @ 56}
frozen! {crate::fused_args::GatedMlpArgs: struct_size @ 0, x @ 8, norm @ 16, gate @ 40, up @ 120, down @ 200, kind @ 280, reserved @ 284, residual @ 288}
frozen! {crate::fused_args::RotateArgs: struct_size @ 0, normed @ 8, eps @ 12, q_norm @ 16, k_norm @ 24, dims @ 32, interleaved @ 36, base @ 40, scale @ 44, freqs @ 48}
frozen! {crate::fused_args::SampleArgs: struct_size @ 0, logits @ 8, top_k @ 16, top_p @ 24, min_p @ 32, temperature @ 40, uniform @ 48}
frozen! {crate::fused_args::RouteArgs: struct_size @ 0, logits @ 8, top_k @ 16, renormalised @ 20}
frozen! {crate::fused_args::MixtureArgs: struct_size @ 0, x @ 8, experts @ 16, weights @ 24, gate @ 32, up @ 112, down @ 192, kind @ 272, reserved @ 276, residual @ 280}
frozen! {crate::collectives::JoinArgs: struct_size @ 0, rank @ 8, size @ 12, addresses @ 16}
frozen! {crate::host::HostApi: struct_size @ 0, minor @ 8, ctx @ 16, log @ 24, query @ 32}
frozen! {crate::host::WeightsApi: struct_size @ 0, minor @ 8, ctx @ 16, count @ 24, name @ 32, info @ 40, load @ 48, quant @ 56}
frozen! {crate::ops::BackendOps: struct_size @ 0, minor @ 8, ctx @ 16, retain @ 24, release @ 32, info @ 40, from_host @ 48, full @ 56, arange @ 64, eye @ 72, read @ 80, eval @ 88, async_eval @ 96, synchronize @ 104, memory @ 112, set_memory_limits @ 120, clear_cache @ 128, cast @ 136, view @ 144, unary @ 152, binary @ 160, binary_scalar @ 168, select @ 176, clip @ 184, reduce @ 192, arg_reduce @ 200, cumulative @ 208, order @ 216, softmax @ 224, reshape @ 232, transpose @ 240, broadcast_to @ 248, concat @ 256, slice @ 264, slice_update @ 272, pad @ 280, repeat @ 288, tile @ 296, contiguous @ 304, take @ 312, take_along @ 320, put_along @ 328, gather @ 336, scatter @ 344, matmul @ 352, addmm @ 360, gather_matmul @ 368, quantize @ 376, dequantize @ 384, quantized_matmul @ 392, gather_quantized_matmul @ 400, conv @ 408, fft @ 416, rms_norm @ 424, layer_norm @ 432, rope @ 440, attention @ 448, paged_attention @ 456, glu @ 464, random_key @ 472, random_split @ 480, random @ 488, short_conv @ 496, gated_delta @ 504, sparse_index @ 512, project @ 520, gated_mlp @ 528, add_rms_norm @ 536, rotated_paged_attention @ 544, sample @ 552, route @ 560, mixture @ 568}
frozen! {crate::backend::BackendTable: struct_size @ 0, minor @ 8, ctx @ 16, probe @ 24, open @ 32, close @ 40}
frozen! {crate::family::KvApi: struct_size @ 0, minor @ 8, ctx @ 16, attend @ 24, index @ 32, short_conv @ 40, gated_delta @ 48, state_read @ 56, state_write @ 64, row_starts @ 72, row_sequences @ 80, index_keys @ 88, attend_rotated @ 96, cross_write @ 104}
frozen! {crate::family::FamilyTable: struct_size @ 0, minor @ 8, ctx @ 16, probe @ 24, describe @ 32, adapt_gguf @ 40, load @ 48, forward @ 56, unload @ 64, encode @ 72}
frozen! {crate::collectives::Collectives: struct_size @ 0, minor @ 8, ctx @ 16, join @ 24, rank @ 32, size @ 40, all_sum @ 48, all_gather @ 56}
