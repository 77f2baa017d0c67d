//! Attention over a paged pool of keys and values.
//!
//! Two ways, chosen per sequence by the number of its rows in the step. With few rows (decode) each
//! pair of row and key-value head reads the keys once for all query heads of its group. With many
//! rows (prefill) blocks of queries meet blocks of keys through the register tile of `gemm`, with
//! the running softmax of FlashAttention (Dao et al. 2022), so that scores never leave the cache.

use crate::Isa;
use crate::gemm::{Tile, rows_of_tiles};
use crate::isa::dispatch;
use crate::pool::Pool;
use crate::simd::Simd;

/// Operands of a step, all f32 and row-major.
#[derive(Clone, Copy)]
pub struct Paged<'a> {
    /// `[T, heads, k_dim]`.
    pub q: &'a [f32],
    /// `[pages, page_size, kv_heads, k_dim]`.
    pub keys: &'a [f32],
    /// `[pages, page_size, kv_heads, v_dim]`.
    pub values: &'a [f32],
    /// `[T]`.
    pub positions: &'a [i32],
    /// `[S, pages_per_sequence]`.
    pub page_table: &'a [i32],
    /// `S + 1` boundaries of the rows.
    pub row_starts: &'a [u32],
    /// Sink logit per head, or empty.
    pub sinks: &'a [f32],
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a key.
    pub k_dim: usize,
    /// Width of a value.
    pub v_dim: usize,
    /// Positions in a page.
    pub page_size: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Soft cap of the scores; 0 is none.
    pub softcap: f32,
    /// Most keys a row sees; 0 is no limit.
    pub window: usize,
    /// Positions in a chunk, beyond whose borders no row sees; 0 is no chunks.
    pub chunk: usize,
}

/// Query rows of a block.
const BLOCK_ROWS: usize = 16;
/// Keys of a block: the widest panel.
const BLOCK_KEYS: usize = 32;
/// From this many rows of a sequence on, blocks are used.
const MANY_ROWS: usize = 4;

impl Paged<'_> {
    fn pages_per_sequence(&self) -> usize {
        let sequences = self.row_starts.len().saturating_sub(1).max(1);
        self.page_table.len() / sequences
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// First key that a row at `position` sees. Never less for a later position.
    fn first_key(&self, position: usize) -> usize {
        let in_window = match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        };
        let in_chunk = match self.chunk {
            0 => 0,
            chunk => position / chunk * chunk,
        };
        in_window.max(in_chunk)
    }

    /// Row of the pool that holds a key of a sequence.
    #[inline(always)]
    fn pool_row(&self, sequence: usize, key: usize) -> usize {
        let page = self.page_table[sequence * self.pages_per_sequence() + key / self.page_size];
        page as usize * self.page_size + key % self.page_size
    }

    /// Whether shapes fit and every index is inside: what the kernels rely on.
    pub fn is_valid(&self) -> bool {
        let rows = self.positions.len();
        let (Some(last), Some(first)) = (self.row_starts.last(), self.row_starts.first()) else {
            return false;
        };
        let pool_rows = self.keys.len() / (self.kv_heads * self.k_dim).max(1);
        let pages = pool_rows / self.page_size.max(1);
        let sizes = self.kv_heads > 0
            && self.k_dim > 0
            && self.v_dim > 0
            && self.page_size > 0
            && self.heads.is_multiple_of(self.kv_heads)
            && self.q.len() == rows * self.heads * self.k_dim
            && self.values.len() / (self.kv_heads * self.v_dim) >= pool_rows
            && (self.sinks.is_empty() || self.sinks.len() == self.heads);
        let boundaries = *first == 0 && *last as usize == rows && self.row_starts.is_sorted();
        let most = self.pages_per_sequence() * self.page_size;
        sizes
            && boundaries
            && self
                .positions
                .iter()
                .all(|p| usize::try_from(*p).is_ok_and(|p| p < most))
            && self
                .page_table
                .iter()
                .all(|p| usize::try_from(*p).is_ok_and(|p| p < pages))
    }
}

/// Scratch of one thread.
#[derive(Debug, Default)]
pub struct Scratch {
    scores: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    accumulated: Vec<f32>,
    best: Vec<f32>,
    total: Vec<f32>,
}

/// One piece of work: rows of a sequence with one key-value head.
#[derive(Debug, Clone, Copy)]
struct Task {
    sequence: usize,
    first_row: usize,
    rows: usize,
    kv_head: usize,
}

#[inline(always)]
unsafe fn dot<S: Simd>(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: the caller vouches for n elements behind both pointers.
    unsafe {
        let mut acc = [S::zero(); 2];
        let mut i = 0;
        while i + 2 * S::LANES <= n {
            acc[0] = S::load(a.add(i)).mul_add(S::load(b.add(i)), acc[0]);
            acc[1] = S::load(a.add(i + S::LANES)).mul_add(S::load(b.add(i + S::LANES)), acc[1]);
            i += 2 * S::LANES;
        }
        while i < n {
            let left = (n - i).min(S::LANES);
            acc[0] = S::load_first(a.add(i), left).mul_add(S::load_first(b.add(i), left), acc[0]);
            i += S::LANES;
        }
        acc[0].add(acc[1]).sum()
    }
}

/// `y += p * x`.
#[inline(always)]
unsafe fn axpy<S: Simd>(p: f32, x: *const f32, y: *mut f32, n: usize) {
    // SAFETY: the caller vouches for n elements behind both pointers.
    unsafe {
        let p = S::splat(p);
        let mut i = 0;
        while i < n {
            let left = (n - i).min(S::LANES);
            p.mul_add(S::load_first(x.add(i), left), S::load_first(y.add(i), left))
                .store_first(y.add(i), left);
            i += S::LANES;
        }
    }
}

/// Turns scores into `exp(score - best)` and gives their sum.
#[inline(always)]
unsafe fn exponentials<S: Simd>(scores: *mut f32, n: usize, best: f32) -> f32 {
    // SAFETY: the caller vouches for n elements.
    unsafe {
        let shift = S::splat(best);
        let mut sum = S::zero();
        let mut i = 0;
        while i + S::LANES <= n {
            let e = S::load(scores.add(i)).sub(shift).exp();
            e.store(scores.add(i));
            sum = sum.add(e);
            i += S::LANES;
        }
        let mut total = sum.sum();
        while i < n {
            let e = (*scores.add(i) - best).exp();
            *scores.add(i) = e;
            total += e;
            i += 1;
        }
        total
    }
}

fn capped(score: f32, softcap: f32) -> f32 {
    if softcap > 0.0 {
        softcap * (score / softcap).tanh()
    } else {
        score
    }
}

/// One row with all query heads of a key-value head.
#[inline(always)]
unsafe fn one_row<S: Simd>(
    p: &Paged<'_>,
    sequence: usize,
    row: usize,
    kv_head: usize,
    out: *mut f32,
    s: &mut Scratch,
) {
    let position = p.positions[row] as usize;
    let (first, last) = (p.first_key(position), position + 1);
    let (n, group) = (last - first, p.group());
    s.scores.resize(group * n, 0.0);
    // SAFETY: `Paged::is_valid` holds, so that every key, value and row is inside its slice.
    unsafe {
        let q =
            p.q.as_ptr()
                .add((row * p.heads + kv_head * group) * p.k_dim);
        for key in first..last {
            let k = p
                .keys
                .as_ptr()
                .add((p.pool_row(sequence, key) * p.kv_heads + kv_head) * p.k_dim);
            for g in 0..group {
                let score = dot::<S>(q.add(g * p.k_dim), k, p.k_dim) * p.scale;
                s.scores[g * n + key - first] = capped(score, p.softcap);
            }
        }
        let out = out.add((row * p.heads + kv_head * group) * p.v_dim);
        for g in 0..group {
            let scores = &mut s.scores[g * n..(g + 1) * n];
            let sink = p.sinks.get(kv_head * group + g).copied();
            let best = scores
                .iter()
                .copied()
                .fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
            let mut total = exponentials::<S>(scores.as_mut_ptr(), n, best);
            total += sink.map_or(0.0, |sink| (sink - best).exp());
            let scale = total.recip();
            scores.iter_mut().for_each(|e| *e *= scale);
            core::slice::from_raw_parts_mut(out.add(g * p.v_dim), p.v_dim).fill(0.0);
        }
        for key in first..last {
            let v = p
                .values
                .as_ptr()
                .add((p.pool_row(sequence, key) * p.kv_heads + kv_head) * p.v_dim);
            for g in 0..group {
                axpy::<S>(
                    s.scores[g * n + key - first],
                    v,
                    out.add(g * p.v_dim),
                    p.v_dim,
                );
            }
        }
    }
}

/// A block of rows with all query heads of a key-value head: `rows * group` queries.
#[inline(always)]
unsafe fn block<S: Simd>(p: &Paged<'_>, task: Task, out: *mut f32, s: &mut Scratch) {
    let group = p.group();
    let queries = task.rows * group;
    let positions = &p.positions[task.first_row..task.first_row + task.rows];
    let lowest = positions.iter().min().map_or(0, |x| *x as usize);
    let highest = positions.iter().max().map_or(0, |x| *x as usize);
    let width = 2 * S::LANES;
    s.queries.resize(queries * p.k_dim, 0.0);
    s.scores.resize(queries * BLOCK_KEYS, 0.0);
    s.keys.resize(p.k_dim * BLOCK_KEYS, 0.0);
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
            let k = ((pool_row + j) * p.kv_heads + task.kv_head) * p.k_dim;
            for (d, x) in p.keys[k..k + p.k_dim].iter().enumerate() {
                s.keys[d * BLOCK_KEYS + j] = *x;
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
                rows_of_tiles::<S>(tile, queries);
            }
            for query in 0..queries {
                let position = positions[query / group] as usize;
                soften::<S>(p, s, query, position, key, n);
            }
            let values = p
                .values
                .as_ptr()
                .add((pool_row * p.kv_heads + task.kv_head) * p.v_dim);
            for at in (0..p.v_dim).step_by(width) {
                let tile = Tile {
                    a: s.scores.as_ptr(),
                    lda: BLOCK_KEYS,
                    b: values.add(at),
                    ldb: p.kv_heads * p.v_dim,
                    k: n,
                    c: s.accumulated.as_mut_ptr().add(at),
                    ldc: p.v_dim,
                    n: width.min(p.v_dim - at),
                    accumulate: true,
                };
                rows_of_tiles::<S>(tile, queries);
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
    position: usize,
    key: usize,
    n: usize,
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

#[inline(always)]
unsafe fn kernel<S: Simd>(p: &Paged<'_>, task: Task, out: *mut f32, scratch: &mut Scratch) {
    // SAFETY: forwarded to the caller.
    unsafe {
        if task.rows >= MANY_ROWS {
            block::<S>(p, task, out, scratch);
        } else {
            for row in 0..task.rows {
                one_row::<S>(
                    p,
                    task.sequence,
                    task.first_row + row,
                    task.kv_head,
                    out,
                    scratch,
                );
            }
        }
    }
}

dispatch! {
    unsafe fn run(p: &Paged<'_>, task: Task, out: *mut f32, scratch: &mut Scratch) = kernel
}

struct SendPtr(*mut f32);
// SAFETY: tasks write disjoint rows and heads of the result.
unsafe impl Sync for SendPtr {}

/// Attention of every row over the keys of its sequence up to its own position. The step's keys and
/// values are in the pool already. Writes `[T, heads, v_dim]`. False when a kernel panicked.
///
/// # Panics
/// When `p` is not valid or `out` or `scratch` is too short.
#[must_use]
pub fn paged(
    isa: Isa,
    pool: &mut Pool,
    p: &Paged<'_>,
    out: &mut [f32],
    scratch: &[std::sync::Mutex<Scratch>],
) -> bool {
    assert!(
        p.is_valid()
            && out.len() == p.positions.len() * p.heads * p.v_dim
            && scratch.len() >= pool.threads()
    );
    let mut tasks = Vec::new();
    for (sequence, bounds) in p.row_starts.windows(2).enumerate() {
        let (start, end) = (bounds[0] as usize, bounds[1] as usize);
        for first_row in (start..end).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(end - first_row);
            tasks.extend((0..p.kv_heads).map(|kv_head| Task {
                sequence,
                first_row,
                rows,
                kv_head,
            }));
        }
    }
    // Later blocks of a sequence see more keys: the long ones go first.
    tasks.reverse();
    let out = SendPtr(out.as_mut_ptr());
    let (out, tasks) = (&out, &tasks);
    let work: usize =
        p.positions.iter().map(|p| *p as usize + 1).sum::<usize>() * p.heads * (p.k_dim + p.v_dim);
    let one = |thread: usize, index: usize| {
        let mut scratch = scratch[thread]
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: `isa` was detected; `p` is valid; tasks write disjoint parts of `out`.
        unsafe { run(isa, p, tasks[index], out.0, &mut scratch) };
    };
    // Waking the others for less than some tens of thousands of products costs more than it gains.
    if work < 60_000 {
        let all = std::panic::AssertUnwindSafe(|| (0..tasks.len()).for_each(|index| one(0, index)));
        return std::panic::catch_unwind(all).is_ok();
    }
    pool.share(tasks.len(), &one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::testing::Numbers;
    use std::sync::Mutex;

    struct Case {
        q: Vec<f32>,
        keys: Vec<f32>,
        values: Vec<f32>,
        positions: Vec<i32>,
        page_table: Vec<i32>,
        row_starts: Vec<u32>,
        sinks: Vec<f32>,
    }

    const PAGE: usize = 4;

    /// Sequences of (cached keys, rows of this step), pages in shuffled order.
    fn case(
        numbers: &mut Numbers,
        sequences: &[(usize, usize)],
        heads: usize,
        kv_heads: usize,
        k: usize,
        v: usize,
        sinks: bool,
    ) -> Case {
        let width = sequences
            .iter()
            .map(|(c, r)| (c + r).div_ceil(PAGE))
            .max()
            .unwrap();
        let pages = sequences.len() * width + 1;
        let page_table = (0..sequences.len() * width)
            .map(|i| 1 + (i * 7 % (pages - 1)) as i32)
            .collect::<Vec<_>>();
        let mut row_starts = vec![0u32];
        let mut positions = Vec::new();
        for (cached, rows) in sequences {
            positions.extend((0..*rows).map(|i| (cached + i) as i32));
            row_starts.push(positions.len() as u32);
        }
        let rows = positions.len();
        Case {
            q: numbers.floats(rows * heads * k),
            keys: numbers.floats(pages * PAGE * kv_heads * k),
            values: numbers.floats(pages * PAGE * kv_heads * v),
            positions,
            page_table,
            row_starts,
            sinks: if sinks {
                numbers.floats(heads)
            } else {
                Vec::new()
            },
        }
    }

    fn reference(p: &Paged<'_>) -> Vec<f64> {
        let mut out = Vec::new();
        for row in 0..p.positions.len() {
            let sequence = p
                .row_starts
                .windows(2)
                .position(|w| (w[0]..w[1]).contains(&(row as u32)))
                .unwrap();
            let position = p.positions[row] as usize;
            for head in 0..p.heads {
                let kv = head / p.group();
                let sees = |key: usize| {
                    (p.window == 0 || key + p.window > position)
                        && (p.chunk == 0 || key / p.chunk == position / p.chunk)
                };
                let mut terms: Vec<(f64, usize)> = Vec::new();
                for key in (0..=position).filter(|key| sees(*key)) {
                    let at = p.pool_row(sequence, key) * p.kv_heads + kv;
                    let q = &p.q[(row * p.heads + head) * p.k_dim..][..p.k_dim];
                    let dot: f64 = q
                        .iter()
                        .zip(&p.keys[at * p.k_dim..])
                        .map(|(a, b)| f64::from(*a) * f64::from(*b))
                        .sum();
                    let score = dot * f64::from(p.scale);
                    let cap = f64::from(p.softcap);
                    terms.push((
                        if cap > 0.0 {
                            cap * (score / cap).tanh()
                        } else {
                            score
                        },
                        at,
                    ));
                }
                let sink = p
                    .sinks
                    .get(head)
                    .map(|s| f64::from(*s).exp())
                    .unwrap_or(0.0);
                let total: f64 = terms.iter().map(|(s, _)| s.exp()).sum::<f64>() + sink;
                for d in 0..p.v_dim {
                    out.push(
                        terms
                            .iter()
                            .map(|(s, at)| s.exp() / total * f64::from(p.values[at * p.v_dim + d]))
                            .sum(),
                    );
                }
            }
        }
        out
    }

    #[test]
    fn ragged_steps_match_f64() {
        let mut numbers = Numbers(11);
        let mut pool = Pool::new(2).unwrap();
        let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
        let steps: [&[(usize, usize)]; 5] = [
            &[(0, 1)],
            &[(9, 1), (0, 1), (3, 1)],
            &[(0, 37)],
            &[(5, 20), (11, 1), (0, 3), (40, 4)],
            &[(70, 33), (0, 0), (2, 1)],
        ];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for sequences in steps {
                for (heads, kv_heads, k, v) in [(4, 2, 16, 16), (3, 1, 24, 40), (2, 2, 64, 64)] {
                    for (window, chunk, softcap, sinks) in [
                        (0, 0, 0.0, false),
                        (5, 0, 0.0, false),
                        (0, 0, 2.0, true),
                        (3, 0, 0.0, true),
                        (0, 7, 0.0, false),
                        (5, 8, 0.0, true),
                    ] {
                        let c = case(&mut numbers, sequences, heads, kv_heads, k, v, sinks);
                        let p = Paged {
                            q: &c.q,
                            keys: &c.keys,
                            values: &c.values,
                            positions: &c.positions,
                            page_table: &c.page_table,
                            row_starts: &c.row_starts,
                            sinks: &c.sinks,
                            heads,
                            kv_heads,
                            k_dim: k,
                            v_dim: v,
                            page_size: PAGE,
                            scale: 0.7,
                            softcap,
                            window,
                            chunk,
                        };
                        let mut out = vec![f32::NAN; c.positions.len() * heads * v];
                        assert!(paged(isa, &mut pool, &p, &mut out, &scratch));
                        let want = reference(&p);
                        for (i, (got, want)) in out.iter().zip(&want).enumerate() {
                            assert!(
                                (f64::from(*got) - want).abs() < 2e-5,
                                "{} {sequences:?} {window} {chunk} {softcap} at {i}: {got} {want}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bad_indices_are_found_before_the_kernels_run() {
        let mut numbers = Numbers(1);
        let c = case(&mut numbers, &[(3, 2)], 2, 1, 8, 8, false);
        let p = Paged {
            q: &c.q,
            keys: &c.keys,
            values: &c.values,
            positions: &c.positions,
            page_table: &c.page_table,
            row_starts: &c.row_starts,
            sinks: &[],
            heads: 2,
            kv_heads: 1,
            k_dim: 8,
            v_dim: 8,
            page_size: PAGE,
            scale: 1.0,
            softcap: 0.0,
            window: 0,
            chunk: 0,
        };
        assert!(p.is_valid());
        assert!(
            !Paged {
                positions: &[3, 999],
                ..p
            }
            .is_valid()
        );
        assert!(
            !Paged {
                positions: &[3, -1],
                ..p
            }
            .is_valid()
        );
        assert!(
            !Paged {
                page_table: &[1, 77],
                ..p
            }
            .is_valid()
        );
        assert!(
            !Paged {
                row_starts: &[0, 1],
                ..p
            }
            .is_valid()
        );
        assert!(!Paged { heads: 3, ..p }.is_valid());
    }
}
