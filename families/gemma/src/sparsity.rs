//! How many activations a feed-forward block of gemma3n keeps: those above a number of deviations that
//! follows from a share, as if they were normally distributed.

use core::f64::consts::PI;

use mlxcel_sdk::prelude::*;

/// The share of activations that each layer drops.
pub(crate) fn read(config: &Config<'_>, n_layers: usize) -> Result<Vec<f64>> {
    const KEY: &str = "activation_sparsity_pattern";
    match config.opt_floats(KEY)? {
        None => {
            let sparse = if n_layers > 10 { 10 } else { 0 };
            Ok((0..n_layers)
                .map(|n| if n < sparse { 0.95 } else { 0.0 })
                .collect())
        }
        Some(list) if list.len() == n_layers && list.iter().all(|s| (0.0..1.0).contains(s)) => {
            Ok(list)
        }
        Some(_) => Err(config.error(
            KEY,
            format!("a number from 0 to below 1 for each of {n_layers} layers"),
        )),
    }
}

/// How many deviations above the mean of a normal distribution a share `p` of it lies: the inverse of
/// its distribution function, by halving. The function itself is the series 26.2.11 of Abramowitz and
/// Stegun, which converges at once in the range that counts.
pub(crate) fn quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        if share(middle) < p {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

/// The share of a normal distribution below `x`.
pub(crate) fn share(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / f64::from(2 * n + 1);
        sum += term;
    }
    0.5 + sum * (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_quantiles_of_the_normal_distribution_are_inverse() {
        // Table 26.1 of Abramowitz and Stegun, and the deviations that llama.cpp has for 0.95.
        assert!((quantile(0.95) - 1.644_853_626_951_472_2).abs() < 1e-12);
        assert!((share(2.0) - 0.977_249_868_051_820_8).abs() < 1e-14);
        for p in [1e-6, 0.01, 0.3, 0.5, 0.7, 0.999, 0.999_999] {
            assert!((share(quantile(p)) - p).abs() < 1e-13, "{p}");
        }
    }
}
