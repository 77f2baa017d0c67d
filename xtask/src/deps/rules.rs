//! The allowed directions, as data, and their check.

use std::collections::BTreeSet;

use super::graph::{Graph, Member};

/// What the crates of some folders may depend on.
struct Rule {
    applies: fn(&str) -> bool,
    /// Crates of this workspace that may be reached, directly or not.
    workspace: &'static [&'static str],
    /// Third-party crates that may be named; `None` is any.
    third_party: Option<&'static [&'static str]>,
    /// Third-party crates that may not be reached at all.
    never: &'static [&'static str],
}

/// No plugin and no contract crate starts an async runtime or opens a connection.
const RUNTIMES: &[&str] = &["tokio", "hyper", "axum", "ureq", "reqwest"];
const RUNTIMES_AND_CPP: &[&str] = &[
    "tokio",
    "hyper",
    "axum",
    "ureq",
    "reqwest",
    "cxx",
    "cxx-build",
    "cmake",
];

const RULES: &[Rule] = &[
    Rule {
        applies: |folder| folder == "abi",
        workspace: &[],
        third_party: Some(&["abi_stable"]),
        never: RUNTIMES_AND_CPP,
    },
    Rule {
        applies: |folder| folder == "abi/sdk",
        workspace: &["mlxcel-abi"],
        third_party: Some(&["serde", "serde_json", "half", "thiserror", "linkme"]),
        never: RUNTIMES_AND_CPP,
    },
    Rule {
        applies: |folder| folder.starts_with("families/"),
        workspace: &["mlxcel-sdk", "mlxcel-abi"],
        third_party: None,
        never: RUNTIMES_AND_CPP,
    },
    Rule {
        // Kernels compute on slices; that they are called through MLX or the ABI is not theirs to know.
        applies: |folder| folder.starts_with("backends/") && folder.ends_with("-kernels"),
        workspace: &[],
        third_party: None,
        never: RUNTIMES_AND_CPP,
    },
    Rule {
        applies: |folder| folder.starts_with("backends/"),
        workspace: &["mlxcel-abi", "mlxcel-backend-mlx", "mlxcel-cpu-kernels"],
        third_party: None,
        never: RUNTIMES,
    },
    Rule {
        applies: |folder| folder == "registry",
        workspace: &["mlxcel-abi"],
        third_party: None,
        never: &["cxx", "cxx-build", "cmake"],
    },
    Rule {
        applies: |folder| folder == "host",
        workspace: &["mlxcel-abi", "mlxcel-registry"],
        third_party: None,
        never: &["cxx", "cxx-build", "cmake"],
    },
    Rule {
        applies: |folder| folder == "xtask",
        workspace: &[],
        third_party: None,
        never: RUNTIMES_AND_CPP,
    },
];

/// Tests reach for whatever they test.
fn is_free(folder: &str) -> bool {
    folder == "tests" || folder.starts_with("tests/")
}

pub fn check(graph: &Graph) -> Vec<String> {
    let ours: BTreeSet<&str> = graph
        .members
        .iter()
        .map(|member| member.name.as_str())
        .collect();
    graph
        .members
        .iter()
        .filter(|member| !is_free(&member.folder))
        .flat_map(|member| check_member(member, &ours))
        .collect()
}

fn check_member(member: &Member, ours: &BTreeSet<&str>) -> Vec<String> {
    let Some(rule) = RULES.iter().find(|rule| (rule.applies)(&member.folder)) else {
        return vec![format!(
            "{} in {}/: no rule says what this folder may depend on; add one to xtask/src/deps/rules.rs",
            member.name, member.folder
        )];
    };
    let mut problems = Vec::new();
    for name in &member.transitive {
        let how = if member.direct.contains(name) {
            "depends on"
        } else {
            "reaches"
        };
        let is_ours = ours.contains(name.as_str());
        if is_ours && !rule.workspace.contains(&name.as_str()) {
            let allowed = match rule.workspace {
                [] => "no crate of the workspace".to_owned(),
                some => some.join(" and ") + " alone",
            };
            problems.push(format!(
                "{} ({}/) {how} {name}: this folder may use {allowed}",
                member.name, member.folder
            ));
        } else if rule.never.contains(&name.as_str()) {
            problems.push(format!(
                "{} ({}/) {how} {name}, which no crate of this folder may",
                member.name, member.folder
            ));
        }
    }
    if let Some(allowed) = rule.third_party {
        for name in &member.direct {
            if !ours.contains(name.as_str()) && !allowed.contains(&name.as_str()) {
                problems.push(format!(
                    "{} ({}/) depends on {name}: this folder may use {} alone",
                    member.name,
                    member.folder,
                    allowed.join(", ")
                ));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, folder: &str, direct: &[&str], through: &[&str]) -> Member {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let direct: BTreeSet<String> = set(direct);
        let mut transitive: BTreeSet<String> = set(through);
        transitive.extend(direct.iter().cloned());
        Member {
            name: name.into(),
            folder: folder.into(),
            direct,
            transitive,
        }
    }

    fn good() -> Vec<Member> {
        vec![
            member("mlxcel-abi", "abi", &["abi_stable"], &["libloading"]),
            member(
                "mlxcel-sdk",
                "abi/sdk",
                &["mlxcel-abi", "half"],
                &["abi_stable"],
            ),
            member(
                "mlxcel-family-llama",
                "families/llama",
                &["mlxcel-sdk", "linkme"],
                &["mlxcel-abi"],
            ),
            member(
                "mlxcel-backend-mlx",
                "backends/mlx",
                &["mlxcel-abi", "cxx"],
                &[],
            ),
            member("mlxcel-cpu-kernels", "backends/cpu-kernels", &["half"], &[]),
            member(
                "mlxcel-backend-cpu",
                "backends/cpu",
                &["mlxcel-backend-mlx", "mlxcel-cpu-kernels"],
                &["mlxcel-abi", "cxx"],
            ),
            member("mlxcel-registry", "registry", &["mlxcel-abi", "ureq"], &[]),
            member(
                "mlxcel",
                "host",
                &["mlxcel-registry", "tokio"],
                &["mlxcel-abi"],
            ),
            member(
                "mlxcel-tests",
                "tests",
                &["mlxcel-sdk", "mlxcel"],
                &["tokio"],
            ),
            member("xtask", "xtask", &["clap"], &[]),
        ]
    }

    fn problems_with(extra: Member) -> Vec<String> {
        let mut members = good();
        members.retain(|member| member.name != extra.name);
        members.push(extra);
        check(&Graph { members })
    }

    #[test]
    fn the_intended_graph_passes() {
        assert_eq!(check(&Graph { members: good() }), Vec::<String>::new());
    }

    #[test]
    fn each_wrong_direction_is_named() {
        let cases = [
            (
                member("mlxcel-abi", "abi", &["abi_stable", "serde"], &[]),
                "serde",
            ),
            (
                member("mlxcel-sdk", "abi/sdk", &["mlxcel-registry"], &[]),
                "mlxcel-registry",
            ),
            (
                member(
                    "mlxcel-family-llama",
                    "families/llama",
                    &["mlxcel-sdk"],
                    &["tokio"],
                ),
                "reaches tokio",
            ),
            (
                member(
                    "mlxcel-family-llama",
                    "families/llama",
                    &["mlxcel-backend-mlx"],
                    &[],
                ),
                "mlxcel-backend-mlx",
            ),
            (
                member("mlxcel-backend-cpu", "backends/cpu", &["mlxcel-sdk"], &[]),
                "mlxcel-sdk",
            ),
            (
                member("mlxcel-registry", "registry", &["mlxcel-sdk"], &[]),
                "mlxcel-sdk",
            ),
            (
                member("mlxcel", "host", &["mlxcel-family-llama"], &[]),
                "mlxcel-family-llama",
            ),
            (
                member(
                    "mlxcel-cpu-kernels",
                    "backends/cpu-kernels",
                    &["mlxcel-abi"],
                    &[],
                ),
                "no crate of the workspace",
            ),
            (member("new", "somewhere", &[], &[]), "no rule"),
        ];
        for (wrong, expected) in cases {
            let name = wrong.name.clone();
            let problems = problems_with(wrong);
            assert_eq!(problems.len(), 1, "{name}: {problems:?}");
            assert!(problems[0].contains(expected), "{problems:?}");
        }
    }
}
