//! Few rows: each pair of row and key-value head reads a part of the keys once for all query heads
//! of its group. Parts are cut at fixed positions, so that a row's result does not depend on what
//! else is in the step, and are put together at the end (as in Flash-Decoding).

use super::cells::Stored;
use super::{Paged, Scratch, capped, exponentials};
use crate::Isa;
use crate::isa::dispatch;
use crate::simd::Simd;

/// Keys of a part.
pub(super) const PART_KEYS: usize = 64;

/// Keys `first..last` of a row's sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) sequence: usize,
    pub(super) row: usize,
    pub(super) kv_head: usize,
    pub(super) first: usize,
    pub(super) last: usize,
    /// Where its partial result goes: `[group, v_dim]` sums, `[group]` best scores, `[group]` totals.
    pub(super) at: usize,
}

/// Elements of a partial result.
pub(super) fn partial_len(p: &Paged<'_>) -> usize {
    p.group() * (p.v_dim + 2)
}

/// Parts of a row: cut at multiples of [`PART_KEYS`].
pub(super) fn cut(first: usize, last: usize) -> impl Iterator<Item = (usize, usize)> {
    (first / PART_KEYS..last.div_ceil(PART_KEYS))
        .map(move |i| ((i * PART_KEYS).max(first), ((i + 1) * PART_KEYS).min(last)))
}

/// Calls `body(first row of the pool, keys before it, keys)` for each run of keys in one page.
macro_rules! runs {
    ($p:expr, $part:expr, |$row:ident, $done:ident, $n:ident| $body:block) => {
        let mut key = $part.first;
        while key < $part.last {
            let $n = ($p.page_size - key % $p.page_size).min($part.last - key);
            let $row = $p.pool_row($part.sequence, key);
            let $done = key - $part.first;
            $body
            key += $n;
        }
    };
}

/// Computes a part's partial result.
///
/// # Safety
/// The CPU has `isa`, `p` is valid, `C` its storage, `to` has room for [`partial_len`] elements that
/// nobody else writes.
pub(super) unsafe fn part<C: Stored>(
    isa: Isa,
    p: &Paged<'_>,
    (keys, values): (*const C, *const C),
    part: Part,
    to: *mut f32,
    s: &mut Scratch,
) {
    let group = p.group();
    s.scores.resize(group * PART_KEYS, 0.0);
    let scores = s.scores.as_mut_ptr();
    // SAFETY: forwarded to the caller; scratch has the size set above.
    unsafe {
        let sums = to.add(group * p.v_dim);
        run_weights::<C>(isa, p, keys, part, scores, sums);
        let mut g = 0;
        while g < group {
            let heads = if group - g >= 4 {
                4
            } else {
                (group - g).min(2)
            };
            let job = Values {
                values,
                part,
                scores: scores.add(g * PART_KEYS),
                to: to.add(g * p.v_dim),
            };
            match heads {
                4 => run_values::<C, 4>(isa, p, &job),
                2 => run_values::<C, 2>(isa, p, &job),
                _ => run_values::<C, 1>(isa, p, &job),
            }
            g += heads;
        }
    }
}

/// Weights of a part's keys, not normalised: `scores[g][key]`; writes best scores and totals.
#[inline(always)]
unsafe fn weights<S: Simd, C: Stored>(
    p: &Paged<'_>,
    keys: *const C,
    part: Part,
    scores: *mut f32,
    sums: *mut f32,
) {
    let (n, group) = (part.last - part.first, p.group());
    // SAFETY: `Paged::is_valid` holds, so that every key and row is inside its slice.
    unsafe {
        let q =
            p.q.as_ptr()
                .add((part.row * p.heads + part.kv_head * group) * p.k_dim);
        runs!(p, part, |row, done, run| {
            let k = keys.add((row * p.kv_heads + part.kv_head) * C::FORMAT.row_len(p.k_dim));
            for g in 0..group {
                let to = scores.add(g * PART_KEYS + done);
                score_run::<S, C>(p, q.add(g * p.k_dim), k, run, to);
            }
        });
        for g in 0..group {
            let scores = scores.add(g * PART_KEYS);
            let mut best = f32::NEG_INFINITY;
            for i in 0..n {
                let score = capped(*scores.add(i) * p.scale, p.softcap);
                *scores.add(i) = score;
                best = if score > best || score.is_nan() {
                    score
                } else {
                    best
                };
            }
            *sums.add(g) = best;
            *sums.add(group + g) = exponentials::<S>(scores, n, best);
        }
    }
}

dispatch! {
    unsafe fn run_weights[C: Stored][C](
        p: &Paged<'_>, keys: *const C, part: Part, scores: *mut f32, sums: *mut f32
    ) = weights
}
dispatch! {
    unsafe fn run_values[C: Stored, const G: usize][C, G](p: &Paged<'_>, job: &Values<C>) = weighted_values
}

/// Products of one query with `n` keys in a row of the pool, unscaled.
#[inline(always)]
unsafe fn score_run<S: Simd, C: Stored>(
    p: &Paged<'_>,
    q: *const f32,
    k: *const C,
    n: usize,
    to: *mut f32,
) {
    let stride = p.kv_heads * C::FORMAT.row_len(p.k_dim);
    // SAFETY: forwarded to the caller.
    unsafe {
        let mut j = 0;
        while j + 4 <= n {
            let mut acc = [S::zero(); 4];
            let mut d = 0;
            while d < p.k_dim {
                let q = <f32 as Stored>::load::<S>(q, d, p.k_dim);
                for (i, acc) in acc.iter_mut().enumerate() {
                    *acc = C::load::<S>(k.add((j + i) * stride), d, p.k_dim).mul_add(q, *acc);
                }
                d += S::LANES;
            }
            to.add(j).cast::<[f32; 4]>().write_unaligned(S::sum4(acc));
            j += 4;
        }
        while j < n {
            let mut acc = S::zero();
            let mut d = 0;
            while d < p.k_dim {
                let q = <f32 as Stored>::load::<S>(q, d, p.k_dim);
                acc = C::load::<S>(k.add(j * stride), d, p.k_dim).mul_add(q, acc);
                d += S::LANES;
            }
            *to.add(j) = acc.sum();
            j += 1;
        }
    }
}

/// Weights of some query heads and where their sums of values go.
struct Values<C> {
    values: *const C,
    part: Part,
    scores: *const f32,
    to: *mut f32,
}

/// Weighted sums of values for `G` query heads, two vectors of a value at a time.
#[inline(always)]
unsafe fn weighted_values<S: Simd, C: Stored, const G: usize>(p: &Paged<'_>, job: &Values<C>) {
    let (row_len, part) = (C::FORMAT.row_len(p.v_dim), job.part);
    let stride = p.kv_heads * row_len;
    for d in (0..p.v_dim).step_by(2 * S::LANES) {
        let (left, more) = (p.v_dim - d, (p.v_dim - d).saturating_sub(S::LANES));
        // SAFETY: forwarded to the caller; loads and stores stop at the width of a value.
        unsafe {
            let mut acc = [[S::zero(); 2]; G];
            runs!(p, part, |row, done, run| {
                let v = job.values.add((row * p.kv_heads + part.kv_head) * row_len);
                for j in 0..run {
                    let v = v.add(j * stride);
                    let low = C::load::<S>(v, d, p.v_dim);
                    let high = C::load::<S>(v, d + S::LANES, p.v_dim);
                    for (g, acc) in acc.iter_mut().enumerate() {
                        let weight = S::splat(*job.scores.add(g * PART_KEYS + done + j));
                        *acc = [weight.mul_add(low, acc[0]), weight.mul_add(high, acc[1])];
                    }
                }
            });
            for (g, [low, high]) in acc.into_iter().enumerate() {
                let to = job.to.add(g * p.v_dim + d);
                low.store_first(to, left.min(S::LANES));
                if more > 0 {
                    high.store_first(to.add(S::LANES), more.min(S::LANES));
                }
            }
        }
    }
}

/// Puts the partial results of one row and key-value head together into `out[group, v_dim]`.
pub(super) fn merge(p: &Paged<'_>, kv_head: usize, partials: &[f32], out: &mut [f32]) {
    let (group, len) = (p.group(), partial_len(p));
    for (g, out) in out.chunks_exact_mut(p.v_dim).enumerate() {
        let sink = p.sinks.get(kv_head * group + g).copied();
        let best_at = group * p.v_dim + g;
        let best = partials
            .chunks_exact(len)
            .map(|part| part[best_at])
            .chain(sink)
            .fold(f32::NEG_INFINITY, |best, x| {
                if x > best || x.is_nan() { x } else { best }
            });
        let mut total = sink.map_or(0.0, |sink| (sink - best).exp());
        out.fill(0.0);
        for part in partials.chunks_exact(len) {
            let weight = (part[best_at] - best).exp();
            total += weight * part[best_at + group];
            let sums = &part[g * p.v_dim..(g + 1) * p.v_dim];
            out.iter_mut()
                .zip(sums)
                .for_each(|(out, x)| *out += weight * x);
        }
        let scale = total.recip();
        out.iter_mut().for_each(|x| *x *= scale);
    }
}
