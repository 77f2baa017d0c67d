//! Attention over given keys and over a paged pool.

use mlxcel_abi::kinds::mask;
use mlxcel_abi::ops_args::{AttentionArgs, PagedAttentionArgs};
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{need_float, need_int};
use super::product::dot;
use super::shape;
use super::value::{Data, Mode, Value};

/// What turns the scores of one query into weights.
struct Scoring {
    scale: f64,
    softcap: f64,
}

impl Scoring {
    fn score(&self, q: &[f64], k: &[f64]) -> f64 {
        let score = self.scale * dot(q, k);
        if self.softcap > 0.0 {
            self.softcap * (score / self.softcap).tanh()
        } else {
            score
        }
    }
}

/// Softmax of `scores` (with a sink logit, which takes weight and gives nothing), then the weighted
/// sum of the values, added to `out`.
fn mix<'v>(
    scores: &[f64],
    sink: Option<f64>,
    values: impl Iterator<Item = &'v [f64]>,
    out: &mut [f64],
) {
    let top = scores
        .iter()
        .copied()
        .chain(sink)
        .fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - top).exp());
    for (weight, value) in weights.iter().zip(values) {
        // As in `dot`: indices are what unoptimised builds run fastest.
        let (share, mut i) = (weight / total, 0);
        while i < out.len() {
            out[i] += share * value[i];
            i += 1;
        }
    }
}

fn need_sinks(sinks: Option<&Value>, heads: usize) -> Result<()> {
    let Some(sinks) = sinks else {
        return Ok(());
    };
    need_float("sinks", sinks.dtype)?;
    shape::need("sinks", &sinks.shape, &[heads])
}

fn need_heads(heads: usize, kv_heads: usize) -> Result<()> {
    if kv_heads > 0 && heads.is_multiple_of(kv_heads) {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "{heads} query heads are no multiple of {kv_heads} key heads"
    )))
}

/// Tensors of [`AttentionArgs`].
pub(super) struct Dense<'a> {
    pub q: &'a Value,
    pub k: &'a Value,
    pub v: &'a Value,
    pub mask: Option<&'a Value>,
    pub sinks: Option<&'a Value>,
}

/// Dense attention: `[B, H, Tq, D]` over `[B, Hkv, Tk, D]` and `[B, Hkv, Tk, Dv]`.
pub(super) fn attention(mode: Mode, args: &AttentionArgs, t: &Dense<'_>) -> Result<Value> {
    for (what, value) in [("q", t.q), ("k", t.k), ("v", t.v)] {
        need_float(what, value.dtype)?;
        shape::need_ndim(what, &value.shape, 4)?;
    }
    let [b, h, tq, d] = [t.q.shape[0], t.q.shape[1], t.q.shape[2], t.q.shape[3]];
    let [hkv, tk, dv] = [t.k.shape[1], t.k.shape[2], t.v.shape[3]];
    shape::need("k", &t.k.shape, &[b, hkv, tk, d])?;
    shape::need("v", &t.v.shape, &[b, hkv, tk, dv])?;
    need_heads(h, hkv)?;
    need_sinks(t.sinks, h)?;
    let grid = [b, h, tq, tk];
    match (args.mask_kind, t.mask) {
        (mask::NONE | mask::CAUSAL, _) => {}
        (mask::TENSOR, Some(m)) if m.dtype == DType::BOOL || m.dtype.is_float() => {
            if m.shape.len() > 4
                || shape::broadcast(&[&m.shape, &grid]).ok().as_deref() != Some(&grid[..])
            {
                return Err(AbiError::invalid(format!(
                    "a mask of shape {:?} does not fit {grid:?}",
                    m.shape
                )));
            }
        }
        (mask::TENSOR, Some(m)) => {
            return Err(AbiError::invalid(format!(
                "a mask must be bool or a float, found {}",
                m.dtype.name()
            )));
        }
        (mask::TENSOR, None) => return Err(AbiError::invalid("the mask is missing")),
        (kind, _) => {
            return Err(AbiError::unimplemented(format!(
                "mask kind {kind} is not known to this backend"
            )));
        }
    }
    let out = vec![b, h, tq, dv];
    let total = shape::count(&out)?;
    mode.value(t.q.dtype, out, || {
        let scoring = Scoring {
            scale: args.scale.into(),
            softcap: args.softcap.into(),
        };
        let (q, k, v) = (t.q.reals(), t.k.reals(), t.v.reals());
        let bias = additive_mask(args, t, &grid);
        let sinks = t.sinks.map(Value::reals);
        let mut data = vec![0.0; total];
        for row in 0..b * h * tq {
            let (head, query) = (row / tq % h, row % tq);
            let kv = row / tq / h * hkv + head / (h / hkv);
            let q_row = &q[row * d..(row + 1) * d];
            let scores: Vec<f64> = (0..tk)
                .map(|key| {
                    let k_row = &k[(kv * tk + key) * d..][..d];
                    let bias = match &bias {
                        Some(bias) => bias[row * tk + key],
                        None if args.mask_kind == mask::CAUSAL => {
                            causal_bias(args.window, query, key, tq, tk)
                        }
                        None => 0.0,
                    };
                    scoring.score(q_row, k_row) + bias
                })
                .collect();
            let values = (0..tk).map(|key| &v[(kv * tk + key) * dv..][..dv]);
            mix(
                &scores,
                sinks.as_ref().map(|sinks| sinks[head]),
                values,
                &mut data[row * dv..(row + 1) * dv],
            );
        }
        Ok(Data::Real(data))
    })
}

/// The mask tensor as numbers to add, one per query and key.
fn additive_mask(args: &AttentionArgs, t: &Dense<'_>, grid: &[usize; 4]) -> Option<Vec<f64>> {
    let mask = t.mask.filter(|_| args.mask_kind == mask::TENSOR)?;
    let values = mask.reals();
    let bias = |x: f64| match (mask.dtype, x) {
        (DType::BOOL, 0.0) => f64::NEG_INFINITY,
        (DType::BOOL, _) => 0.0,
        (_, x) => x,
    };
    Some(
        shape::broadcast_positions(&mask.shape, grid)
            .into_iter()
            .map(|i| bias(values[i]))
            .collect(),
    )
}

/// Last query on the last key; a window counts the query's own key.
fn causal_bias(window: u32, query: usize, key: usize, tq: usize, tk: usize) -> f64 {
    let position = query as i64 + tk as i64 - tq as i64;
    let behind = position - key as i64;
    let visible = behind >= 0 && (window == 0 || behind < i64::from(window));
    if visible { 0.0 } else { f64::NEG_INFINITY }
}

/// Tensors of [`PagedAttentionArgs`].
pub(super) struct Paged<'a> {
    pub q: &'a Value,
    pub k: &'a Value,
    pub v: &'a Value,
    pub k_pool: &'a Value,
    pub v_pool: &'a Value,
    pub slots: &'a Value,
    pub row_sequences: &'a Value,
    pub positions: &'a Value,
    pub page_table: &'a Value,
    pub sinks: Option<&'a Value>,
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
    for (what, value, ndim) in [
        ("q", t.q, 3),
        ("k", t.k, 3),
        ("v", t.v, 3),
        ("k_pool", t.k_pool, 4),
        ("v_pool", t.v_pool, 4),
    ] {
        need_float(what, value.dtype)?;
        shape::need_ndim(what, &value.shape, ndim)?;
    }
    let l = Layout {
        rows: t.q.shape[0],
        heads: t.q.shape[1],
        kv_heads: t.k.shape[1],
        width: t.q.shape[2],
        value_width: t.v.shape[2],
        pages: t.k_pool.shape[0],
        page_size: t.k_pool.shape[1],
        table_width: t.page_table.shape.get(1).copied().unwrap_or(0),
    };
    shape::need("k", &t.k.shape, &[l.rows, l.kv_heads, l.width])?;
    shape::need("v", &t.v.shape, &[l.rows, l.kv_heads, l.value_width])?;
    shape::need(
        "k_pool",
        &t.k_pool.shape,
        &[l.pages, l.page_size, l.kv_heads, l.width],
    )?;
    shape::need(
        "v_pool",
        &t.v_pool.shape,
        &[l.pages, l.page_size, l.kv_heads, l.value_width],
    )?;
    need_heads(l.heads, l.kv_heads)?;
    need_sinks(t.sinks, l.heads)?;
    for (what, value) in [
        ("slots", t.slots),
        ("row_sequences", t.row_sequences),
        ("positions", t.positions),
    ] {
        need_int(what, value.dtype)?;
        shape::need(what, &value.shape, &[l.rows])?;
    }
    need_int("page_table", t.page_table.dtype)?;
    shape::need(
        "page_table",
        &t.page_table.shape,
        &[args.n_sequences as usize, l.table_width],
    )?;
    Ok(l)
}

/// Checks the host's copy of the row boundaries.
fn check_row_starts(rows: usize, row_starts: &[u32]) -> Result<()> {
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

fn checked(what: &str, x: i128, limit: usize) -> Result<usize> {
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
) -> Result<[Value; 3]> {
    let l = layout(args, t)?;
    check_row_starts(l.rows, row_starts)?;
    let k_pool = append(mode, t.k_pool, t.k, t.slots, &l)?;
    let v_pool = append(mode, t.v_pool, t.v, t.slots, &l)?;
    let out = vec![l.rows, l.heads, l.value_width];
    let total = shape::count(&out)?;
    let mixed = mode.value(t.q.dtype, out, || {
        let scoring = Scoring {
            scale: args.scale.into(),
            softcap: args.softcap.into(),
        };
        let (q, k, v) = (t.q.reals(), k_pool.reals(), v_pool.reals());
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
            let pool_rows = (first..=position)
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
                    .map(|r| &v[(r * l.kv_heads + kv_head) * l.value_width..][..l.value_width]);
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
    Ok([mixed, k_pool, v_pool])
}

/// The pool with this step's rows written to their slots, in the pool's dtype.
fn append(mode: Mode, pool: &Value, rows: &Value, slots: &Value, l: &Layout) -> Result<Value> {
    mode.value(pool.dtype, pool.shape.clone(), || {
        let rows = rows.cast(mode, pool.dtype)?;
        let width: usize = pool.shape[2..].iter().product();
        let mut positions = Vec::with_capacity(rows.count());
        for &slot in slots.ints()? {
            let start = checked("slot", slot, l.pages * l.page_size)? * width;
            positions.extend(start..start + width);
        }
        let mut data = pool.data.clone();
        data.put(&positions, &rows.data)?;
        Ok(data)
    })
}

#[cfg(test)]
mod tests {
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
    fn a_query_without_scores_averages_what_it_sees() {
        let q = real(&[1, 1, 2, 1], &[0.0, 0.0]);
        let k = real(&[1, 1, 3, 1], &[1.0, 2.0, 3.0]);
        let v = real(&[1, 1, 3, 1], &[3.0, 6.0, 12.0]);
        let t = Dense {
            q: &q,
            k: &k,
            v: &v,
            mask: None,
            sinks: None,
        };
        let mut args = AttentionArgs {
            mask_kind: mask::CAUSAL,
            ..AttentionArgs::default()
        };
        assert_eq!(*attention(MODE, &args, &t).unwrap().reals(), [4.5, 7.0]);
        args.window = 1;
        assert_eq!(*attention(MODE, &args, &t).unwrap().reals(), [6.0, 12.0]);
        let sinks = real(&[1], &[0.0]);
        let t = Dense {
            sinks: Some(&sinks),
            ..t
        };
        assert_eq!(*attention(MODE, &args, &t).unwrap().reals(), [3.0, 6.0]);
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
            k: &k,
            v: &k,
            k_pool: &pool,
            v_pool: &pool,
            slots: &slots,
            row_sequences: &zero,
            positions: &position,
            page_table: &table,
            sinks: None,
        };
        let mut args = PagedAttentionArgs {
            n_sequences: 1,
            ..PagedAttentionArgs::default()
        };
        let [out, k_new, _] = paged_attention(MODE, &args, &[0, 1], &t).unwrap();
        assert_eq!(*out.reals(), [7.0]);
        assert_eq!(*k_new.reals(), [0.0, 0.0, 12.0, 9.0, 3.0, 6.0]);
        args.window = 2;
        let [out, ..] = paged_attention(MODE, &args, &[0, 1], &t).unwrap();
        assert_eq!(*out.reals(), [9.0]);
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
