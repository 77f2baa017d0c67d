//! Telling the GGUF files of one repository apart by their names.
//!
//! A GGUF repository usually offers the same model in many quantisations, one file (or one group of split
//! files) each. Owns labels, split groups and the choice among them. Never opens a file.

use std::collections::HashMap;

use super::name::GgufSelector;
use super::repo_path::{RepoPath, is_gguf};

/// One thing to choose: a file, or all parts of a split file in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GgufChoice {
    /// Quantisation as the name gives it, in upper case; empty if the name gives none.
    pub label: String,
    /// The file, or its parts in order. Never empty.
    pub parts: Vec<RepoPath>,
}

/// Why no choice could be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoChoice {
    /// More than one would do; what the user may write instead.
    Ambiguous(Vec<String>),
    /// None fits; what there is.
    Missing(Vec<String>),
}

/// Picks the GGUF file that `selector` means, or the only one if there is no selector.
pub(super) fn choose(
    files: &[RepoPath],
    selector: Option<&GgufSelector>,
) -> Result<GgufChoice, NoChoice> {
    let all = choices(files);
    let models: Vec<&GgufChoice> = all.iter().filter(|c| !is_companion(c)).collect();
    let fitting: Vec<&GgufChoice> = match selector {
        None => models.clone(),
        Some(GgufSelector::File(path)) => all.iter().filter(|c| c.parts.contains(path)).collect(),
        Some(GgufSelector::Label(label)) => by_label(&models, label),
    };
    match fitting.as_slice() {
        [one] => Ok((*one).clone()),
        [] => Err(NoChoice::Missing(describe(&models))),
        several => Err(NoChoice::Ambiguous(describe(several))),
    }
}

/// Whether any of the files is a GGUF model.
pub(super) fn any_model(files: &[RepoPath]) -> bool {
    choices(files).iter().any(|c| !is_companion(c))
}

/// An exact label wins over one that only ends the same way: `Q4_K_XL` also means `UD-Q4_K_XL`, unless
/// both are there.
fn by_label<'a>(models: &[&'a GgufChoice], label: &str) -> Vec<&'a GgufChoice> {
    let wanted = label.to_ascii_uppercase();
    let exact: Vec<&GgufChoice> = models
        .iter()
        .copied()
        .filter(|c| c.label == wanted)
        .collect();
    if !exact.is_empty() {
        return exact;
    }
    models
        .iter()
        .copied()
        .filter(|c| {
            c.parts
                .first()
                .is_some_and(|p| ends_with_part(&stem(p.file_name()).to_ascii_uppercase(), &wanted))
        })
        .collect()
}

fn ends_with_part(stem: &str, wanted: &str) -> bool {
    stem.strip_suffix(wanted)
        .is_some_and(|rest| rest.ends_with(['-', '.', '_']))
}

fn describe(choices: &[&GgufChoice]) -> Vec<String> {
    let mut labels: Vec<String> = choices.iter().map(|c| c.label.clone()).collect();
    labels.sort();
    let before = labels.len();
    labels.dedup();
    if labels.len() == before && labels.iter().all(|l| !l.is_empty()) {
        return labels;
    }
    let mut names: Vec<String> = choices
        .iter()
        .filter_map(|c| c.parts.first())
        .map(|p| p.as_str().to_owned())
        .collect();
    names.sort();
    names
}

fn choices(files: &[RepoPath]) -> Vec<GgufChoice> {
    let mut sorted: Vec<&RepoPath> = files.iter().filter(|f| is_gguf(f.as_str())).collect();
    sorted.sort();
    let mut out: Vec<GgufChoice> = Vec::new();
    let mut groups: HashMap<SplitGroup<'_>, usize> = HashMap::new();
    for file in sorted {
        let group = SplitGroup::of(file.as_str());
        let known = group
            .and_then(|g| groups.get(&g))
            .and_then(|i| out.get_mut(*i));
        if let Some(choice) = known {
            choice.parts.push(file.clone());
            continue;
        }
        if let Some(group) = group {
            groups.insert(group, out.len());
        }
        out.push(GgufChoice {
            label: label(file),
            parts: vec![file.clone()],
        });
    }
    // A split file of which parts are absent (as in a cache that was filled half) is no choice.
    out.retain(|choice| {
        let total = choice
            .parts
            .first()
            .and_then(|p| SplitGroup::of(p.as_str()))
            .map_or(1, |group| group.total);
        choice.parts.len() == total
    });
    out
}

/// Projectors and importance matrices share the extension but are no language models.
fn is_companion(choice: &GgufChoice) -> bool {
    choice.parts.first().is_some_and(|part| {
        let name = part.file_name().to_ascii_lowercase();
        name.starts_with("mmproj") || name.contains("imatrix")
    })
}

/// `x-00002-of-00005.gguf` is one part of the group (`x`, 5): the naming of gguf-split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SplitGroup<'a> {
    base: &'a str,
    total: usize,
}

impl<'a> SplitGroup<'a> {
    fn of(path: &'a str) -> Option<Self> {
        let (rest, total) = without_extension(path).rsplit_once("-of-")?;
        let (base, part) = rest.rsplit_once('-')?;
        let number = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
        if !number(total) || !number(part) {
            return None;
        }
        let total = total.parse().ok()?;
        Some(Self { base, total })
    }
}

fn without_extension(path: &str) -> &str {
    let end = path.len().saturating_sub(".gguf".len());
    path.get(..end).unwrap_or(path)
}

fn stem(file_name: &str) -> &str {
    SplitGroup::of(file_name).map_or_else(|| without_extension(file_name), |group| group.base)
}

/// The last part of the stem that reads as a quantisation, with a `UD-` before it if there is one.
fn label(file: &RepoPath) -> String {
    let stem = stem(file.file_name()).to_ascii_uppercase();
    let mut end = stem.len();
    while let Some(head) = stem.get(..end) {
        let start = head.rfind(['-', '.']).map_or(0, |i| i + 1);
        let part = head.get(start..).unwrap_or_default();
        if is_quantisation(part) {
            return if head.get(..start).is_some_and(|h| h.ends_with("-UD-")) {
                format!("UD-{part}")
            } else {
                part.to_owned()
            };
        }
        if start == 0 {
            break;
        }
        end = start - 1;
    }
    String::new()
}

fn is_quantisation(part: &str) -> bool {
    if matches!(part, "F32" | "F16" | "BF16" | "FP16" | "FP32") || part.starts_with("MXFP4") {
        return true;
    }
    let digits = part
        .strip_prefix("IQ")
        .or_else(|| part.strip_prefix("TQ"))
        .or_else(|| part.strip_prefix('Q'));
    digits.is_some_and(|rest| {
        let mut bytes = rest.bytes();
        bytes.next().is_some_and(|b| b.is_ascii_digit())
            && matches!(bytes.next(), None | Some(b'_'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<RepoPath> {
        names.iter().map(|n| RepoPath::parse(n).unwrap()).collect()
    }

    fn by(label: &str) -> Option<GgufSelector> {
        Some(GgufSelector::Label(label.to_owned()))
    }

    #[test]
    fn labels_are_read_from_names_as_publishers_write_them() {
        for (name, expected) in [
            ("SmolLM2-135M-Instruct-Q4_K_M.gguf", "Q4_K_M"),
            ("smollm2-135m-instruct-q8_0.gguf", "Q8_0"),
            ("model.Q5_K_S.gguf", "Q5_K_S"),
            ("gemma-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
            ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
            ("x-IQ2_XXS.gguf", "IQ2_XXS"),
            ("x-f16.gguf", "F16"),
            ("BF16/x-BF16-00001-of-00002.gguf", "BF16"),
            ("x-Q4_K_M-v2.gguf", "Q4_K_M"),
            ("Qwen3-8B.gguf", ""),
        ] {
            assert_eq!(label(&RepoPath::parse(name).unwrap()), expected, "{name}");
        }
    }

    #[test]
    fn the_only_file_needs_no_selector_and_companions_do_not_count() {
        let list = files(&[
            "README.md",
            "mmproj-F16.gguf",
            "x-Q8_0.gguf",
            "x.imatrix.gguf",
        ]);
        assert_eq!(choose(&list, None).unwrap().parts, files(&["x-Q8_0.gguf"]));
        let named = GgufSelector::File(RepoPath::parse("mmproj-F16.gguf").unwrap());
        assert_eq!(
            choose(&list, Some(&named)).unwrap().parts,
            files(&["mmproj-F16.gguf"])
        );
        assert!(!any_model(&files(&["mmproj-F16.gguf"])));
    }

    #[test]
    fn several_files_are_ambiguous_and_listed_by_label() {
        let list = files(&["x-Q8_0.gguf", "x-Q4_K_M.gguf", "x-Q4_0.gguf"]);
        let choices = ["Q4_0", "Q4_K_M", "Q8_0"].map(str::to_owned).to_vec();
        assert_eq!(
            choose(&list, None),
            Err(NoChoice::Ambiguous(choices.clone()))
        );
        assert_eq!(
            choose(&list, by("q4_k_m").as_ref()).unwrap().parts,
            files(&["x-Q4_K_M.gguf"])
        );
        assert_eq!(
            choose(&list, by("Q3_K").as_ref()),
            Err(NoChoice::Missing(choices))
        );
        assert!(choose(&list, by("M").as_ref()).is_ok_and(|c| c.label == "Q4_K_M"));
    }

    #[test]
    fn names_are_listed_where_labels_are_equal_or_absent() {
        let list = files(&["a-Q8_0.gguf", "b-Q8_0.gguf"]);
        let names = ["a-Q8_0.gguf", "b-Q8_0.gguf"].map(str::to_owned).to_vec();
        assert_eq!(
            choose(&list, by("Q8_0").as_ref()),
            Err(NoChoice::Ambiguous(names))
        );
    }

    #[test]
    fn an_exact_label_wins_over_a_longer_one() {
        let both = files(&["x-Q4_K_XL.gguf", "x-UD-Q4_K_XL.gguf"]);
        assert_eq!(
            choose(&both, by("Q4_K_XL").as_ref()).unwrap().label,
            "Q4_K_XL"
        );
        let one = files(&["x-UD-Q4_K_XL.gguf", "x-Q8_0.gguf"]);
        assert_eq!(
            choose(&one, by("Q4_K_XL").as_ref()).unwrap().label,
            "UD-Q4_K_XL"
        );
    }

    #[test]
    fn parts_of_a_split_file_are_one_choice_in_order() {
        let list = files(&[
            "Q8_0/x-Q8_0-00002-of-00002.gguf",
            "Q8_0/x-Q8_0-00001-of-00002.gguf",
            "x-Q4_0.gguf",
        ]);
        let parts = files(&[
            "Q8_0/x-Q8_0-00001-of-00002.gguf",
            "Q8_0/x-Q8_0-00002-of-00002.gguf",
        ]);
        assert_eq!(choose(&list, by("q8_0").as_ref()).unwrap().parts, parts);
        let second = parts.get(1).cloned().map(GgufSelector::File);
        assert_eq!(choose(&list, second.as_ref()).unwrap().parts, parts);
        let half = files(&["x-Q8_0-00001-of-00002.gguf", "x-Q4_0.gguf"]);
        assert_eq!(choose(&half, None).unwrap().label, "Q4_0");
    }
}
