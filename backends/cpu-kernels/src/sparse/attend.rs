//! Attention of rows over what they see of the pool.

use super::{Pages, SendPtr, dot};
use crate::attention::{Cells, Q4, Q8, Rows, Stored};
use crate::factor::{Bf16, F16};
use crate::isa::dispatch;
use crate::simd::Simd;
use crate::{Isa, Pool};

/// Most heads of one task.
const HEADS: usize = 16;

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

/// Attends: writes `out` `[T, H, Dv]`. A row that sees nothing gets zeros. False when a thread
/// panicked.
#[must_use]
pub fn attend(isa: Isa, pool: &mut Pool, a: &Attend<'_>, out: &mut [f32]) -> bool {
    let rows = a.pages.positions.len();
    assert!(a.is_valid() && out.len() == rows * a.heads * a.v_dim);
    let sequences = a.pages.sequences();
    out.fill(0.0);
    let group = a.heads / a.kv_heads;
    // Heads of one task share a key head. Few rows divide theirs among the threads, each of which
    // then reads all keys.
    let mut most = HEADS;
    while most > 1 && sequences.len() * a.kv_heads * group.div_ceil(most) < pool.threads() {
        most /= 2;
    }
    let parts = group.div_ceil(most);
    let to = SendPtr(out.as_mut_ptr());
    pool.share(sequences.len() * a.kv_heads * parts, &|_, task| {
        let (row, rest) = (task / (a.kv_heads * parts), task % (a.kv_heads * parts));
        let (kv_head, part) = (rest / parts, rest % parts);
        let first = kv_head * group + part * most;
        let count = most.min((kv_head + 1) * group - first);
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
        by_type!([a.keys, a.values], [keys, values] as C => {
            let pools = [Rows::new(keys, k), Rows::new(values, v)];
            heads_of::<C>(isa, a, pools, heads, out);
        }, else {});
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
