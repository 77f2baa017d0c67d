//! `/completion` and `/completions`: raw prompts in llama-server's shape.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use crate::engine::FinishReason;
use crate::sampling::LogprobsRequest;
use crate::text::StreamStart;

use super::super::answer::{Answer, Probability, timings, token_logprobs};
use super::super::app::App;
use super::super::ask::{self, Settings};
use super::super::auth::Tenant;
use super::super::body::{Turn, read_fields};
use super::super::error::{ApiError, Dialect};
use super::super::fields::Fields;
use super::super::generation::Plan;
use super::super::openai::include_usage;
use super::super::prompt::{Prompt, encode, prompts};
use super::super::reply::json_response;
use super::super::sampling_fields::{check, probability_stage};
use super::super::served::Served;
use super::completion_stream::NativeStream;
use super::settings::full;

struct Ask {
    prompts: Vec<Prompt>,
    settings: Settings,
    max_tokens: Option<usize>,
    returns_tokens: bool,
    response_fields: Vec<String>,
}

impl Ask {
    async fn receive(
        request: Request,
        app: &Arc<App>,
        served: &Arc<Served>,
    ) -> Result<(Self, Turn), ApiError> {
        let (own, its) = (Arc::clone(app), Arc::clone(served));
        let read = move |fields| Self::read(fields, &own, &its);
        read_fields(request, app, read).await
    }

    fn read(mut fields: Fields, app: &App, served: &Served) -> Result<Self, ApiError> {
        let value = fields
            .take("prompt")
            .ok_or_else(|| ApiError::field("prompt", "prompt is missing"))?;
        let prompts = prompts("prompt", value)?;
        let mut settings = Settings::read(&mut fields, app, served)?;
        let probs = fields
            .integer_in(&["n_probs", "logprobs"], 0, i64::from(u32::MAX))?
            .unwrap_or(0);
        let stage = probability_stage(&mut fields)?;
        settings.sampling.logprobs = (probs > 0).then_some(LogprobsRequest {
            top: probs as usize,
            stage,
        });
        check(&settings.sampling, served.facts.vocab_size, &fields)?;
        // One token comes with the prompt in any case.
        let max_tokens = match fields.integer_in(
            &["n_predict", "max_tokens", "max_completion_tokens"],
            -1,
            i64::MAX,
        )? {
            None => served.defaults.max_tokens,
            Some(tokens) => usize::try_from(tokens).ok().map(|tokens| tokens.max(1)),
        };
        let returns_tokens = fields.boolean("return_tokens")?.unwrap_or(false);
        let response_fields = fields.texts("response_fields")?.unwrap_or_default();
        include_usage(&mut fields, settings.is_stream)?;
        fields.finish()?;
        Ok(Self {
            prompts,
            settings,
            max_tokens,
            returns_tokens,
            response_fields,
        })
    }
}

/// What every object of one response needs.
pub struct Shape {
    /// Settings of the request.
    pub settings: Settings,
    /// What was asked of the engine.
    pub plan: Plan,
    /// Name of the model.
    pub model: String,
    /// Prompts as text.
    pub prompts: Vec<String>,
    /// Whether answers carry the ids of their tokens.
    pub returns_tokens: bool,
    /// Members to keep; empty is all.
    pub response_fields: Vec<String>,
}

/// The route.
pub async fn completion(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let served = Arc::clone(app.served()?);
    app.check_condition()?;
    let (ask, turn) = Ask::receive(request, &app, &served).await?;
    let Ask {
        prompts,
        settings,
        max_tokens,
        returns_tokens,
        response_fields,
    } = ask;
    let plan = settings.plan(&tenant, max_tokens, StreamStart::Continuation, arrived);
    let count = prompts.len();
    let encoded = move |served: &Served| {
        let _turn = turn;
        prompts
            .iter()
            .map(|prompt| encode(prompt, &served.text.tokenizer))
            .collect()
    };
    let (mut generation, plan) =
        ask::start(&app, &served, plan, ("prompt", count), encoded).await?;
    let spelled = plan
        .prompts
        .iter()
        .map(|prompt| served.text.tokenizer.decode_verbatim(prompt))
        .collect();
    let (is_stream, ping) = (settings.is_stream, settings.ping);
    let shape = Shape {
        settings,
        plan,
        model: served.id.clone(),
        prompts: spelled,
        returns_tokens,
        response_fields,
    };
    if is_stream {
        return ask::respond_with_stream(
            generation,
            NativeStream::new(shape, arrived),
            Dialect::Native,
            ping,
        )
        .await;
    }
    let answers = ask::collect(&mut generation).await?;
    let mut objects: Vec<Value> = answers
        .iter()
        .enumerate()
        .map(|(index, answer)| shape.object(index, answer))
        .collect();
    Ok(match (objects.len(), objects.pop()) {
        (1, Some(only)) => json_response(&only),
        (_, last) => {
            objects.extend(last);
            json_response(&Value::Array(objects))
        }
    })
}

impl Shape {
    /// The form in which probabilities were asked for, if they were.
    pub fn probability(&self) -> Option<Probability> {
        self.plan.sampling.logprobs.map(Probability::of)
    }

    /// The object of a complete answer.
    pub fn object(&self, index: usize, answer: &Answer) -> Value {
        let tokens: &[u32] = if self.returns_tokens {
            &answer.tokens
        } else {
            &[]
        };
        let mut object = self.last(index, answer);
        object.insert("content".to_owned(), json!(answer.text));
        object.insert("tokens".to_owned(), json!(tokens));
        if let Some(form) = self.probability() {
            object.insert(
                "completion_probabilities".to_owned(),
                json!(token_logprobs(&answer.logprobs, form)),
            );
        }
        self.chosen(object)
    }

    /// The last object of a stream; text, tokens and probabilities came before.
    pub fn last(&self, index: usize, answer: &Answer) -> Map<String, Value> {
        let figures = &answer.figures;
        let prompt = self
            .prompts
            .get(index / self.plan.answers.max(1))
            .map(String::as_str)
            .unwrap_or_default();
        let settings = full(&self.settings, &self.plan.sampling, self.plan.max_tokens);
        let object = json!({
            "index": index,
            "content": "",
            "tokens": [],
            // Answers have no fixed place here.
            "id_slot": -1,
            "stop": true,
            "model": self.model,
            "tokens_predicted": figures.generated_tokens,
            "tokens_evaluated": figures.prompt_tokens,
            "generation_settings": settings,
            "prompt": prompt,
            "has_new_line": figures.has_new_line,
            "truncated": answer.reason == Some(FinishReason::ContextFull),
            "stop_type": answer.reason.map_or("none", stop_type),
            "stopping_word": answer.stop.as_deref().unwrap_or_default(),
            "tokens_cached": figures.prompt_tokens + figures.generated_tokens,
            "timings": timings(figures),
        });
        match object {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    /// Only the members that were asked for, each under the path that names it.
    pub fn chosen(&self, object: Map<String, Value>) -> Value {
        if self.response_fields.is_empty() {
            return Value::Object(object);
        }
        let object = Value::Object(object);
        let found = self.response_fields.iter().filter_map(|path| {
            let value = path
                .split('/')
                .try_fold(&object, |value, part| value.get(part))?;
            Some((path.clone(), value.clone()))
        });
        Value::Object(found.collect())
    }
}

fn stop_type(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Eos => "eos",
        FinishReason::StopText => "word",
        FinishReason::MaxTokens | FinishReason::ContextFull => "limit",
        FinishReason::Cancelled => "none",
    }
}
