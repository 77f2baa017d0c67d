//! `mlxcel serve`, and the program `mlxcel-server`: the HTTP server.

mod flags;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser};
use mlxcel_registry::store::{Resolved, Revision};

use crate::chat::{ChatError, ModelText};
use crate::engine::batch::BatchLimits;
use crate::engine::load::step_budget;
use crate::engine::schedule::Budget;
use crate::engine::{
    EngineFacts, EngineHandle, LoadOptions, RANK_COMMAND, check_options, check_room, open_model,
    start_engine,
};
use crate::plugin::PROBE_COMMAND;
use crate::server::{Defaults, Served, Server, ServerError, unix_seconds};
use crate::template::{ChatTemplate, Limits, TemplateError, TemplateSet};

use super::args::{LogArgs, VERSION};
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::generation::ModelArgs;
use super::memory::{Plan, Verdict};
use super::place::{loader, open_store, usable_catalogue};
use super::progress::LoadProgress;
use super::table::counted;
use flags::{DefaultArgs, KvBudget, LimitArgs, ListenArgs};

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Model: a path, `owner/name` or `name`
    #[arg(value_name = "MODEL", required_unless_present = "named")]
    model: Option<String>,
    /// The same, as a flag
    #[arg(
        short = 'm',
        long = "model",
        id = "named",
        value_name = "MODEL",
        conflicts_with = "model"
    )]
    named: Option<String>,
    /// Name that answers carry and requests may use, in place of the model's own; further ones are accepted too
    #[arg(
        short = 'a',
        long,
        value_name = "NAME",
        value_delimiter = ',',
        help_heading = "Server"
    )]
    alias: Vec<String>,
    /// Chat template in place of the model's
    #[arg(
        long,
        value_name = "TEXT",
        conflicts_with = "chat_template_file",
        help_heading = "Defaults of requests"
    )]
    chat_template: Option<String>,
    /// File with a chat template in place of the model's
    #[arg(long, value_name = "FILE", help_heading = "Defaults of requests")]
    chat_template_file: Option<PathBuf>,
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    defaults: DefaultArgs,
    #[command(flatten)]
    loading: ModelArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// Serves a language model over HTTP.
#[derive(Debug, Parser)]
#[command(name = "mlxcel-server", version = VERSION)]
struct ServerCli {
    #[command(flatten)]
    args: ServeArgs,
}

/// Runs `mlxcel-server` with the arguments of this process.
pub fn server_main() -> ExitCode {
    // The parent of a probe or of a rank starts its own program, which may be this one.
    let first = std::env::args_os().nth(1);
    let is_child = [PROBE_COMMAND, RANK_COMMAND].map(OsStr::new).map(Some);
    if is_child.contains(&first.as_deref()) {
        return super::main();
    }
    let cli = match ServerCli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return super::usage(error),
    };
    let console = Console::new(cli.args.log.quiet);
    let outcome =
        super::logging::start(cli.args.log.verbose).and_then(|()| run(&cli.args, &console));
    super::report(outcome, &console)
}

/// Runs the command.
pub fn run(args: &ServeArgs, console: &Console) -> Result<Exit, CliError> {
    let options = args.listen.options(&args.limits)?;
    let defaults = args.defaults.defaults()?;
    let store = open_store(&args.loading.store)?;
    let revision = args
        .loading
        .revision
        .as_deref()
        .map(Revision::parse)
        .transpose()?;
    let name = args
        .named
        .as_ref()
        .or(args.model.as_ref())
        .map_or("", String::as_str);
    let resolved = store.resolve(&store.parse(name)?, revision.as_ref())?;
    if args.loading.estimate_memory {
        prepare(args, &resolved, console)?;
        return Ok(Exit::Success);
    }
    // Before anything else starts threads; from here on health says that the model is loading.
    let server = Server::bind(options).map_err(of_server)?;
    let Some(prepared) = prepare(args, &resolved, console)? else {
        return Ok(Exit::Success);
    };
    // Who reads the address may rely on it: what is left is the reading of the weights.
    console.line(format_args!("listening on {}", server.address()))?;
    console.note("loading the model; until it is there requests are answered with 503");
    let served = load(args, &resolved, prepared, defaults, console)?;
    console.note(format_args!(
        "ready: serving {:?} on {}",
        served.id,
        server.address()
    ));
    server.serve(served);
    match server.run() {
        0 => console.note("no answer was cut at the end"),
        1 => console.warning("1 answer was not finished in time and ended with an error"),
        cut => console.warning(format_args!(
            "{cut} answers were not finished in time and ended with an error"
        )),
    }
    Ok(Exit::Success)
}

struct Prepared {
    opened: crate::engine::OpenedModel,
    backend: crate::plugin::SelectedBackend,
    options: LoadOptions,
    text: ModelText,
    template: Option<ChatTemplate>,
}

/// Everything that can go wrong before the weights are read. None when only the estimate was wanted.
fn prepare(
    args: &ServeArgs,
    resolved: &Resolved,
    console: &Console,
) -> Result<Option<Prepared>, CliError> {
    let catalogue = usable_catalogue(&args.loading.plugins, console)?;
    let loader = loader()?;
    let opened = open_model(
        &resolved.path,
        &catalogue,
        &loader,
        args.loading.family.family.as_deref(),
    )?;
    let backend = loader.select_backend(&catalogue, &args.loading.backend)?;
    tracing::info!("{}", backend.summary);
    let options = LoadOptions {
        limits: BatchLimits {
            parallel: args.limits.parallel(),
            budget: args.limits.budget(),
        },
        kv_budget_bytes: match args.limits.kv_cache_budget {
            KvBudget::Auto => None,
            KvBudget::Bytes(bytes) => Some(bytes),
        },
        prefix: args.limits.prefix(),
        ..args.loading.load_options()
    };
    let rows = step_budget(&options, &backend).rows;
    if rows < options.limits.parallel {
        return Err(CliError::usage(format!(
            "--prefill-chunk-size {rows} is less than --parallel {}: every running answer needs a row of each step; raise the one or lower the other",
            options.limits.parallel
        )));
    }
    check_options(&opened, &backend, &options)?;
    let guard = Verdict::new(&opened, Some(&backend), Plan::of(&options))?;
    if args.loading.estimate_memory {
        console.line(guard.text())?;
        return Ok(None);
    }
    if !args.loading.force {
        guard.check()?;
    }
    check_room(
        &opened,
        &backend,
        &options,
        guard.estimate.weights_bytes,
        args.loading.force,
    )?;
    let text = ModelText::of(&opened)?;
    let template = template(args, &text)?;
    Ok(Some(Prepared {
        opened,
        backend,
        options,
        text,
        template,
    }))
}

/// The chat template: the one given, else the model's. A base model has none and serves completions only.
fn template(args: &ServeArgs, text: &ModelText) -> Result<Option<ChatTemplate>, CliError> {
    let given = match (&args.chat_template, &args.chat_template_file) {
        (Some(text), _) => Some(TemplateSet::from_text(text)),
        (None, Some(file)) => Some(TemplateSet::from_file(file).map_err(ChatError::from)?),
        (None, None) => None,
    };
    let Some(set) = given.as_ref().or(text.templates.as_ref()) else {
        return Ok(None);
    };
    let compile = |set: &TemplateSet| -> Result<ChatTemplate, TemplateError> {
        ChatTemplate::compile(
            set.select(None, false)?,
            text.tokenizer.control(),
            Limits::default(),
        )
    };
    Ok(Some(compile(set).map_err(ChatError::from)?))
}

fn load(
    args: &ServeArgs,
    resolved: &Resolved,
    prepared: Prepared,
    defaults: Defaults,
    console: &Console,
) -> Result<Served, CliError> {
    let Prepared {
        opened,
        backend,
        options,
        text,
        template,
    } = prepared;
    let desc = opened.desc.clone();
    let parallel = options.limits.parallel;
    let progress = LoadProgress::new(console);
    let started = start_engine(opened, backend, options, progress.reporter());
    progress.finish();
    let (engine, facts): (EngineHandle, EngineFacts) = started?;
    // Ready means that a token was computed, not that files were read.
    engine.score(vec![text.tokenizer.bos_id().unwrap_or(0)])?;
    console.note(format_args!(
        "{}, {}",
        super::session::headline(resolved, &facts),
        steps(parallel, &facts)
    ));
    if let Some(text) = super::session::shortage(&facts) {
        console.note(text);
    }
    let (id, aliases) = names(args, resolved);
    Ok(Served {
        engine,
        id,
        aliases,
        path: resolved.path.clone(),
        trained_context_tokens: desc.context_length,
        hidden_size: desc.hidden_size,
        kv_token_bytes: desc.of_rank(facts.ranks)?.kv_bytes_per_token(facts.kv_type),
        facts,
        text,
        template,
        defaults,
        created_s: unix_seconds(),
    })
}

/// What a step of the engine holds.
fn steps(parallel: usize, facts: &EngineFacts) -> String {
    let Budget {
        rows,
        prefill_rows_beside_decode,
    } = facts.steps;
    format!(
        "{} at a time, at most {rows} rows a step and {prefill_rows_beside_decode} of prompts beside answers",
        counted(parallel, "answer")
    )
}

/// The name of the model in answers, and the other names that requests may use.
fn names(args: &ServeArgs, resolved: &Resolved) -> (String, Vec<String>) {
    let mut names = args.alias.clone();
    names.extend(resolved.repo_id.as_ref().map(ToString::to_string));
    let is_gguf = resolved
        .path
        .extension()
        .is_some_and(|extension| extension == "gguf");
    let stem = if is_gguf {
        resolved.path.file_stem()
    } else {
        resolved.path.file_name()
    };
    names.extend(stem.map(|stem| stem.to_string_lossy().into_owned()));
    names.extend(file_name(&resolved.path));
    names.extend(args.named.iter().chain(&args.model).cloned());
    let mut seen: Vec<String> = Vec::new();
    for name in names.into_iter().filter(|name| !name.is_empty()) {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    let mut names = seen.into_iter();
    (
        names.next().unwrap_or_else(|| "model".to_owned()),
        names.collect(),
    )
}

fn file_name(path: &Path) -> Option<String> {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
}

fn is_port_in_use(place: &str, source: &std::io::Error) -> bool {
    source.kind() == std::io::ErrorKind::AddrInUse && !place.ends_with(".sock")
}

fn of_server(error: ServerError) -> CliError {
    match error {
        ServerError::System { action, source } => CliError::System { action, source },
        ServerError::Bind { place, source } if is_port_in_use(&place, &source) => {
            CliError::usage(format!(
                "cannot listen on {place}: {source}; give another --port, or --port 0, which takes a free one and says on stdout which"
            ))
        }
        error => CliError::usage(error.to_string()),
    }
}
