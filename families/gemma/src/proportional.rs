//! Rotary settings of gemma4: one set for sliding and one for full layers. The type `proportional`
//! rotates the first part of each half of a head, with periods of the whole width; the rest stands still.

use mlxcel_sdk::nn::{Rope, RopeConfig, RopeScaling};
use mlxcel_sdk::prelude::*;

use crate::layers::{FULL, SLIDING};

/// A period this much longer than the longest does not move in any context. llama.cpp's converter
/// writes the same number.
const STILL: f32 = 1e30;
const BASES: core::ops::RangeInclusive<f64> = 1.0..=1e12;

/// Settings of one kind of layer.
#[derive(Debug, Clone)]
struct Settings {
    rope: RopeConfig,
    head_dim: usize,
    proportional: Option<Proportional>,
}

#[derive(Debug, Clone, Copy)]
struct Proportional {
    /// Pairs of a head that are rotated.
    rotated: usize,
    /// Divides the frequencies.
    factor: f64,
}

/// Settings of both kinds.
#[derive(Debug, Clone)]
pub(crate) struct SettingsByKind {
    sliding: Settings,
    full: Settings,
}

impl SettingsByKind {
    /// Reads `rope_parameters`; where there are none, a quarter of full layers' heads is rotated. The reference
    /// knows no older spelling, so that what one says must be what holds.
    pub(crate) fn read(config: &Config<'_>, sliding_dim: usize, full_dim: usize) -> Result<Self> {
        let key = "rope_parameters";
        let outer = config.section(key)?;
        let (full, sliding) = match &outer {
            Some(outer) => {
                let missing = || config.error(key, format!("an object with {FULL} and {SLIDING}"));
                let full = outer.section(FULL)?.ok_or_else(missing)?;
                (
                    Some(full),
                    Some(outer.section(SLIDING)?.ok_or_else(missing)?),
                )
            }
            None => (None, None),
        };
        let all = Self {
            sliding: Settings::read(config, sliding.as_ref(), 1e4, sliding_dim)?,
            full: match &full {
                Some(full) => Settings::read(config, Some(full), 1e6, full_dim)?,
                None => Settings::proportional(1e6, full_dim, 0.25, 1.0),
            },
        };
        all.check_older(config, full.as_ref())?;
        Ok(all)
    }

    fn check_older(&self, config: &Config<'_>, full: Option<&Config<'_>>) -> Result<()> {
        for (key, settings, kind) in [
            ("rope_theta", &self.full, FULL),
            ("rope_local_base_freq", &self.sliding, SLIDING),
        ] {
            let base = settings.rope.base;
            if config.opt_float(key, BASES)?.is_some_and(|old| old != base) {
                let expected =
                    format!("{base}, the base of {kind} in rope_parameters, or no such key");
                return Err(config.error(key, expected));
            }
        }
        match full {
            Some(full) => RopeConfig::check_older(config, full),
            None if config.section("rope_scaling")?.is_some() => {
                let expected = format!(
                    "settings of {FULL} in rope_parameters, where this architecture has them"
                );
                Err(config.error("rope_scaling", expected))
            }
            None => Ok(()),
        }
    }
}

impl Settings {
    fn read(
        config: &Config<'_>,
        settings: Option<&Config<'_>>,
        base: f64,
        head_dim: usize,
    ) -> Result<Self> {
        if let Some(settings) = settings
            && settings.opt_str("rope_type")? == Some("proportional")
        {
            let base = settings.float_or("rope_theta", base, BASES)?;
            let key = "partial_rotary_factor";
            let share = config.number_once(key, Some(settings), key, 0.0..=1.0)?;
            let share = share.unwrap_or(1.0);
            let factor = settings.float_or("factor", 1.0, 1e-3..=1e6)?;
            return Ok(Self::proportional(base, head_dim, share, factor));
        }
        let rope = RopeConfig::from_settings(config, settings, base, head_dim)?;
        rope.check_whole(config, settings, head_dim)?;
        Ok(Self {
            rope,
            head_dim,
            proportional: None,
        })
    }

    fn proportional(base: f64, head_dim: usize, share: f64, factor: f64) -> Self {
        let rope = RopeConfig {
            base,
            dims: head_dim,
            scaling: RopeScaling::Plain,
        };
        let rotated = (share * head_dim as f64 / 2.0) as usize;
        Self {
            rope,
            head_dim,
            proportional: Some(Proportional { rotated, factor }),
        }
    }

    fn load(&self, weights: &Weights) -> Result<Rope> {
        let Some(Proportional { rotated, factor }) = self.proportional else {
            return Rope::new(weights, &self.rope, self.head_dim, false);
        };
        let half = self.head_dim / 2;
        let factors: Vec<f32> = (0..half)
            .map(|pair| if pair < rotated { factor as f32 } else { STILL })
            .collect();
        let factors = Tensor::from_slice(weights.backend(), &factors, &[half as i64])?;
        Rope::with_factors(weights, &self.rope, self.head_dim, false, &factors)
    }
}

/// The embeddings themselves.
pub(crate) struct Rotations {
    sliding: Rope,
    full: Rope,
}

impl Rotations {
    /// Prepares both. A GGUF file has the factors of full layers as a tensor and no settings.
    pub(crate) fn load(root: &Weights, settings: &SettingsByKind) -> Result<Self> {
        let file = root.at("rope_factors");
        let full = &settings.full;
        let full = if file.exists() {
            let factors = file.single("weight", &[(full.head_dim / 2) as i64])?;
            Rope::with_factors(root, &full.rope, full.head_dim, false, &factors)?
        } else {
            full.load(root)?
        };
        Ok(Self {
            sliding: settings.sliding.load(root)?,
            full,
        })
    }

    /// The embedding of one kind of layer.
    pub(crate) fn of(&self, slides: bool) -> Rope {
        if slides {
            self.sliding.clone()
        } else {
            self.full.clone()
        }
    }
}
