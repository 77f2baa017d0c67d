//! `mlxcel download`: brings a model of a repository to this machine.

use std::path::PathBuf;

use clap::Args;
use mlxcel_registry::store::{DownloadRequest, HubRef, Resolved, Revision, Store};

use super::args::{LogArgs, StoreArgs};
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::interrupt::Interrupts;
use super::place::open_store;
use super::progress::DownloadProgress;

/// Flags of `download`.
#[derive(Debug, Args)]
pub struct DownloadArgs {
    /// `owner/name`, `name`, `owner/name:QUANT` or `owner/name/file.gguf`
    model: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// Download to this folder and not to the store
    #[arg(long, value_name = "DIR")]
    local_dir: Option<PathBuf>,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// Runs the command; the path of what is then here goes to stdout.
pub fn run(args: &DownloadArgs, console: &Console) -> Result<Exit, CliError> {
    let store = open_store(&args.store)?;
    let mut request = DownloadRequest::new(HubRef::parse(&args.model, &store.env().default_org)?);
    request.revision = args.revision.as_deref().map(Revision::parse).transpose()?;
    request.local_dir.clone_from(&args.local_dir);
    let interrupts = Interrupts::install()?;
    let resolved = fetch(&store, &request, &interrupts, console)?;
    console.line(resolved.path.display())?;
    Ok(Exit::Success)
}

/// Downloads with progress on stderr; Ctrl-C stops it and keeps what arrived.
pub fn fetch(
    store: &Store,
    request: &DownloadRequest,
    interrupts: &Interrupts,
    console: &Console,
) -> Result<Resolved, CliError> {
    let cancel = request.cancel.clone();
    let _guard = interrupts.during(move || cancel.cancel());
    let mut progress = DownloadProgress::new(console);
    let outcome = store.download(request, &mut progress);
    progress.finish();
    Ok(outcome?)
}
