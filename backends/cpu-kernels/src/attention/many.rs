//! Many rows: blocks of queries meet blocks of keys through the register tile of `gemm`, with the
//! running softmax of FlashAttention (Dao et al. 2022), so that scores never leave the cache.

use super::cells::Stored;
use super::{Paged, Scratch, capped, exponentials};
use crate::Isa;
use crate::gemm::{self, Tile};
use crate::isa::dispatch;
use crate::simd::Simd;

/// Query rows of a block.
pub(super) const BLOCK_ROWS: usize = 16;
/// Keys of a block: the widest panel.
const BLOCK_KEYS: usize = 32;

/// Converts a stored row of `n` elements to f32.
#[inline(always)]
unsafe fn widen<S: Simd, C: Stored>(from: *const C, n: usize, to: *mut f32) {
    // SAFETY: the caller vouches for the row and for n elements behind `to`.
    unsafe {
        for i in (0..n).step_by(S::LANES) {
            let x = C::load::<S>(from, i, n);
            x.store_first(to.add(i), (n - i).min(S::LANES));
        }
    }
}

/// Rows of a sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) sequence: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) kv_head: usize,
}

/// A block of rows with all query heads of a key-value head: `rows * group` queries.
///
/// # Safety
/// The CPU has `isa`, `p` is valid, `C` its storage, `out` is `[T, heads, v_dim]` and these rows and heads are written
/// by nobody else.
pub(super) unsafe fn block<C: Stored>(
    isa: Isa,
    p: &Paged<'_>,
    (pool_keys, pool_values): (*const C, *const C),
    task: Block,
    out: *mut f32,
    s: &mut Scratch,
) {
    let group = p.group();
    let queries = task.rows * group;
    let positions = &p.positions[task.first_row..task.first_row + task.rows];
    let lowest = positions.iter().min().map_or(0, |x| *x as usize);
    let highest = positions.iter().max().map_or(0, |x| *x as usize);
    let width = gemm::panel_width(isa);
    s.queries.resize(queries * p.k_dim, 0.0);
    s.scores.resize(queries * BLOCK_KEYS, 0.0);
    s.keys.resize(p.k_dim * BLOCK_KEYS, 0.0);
    s.values.resize(BLOCK_KEYS * p.v_dim.max(p.k_dim), 0.0);
    s.accumulated.clear();
    s.accumulated.resize(queries * p.v_dim, 0.0);
    s.best.clear();
    s.total.clear();
    for _ in 0..task.rows {
        for g in 0..group {
            let sink = p.sinks.get(task.kv_head * group + g);
            s.best.push(sink.copied().unwrap_or(f32::NEG_INFINITY));
            s.total.push(if sink.is_some() { 1.0 } else { 0.0 });
        }
    }
    for row in 0..task.rows {
        let from = ((task.first_row + row) * p.heads + task.kv_head * group) * p.k_dim;
        let part = &p.q[from..from + group * p.k_dim];
        s.queries[row * group * p.k_dim..][..group * p.k_dim].copy_from_slice(part);
    }
    let mut key = p.first_key(lowest) / p.page_size * p.page_size;
    while key <= highest {
        // A block ends with its page, so that its values are rows of one stride.
        let in_page = p.page_size - key % p.page_size;
        let n = BLOCK_KEYS.min(in_page).min(highest + 1 - key);
        let pool_row = p.pool_row(task.sequence, key);
        for j in 0..n {
            let k = ((pool_row + j) * p.kv_heads + task.kv_head) * C::FORMAT.row_len(p.k_dim);
            // SAFETY: the key is inside the pool; `values` has room for all of them.
            unsafe {
                let to = s.values.as_mut_ptr().add(j * p.k_dim);
                run_widen::<C>(isa, pool_keys.add(k), p.k_dim, to);
            }
        }
        // Sixteen elements at a time, so that the lines being written stay in the first-level cache.
        for d0 in (0..p.k_dim).step_by(16) {
            let d1 = (d0 + 16).min(p.k_dim);
            for (j, key) in s.values[..n * p.k_dim].chunks_exact(p.k_dim).enumerate() {
                for (d, x) in (d0..d1).zip(&key[d0..d1]) {
                    s.keys[d * BLOCK_KEYS + j] = *x;
                }
            }
        }
        for j in 0..n {
            let v = ((pool_row + j) * p.kv_heads + task.kv_head) * C::FORMAT.row_len(p.v_dim);
            // SAFETY: as above.
            unsafe {
                let to = s.values.as_mut_ptr().add(j * p.v_dim);
                run_widen::<C>(isa, pool_values.add(v), p.v_dim, to);
            }
        }
        // SAFETY: scratch has the sizes set above; `Paged::is_valid` holds for the pool.
        unsafe {
            for at in (0..n).step_by(width) {
                let tile = Tile {
                    a: s.queries.as_ptr(),
                    lda: p.k_dim,
                    b: s.keys.as_ptr().add(at),
                    ldb: BLOCK_KEYS,
                    k: p.k_dim,
                    c: s.scores.as_mut_ptr().add(at),
                    ldc: BLOCK_KEYS,
                    n: width.min(n - at),
                    accumulate: false,
                };
                gemm::strip(isa, tile, queries);
            }
            for query in 0..queries {
                let position = positions[query / group] as usize;
                run_soften(isa, p, s, query, (position, key, n));
            }
            for at in (0..p.v_dim).step_by(width) {
                let tile = Tile {
                    a: s.scores.as_ptr(),
                    lda: BLOCK_KEYS,
                    b: s.values.as_ptr().add(at),
                    ldb: p.v_dim,
                    k: n,
                    c: s.accumulated.as_mut_ptr().add(at),
                    ldc: p.v_dim,
                    n: width.min(p.v_dim - at),
                    accumulate: true,
                };
                gemm::strip(isa, tile, queries);
            }
        }
        key += n;
    }
    for query in 0..queries {
        let row = task.first_row + query / group;
        let to = (row * p.heads + task.kv_head * group + query % group) * p.v_dim;
        let scale = s.total[query].recip();
        for (i, x) in s.accumulated[query * p.v_dim..(query + 1) * p.v_dim]
            .iter()
            .enumerate()
        {
            // SAFETY: `to + i` is inside `[T, heads, v_dim]`; no other task has this row and head.
            unsafe { *out.add(to + i) = x * scale };
        }
    }
}

/// Scales, caps and masks a query's scores of one block and updates its running softmax.
#[inline(always)]
unsafe fn soften<S: Simd>(
    p: &Paged<'_>,
    s: &mut Scratch,
    query: usize,
    (position, key, n): (usize, usize, usize),
) {
    let scores = &mut s.scores[query * BLOCK_KEYS..query * BLOCK_KEYS + n];
    let first = p.first_key(position).saturating_sub(key).min(n);
    let last = (position + 1).saturating_sub(key).min(n);
    if first >= last {
        scores.fill(0.0);
        return;
    }
    let seen = &mut scores[first..last];
    seen.iter_mut().for_each(|x| *x *= p.scale);
    if p.softcap > 0.0 {
        seen.iter_mut().for_each(|x| *x = capped(*x, p.softcap));
    }
    let best = seen.iter().copied().fold(s.best[query], f32::max);
    // SAFETY: the slice is live.
    let sum = unsafe { exponentials::<S>(seen.as_mut_ptr(), seen.len(), best) };
    scores[..first].fill(0.0);
    scores[last..].fill(0.0);
    let old = s.best[query];
    if best > old {
        let shrink = if old == f32::NEG_INFINITY {
            0.0
        } else {
            (old - best).exp()
        };
        s.total[query] *= shrink;
        let accumulated = &mut s.accumulated[query * p.v_dim..(query + 1) * p.v_dim];
        accumulated.iter_mut().for_each(|x| *x *= shrink);
        s.best[query] = best;
    }
    s.total[query] += sum;
}

dispatch! {
    unsafe fn run_soften(p: &Paged<'_>, s: &mut Scratch, query: usize, at: (usize, usize, usize)) = soften
}
dispatch! {
    unsafe fn run_widen[C: Stored][C](from: *const C, n: usize, to: *mut f32) = widen
}
