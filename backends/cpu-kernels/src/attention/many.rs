//! Many rows: blocks of queries meet blocks of keys through the register tile of `gemm`, with the
//! running softmax of FlashAttention (Dao et al. 2022), so that scores never leave the cache.

use super::cells::Stored;
use super::{Paged, Scratch, capped, exponentials};
use crate::Isa;
use crate::gemm::{self, Tile};
use crate::isa::dispatch;
use crate::simd::Simd;

/// Query rows of a block, all of which share what is laid out of keys and values, for groups of query heads.
pub(super) fn block_rows(group: usize) -> usize {
    if group > 4 { 16 } else { 32 }
}

/// Keys of a block. Blocks begin at multiples of it, so that a row's sums do not depend on the rows beside it.
const BLOCK_KEYS: usize = 64;

/// Converts stored rows of `n` elements, `stride` apart, to f32: strips of `width` columns one behind the other, each
/// with room for [`BLOCK_KEYS`] rows, so that a strip's rows lie next to each other.
#[inline(always)]
unsafe fn widen<S: Simd, C: Stored>(
    (from, stride): (*const C, usize),
    (rows, n): (usize, usize),
    width: usize,
    to: *mut f32,
) {
    // SAFETY: the caller vouches for the rows and for the strips behind `to`; strips are whole vectors.
    unsafe {
        for first in (0..n).step_by(width) {
            let to = to.add(first * BLOCK_KEYS);
            let last = n.min(first + width);
            for row in 0..rows {
                let (from, to) = (from.add(row * stride), to.add(row * width));
                for i in (first..last).step_by(S::LANES) {
                    let x = C::load::<S>(from, i, n);
                    x.store_first(to.add(i - first), (last - i).min(S::LANES));
                }
            }
        }
    }
}

/// Turns rows of `k_dim` elements into panels of `width` of them: `to[panel][element][row]`, with room for
/// [`BLOCK_KEYS`] rows in both. What is behind the last row is of no meaning.
#[inline(always)]
unsafe fn turn<S: Simd>(
    from: *const f32,
    (rows, k_dim): (usize, usize),
    width: usize,
    to: *mut f32,
) {
    // SAFETY: the caller vouches for room for all rows of a block; `width` is a multiple of 8.
    unsafe {
        for row in (0..rows).step_by(8) {
            let to = to.add(row / width * k_dim * width + row % width);
            let from = from.add(row * k_dim);
            let whole = k_dim / 8 * 8;
            for d in (0..whole).step_by(8) {
                S::turn_eight(from.add(d), k_dim, to.add(d * width), width);
            }
            for (d, r) in (whole..k_dim).flat_map(|d| (0..8).map(move |r| (d, r))) {
                *to.add(d * width + r) = *from.add(r * k_dim + d);
            }
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
    let widest = p.v_dim.next_multiple_of(width).max(p.k_dim);
    s.values.resize(BLOCK_KEYS * widest, 0.0);
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
    let mut key = p.first_key(lowest) / BLOCK_KEYS * BLOCK_KEYS;
    while key <= highest {
        let n = BLOCK_KEYS.min(highest + 1 - key);
        // SAFETY: the keys are inside the pool; `values` has room for all of a block's.
        unsafe {
            let to = s.values.as_mut_ptr();
            for (run, at, pool_row) in runs(p, task.sequence, key, n) {
                let stride = p.kv_heads * C::FORMAT.row_len(p.k_dim);
                let row = pool_row * p.kv_heads + task.kv_head;
                let from = pool_keys.add(row * C::FORMAT.row_len(p.k_dim));
                let to = to.add(at * p.k_dim);
                // One strip as wide as a row.
                run_widen::<C>(isa, (from, stride), (run, p.k_dim), p.k_dim, to);
            }
            run_turn(isa, to, (n, p.k_dim), width, s.keys.as_mut_ptr());
            for (run, at, pool_row) in runs(p, task.sequence, key, n) {
                let stride = p.kv_heads * C::FORMAT.row_len(p.v_dim);
                let row = pool_row * p.kv_heads + task.kv_head;
                let from = pool_values.add(row * C::FORMAT.row_len(p.v_dim));
                let to = to.add(at * width);
                run_widen::<C>(isa, (from, stride), (run, p.v_dim), width, to);
            }
        }
        // SAFETY: scratch has the sizes set above; `Paged::is_valid` holds for the pool.
        unsafe {
            for at in (0..n).step_by(width) {
                let tile = Tile {
                    a: s.queries.as_ptr(),
                    lda: p.k_dim,
                    b: s.keys.as_ptr().add(at * p.k_dim),
                    ldb: width,
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
                    b: s.values.as_ptr().add(at * BLOCK_KEYS),
                    ldb: width,
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
        let own = &s.accumulated[query * p.v_dim..(query + 1) * p.v_dim];
        // SAFETY: a row and head of `[T, heads, v_dim]`, which no other task has.
        unsafe { run_scale(isa, own, scale, out.add(to)) };
    }
}

/// Writes what `of` holds, multiplied.
#[inline(always)]
unsafe fn scale_all<S: Simd>(of: &[f32], factor: f32, to: *mut f32) {
    // SAFETY: the caller vouches for as many elements behind `to`.
    unsafe {
        let factor = S::splat(factor);
        for (i, part) in of.chunks(S::LANES).enumerate() {
            let x = S::load_first(part.as_ptr(), part.len()).mul(factor);
            x.store_first(to.add(i * S::LANES), part.len());
        }
    }
}

/// Multiplies scores; gives the largest of them and of `best`, and 0, or no number where a score is none or infinite:
/// the exponential would hide it.
#[inline(always)]
unsafe fn scaled<S: Simd>(scores: *mut f32, n: usize, scale: f32, best: f32) -> (f32, f32) {
    // SAFETY: the caller vouches for n elements.
    unsafe {
        let (factor, mut largest, mut check) = (S::splat(scale), S::splat(best), S::zero());
        let whole = n / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            let x = S::load(scores.add(i)).mul(factor);
            x.store(scores.add(i));
            largest = x.max(largest);
            check = x.mul_add(S::zero(), check);
        }
        let (mut largest, mut check) = (largest.max_lane(), check.sum());
        for i in whole..n {
            let x = *scores.add(i) * scale;
            *scores.add(i) = x;
            largest = if x > largest { x } else { largest };
            check += x * 0.0;
        }
        (largest, check)
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
    if p.softcap > 0.0 {
        seen.iter_mut()
            .for_each(|x| *x = capped(*x * p.scale, p.softcap));
    }
    let scale = if p.softcap > 0.0 { 1.0 } else { p.scale };
    // SAFETY: the slice is live.
    let (best, sum) = unsafe {
        let (best, check) = scaled::<S>(seen.as_mut_ptr(), seen.len(), scale, s.best[query]);
        let sum = exponentials::<S>(seen.as_mut_ptr(), seen.len(), best);
        (best, sum + check)
    };
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
    unsafe fn run_widen[C: Stored][C](
        from: (*const C, usize), sizes: (usize, usize), width: usize, to: *mut f32
    ) = widen
}
dispatch! {
    unsafe fn run_scale(of: &[f32], factor: f32, to: *mut f32) = scale_all
}
dispatch! {
    unsafe fn run_turn(from: *const f32, sizes: (usize, usize), width: usize, to: *mut f32) = turn
}

/// Runs of keys `key..key + n` whose rows of the pool are next to each other: how many, after how many, first row.
fn runs(
    p: &Paged<'_>,
    sequence: usize,
    key: usize,
    n: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut done = 0;
    core::iter::from_fn(move || {
        let (at, key) = (done, key + done);
        let run = (p.page_size - key % p.page_size).min(n - at);
        done += run;
        (run > 0).then(|| (run, at, p.pool_row(sequence, key)))
    })
}
