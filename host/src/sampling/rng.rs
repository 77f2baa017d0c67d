//! Random numbers by counting.
//!
//! Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a counter
//! and a key to four random words. With the key from the request's seed and the counter from step and token id, the
//! noise of every token is known without any state: it can be computed in any order, for some tokens only, and on any
//! device, with the same result.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Philox4x32 with ten rounds.
pub(super) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let low = u64::from(a) * u64::from(MULTIPLIERS[0]);
        let high = u64::from(c) * u64::from(MULTIPLIERS[1]);
        (a, b, c, d) = (
            (high >> 32) as u32 ^ b ^ k0,
            high as u32,
            (low >> 32) as u32 ^ d ^ k1,
            low as u32,
        );
        k0 = k0.wrapping_add(KEY_STEPS[0]);
        k1 = k1.wrapping_add(KEY_STEPS[1]);
    }
    [a, b, c, d]
}

/// The random numbers of one request at one step.
#[derive(Debug, Clone)]
pub(super) struct StepNoise {
    key: [u32; 2],
    step: [u32; 2],
    /// The four words that were computed last, and for which four tokens.
    block: u32,
    words: [u32; 4],
}

/// No noise is larger: the largest word gives -ln(-ln(1 - 2^-33)).
pub(super) const MAX_GUMBEL: f64 = 22.9;

/// What random numbers are for; each purpose has its own.
const PURPOSE_DRAW: u32 = 0;
const PURPOSE_CHANCE: u32 = 1;
const PURPOSE_RANK: u32 = 2;

impl StepNoise {
    pub(super) fn new(seed: u64, step: u64) -> Self {
        let mut noise = StepNoise {
            key: [seed as u32, (seed >> 32) as u32],
            step: [step as u32, (step >> 32) as u32],
            block: 0,
            words: [0; 4],
        };
        noise.words = noise.block(0, PURPOSE_DRAW);
        noise
    }

    #[inline]
    fn block(&self, block: u32, purpose: u32) -> [u32; 4] {
        philox([block, self.step[0], self.step[1], purpose], self.key)
    }

    /// The random word of `token`. Cheap for tokens in the order of their ids.
    pub(super) fn word(&mut self, token: u32) -> u32 {
        if token / 4 != self.block {
            self.block = token / 4;
            self.words = self.block(self.block, PURPOSE_DRAW);
        }
        let [a, b, c, d] = self.words;
        match token % 4 {
            0 => a,
            1 => b,
            2 => c,
            _ => d,
        }
    }

    /// A standard Gumbel variable from a word.
    pub(super) fn gumbel(word: u32) -> f64 {
        -(-uniform(word).ln()).ln()
    }

    /// What [`Self::gumbel`] cannot exceed, without a logarithm: `-ln(-ln u) <= -ln(1 - u)`, and `1 - u` is more than the
    /// power of two below it.
    pub(super) fn most(word: u32) -> f64 {
        f64::from((!word).leading_zeros() + 1) * std::f64::consts::LN_2
    }

    /// A number between 0 and 1 for what happens by chance at this step, apart from the draw.
    pub(super) fn chance(&self) -> f64 {
        let [word, ..] = self.block(0, PURPOSE_CHANCE);
        uniform(word)
    }

    /// A number from 0 to below 1 for a draw by rank, exact in a float of any machine.
    pub(super) fn rank(&self) -> f32 {
        let [word, ..] = self.block(0, PURPOSE_RANK);
        (word >> 8) as f32 / 16_777_216.0
    }
}

/// The middle of the word's interval, so never 0 or 1.
fn uniform(word: u32) -> f64 {
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// A seed for a request that has none.
pub fn random_seed() -> u64 {
    // The standard library keys every hasher from the operating system's random numbers.
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors that come with the authors' Random123 library (`kat_vectors`).
    #[test]
    fn philox_matches_the_published_vectors() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn noise_is_bounded_and_has_the_gumbel_mean() {
        assert!(StepNoise::gumbel(u32::MAX) < MAX_GUMBEL);
        let mut noise = StepNoise::new(7, 3);
        let words: Vec<u32> = (0..40_000).map(|token| noise.word(token)).collect();
        let edges =
            (0..32).flat_map(|bit| [1 << bit, !(1 << bit), u32::MAX >> bit, !(u32::MAX >> bit)]);
        for word in words.iter().copied().chain(edges).chain([0, u32::MAX]) {
            assert!(StepNoise::gumbel(word) <= StepNoise::most(word), "{word}");
        }
        let sum: f64 = words.iter().map(|word| StepNoise::gumbel(*word)).sum();
        let mean = sum / 40_000.0;
        // Euler's constant; the standard error of the mean is 0.0064.
        assert!((mean - 0.577_215_66).abs() < 0.02, "{mean}");
    }

    #[test]
    fn words_do_not_depend_on_the_order() {
        let mut up = StepNoise::new(9, 1);
        let mut down = StepNoise::new(9, 1);
        let words: Vec<u32> = (0..50).map(|token| up.word(token)).collect();
        for token in (0..50).rev() {
            assert_eq!(down.word(token), words[token as usize]);
        }
        let chances: Vec<f64> = (0..2000)
            .map(|step| StepNoise::new(9, step).chance())
            .collect();
        let below = chances.iter().filter(|chance| **chance <= 0.3).count();
        assert!((540..660).contains(&below), "{below}");
    }

    #[test]
    fn seeds_differ() {
        assert_ne!(random_seed(), random_seed());
    }
}
