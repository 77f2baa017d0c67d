//! Attention over a paged pool in its less common forms (nothing appended, latent keys, chosen keys),
//! and the choice of keys.
//!
//! Plain loops that the compiler turns into vectors of each instruction set. A task is a row and some
//! of its heads: each key is read, and widened to f32, once for all of them. What a row gets depends on
//! that row alone.

/// Matches cells that are all of one type of storage, under the names given, and runs the body for
/// that type. Needs `Cells` and the types in scope.
macro_rules! by_type {
    ($cells:expr, [$($units:ident),+] as $C:ident => $body:expr $(, else $other:expr)?) => {
        match $cells {
            [$(Cells::F32($units)),+] => {
                type $C = f32;
                $body
            }
            [$(Cells::F16($units)),+] => {
                type $C = F16;
                $body
            }
            [$(Cells::Bf16($units)),+] => {
                type $C = Bf16;
                $body
            }
            [$(Cells::Q8($units)),+] => {
                type $C = Q8;
                $body
            }
            [$(Cells::Q4($units)),+] => {
                type $C = Q4;
                $body
            }
            $(_ => $other,)?
        }
    };
}

mod attend;
mod index;
#[cfg(test)]
mod tests;

pub use attend::{Attend, attend};
pub use index::{Index, index};

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

/// Where tasks write.
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
