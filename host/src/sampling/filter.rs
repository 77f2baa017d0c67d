//! Filters: which tokens may be drawn. Each looks at what the one before left.

use super::row::Row;
use super::select::{Candidate, by_rank, keep_head};

/// Tang et al., "Top-nsigma: not all logits are you need", 2024.
pub(super) fn top_n_sigma(row: &mut Row<'_>, sigmas: f32, min_keep: usize) {
    if sigmas <= 0.0 {
        return;
    }
    // Both sides of the comparison grow with the temperature, so it plays no part.
    let (mut count, mut sum) = (0u64, 0.0);
    row.each(|logit| {
        count += 1;
        sum += f64::from(logit);
    });
    if count < 2 {
        return;
    }
    let mean = sum / count as f64;
    let mut squares = 0.0;
    row.each(|logit| squares += (f64::from(logit) - mean).powi(2));
    let deviation = (squares / count as f64).sqrt();
    row.keep_from(row.max() - f64::from(sigmas) * deviation, min_keep);
}

/// The likeliest tokens by number.
pub(super) fn top_k(row: &mut Row<'_>, count: usize, min_keep: usize) {
    if count > 0 {
        row.keep_best(count.max(min_keep));
    }
}

/// Meister et al., "Locally typical sampling", 2022.
pub(super) fn typical(row: &mut Row<'_>, mass: f64, min_keep: usize) {
    if mass >= 1.0 {
        return;
    }
    let softmax = row.softmax();
    // The logit of the expected surprise.
    let center = softmax.logit_of(-softmax.entropy(row));
    let scale = row.scale();
    keep_head(
        row.list(),
        min_keep,
        |candidate| ((f64::from(candidate.logit) - center).abs() * scale) as f32,
        |candidate| softmax.weight(candidate.logit),
        |sum| sum > mass * softmax.total,
    );
}

/// Holtzman et al., "The curious case of neural text degeneration", 2019: the smallest set of the likeliest tokens
/// whose probability reaches `mass`.
pub(super) fn top_p(row: &mut Row<'_>, mass: f64, min_keep: usize) {
    if mass >= 1.0 {
        return;
    }
    let (softmax, scale) = (row.softmax(), row.scale() as f32);
    let max = row.max() as f32;
    keep_head(
        row.list(),
        min_keep,
        |candidate| (max - candidate.logit) * scale,
        |candidate| softmax.weight(candidate.logit),
        |sum| sum >= mass * softmax.total,
    );
}

/// Nguyen et al., "Turning up the heat: min-p sampling", 2024.
pub(super) fn min_p(row: &mut Row<'_>, ratio: f64, min_keep: usize) {
    if ratio > 0.0 {
        row.keep_from(row.max() + ratio.ln() / row.scale(), min_keep);
    }
}

/// p-e-w, "Exclude top choices", 2024: of the tokens that have at least the probability `threshold`, all but the least
/// likely go. `chance` is the random number of the step that says whether it happens at all.
pub(super) fn xtc(
    row: &mut Row<'_>,
    probability: f64,
    threshold: f64,
    min_keep: usize,
    chance: f64,
) {
    if probability <= 0.0 || chance > probability || row.list().len() < 2 {
        return;
    }
    let floor = row.softmax().logit_of(threshold.ln());
    let list = row.list();
    let is_good = |candidate: &Candidate| f64::from(candidate.logit) >= floor;
    let good = list.iter().filter(|candidate| is_good(candidate)).count();
    let Some(last) = list.iter().copied().filter(is_good).max_by(by_rank) else {
        return;
    };
    if good > 1 && list.len() + 1 - good >= min_keep {
        list.retain(|candidate| !is_good(candidate) || candidate.token == last.token);
    }
}

/// Temperature: fixed, or between `temperature - range` and `temperature + range` by how even the distribution is, the
/// share of the largest possible entropy raised to `exponent`. At zero the best token alone is left.
pub(super) fn temperature(row: &mut Row<'_>, temperature: f64, range: f64, exponent: f64) {
    let mut chosen = temperature;
    if range > 0.0 {
        let count = row.list().len();
        if count < 2 {
            return;
        }
        let softmax = row.softmax();
        let evenness = (softmax.entropy(row) / (count as f64).ln()).clamp(0.0, 1.0);
        let least = (temperature - range).max(0.0);
        chosen = least + (temperature + range - least) * evenness.powf(exponent);
    }
    // What is next to nothing would take the logits out of what a float can hold.
    if chosen < f64::from(f32::MIN_POSITIVE) {
        row.keep_one();
    } else {
        row.temper(chosen);
    }
}

/// Basu et al., "Mirostat", 2021: as many tokens as a Zipf distribution fitted to the likeliest ones needs for a
/// surprise of `mu`.
pub(super) fn mirostat(row: &mut Row<'_>, mu: f64, vocab_size: usize) {
    /// How many of the likeliest tokens the exponent is fitted to, as in the authors' program.
    const FITTED: usize = 100;
    let softmax = row.softmax();
    let head = row.head(FITTED);
    if head.len() < 2 {
        return;
    }
    let (mut products, mut squares) = (0.0, 0.0);
    for (at, pair) in (1u32..).zip(head.windows(2)) {
        let [better, worse] = pair else { continue };
        let rank_ratio = (f64::from(at + 1) / f64::from(at)).ln();
        products += rank_ratio * (softmax.log_p(better.logit) - softmax.log_p(worse.logit));
        squares += rank_ratio * rank_ratio;
    }
    let exponent = products / squares;
    let excess = exponent - 1.0;
    let count =
        (excess * mu.exp2() / (1.0 - (vocab_size as f64).powf(-excess))).powf(1.0 / exponent);
    // The cast sends NaN to zero and stops at the ends of the range.
    row.keep_best((count as usize).max(1));
}

/// The same paper's second algorithm: the tokens whose surprise is at most `mu`, at least one.
pub(super) fn mirostat_v2(row: &mut Row<'_>, mu: f64) {
    let softmax = row.softmax();
    row.keep_from(softmax.logit_of(-mu * std::f64::consts::LN_2), 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kept(probabilities: &[f64], filter: impl FnOnce(&mut Row<'_>)) -> Vec<u32> {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
        let mut list = Vec::new();
        let mut row = Row::new(&logits, &mut list);
        filter(&mut row);
        let mut tokens: Vec<u32> = row.list().iter().map(|c| c.token).collect();
        tokens.sort_unstable();
        tokens
    }

    const P: [f64; 5] = [0.1, 0.4, 0.05, 0.3, 0.15];

    #[test]
    fn each_filter_alone() {
        assert_eq!(kept(&P, |_| ()), [0, 1, 2, 3, 4]);
        assert_eq!(kept(&P, |row| top_k(row, 0, 1)), [0, 1, 2, 3, 4]);
        assert_eq!(kept(&P, |row| top_k(row, 2, 1)), [1, 3]);
        assert_eq!(kept(&P, |row| top_p(row, 0.69, 1)), [1, 3]);
        assert_eq!(kept(&P, |row| top_p(row, 0.71, 1)), [1, 3, 4]);
        assert_eq!(kept(&P, |row| top_p(row, 0.0, 1)), [1]);
        assert_eq!(kept(&P, |row| min_p(row, 0.26, 1)), [1, 3, 4]);
        assert_eq!(kept(&P, |row| min_p(row, 1.0, 1)), [1]);
        // Entropy 1.39: surprises are 2.3, 0.92, 3.0, 1.2, 1.9, so 3, 1 and then 4 are the most typical.
        assert_eq!(kept(&P, |row| typical(row, 0.25, 1)), [3]);
        assert_eq!(kept(&P, |row| typical(row, 0.75, 1)), [1, 3, 4]);
        // Standard deviation of the logits 0.72: 0.3 is 0.29 below the best, 0.15 is 0.98.
        assert_eq!(kept(&P, |row| top_n_sigma(row, 1.0, 1)), [1, 3]);
    }

    #[test]
    fn xtc_leaves_the_least_likely_of_the_good() {
        let run = |probability, threshold, min_keep, chance| {
            kept(&P, |row| xtc(row, probability, threshold, min_keep, chance))
        };
        assert_eq!(run(0.5, 0.12, 1, 0.4), [0, 2, 4]);
        assert_eq!(run(0.5, 0.12, 1, 0.6), [0, 1, 2, 3, 4]);
        assert_eq!(run(0.0, 0.12, 1, 0.0), [0, 1, 2, 3, 4]);
        assert_eq!(run(1.0, 0.35, 1, 0.9), [0, 1, 2, 3, 4]);
        assert_eq!(run(1.0, 0.0, 1, 0.9), [2]);
        assert_eq!(run(1.0, 0.12, 4, 0.9), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn temperature_moves_with_the_entropy() {
        let scale = |probabilities: &[f64], t, range, exponent| {
            let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
            let mut list = Vec::new();
            let mut row = Row::new(&logits, &mut list);
            temperature(&mut row, t, range, exponent);
            (row.scale(), row.list().len())
        };
        assert_eq!(scale(&P, 0.5, 0.0, 1.0), (2.0, 5));
        assert_eq!(scale(&P, 0.0, 0.0, 1.0), (1.0, 1));
        // An even distribution has the highest temperature.
        let (even, _) = scale(&[0.25; 4], 1.0, 0.5, 1.0);
        assert!((even - 1.0 / 1.5).abs() < 1e-6, "{even}");
        // One token has all the probability: 1 - 0.5, and at range 1 nothing.
        let (sure, _) = scale(&[1.0, 1e-30], 1.0, 0.5, 1.0);
        assert!((sure - 2.0).abs() < 1e-6, "{sure}");
        assert_eq!(scale(&[1.0, 1e-300], 1.0, 1.0, 1.0).1, 1);
        // Entropy 1.393 of ln 5: 0.6 + 0.8 x 0.8656^2.
        let (square, _) = scale(&P, 1.0, 0.4, 2.0);
        assert!((1.0 / square - 1.1995).abs() < 1e-3, "{square}");
    }

    #[test]
    fn mirostat_keeps_fewer_tokens_for_less_surprise() {
        let p: Vec<f64> = (1..200)
            .map(|rank| 1.0 / f64::from(rank).powf(1.3))
            .collect();
        let count = |mu| kept(&p, |row| mirostat(row, mu, p.len())).len();
        assert_eq!(count(-50.0), 1);
        assert!(count(2.0) < count(5.0) && count(5.0) < count(8.0));
        let count = |mu| kept(&P, |row| mirostat_v2(row, mu)).len();
        // Surprises in bits: 3.3, 1.32, 4.3, 1.74, 2.7.
        assert_eq!(
            [count(0.1), count(1.5), count(2.8), count(9.0)],
            [1, 1, 3, 5]
        );
        assert_eq!(kept(&[0.25; 4], |row| mirostat(row, 3.0, 4)).len(), 4);
    }

    #[test]
    fn filters_see_what_the_one_before_left() {
        // Of the two that top-k leaves, the first has 0.57 of the probability.
        let run = |row: &mut Row<'_>| {
            top_k(row, 2, 1);
            top_p(row, 0.56, 1);
        };
        assert_eq!(kept(&P, run), [1]);
        // At temperature 3 the five have 0.16, 0.26, 0.13, 0.24 and 0.19.
        let run = |row: &mut Row<'_>| {
            temperature(row, 3.0, 0.0, 1.0);
            top_p(row, 0.56, 1);
        };
        assert_eq!(kept(&P, run), [1, 3, 4]);
        let run = |row: &mut Row<'_>| {
            temperature(row, 3.0, 0.0, 1.0);
            min_p(row, 0.6, 1);
        };
        assert_eq!(kept(&P, run), [0, 1, 3, 4]);
    }

    #[test]
    fn equal_logits_are_kept_by_lowest_id() {
        assert_eq!(kept(&[0.25; 4], |row| top_k(row, 2, 1)), [0, 1]);
        assert_eq!(kept(&[0.25; 4], |row| top_p(row, 0.5, 1)), [0, 1]);
        assert_eq!(kept(&[0.25; 4], |row| xtc(row, 1.0, 0.2, 1, 0.0)), [3]);
    }

    proptest! {
        #[test]
        fn no_filter_leaves_nothing_or_less_than_it_has_to(
            logits in prop::collection::vec(-300.0f32..300.0, 1..400), min_keep in 1usize..10, which in 0usize..9,
            x in 0.0f64..=1.0, y in 0.0f64..=1.0, heat in 0.01f64..10.0,
        ) {
            let mut list = Vec::new();
            let mut row = Row::new(&logits, &mut list);
            row.temper(heat);
            match which {
                0 => top_k(&mut row, (x * 20.0) as usize, min_keep),
                1 => top_p(&mut row, x, min_keep),
                2 => min_p(&mut row, x, min_keep),
                3 => typical(&mut row, x, min_keep),
                4 => top_n_sigma(&mut row, (x * 3.0) as f32, min_keep),
                5 => xtc(&mut row, 1.0, x, min_keep, y),
                6 => mirostat(&mut row, x * 30.0 - 10.0, logits.len()),
                7 => mirostat_v2(&mut row, x * 30.0 - 10.0),
                _ => temperature(&mut row, x, y, 1.0),
            }
            let least = if which < 6 { min_keep.min(logits.len()) } else { 1 };
            prop_assert!(row.list().len() >= least, "{} left", row.list().len());
            let softmax = row.softmax();
            let mut sum = 0.0;
            row.each(|logit| sum += softmax.p(logit));
            prop_assert!((sum - 1.0).abs() < 1e-5, "{}", sum);
        }
    }
}
