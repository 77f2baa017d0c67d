//! `mlxcel generate`: one prompt, one answer.

use std::io::Read;

use clap::Args;
use mlxcel_registry::store::Revision;

use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::generation::{GenerationArgs, PromptForm};
use super::interrupt::Interrupts;
use super::place::open_store;
use super::repl::answer;
use super::session::{Prepared, Session};

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Model: a path, `owner/name` or `name`
    #[arg(short, long)]
    model: String,
    /// The prompt; `-` reads it from stdin
    #[arg(
        short,
        long,
        value_name = "TEXT",
        required_unless_present = "estimate_memory"
    )]
    prompt: Option<String>,
    /// Give the prompt to the model as it is, without its chat template
    #[arg(long, conflicts_with_all = ["chat_template", "chat_template_file", "system"], help_heading = "Prompt")]
    no_chat_template: bool,
    #[command(flatten)]
    pub(super) generation: GenerationArgs,
}

/// Runs the command.
pub fn run(args: &GenerateArgs, console: &Console) -> Result<Exit, CliError> {
    let interrupts = Interrupts::install()?;
    let store = open_store(&args.generation.model.store)?;
    let revision = args
        .generation
        .model
        .revision
        .as_deref()
        .map(Revision::parse)
        .transpose()?;
    let resolved = store.resolve(&store.parse(&args.model)?, revision.as_ref())?;
    let prompt = args.prompt.as_deref().map(prompt_text).transpose()?;
    let form = if args.no_chat_template {
        PromptForm::Raw
    } else {
        PromptForm::Message
    };
    let prepared = Session::prepare(&resolved, &args.generation, form, console)?;
    let (Prepared::Session(mut session), Some(prompt)) = (prepared, prompt) else {
        return Ok(Exit::Success);
    };
    let was_cut = answer(session.as_mut(), &prompt, console, &interrupts)?;
    session.report(console);
    Ok(if was_cut {
        Exit::Interrupted
    } else {
        Exit::Success
    })
}

/// The prompt that a flag gives; `-` is all of stdin.
pub fn prompt_text(text: &str) -> Result<String, CliError> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut prompt = String::new();
    std::io::stdin()
        .read_to_string(&mut prompt)
        .map_err(CliError::Stdin)?;
    Ok(prompt)
}
