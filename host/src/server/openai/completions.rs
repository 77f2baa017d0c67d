//! `/v1/completions`: raw prompts.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use crate::sampling::LogprobsRequest;
use crate::text::StreamStart;

use super::super::answer::{self, finish_reason, timings};
use super::super::app::App;
use super::super::ask::{self, Settings};
use super::super::auth::Tenant;
use super::super::body::{Turn, read_fields};
use super::super::choice::TokenLogprob;
use super::super::error::{ApiError, Dialect};
use super::super::fields::Fields;
use super::super::prompt::{Prompt, encode, prompts, spell};
use super::super::reply::json_response;
use super::super::sampling_fields::{check, probability_stage};
use super::super::served::Served;
use super::completions_stream::CompletionStream;
use super::{Head, include_usage, labels, max_tokens, refuse, with};

/// Most alternatives of a token, as OpenAI has it.
const MAX_LOGPROBS: i64 = 5;

struct Ask {
    prompts: Vec<Prompt>,
    settings: Settings,
    max_tokens: Option<usize>,
    includes_usage: bool,
    /// Prompts that are given back.
    echoed: Vec<String>,
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
        let top = fields.integer_in(&["logprobs"], 0, MAX_LOGPROBS)?;
        let stage = probability_stage(&mut fields)?;
        settings.sampling.logprobs = top.map(|top| LogprobsRequest {
            top: top as usize,
            stage,
        });
        check(&settings.sampling, served.facts.vocab_size, &fields)?;
        let echoes = fields.boolean("echo")?.unwrap_or(false);
        if echoes && top.is_some() {
            let message = "echo with logprobs is not supported: the log probabilities of a prompt are not computed";
            return Err(ApiError::unsupported("echo", message));
        }
        if let Some(best_of) = fields.integer(&["best_of"])?
            && best_of != settings.answers as i64
        {
            let message = format!(
                "best_of is {best_of} and {} is {}: answers are not ranked here, so both have to agree",
                settings.answers_name, settings.answers
            );
            return Err(ApiError::unsupported("best_of", message));
        }
        let includes_usage = include_usage(&mut fields, settings.is_stream)?;
        let max_tokens = max_tokens(
            &mut fields,
            &["max_tokens", "max_completion_tokens", "n_predict"],
            served.defaults.max_tokens,
        )?;
        refuse(&mut fields, &["suffix", "json_schema"])?;
        labels(&mut fields)?;
        fields.finish()?;
        let spell = |prompt| spell(prompt, &served.text.tokenizer);
        let echoed = match echoes {
            true => prompts.iter().map(spell).collect(),
            false => Vec::new(),
        };
        Ok(Self {
            prompts,
            settings,
            max_tokens,
            includes_usage,
            echoed,
        })
    }
}

/// The route.
pub async fn completions(
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
        includes_usage,
        echoed,
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
    let (mut generation, _) = ask::start(&app, &served, plan, ("prompt", count), encoded).await?;
    let head = Head::new("cmpl", &served.id);
    if settings.is_stream {
        let encoder = CompletionStream::new(head, &settings, includes_usage, echoed, arrived);
        return ask::respond_with_stream(generation, encoder, Dialect::OpenAi, settings.ping).await;
    }
    let answers = ask::collect(&mut generation).await?;
    let choices = answers.iter().enumerate().map(|(index, answer)| {
        let before = echoed.get(index / settings.answers).map(String::as_str).unwrap_or_default();
        let mut offset = 0;
        json!({
            "index": index,
            "text": format!("{before}{}", answer.text),
            "logprobs": settings.sampling.logprobs.map(|_| legacy_logprobs(&answer.logprobs, &mut offset)),
            "finish_reason": answer.reason.map(finish_reason),
        })
    });
    let object = head.object("text_completion", choices.collect());
    let object = with(
        object,
        "usage",
        answer::usage(
            answers.iter().map(|answer| &answer.figures),
            settings.answers,
        ),
    );
    let object = match answers.first() {
        Some(first) => with(object, "timings", timings(&first.figures)),
        None => object,
    };
    Ok(json_response(&object))
}

/// Log probabilities as this route has them: four lists. `offset` counts characters from the start of the answer.
pub fn legacy_logprobs(list: &[TokenLogprob], offset: &mut usize) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut offsets = Vec::new();
    let mut tops: Vec<Value> = Vec::new();
    for token in list {
        offsets.push(*offset);
        *offset += text(&token.bytes).chars().count();
        let mut top: Map<String, Value> = token
            .top
            .iter()
            .map(|(_, bytes, logprob)| (text(bytes), json!(logprob.max(f32::MIN))))
            .collect();
        // The drawn token is always among them.
        top.entry(text(&token.bytes))
            .or_insert_with(|| json!(token.logprob.max(f32::MIN)));
        tops.push(Value::Object(top));
    }
    json!({
        "tokens": list.iter().map(|token| text(&token.bytes)).collect::<Vec<_>>(),
        "token_logprobs": list.iter().map(|token| token.logprob.max(f32::MIN)).collect::<Vec<_>>(),
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}
