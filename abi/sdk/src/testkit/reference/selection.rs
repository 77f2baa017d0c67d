//! Choice of keys by an index.

use mlxcel_abi::cache_args::SparseIndexArgs;
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{need_float, need_int};
use super::paged::{append, check_row_starts, checked};
use super::product::dot;
use super::shape;
use super::value::{Data, Mode, Value};

/// Tensors of [`SparseIndexArgs`].
pub(super) struct Keys<'a> {
    pub q: &'a Value,
    pub k: &'a Value,
    pub weights: &'a Value,
    pub pool: &'a Value,
    pub slots: &'a Value,
    pub row_sequences: &'a Value,
    pub positions: &'a Value,
    pub page_table: &'a Value,
    /// The host's copy of the row boundaries.
    pub host: &'a [u32],
}

/// Positions `[T, top_k]`, the best first, and the new pool.
pub(super) fn sparse_index(mode: Mode, args: &SparseIndexArgs, t: &Keys<'_>) -> Result<[Value; 2]> {
    for (what, value, ndim) in [
        ("q", t.q, 3),
        ("k", t.k, 2),
        ("weights", t.weights, 2),
        ("pool", t.pool, 3),
    ] {
        need_float(what, value.dtype)?;
        shape::need_ndim(what, &value.shape, ndim)?;
    }
    let [n_rows, heads, width] = [t.q.shape[0], t.q.shape[1], t.q.shape[2]];
    let [pages, page_size] = [t.pool.shape[0], t.pool.shape[1]];
    shape::need("k", &t.k.shape, &[n_rows, width])?;
    shape::need("weights", &t.weights.shape, &[n_rows, heads])?;
    shape::need("pool", &t.pool.shape, &[pages, page_size, width])?;
    for (what, value) in [
        ("slots", t.slots),
        ("row_sequences", t.row_sequences),
        ("positions", t.positions),
    ] {
        need_int(what, value.dtype)?;
        shape::need(what, &value.shape, &[n_rows])?;
    }
    let table_width = t.page_table.shape.get(1).copied().unwrap_or(0);
    let n_sequences = args.n_sequences as usize;
    need_int("page_table", t.page_table.dtype)?;
    shape::need(
        "page_table",
        &t.page_table.shape,
        &[n_sequences, table_width],
    )?;
    check_row_starts(n_rows, t.host)?;
    let top_k = args.top_k as usize;
    if top_k == 0 || args.scale.is_nan() || args.scale <= 0.0 {
        return Err(AbiError::invalid(format!(
            "top_k is at least 1 and the scale above 0, found {top_k} and {}",
            args.scale
        )));
    }
    let pool = append(mode, t.pool, t.k, t.slots)?;
    let chosen = mode.value(DType::I32, vec![n_rows, top_k], || {
        let (q, weights, keys) = (t.q.reals(), t.weights.reals(), pool.reals());
        let table = t.page_table.ints()?;
        let mut out = Vec::with_capacity(n_rows * top_k);
        for row in 0..n_rows {
            let sequence = checked("sequence", t.row_sequences.ints()?[row], n_sequences)?;
            let last = checked(
                "position",
                t.positions.ints()?[row],
                table_width * page_size,
            )?;
            let mut scored = Vec::with_capacity(last + 1);
            for p in 0..=last {
                let page = checked("page", table[sequence * table_width + p / page_size], pages)?;
                let key = &keys[(page * page_size + p % page_size) * width..][..width];
                let score: f64 = (0..heads)
                    .map(|head| {
                        let at = row * heads + head;
                        let query = &q[at * width..][..width];
                        weights[at] * (f64::from(args.scale) * dot(query, key)).max(0.0)
                    })
                    .sum();
                scored.push((score, p));
            }
            scored.sort_by(|a, b| b.0.total_cmp(&a.0));
            let best = scored.iter().map(|&(_, p)| p as i128);
            out.extend(best.chain(core::iter::repeat(-1)).take(top_k));
        }
        Ok(Data::Int(out))
    })?;
    Ok([chosen, pool])
}
