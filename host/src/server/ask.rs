//! From a request to its answers: what every dialect does in the same order.
//!
//! Fields are read first, then places in the queue are taken, then the costly part (template, tokenizer) runs on a
//! blocking thread, then the engine gets the prompts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use serde_json::Value;

use crate::sampling::SamplingParams;
use crate::text::{StopMatcher, StopText, StreamStart};

use super::app::App;
use super::auth::Tenant;
use super::error::{ApiError, Dialect, Kind};
use super::fields::Fields;
use super::generation::{Generation, Output, Plan};
use super::sampling_fields::{check, sampling};
use super::served::Served;
use super::sse::{Encoder, stream};

/// Bounds of the priority in both directions.
const MAX_PRIORITY: i64 = 100;

/// Names of the number of answers.
const ANSWERS: [&str; 2] = ["n", "n_cmpl"];

/// Most answers to one prompt.
const MAX_ANSWERS: i64 = 128;

/// How long a stream may keep its status back, so that what fails at once has an error status.
const FIRST_REPORT: Duration = Duration::from_millis(500);

/// Settings that all dialects have, under the same names.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Answers to each prompt.
    pub answers: usize,
    /// The name under which they were asked for.
    pub answers_name: &'static str,
    /// Texts that end an answer, as given.
    pub stops: Vec<String>,
    /// What finds them.
    stop_matcher: StopMatcher,
    /// Whether to stream.
    pub is_stream: bool,
    /// Whether the model's own ends do not end it.
    pub ignore_eos: bool,
    /// Lower is more urgent.
    pub priority: i32,
    /// For the whole answer.
    pub limit: Duration,
    /// Of generation, after which an answer ends at a line break.
    pub predict_limit: Option<Duration>,
    /// Of silence before a comment line.
    pub ping: Option<Duration>,
    /// Whether each chunk has timings.
    pub timings_per_token: bool,
    /// Whether progress on the prompt is reported.
    pub return_progress: bool,
}

impl Settings {
    /// Reads them.
    pub fn read(fields: &mut Fields, app: &App, served: &Served) -> Result<Self, ApiError> {
        let name = fields.text("model")?;
        served.check_name(name.as_deref())?;
        let mut sampling = sampling(fields, &served.defaults.sampling, &served.text.tokenizer)?;
        let ignore_eos = fields
            .boolean("ignore_eos")?
            .unwrap_or(served.defaults.ignore_eos);
        if ignore_eos {
            sampling.forbid(served.text.eos.ids());
        }
        check(&sampling, served.facts.vocab_size, fields)?;
        let answers = fields.integer_in(&ANSWERS, 1, MAX_ANSWERS)?.unwrap_or(1) as usize;
        let ping = match fields.integer_in(&["sse_ping_interval"], -1, i64::from(i32::MAX))? {
            None => app.options.limits.ping,
            Some(seconds) => u64::try_from(seconds)
                .ok()
                .map(|seconds| Duration::from_secs(seconds.max(1))),
        };
        let stops = fields.texts("stop")?.unwrap_or_default();
        let settings = Self {
            sampling,
            answers,
            answers_name: fields.spelling(&ANSWERS),
            stop_matcher: StopMatcher::new(stops.iter().cloned(), StopText::Exclude)?,
            stops,
            is_stream: fields.boolean("stream")?.unwrap_or(false),
            ignore_eos,
            priority: fields
                .integer_in(&["priority"], -MAX_PRIORITY, MAX_PRIORITY)?
                .unwrap_or(0) as i32,
            limit: limit(fields, app.options.limits.answer)?,
            predict_limit: fields
                .integer_in(&["t_max_predict_ms"], -1, i64::from(u32::MAX))?
                .and_then(|ms| u64::try_from(ms).ok())
                .filter(|ms| *ms > 0)
                .map(Duration::from_millis),
            ping,
            timings_per_token: fields.boolean("timings_per_token")?.unwrap_or(false),
            return_progress: fields.boolean("return_progress")?.unwrap_or(false),
        };
        fixed(fields)?;
        Ok(settings)
    }

    /// The plan for these prompts.
    pub fn plan(
        &self,
        tenant: &Tenant,
        max_tokens: Option<usize>,
        start: StreamStart,
        arrived: Instant,
    ) -> Plan {
        Plan {
            prompts: Vec::new(),
            answers: self.answers,
            answers_name: self.answers_name,
            sampling: self.sampling.clone(),
            max_tokens,
            stops: self.stop_matcher.clone(),
            start,
            ignore_eos: self.ignore_eos,
            namespace: tenant.namespace().to_owned(),
            priority: self.priority,
            limit: self.limit,
            predict_limit: self.predict_limit,
            arrived,
        }
    }
}

/// Seconds for the whole answer: what the request allows, but not more than the server does.
fn limit(fields: &mut Fields, most: Duration) -> Result<Duration, ApiError> {
    let Some(seconds) = fields.number(&["timeout"])? else {
        return Ok(most);
    };
    let limit = Duration::try_from_secs_f32(seconds).unwrap_or(Duration::ZERO);
    if limit.is_zero() || limit > most {
        let message = format!(
            "timeout is {seconds}, expected seconds above 0 and up to this server's {}",
            most.as_secs()
        );
        return Err(ApiError::field("timeout", message));
    }
    Ok(limit)
}

/// The one value that a field may have, for programs that always send it.
type IsFixed = fn(&Value) -> bool;

/// Fields that other servers have and that are settled here.
const FIXED: [(&str, IsFixed, &str); 7] = [
    (
        "cache_prompt",
        |value| value == &Value::Bool(true),
        "the prefix cache is always on, so it can only be true",
    ),
    (
        "id_slot",
        |value| value.as_i64() == Some(-1),
        "the engine chooses, so it can only be -1",
    ),
    (
        "n_keep",
        |value| value.is_i64(),
        "it has to be a whole number",
    ),
    (
        "n_discard",
        |value| value.as_i64() == Some(0),
        "contexts are never shifted, so it can only be 0",
    ),
    (
        "n_cache_reuse",
        |value| value.as_i64() == Some(0),
        "caches are never shifted, so it can only be 0",
    ),
    (
        "verbose",
        |value| value == &Value::Bool(false),
        "it can only be false",
    ),
    (
        "stop_token_ids",
        |value| value.as_array().is_some_and(Vec::is_empty),
        "use \"stop\"",
    ),
];

fn fixed(fields: &mut Fields) -> Result<(), ApiError> {
    for (name, is_fixed, why) in FIXED {
        if let Some(value) = fields.take(name)
            && !is_fixed(&value)
        {
            return Err(ApiError::unsupported(
                name,
                format!("{name} cannot be set to that here: {why}"),
            ));
        }
    }
    Ok(())
}

/// Runs something that computes for long where it does not keep other requests waiting.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => {
            tracing::error!("a request could not be prepared: {error}");
            Err(ApiError::new(
                Kind::Internal,
                "the request could not be prepared",
            ))
        }
    }
}

/// Takes places in the queue, makes the prompts of a field, and starts.
pub async fn start(
    app: &Arc<App>,
    served: &Arc<Served>,
    mut plan: Plan,
    (name, prompt_count): (&'static str, usize),
    prompts: impl FnOnce(&Served) -> Result<Vec<Vec<u32>>, ApiError> + Send + 'static,
) -> Result<(Generation, Plan), ApiError> {
    let field = match plan.answers {
        1 => name,
        _ => plan.answers_name,
    };
    let permits = app.admit(&plan.namespace, prompt_count * plan.answers, field)?;
    // From here on the server waits for it when it ends.
    let live = app.live();
    let own = Arc::clone(served);
    let mut sampling = plan.sampling;
    (plan.prompts, plan.sampling) = blocking(move || {
        let prompts = prompts(&own)?;
        prompts
            .iter()
            .try_for_each(|prompt| own.check_prompt(name, prompt))?;
        own.text.resolve(&mut sampling)?;
        Ok((prompts, sampling))
    })
    .await?;
    let generation = Generation::start(served, &plan, permits, live)?;
    Ok((generation, plan))
}

/// Answers with a stream of events. What fails before the first report still gets its own status.
pub async fn respond_with_stream<E: Encoder>(
    mut generation: Generation,
    encoder: E,
    dialect: Dialect,
    ping: Option<Duration>,
) -> Result<Response, ApiError> {
    let first = match tokio::time::timeout(FIRST_REPORT, generation.next()).await {
        Ok(Some(outcome)) => Some(outcome?),
        Ok(None) | Err(_) => None,
    };
    Ok(stream(generation, first, encoder, dialect, ping))
}

/// Reads all answers to their end, each as its text, tokens and log probabilities with its end.
pub async fn collect(generation: &mut Generation) -> Result<Vec<super::answer::Answer>, ApiError> {
    let mut answers: Vec<super::answer::Answer> =
        vec![super::answer::Answer::default(); generation.len()];
    while let Some(output) = generation.next().await {
        match output? {
            Output::Text { choice, piece } => {
                if let Some(answer) = answers.get_mut(choice) {
                    answer.add(piece);
                }
            }
            Output::End { choice, end } => {
                if let Some(answer) = answers.get_mut(choice) {
                    answer.end(*end);
                }
            }
            Output::Prompt { .. } | Output::Tick => {}
        }
    }
    Ok(answers)
}
