//! "Don't repeat yourself": a penalty for tokens that would continue a repetition, growing with its length.
//!
//! p-e-w, "DRY: a modern repetition penalty", 2024. A token that followed an earlier occurrence of the last `n` tokens
//! loses `multiplier * base ^ (n - allowed_length)`, for the longest such `n`. Repetitions do not reach across breakers.

use super::breakers::Breakers;
use super::row::{Row, changed};

/// Numbers of the sampler.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dry {
    pub(super) multiplier: f32,
    pub(super) base: f32,
    pub(super) allowed_length: usize,
}

/// Finds the tokens to penalise. Holds scratch memory.
#[derive(Debug, Clone, Default)]
pub(super) struct DryScan {
    /// By distance from the end: how many ids there equal those at the end.
    matches: Vec<usize>,
    /// Tokens with the length of the longest repetition that they continue; ascending and once each when done.
    found: Vec<(u32, usize)>,
}

impl DryScan {
    /// Looks through the ids of the window.
    pub(super) fn scan(&mut self, dry: Dry, ids: &[u32], breakers: &Breakers) {
        self.found.clear();
        if ids.len() <= dry.allowed_length {
            return;
        }
        let longest = breakers.since_last(ids).unwrap_or(ids.len());
        if longest < dry.allowed_length {
            return;
        }
        self.match_end(ids);
        for (distance, length) in self.matches.iter().enumerate().skip(1) {
            let length = (*length).min(longest);
            if length < dry.allowed_length {
                continue;
            }
            // What came after the occurrence that ends `distance` ids before the end.
            if let Some(next) = ids.len().checked_sub(distance).and_then(|at| ids.get(at))
                && !breakers.is_whole(*next)
            {
                self.found.push((*next, length));
            }
        }
        self.found
            .sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        self.found.dedup_by_key(|(token, _)| *token);
    }

    /// Fills `matches` in linear time: the Z-algorithm (Gusfield, "Algorithms on strings, trees and sequences", 1997,
    /// section 1.4), from the end to the beginning.
    fn match_end(&mut self, ids: &[u32]) {
        let count = ids.len();
        let same = |a: usize, b: usize| {
            let from_end = |at: usize| ids.get(count.checked_sub(at + 1)?);
            b < count && from_end(a) == from_end(b)
        };
        self.matches.clear();
        self.matches.resize(count, 0);
        // The stretch that reaches furthest of those that are known to equal the end.
        let (mut start, mut end) = (0, 0);
        for at in 1..count {
            let known = if at < end {
                let before = self.matches.get(at - start).copied().unwrap_or(0);
                before.min(end - at)
            } else {
                0
            };
            let mut length = known;
            while same(length, at + length) {
                length += 1;
            }
            if at + length > end {
                (start, end) = (at, at + length);
            }
            if let Some(place) = self.matches.get_mut(at) {
                *place = length;
            }
        }
    }

    /// Takes the penalties off a whole row.
    pub(super) fn penalise(&self, dry: Dry, logits: &mut [f32]) {
        for (token, length) in &self.found {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = changed(*logit, |logit| dry.penalised(logit, *length));
            }
        }
    }

    /// Takes the penalties off what another sampler has left.
    pub(super) fn penalise_row(&self, dry: Dry, row: &mut Row<'_>) {
        row.change(|token, logit| {
            let found = self.found.binary_search_by_key(&token, |(token, _)| *token);
            match found.ok().and_then(|at| self.found.get(at)) {
                Some((_, length)) => dry.penalised(logit, *length),
                None => logit,
            }
        });
    }
}

impl Dry {
    fn penalised(self, logit: f32, length: usize) -> f32 {
        let exponent = (length - self.allowed_length.min(length)) as f64;
        let penalty = f64::from(self.multiplier) * f64::from(self.base).powf(exponent);
        (f64::from(logit) - penalty) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DRY: Dry = Dry {
        multiplier: 0.5,
        base: 2.0,
        allowed_length: 2,
    };

    fn found(dry: Dry, ids: &[u32], whole: &[u32]) -> Vec<(u32, usize)> {
        let mut breakers = Breakers::default();
        whole
            .iter()
            .for_each(|token| breakers.add(*token, Vec::new()));
        let mut scan = DryScan::default();
        scan.scan(dry, ids, &breakers);
        scan.found
    }

    #[test]
    fn what_followed_the_same_ids_is_found() {
        // 1 2 3 was followed by 3, 3 by 2, and 2 3 by 9.
        let ids = [1, 2, 3, 3, 2, 3, 9, 1, 2, 3];
        assert_eq!(found(DRY, &ids, &[]), [(3, 3), (9, 2)]);
        let short = Dry {
            allowed_length: 1,
            ..DRY
        };
        assert_eq!(found(short, &ids, &[]), [(2, 1), (3, 3), (9, 2)]);
        assert_eq!(found(DRY, &ids, &[9]), [(3, 3)]);
        // Behind a breaker only the ids after it count.
        assert_eq!(found(DRY, &ids, &[1]), [(3, 2), (9, 2)]);
        assert_eq!(found(DRY, &ids, &[2]), []);
        assert_eq!(found(DRY, &[5, 5, 5, 5], &[]), [(5, 3)]);
        assert_eq!(found(DRY, &[1, 2], &[]), []);
        assert_eq!(found(DRY, &[], &[]), []);
    }

    #[test]
    fn penalties_grow_with_the_length_and_stay_numbers() {
        assert_eq!(DRY.penalised(1.0, 2), 0.5);
        assert_eq!(DRY.penalised(1.0, 5), -3.0);
        let mut logits = [1.0, f32::NEG_INFINITY];
        let scan = DryScan {
            found: vec![(0, 5000), (1, 5), (7, 5)],
            ..DryScan::default()
        };
        scan.penalise(DRY, &mut logits);
        assert_eq!(logits, [f32::MIN, f32::NEG_INFINITY]);
    }

    proptest! {
        #[test]
        fn the_search_equals_a_slow_one(ids in prop::collection::vec(0u32..4, 0..60), allowed_length in 0usize..5, whole in prop::collection::vec(0u32..9, 0..2)) {
            let dry = Dry { allowed_length, ..DRY };
            let longest = ids.iter().rev().position(|id| whole.contains(id)).unwrap_or(ids.len());
            let mut slow: std::collections::BTreeMap<u32, usize> = std::collections::BTreeMap::new();
            if ids.len() > allowed_length && longest >= allowed_length {
                for end in 0..ids.len() {
                    let equal = (0..end).take_while(|n| ids[end - 1 - n] == ids[ids.len() - 1 - n]).count().min(longest);
                    if equal >= allowed_length && !whole.contains(&ids[end]) {
                        let best = slow.entry(ids[end]).or_default();
                        *best = equal.max(*best);
                    }
                }
                // The place in front of the first id has no ids before it and counts only as what follows something.
                if allowed_length == 0 {
                    slow.clear();
                    for end in 1..ids.len() {
                        let equal = (0..end).take_while(|n| ids[end - 1 - n] == ids[ids.len() - 1 - n]).count().min(longest);
                        if !whole.contains(&ids[end]) {
                            let best = slow.entry(ids[end]).or_default();
                            *best = equal.max(*best);
                        }
                    }
                }
            }
            prop_assert_eq!(found(dry, &ids, &whole), slow.into_iter().collect::<Vec<_>>());
        }
    }
}
