//! Attention over a paged pool in its less common forms (nothing appended, latent keys, chosen keys),
//! and the choice of keys.
//!
//! Plain loops that the compiler turns into vectors of each instruction set. A task is a row and some
//! of its heads: each key is read once for all of them. What a row gets depends on that row alone.

#![expect(
    clippy::extra_unused_type_parameters,
    reason = "kernels are named by the instruction set that the dispatch compiles them for"
)]

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
    /// `[rows of the pool, Hkv, Dk]`.
    pub keys: &'a [f32],
    /// `[rows of the pool, Hkv, value_stride]`, of which the first Dv are used.
    pub values: &'a [f32],
    /// Elements between the values of two heads.
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
            && self.keys.len() == pool * self.kv_heads * self.k_dim
            && self.values.len() == pool * self.kv_heads * self.value_stride
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
        // SAFETY: `isa` was detected; lengths were checked; a task's heads of a row are its own.
        unsafe { some_heads(isa, a, row, (kv_head, first, count), &visible, to.get()) }
    })
}

dispatch! {
    /// Some heads of a row.
    unsafe fn some_heads(a: &Attend<'_>, row: usize, heads: (usize, usize, usize), visible: &[usize], out: *mut f32) = heads_kernel
}

/// # Safety
/// `out` is as long as `a` says, and nobody else touches these heads of the row.
#[inline(always)]
unsafe fn heads_kernel<S: Simd>(
    a: &Attend<'_>,
    row: usize,
    (kv_head, first, count): (usize, usize, usize),
    visible: &[usize],
    out: *mut f32,
) {
    let n = visible.len();
    let mut scores = vec![0.0f32; count * n];
    for (i, at) in visible.iter().enumerate() {
        let key = &a.keys[(at * a.kv_heads + kv_head) * a.k_dim..][..a.k_dim];
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
    for (i, at) in visible.iter().enumerate() {
        let value = &a.values[(at * a.kv_heads + kv_head) * a.value_stride..][..a.v_dim];
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
    /// `[rows of the pool, D]`, this step's included.
    pub keys: &'a [f32],
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
            && self.keys.len() == pool * self.dim
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

dispatch! {
    /// Scores of some keys of a row.
    unsafe fn some_keys(i: &Index<'_>, row: (usize, usize), keys: (usize, usize), to: *mut f32) = keys_kernel
}

/// # Safety
/// `to` has room for the keys, and nobody else writes there.
#[inline(always)]
unsafe fn keys_kernel<S: Simd>(
    i: &Index<'_>,
    (row, sequence): (usize, usize),
    (first, count): (usize, usize),
    to: *mut f32,
) {
    let weights = &i.weights[row * i.heads..(row + 1) * i.heads];
    for position in first..first + count {
        let key = &i.keys[i.pages.pool_row(sequence, position) * i.dim..][..i.dim];
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
mod tests {
    use super::*;

    const PAGES: Pages<'static> = Pages {
        positions: &[2, 3, 0],
        page_table: &[2, 1, 1, 0],
        row_starts: &[0, 2, 2],
        page_size: 2,
        pages: 3,
    };

    fn base<'a>(keys: &'a [f32], selection: &'a [i32]) -> Attend<'a> {
        Attend {
            q: &[0.0; 3],
            keys,
            values: keys,
            value_stride: 1,
            selection,
            sinks: &[],
            pages: PAGES,
            heads: 1,
            kv_heads: 1,
            k_dim: 1,
            v_dim: 1,
            scale: 1.0,
            softcap: 0.0,
            window: 0,
            chunk: 0,
        }
    }

    /// Positions 0 to 3 of the first sequence hold 5, 6, 3, 4.
    const KEYS_OF_POOL: [f32; 6] = [0.0, 0.0, 3.0, 4.0, 5.0, 6.0];

    fn averages(a: &Attend<'_>) -> Vec<f32> {
        let mut out = vec![9.0; 3];
        assert!(attend(Isa::best(), &mut Pool::new(2).unwrap(), a, &mut out));
        // Shares are rounded; the numbers asked for are not.
        out.iter().map(|x| (x * 1024.0).round() / 1024.0).collect()
    }

    #[test]
    fn a_query_without_scores_averages_what_it_sees() {
        let all = base(&KEYS_OF_POOL, &[]);
        assert_eq!(averages(&all), [4779.0 / 1024.0, 4.5, 0.0]);
        assert_eq!(averages(&Attend { window: 2, ..all }), [4.5, 3.5, 0.0]);
        assert_eq!(averages(&Attend { chunk: 2, ..all }), [3.0, 3.5, 0.0]);
        // Positions to come, none, and one behind the window do not count.
        let chosen = base(&KEYS_OF_POOL, &[0, 3, 1, -1, -1, -1]);
        assert_eq!(averages(&chosen), [5.0, 6.0, 0.0]);
        assert_eq!(
            averages(&Attend {
                window: 2,
                ..chosen
            }),
            [0.0; 3]
        );
    }

    #[test]
    fn the_best_keys_are_chosen_and_all_of_few() {
        let choice = Index {
            q: &[1.0, -1.0, 1.0, -1.0, 0.0, 0.0],
            weights: &[1.0, 100.0, -1.0, 100.0, 1.0, 1.0],
            keys: &KEYS_OF_POOL,
            pages: PAGES,
            heads: 2,
            dim: 1,
            top_k: 3,
            scale: 0.5,
        };
        let mut out = vec![7; 9];
        assert!(index(
            Isa::best(),
            &mut Pool::new(1).unwrap(),
            &choice,
            &mut out
        ));
        out[3..6].sort_unstable();
        // The second head sees nothing above 0; the second row wants small keys: 5, 3 and 4.
        assert_eq!(out, [0, 1, 2, 0, 2, 3, -1, -1, -1]);
    }

    #[test]
    fn what_is_not_in_the_pool_is_refused() {
        assert!(PAGES.is_valid());
        for bad in [
            Pages {
                positions: &[2, 4, 0],
                ..PAGES
            },
            Pages {
                page_table: &[2, 3, 1, 0],
                ..PAGES
            },
            Pages {
                row_starts: &[0, 3, 2],
                ..PAGES
            },
            Pages {
                row_starts: &[0, 2, 4],
                ..PAGES
            },
            Pages {
                row_starts: &[],
                ..PAGES
            },
        ] {
            assert!(!bad.is_valid(), "{bad:?}");
        }
        assert!(
            !Attend {
                v_dim: 2,
                ..base(&KEYS_OF_POOL, &[])
            }
            .is_valid()
        );
    }
}
