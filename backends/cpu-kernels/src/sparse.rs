//! Attention over a paged pool in its less common forms (nothing appended, latent keys, chosen keys),
//! and the choice of keys.
//!
//! Plain loops that the compiler turns into vectors of each instruction set. A task is a row and some
//! of its heads: each key is read, and widened to f32, once for all of them. What a row gets depends on
//! that row alone.

use crate::attention::{Cells, Q4, Q8, Rows, Stored};
use crate::factor::{Bf16, F16};
use crate::isa::dispatch;
use crate::simd::Simd;
use crate::{Isa, Pool};

/// Heads of one task.
const HEADS: usize = 16;
/// Keys of one task of an index.
const KEYS: usize = 1024;

/// Where the keys of every row are.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    /// `[T]`.
    pub positions: &'a [i32],
    /// `[S, P]`.
    pub page_table: &'a [i32],
    /// Boundaries of the sequences' rows, one more than there are sequences.
    pub row_starts: &'a [u32],
    /// Positions in a page.
    pub page_size: usize,
    /// Pages of the pool.
    pub pages: usize,
}

impl Pages<'_> {
    /// P.
    fn width(&self) -> usize {
        self.page_table.len() / (self.row_starts.len() - 1).max(1)
    }

    /// Whether every row's keys are in the pool.
    pub fn is_valid(&self) -> bool {
        let Some(sequences) = self.row_starts.len().checked_sub(1).filter(|n| *n > 0) else {
            return false;
        };
        let within = |position: &i32| {
            usize::try_from(*position).is_ok_and(|p| p < self.width() * self.page_size)
        };
        let page = |page: &i32| usize::try_from(*page).is_ok_and(|page| page < self.pages);
        self.page_table.len().is_multiple_of(sequences)
            && self.page_size > 0
            && self.row_starts.first() == Some(&0)
            && self.row_starts.is_sorted()
            && self
                .row_starts
                .last()
                .is_some_and(|end| *end as usize <= self.positions.len())
            && self.positions.iter().all(within)
            && self.page_table.iter().all(page)
    }

    /// Sequence of every row that has one.
    fn sequences(&self) -> Vec<usize> {
        let pairs = self.row_starts.windows(2).enumerate();
        pairs
            .flat_map(|(sequence, pair)| {
                core::iter::repeat_n(sequence, (pair[1] - pair[0]) as usize)
            })
            .collect()
    }

    /// Row of the pool that holds a position of a sequence.
    fn pool_row(&self, sequence: usize, position: usize) -> usize {
        let page = self.page_table[sequence * self.width() + position / self.page_size];
        page as usize * self.page_size + position % self.page_size
    }
}

/// One attention call, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Attend<'a> {
    /// `[T, H, Dk]`.
    pub q: &'a [f32],
    /// `[rows of the pool, Hkv, row of Dk]`.
    pub keys: Cells<'a>,
    /// `[rows of the pool, Hkv, row of value_stride]`, of which the first Dv are used.
    pub values: Cells<'a>,
    /// Elements of a stored row of values.
    pub value_stride: usize,
    /// `[T, N]` positions, -1 for none; empty when all keys count.
    pub selection: &'a [i32],
    /// `[H]`, or empty.
    pub sinks: &'a [f32],
    /// Positions and pages.
    pub pages: Pages<'a>,
    /// H.
    pub heads: usize,
    /// Hkv.
    pub kv_heads: usize,
    /// Dk.
    pub k_dim: usize,
    /// Dv.
    pub v_dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Soft cap of the scores; 0 is none.
    pub softcap: f32,
    /// Most keys of a row; 0 is no limit.
    pub window: usize,
    /// Size of chunks; 0 is none.
    pub chunk: usize,
}

impl Attend<'_> {
    /// Whether the lengths fit together.
    pub fn is_valid(&self) -> bool {
        let (rows, pool) = (
            self.pages.positions.len(),
            self.pages.pages * self.pages.page_size,
        );
        self.kv_heads > 0
            && self.heads > 0
            && self.k_dim > 0
            && self.v_dim > 0
            && self.v_dim <= self.value_stride
            && self.heads.is_multiple_of(self.kv_heads)
            && self.q.len() == rows * self.heads * self.k_dim
            && core::mem::discriminant(&self.keys) == core::mem::discriminant(&self.values)
            && self.keys.is_rows(pool * self.kv_heads, self.k_dim)
            && self.values.is_rows(pool * self.kv_heads, self.value_stride)
            && (rows == 0 || self.selection.len().is_multiple_of(rows))
            && (self.sinks.is_empty() || self.sinks.len() == self.heads)
            && self.pages.is_valid()
    }

    /// Rows of the pool that a row sees.
    fn visible(&self, sequence: usize, row: usize) -> Vec<usize> {
        let position = self.pages.positions[row] as usize;
        let mut first = match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        };
        if self.chunk > 0 {
            first = first.max(position - position % self.chunk);
        }
        let rows = self.pages.positions.len();
        if self.selection.is_empty() {
            let all = first..=position;
            return all.map(|p| self.pages.pool_row(sequence, p)).collect();
        }
        let n = self.selection.len() / rows;
        let mut chosen: Vec<usize> = self.selection[row * n..(row + 1) * n]
            .iter()
            .filter_map(|p| usize::try_from(*p).ok())
            .filter(|p| (first..=position).contains(p))
            .collect();
        // In order, so that the sum does not depend on how they were chosen.
        chosen.sort_unstable();
        chosen
            .into_iter()
            .map(|p| self.pages.pool_row(sequence, p))
            .collect()
    }
}

#[derive(Clone, Copy)]
struct SendPtr(*mut f32);

// SAFETY: tasks write disjoint parts behind the pointer.
unsafe impl Send for SendPtr {}
// SAFETY: as above.
unsafe impl Sync for SendPtr {}

impl SendPtr {
    /// The pointer; a method, so that closures take the whole wrapper.
    fn get(&self) -> *mut f32 {
        self.0
    }
}

/// Attends: writes `out` `[T, H, Dv]`. A row that sees nothing gets zeros. False when a thread
/// panicked.
#[must_use]
pub fn attend(isa: Isa, pool: &mut Pool, a: &Attend<'_>, out: &mut [f32]) -> bool {
    let rows = a.pages.positions.len();
    assert!(a.is_valid() && out.len() == rows * a.heads * a.v_dim);
    let sequences = a.pages.sequences();
    out.fill(0.0);
    let group = a.heads / a.kv_heads;
    // Heads of one task share a key head.
    let parts = group.div_ceil(HEADS);
    let to = SendPtr(out.as_mut_ptr());
    pool.share(sequences.len() * a.kv_heads * parts, &|_, task| {
        let (row, rest) = (task / (a.kv_heads * parts), task % (a.kv_heads * parts));
        let (kv_head, part) = (rest / parts, rest % parts);
        let first = kv_head * group + part * HEADS;
        let count = HEADS.min((kv_head + 1) * group - first);
        let visible = a.visible(sequences[row], row);
        let heads = Heads {
            row,
            kv_head,
            first,
            count,
            visible: &visible,
        };
        // SAFETY: `isa` was detected; lengths were checked; a task's heads of a row are its own.
        unsafe { some_heads(isa, a, heads, to.get()) }
    })
}

/// What a task computes: heads of a row, which share a key head.
#[derive(Clone, Copy)]
struct Heads<'a> {
    row: usize,
    kv_head: usize,
    first: usize,
    count: usize,
    /// Rows of the pool.
    visible: &'a [usize],
}

/// # Safety
/// As for [`heads_kernel`], and the CPU has the instruction set.
unsafe fn some_heads(isa: Isa, a: &Attend<'_>, heads: Heads<'_>, out: *mut f32) {
    let (k, v) = ([a.k_dim; 2], [a.value_stride, a.v_dim]);
    // SAFETY: forwarded to the caller; storage types are transparent over their bits.
    unsafe {
        match (a.keys, a.values) {
            (Cells::F32(keys), Cells::F32(values)) => {
                heads_of::<f32>(
                    isa,
                    a,
                    [Rows::new(keys, k), Rows::new(values, v)],
                    heads,
                    out,
                );
            }
            (Cells::F16(keys), Cells::F16(values)) => {
                heads_of::<F16>(
                    isa,
                    a,
                    [Rows::new(keys, k), Rows::new(values, v)],
                    heads,
                    out,
                );
            }
            (Cells::Bf16(keys), Cells::Bf16(values)) => {
                heads_of::<Bf16>(
                    isa,
                    a,
                    [Rows::new(keys, k), Rows::new(values, v)],
                    heads,
                    out,
                );
            }
            (Cells::Q8(keys), Cells::Q8(values)) => {
                heads_of::<Q8>(
                    isa,
                    a,
                    [Rows::new(keys, k), Rows::new(values, v)],
                    heads,
                    out,
                );
            }
            (Cells::Q4(keys), Cells::Q4(values)) => {
                heads_of::<Q4>(
                    isa,
                    a,
                    [Rows::new(keys, k), Rows::new(values, v)],
                    heads,
                    out,
                );
            }
            _ => {}
        }
    }
}

dispatch! {
    /// Some heads of a row.
    unsafe fn heads_of[C: Stored][C](a: &Attend<'_>, pools: [Rows<'_, C>; 2], heads: Heads<'_>, out: *mut f32) = heads_kernel
}

/// # Safety
/// `out` is as long as `a` says, and nobody else touches these heads of the row.
#[inline(always)]
unsafe fn heads_kernel<S: Simd, C: Stored>(
    a: &Attend<'_>,
    [keys, values]: [Rows<'_, C>; 2],
    heads: Heads<'_>,
    out: *mut f32,
) {
    let Heads {
        row,
        kv_head,
        first,
        count,
        visible,
    } = heads;
    let n = visible.len();
    let mut scores = vec![0.0f32; count * n];
    let mut room = keys.room();
    for (i, at) in visible.iter().enumerate() {
        // SAFETY: this is compiled for the instruction set.
        let key = unsafe { keys.row::<S>(at * a.kv_heads + kv_head, &mut room) };
        for h in 0..count {
            let q = &a.q[(row * a.heads + first + h) * a.k_dim..][..a.k_dim];
            let score = dot(q, key) * a.scale;
            scores[h * n + i] = if a.softcap > 0.0 {
                a.softcap * (score / a.softcap).tanh()
            } else {
                score
            };
        }
    }
    for h in 0..count {
        let line = &mut scores[h * n..(h + 1) * n];
        let sink = a.sinks.get(first + h).copied();
        let top = line
            .iter()
            .copied()
            .chain(sink)
            .fold(f32::NEG_INFINITY, f32::max);
        let mut total = sink.map_or(0.0, |sink| (sink - top).exp());
        for score in line.iter_mut() {
            *score = (*score - top).exp();
            total += *score;
        }
        let share = total.recip();
        line.iter_mut().for_each(|weight| *weight *= share);
    }
    // SAFETY: lengths were checked.
    let y = unsafe {
        core::slice::from_raw_parts_mut(out.add((row * a.heads + first) * a.v_dim), count * a.v_dim)
    };
    let mut room = values.room();
    for (i, at) in visible.iter().enumerate() {
        // SAFETY: this is compiled for the instruction set.
        let value = unsafe { values.row::<S>(at * a.kv_heads + kv_head, &mut room) };
        for (h, y) in y.chunks_exact_mut(a.v_dim).enumerate() {
            let weight = scores[h * n + i];
            for (y, v) in y.iter_mut().zip(value) {
                *y += weight * v;
            }
        }
    }
}

/// Sixteen sums side by side, which become vectors.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (a_parts, a_rest) = a.as_chunks::<LANES>();
    let (b_parts, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_parts.iter().zip(b_parts) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// One choice of keys, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Index<'a> {
    /// `[T, H, D]`.
    pub q: &'a [f32],
    /// `[T, H]`.
    pub weights: &'a [f32],
    /// `[rows of the pool, row of D]`, this step's included.
    pub keys: Cells<'a>,
    /// Positions and pages.
    pub pages: Pages<'a>,
    /// H.
    pub heads: usize,
    /// D.
    pub dim: usize,
    /// Keys chosen for every row.
    pub top_k: usize,
    /// Multiplies the products; above 0.
    pub scale: f32,
}

impl Index<'_> {
    /// Whether the lengths fit together.
    pub fn is_valid(&self) -> bool {
        let (rows, pool) = (
            self.pages.positions.len(),
            self.pages.pages * self.pages.page_size,
        );
        self.heads > 0
            && self.dim > 0
            && self.top_k > 0
            && self.scale > 0.0
            && self.q.len() == rows * self.heads * self.dim
            && self.weights.len() == rows * self.heads
            && self.keys.is_rows(pool, self.dim)
            && self.pages.is_valid()
    }
}

/// Chooses keys: writes `out` `[T, top_k]`, -1 for none. False when a thread panicked.
#[must_use]
pub fn index(isa: Isa, pool: &mut Pool, i: &Index<'_>, out: &mut [i32]) -> bool {
    let rows = i.pages.positions.len();
    assert!(i.is_valid() && out.len() == rows * i.top_k);
    out.fill(-1);
    let sequences = i.pages.sequences();
    let mut tasks = Vec::new();
    let mut starts = vec![0];
    for (row, sequence) in sequences.iter().enumerate() {
        let keys = i.pages.positions[row] as usize + 1;
        // All of few keys are chosen.
        if keys > i.top_k {
            for first in (0..keys).step_by(KEYS) {
                tasks.push((row, *sequence, first, KEYS.min(keys - first)));
            }
        }
        starts.push(starts[row] + if keys > i.top_k { keys } else { 0 });
    }
    let mut scores = vec![0.0f32; starts.last().copied().unwrap_or_default()];
    let to = SendPtr(scores.as_mut_ptr());
    let done = pool.share(tasks.len(), &|_, task| {
        let (row, sequence, first, count) = tasks[task];
        // SAFETY: `isa` was detected; lengths were checked; a task's scores are its own.
        unsafe {
            some_keys(
                isa,
                i,
                (row, sequence),
                (first, count),
                to.get().add(starts[row] + first),
            )
        }
    });
    for (row, out) in out
        .chunks_exact_mut(i.top_k)
        .enumerate()
        .take(sequences.len())
    {
        let keys = i.pages.positions[row] as usize + 1;
        if keys <= i.top_k {
            out.iter_mut()
                .zip(0..keys as i32)
                .for_each(|(out, key)| *out = key);
            continue;
        }
        let scores = &scores[starts[row]..starts[row + 1]];
        let mut order: Vec<i32> = (0..keys as i32).collect();
        // Equal ones in order of position, so that the choice is always the same.
        let better = |a: &i32, b: &i32| {
            scores[*b as usize]
                .total_cmp(&scores[*a as usize])
                .then(a.cmp(b))
        };
        order.select_nth_unstable_by(i.top_k - 1, better);
        out.copy_from_slice(&order[..i.top_k]);
    }
    done
}

/// # Safety
/// As for [`keys_kernel`], and the CPU has the instruction set.
unsafe fn some_keys(
    isa: Isa,
    i: &Index<'_>,
    row: (usize, usize),
    keys: (usize, usize),
    to: *mut f32,
) {
    let sizes = [i.dim; 2];
    // SAFETY: forwarded to the caller; storage types are transparent over their bits.
    unsafe {
        match i.keys {
            Cells::F32(pool) => keys_of::<f32>(isa, i, Rows::new(pool, sizes), row, keys, to),
            Cells::F16(pool) => keys_of::<F16>(isa, i, Rows::new(pool, sizes), row, keys, to),
            Cells::Bf16(pool) => keys_of::<Bf16>(isa, i, Rows::new(pool, sizes), row, keys, to),
            Cells::Q8(pool) => keys_of::<Q8>(isa, i, Rows::new(pool, sizes), row, keys, to),
            Cells::Q4(pool) => keys_of::<Q4>(isa, i, Rows::new(pool, sizes), row, keys, to),
        }
    }
}

dispatch! {
    /// Scores of some keys of a row.
    unsafe fn keys_of[C: Stored][C](i: &Index<'_>, pool: Rows<'_, C>, row: (usize, usize), keys: (usize, usize), to: *mut f32) = keys_kernel
}

/// # Safety
/// `to` has room for the keys, and nobody else writes there.
#[inline(always)]
unsafe fn keys_kernel<S: Simd, C: Stored>(
    i: &Index<'_>,
    pool: Rows<'_, C>,
    (row, sequence): (usize, usize),
    (first, count): (usize, usize),
    to: *mut f32,
) {
    let weights = &i.weights[row * i.heads..(row + 1) * i.heads];
    let mut room = pool.room();
    for position in first..first + count {
        let at = i.pages.pool_row(sequence, position);
        // SAFETY: this is compiled for the instruction set.
        let key = unsafe { pool.row::<S>(at, &mut room) };
        let mut score = 0.0;
        for (h, weight) in weights.iter().enumerate() {
            let q = &i.q[(row * i.heads + h) * i.dim..][..i.dim];
            score += weight * (i.scale * dot(q, key)).max(0.0);
        }
        // SAFETY: forwarded to the caller.
        unsafe { to.add(position - first).write(score) };
    }
}

#[cfg(test)]
mod tests;
