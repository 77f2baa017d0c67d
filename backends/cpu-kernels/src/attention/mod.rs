//! Attention over a paged pool of keys and values.
//!
//! Two ways, chosen per sequence by the number of its rows in the step: `few` for decode, `many`
//! for prefill.

mod cells;
mod few;
mod many;
#[cfg(test)]
mod tests;
mod widen;

use crate::Isa;
use crate::factor::{Bf16, F16};
use crate::pool::Pool;
use crate::simd::Simd;
#[cfg(test)]
pub(crate) use cells::testing::read;
pub use cells::{Cells, CellsMut, Format};
pub(crate) use cells::{Q4, Q8, Stored};
pub(crate) use widen::Rows;

/// Operands of a step, row-major.
#[derive(Clone, Copy)]
pub struct Paged<'a> {
    /// `[T, heads, k_dim]`.
    pub q: &'a [f32],
    /// `[pages, page_size, kv_heads, row of k_dim]`.
    pub keys: Cells<'a>,
    /// `[pages, page_size, kv_heads, row of v_dim]`.
    pub values: Cells<'a>,
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
    /// Every row goes by `few`, so that its result does not depend on how many its sequence has.
    pub keeps_rows_apart: bool,
}

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
        let format = self.keys.format();
        let row = |width: usize| (self.kv_heads * format.row_len(width)).max(1);
        let pool_rows = self.keys.len() / row(self.k_dim);
        let pages = pool_rows / self.page_size.max(1);
        let sizes = self.kv_heads > 0
            && self.k_dim > 0
            && self.v_dim > 0
            && self.page_size > 0
            && self.heads.is_multiple_of(self.kv_heads)
            && self.q.len() == rows * self.heads * self.k_dim
            && self.values.len() / row(self.v_dim) >= pool_rows
            && (self.sinks.is_empty() || self.sinks.len() == self.heads);
        let boundaries = *first == 0 && *last as usize == rows && self.row_starts.is_sorted();
        let most = self.pages_per_sequence() * self.page_size;
        let alike = core::mem::discriminant(&self.keys) == core::mem::discriminant(&self.values);
        sizes
            && alike
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
    values: Vec<f32>,
    accumulated: Vec<f32>,
    best: Vec<f32>,
    total: Vec<f32>,
}

/// One piece of work of a sequence with one key-value head.
#[derive(Debug, Clone, Copy)]
enum Task {
    /// A row with some of its keys; the result is a partial one.
    Few(few::Part),
    /// Rows with all their keys.
    Many(many::Block),
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
        if i < n {
            let e = S::load_first(scores.add(i), n - i).sub(shift).exp();
            e.store_first(scores.add(i), n - i);
            total += S::load_first(scores.add(i), n - i).sum();
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

unsafe fn stored<C: Stored>(
    isa: Isa,
    p: &Paged<'_>,
    cells: (*const C, *const C),
    task: Task,
    to: (*mut f32, *mut f32),
    s: &mut Scratch,
) {
    // SAFETY: forwarded to the caller.
    unsafe {
        match task {
            Task::Few(part) => few::part::<C>(isa, p, cells, part, to.1.add(part.at), s),
            Task::Many(block) => many::block::<C>(isa, p, cells, block, to.0, s),
        }
    }
}

unsafe fn run(isa: Isa, p: &Paged<'_>, task: Task, to: (*mut f32, *mut f32), s: &mut Scratch) {
    // SAFETY: forwarded to the caller; storage types are transparent over their bits.
    unsafe {
        match (p.keys, p.values) {
            (Cells::F32(k), Cells::F32(v)) => {
                stored::<f32>(isa, p, (k.as_ptr(), v.as_ptr()), task, to, s);
            }
            (Cells::F16(k), Cells::F16(v)) => {
                stored::<F16>(isa, p, (k.as_ptr().cast(), v.as_ptr().cast()), task, to, s);
            }
            (Cells::Bf16(k), Cells::Bf16(v)) => {
                stored::<Bf16>(isa, p, (k.as_ptr().cast(), v.as_ptr().cast()), task, to, s);
            }
            (Cells::Q8(k), Cells::Q8(v)) => {
                stored::<Q8>(isa, p, (k.as_ptr().cast(), v.as_ptr().cast()), task, to, s);
            }
            (Cells::Q4(k), Cells::Q4(v)) => {
                stored::<Q4>(isa, p, (k.as_ptr().cast(), v.as_ptr().cast()), task, to, s);
            }
            _ => {}
        }
    }
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
    let mut pieces = Vec::new();
    let mut at = 0;
    for (sequence, bounds) in p.row_starts.windows(2).enumerate() {
        let (start, end) = (bounds[0] as usize, bounds[1] as usize);
        if end - start >= MANY_ROWS && !p.keeps_rows_apart {
            let block_rows = many::block_rows(p.group());
            for first_row in (start..end).step_by(block_rows) {
                let rows = block_rows.min(end - first_row);
                tasks.extend((0..p.kv_heads).map(|kv_head| {
                    Task::Many(many::Block {
                        sequence,
                        first_row,
                        rows,
                        kv_head,
                    })
                }));
            }
            continue;
        }
        for (row, kv_head) in (start..end).flat_map(|row| (0..p.kv_heads).map(move |h| (row, h))) {
            let position = p.positions[row] as usize;
            let from = at;
            for (first, last) in few::cut(p.first_key(position), position + 1) {
                tasks.push(Task::Few(few::Part {
                    sequence,
                    row,
                    kv_head,
                    first,
                    last,
                    at,
                }));
                at += few::partial_len(p);
            }
            pieces.push((row, kv_head, from..at));
        }
    }
    // Later blocks of a sequence see more keys: the long ones go first.
    tasks.reverse();
    let mut partials = vec![0.0f32; at];
    let to = (SendPtr(out.as_mut_ptr()), SendPtr(partials.as_mut_ptr()));
    let (to, tasks) = (&to, &tasks);
    let work: usize =
        p.positions.iter().map(|p| *p as usize + 1).sum::<usize>() * p.heads * (p.k_dim + p.v_dim);
    let one = |thread: usize, index: usize| {
        let mut scratch = scratch[thread]
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: `isa` was detected; `p` is valid; tasks write disjoint parts of both.
        unsafe { run(isa, p, tasks[index], (to.0.0, to.1.0), &mut scratch) };
    };
    // Waking the others for less than some tens of thousands of products costs more than it gains.
    let done = if work < 60_000 {
        let all = std::panic::AssertUnwindSafe(|| (0..tasks.len()).for_each(|index| one(0, index)));
        std::panic::catch_unwind(all).is_ok()
    } else {
        pool.share(tasks.len(), &one)
    };
    let width = p.group() * p.v_dim;
    for (row, kv_head, range) in pieces {
        let out = &mut out[(row * p.kv_heads + kv_head) * width..][..width];
        few::merge(p, kv_head, &partials[range], out);
    }
    done
}
