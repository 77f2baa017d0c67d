//! States that move on with every row: short convolution and gated delta rule, in place in their pool.
//!
//! Plain loops over contiguous rows, which the compiler turns into vectors of each instruction set.
//! Work is split by heads and channels, never by sequences or rows: several sequences of padding may
//! write to one slot, and a state has to see its rows in order.

#![expect(
    clippy::extra_unused_type_parameters,
    reason = "kernels are named by the instruction set that the dispatch compiles them for"
)]

use crate::isa::dispatch;
use crate::simd::Simd;
use crate::{Isa, Pool};

/// Which states a step reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct States<'a> {
    /// Slot that every sequence starts from; -1 starts from zeros.
    pub sources: &'a [i32],
    /// Slot that takes every sequence's state.
    pub targets: &'a [i32],
    /// Boundaries of the sequences' rows, one more than there are sequences.
    pub row_starts: &'a [u32],
    /// Slots of the pool.
    pub slots: usize,
}

impl States<'_> {
    /// Whether slots and rows exist.
    pub fn is_valid(&self, rows: usize) -> bool {
        let n = self.sources.len();
        let below = |slot: &i32| usize::try_from(*slot).is_ok_and(|slot| slot < self.slots);
        self.targets.len() == n
            && self.row_starts.len() == n + 1
            && self.row_starts.first() == Some(&0)
            && self.row_starts.is_sorted()
            && self
                .row_starts
                .last()
                .is_some_and(|end| *end as usize <= rows)
            && self.targets.iter().all(below)
            && self.sources.iter().all(|slot| *slot == -1 || below(slot))
    }

    /// Source, target and rows of every sequence.
    fn each(&self) -> impl Iterator<Item = (Option<usize>, usize, core::ops::Range<usize>)> + '_ {
        let rows = self
            .row_starts
            .windows(2)
            .map(|pair| pair[0] as usize..pair[1] as usize);
        let slots = self.sources.iter().zip(self.targets);
        slots
            .zip(rows)
            .map(|((source, target), rows)| (usize::try_from(*source).ok(), *target as usize, rows))
    }
}

/// Inputs of the gated delta rule, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Delta<'a> {
    /// `[T, Hk, Dk]`.
    pub q: &'a [f32],
    /// `[T, Hk, Dk]`.
    pub k: &'a [f32],
    /// `[T, Hv, Dv]`.
    pub v: &'a [f32],
    /// Log decay, `[T, Hv]` or `[T, Hv, Dk]`.
    pub g: &'a [f32],
    /// `[T, Hv]`.
    pub beta: &'a [f32],
    /// Slots and rows.
    pub states: States<'a>,
    /// Hk.
    pub key_heads: usize,
    /// Hv.
    pub heads: usize,
    /// Dk.
    pub key_dim: usize,
    /// Dv.
    pub dim: usize,
}

impl Delta<'_> {
    /// Whether the lengths fit together.
    pub fn is_valid(&self, pool: usize) -> bool {
        let rows = self.beta.len() / self.heads.max(1);
        let keys = rows * self.key_heads * self.key_dim;
        self.key_heads > 0
            && self.dim > 0
            && self.key_dim > 0
            && self.heads.is_multiple_of(self.key_heads)
            && self.q.len() == keys
            && self.k.len() == keys
            && self.v.len() == rows * self.heads * self.dim
            && (self.g.len() == self.beta.len() || self.g.len() == self.beta.len() * self.key_dim)
            && pool == self.states.slots * self.heads * self.key_dim * self.dim
            && self.states.is_valid(rows)
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

/// Runs the rule: writes `out` `[T, Hv, Dv]` and the states in `pool` `[slots, Hv, Dk, Dv]`. False when
/// a thread panicked.
#[must_use]
pub fn gated_delta(
    isa: Isa,
    pool: &mut Pool,
    delta: &Delta<'_>,
    states: &mut [f32],
    out: &mut [f32],
) -> bool {
    assert!(delta.is_valid(states.len()) && out.len() == delta.v.len());
    let covered = delta
        .states
        .row_starts
        .last()
        .map_or(0, |end| *end as usize);
    out[covered * delta.heads * delta.dim..].fill(0.0);
    let (states, out) = (SendPtr(states.as_mut_ptr()), SendPtr(out.as_mut_ptr()));
    pool.share(delta.heads, &|_, head| {
        // SAFETY: `isa` was detected; lengths were checked; a head's states and results are its own.
        unsafe { one_head(isa, delta, head, states.get(), out.get()) }
    })
}

dispatch! {
    /// One head of all sequences.
    unsafe fn one_head(delta: &Delta<'_>, head: usize, states: *mut f32, out: *mut f32) = head_kernel
}

/// # Safety
/// `states` and `out` are as long as `delta` says, and nobody else touches this head's parts.
#[inline(always)]
unsafe fn head_kernel<S: Simd>(delta: &Delta<'_>, head: usize, states: *mut f32, out: *mut f32) {
    let Delta {
        heads,
        key_dim,
        dim,
        ..
    } = *delta;
    let size = key_dim * dim;
    let key_head = head / (heads / delta.key_heads);
    let decays = delta.g.len() / delta.beta.len().max(1);
    let mut change = vec![0.0f32; dim];
    for (source, target, rows) in delta.states.each() {
        let at = |slot: usize| (slot * heads + head) * size;
        // SAFETY: slots were checked; the two parts are the same or apart.
        let state = unsafe {
            let to = states.add(at(target));
            match source {
                None => to.write_bytes(0, size),
                Some(slot) if slot != target => {
                    to.copy_from_nonoverlapping(states.add(at(slot)), size)
                }
                Some(_) => {}
            }
            core::slice::from_raw_parts_mut(to, size)
        };
        for row in rows {
            let own = row * heads + head;
            let keys = (row * delta.key_heads + key_head) * key_dim;
            let (q, k) = (
                &delta.q[keys..keys + key_dim],
                &delta.k[keys..keys + key_dim],
            );
            let v = &delta.v[own * dim..(own + 1) * dim];
            let g = &delta.g[own * decays..(own + 1) * decays];
            let beta = delta.beta[own];
            // SAFETY: rows were checked.
            let y = unsafe { core::slice::from_raw_parts_mut(out.add(own * dim), dim) };
            change.fill(0.0);
            let whole = g[0].exp();
            for (i, line) in state.chunks_exact_mut(dim).enumerate() {
                let decay = if decays == 1 { whole } else { g[i].exp() };
                let key = k[i];
                for (s, c) in line.iter_mut().zip(change.iter_mut()) {
                    *s *= decay;
                    *c += key * *s;
                }
            }
            for (c, v) in change.iter_mut().zip(v) {
                *c = beta * (*v - *c);
            }
            y.fill(0.0);
            for (line, (k, q)) in state.chunks_exact_mut(dim).zip(k.iter().zip(q)) {
                for ((s, c), y) in line.iter_mut().zip(&change).zip(y.iter_mut()) {
                    *s += k * c;
                    *y += q * *s;
                }
            }
        }
    }
}

/// Inputs of a short convolution.
#[derive(Debug, Clone, Copy)]
pub struct Conv<'a> {
    /// `[T, C]`.
    pub x: &'a [f32],
    /// `[C, K]`.
    pub weight: &'a [f32],
    /// `[C]`, or empty.
    pub bias: &'a [f32],
    /// Slots and rows.
    pub states: States<'a>,
    /// C.
    pub channels: usize,
    /// K, at least 2.
    pub taps: usize,
    /// The result goes through SiLU.
    pub silu: bool,
}

impl Conv<'_> {
    /// Whether the lengths fit together.
    pub fn is_valid(&self, pool: usize) -> bool {
        self.channels > 0
            && self.taps > 1
            && self.x.len().is_multiple_of(self.channels)
            && self.weight.len() == self.channels * self.taps
            && (self.bias.is_empty() || self.bias.len() == self.channels)
            && pool == self.states.slots * (self.taps - 1) * self.channels
            && self.states.is_valid(self.x.len() / self.channels)
    }
}

/// Channels of one task.
const CHANNELS: usize = 256;

/// Convolves: writes `out` `[T, C]` and the states in `pool` `[slots, K - 1, C]`. False when a thread
/// panicked.
#[must_use]
pub fn short_conv(
    isa: Isa,
    pool: &mut Pool,
    conv: &Conv<'_>,
    states: &mut [f32],
    out: &mut [f32],
) -> bool {
    assert!(conv.is_valid(states.len()) && out.len() == conv.x.len());
    let covered = conv.states.row_starts.last().map_or(0, |end| *end as usize);
    out[covered * conv.channels..].fill(0.0);
    let (states, out) = (SendPtr(states.as_mut_ptr()), SendPtr(out.as_mut_ptr()));
    pool.share(conv.channels.div_ceil(CHANNELS), &|_, block| {
        let first = block * CHANNELS;
        let width = CHANNELS.min(conv.channels - first);
        // SAFETY: `isa` was detected; lengths were checked; a block's channels are its own.
        unsafe { one_block(isa, conv, first, width, states.get(), out.get()) }
    })
}

dispatch! {
    /// Some channels of all sequences.
    unsafe fn one_block(conv: &Conv<'_>, first: usize, width: usize, states: *mut f32, out: *mut f32) = block_kernel
}

/// # Safety
/// `states` and `out` are as long as `conv` says, and nobody else touches these channels.
#[inline(always)]
unsafe fn block_kernel<S: Simd>(
    conv: &Conv<'_>,
    first: usize,
    width: usize,
    states: *mut f32,
    out: *mut f32,
) {
    let Conv {
        channels, taps, x, ..
    } = *conv;
    let before = taps - 1;
    // Tap by tap, so that channels lie side by side.
    let mut weight = vec![0.0f32; taps * width];
    for tap in 0..taps {
        for c in 0..width {
            weight[tap * width + c] = conv.weight[(first + c) * taps + tap];
        }
    }
    let mut held = vec![0.0f32; before * width];
    for (source, target, rows) in conv.states.each() {
        for (i, line) in held.chunks_exact_mut(width).enumerate() {
            match source {
                None => line.fill(0.0),
                // SAFETY: slots were checked; reads this block's channels only.
                Some(slot) => line.copy_from_slice(unsafe {
                    core::slice::from_raw_parts(
                        states.add((slot * before + i) * channels + first),
                        width,
                    )
                }),
            }
        }
        // Row `place` of what the sequence has seen: its state, then its rows.
        let seen = |place: usize| match place.checked_sub(before) {
            None => &held[place * width..(place + 1) * width],
            Some(row) => &x[(rows.start + row) * channels + first..][..width],
        };
        for (place, row) in rows.clone().enumerate() {
            // SAFETY: rows were checked; writes this block's channels only.
            let y =
                unsafe { core::slice::from_raw_parts_mut(out.add(row * channels + first), width) };
            match conv.bias.get(first..first + width) {
                Some(bias) => y.copy_from_slice(bias),
                None => y.fill(0.0),
            }
            for (tap, weight) in weight.chunks_exact(width).enumerate() {
                for ((y, w), x) in y.iter_mut().zip(weight).zip(seen(place + tap)) {
                    *y += w * x;
                }
            }
            if conv.silu {
                for y in y.iter_mut() {
                    *y /= 1.0 + (-*y).exp();
                }
            }
        }
        for i in 0..before {
            let line = seen(rows.len() + i);
            // SAFETY: slots were checked; `held` and `x` are elsewhere.
            unsafe {
                states
                    .add((target * before + i) * channels + first)
                    .copy_from_nonoverlapping(line.as_ptr(), width);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 + seed * 101) % 97) as f32 / 97.0 - 0.5)
            .collect()
    }

    /// Two sequences, the second from zeros, in one step and row by row: equal to the last bit, on every
    /// instruction set.
    #[test]
    fn steps_of_any_size_give_the_same_bits() {
        let (key_heads, heads, key_dim, dim, rows) = (2, 4, 5, 19, 7);
        let (q, k) = (
            numbers(rows * key_heads * key_dim, 1),
            numbers(rows * key_heads * key_dim, 2),
        );
        let (v, g) = (numbers(rows * heads * dim, 3), numbers(rows * heads, 4));
        let beta = numbers(rows * heads, 5);
        let start = numbers(3 * heads * key_dim * dim, 6);
        let mut pool = Pool::new(2).unwrap();
        let mut run = |isa: Isa,
                       states: &mut Vec<f32>,
                       from: usize,
                       to: usize,
                       sources: &[i32],
                       starts: &[u32]| {
            let part =
                |list: &[f32]| list[list.len() / rows * from..list.len() / rows * to].to_vec();
            let (q, k, v, g, beta) = (part(&q), part(&k), part(&v), part(&g), part(&beta));
            let delta = Delta {
                q: &q,
                k: &k,
                v: &v,
                g: &g,
                beta: &beta,
                states: States {
                    sources,
                    targets: &[1, 2],
                    row_starts: starts,
                    slots: 3,
                },
                key_heads,
                heads,
                key_dim,
                dim,
            };
            let mut out = vec![9.0; v.len()];
            assert!(gated_delta(isa, &mut pool, &delta, states, &mut out));
            out
        };
        let mut want = None;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut whole = start.clone();
            let all = run(isa, &mut whole, 0, rows, &[1, -1], &[0, 4, 7]);
            let mut steps = start.clone();
            let mut parts = run(isa, &mut steps, 0, 4, &[1, -1], &[0, 4, 4]);
            for row in 4..rows {
                let source = [1, if row == 4 { -1 } else { 2 }];
                parts.extend(run(isa, &mut steps, row, row + 1, &source, &[0, 0, 1]));
            }
            assert_eq!((&all, &whole), (&parts, &steps), "{}", isa.name());
            let (all_want, whole_want) = want.get_or_insert((all.clone(), whole.clone()));
            assert_eq!((&all, &whole), (&*all_want, &*whole_want), "{}", isa.name());
        }
    }

    /// Sums of the rule in f64, a sequence after the other: results, and states but for those of slot 0.
    fn expected(delta: &Delta<'_>, pool: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let (keys, size) = (delta.key_dim, delta.key_dim * delta.dim);
        let mut states: Vec<f64> = pool.iter().map(|x| f64::from(*x)).collect();
        let mut out = vec![0.0; delta.v.len()];
        let lines = delta.states.each().collect::<Vec<_>>();
        for (head, (source, target, rows)) in
            (0..delta.heads).flat_map(|head| lines.iter().map(move |line| (head, line)))
        {
            let at = |slot: usize| (slot * delta.heads + head) * size;
            let mut s = match *source {
                Some(slot) => states[at(slot)..at(slot) + size].to_vec(),
                None => vec![0.0; size],
            };
            for row in rows.clone() {
                let own = row * delta.heads + head;
                let key_head = row * delta.key_heads + head * delta.key_heads / delta.heads;
                let key = |of: &[f32], i: usize| f64::from(of[key_head * keys + i]);
                let decays = delta.g.len() / delta.beta.len();
                for (i, line) in s.chunks_exact_mut(delta.dim).enumerate() {
                    let g = delta.g[own * decays + i % decays];
                    line.iter_mut().for_each(|x| *x *= f64::from(g).exp());
                }
                for d in 0..delta.dim {
                    let recalled: f64 = (0..keys)
                        .map(|i| key(delta.k, i) * s[i * delta.dim + d])
                        .sum();
                    let new = f64::from(delta.v[own * delta.dim + d]) - recalled;
                    for i in 0..keys {
                        s[i * delta.dim + d] += key(delta.k, i) * f64::from(delta.beta[own]) * new;
                        out[own * delta.dim + d] += key(delta.q, i) * s[i * delta.dim + d];
                    }
                }
            }
            states[at(*target)..at(*target) + size].copy_from_slice(&s);
        }
        (out, states.split_off(delta.heads * size))
    }

    /// Sequences of several lengths, of none, and two of padding in one slot; what is no number in one of them stays
    /// there.
    #[test]
    fn ragged_steps_match_f64() {
        let (key_heads, heads, key_dim, dim, rows) = (2, 6, 5, 19, 9);
        let mut v = numbers(rows * heads * dim, 3);
        let keys = numbers(rows * key_heads * key_dim, 2);
        let mut pool = Pool::new(2).unwrap();
        for (bad, decays) in [(0.25, 1), (f32::NAN, key_dim), (f32::INFINITY, 1)] {
            // In the second sequence.
            v[5 * heads * dim] = bad;
            let g = numbers(rows * heads * decays, 4);
            let delta = Delta {
                q: &numbers(rows * key_heads * key_dim, 1),
                k: &keys,
                v: &v,
                g: &g,
                beta: &numbers(rows * heads, 5),
                states: States {
                    sources: &[1, -1, 3, -1, -1],
                    targets: &[4, 2, 1, 0, 0],
                    row_starts: &[0, 4, 6, 6, 7, 8],
                    slots: 5,
                },
                key_heads,
                heads,
                key_dim,
                dim,
            };
            let start = numbers(5 * heads * key_dim * dim, 6);
            let want = expected(&delta, &start);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let (mut states, mut out) = (start.clone(), vec![9.0; v.len()]);
                assert!(gated_delta(isa, &mut pool, &delta, &mut states, &mut out));
                let states = &states[heads * key_dim * dim..];
                let got = out.iter().chain(states);
                for (i, (got, want)) in got.zip(want.0.iter().chain(&want.1)).enumerate() {
                    let got = f64::from(*got);
                    let alike = (got - want).abs() < 1e-5
                        || got == *want
                        || (!got.is_finite() && !want.is_finite());
                    assert!(alike, "{} {bad} {i}: {got} {want}", isa.name());
                }
                assert_eq!(bad.is_finite(), out.iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn a_convolution_sees_the_rows_before_and_keeps_the_last() {
        let conv = Conv {
            x: &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0],
            weight: &[1.0, 2.0, 4.0, 0.5, 0.0, 1.0],
            bias: &[100.0, 0.0],
            states: States {
                sources: &[1, -1],
                targets: &[2, 1],
                row_starts: &[0, 2, 3],
                slots: 3,
            },
            channels: 2,
            taps: 3,
            silu: false,
        };
        // Slot 1 holds the rows [5, 6] and [7, 8]; the second sequence's slot is only written.
        let mut states = vec![0.0, 0.0, 0.0, 0.0, 5.0, 6.0, 7.0, 8.0, 0.0, 0.0, 0.0, 0.0];
        let mut out = vec![0.0; 6];
        let separate = Conv {
            states: States {
                targets: &[2, 0],
                ..conv.states
            },
            ..conv
        };
        assert!(short_conv(
            Isa::Portable,
            &mut Pool::new(1).unwrap(),
            &separate,
            &mut states,
            &mut out
        ));
        assert_eq!(
            out,
            [
                100.0 + 5.0 + 14.0 + 4.0,
                3.0 + 10.0,
                100.0 + 7.0 + 2.0 + 8.0,
                4.0 + 20.0,
                112.0,
                30.0
            ]
        );
        assert_eq!(states[8..], [1.0, 10.0, 2.0, 20.0]);
        assert_eq!(states[..4], [0.0, 0.0, 3.0, 30.0]);
    }

    #[test]
    fn impossible_slots_and_rows_are_refused() {
        let states =
            |sources: &'static [i32], targets: &'static [i32], row_starts: &'static [u32]| States {
                sources,
                targets,
                row_starts,
                slots: 2,
            };
        assert!(states(&[-1], &[1], &[0, 3]).is_valid(3));
        for bad in [
            states(&[-2], &[1], &[0, 3]),
            states(&[2], &[1], &[0, 3]),
            states(&[0], &[2], &[0, 3]),
            states(&[0], &[1], &[0, 4]),
            states(&[0], &[1], &[1, 3]),
            states(&[0, 0], &[1], &[0, 3]),
        ] {
            assert!(!bad.is_valid(3), "{bad:?}");
        }
    }
}
