//! Products of several inputs, each with a weight of its own, in one go: the experts of a mixture. A thread has the
//! same columns of all results, so that it can put together what belongs together when its part is done.

use core::ops::Range;

use super::joint::Results;
use super::rows::{QUAD, Share};
use super::{Needs, Precision, Prepared, Target, run, takes};
use crate::Isa;
use crate::pool::Pool;

/// Called once on every thread that has columns, when all results have them.
pub type AfterAll<'a> = &'a (dyn Fn(&Results<'_>, Range<usize>) + Sync);

/// As [`super::matmul`] for products with inputs of their own: target `i` is that of rows `inputs[of[i]]`. All weights
/// have as many rows; several targets may share an input. False when a kernel panicked.
///
/// # Panics
/// When shapes do not fit or a form is not one that [`takes`] says.
#[must_use]
pub fn matmul_grouped(
    (isa, precision): (Isa, Precision),
    pool: &mut Pool,
    (inputs, of): (&[&[f32]], &[usize]),
    targets: &mut [Target<'_>],
    prepared: &mut Vec<Prepared>,
    after: AfterAll<'_>,
) -> bool {
    let Some(rows) = targets.first().map(|t| t.w.rows()) else {
        return true;
    };
    assert!(of.len() == targets.len());
    let mut forms = vec![(0, Needs::default()); inputs.len()];
    let mut columns = 0;
    for (t, input) in targets.iter().zip(of) {
        let (width, needs) = &mut forms[*input];
        let m = inputs[*input].len() / t.w.columns();
        assert!(takes(m, &t.w) && t.w.rows() == rows && t.y.len() == m * rows);
        assert!(
            inputs[*input].len() == m * t.w.columns() && (*width == 0 || *width == t.w.columns())
        );
        *width = t.w.columns();
        needs.add(&t.w, precision);
        columns += t.w.columns();
    }
    if prepared.len() < inputs.len() {
        prepared.resize_with(inputs.len(), Prepared::default);
    }
    for ((x, (width, needs)), prepared) in inputs.iter().zip(forms).zip(prepared.iter_mut()) {
        if width > 0 && !prepared.fill(isa, precision, pool, x, width, needs) {
            return false;
        }
    }
    let results = Results::new(targets);
    let (results, targets, prepared) = (&results, &*targets, &*prepared);
    // Below some tens of thousands of weights waking the others costs more than the work.
    pool.split(rows, QUAD, 40_000 / columns + 1, &|range| {
        for ((index, t), input) in targets.iter().enumerate().zip(of) {
            let share = Share {
                w: &t.w,
                x: &prepared[*input],
                first: range.start,
                last: range.end,
                y: results.first(index),
                stride: rows,
            };
            // SAFETY: `isa` was detected; shapes were checked; ranges of threads are disjoint.
            unsafe { run(isa, precision, &share) };
        }
        after(results, range);
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::matmul;
    use super::*;
    use crate::quantized::testing::{Numbers, parts};

    #[test]
    fn results_are_those_of_single_products() {
        let mut numbers = Numbers(29);
        let precisions = [Precision::Exact, Precision::Int16, Precision::Int8];
        for (threads, rows, precision) in [(1, 9), (2, 70), (3, 131)]
            .into_iter()
            .flat_map(|(threads, rows)| precisions.map(|p| (threads, rows, p)))
        {
            let mut pool = Pool::new(threads).unwrap();
            let how = (Isa::best(), precision);
            // Inputs of some rows and widths; the first meets two weights of different forms.
            let widths = [192, 64, 192];
            let counts = [3, 1, 16];
            let xs: Vec<Vec<f32>> = (0..3)
                .map(|i| numbers.floats(widths[i] * counts[i]))
                .collect();
            let of = [0, 1, 0, 2];
            let forms = [(4, 32), (4, 64), (6, 16), (8, 32)];
            let weights: Vec<_> = of
                .iter()
                .zip(forms)
                .map(|(input, (bits, group))| {
                    parts(&mut numbers, rows, widths[*input], bits, group)
                })
                .collect();
            let matrix = |i: usize| {
                let (bits, group) = forms[i];
                weights[i].matrix(rows, widths[of[i]], bits, group)
            };
            let mut ys: Vec<Vec<f32>> = of.map(|i| vec![f32::NAN; counts[i] * rows]).into();
            let mut targets: Vec<Target<'_>> = ys
                .iter_mut()
                .enumerate()
                .map(|(i, y)| Target { w: matrix(i), y })
                .collect();
            let inputs: Vec<&[f32]> = xs.iter().map(Vec::as_slice).collect();
            let seen = Mutex::new(vec![0; rows]);
            let done = matmul_grouped(
                how,
                &mut pool,
                (&inputs, &of),
                &mut targets,
                &mut Vec::new(),
                &|_, range| seen.lock().unwrap()[range].iter_mut().for_each(|n| *n += 1),
            );
            assert!(done);
            assert!(seen.into_inner().unwrap().iter().all(|n| *n == 1));
            for (i, y) in ys.iter().enumerate() {
                let mut alone = vec![f32::NAN; y.len()];
                let mut target = [Target {
                    w: matrix(i),
                    y: &mut alone,
                }];
                let mut prepared = Prepared::default();
                let x = inputs[of[i]];
                assert!(matmul(
                    how.0,
                    how.1,
                    &mut pool,
                    x,
                    &mut target,
                    &mut prepared
                ));
                assert_eq!(*y, alone, "{i}");
            }
        }
    }
}
