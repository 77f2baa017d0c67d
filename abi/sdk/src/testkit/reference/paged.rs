//! Attention over a paged pool of keys and values, or of latent keys alone.

use std::collections::HashSet;

use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{AbiError, Result};

use super::attention::{Scoring, mix, need_heads, need_sinks};
use super::number::{need_float, need_int};
use super::shape;
use super::value::{Data, Mode, Value};

/// Tensors of [`PagedAttentionArgs`].
pub(super) struct Paged<'a> {
    pub q: &'a Value,
    /// None when nothing is appended.
    pub k: Option<&'a Value>,
    /// None when nothing is appended, or values are part of the keys.
    pub v: Option<&'a Value>,
    pub k_pool: &'a Value,
    /// None when values are part of the keys.
    pub v_pool: Option<&'a Value>,
    /// None when nothing is appended.
    pub slots: Option<&'a Value>,
    pub row_sequences: &'a Value,
    pub positions: &'a Value,
    pub page_table: &'a Value,
    pub sinks: Option<&'a Value>,
    pub selection: Option<&'a Value>,
}

struct Layout {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    width: usize,
    value_width: usize,
    pages: usize,
    page_size: usize,
    table_width: usize,
}

fn layout(args: &PagedAttentionArgs, t: &Paged<'_>) -> Result<Layout> {
    need_float("q", t.q.dtype)?;
    shape::need_ndim("q", &t.q.shape, 3)?;
    shape::need_ndim("k_pool", &t.k_pool.shape, 4)?;
    let latent_dim = args.latent_dim as usize;
    let value_width = match t.v_pool {
        Some(v_pool) if latent_dim == 0 => {
            shape::need_ndim("v_pool", &v_pool.shape, 4)?;
            v_pool.shape[3]
        }
        None if latent_dim > 0 && latent_dim <= t.k_pool.shape[3] => latent_dim,
        _ => {
            return Err(AbiError::invalid(format!(
                "values are either in a pool of their own or the first elements of keys, found latent_dim {latent_dim}"
            )));
        }
    };
    let l = Layout {
        rows: t.q.shape[0],
        heads: t.q.shape[1],
        kv_heads: t.k_pool.shape[2],
        width: t.q.shape[2],
        value_width,
        pages: t.k_pool.shape[0],
        page_size: t.k_pool.shape[1],
        table_width: t.page_table.shape.get(1).copied().unwrap_or(0),
    };
    let read_only = match args.read_only {
        0 => false,
        1 => true,
        other => {
            return Err(AbiError::invalid(format!(
                "read_only must be 0 or 1, found {other}"
            )));
        }
    };
    let appended = [
        Some(("k", t.k_pool, t.k, l.width)),
        t.v_pool.map(|pool| ("v", pool, t.v, l.value_width)),
    ];
    if t.v_pool.is_none() && t.v.is_some() {
        return Err(AbiError::invalid("there are values and no pool for them"));
    }
    for (what, pool, rows, width) in appended.into_iter().flatten() {
        need_pool(&l, what, pool, width)?;
        if rows.is_none() != read_only {
            return Err(AbiError::invalid(format!(
                "{what} is given exactly when something is appended"
            )));
        }
        if let Some(rows) = rows {
            need_float(what, rows.dtype)?;
            shape::need(what, &rows.shape, &[l.rows, l.kv_heads, width])?;
        }
    }
    need_heads(l.heads, l.kv_heads)?;
    need_sinks(t.sinks, l.heads)?;
    let per_row = [
        t.slots.map(|slots| ("slots", slots)),
        Some(("row_sequences", t.row_sequences)),
        Some(("positions", t.positions)),
    ];
    if t.slots.is_none() && !read_only {
        return Err(AbiError::invalid("slots are missing"));
    }
    for (what, value) in per_row.into_iter().flatten() {
        need_int(what, value.dtype)?;
        shape::need(what, &value.shape, &[l.rows])?;
    }
    if let Some(selection) = t.selection {
        need_int("selection", selection.dtype)?;
        shape::need_ndim("selection", &selection.shape, 2)?;
        shape::need("selection", &selection.shape[..1], &[l.rows])?;
    }
    need_int("page_table", t.page_table.dtype)?;
    shape::need(
        "page_table",
        &t.page_table.shape,
        &[args.n_sequences as usize, l.table_width],
    )?;
    Ok(l)
}

fn need_pool(l: &Layout, what: &str, pool: &Value, width: usize) -> Result<()> {
    need_float(what, pool.dtype)?;
    shape::need(
        &format!("{what}_pool"),
        &pool.shape,
        &[l.pages, l.page_size, l.kv_heads, width],
    )
}

/// Checks the host's copy of the row boundaries.
pub(super) fn check_row_starts(rows: usize, row_starts: &[u32]) -> Result<()> {
    let ordered = row_starts.windows(2).all(|pair| pair[0] <= pair[1]);
    if ordered
        && row_starts.first() == Some(&0)
        && row_starts.last().is_some_and(|&end| end as usize <= rows)
    {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "row starts {row_starts:?} do not divide {rows} rows"
    )))
}

pub(super) fn checked(what: &str, x: i128, limit: usize) -> Result<usize> {
    usize::try_from(x)
        .ok()
        .filter(|&x| x < limit)
        .ok_or_else(|| AbiError::invalid(format!("{what} {x} is not below {limit}")))
}

/// Appends to the pools, then attends: `[T, H, Dv]` and the new pools.
pub(super) fn paged_attention(
    mode: Mode,
    args: &PagedAttentionArgs,
    row_starts: &[u32],
    t: &Paged<'_>,
) -> Result<[Option<Value>; 3]> {
    let l = layout(args, t)?;
    check_row_starts(l.rows, row_starts)?;
    let appended = |pool: &Value, rows: Option<&Value>| match (rows, t.slots) {
        (Some(rows), Some(slots)) => append(mode, pool, rows, slots),
        _ => Ok(pool.clone()),
    };
    let k_pool = appended(t.k_pool, t.k)?;
    let v_pool = t.v_pool.map(|pool| appended(pool, t.v)).transpose()?;
    let out = vec![l.rows, l.heads, l.value_width];
    let total = shape::count(&out)?;
    let mixed = mode.value(t.q.dtype, out, || {
        let scoring = Scoring {
            scale: args.scale.into(),
            softcap: args.softcap.into(),
        };
        let (q, k) = (t.q.reals(), k_pool.reals());
        let v = v_pool.as_ref().map_or_else(|| k.clone(), Value::reals);
        let value_stride = v_pool.as_ref().map_or(l.width, |_| l.value_width);
        let sinks = t.sinks.map(Value::reals);
        let pages = t.page_table.ints()?;
        let mut data = vec![0.0; total];
        for row in 0..l.rows {
            let sequence = checked(
                "sequence",
                t.row_sequences.ints()?[row],
                args.n_sequences as usize,
            )?;
            let position = checked(
                "position",
                t.positions.ints()?[row],
                l.table_width * l.page_size,
            )?;
            let in_window = match args.window {
                0 => 0,
                window => (position + 1).saturating_sub(window as usize),
            };
            let in_chunk = match args.chunk {
                0 => 0,
                chunk => position - position % chunk as usize,
            };
            let first = in_window.max(in_chunk);
            let chosen: Option<HashSet<i128>> = match t.selection {
                None => None,
                Some(selection) => {
                    let n = selection.shape[1];
                    Some(selection.ints()?[row * n..][..n].iter().copied().collect())
                }
            };
            let pool_rows = (first..=position)
                .filter(|&p| chosen.as_ref().is_none_or(|set| set.contains(&(p as i128))))
                .map(|p| {
                    let page = pages[sequence * l.table_width + p / l.page_size];
                    Ok(checked("page", page, l.pages)? * l.page_size + p % l.page_size)
                })
                .collect::<Result<Vec<usize>>>()?;
            for head in 0..l.heads {
                let kv_head = head / (l.heads / l.kv_heads);
                let at = row * l.heads + head;
                let q_row = &q[at * l.width..][..l.width];
                let scores: Vec<f64> = pool_rows
                    .iter()
                    .map(|r| {
                        scoring.score(q_row, &k[(r * l.kv_heads + kv_head) * l.width..][..l.width])
                    })
                    .collect();
                let values = pool_rows
                    .iter()
                    .map(|r| &v[(r * l.kv_heads + kv_head) * value_stride..][..l.value_width]);
                let sink = sinks.as_ref().map(|sinks| sinks[head]);
                mix(
                    &scores,
                    sink,
                    values,
                    &mut data[at * l.value_width..][..l.value_width],
                );
            }
        }
        Ok(Data::Real(data))
    })?;
    Ok([Some(mixed), Some(k_pool), v_pool])
}

/// The pool `[pages, page_size, ..]` with rows written to their slots, in the pool's dtype.
pub(super) fn append(mode: Mode, pool: &Value, rows: &Value, slots: &Value) -> Result<Value> {
    mode.value(pool.dtype, pool.shape.clone(), || {
        let rows = rows.cast(mode, pool.dtype)?;
        let width: usize = pool.shape[2..].iter().product();
        let mut positions = Vec::with_capacity(rows.count());
        for &slot in slots.ints()? {
            let start = checked("slot", slot, pool.shape[0] * pool.shape[1])? * width;
            positions.extend(start..start + width);
        }
        let mut data = pool.data.clone();
        data.put(&positions, &rows.data)?;
        Ok(data)
    })
}

#[cfg(test)]
mod tests {
    use mlxcel_abi::DType;

    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    fn real(shape: &[usize], v: &[f64]) -> Value {
        Value {
            dtype: DType::F64,
            shape: shape.to_vec(),
            data: Data::Real(v.to_vec()),
        }
    }

    fn ints(shape: &[usize], v: &[i128]) -> Value {
        Value {
            dtype: DType::I32,
            shape: shape.to_vec(),
            data: Data::Int(v.to_vec()),
        }
    }

    #[test]
    fn pages_are_followed_and_appended_to() {
        // One sequence over pages 2 and 1, two elements a page; its third row is new.
        let pool = real(&[3, 2, 1, 1], &[0.0, 0.0, 9.0, 9.0, 3.0, 6.0]);
        let (q, k) = (real(&[1, 1, 1], &[0.0]), real(&[1, 1, 1], &[12.0]));
        let (slots, zero, position) = (ints(&[1], &[2]), ints(&[1], &[0]), ints(&[1], &[2]));
        let table = ints(&[1, 2], &[2, 1]);
        let t = Paged {
            q: &q,
            k: Some(&k),
            v: Some(&k),
            k_pool: &pool,
            v_pool: Some(&pool),
            slots: Some(&slots),
            row_sequences: &zero,
            positions: &position,
            page_table: &table,
            sinks: None,
            selection: None,
        };
        let mut args = PagedAttentionArgs {
            n_sequences: 1,
            ..PagedAttentionArgs::default()
        };
        let [out, k_new, _] = paged_attention(MODE, &args, &[0, 1], &t).unwrap();
        assert_eq!(*out.unwrap().reals(), [7.0]);
        assert_eq!(*k_new.unwrap().reals(), [0.0, 0.0, 12.0, 9.0, 3.0, 6.0]);
        args.window = 2;
        let [out, ..] = paged_attention(MODE, &args, &[0, 1], &t).unwrap();
        assert_eq!(*out.unwrap().reals(), [9.0]);
        let far = ints(&[1], &[4]);
        assert!(
            paged_attention(
                MODE,
                &args,
                &[0, 1],
                &Paged {
                    positions: &far,
                    ..t
                }
            )
            .is_err()
        );
        assert!(paged_attention(MODE, &args, &[0, 2], &t).is_err());
    }
}
