//! The steps themselves: each a name, a purpose, and a command or two.

use super::environment::Environment;
use crate::backend::Backend;
use crate::error::Error;
use crate::mlx::whole::Depth;
use crate::plugins::{self, Content, Request};
use crate::process::Run;
use crate::workspace::{Workspace, in_ci};
use crate::{abi_surface, deny, deps, families, mlx, model, tidy};

pub struct Step {
    pub name: &'static str,
    pub about: &'static str,
    pub run: fn(&Workspace) -> Result<(), Error>,
}

/// Cheap checks come first, and the tests last.
pub const STEPS: &[Step] = &[
    Step {
        name: "fmt",
        about: "formatting",
        run: fmt,
    },
    Step {
        name: "tidy",
        about: "sizes, headers, words, unsafe code, links, dependency list",
        run: tidy::run,
    },
    Step {
        name: "families",
        about: "the table of architectures is what the goldens' tests measured",
        run: |workspace| families::run(workspace, true),
    },
    Step {
        name: "setup",
        about: "MLX's library",
        run: setup,
    },
    Step {
        name: "model",
        about: "the small real model",
        run: fetch_model,
    },
    Step {
        name: "deny",
        about: "licences, bans and sources of dependencies",
        run: |workspace| deny::run(workspace, false),
    },
    Step {
        name: "clippy",
        about: "lints, as errors",
        run: clippy,
    },
    Step {
        name: "doc",
        about: "documentation builds, links in it included",
        run: doc,
    },
    Step {
        name: "abi",
        about: "the plugin interface is what abi/surface.txt says",
        run: abi,
    },
    Step {
        name: "plugins",
        about: "host and plugins, laid out as the host finds them",
        run: build_plugins,
    },
    Step {
        name: "deps",
        about: "dependency directions, and what plugins export",
        run: deps::run,
    },
    Step {
        name: "doctest",
        about: "examples in the documentation",
        run: doctest,
    },
    Step {
        name: "test",
        about: "unit, conformance and black-box tests",
        run: test,
    },
];

fn fmt(workspace: &Workspace) -> Result<(), Error> {
    let run = Run::cargo("fmt").args(["--all", "--check"]);
    Ok(run.dir(&workspace.root).run()?)
}

fn setup(workspace: &Workspace) -> Result<(), Error> {
    let tree = mlx::setup(workspace, Backend::Cpu, Depth::Contents)?;
    println!("{}", tree.root.display());
    Ok(())
}

fn fetch_model(workspace: &Workspace) -> Result<(), Error> {
    println!("{}", model::fetch(workspace)?.display());
    Ok(())
}

fn clippy(workspace: &Workspace) -> Result<(), Error> {
    let run = everywhere(workspace, Run::cargo("clippy"))?.args(["--all-targets", "--keep-going"]);
    Ok(run.args(["--", "-D", "warnings"]).run()?)
}

fn doc(workspace: &Workspace) -> Result<(), Error> {
    let run = everywhere(workspace, Run::cargo("doc"))?.args([
        "--no-deps",
        "--document-private-items",
        "--keep-going",
    ]);
    Ok(run.env("RUSTDOCFLAGS", "-D warnings").run()?)
}

fn abi(workspace: &Workspace) -> Result<(), Error> {
    abi_surface::run(workspace, true)
}

fn build_plugins(workspace: &Workspace) -> Result<(), Error> {
    let out = plugins::build_and_assemble(
        workspace,
        &Request {
            release: false,
            out: None,
            backends: vec![Backend::Cpu],
            content: Content::PluginsAndHost,
            depth: Depth::Sizes,
        },
    )?;
    println!("{}", out.display());
    Ok(())
}

fn doctest(workspace: &Workspace) -> Result<(), Error> {
    let run = everywhere(workspace, Run::cargo("test"))?.arg("--doc");
    Ok(Environment::of(workspace)?.on(run).run()?)
}

/// nextest where it is installed: it runs each test in its own process, so a crash in a plugin takes one test with it.
fn test(workspace: &Workspace) -> Result<(), Error> {
    let has_nextest = Run::cargo("nextest")
        .arg("--version")
        .capture()
        .is_ok_and(|outcome| outcome.status.success());
    let run = if has_nextest {
        everywhere(workspace, Run::cargo("nextest").arg("run"))?
    } else {
        everywhere(workspace, Run::cargo("test"))?.args([
            "--lib",
            "--bins",
            "--tests",
            "--examples",
        ])
    };
    Ok(Environment::of(workspace)?.on(run).run()?)
}

/// The whole workspace: backends of every device compile on a machine that has none.
fn everywhere(workspace: &Workspace, run: Run) -> Result<Run, Error> {
    let mut run = run.arg("--workspace").dir(&workspace.root);
    if in_ci() {
        run = run.arg("--locked");
    }
    Ok(run)
}
