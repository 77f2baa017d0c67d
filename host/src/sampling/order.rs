//! Which samplers work on a row, and in which order.
//!
//! Names and letters are llama.cpp's, so that orders written for it mean the same here.

use std::fmt;
use std::str::FromStr;

/// One sampler of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplerKind {
    /// Repetition, frequency and presence penalty.
    Penalties,
    /// "Don't repeat yourself": penalty for continuing a repetition.
    Dry,
    /// Distance from the best logit in standard deviations.
    TopNSigma,
    /// A number of tokens.
    TopK,
    /// Surprise near the expected one.
    TypicalP,
    /// A share of the probability.
    TopP,
    /// A share of the best token's probability.
    MinP,
    /// "Exclude top choices": sometimes all good tokens but the least likely of them.
    Xtc,
    /// Temperature, fixed or by entropy.
    Temperature,
    /// Probabilities near a target. Chooses the token, so it works last wherever it is named.
    AdaptiveP,
}

/// Name, letter and other spellings of every sampler.
const SPELLINGS: [(SamplerKind, &str, char, &[&str]); 10] = [
    (SamplerKind::Penalties, "penalties", 'e', &[]),
    (SamplerKind::Dry, "dry", 'd', &[]),
    (
        SamplerKind::TopNSigma,
        "top_n_sigma",
        's',
        &["top-n-sigma", "top-nsigma"],
    ),
    (SamplerKind::TopK, "top_k", 'k', &["top-k"]),
    (
        SamplerKind::TypicalP,
        "typ_p",
        'y',
        &["typical_p", "typical-p", "typical", "typ-p", "typ"],
    ),
    (SamplerKind::TopP, "top_p", 'p', &["top-p", "nucleus"]),
    (SamplerKind::MinP, "min_p", 'm', &["min-p"]),
    (SamplerKind::Xtc, "xtc", 'x', &[]),
    (SamplerKind::Temperature, "temperature", 't', &["temp"]),
    (SamplerKind::AdaptiveP, "adaptive_p", 'a', &["adaptive-p"]),
];

/// An order that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// A name or letter that means nothing.
    #[error("there is no sampler {name:?}, expected {}", known())]
    Unknown {
        /// What was given.
        name: String,
    },
    /// A sampler twice.
    #[error("the sampler {name} is named twice")]
    Twice {
        /// Which.
        name: &'static str,
    },
}

fn known() -> String {
    let names: Vec<String> = SPELLINGS
        .iter()
        .map(|(_, name, letter, _)| format!("{name} ({letter})"))
        .collect();
    names.join(", ")
}

impl SamplerKind {
    /// Its name.
    pub fn name(self) -> &'static str {
        SPELLINGS
            .iter()
            .find(|(kind, ..)| *kind == self)
            .map_or("", |(_, name, ..)| name)
    }

    fn named(text: &str) -> Option<Self> {
        SPELLINGS
            .iter()
            .find(|(_, name, _, others)| *name == text || others.contains(&text))
            .map(|(kind, ..)| *kind)
    }

    fn lettered(text: char) -> Option<Self> {
        SPELLINGS
            .iter()
            .find(|(_, _, letter, _)| *letter == text)
            .map(|(kind, ..)| *kind)
    }
}

/// Samplers in the order in which they work. Those that are not in it do nothing, whatever their parameters say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SamplerOrder(Vec<SamplerKind>);

impl Default for SamplerOrder {
    /// llama.cpp's: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature.
    fn default() -> Self {
        use SamplerKind::{
            Dry, MinP, Penalties, Temperature, TopK, TopNSigma, TopP, TypicalP, Xtc,
        };
        Self(vec![
            Penalties,
            Dry,
            TopNSigma,
            TopK,
            TypicalP,
            TopP,
            MinP,
            Xtc,
            Temperature,
        ])
    }
}

impl SamplerOrder {
    /// From names.
    pub fn from_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, OrderError> {
        Self::collect(names.into_iter().map(|name| {
            SamplerKind::named(name).ok_or_else(|| OrderError::Unknown {
                name: name.to_owned(),
            })
        }))
    }

    /// From letters, for example `edskypmxt`.
    pub fn from_letters(letters: &str) -> Result<Self, OrderError> {
        Self::collect(letters.chars().map(|letter| {
            SamplerKind::lettered(letter).ok_or_else(|| OrderError::Unknown {
                name: letter.to_string(),
            })
        }))
    }

    fn collect(
        kinds: impl Iterator<Item = Result<SamplerKind, OrderError>>,
    ) -> Result<Self, OrderError> {
        let mut order = Vec::new();
        for kind in kinds {
            let kind = kind?;
            if order.contains(&kind) {
                return Err(OrderError::Twice { name: kind.name() });
            }
            order.push(kind);
        }
        Ok(Self(order))
    }

    /// The samplers.
    pub fn kinds(&self) -> &[SamplerKind] {
        &self.0
    }

    /// Whether a sampler is in it.
    pub fn has(&self, kind: SamplerKind) -> bool {
        self.0.contains(&kind)
    }
}

impl FromStr for SamplerOrder {
    type Err = OrderError;

    /// Names with `;` between them, or letters alone. An empty text is no sampler at all.
    fn from_str(text: &str) -> Result<Self, OrderError> {
        let is_letters = text
            .chars()
            .all(|letter| SamplerKind::lettered(letter).is_some());
        if is_letters {
            return Self::from_letters(text);
        }
        Self::from_names(
            text.split(';')
                .map(str::trim)
                .filter(|name| !name.is_empty()),
        )
    }
}

impl fmt::Display for SamplerOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|kind| kind.name()).collect();
        f.write_str(&names.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_letters_mean_the_same() {
        let default = SamplerOrder::default();
        insta::assert_snapshot!(default, @"penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature");
        assert_eq!("edskypmxt".parse(), Ok(default.clone()));
        assert_eq!(default.to_string().parse(), Ok(default));
        assert_eq!(
            SamplerOrder::from_names(["temp", "typical", "adaptive-p"]),
            "tya".parse()
        );
        assert_eq!("top_k".parse(), SamplerOrder::from_letters("k"));
        assert_eq!("".parse(), Ok(SamplerOrder(Vec::new())));
        for (kind, name, letter, others) in SPELLINGS {
            for name in others.iter().chain([&name]) {
                assert_eq!(
                    SamplerOrder::from_names([*name]),
                    SamplerOrder::from_letters(&letter.to_string())
                );
            }
            assert_eq!(kind.name(), name);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |text: &str| text.parse::<SamplerOrder>().unwrap_err().to_string();
        insta::assert_snapshot!([error("kk"), error("top_k;heat"), error("z")].join("\n"), @r#"
        the sampler top_k is named twice
        there is no sampler "heat", expected penalties (e), dry (d), top_n_sigma (s), top_k (k), typ_p (y), top_p (p), min_p (m), xtc (x), temperature (t), adaptive_p (a)
        there is no sampler "z", expected penalties (e), dry (d), top_n_sigma (s), top_k (k), typ_p (y), top_p (p), min_p (m), xtc (x), temperature (t), adaptive_p (a)
        "#);
    }
}
