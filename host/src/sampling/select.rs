//! Parts of a row without sorting all of it: the largest logit, the best tokens, the shortest head with a given weight.

use std::cmp::Ordering;

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: u32,
    pub(super) logit: f32,
}

/// Likelier first, lower id first among equals.
pub(super) fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Elements looked at together: enough for wide registers, small enough that a block without anything of interest is
/// passed by with one comparison.
const BLOCK: usize = 32;

/// The larger of two numbers that are no NaN, in the form that becomes one instruction.
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

fn block_max(block: &[f32]) -> f32 {
    block.iter().copied().fold(f32::NEG_INFINITY, larger)
}

/// The first logit that is NaN or +infinity.
pub(super) fn not_a_number(logits: &[f32]) -> Option<(u32, f32)> {
    let is_good = |value: f32| value < f32::INFINITY;
    let is_clean = logits.chunks(BLOCK).all(|block| {
        block
            .iter()
            .fold(true, |good, &value| good & is_good(value))
    });
    if is_clean {
        return None;
    }
    (0u32..)
        .zip(logits.iter().copied())
        .find(|(_, value)| !is_good(*value))
}

/// The largest logit, the lowest id among equals. None when all are -infinity.
pub(super) fn best(logits: &[f32]) -> Option<Candidate> {
    let mut best = Candidate {
        token: 0,
        logit: f32::NEG_INFINITY,
    };
    for (block, start) in logits.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
        if block_max(block) <= best.logit {
            continue;
        }
        for (&logit, token) in block.iter().zip(start..) {
            if logit > best.logit {
                best = Candidate { token, logit };
            }
        }
    }
    (best.logit > f32::NEG_INFINITY).then_some(best)
}

/// Fills `out` with the tokens whose logit is at least `least`, lowest id first. Never one of -infinity.
pub(super) fn at_least(logits: &[f32], least: f32, out: &mut Vec<Candidate>) {
    out.clear();
    let least = larger(least, f32::MIN);
    for (block, start) in logits.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
        if block_max(block) < least {
            continue;
        }
        let alive = block
            .iter()
            .zip(start..)
            .filter(|(logit, _)| **logit >= least);
        out.extend(alive.map(|(&logit, token)| Candidate { token, logit }));
    }
}

/// Fills `out` with the `count` best tokens.
pub(super) fn best_of(logits: &[f32], count: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if count == 0 {
        return;
    }
    // What was found is cut back to `count` whenever it has grown to several times that. From then on only what beats
    // the last one kept is of interest, which in a long row is next to nothing.
    let most = count.saturating_mul(4).max(256);
    let mut floor = f32::NEG_INFINITY;
    for (block, start) in logits.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
        if block_max(block) <= floor {
            continue;
        }
        for (&logit, token) in block.iter().zip(start..) {
            // Among equals the lower id, which came first, stays.
            if logit > floor {
                out.push(Candidate { token, logit });
            }
        }
        if out.len() >= most {
            keep_best(out, count);
            floor = out.last().map_or(floor, |last| last.logit);
        }
    }
    keep_best(out, count);
}

/// Keeps the `count` best; the last of them, if not all are, is the least likely.
pub(super) fn keep_best(list: &mut Vec<Candidate>, count: usize) {
    if count > 0 && count < list.len() {
        list.select_nth_unstable_by(count - 1, by_rank);
    }
    list.truncate(count);
}

/// Keeps what satisfies `keep`, and the best others if that is fewer than `min_keep`.
pub(super) fn keep_where(
    list: &mut Vec<Candidate>,
    min_keep: usize,
    keep: impl Fn(&Candidate) -> bool,
) {
    let count = list.iter().filter(|candidate| keep(candidate)).count();
    if count >= min_keep {
        list.retain(keep);
    } else {
        keep_best(list, min_keep);
    }
}

/// Keeps the tokens with the smallest `key`, as few as have a summed weight that is enough, and at least `min_keep`.
/// Equal keys are told apart by rank. Keys are from 0 on and best in natural logarithms.
pub(super) fn keep_head(
    list: &mut Vec<Candidate>,
    min_keep: usize,
    key: impl Fn(&Candidate) -> f32,
    weight: impl Fn(&Candidate) -> f64,
    is_enough: impl Fn(f64) -> bool,
) {
    /// So few tokens are sorted.
    const FEW: usize = 64;
    let rank = |a: &Candidate, b: &Candidate| key(a).total_cmp(&key(b)).then(by_rank(a, b));
    // The head ends between `low` and `high`; what is in front of `low` is in it and weighs `sum`.
    let (mut low, mut sum) = match list.len() {
        0..=1024 => (0, 0.0),
        _ => keep_drawers(list, min_keep, &key, &weight, &is_enough),
    };
    let mut high = list.len();
    if low > 0 && low < high {
        list.select_nth_unstable_by(low, rank);
    }
    while high - low > FEW {
        let middle = low + (high - low) / 8;
        let part = list.get_mut(low..high).unwrap_or_default();
        part.select_nth_unstable_by(middle - low, rank);
        let head: f64 = part.iter().take(middle - low).map(&weight).sum();
        if is_enough(sum + head) {
            high = middle;
        } else {
            low = middle;
            sum += head;
        }
    }
    let part = list.get_mut(low..high).unwrap_or_default();
    part.sort_unstable_by(rank);
    let mut kept = low;
    for candidate in part.iter() {
        sum += weight(candidate);
        kept += 1;
        if is_enough(sum) {
            break;
        }
    }
    if kept < min_keep && min_keep < list.len() {
        list.select_nth_unstable_by(min_keep - 1, rank);
    }
    list.truncate(kept.max(min_keep));
}

/// Sorts the weights of a long list into drawers by key and drops the tokens of those behind the one in which the head
/// ends. Gives how many tokens are in front of that drawer, and their weight.
fn keep_drawers(
    list: &mut Vec<Candidate>,
    min_keep: usize,
    key: impl Fn(&Candidate) -> f32,
    weight: impl Fn(&Candidate) -> f64,
    is_enough: impl Fn(f64) -> bool,
) -> (usize, f64) {
    const DRAWERS: usize = 512;
    const DRAWERS_PER_UNIT: f32 = 16.0;
    let drawer =
        |candidate: &Candidate| ((key(candidate) * DRAWERS_PER_UNIT) as usize).min(DRAWERS - 1);
    let mut drawers = [(0usize, 0.0f64); DRAWERS];
    for candidate in list.iter() {
        if let Some((count, sum)) = drawers.get_mut(drawer(candidate)) {
            *count += 1;
            *sum += weight(candidate);
        }
    }
    let (mut before, mut weighs) = (0, 0.0);
    for (at, (count, sum)) in drawers.iter().enumerate() {
        if is_enough(weighs + sum) && before + count >= min_keep {
            list.retain(|candidate| drawer(candidate) <= at);
            break;
        }
        before += count;
        weighs += sum;
    }
    (before.min(list.len()), weighs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![
            6 => -8.0f32..8.0,
            2 => (-3i8..3).prop_map(f32::from),
            1 => Just(f32::NEG_INFINITY)
        ];
        prop::collection::vec(logit, 0..1500)
    }

    fn sorted(logits: &[f32]) -> Vec<Candidate> {
        let mut all: Vec<Candidate> = logits
            .iter()
            .zip(0..)
            .filter(|(logit, _)| **logit > f32::NEG_INFINITY)
            .map(|(&logit, token)| Candidate { token, logit })
            .collect();
        all.sort_by(by_rank);
        all
    }

    proptest! {
        #[test]
        fn parts_equal_those_of_a_full_sort(logits in row(), count in 0usize..300, least in -9.0f32..9.0) {
            let all = sorted(&logits);
            let mut out = Vec::new();
            best_of(&logits, count, &mut out);
            out.sort_by(by_rank);
            prop_assert_eq!(&out, &all[..count.min(all.len())]);
            prop_assert_eq!(best(&logits), all.first().copied());
            at_least(&logits, least, &mut out);
            prop_assert!(out.is_sorted_by_key(|candidate| candidate.token));
            out.sort_by(by_rank);
            let above: Vec<Candidate> = all.into_iter().filter(|c| c.logit >= least).collect();
            prop_assert_eq!(out, above);
        }

        #[test]
        fn what_is_no_number_is_found_wherever_it_is(mut logits in row(), at in any::<prop::sample::Index>(), nan in any::<bool>()) {
            prop_assert_eq!(not_a_number(&logits), None);
            if !logits.is_empty() {
                let at = at.index(logits.len());
                logits[at] = if nan { f32::NAN } else { f32::INFINITY };
                prop_assert_eq!(not_a_number(&logits).map(|(token, _)| token as usize), Some(at));
            }
        }

        #[test]
        fn heads_equal_those_of_a_full_sort(logits in row(), wanted in 0.0f64..9000.0, min_keep in 0usize..40, spread in 0.0f32..4.0) {
            let all = sorted(&logits);
            // Whole numbers, which can be added in any order.
            let weight = |c: &Candidate| f64::from(c.logit.abs().round());
            let mut sum = 0.0;
            let mut count = 0;
            for candidate in &all {
                sum += weight(candidate);
                count += 1;
                if count >= min_keep && sum >= wanted {
                    break;
                }
            }
            let mut list = Vec::new();
            at_least(&logits, f32::NEG_INFINITY, &mut list);
            let key = |c: &Candidate| (8.0 - c.logit) * spread;
            keep_head(&mut list, min_keep, key, weight, |sum| sum >= wanted);
            list.sort_by(by_rank);
            prop_assert_eq!(list, all[..count].to_vec());
        }
    }
}
