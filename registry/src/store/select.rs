//! Which files of a repository are fetched.
//!
//! Weights as safetensors or one GGUF file; configuration, tokenizer, template and processor files as data.
//! Never pickles, never code. The judgement of listed names happens here: a name that would be written and
//! is not a plain relative path condemns the whole listing.

use std::collections::BTreeSet;

use super::digest::ContentId;
use super::error::StoreError;
use super::gguf::{self, NoChoice};
use super::hub::ListedFile;
use super::inspect::is_safetensors;
use super::name::HubRef;
use super::repo_path::{RepoPath, is_gguf};

/// What is fetched beside GGUF.
const WANTED_EXTENSIONS: &[&str] = &["safetensors", "json", "txt", "jinja", "model", "tiktoken"];
/// Weights that run code when they are read.
const PICKLE_EXTENSIONS: &[&str] = &["bin", "pt", "pth", "ckpt", "pkl"];
/// Top folders with a second copy of the weights in the form of another runtime.
const FOREIGN_FOLDERS: &[&str] = &[
    "original", "metal", "onnx", "openvino", "coreml", "flax", "tf",
];
/// More files than any checkpoint has.
const MAX_SELECTED_FILES: usize = 10_000;

/// A file to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WantedFile {
    /// Its name.
    pub path: RepoPath,
    /// Its size, if told.
    pub size: Option<u64>,
    /// Its digest, if told.
    pub content: Option<ContentId>,
}

impl WantedFile {
    /// Whether this is one of the large files.
    pub fn is_weights(&self) -> bool {
        is_safetensors(&self.path) || is_gguf(self.path.as_str())
    }
}

/// Chooses from the listing of a repository, small files first.
pub(super) fn select(hub: &HubRef, listed: &[ListedFile]) -> Result<Vec<WantedFile>, StoreError> {
    let candidates = checked(hub, listed)?;
    let paths: Vec<RepoPath> = candidates.iter().map(|f| f.path.clone()).collect();
    let has_safetensors = paths.iter().any(is_safetensors);
    let mut wanted: Vec<WantedFile> = if hub.gguf.is_none() && has_safetensors {
        let consolidated_is_a_copy = paths
            .iter()
            .any(|p| p.is_top_level() && is_safetensors(p) && !is_consolidated(p));
        candidates
            .into_iter()
            .filter(|f| !is_gguf(f.path.as_str()))
            .filter(|f| !(consolidated_is_a_copy && is_consolidated(&f.path)))
            .collect()
    } else if hub.gguf.is_none() && !gguf::any_model(&paths) {
        return Err(StoreError::NoWeights {
            model: hub.id.to_string(),
            pickles: pickles(listed),
        });
    } else {
        let choice =
            gguf::choose(&paths, hub.gguf.as_ref()).map_err(|none| no_choice(hub, none))?;
        candidates
            .into_iter()
            .filter(|f| choice.parts.contains(&f.path))
            .collect()
    };
    if wanted.len() > MAX_SELECTED_FILES {
        return Err(StoreError::TooLarge {
            what: format!("the checkpoint of {}", hub.id),
            limit: format!("{MAX_SELECTED_FILES} files"),
        });
    }
    check_consistent(hub, &wanted)?;
    wanted.sort_by(|a, b| (a.is_weights(), &a.path).cmp(&(b.is_weights(), &b.path)));
    Ok(wanted)
}

fn checked(hub: &HubRef, listed: &[ListedFile]) -> Result<Vec<WantedFile>, StoreError> {
    let mut out = Vec::new();
    for file in listed.iter().filter(|f| is_wanted(&f.name)) {
        let path = RepoPath::parse(&file.name).map_err(|error| hostile(hub, error.to_string()))?;
        let hidden = path.as_str().split('/').any(|part| part.starts_with('.'));
        let folder = path.as_str().split_once('/').map(|(folder, _)| folder);
        if hidden || folder.is_some_and(|f| FOREIGN_FOLDERS.contains(&f)) {
            continue;
        }
        out.push(WantedFile {
            path,
            size: file.size,
            content: file.content.clone(),
        });
    }
    Ok(out)
}

/// No file twice, and none where another needs a folder.
fn check_consistent(hub: &HubRef, wanted: &[WantedFile]) -> Result<(), StoreError> {
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for file in wanted {
        if !names.insert(file.path.as_str()) {
            return Err(hostile(
                hub,
                format!("it has {:?} twice", file.path.as_str()),
            ));
        }
    }
    for name in &names {
        let mut rest = *name;
        while let Some((folder, _)) = rest.rsplit_once('/') {
            if names.contains(folder) {
                return Err(hostile(
                    hub,
                    format!("{folder:?} is both a file and a folder"),
                ));
            }
            rest = folder;
        }
    }
    Ok(())
}

fn is_wanted(name: &str) -> bool {
    is_gguf(name) || has_extension(name, WANTED_EXTENSIONS)
}

fn has_extension(name: &str, extensions: &[&str]) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, extension)| extensions.contains(&extension))
}

/// `consolidated*.safetensors` is the publisher's own layout of the same weights.
fn is_consolidated(path: &RepoPath) -> bool {
    path.is_top_level() && path.as_str().starts_with("consolidated")
}

fn pickles(listed: &[ListedFile]) -> Vec<String> {
    listed
        .iter()
        .filter(|f| has_extension(&f.name, PICKLE_EXTENSIONS))
        .filter_map(|f| RepoPath::parse(&f.name).ok())
        .map(|path| path.to_string())
        .take(3)
        .collect()
}

fn hostile(hub: &HubRef, reason: String) -> StoreError {
    StoreError::HostileListing {
        model: hub.id.to_string(),
        reason,
    }
}

fn no_choice(hub: &HubRef, none: NoChoice) -> StoreError {
    let model = hub.id.to_string();
    match none {
        NoChoice::Ambiguous(choices) => StoreError::AmbiguousGguf { model, choices },
        NoChoice::Missing(choices) => StoreError::NoSuchGguf {
            model,
            selector: hub
                .gguf
                .as_ref()
                .map_or_else(String::new, ToString::to_string),
            choices,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(model: &str, listed: &[&str]) -> Result<Vec<String>, StoreError> {
        let hub = HubRef::parse(model, "org").unwrap();
        let files: Vec<ListedFile> = listed
            .iter()
            .map(|name| ListedFile {
                name: (*name).to_owned(),
                size: Some(1),
                content: None,
            })
            .collect();
        let wanted = select(&hub, &files)?;
        Ok(wanted.into_iter().map(|f| f.path.to_string()).collect())
    }

    #[test]
    fn data_is_taken_and_code_and_pickles_are_not() {
        let chosen = names(
            "o/n",
            &[
                ".gitattributes",
                "README.md",
                "model.safetensors",
                "config.json",
                "modeling_x.py",
                "pytorch_model.bin",
                "tokenizer.model",
                "chat_template.jinja",
                "voices/a.safetensors",
                "voices/a.pt",
                ".cache/x.json",
                "onnx/model.onnx",
                "onnx/config.json",
                "original/params.json",
            ],
        );
        insta::assert_snapshot!(chosen.unwrap().join("\n"), @r"
        chat_template.jinja
        config.json
        tokenizer.model
        model.safetensors
        voices/a.safetensors
        ");
    }

    #[test]
    fn the_consolidated_copy_is_left_out_unless_it_is_the_only_one() {
        let both = [
            "consolidated.safetensors",
            "model.safetensors",
            "config.json",
        ];
        assert_eq!(
            names("o/n", &both).unwrap(),
            ["config.json", "model.safetensors"]
        );
        let only = ["consolidated.safetensors", "params.json"];
        assert_eq!(names("o/n", &only).unwrap().len(), 2);
    }

    #[test]
    fn one_gguf_file_is_taken_and_nothing_else() {
        let listed = [
            "config.json",
            "x-Q4_0.gguf",
            "x-Q8_0.gguf",
            "mmproj-F16.gguf",
        ];
        assert_eq!(names("o/n:q8_0", &listed).unwrap(), ["x-Q8_0.gguf"]);
        let error = names("o/n", &listed).unwrap_err();
        insta::assert_snapshot!(error, @"o/n holds several GGUF files; choose one as `o/n:LABEL` out of Q4_0, Q8_0");
        let error = names("o/n:Q2_K", &listed).unwrap_err();
        insta::assert_snapshot!(error, @"o/n holds no GGUF file Q2_K; it holds Q4_0, Q8_0");
    }

    #[test]
    fn a_repository_with_both_gives_safetensors_unless_gguf_is_asked() {
        let listed = ["config.json", "model.safetensors", "x-Q8_0.gguf"];
        assert_eq!(
            names("o/n", &listed).unwrap(),
            ["config.json", "model.safetensors"]
        );
        assert_eq!(names("o/n:Q8_0", &listed).unwrap(), ["x-Q8_0.gguf"]);
    }

    #[test]
    fn pickles_alone_are_no_weights() {
        let error = names("o/n", &["config.json", "pytorch_model.bin"]).unwrap_err();
        insta::assert_snapshot!(error, @"o/n holds no safetensors or GGUF weights; it has pickle files such as pytorch_model.bin, which can run code when read and are never used");
    }

    #[test]
    fn hostile_listings_are_refused_whole() {
        for name in [
            "../../etc/cron.json",
            "/etc/x.json",
            "a/../../x.json",
            "a//x.json",
            "a\\..\\x.json",
            "C:x.json",
            "x\0.json",
            "x\n.json",
            "./x.json",
        ] {
            let result = names("o/n", &["model.safetensors", "config.json", name]);
            assert!(
                matches!(result, Err(StoreError::HostileListing { .. })),
                "{name:?}"
            );
        }
        for pair in [["a.json", "a.json"], ["a.json", "a.json/b.json"]] {
            let [first, second] = pair;
            let result = names("o/n", &["model.safetensors", first, second]);
            assert!(
                matches!(result, Err(StoreError::HostileListing { .. })),
                "{pair:?}"
            );
        }
    }

    #[test]
    fn odd_names_that_are_not_fetched_do_no_harm() {
        let listed = [
            "model.safetensors",
            "config.json",
            "image: one.png",
            "../../.bashrc",
        ];
        assert_eq!(names("o/n", &listed).unwrap().len(), 2);
    }

    #[test]
    fn too_many_files_are_refused() {
        let many: Vec<String> = (0..10_001).map(|i| format!("{i}.json")).collect();
        let mut listed: Vec<&str> = many.iter().map(String::as_str).collect();
        listed.push("model.safetensors");
        assert!(matches!(
            names("o/n", &listed),
            Err(StoreError::TooLarge { .. })
        ));
    }
}
