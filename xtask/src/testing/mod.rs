//! `cargo xtask test`: what CI checks, step by step, cheapest first; stops at the first failure and says how to repeat it.

mod client;
mod environment;
mod steps;

use std::time::Instant;

use crate::cli::TestArgs;
use crate::error::Error;
use crate::workspace::Workspace;
use steps::{STEPS, Step};

pub fn run(workspace: &Workspace, args: &TestArgs) -> Result<(), Error> {
    if args.list {
        for step in STEPS {
            println!("{:10} {}", step.name, step.about);
        }
        return Ok(());
    }
    let chosen = choose(&args.only)?;
    let mut timings = Vec::new();
    for step in chosen {
        println!("==> {}: {}", step.name, step.about);
        let start = Instant::now();
        let outcome = (step.run)(workspace);
        let seconds = start.elapsed().as_secs_f64();
        outcome.map_err(|source| Error::Step {
            step: step.name,
            seconds,
            repeat: format!("cargo xtask test --only {}", step.name),
            source: Box::new(source),
        })?;
        println!("<== {} ({seconds:.1} s)", step.name);
        timings.push((step.name, seconds));
    }
    println!();
    for (name, seconds) in &timings {
        println!("{name:10} {seconds:8.1} s");
    }
    let total: f64 = timings.iter().map(|(_, seconds)| seconds).sum();
    println!("{:10} {total:8.1} s", "total");
    Ok(())
}

/// The named steps in their usual order; all of them if none is named.
fn choose(names: &[String]) -> Result<Vec<&'static Step>, Error> {
    for name in names {
        if !STEPS.iter().any(|step| step.name == name) {
            return Err(Error::NoSuchStep {
                name: name.clone(),
                known: STEPS
                    .iter()
                    .map(|step| step.name)
                    .collect::<Vec<_>>()
                    .join(", "),
            });
        }
    }
    Ok(STEPS
        .iter()
        .filter(|step| names.is_empty() || names.iter().any(|name| name == step.name))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_keep_their_order_and_unknown_ones_are_refused() {
        let names = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|name| (*name).to_owned()).collect();
            choose(&only).map(|steps| steps.iter().map(|step| step.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).expect("all").len(), STEPS.len());
        assert_eq!(names(&["clippy", "fmt"]).expect("both"), ["fmt", "clippy"]);
        let error = names(&["nonsense"]).expect_err("unknown").to_string();
        assert!(
            error.contains("nonsense") && error.contains("clippy"),
            "{error}"
        );
    }

    #[test]
    fn step_names_are_unique() {
        let mut names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
    }
}
