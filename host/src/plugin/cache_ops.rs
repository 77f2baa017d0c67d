//! Safe wrappers over the operations on caches: pools of keys, of states and of index keys.
//!
//! Each gives new pools; the contents of the old ones are not defined afterwards.

use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, SparseIndexArgs, StateRows};
use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::kinds::scatter;
use mlxcel_abi::ops_args::{GatherArgs, PagedAttentionArgs};
use mlxcel_abi::{AbiError, ErrorObj, Status, Tensor};

use super::device::{Backend, DeviceTensor};
use super::error::CallError;
use super::ops::count;

/// What attention over a pool gives.
#[derive(Debug)]
pub struct Attended {
    /// `[T, H, Dv]`.
    pub result: DeviceTensor,
    /// The new keys.
    pub keys: DeviceTensor,
    /// The new values, where they have a pool of their own.
    pub values: Option<DeviceTensor>,
}

impl Backend {
    /// ABI minor that the backend was built at: what it can see of arguments.
    pub fn minor(&self) -> u32 {
        self.ops().minor
    }

    /// Number of sequences behind `row_starts`.
    fn sequences(&self, op: &'static str, row_starts: &[u32]) -> Result<u32, CallError> {
        row_starts.len().checked_sub(1).map(count).ok_or_else(|| {
            let error = AbiError::invalid("row_starts is empty, expected sequences + 1 entries");
            CallError::new(self.subject(op), error)
        })
    }

    /// Appends this step's keys and values to a pool and attends over it. `args.row_starts` and
    /// `args.n_sequences` are filled in from `row_starts`, the boundaries of the sequences' rows.
    pub fn paged_attention(
        &self,
        args: PagedAttentionArgs,
        row_starts: &[u32],
    ) -> Result<Attended, CallError> {
        let ops = self.ops();
        // SAFETY: on the backend thread; the arguments and the slice behind them outlive the call.
        let body = |args, out, err| unsafe { (ops.paged_attention)(ops.ctx, args, out, err) };
        self.attended("paged_attention", args, row_starts, body)
    }

    /// As `paged_attention`, of queries and keys that are normed and rotated first.
    pub fn rotated_paged_attention(
        &self,
        args: PagedAttentionArgs,
        rotate: &RotateArgs,
        row_starts: &[u32],
    ) -> Result<Attended, CallError> {
        let ops = self.ops();
        let rotate = RotateArgs {
            struct_size: size_of::<RotateArgs>(),
            ..*rotate
        };
        // SAFETY: as for `paged_attention`.
        let body = |args, out, err| unsafe {
            (ops.rotated_paged_attention)(ops.ctx, args, &raw const rotate, out, err)
        };
        self.attended("rotated_paged_attention", args, row_starts, body)
    }

    fn attended(
        &self,
        op: &'static str,
        args: PagedAttentionArgs,
        row_starts: &[u32],
        body: impl FnOnce(*const PagedAttentionArgs, *mut [Tensor; 3], *mut *mut ErrorObj) -> Status,
    ) -> Result<Attended, CallError> {
        let args = PagedAttentionArgs {
            struct_size: size_of::<PagedAttentionArgs>(),
            row_starts: row_starts.as_ptr(),
            n_sequences: self.sequences(op, row_starts)?,
            ..args
        };
        let mut out = [Tensor::NONE; 3];
        self.call_op(op, |err| body(&raw const args, &raw mut out, err))?;
        let [result, keys, values] = out.map(|handle| self.adopt(handle));
        match (result, keys) {
            (Some(result), Some(keys)) if values.is_some() || args.latent_dim > 0 => Ok(Attended {
                result,
                keys,
                values,
            }),
            _ => Err(self.no_result(op)),
        }
    }

    /// Convolves packed rows over a pool of states: the result `[T, C]` and the new pool. The host's
    /// boundaries are filled in from `row_starts`.
    pub fn short_conv(
        &self,
        args: ShortConvPoolArgs,
        row_starts: &[u32],
    ) -> Result<[DeviceTensor; 2], CallError> {
        const OP: &str = "short_conv";
        let args = ShortConvPoolArgs {
            struct_size: size_of::<ShortConvPoolArgs>(),
            rows: self.state_rows(OP, args.rows, row_starts)?,
            ..args
        };
        let ops = self.ops();
        // SAFETY: on the backend thread; `args` and the slice behind it outlive the call.
        self.two(OP, |out, err| unsafe {
            (ops.short_conv)(ops.ctx, &raw const args, out, err)
        })
    }

    /// Runs the gated delta rule over a pool of states: the result `[T, Hv, Dv]` and the new pool.
    pub fn gated_delta(
        &self,
        args: GatedDeltaPoolArgs,
        row_starts: &[u32],
    ) -> Result<[DeviceTensor; 2], CallError> {
        const OP: &str = "gated_delta";
        let args = GatedDeltaPoolArgs {
            struct_size: size_of::<GatedDeltaPoolArgs>(),
            rows: self.state_rows(OP, args.rows, row_starts)?,
            ..args
        };
        let ops = self.ops();
        // SAFETY: as for `short_conv`.
        self.two(OP, |out, err| unsafe {
            (ops.gated_delta)(ops.ctx, &raw const args, out, err)
        })
    }

    /// Appends index keys and chooses positions: `[T, top_k]` i32 and the new pool.
    pub fn sparse_index(
        &self,
        args: SparseIndexArgs,
        row_starts: &[u32],
    ) -> Result<[DeviceTensor; 2], CallError> {
        const OP: &str = "sparse_index";
        let args = SparseIndexArgs {
            struct_size: size_of::<SparseIndexArgs>(),
            row_starts: row_starts.as_ptr(),
            n_sequences: self.sequences(OP, row_starts)?,
            ..args
        };
        let ops = self.ops();
        // SAFETY: as for `short_conv`.
        self.two(OP, |out, err| unsafe {
            (ops.sparse_index)(ops.ctx, &raw const args, out, err)
        })
    }

    fn state_rows(
        &self,
        op: &'static str,
        rows: StateRows,
        row_starts: &[u32],
    ) -> Result<StateRows, CallError> {
        Ok(StateRows {
            struct_size: size_of::<StateRows>(),
            host_row_starts: row_starts.as_ptr(),
            n_sequences: self.sequences(op, row_starts)?,
            ..rows
        })
    }

    fn two(
        &self,
        op: &'static str,
        body: impl FnOnce(*mut [Tensor; 2], *mut *mut ErrorObj) -> Status,
    ) -> Result<[DeviceTensor; 2], CallError> {
        let mut out = [Tensor::NONE; 2];
        self.call_op(op, |err| body(&raw mut out, err))?;
        match out.map(|handle| self.adopt(handle)) {
            [Some(first), Some(second)] => Ok([first, second]),
            _ => Err(self.no_result(op)),
        }
    }

    /// Copy of `pool` `[rows, ..]` with the rows at `indices` `[n]` replaced by `updates` `[n, ..]`.
    pub fn put_rows(
        &self,
        pool: impl Into<Tensor>,
        indices: impl Into<Tensor>,
        updates: impl Into<Tensor>,
    ) -> Result<DeviceTensor, CallError> {
        const OP: &str = "scatter";
        let (pool, updates) = (pool.into(), updates.into());
        // A scatter's updates have one axis of the size 1 for the rows' own.
        let mut shape = self.info(updates)?.shape().to_vec();
        shape.insert(1.min(shape.len()), 1);
        let updates = self.reshape(updates, &shape)?;
        let (indices, axes) = ([indices.into()], [0_u32]);
        let args = GatherArgs {
            indices: indices.as_ptr(),
            axes: axes.as_ptr(),
            n_indices: 1,
            ndim: self.info(pool)?.ndim,
            ..GatherArgs::default()
        };
        let ops = self.ops();
        // SAFETY: on the backend thread; `args` and the lists behind it outlive the call.
        self.tensor_op(OP, |out, err| unsafe {
            (ops.scatter)(
                ops.ctx,
                scatter::SET,
                pool,
                updates.handle(),
                &raw const args,
                out,
                err,
            )
        })
    }
}
