//! Products of one `x` with several weights: it is rounded once for those that are alike, whose panels are handed out
//! together.

use std::sync::{Mutex, PoisonError};

use super::{Job, Scratch, middle, panel_rows, run};
use crate::Isa;
use crate::pool::Pool;
use crate::qmatmul::{Needs, Precision, Prepared, Results, Target};
use crate::quantized::QuantizedMatrix;

/// Whether one rounding of `x` serves both weights.
fn is_alike(a: &QuantizedMatrix<'_>, b: &QuantizedMatrix<'_>) -> bool {
    (a.columns(), a.group(), middle(a)) == (b.columns(), b.group(), middle(b))
}

/// `y = x @ w.T` for several weights. False when a kernel panicked.
///
/// # Panics
/// When shapes do not fit, `precision` is exact, or `scratch` has fewer entries than the pool threads.
#[must_use]
pub fn matmul_all(
    (isa, precision): (Isa, Precision),
    pool: &mut Pool,
    x: &[f32],
    targets: &mut [Target<'_>],
    prepared: &mut Prepared,
    scratch: &[Mutex<Scratch>],
) -> bool {
    let Some(first) = targets.first().map(|t| t.w) else {
        return true;
    };
    let m = x.len() / first.columns();
    assert!(x.len() == m * first.columns());
    assert!(scratch.len() >= pool.threads() && precision != Precision::Exact);
    for t in targets.iter() {
        assert!(t.w.columns() == first.columns() && t.y.len() == m * t.w.rows());
    }
    let results = Results::new(targets);
    let (results, targets) = (&results, &*targets);
    let lanes = panel_rows(isa, precision);
    let mut is_done = vec![false; targets.len()];
    while let Some(next) = is_done.iter().position(|is_done| !is_done) {
        let kind = targets[next].w;
        let alike: Vec<usize> = (next..targets.len())
            .filter(|i| is_alike(&targets[*i].w, &kind))
            .collect();
        alike.iter().for_each(|i| is_done[*i] = true);
        let mut needs = Needs {
            panel: true,
            middle: middle(&kind),
            ..Needs::default()
        };
        needs.add_sums(kind.group());
        if !prepared.fill(isa, precision, pool, x, kind.columns(), needs) {
            return false;
        }
        let prepared = &*prepared;
        let panels = |target: usize| targets[target].w.rows().div_ceil(lanes);
        let all = alike.iter().map(|target| panels(*target)).sum();
        let done = pool.share(all, &|thread, index| {
            let mut index = index;
            for target in &alike {
                let (w, own) = (&targets[*target].w, panels(*target));
                if index >= own {
                    index -= own;
                    continue;
                }
                let first = index * lanes;
                let job = Job {
                    isa,
                    w,
                    x: prepared,
                    first,
                    n: lanes.min(w.rows() - first),
                    y: results.first(*target),
                };
                let mut scratch = scratch[thread]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                // SAFETY: `isa` was detected; shapes were checked; columns of panels are disjoint.
                unsafe {
                    match precision {
                        Precision::Int8 => run::<i8>(isa, job, &mut scratch),
                        _ => run::<i16>(isa, job, &mut scratch),
                    }
                }
                return;
            }
        });
        if !done {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::matmul;
    use super::*;
    use crate::quantized::testing::{Numbers, parts};

    #[test]
    fn results_are_those_of_single_products() {
        let mut numbers = Numbers(47);
        let mut pool = Pool::new(2).unwrap();
        let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
        let (m, columns) = (37, 192);
        let x = numbers.floats(m * columns);
        // Two that are alike around one of another group, and one of another middle.
        let forms = [(70, 5, 32), (33, 6, 16), (131, 5, 32), (9, 8, 32)];
        let weights =
            forms.map(|(rows, bits, group)| parts(&mut numbers, rows, columns, bits, group));
        let matrix = |i: usize| {
            let (rows, bits, group) = forms[i];
            weights[i].matrix(rows, columns, bits, group)
        };
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for precision in [Precision::Int8, Precision::Int16] {
                let mut ys = forms.map(|(rows, ..)| vec![f32::NAN; m * rows]);
                let mut targets: Vec<_> = ys
                    .iter_mut()
                    .enumerate()
                    .map(|(i, y)| Target { w: matrix(i), y })
                    .collect();
                let mut prepared = Prepared::default();
                assert!(matmul_all(
                    (isa, precision),
                    &mut pool,
                    &x,
                    &mut targets,
                    &mut prepared,
                    &scratch
                ));
                for (i, y) in ys.iter().enumerate() {
                    let mut alone = vec![f32::NAN; y.len()];
                    assert!(matmul(
                        isa,
                        precision,
                        &mut pool,
                        &x,
                        &matrix(i),
                        &mut alone,
                        &mut prepared,
                        &scratch
                    ));
                    assert_eq!(*y, alone, "{} {i}", isa.name());
                }
            }
        }
    }
}
