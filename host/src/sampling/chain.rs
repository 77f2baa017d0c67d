//! The whole chain for one row of logits.

use std::sync::Arc;

use super::breakers::Breakers;
use super::draw::{draw, draw_by_rank};
use super::dry::{Dry, DryScan};
use super::feedback::Feedback;
use super::filter;
use super::history::{History, Window};
use super::logprobs::{self, LogprobStage, Logprobs};
use super::order::SamplerKind;
use super::params::{Mirostat, SamplingParams};
use super::penalty::{add_bias, penalise, penalise_row};
use super::rng::{StepNoise, random_seed};
use super::row::Row;
use super::row_draw::RowDraw;
use super::select::{self, Candidate};
use super::validate::ParamError;

/// The chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The token.
    pub token: u32,
    /// Its log probability and its alternatives, if they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter is outside its range.
    #[error(transparent)]
    Params(#[from] ParamError),
    /// The model produced something that is not a logit. The usual cause is an overflow in half precision.
    #[error(
        "step {step}: the logit of token {token} is {value}, expected a number (numeric overflow in the model? --cache-type-k f32 --cache-type-v f32 rules out that of half caches, `mlxcel inspect --check-values` damaged weights)"
    )]
    NotANumber {
        /// The step of the request, 0 for the first new token.
        step: u64,
        /// The first such token.
        token: u32,
        /// NaN or +infinity.
        value: f32,
    },
    /// Every token has probability zero.
    #[error("step {step}: no token can be chosen, all {vocab_size} logits are -infinity")]
    NoToken {
        /// The step.
        step: u64,
        /// Length of the row.
        vocab_size: usize,
    },
}

/// Chooses the tokens of one request, one after the other.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    step: u64,
    history: History,
    feedback: Feedback,
    breakers: Arc<Breakers>,
    /// Samplers of the order up to the first one that drops tokens or changes the temperature: they work on whole rows.
    leading: usize,
    /// How a device would choose, but for the random number.
    row_draw: Option<RowDraw>,
    scratch: Scratch,
}

/// Memory that is used again at every step.
#[derive(Debug, Clone, Default)]
struct Scratch {
    logits: Vec<f32>,
    list: Vec<Candidate>,
    /// Adaptive-p: the row before it was adapted.
    before: Vec<Candidate>,
    dry: DryScan,
}

impl Sampler {
    /// A sampler for a request with this prompt. Without a seed in `params`, a random one is taken.
    pub fn new(params: &SamplingParams, prompt: &[u32]) -> Result<Self, SamplingError> {
        // What depends on the vocabulary is checked when the first logits show its size.
        params.validate(usize::MAX)?;
        let counted = match params.penalises() {
            true => Window::of(params.repeat_last_n),
            false => Window::Nothing,
        };
        let wanted = &params.dry_sequence_breakers;
        let breakers = match wanted.tokens() {
            Some(tokens) => Arc::clone(tokens),
            None if wanted.texts().is_empty() || !params.looks_for_repetitions() => Arc::default(),
            None => return Err(ParamError::Breakers.into()),
        };
        let mut history = History::new(counted, params.looks_for_repetitions());
        history.extend(prompt);
        let kinds = params.samplers.kinds();
        let leading = kinds.iter().take_while(|kind| works_on_whole_rows(kind));
        Ok(Sampler {
            leading: leading.count(),
            seed: params.seed.unwrap_or_else(random_seed),
            step: 0,
            history,
            feedback: Feedback::new(params),
            breakers,
            row_draw: RowDraw::of(params),
            params: params.clone(),
            scratch: Scratch::default(),
        })
    }

    /// The seed in use, which repeats the answer.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Chooses the next token from the model's `logits` and remembers it.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sample, SamplingError> {
        if self.step == 0 {
            self.params.validate(logits.len())?;
        }
        let step = self.step;
        if let Some((token, value)) = select::not_a_number(logits) {
            return Err(SamplingError::NotANumber { step, token, value });
        }
        let sample = self.choose(logits).ok_or(SamplingError::NoToken {
            step,
            vocab_size: logits.len(),
        })?;
        self.accept(sample.token);
        Ok(sample)
    }

    /// What a device needs to choose a token of this request itself; none where it takes more than a row and a few
    /// numbers. `ahead` is how many tokens before it are chosen but not yet known.
    pub fn row_draw(&self, ahead: u64) -> Option<RowDraw> {
        let draw = self.row_draw?;
        if draw.is_greedy() {
            return Some(draw);
        }
        let uniform = StepNoise::new(self.seed, self.step + ahead).rank();
        Some(RowDraw { uniform, ..draw })
    }

    /// Remembers the next token, which was chosen elsewhere by [`Sampler::row_draw`].
    pub fn accept(&mut self, token: u32) {
        self.step += 1;
        self.history.push(token);
    }

    /// Goes to a step.
    #[cfg(test)]
    pub(super) fn at(&mut self, step: u64) -> &mut Self {
        self.step = step;
        self
    }

    fn choose(&mut self, logits: &[f32]) -> Option<Sample> {
        let (params, history) = (&self.params, &self.history);
        let Scratch {
            logits: own,
            list,
            before,
            dry,
        } = &mut self.scratch;
        let scan = match params.dry_window() {
            Some(window) => {
                dry.scan(params.dry(), history.tail(window), &self.breakers);
                Some(&*dry)
            }
            None => None,
        };
        let kinds = match params.mirostat {
            Mirostat::Off => params.samplers.kinds(),
            // Mirostat takes the place of every sampler but the temperature.
            _ => &[],
        };
        let (leading, rest) = kinds.split_at_checked(self.leading).unwrap_or_default();
        let changes = params.penalises() && leading.contains(&SamplerKind::Penalties)
            || scan.is_some() && leading.contains(&SamplerKind::Dry);
        let mut row = if changes || !params.logit_bias.is_empty() {
            own.clear();
            own.extend_from_slice(logits);
            add_bias(own, &params.logit_bias);
            for kind in leading {
                match (kind, scan) {
                    (SamplerKind::Penalties, _) => penalise(own, history, params),
                    (_, Some(scan)) => scan.penalise(params.dry(), own),
                    _ => {}
                }
            }
            Row::new(own, list)
        } else {
            Row::new(logits, list)
        };
        let mut noise = StepNoise::new(self.seed, self.step);
        let token = if params.is_greedy() && !rest.iter().any(works_on_whole_rows) {
            row.keep_one();
            row.list().first()?.token
        } else {
            for kind in rest {
                apply(*kind, params, history, scan, &noise, &mut row);
            }
            let vocab_size = logits.len();
            match params.mirostat {
                Mirostat::Off if params.adaptive_target >= 0.0 => {
                    draw_adaptive(&mut row, params, &mut self.feedback, &mut noise, before)?
                }
                Mirostat::Off if params.draws_by_rank() => draw_by_rank(&mut row, noise.rank())?,
                Mirostat::Off => draw(&mut row, &mut noise)?,
                _ => draw_mirostat(&mut row, params, &mut self.feedback, &mut noise, vocab_size)?,
            }
        };
        let logprobs = params.logprobs.map(|request| match request.stage {
            LogprobStage::Model => logprobs::of_logits(logits, token, request.top),
            LogprobStage::Drawn => {
                let scale = row.scale();
                logprobs::of_candidates(row.list(), scale, token, request.top)
            }
        });
        Some(Sample { token, logprobs })
    }
}

fn works_on_whole_rows(kind: &SamplerKind) -> bool {
    matches!(kind, SamplerKind::Penalties | SamplerKind::Dry)
}

/// One sampler of the order.
fn apply(
    kind: SamplerKind,
    params: &SamplingParams,
    history: &History,
    scan: Option<&DryScan>,
    noise: &StepNoise,
    row: &mut Row<'_>,
) {
    let min_keep = params.min_keep.max(1);
    let wide = |number: f32| f64::from(number);
    match kind {
        SamplerKind::Penalties if params.penalises() => penalise_row(row, history, params),
        SamplerKind::Dry => {
            if let Some(scan) = scan {
                scan.penalise_row(params.dry(), row);
            }
        }
        SamplerKind::TopNSigma => filter::top_n_sigma(row, params.top_n_sigma, min_keep),
        SamplerKind::TopK => filter::top_k(row, params.top_k as usize, min_keep),
        SamplerKind::TypicalP => filter::typical(row, wide(params.typical_p), min_keep),
        SamplerKind::TopP => filter::top_p(row, wide(params.top_p), min_keep),
        SamplerKind::MinP => filter::min_p(row, wide(params.min_p), min_keep),
        SamplerKind::Xtc if params.xtc_probability > 0.0 => filter::xtc(
            row,
            wide(params.xtc_probability),
            wide(params.xtc_threshold),
            min_keep,
            noise.chance(),
        ),
        SamplerKind::Temperature => filter::temperature(
            row,
            wide(params.temperature),
            wide(params.dynatemp_range),
            wide(params.dynatemp_exponent),
        ),
        SamplerKind::Penalties | SamplerKind::Xtc | SamplerKind::AdaptiveP => {}
    }
}

fn draw_mirostat(
    row: &mut Row<'_>,
    params: &SamplingParams,
    feedback: &mut Feedback,
    noise: &mut StepNoise,
    vocab_size: usize,
) -> Option<u32> {
    filter::temperature(row, f64::from(params.temperature), 0.0, 1.0);
    match params.mirostat {
        Mirostat::V1 => filter::mirostat(row, feedback.mu, vocab_size),
        _ => filter::mirostat_v2(row, feedback.mu),
    }
    let softmax = row.softmax();
    let token = draw(row, noise)?;
    feedback.surprised(softmax.p(logit_of(row.list(), token)?), params);
    Some(token)
}

fn draw_adaptive(
    row: &mut Row<'_>,
    params: &SamplingParams,
    feedback: &mut Feedback,
    noise: &mut StepNoise,
    before: &mut Vec<Candidate>,
) -> Option<u32> {
    before.clone_from(row.list());
    let softmax = feedback.adapt(row, f64::from(params.adaptive_target));
    let token = draw(row, noise)?;
    let p = softmax.p(logit_of(before, token)?);
    feedback.adapted(p, f64::from(params.adaptive_decay));
    Some(token)
}

fn logit_of(list: &[Candidate], token: u32) -> Option<f32> {
    let found = list.iter().find(|candidate| candidate.token == token);
    found.map(|candidate| candidate.logit)
}

impl SamplingParams {
    /// The numbers of DRY.
    fn dry(&self) -> Dry {
        Dry {
            multiplier: self.dry_multiplier,
            base: self.dry_base,
            allowed_length: self.dry_allowed_length as usize,
        }
    }

    /// How far DRY looks back; none when it is off.
    fn dry_window(&self) -> Option<Window> {
        self.looks_for_repetitions()
            .then(|| Window::of(self.dry_penalty_last_n))
    }
}
