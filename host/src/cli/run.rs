//! `mlxcel run`: a conversation, or with `-p` one answer.

use std::io::IsTerminal;

use clap::Args;
use mlxcel_registry::store::{DownloadRequest, ModelRef, Resolved, Revision, Store, StoreError};

use super::console::Console;
use super::download::fetch;
use super::error::CliError;
use super::exit::Exit;
use super::generation::{GenerationArgs, PromptForm};
use super::interrupt::Interrupts;
use super::place::{cache_root, open_store};
use super::repl::{LineSource, Repl, TerminalLines, answer, piped_stdin};
use super::session::{Prepared, Session};

/// Used when no model is named.
const DEFAULT_MODEL: &str = "mlx-community/gemma-4-e2b-it-4bit";

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Model: a path, `owner/name` or `name`; downloaded if it is not on this machine
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Answer this prompt and end; `-` reads it from stdin
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    #[command(flatten)]
    pub(super) generation: GenerationArgs,
}

/// Runs the command.
pub fn run(args: &RunArgs, console: &Console) -> Result<Exit, CliError> {
    let interrupts = Interrupts::install()?;
    let store = open_store(&args.generation.model.store)?;
    let resolved = resolve(args, &store, &interrupts, console)?;
    let mut session =
        match Session::prepare(&resolved, &args.generation, PromptForm::Message, console)? {
            Prepared::Session(session) => session,
            Prepared::Estimated => return Ok(Exit::Success),
        };
    if let Some(prompt) = &args.prompt {
        let prompt = super::generate::prompt_text(prompt)?;
        let was_cut = answer(session.as_mut(), &prompt, console, &interrupts)?;
        session.report(console);
        return Ok(if was_cut {
            Exit::Interrupted
        } else {
            Exit::Success
        });
    }
    let mut lines: Box<dyn LineSource> =
        match std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
            true => Box::new(TerminalLines::new(
                cache_root(store.env()).map(|root| root.join("history")),
            )?),
            false => Box::new(piped_stdin()),
        };
    if lines.is_terminal() {
        console.note("/? lists the commands, Ctrl-D leaves");
    }
    Repl {
        chat: session.as_mut(),
        lines: lines.as_mut(),
        console,
        interrupts: &interrupts,
    }
    .run()?;
    session.report(console);
    Ok(Exit::Success)
}

/// The model on this machine, downloaded now where the user named it and it is not here.
fn resolve(
    args: &RunArgs,
    store: &Store,
    interrupts: &Interrupts,
    console: &Console,
) -> Result<Resolved, CliError> {
    let revision = args
        .generation
        .model
        .revision
        .as_deref()
        .map(Revision::parse)
        .transpose()?;
    let name = args.model.as_deref().unwrap_or(DEFAULT_MODEL);
    let model = store.parse(name)?;
    match (store.resolve(&model, revision.as_ref()), model) {
        (Err(StoreError::NotFound { .. }), _) if args.model.is_none() => {
            Err(CliError::NoDefaultModel {
                model: DEFAULT_MODEL.to_owned(),
            })
        }
        (Err(StoreError::NotFound { .. }), ModelRef::Hub(hub)) => {
            console.note(format_args!("{hub} is not on this machine"));
            let mut request = DownloadRequest::new(hub);
            request.revision = revision;
            fetch(store, &request, interrupts, console)
        }
        (outcome, _) => Ok(outcome?),
    }
}
