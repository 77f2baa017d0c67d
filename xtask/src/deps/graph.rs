//! The dependency graph in the form that the rules ask it: by folder and by name, without dev-dependencies.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::workspace::{Metadata, Node};

#[derive(Debug)]
pub struct Member {
    pub name: String,
    /// Relative to the workspace, with forward slashes.
    pub folder: String,
    /// Crates that it names itself.
    pub direct: BTreeSet<String>,
    /// Those, and all that they need in turn.
    pub transitive: BTreeSet<String>,
}

#[derive(Debug)]
pub struct Graph {
    pub members: Vec<Member>,
}

impl Graph {
    pub fn of(metadata: &Metadata, root: &Path) -> Self {
        let packages = metadata.by_id();
        let nodes: BTreeMap<&str, &Node> = metadata
            .resolve
            .iter()
            .flat_map(|resolve| &resolve.nodes)
            .map(|node| (node.id.as_str(), node))
            .collect();
        let name_of = |id: &str| {
            packages
                .get(id)
                .map_or_else(|| id.to_owned(), |package| package.name.clone())
        };
        let mut members = Vec::new();
        for id in &metadata.workspace_members {
            let Some(package) = packages.get(id.as_str()) else {
                continue;
            };
            let direct = kept_edges(&nodes, id);
            let mut seen: BTreeSet<&str> = BTreeSet::new();
            let mut queue = direct.clone();
            while let Some(next) = queue.pop() {
                if seen.insert(next) {
                    queue.extend(kept_edges(&nodes, next));
                }
            }
            members.push(Member {
                name: package.name.clone(),
                folder: package.folder(root),
                direct: direct.into_iter().map(name_of).collect(),
                transitive: seen.into_iter().map(name_of).collect(),
            });
        }
        Graph { members }
    }
}

/// Normal and build dependencies of a package.
fn kept_edges<'a>(nodes: &BTreeMap<&'a str, &'a Node>, id: &str) -> Vec<&'a str> {
    let Some(node) = nodes.get(id) else {
        return Vec::new();
    };
    node.deps
        .iter()
        .filter(|edge| {
            edge.dep_kinds
                .iter()
                .any(|kind| kind.kind.as_deref() != Some("dev"))
        })
        .map(|edge| edge.pkg.as_str())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dev_dependencies_are_left_out_at_every_level() {
        let package = |name: &str| {
            format!(
                r#"{{"id":"{name}","name":"{name}","version":"1.0.0","license":null,"repository":null,"manifest_path":"/w/{name}/Cargo.toml","targets":[]}}"#
            )
        };
        let node = |id: &str, deps: &str| format!(r#"{{"id":"{id}","deps":[{deps}]}}"#);
        let edge = |to: &str, kind: &str| {
            format!(r#"{{"pkg":"{to}","dep_kinds":[{{"kind":{kind},"target":null}}]}}"#)
        };
        let text = format!(
            r#"{{"packages":[{}],"workspace_members":["a"],"target_directory":"/t","resolve":{{"nodes":[{},{},{},{}]}}}}"#,
            ["a", "b", "c", "d"].map(package).join(","),
            node("a", &[edge("b", "null"), edge("d", "\"dev\"")].join(",")),
            node("b", &edge("c", "\"build\"")),
            node("c", &edge("d", "\"dev\"")),
            node("d", ""),
        );
        let metadata: Metadata = serde_json::from_str(&text).expect("parses");
        let graph = Graph::of(&metadata, Path::new("/w"));
        let member = &graph.members[0];
        assert_eq!(member.folder, "a");
        assert_eq!(Vec::from_iter(&member.direct), ["b"]);
        assert_eq!(Vec::from_iter(&member.transitive), ["b", "c"]);
    }
}
