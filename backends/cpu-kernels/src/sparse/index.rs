//! The choice of the keys that a row attends to.

use super::{Pages, SendPtr, dot};
use crate::attention::{Cells, Q4, Q8, Rows, Stored};
use crate::factor::{Bf16, F16};
use crate::isa::dispatch;
use crate::simd::Simd;
use crate::{Isa, Pool};

/// Keys of one task.
const KEYS: usize = 1024;

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
        by_type!([i.keys], [pool] as C => {
            keys_of::<C>(isa, i, Rows::new(pool, sizes), row, keys, to);
        });
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
