//! The slots of the operation table, by group, and the table made of them.

mod attention;
mod caches;
mod creation;
mod elementwise;
mod evaluation;
mod handles;
mod indexing;
mod layers;
pub(crate) mod memory;
mod products;
mod quantized;
mod random;
mod reductions;
mod shapes;

use mlxcel_abi::Table;
use mlxcel_abi::ops::BackendOps;

/// The table, without a context yet. Starts from stubs, so a slot that is forgotten here says so
/// when it is called.
pub(crate) fn table() -> BackendOps {
    BackendOps {
        retain: handles::retain,
        release: handles::release,
        info: handles::info,
        from_host: creation::from_host,
        full: creation::full,
        arange: creation::arange,
        eye: creation::eye,
        read: evaluation::read,
        eval: evaluation::eval,
        async_eval: evaluation::async_eval,
        synchronize: evaluation::synchronize,
        memory: memory::memory,
        set_memory_limits: memory::set_memory_limits,
        clear_cache: memory::clear_cache,
        cast: elementwise::cast,
        view: elementwise::view,
        unary: elementwise::unary,
        binary: elementwise::binary,
        binary_scalar: elementwise::binary_scalar,
        select: elementwise::select,
        clip: elementwise::clip,
        reduce: reductions::reduce,
        arg_reduce: reductions::arg_reduce,
        cumulative: reductions::cumulative,
        order: reductions::order,
        softmax: reductions::softmax,
        reshape: shapes::reshape,
        transpose: shapes::transpose,
        broadcast_to: shapes::broadcast_to,
        concat: shapes::concat,
        slice: shapes::slice,
        slice_update: shapes::slice_update,
        pad: shapes::pad,
        repeat: shapes::repeat,
        tile: shapes::tile,
        contiguous: shapes::contiguous,
        take: indexing::take,
        take_along: indexing::take_along,
        put_along: indexing::put_along,
        gather: indexing::gather,
        scatter: indexing::scatter,
        matmul: products::matmul,
        addmm: products::addmm,
        gather_matmul: products::gather_matmul,
        quantize: quantized::quantize,
        dequantize: quantized::dequantize,
        quantized_matmul: quantized::quantized_matmul,
        gather_quantized_matmul: quantized::gather_quantized_matmul,
        conv: products::conv,
        fft: products::fft,
        rms_norm: layers::rms_norm,
        layer_norm: layers::layer_norm,
        rope: layers::rope,
        attention: attention::attention,
        paged_attention: attention::paged_attention,
        glu: elementwise::glu,
        random_key: random::random_key,
        random_split: random::random_split,
        random: random::random,
        short_conv: caches::short_conv,
        gated_delta: caches::gated_delta,
        sparse_index: caches::sparse_index,
        ..BackendOps::stubs()
    }
}
