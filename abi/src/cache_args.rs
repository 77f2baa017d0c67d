//! Argument structs of the operations over recurrent states and index keys (minor 1).
//!
//! A state pool has one slot for every state that is kept. Each sequence of a step reads one slot and
//! writes one: the same when the state moves on in place, two when the old one is kept as a
//! checkpoint. No slot is written that another sequence of the step reads.

use crate::types::Tensor;

abi_args! {
    /// Which states a step reads and writes, and which rows belong to them. Nested by value in other
    /// structs, hence frozen.
    pub struct StateRows {
        /// `[S]` i32: slot that a sequence starts from; -1 starts from zeros.
        pub sources: Tensor = Tensor::NONE,
        /// `[S]` i32: slot that takes the state after the sequence's last row. A sequence without
        /// rows copies its state. Slot 0 belongs to nobody: sequences of padding share it, and what
        /// it holds afterwards is not defined.
        pub targets: Tensor = Tensor::NONE,
        /// `[T]` i32: sequence of every row.
        pub row_sequences: Tensor = Tensor::NONE,
        /// `[S + 1]` i32: rows of sequence s are `[row_starts[s], row_starts[s + 1])`.
        pub row_starts: Tensor = Tensor::NONE,
        /// Host copy of `row_starts`, for backends that compose these operations.
        pub host_row_starts: *const u32 = core::ptr::null(),
        /// S.
        pub n_sequences: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
    }
}

abi_args! {
    /// Arguments of `short_conv`.
    pub struct ShortConvPoolArgs {
        /// `[T, C]`.
        pub x: Tensor = Tensor::NONE,
        /// `[C, K]`, K at least 2; the last column meets the row itself.
        pub weight: Tensor = Tensor::NONE,
        /// Optional `[C]`.
        pub bias: Tensor = Tensor::NONE,
        /// f32 `[slots, K - 1, C]`: the rows before, oldest first.
        pub pool: Tensor = Tensor::NONE,
        /// States and rows.
        pub rows: StateRows = StateRows::default(),
        /// One of [`crate::kinds::unary`], applied to the sum; 0 is none.
        pub activation: u32 = 0,
        /// Zero.
        pub reserved: u32 = 0,
    }
}

abi_args! {
    /// Arguments of `gated_delta`; see [`crate::family::GatedDeltaArgs`] for the rule.
    pub struct GatedDeltaPoolArgs {
        /// `[T, Hk, Dk]`.
        pub q: Tensor = Tensor::NONE,
        /// `[T, Hk, Dk]`.
        pub k: Tensor = Tensor::NONE,
        /// `[T, Hv, Dv]`.
        pub v: Tensor = Tensor::NONE,
        /// `[T, Hv]` or `[T, Hv, Dk]`.
        pub g: Tensor = Tensor::NONE,
        /// `[T, Hv]`.
        pub beta: Tensor = Tensor::NONE,
        /// f32 `[slots, Hv, Dk, Dv]`.
        pub pool: Tensor = Tensor::NONE,
        /// States and rows.
        pub rows: StateRows = StateRows::default(),
    }
}

abi_args! {
    /// Arguments of `sparse_index`. The paging arguments are those of
    /// [`crate::ops_args::PagedAttentionArgs`].
    pub struct SparseIndexArgs {
        /// `[T, H, D]`.
        pub q: Tensor = Tensor::NONE,
        /// `[T, D]`.
        pub k: Tensor = Tensor::NONE,
        /// `[T, H]`.
        pub weights: Tensor = Tensor::NONE,
        /// `[pages, page_size, D]`.
        pub pool: Tensor = Tensor::NONE,
        /// `[T]` i32: pool row that a row's key goes to.
        pub slots: Tensor = Tensor::NONE,
        /// `[T]` i32: sequence of every row.
        pub row_sequences: Tensor = Tensor::NONE,
        /// `[T]` i32: position of every row in its sequence.
        pub positions: Tensor = Tensor::NONE,
        /// `[S, P]` i32: pages of every sequence in order.
        pub page_table: Tensor = Tensor::NONE,
        /// Host copy of the row boundaries, `n_sequences + 1` values.
        pub row_starts: *const u32 = core::ptr::null(),
        /// S.
        pub n_sequences: u32 = 0,
        /// Keys chosen for every row, at least 1.
        pub top_k: u32 = 0,
        /// Multiplies `q . k`; above 0.
        pub scale: f32 = 1.0,
        /// Zero.
        pub reserved: u32 = 0,
    }
}
