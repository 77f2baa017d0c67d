//! The C++ side as Rust sees it. Kept stable: every change here recompiles the whole shim.
//!
//! Nothing of MLX's own types crosses: arrays are opaque, everything else is plain data.

pub(crate) use ffi::*;

#[cxx::bridge(namespace = "mlxcel")]
mod ffi {
    /// An array inside a list of arrays; optional arrays are lists of none or one.
    #[derive(Clone, Copy)]
    struct Ref<'a> {
        array: &'a Array,
    }

    struct ArrayInfo {
        dtype: u32,
        ndim: u32,
        dims: [i64; 8],
    }

    /// Memory of a computed array; strides in elements.
    struct RawArray {
        data: usize,
        dtype: u32,
        ndim: u32,
        dims: [i64; 8],
        strides: [i64; 8],
        row_contiguous: bool,
    }

    struct MemoryFigures {
        active: u64,
        peak: u64,
        cache: u64,
        limit: u64,
    }

    /// One property of a device; `text` is empty for numbers.
    #[derive(Debug)]
    struct DeviceFact {
        key: String,
        text: String,
        number: u64,
    }

    struct SliceSpec<'a> {
        starts: &'a [i64],
        stops: &'a [i64],
        strides: &'a [i64],
    }

    struct ConvSpec<'a> {
        groups: i32,
        transposed: bool,
        stride: &'a [i64],
        padding_low: &'a [i64],
        padding_high: &'a [i64],
        dilation: &'a [i64],
        output_padding: &'a [i64],
    }

    struct QuantWeight<'a> {
        weight: &'a Array,
        scales: &'a Array,
        biases: &'a [Ref<'a>],
        mode: u32,
        bits: i32,
        group_size: i32,
    }

    struct RopeSpec<'a> {
        x: &'a Array,
        positions: &'a Array,
        freqs: &'a [Ref<'a>],
        dims: i32,
        interleaved: bool,
        base: f32,
        scale: f32,
    }

    struct AttentionSpec<'a> {
        q: &'a Array,
        k: &'a Array,
        v: &'a Array,
        mask: &'a [Ref<'a>],
        sinks: &'a [Ref<'a>],
        scale: f32,
        softcap: f32,
        causal: bool,
        window: u32,
    }

    struct PagedSpec<'a> {
        q: &'a Array,
        /// Empty when nothing is appended.
        k: &'a [Ref<'a>],
        /// Empty as `k` is, or where values are part of the keys.
        v: &'a [Ref<'a>],
        k_pool: &'a Array,
        /// Empty where values are part of the keys.
        v_pool: &'a [Ref<'a>],
        /// Empty when nothing is appended.
        slots: &'a [Ref<'a>],
        row_sequences: &'a Array,
        positions: &'a Array,
        page_table: &'a Array,
        sinks: &'a [Ref<'a>],
        /// Empty when the caller gave none.
        row_starts: &'a [u32],
        window: u32,
        chunk: u32,
        scale: f32,
        softcap: f32,
        selection: &'a [Ref<'a>],
        latent_dim: u32,
        read_only: bool,
    }

    struct StateRowsSpec<'a> {
        sources: &'a Array,
        targets: &'a Array,
        row_sequences: &'a Array,
        row_starts: &'a Array,
        starts: &'a [u32],
    }

    struct ShortConvSpec<'a> {
        x: &'a Array,
        weight: &'a Array,
        bias: &'a [Ref<'a>],
        pool: &'a Array,
        rows: StateRowsSpec<'a>,
        activation: u32,
    }

    struct GatedDeltaSpec<'a> {
        q: &'a Array,
        k: &'a Array,
        v: &'a Array,
        g: &'a Array,
        beta: &'a Array,
        pool: &'a Array,
        rows: StateRowsSpec<'a>,
    }

    struct SparseIndexSpec<'a> {
        q: &'a Array,
        k: &'a Array,
        weights: &'a Array,
        pool: &'a Array,
        slots: &'a Array,
        positions: &'a Array,
        page_table: &'a Array,
        starts: &'a [u32],
        top_k: u32,
        scale: f32,
    }

    struct RandomSpec<'a> {
        kind: u32,
        dtype: u32,
        key: &'a Array,
        dims: &'a [i64],
        a: f64,
        b: f64,
        logits: &'a [Ref<'a>],
    }

    /// Results of an operation with several; `third` may be null.
    struct Three {
        first: UniquePtr<Array>,
        second: UniquePtr<Array>,
        third: UniquePtr<Array>,
    }

    unsafe extern "C++" {
        include!("mlxcel-backend-mlx/cpp/shim.h");

        type Array;
        type Memo;

        fn library_version() -> Result<String>;
        fn header_version() -> String;
        fn device_count(kind: u32) -> Result<i32>;
        fn device_facts(kind: u32, index: i32) -> Result<Vec<DeviceFact>>;
        fn open_device(kind: u32, index: i32) -> Result<()>;
        fn close_device() -> Result<()>;
        fn memory_figures() -> Result<MemoryFigures>;
        fn set_memory_limit(bytes: u64) -> Result<()>;
        fn set_cache_limit(bytes: u64) -> Result<()>;
        fn set_wired_limit(bytes: u64) -> Result<()>;
        fn set_tensor_limit(bytes: u64);
        fn reset_peak_memory() -> Result<()>;
        fn clear_cache() -> Result<()>;
        fn synchronize() -> Result<()>;
        fn eval(arrays: &[Ref<'_>], wait: bool) -> Result<()>;
        fn new_memo() -> Result<UniquePtr<Memo>>;
        fn forget(memo: Pin<&mut Memo>);
        fn direct_add_ns(iterations: u64) -> Result<f64>;

        fn is_computed(a: &Array) -> bool;
        /// Computes the array first when it is not yet.
        fn raw_array(a: &Array) -> Result<RawArray>;
        /// A computed array with memory that nobody has written.
        fn new_array(dtype: u32, dims: &[i64]) -> Result<UniquePtr<Array>>;
        /// The memory of a computed, row-major array under another shape of as many elements.
        fn share_array(a: &Array, dims: &[i64]) -> Result<UniquePtr<Array>>;

        fn info(a: &Array) -> ArrayInfo;
        /// # Safety
        /// `data` must have `len` readable bytes.
        unsafe fn from_host_copy(
            data: *const u8,
            len: usize,
            dtype: u32,
            dims: &[i64],
        ) -> Result<UniquePtr<Array>>;
        /// # Safety
        /// `data` must stay readable until the function at `release` was called with `owner`, which
        /// happens exactly once after this succeeds, and never when it fails.
        unsafe fn from_host_borrow(
            data: *const u8,
            dtype: u32,
            dims: &[i64],
            release: usize,
            owner: usize,
        ) -> Result<UniquePtr<Array>>;
        fn full(value: f64, dtype: u32, dims: &[i64]) -> Result<UniquePtr<Array>>;
        fn arange(start: f64, stop: f64, step: f64, dtype: u32) -> Result<UniquePtr<Array>>;
        fn eye(n: i64, m: i64, k: i64, dtype: u32) -> Result<UniquePtr<Array>>;
        /// # Safety
        /// `dst` must have `len` writable bytes.
        unsafe fn read(a: &Array, dst: *mut u8, len: usize) -> Result<()>;
        fn cast(a: &Array, dtype: u32) -> Result<UniquePtr<Array>>;
        fn view(a: &Array, dtype: u32) -> Result<UniquePtr<Array>>;

        fn unary(kind: u32, a: &Array) -> Result<UniquePtr<Array>>;
        fn binary(kind: u32, a: &Array, b: &Array) -> Result<UniquePtr<Array>>;
        fn binary_scalar(
            kind: u32,
            a: &Array,
            scalar: f64,
            scalar_first: bool,
        ) -> Result<UniquePtr<Array>>;
        fn select(cond: &Array, a: &Array, b: &Array) -> Result<UniquePtr<Array>>;
        fn clip(a: &Array, low: f64, high: f64) -> Result<UniquePtr<Array>>;
        fn glu(kind: u32, gate: &Array, up: &Array) -> Result<UniquePtr<Array>>;

        fn reduce(kind: u32, a: &Array, axes: &[i32], keep_dims: bool) -> Result<UniquePtr<Array>>;
        fn arg_reduce(kind: u32, a: &Array, axis: i32, keep_dims: bool)
        -> Result<UniquePtr<Array>>;
        fn cumulative(
            kind: u32,
            a: &Array,
            axis: i32,
            reverse: bool,
            inclusive: bool,
        ) -> Result<UniquePtr<Array>>;
        fn order(kind: u32, a: &Array, k: i64, axis: i32) -> Result<UniquePtr<Array>>;
        fn softmax(a: &Array, axis: i32) -> Result<UniquePtr<Array>>;

        fn reshape(a: &Array, dims: &[i64]) -> Result<UniquePtr<Array>>;
        fn transpose(a: &Array, axes: &[i32]) -> Result<UniquePtr<Array>>;
        fn broadcast_to(a: &Array, dims: &[i64]) -> Result<UniquePtr<Array>>;
        fn concat(arrays: &[Ref<'_>], axis: i32) -> Result<UniquePtr<Array>>;
        fn slice(a: &Array, spec: &SliceSpec<'_>) -> Result<UniquePtr<Array>>;
        fn slice_update(
            a: &Array,
            update: &Array,
            spec: &SliceSpec<'_>,
        ) -> Result<UniquePtr<Array>>;
        fn pad(a: &Array, low: &[i64], high: &[i64], value: f64) -> Result<UniquePtr<Array>>;
        fn repeat(a: &Array, n: i64, axis: i32) -> Result<UniquePtr<Array>>;
        fn tile(a: &Array, reps: &[i64]) -> Result<UniquePtr<Array>>;
        fn contiguous(a: &Array) -> Result<UniquePtr<Array>>;

        fn take(a: &Array, indices: &Array, axis: i32) -> Result<UniquePtr<Array>>;
        fn take_along(a: &Array, indices: &Array, axis: i32) -> Result<UniquePtr<Array>>;
        fn put_along(
            a: &Array,
            indices: &Array,
            values: &Array,
            axis: i32,
        ) -> Result<UniquePtr<Array>>;
        fn gather(
            a: &Array,
            indices: &[Ref<'_>],
            axes: &[i32],
            slice_sizes: &[i64],
        ) -> Result<UniquePtr<Array>>;
        fn scatter(
            kind: u32,
            a: &Array,
            updates: &Array,
            indices: &[Ref<'_>],
            axes: &[i32],
        ) -> Result<UniquePtr<Array>>;

        fn matmul(a: &Array, b: &Array) -> Result<UniquePtr<Array>>;
        fn addmm(
            c: &Array,
            a: &Array,
            b: &Array,
            alpha: f32,
            beta: f32,
        ) -> Result<UniquePtr<Array>>;
        fn gather_matmul(
            a: &Array,
            b: &Array,
            lhs: &[Ref<'_>],
            rhs: &[Ref<'_>],
            sorted: bool,
        ) -> Result<UniquePtr<Array>>;
        fn conv(x: &Array, w: &Array, spec: &ConvSpec<'_>) -> Result<UniquePtr<Array>>;
        fn fft(kind: u32, a: &Array, n: &[i64], axes: &[i32]) -> Result<UniquePtr<Array>>;

        fn quantize(w: &Array, mode: u32, bits: i32, group_size: i32) -> Result<Three>;
        fn dequantize(w: &QuantWeight<'_>, dtype: u32) -> Result<UniquePtr<Array>>;
        fn quantized_matmul(
            x: &Array,
            w: &QuantWeight<'_>,
            transpose: bool,
        ) -> Result<UniquePtr<Array>>;
        fn gather_quantized_matmul(
            x: &Array,
            w: &QuantWeight<'_>,
            transpose: bool,
            lhs: &[Ref<'_>],
            rhs: &[Ref<'_>],
            sorted: bool,
        ) -> Result<UniquePtr<Array>>;

        fn rms_norm(x: &Array, w: &[Ref<'_>], eps: f32) -> Result<UniquePtr<Array>>;
        fn layer_norm(
            x: &Array,
            w: &[Ref<'_>],
            b: &[Ref<'_>],
            eps: f32,
        ) -> Result<UniquePtr<Array>>;
        fn rope(spec: &RopeSpec<'_>, memo: Pin<&mut Memo>) -> Result<UniquePtr<Array>>;
        fn attention(spec: &AttentionSpec<'_>) -> Result<UniquePtr<Array>>;
        fn paged_attention(spec: &PagedSpec<'_>, memo: Pin<&mut Memo>) -> Result<Three>;
        fn short_conv(spec: &ShortConvSpec<'_>) -> Result<Three>;
        fn gated_delta(spec: &GatedDeltaSpec<'_>) -> Result<Three>;
        fn sparse_index(spec: &SparseIndexSpec<'_>) -> Result<Three>;

        fn random_key(seed: u64) -> Result<UniquePtr<Array>>;
        fn random_split(key: &Array, n: i64) -> Result<UniquePtr<Array>>;
        fn random(spec: &RandomSpec<'_>) -> Result<UniquePtr<Array>>;
    }
}
