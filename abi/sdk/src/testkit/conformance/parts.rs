//! Sequences whose rows come into several calls, beside others: attention over pages, and states.

use core::ops::Range;

use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, StateRows};
use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::kinds::unary;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, Tensor as Handle};

use super::apart::{ROWS, bits, rows_of};
use super::array::Array;
use super::suite::Suite;
use crate::{Backend, Result, Tensor};

/// How a sequence comes into its calls: rows of each, and rows of another sequence before them.
const WAYS: [(usize, i64); 6] = [(1, 0), (1, 1), (3, 0), (5, 7), (16, 1), (ROWS, 40)];

/// The results of a sequence that goes by `step` in one call, and in others.
fn same_in_parts(
    suite: &mut Suite<'_>,
    slot: &'static str,
    case: String,
    run: impl Fn(&Backend, usize, i64) -> Result<Vec<u64>>,
) {
    suite.holds_or_is_refused(slot, case, |b| {
        let whole = match run(b, ROWS, 0) {
            Err(error) if error.is_unimplemented() => return Ok(false),
            other => other.map_err(|error| error.to_string())?,
        };
        for (cut, beside) in WAYS {
            let how = format!("{cut} rows a call beside {beside} others");
            let parts = run(b, cut, beside).map_err(|error| format!("{how}: {error}"))?;
            let each = whole.len() / ROWS;
            if let Some(at) = (0..whole.len()).find(|&i| parts.get(i) != whole.get(i)) {
                return Err(format!(
                    "element {} of row {} is {:e} with {how}, and {:e} in one call",
                    at % each,
                    at / each,
                    f64::from_bits(parts[at]),
                    f64::from_bits(whole[at]),
                ));
            }
        }
        Ok(true)
    });
}

pub(super) fn sequences(suite: &mut Suite<'_>, dtype: DType, width: i64, window: u32, turns: bool) {
    const PAGE: i64 = 16;
    let (heads, kv_heads, all) = (4, 2, ROWS as i64);
    let pages = all / PAGE + 1;
    let (q, k, v) = (
        Array::usual(dtype, &[all, heads, width], 60),
        Array::usual(dtype, &[all, kv_heads, width], 61),
        Array::usual(dtype, &[all, kv_heads, width], 62),
    );
    let run = |b: &Backend, cut: usize, beside: i64| -> Result<Vec<u64>> {
        // Pages of the other sequence come first, ours in no order.
        let pool = Array::usual(dtype, &[2 * pages + 1, PAGE, kv_heads, width], 63);
        let (mut keys, mut values) = (pool.on(b)?, pool.on(b)?);
        let own =
            |position: i64| (pages + 1 + (position / PAGE * 3) % pages) * PAGE + position % PAGE;
        let mut found = Vec::new();
        for first in (0..ROWS).step_by(cut) {
            let rows = first..(first + cut).min(ROWS);
            let others = 0..beside as usize;
            let both = |array: &Array| -> Result<Tensor> {
                let ours = rows_of(array, rows.clone()).on(b)?;
                match beside {
                    0 => Ok(ours),
                    _ => Tensor::concat(b, &[&rows_of(array, others.clone()).on(b)?, &ours], 0),
                }
            };
            let list = |other: &dyn Fn(i64) -> i64, ours: &dyn Fn(i64) -> i64| {
                let numbers: Vec<i128> = (0..beside)
                    .map(|i| i128::from(other(i)))
                    .chain(rows.clone().map(|i| i128::from(ours(i as i64))))
                    .collect();
                Array::ints(DType::I32, &[numbers.len() as i64], &numbers).on(b)
            };
            let ours = i64::from(beside > 0);
            let (slots, positions) = (list(&|i| PAGE + i, &own)?, list(&|i| i, &|i| i)?);
            let row_sequences = list(&|_| 0, &|_| ours)?;
            let used = (rows.end as i64 - 1) / PAGE + 1;
            let table_width = used.max(beside / PAGE + 1);
            let entries = |page: &dyn Fn(i64) -> i64, used: i64| -> Vec<i128> {
                (0..table_width)
                    .map(|i| i128::from(if i < used { page(i) } else { 0 }))
                    .collect()
            };
            let mut table = Vec::new();
            let mut starts = vec![0_u32];
            if beside > 0 {
                table.extend(entries(&|i| 1 + i, beside / PAGE + 1));
                starts.push(beside as u32);
            }
            table.extend(entries(&|i| own(i * PAGE) / PAGE, used));
            starts.push(beside as u32 + rows.len() as u32);
            let page_table =
                Array::ints(DType::I32, &[starts.len() as i64 - 1, table_width], &table).on(b)?;
            let (q, k, v) = (both(&q)?, both(&k)?, both(&v)?);
            let args = PagedAttentionArgs {
                q: q.handle(),
                k: k.handle(),
                v: v.handle(),
                k_pool: keys.handle(),
                v_pool: values.handle(),
                slots: slots.handle(),
                row_sequences: row_sequences.handle(),
                positions: positions.handle(),
                page_table: page_table.handle(),
                row_starts: starts.as_ptr(),
                n_sequences: starts.len() as u32 - 1,
                window,
                scale: 0.2,
                ..PagedAttentionArgs::default()
            };
            let rotate = RotateArgs {
                normed: 1,
                eps: 1e-5,
                dims: width as u32,
                base: 500.0,
                scale: 1.0,
                ..RotateArgs::default()
            };
            let mut out = [Handle::NONE; 3];
            match turns {
                true => command!(b.table(), rotated_paged_attention, &args, &rotate, &mut out)?,
                false => command!(b.table(), paged_attention, &args, &mut out)?,
            }
            let [mixed, k_pool, v_pool] = out.map(|t| Tensor::from_handle(b, t));
            (keys, values) = (k_pool, v_pool);
            let mixed = mixed.narrow(0, beside, rows.len() as i64)?;
            found.extend(bits(&[mixed])?.into_iter().flatten());
        }
        Ok(found)
    };
    let slot = if turns {
        "rotated_paged_attention"
    } else {
        "paged_attention"
    };
    let case = format!("{} width {width} window {window}", dtype.name());
    same_in_parts(suite, slot, case, run);
}

/// Slots of two sequences, ours in slot 2.
fn with_states(
    b: &Backend,
    rows: i64,
    beside: i64,
    first: bool,
    slot: impl FnOnce(StateRows, &mut [Handle; 2]) -> Result<()>,
) -> Result<[Tensor; 2]> {
    let ints = |numbers: &[i128]| Array::ints(DType::I32, &[numbers.len() as i64], numbers).on(b);
    let source = if first { -1 } else { 2 };
    let (sources, targets, starts) = match beside {
        0 => (vec![source], vec![2], vec![0, rows]),
        _ => (vec![-1, source], vec![1, 2], vec![0, beside, beside + rows]),
    };
    let owners: Vec<i128> = (0..beside + rows)
        .map(|row| i128::from(beside > 0 && row >= beside))
        .collect();
    let (sources, targets) = (ints(&sources)?, ints(&targets)?);
    let wide: Vec<i128> = starts.iter().map(|&start| i128::from(start)).collect();
    let (row_sequences, row_starts) = (ints(&owners)?, ints(&wide)?);
    let host: Vec<u32> = starts.iter().map(|&start| start as u32).collect();
    let state_rows = StateRows {
        sources: sources.handle(),
        targets: targets.handle(),
        row_sequences: row_sequences.handle(),
        row_starts: row_starts.handle(),
        host_row_starts: host.as_ptr(),
        n_sequences: host.len() as u32 - 1,
        ..StateRows::default()
    };
    let mut out = [Handle::NONE; 2];
    slot(state_rows, &mut out)?;
    Ok(out.map(|t| Tensor::from_handle(b, t)))
}

pub(super) fn states(suite: &mut Suite<'_>) {
    let dtype = DType::F32;
    let all = ROWS as i64;
    let both = |b: &Backend, array: &Array, rows: &Range<usize>, beside: i64| -> Result<Tensor> {
        let ours = rows_of(array, rows.clone()).on(b)?;
        match beside {
            0 => Ok(ours),
            _ => Tensor::concat(b, &[&rows_of(array, 0..beside as usize).on(b)?, &ours], 0),
        }
    };
    let (taps, width) = (4, 24);
    let x = Array::usual(dtype, &[all, width], 70);
    let weight = Array::usual(dtype, &[width, taps], 71);
    let conv = |b: &Backend, cut: usize, beside: i64| -> Result<Vec<u64>> {
        let mut pool = Tensor::zeros(b, DType::F32, &[3, taps - 1, width])?.contiguous()?;
        let weight = weight.on(b)?;
        let mut found = Vec::new();
        for first in (0..ROWS).step_by(cut) {
            let rows = first..(first + cut).min(ROWS);
            let x = both(b, &x, &rows, beside)?;
            let [y, after] =
                with_states(b, rows.len() as i64, beside, first == 0, |states, out| {
                    let args = ShortConvPoolArgs {
                        x: x.handle(),
                        weight: weight.handle(),
                        pool: pool.handle(),
                        rows: states,
                        activation: unary::SILU,
                        ..ShortConvPoolArgs::default()
                    };
                    command!(b.table(), short_conv, &args, out)
                })?;
            pool = after;
            found.extend(
                bits(&[y.narrow(0, beside, rows.len() as i64)?])?
                    .into_iter()
                    .flatten(),
            );
        }
        Ok(found)
    };
    same_in_parts(suite, "short_conv", "f32".to_owned(), conv);
    let (key_heads, heads, key_dim, dim) = (2, 4, 16, 24);
    let inputs = [
        Array::spread(dtype, &[all, key_heads, key_dim], -0.3, 0.3, 72),
        Array::spread(dtype, &[all, key_heads, key_dim], -0.3, 0.3, 73),
        Array::usual(dtype, &[all, heads, dim], 74),
        Array::spread(dtype, &[all, heads], -0.5, 0.0, 75),
        Array::spread(dtype, &[all, heads], 0.1, 0.9, 76),
    ];
    let delta = |b: &Backend, cut: usize, beside: i64| -> Result<Vec<u64>> {
        let mut pool = Tensor::zeros(b, DType::F32, &[3, heads, key_dim, dim])?.contiguous()?;
        let mut found = Vec::new();
        for first in (0..ROWS).step_by(cut) {
            let rows = first..(first + cut).min(ROWS);
            let given: Vec<Tensor> = inputs
                .iter()
                .map(|array| both(b, array, &rows, beside))
                .collect::<Result<_>>()?;
            let [y, after] =
                with_states(b, rows.len() as i64, beside, first == 0, |states, out| {
                    let args = GatedDeltaPoolArgs {
                        q: given[0].handle(),
                        k: given[1].handle(),
                        v: given[2].handle(),
                        g: given[3].handle(),
                        beta: given[4].handle(),
                        pool: pool.handle(),
                        rows: states,
                        ..GatedDeltaPoolArgs::default()
                    };
                    command!(b.table(), gated_delta, &args, out)
                })?;
            pool = after;
            found.extend(
                bits(&[y.narrow(0, beside, rows.len() as i64)?])?
                    .into_iter()
                    .flatten(),
            );
        }
        Ok(found)
    };
    same_in_parts(suite, "gated_delta", "f32".to_owned(), delta);
}

#[cfg(test)]
mod tests {
    use super::super::report::Expectations;
    use super::super::{Depth, Group, run};
    use crate::testkit::{ReferenceOptions, reference_backend};

    #[test]
    fn states_of_the_reference_do_not_depend_on_where_calls_end() {
        let reference = reference_backend(ReferenceOptions::default());
        let group = Group {
            name: "rows",
            run: super::states,
        };
        let report = run("reference", &reference.backend(), &[group], Depth::Values);
        report.verdict(&Expectations::none()).unwrap();
        assert_eq!(report.outcomes.len(), 2);
    }
}
