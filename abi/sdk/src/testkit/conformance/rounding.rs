//! How far rounded activations may take a result from the reference.
//!
//! A backend may be opened such that it rounds the activations of products with quantised weights on purpose (ADR 9): in a row of
//! activations each 32 neighbours become whole numbers of steps of `M / L`, where M is the largest of their magnitudes, and L is 127 for 8
//! bits and 32,767 for 16. Each is then off by at most half a step, `h * M` with `h = 1 / (2 L)`, and a sum `y = sum x_i w_i` by `sum e_i w_i`.
//!
//! *Product.* Where a number lies within its step is as good as random, so that `e_i` is spread evenly over `[-h M_i, h M_i]`, and
//! `E exp(t e_i) = sinh(t h M_i) / (t h M_i) <= exp(t^2 h^2 M_i^2 / 6)`. By Chernoff's bound a sum is then off by more than
//! `DEVIATION * h * R`, `R^2 = sum M_i^2 w_i^2`, with a probability below 1e-9. R is what is called the *reach* here: the largest activations of
//! the groups times the size of the weights times the root of how many there are. (What is certain, `h * sum M_i |w_i|`, grows with their
//! number itself, and lets wrong scales pass.)
//!
//! *Gated block.* `y = sum d_i a(g_i) u_i`, where g and u are such products of one x, and a is an activation function with `|a(g)| <= |g|` and
//! `|a'| <= SLOPE`. To first order an inner element is off by `a'(g_i) u_i e(g_i) + a(g_i) e(u_i)`, whose reaches add up as squares, since the
//! weights of the two are independent; so are those of different inner elements, and the last product adds their squares with those of its weights. Its
//! own activations are rounded too: the reach of that product is one more term.
//!
//! *Mixture.* Blocks of different experts have different weights: their reaches times their shares add up as squares.
//!
//! Sums, norms and biases after a product keep its error. A norm before one changes what is rounded, which is measured behind the norm.

use crate::testkit::conformance::array::Array;
use crate::{Result, Tensor};

/// `sqrt(2 ln(2 / p) / 3)` for p = 1e-9: what a sum of errors keeps within, in half steps times its reach.
const DEVIATION: f64 = 3.78;

/// No activation function of a gate is steeper: 1.13 for both forms of gelu, 1.10 for silu.
const SLOPE: f64 = 1.13;

/// Activations that share a step.
pub(super) const GROUP: usize = 32;

/// To what a backend rounds the activations of products with quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To 16 bits, in steps of 1/32,767 of the largest of 32.
    Sixteen,
    /// To 8 bits, in steps of 1/127 of the largest of 32.
    Eight,
}

impl Rounding {
    /// Steps from 0 to the largest activation of a group.
    pub(super) fn limit(self) -> f64 {
        match self {
            Self::Sixteen => 32_767.0,
            Self::Eight => 127.0,
        }
    }

    /// The error that a result of this reach may have.
    pub(super) fn allowed(self, reach: f64) -> f64 {
        DEVIATION * reach / (2.0 * self.limit())
    }
}

/// What the rows of a tensor measure, each the largest of all rows. Rows with a NaN are left out: they must give NaN.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Rows {
    /// Root of the sum of squares.
    pub(super) norm: f64,
    /// Root of the mean square.
    size: f64,
    /// Root of the mean square of the largest of each group, which stands for all of it.
    peak: f64,
}

impl Rows {
    pub(super) fn of(tensor: &Tensor) -> Result<Self> {
        let read = Array::read(tensor)?;
        Ok(Self::of_numbers(&read.0.reals(), read.0.last_dim()))
    }

    fn of_numbers(numbers: &[f64], width: usize) -> Self {
        let root_mean = |squares: f64, count: usize| (squares / count.max(1) as f64).sqrt();
        let rows = numbers.chunks(width.max(1));
        rows.filter(|row| row.iter().all(|x| x.is_finite()))
            .fold(Self::default(), |rows, row| {
                let square: f64 = row.iter().map(|x| x * x).sum();
                let largest = |group: &[f64]| group.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
                let peaks: f64 = row.chunks(GROUP).map(|group| largest(group).powi(2)).sum();
                Self {
                    norm: rows.norm.max(square.sqrt()),
                    size: rows.size.max(root_mean(square, row.len())),
                    peak: rows.peak.max(root_mean(peaks, row.len().div_ceil(GROUP))),
                }
            })
    }
}

/// A weight of which the suite knows the rows, and whether activations are rounded beside it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weight {
    pub(super) rows: Rows,
    pub(super) is_quantised: bool,
}

impl Weight {
    /// One that is not quantised, `[.., rows, columns]`.
    pub(super) fn plain(weight: &Tensor) -> Result<Self> {
        Ok(Self {
            rows: Rows::of(weight)?,
            is_quantised: false,
        })
    }

    /// Reach of `x @ w.T`.
    pub(super) fn reach(&self, x: &Rows) -> f64 {
        match self.is_quantised {
            true => x.peak * self.rows.norm,
            false => 0.0,
        }
    }
}

/// A gated block: what comes in, what the first products give, and what goes into the last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    x: Rows,
    gate: Rows,
    up: Rows,
    inner: Rows,
    /// Of gate, up and down.
    weights: [Weight; 3],
}

impl Block {
    /// Measures a block whose first products are known, by the backend that they are on.
    pub(super) fn of(
        x: &Tensor,
        gate: &Tensor,
        up: &Tensor,
        kind: u32,
        weights: [Weight; 3],
    ) -> Result<Self> {
        Ok(Self {
            x: Rows::of(x)?,
            gate: Rows::of(gate)?,
            up: Rows::of(up)?,
            inner: Rows::of(&gate.glu(kind, up)?)?,
            weights,
        })
    }

    pub(super) fn reach(&self) -> f64 {
        let [gate, up, down] = &self.weights;
        let of_gate = SLOPE * self.up.size * gate.reach(&self.x);
        let of_up = self.gate.size * up.reach(&self.x);
        let before = down.rows.norm * of_gate.hypot(of_up);
        before.hypot(down.reach(&self.inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reach_grows_with_the_root_of_the_terms() {
        // Rows of 64 and 256 numbers of magnitude 2 beside weights of 0.5.
        let reach = |terms: usize| {
            let x = Rows::of_numbers(&vec![-2.0; terms], terms);
            let rows = Rows::of_numbers(&vec![0.5; terms], terms);
            let weight = Weight {
                rows,
                is_quantised: true,
            };
            weight.reach(&x)
        };
        assert_eq!((reach(64), reach(256)), (8.0, 16.0));
        assert_eq!(Rounding::Eight.allowed(8.0), DEVIATION * 8.0 / 254.0);
        assert_eq!(Rounding::Sixteen.allowed(8.0), DEVIATION * 8.0 / 65_534.0);
    }

    #[test]
    fn rows_are_measured_by_their_largest_groups() {
        let mut numbers = vec![1.0; 128];
        (numbers[5], numbers[40], numbers[70]) = (-7.0, 5.0, f64::NAN);
        let rows = Rows::of_numbers(&numbers, 64);
        let squares: f64 = 62.0 + 49.0 + 25.0;
        let want = Rows {
            norm: squares.sqrt(),
            size: (squares / 64.0).sqrt(),
            peak: 37f64.sqrt(),
        };
        assert_eq!(rows, want);
    }

    #[test]
    fn plain_weights_pass_errors_on_and_add_none() {
        let rows = |norm| Rows {
            norm,
            size: 2.0,
            peak: 3.0,
        };
        let weight = |norm, is_quantised| Weight {
            rows: rows(norm),
            is_quantised,
        };
        let of = |quantised: [bool; 3]| Block {
            x: rows(1.0),
            gate: rows(1.0),
            up: rows(1.0),
            inner: rows(1.0),
            weights: [
                weight(1.0, quantised[0]),
                weight(1.0, quantised[1]),
                weight(10.0, quantised[2]),
            ],
        };
        assert_eq!(of([false; 3]).reach(), 0.0);
        assert_eq!(of([false, true, false]).reach(), 60.0);
        assert_eq!(of([false, false, true]).reach(), 30.0);
        assert_eq!(of([false, true, true]).reach(), 60f64.hypot(30.0));
    }
}
