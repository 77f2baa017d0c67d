//! Which crate may depend on which, read from `cargo metadata`, and what built plugins show to the loader.
//!
//! The directions are those of `docs/ARCHITECTURE.md`: abi → abi_stable; sdk → abi; families → sdk; backends → abi and
//! backends/mlx; registry → abi; host → abi and registry. Dev-dependencies are not looked at: tests may use anything.

mod graph;
mod rules;
mod symbols;

use crate::error::Error;
use crate::plugins;
use crate::workspace::Workspace;

pub fn run(workspace: &Workspace) -> Result<(), Error> {
    let metadata = workspace.graph()?;
    let graph = graph::Graph::of(&metadata, &workspace.root);
    let mut problems = rules::check(&graph);
    for problem in &problems {
        println!("error: {problem}");
    }
    println!(
        "deps: {} crates of the workspace checked",
        graph.members.len()
    );

    for release in [false, true] {
        let dir = plugins::default_dir(workspace, release);
        if dir.is_dir() {
            let (count, found) = symbols::check_all(&dir)?;
            for problem in &found {
                println!("error: {problem}");
            }
            println!(
                "deps: symbols of {count} plugins in {} checked",
                workspace.relative(&dir).display()
            );
            problems.extend(found);
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::Findings {
        check: "deps",
        count: problems.len(),
    })
}
