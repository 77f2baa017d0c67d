//! `/v1/chat/completions`, and what else takes a conversation.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use crate::sampling::LogprobsRequest;
use crate::template::{ContinueFinal, MessageField};
use crate::text::StreamStart;

use super::super::answer::{self, Answer, Probability, finish_reason, timings, token_logprobs};
use super::super::app::App;
use super::super::ask::{self, Settings};
use super::super::auth::Tenant;
use super::super::body::{Turn, read_fields};
use super::super::error::{ApiError, Dialect};
use super::super::fields::{Fields, expected};
use super::super::reply::json_response;
use super::super::sampling_fields::{check, probability_stage};
use super::super::served::{ChatPrompt, Served};
use super::chat_stream::ChatStream;
use super::messages::messages;
use super::{Head, include_usage, labels, max_tokens, refuse, with, word};

/// Most alternatives of a token, as OpenAI has it.
const MAX_TOP_LOGPROBS: i64 = 20;

/// A chat request, read.
#[derive(Debug)]
pub struct ChatAsk {
    /// The conversation.
    pub prompt: ChatPrompt,
    settings: Settings,
    max_tokens: Option<usize>,
    includes_usage: bool,
}

impl ChatAsk {
    async fn receive(
        request: Request,
        app: &Arc<App>,
        served: &Arc<Served>,
    ) -> Result<(Self, Turn), ApiError> {
        let (own, its) = (Arc::clone(app), Arc::clone(served));
        let read = move |fields| Self::read(fields, &own, &its);
        read_fields(request, app, read).await
    }

    /// Reads a request; every field is honoured or refused.
    pub fn read(mut fields: Fields, app: &App, served: &Served) -> Result<Self, ApiError> {
        let list = fields
            .list("messages")?
            .ok_or_else(|| ApiError::field("messages", "messages is missing"))?;
        let mut settings = Settings::read(&mut fields, app, served)?;
        settings.sampling.logprobs = logprobs(&mut fields)?;
        check(&settings.sampling, served.facts.vocab_size, &fields)?;
        let includes_usage = include_usage(&mut fields, settings.is_stream)?;
        let max_tokens = max_tokens(
            &mut fields,
            &["max_completion_tokens", "max_tokens", "n_predict"],
            served.defaults.max_tokens,
        )?;
        let prompt = chat_prompt(&mut fields, list, served)?;
        labels(&mut fields)?;
        unsupported(&mut fields)?;
        fields.finish()?;
        Ok(Self {
            prompt,
            settings,
            max_tokens,
            includes_usage,
        })
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<LogprobsRequest>, ApiError> {
    let is_wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer_in(&["top_logprobs"], 0, MAX_TOP_LOGPROBS)?;
    let native = fields.integer_in(&["n_probs"], 0, i64::from(u32::MAX))?;
    let stage = probability_stage(fields)?;
    let top = match (is_wanted, top, native.filter(|count| *count > 0)) {
        (false, Some(top), _) if top > 0 => {
            let message = "top_logprobs is given and logprobs is not true";
            return Err(ApiError::field("top_logprobs", message));
        }
        (_, Some(top), Some(native)) if top != native => {
            let message =
                format!("top_logprobs is {top} and n_probs is {native}: they are one setting");
            return Err(ApiError::field("n_probs", message));
        }
        (_, _, Some(native)) => native,
        (true, top, None) => top.unwrap_or(0),
        (false, _, None) => return Ok(None),
    };
    let top = top as usize;
    Ok(Some(LogprobsRequest { top, stage }))
}

fn chat_prompt(
    fields: &mut Fields,
    list: Vec<Value>,
    served: &Served,
) -> Result<ChatPrompt, ApiError> {
    let template = served.template.as_ref();
    let mut variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    for name in ["reasoning_effort", "verbosity"] {
        let Some(value) = fields.text(name)? else {
            continue;
        };
        if !template.is_some_and(|template| template.mentions(name)) {
            let message =
                format!("{name} has no effect on this model: its chat template does not know it");
            return Err(ApiError::unsupported(name, message));
        }
        variables.insert(name.to_owned(), json!(value));
    }
    let continue_final = match fields.take("continue_final_message") {
        None | Some(Value::Bool(false)) => None,
        Some(Value::Bool(true)) => Some(ContinueFinal::default()),
        Some(Value::String(field)) if field == "content" => Some(ContinueFinal::default()),
        Some(Value::String(field)) if field == "reasoning_content" => Some(ContinueFinal {
            field: MessageField::Reasoning,
        }),
        Some(other) => {
            return Err(expected(
                "continue_final_message",
                "true, false, \"content\" or \"reasoning_content\"",
                &other,
            ));
        }
    };
    let wants_header = fields.boolean("add_generation_prompt")?;
    if continue_final.is_some() && wants_header == Some(true) {
        let message = "add_generation_prompt and continue_final_message exclude each other";
        return Err(ApiError::field("add_generation_prompt", message));
    }
    Ok(ChatPrompt {
        messages: messages(list, template)?,
        variables,
        continue_final,
        add_generation_prompt: wants_header.unwrap_or(continue_final.is_none()),
    })
}

fn unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    response_format(fields)?;
    // Without tools there is nothing to choose from and nothing to call at once.
    refuse(fields, &["tools", "functions"])?;
    word(fields, "tool_choice", &["auto", "none"])?;
    word(fields, "function_call", &["auto", "none"])?;
    fields.boolean("parallel_tool_calls")?;
    match fields.list("modalities")?.as_deref() {
        None => {}
        Some([Value::String(only)]) if only == "text" => {}
        Some(_) => {
            return Err(ApiError::unsupported(
                "modalities",
                "modalities can only be [\"text\"] here",
            ));
        }
    }
    refuse(
        fields,
        &[
            "audio",
            "prediction",
            "web_search_options",
            "moderation",
            "prompt_cache_options",
            "prompt_cache_retention",
            "json_schema",
        ],
    )
}

/// Only plain text can be asked for.
fn response_format(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(format) = fields.object("response_format")? else {
        return Ok(());
    };
    let mut format = Fields::of(format, "response_format");
    match format.text("type")?.as_deref() {
        Some("text") => format.finish(),
        kind => {
            let kind = kind.unwrap_or("without a type");
            let message = format!("response_format is {kind}, supported here: text");
            Err(ApiError::unsupported("response_format", message))
        }
    }
}

/// The route.
pub async fn chat(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let served = Arc::clone(app.served()?);
    app.check_condition()?;
    let (ask, turn) = ChatAsk::receive(request, &app, &served).await?;
    let ChatAsk {
        prompt,
        settings,
        max_tokens,
        includes_usage,
    } = ask;
    let start = match prompt.continue_final {
        Some(_) => StreamStart::Continuation,
        None => StreamStart::Text,
    };
    let plan = settings.plan(&tenant, max_tokens, start, arrived);
    let (mut generation, _) = ask::start(&app, &served, plan, ("messages", 1), move |served| {
        let encoded = served.encode_chat(&prompt)?;
        drop((prompt, turn));
        Ok(vec![encoded])
    })
    .await?;
    let head = Head::new("chatcmpl", &served.id);
    if settings.is_stream {
        let encoder = ChatStream::new(head, &settings, includes_usage, arrived);
        return ask::respond_with_stream(generation, encoder, Dialect::OpenAi, settings.ping).await;
    }
    let answers = ask::collect(&mut generation).await?;
    let form = settings.sampling.logprobs.map(Probability::of);
    let choices = answers
        .iter()
        .enumerate()
        .map(|(index, answer)| choice(index, answer, form))
        .collect();
    let object = head.object("chat.completion", choices);
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

fn choice(index: usize, answer: &Answer, form: Option<Probability>) -> Value {
    json!({
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": null},
        "logprobs": form.map(|form| json!({"content": token_logprobs(&answer.logprobs, form), "refusal": null})),
        "finish_reason": answer.reason.map(finish_reason),
    })
}

/// `/apply-template`: the prompt of a conversation as text.
pub async fn apply_template(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let served = Arc::clone(app.served()?);
    let (ask, turn) = ChatAsk::receive(request, &app, &served).await?;
    let work = move || {
        let _turn = turn;
        served.render(&ask.prompt)
    };
    let prompt = ask::blocking(work).await?;
    Ok(json_response(&json!({"prompt": prompt.text()})))
}

/// `/v1/chat/completions/input_tokens`: how many tokens a conversation has.
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let served = Arc::clone(app.served()?);
    let (ask, turn) = ChatAsk::receive(request, &app, &served).await?;
    let work = move || {
        let _turn = turn;
        served.encode_chat(&ask.prompt)
    };
    let tokens = ask::blocking(work).await?;
    let object: Map<String, Value> = [
        ("object".to_owned(), json!("response.input_tokens")),
        ("input_tokens".to_owned(), json!(tokens.len())),
    ]
    .into_iter()
    .collect();
    Ok(json_response(&Value::Object(object)))
}
