//! `cargo xtask soak`: our server under mixed traffic for as long as asked, and whether it comes back to where it was.

use super::args::SoakArgs;
use super::machine::Machine;
use super::ours::Ours;
use super::server::Running;
use crate::error::Error;
use crate::model;
use crate::process::Run;
use crate::workspace::Workspace;

/// Small enough that the cache has to evict and requests have to step back, so that those ways are walked too.
const SERVER_FLAGS: [&str; 7] = [
    "--metrics",
    "--parallel",
    "4",
    "--ctx-size",
    "2048",
    "--max-queue-depth",
    "8",
];

pub fn run(workspace: &Workspace, args: &SoakArgs) -> Result<(), Error> {
    let ours = Ours::prepare(workspace, !args.no_build, args.threads, &args.ours)?;
    let model = match &args.gguf {
        Some(path) => path.clone(),
        None => model::fetch(workspace)?,
    };
    let out = args
        .out
        .clone()
        .unwrap_or_else(|| workspace.target.join("soak"));
    std::fs::create_dir_all(&out).map_err(Error::io("create", &out))?;
    let machine = Machine::now(&workspace.root);
    let flags = SERVER_FLAGS.map(str::to_owned);
    let server = Running::ours(&ours, &model, &flags, &out.join("server.log"))?;
    let (csv, curve) = (out.join("soak.csv"), out.join("soak.md"));
    eprintln!("{} minutes of traffic for {}", args.minutes, server.url);
    let outcome = Run::new(&ours.load)
        .args(["soak", "--url", &server.url])
        .args(["--process", &server.process().to_string()])
        .args([
            "--seconds",
            &((args.minutes * 60.0).ceil() as u64).to_string(),
        ])
        .args([
            "--every-ms",
            &((args.every * 1e3) as u64).max(1).to_string(),
        ])
        .args(["--clients", &args.clients.to_string()])
        .args(["--long-tokens", &args.long_prompt.to_string()])
        .arg("--csv")
        .arg(&csv)
        .arg("--curve")
        .arg(&curve)
        .run();
    // Even of a run that found something: that is when it is wanted.
    if curve.is_file() {
        let text = std::fs::read_to_string(&curve).map_err(Error::io("read", &curve))?;
        let options = SERVER_FLAGS
            .iter()
            .copied()
            .chain(args.ours.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" ");
        let page = format!(
            "# {}, soak\n\n{}.\n\n`cargo xtask soak`, server options `{options}`, {} threads.\n\n{text}",
            machine.date,
            machine.text(),
            args.threads
        );
        std::fs::write(&curve, &page).map_err(Error::io("write", &curve))?;
        println!("{page}");
        eprintln!("{} and {} written", csv.display(), curve.display());
    }
    outcome.map_err(Error::from)
}
