//! Products of one input with several weights, each followed on the same thread by what is done to
//! its result: biases, residuals, gated activations. Threads meet once for all of it.

use core::ops::Range;

use super::rows::{QUAD, Share};
use super::{Needs, Precision, Prepared, SendPtr, Target, run, takes};
use crate::Isa;
use crate::pool::Pool;

/// How rows of the weights are divided among threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// Weight after weight: a thread has rows of one or of some.
    InTurn,
    /// The same rows of every weight, all of which have as many.
    Abreast,
}

/// What targets hold while threads write them.
pub struct Results<'a> {
    outs: Vec<(SendPtr, usize)>,
    life: core::marker::PhantomData<&'a mut [f32]>,
}

impl Results<'_> {
    pub(crate) fn new(targets: &mut [Target<'_>]) -> Self {
        let outs = targets
            .iter_mut()
            .map(|t| (SendPtr(t.y.as_mut_ptr()), t.y.len()));
        Results {
            outs: outs.collect(),
            life: core::marker::PhantomData,
        }
    }

    /// First element of the result of a target; null where there is none.
    pub(crate) fn first(&self, target: usize) -> *mut f32 {
        self.outs
            .get(target)
            .map_or(core::ptr::null_mut(), |(out, _)| out.0)
    }

    /// Part of the result of a target.
    ///
    /// # Safety
    /// The range is of columns that were announced to this thread, and no other slice of it is in use.
    #[allow(
        clippy::mut_from_ref,
        reason = "exclusiveness is by range, which is the caller's promise"
    )]
    pub unsafe fn part(&self, target: usize, range: Range<usize>) -> &mut [f32] {
        let Some((out, len)) = self.outs.get(target) else {
            return &mut [];
        };
        let (start, end) = (range.start.min(*len), range.end.min(*len));
        // SAFETY: inside the target; exclusiveness is the caller's promise.
        unsafe { core::slice::from_raw_parts_mut(out.0.add(start), end.saturating_sub(start)) }
    }
}

/// Called on the thread that computed them, with the number of a target and columns of its result
/// that are complete; for [`Division::Abreast`] with 0 and columns that all results have complete.
pub type After<'a> = &'a (dyn Fn(&Results<'_>, usize, Range<usize>) + Sync);

/// As [`super::matmul`], with `after` for every range of columns. False when a kernel panicked.
///
/// # Panics
/// When shapes do not fit or a form is not one that [`takes`] says.
#[must_use]
pub fn matmul_then(
    (isa, precision): (Isa, Precision),
    pool: &mut Pool,
    x: &[f32],
    targets: &mut [Target<'_>],
    prepared: &mut Prepared,
    division: Division,
    after: After<'_>,
) -> bool {
    let Some((columns, rows)) = targets.first().map(|t| (t.w.columns(), t.w.rows())) else {
        return true;
    };
    let m = x.len() / columns;
    assert!(x.len() == m * columns);
    let mut needs = Needs::default();
    let mut total = 0;
    for t in targets.iter() {
        assert!(takes(m, &t.w) && t.w.columns() == columns && t.y.len() == m * t.w.rows());
        assert!(division == Division::InTurn || t.w.rows() == rows);
        needs.add(&t.w, precision);
        total += t.w.rows().next_multiple_of(QUAD);
    }
    if !prepared.fill(isa, precision, pool, x, columns, needs) {
        return false;
    }
    let results = Results::new(targets);
    let (results, targets, prepared) = (&results, &*targets, &*prepared);
    let part = |index: usize, range: Range<usize>| {
        let (Some(t), Some((out, _))) = (targets.get(index), results.outs.get(index)) else {
            return;
        };
        let share = Share {
            w: &t.w,
            x: prepared,
            first: range.start.min(t.w.rows()),
            last: range.end.min(t.w.rows()),
            y: out.0,
            stride: t.w.rows(),
        };
        // SAFETY: `isa` was detected; shapes were checked; ranges of threads are disjoint.
        unsafe { run(isa, precision, &share) };
    };
    // Below some tens of thousands of weights waking the others costs more than the work.
    let serial_below = |abreast: usize| 40_000 / (columns * abreast) + 1;
    match division {
        Division::Abreast => {
            let serial_below = serial_below(targets.len());
            pool.split(rows, QUAD, serial_below, &|range| {
                (0..targets.len()).for_each(|index| part(index, range.clone()));
                after(results, 0, range);
            })
        }
        Division::InTurn => pool.split(total, QUAD, serial_below(1), &|range| {
            let mut start = 0;
            for (index, t) in targets.iter().enumerate() {
                let own = |at: usize| at.saturating_sub(start).min(t.w.rows());
                let own = own(range.start)..own(range.end);
                start += t.w.rows().next_multiple_of(QUAD);
                if !own.is_empty() {
                    part(index, own.clone());
                    after(results, index, own);
                }
            }
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::matmul;
    use super::*;
    use crate::quantized::testing::{Numbers, parts};

    #[test]
    fn results_are_those_of_single_products_and_every_column_is_announced_once() {
        let mut numbers = Numbers(17);
        for (threads, rows) in [(1, 9), (2, 70), (3, 257)] {
            let mut pool = Pool::new(threads).unwrap();
            for (m, division) in [(1, Division::InTurn), (3, Division::Abreast)] {
                let columns = 192;
                let x = numbers.floats(m * columns);
                let sizes = match division {
                    Division::InTurn => [rows, rows + 5],
                    Division::Abreast => [rows, rows],
                };
                let weights = sizes.map(|rows| parts(&mut numbers, rows, columns, 4, 32));
                let matrix = |i: usize| weights[i].matrix(sizes[i], columns, 4, 32);
                let mut ys = sizes.map(|rows| vec![f32::NAN; m * rows]);
                let mut prepared = Prepared::default();
                let [first, second] = &mut ys;
                let mut targets = [
                    Target {
                        w: matrix(0),
                        y: first,
                    },
                    Target {
                        w: matrix(1),
                        y: second,
                    },
                ];
                let how = (Isa::best(), Precision::Exact);
                let seen = Mutex::new([vec![0; sizes[0]], vec![0; sizes[1]]]);
                let after = |_: &Results<'_>, index: usize, range: Range<usize>| {
                    seen.lock().unwrap()[index][range]
                        .iter_mut()
                        .for_each(|n| *n += 1);
                };
                let done = matmul_then(
                    how,
                    &mut pool,
                    &x,
                    &mut targets,
                    &mut prepared,
                    division,
                    &after,
                );
                assert!(done);
                let seen = seen.into_inner().unwrap();
                assert!(seen[0].iter().all(|n| *n == 1));
                let each = usize::from(division == Division::InTurn);
                assert!(seen[1].iter().all(|n| *n == each));
                for i in 0..2 {
                    let mut alone = vec![f32::NAN; m * sizes[i]];
                    let mut target = [Target {
                        w: matrix(i),
                        y: &mut alone,
                    }];
                    assert!(matmul(
                        how.0,
                        how.1,
                        &mut pool,
                        &x,
                        &mut target,
                        &mut prepared
                    ));
                    assert_eq!(ys[i], alone);
                }
            }
        }
    }
}
