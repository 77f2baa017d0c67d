//! Slots over recurrent states and index keys.

use std::sync::Arc;

use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, SparseIndexArgs, StateRows};
use mlxcel_abi::{Result, Tensor};

use super::edge::{list, slots};
use super::inner::Inner;
use super::recurrent::{self, Conv, Delta, Rows};
use super::selection::{self, Keys};
use super::value::Value;

/// Tensors of [`StateRows`].
struct RowParts {
    sources: Arc<Value>,
    targets: Arc<Value>,
    row_sequences: Arc<Value>,
    row_starts: Arc<Value>,
}

impl RowParts {
    fn find(inner: &Inner, rows: &StateRows) -> Result<Self> {
        Ok(Self {
            sources: inner.get(rows.sources)?,
            targets: inner.get(rows.targets)?,
            row_sequences: inner.get(rows.row_sequences)?,
            row_starts: inner.get(rows.row_starts)?,
        })
    }

    fn rows<'a>(&'a self, host: &'a [u32]) -> Rows<'a> {
        Rows {
            sources: &self.sources,
            targets: &self.targets,
            row_sequences: &self.row_sequences,
            row_starts: &self.row_starts,
            host,
        }
    }
}

slots! {
    fn short_conv(inner, args: *const ShortConvPoolArgs, out: *mut [Tensor; 2]) {
        let args = ShortConvPoolArgs::read(args)?;
        let host = list("row_starts", args.rows.host_row_starts, args.rows.n_sequences as usize + 1)?;
        let parts = RowParts::find(inner, &args.rows)?;
        let (x, weight, bias) = (inner.get(args.x)?, inner.get(args.weight)?, inner.get_optional(args.bias)?);
        let pool = inner.get(args.pool)?;
        let conv = Conv { x: &x, weight: &weight, bias: bias.as_deref(), pool: &pool, activation: args.activation };
        let results = recurrent::short_conv(inner.mode, &conv, &parts.rows(host))?;
        inner.give_all(out, results.map(Some))
    }

    fn gated_delta(inner, args: *const GatedDeltaPoolArgs, out: *mut [Tensor; 2]) {
        let args = GatedDeltaPoolArgs::read(args)?;
        let host = list("row_starts", args.rows.host_row_starts, args.rows.n_sequences as usize + 1)?;
        let parts = RowParts::find(inner, &args.rows)?;
        let (q, k, v) = (inner.get(args.q)?, inner.get(args.k)?, inner.get(args.v)?);
        let (g, beta, pool) = (inner.get(args.g)?, inner.get(args.beta)?, inner.get(args.pool)?);
        let delta = Delta { q: &q, k: &k, v: &v, g: &g, beta: &beta, pool: &pool };
        let results = recurrent::gated_delta(inner.mode, &delta, &parts.rows(host))?;
        inner.give_all(out, results.map(Some))
    }

    fn sparse_index(inner, args: *const SparseIndexArgs, out: *mut [Tensor; 2]) {
        let args = SparseIndexArgs::read(args)?;
        let host = list("row_starts", args.row_starts, args.n_sequences as usize + 1)?;
        let (q, k, weights) = (inner.get(args.q)?, inner.get(args.k)?, inner.get(args.weights)?);
        let (pool, slots) = (inner.get(args.pool)?, inner.get(args.slots)?);
        let (row_sequences, positions) = (inner.get(args.row_sequences)?, inner.get(args.positions)?);
        let page_table = inner.get(args.page_table)?;
        let keys = Keys {
            q: &q,
            k: &k,
            weights: &weights,
            pool: &pool,
            slots: &slots,
            row_sequences: &row_sequences,
            positions: &positions,
            page_table: &page_table,
            host,
        };
        let results = selection::sparse_index(inner.mode, &args, &keys)?;
        inner.give_all(out, results.map(Some))
    }
}
