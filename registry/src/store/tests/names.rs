//! Forms of names, their refusals, and the property that none of them leaves its folder.

use std::path::Component;

use proptest::prelude::*;

use super::super::slot::Slot;
use super::*;

fn hub(text: &str) -> Result<HubRef, NameError> {
    HubRef::parse(text, DEFAULT_ORG)
}

#[test]
fn the_documented_forms() {
    for (text, shown) in [
        ("owner/name", "owner/name"),
        ("name", "mlx-community/name"),
        (
            "SmolLM2-135M-Instruct_x.1",
            "mlx-community/SmolLM2-135M-Instruct_x.1",
        ),
        ("o/n:Q4_K_M", "o/n:Q4_K_M"),
        ("n:q8_0", "mlx-community/n:q8_0"),
        ("o/n/x-Q4_0.gguf", "o/n/x-Q4_0.gguf"),
        (
            "o/n/Q8_0/x-00001-of-00002.GGUF",
            "o/n/Q8_0/x-00001-of-00002.GGUF",
        ),
    ] {
        assert_eq!(hub(text).unwrap().to_string(), shown);
    }
}

#[test]
fn refusals_say_what_is_wrong() {
    let long = "n".repeat(97);
    let huge = "n".repeat(2000);
    let cases = [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "o/",
        "/n",
        "o//n",
        "o/../n",
        "o/n/..",
        "o/n/m",
        "~/x",
        "o/n\0",
        "o/n\n",
        "o\\n",
        "%2e%2e/x",
        "o/.n",
        "o/n.",
        "-o/n",
        "o--x/n",
        "o/a..b",
        "o/ñ",
        "o/n:",
        "o/n:a/b",
        "o/n:Q4:Q8",
        "x.gguf",
        "o/x.gguf",
        "o/n/../x.gguf",
        "o/n/x.gguf:Q4",
        "hf://o/n",
        &long,
        &huge,
    ];
    let text: Vec<String> = cases
        .iter()
        .map(|case| {
            let shown: String = case.chars().take(12).collect();
            format!("{shown:?}: {}", hub(case).unwrap_err())
        })
        .collect();
    insta::assert_snapshot!(text.join("\n"), @r#"
    "": the model name is empty: expected a path, `owner/name` or `name`
    ".": model name "." is not valid: "." may not start or end with a dash or a dot
    "..": model name ".." is not valid: ".." may not start or end with a dash or a dot
    "../x": model name "../x" is not valid: ".." may not start or end with a dash or a dot
    "/etc/passwd": model name "/etc/passwd" has 3 parts: expected `owner/name`, `name`, or `owner/name/file.gguf`
    "o/": model name "o/" is not valid: "" is an empty part
    "/n": model name "/n" is not valid: "" is an empty part
    "o//n": model name "o//n" has 3 parts: expected `owner/name`, `name`, or `owner/name/file.gguf`
    "o/../n": model name "o/../n" has 3 parts: expected `owner/name`, `name`, or `owner/name/file.gguf`
    "o/n/..": model name "o/n/.." has 3 parts: expected `owner/name`, `name`, or `owner/name/file.gguf`
    "o/n/m": model name "o/n/m" has 3 parts: expected `owner/name`, `name`, or `owner/name/file.gguf`
    "~/x": model name "~/x" is not valid: "~" may hold only ASCII letters, digits, dash, underscore and dot
    "o/n\0": model name "o/n\0" is not valid: "\0" is a control character
    "o/n\n": model name "o/n\n" is not valid: "\n" is a control character
    "o\\n": model name "o\\n" is not valid: "o\\n" may hold only ASCII letters, digits, dash, underscore and dot
    "%2e%2e/x": model name "%2e%2e/x" is not valid: "%2e%2e" may hold only ASCII letters, digits, dash, underscore and dot
    "o/.n": model name "o/.n" is not valid: ".n" may not start or end with a dash or a dot
    "o/n.": model name "o/n." is not valid: "n." may not start or end with a dash or a dot
    "-o/n": model name "-o/n" is not valid: "-o" may not start or end with a dash or a dot
    "o--x/n": model name "o--x/n" is not valid: "o--x" may not hold two dashes or two dots in a row
    "o/a..b": model name "o/a..b" is not valid: "a..b" may not hold two dashes or two dots in a row
    "o/ñ": model name "o/ñ" is not valid: "ñ" may hold only ASCII letters, digits, dash, underscore and dot
    "o/n:": quantisation "" in "o/n:" is not valid: it is empty
    "o/n:a/b": quantisation "a/b" in "o/n:a/b" is not valid: it may hold only ASCII letters, digits, dash, underscore and dot
    "o/n:Q4:Q8": quantisation "Q4:Q8" in "o/n:Q4:Q8" is not valid: it may hold only ASCII letters, digits, dash, underscore and dot
    "x.gguf": "x.gguf" looks like a file: a GGUF file of a repository is written `owner/name/file.gguf`
    "o/x.gguf": "o/x.gguf" looks like a file: a GGUF file of a repository is written `owner/name/file.gguf`
    "o/n/../x.ggu": file name "../x.gguf" is not valid: it has a part that is . or ..
    "o/n/x.gguf:Q": quantisation "Q4" in "o/n/x.gguf:Q4" is not valid: it cannot be combined with a file name
    "hf://o/n": quantisation "//o/n" in "hf://o/n" is not valid: it may hold only ASCII letters, digits, dash, underscore and dot
    "nnnnnnnnnnnn": model name "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn" is not valid: "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn" is longer than 96 bytes
    "nnnnnnnnnnnn": the model name has 2000 bytes: at most 1024 are accepted
    "#);
}

#[test]
fn revisions() {
    for good in [
        "main",
        "v1.0",
        "refs/pr/3",
        "release/2026-01",
        "a+b@c=d",
        "0123456",
    ] {
        assert!(Revision::parse(good).is_ok(), "{good}");
    }
    for bad in [
        "", "..", "a/../b", "/main", "main/", "a//b", ".git", "a b", "a\0", "a?b", "a#b", "%2e",
        "é",
    ] {
        assert!(Revision::parse(bad).is_err(), "{bad:?}");
    }
    assert!(Revision::parse(&"x".repeat(256)).is_err());
}

#[test]
fn paths_and_names_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let env = StoreEnv {
        home: Some(dir.path().to_path_buf()),
        ..StoreEnv::default()
    };
    let parse = |text: &str| ModelRef::parse(text, &env);
    let existing = dir.path().to_str().unwrap();
    for text in [
        existing,
        "./x",
        "../x",
        ".",
        "..",
        "/absent",
        "x.gguf",
        "dir/x.gguf",
        "src",
    ] {
        assert!(matches!(parse(text), Ok(ModelRef::Path(_))), "{text}");
    }
    assert_eq!(parse("~/x").unwrap(), ModelRef::Path(dir.path().join("x")));
    for text in ["o/n", "n", "o/n:Q4_0", "o/n/x.gguf"] {
        assert!(matches!(parse(text), Ok(ModelRef::Hub(_))), "{text}");
    }
    for text in ["", "a\0b", "./a\0b", "a/b/c"] {
        assert!(parse(text).is_err(), "{text:?}");
    }
}

/// Text that is close to a name, so that many cases pass the first checks.
fn name_like() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-zA-Z0-9._/:-]{0,24}",
        "[a-z.]{1,4}/[a-z.-]{1,6}(/[a-z./]{1,8}\\.gguf)?(:[A-Z0-9_]{1,6})?",
        any::<String>(),
    ]
}

proptest! {
    #[test]
    fn no_name_leaves_the_store(text in name_like()) {
        if let Ok(model) = hub(&text) {
            let root = Path::new("/somewhere/models");
            let slot = Slot::in_store(root, &model.id);
            for path in [&slot.target, &slot.staging, &slot.lock, &slot.trash] {
                let below: Vec<Component<'_>> = path.strip_prefix(root).unwrap().components().collect();
                prop_assert_eq!(below.len(), 2);
                prop_assert!(below.iter().all(|c| matches!(c, Component::Normal(_))));
            }
            prop_assert!(!slot.target.file_name().unwrap().to_str().unwrap().starts_with('.'));
            if let Some(GgufSelector::File(file)) = &model.gguf {
                prop_assert!(RepoPath::parse(file.as_str()).is_ok());
            }
        }
    }

    #[test]
    fn what_is_shown_reads_back_as_the_same(text in name_like()) {
        if let Ok(model) = hub(&text) {
            prop_assert_eq!(HubRef::parse(&model.to_string(), "other-org").unwrap(), model);
        }
    }

    #[test]
    fn no_file_leaves_its_folder(text in "[a-z./\\\\:]{0,16}|\\PC{0,12}") {
        if let Ok(file) = RepoPath::parse(&text) {
            let dir = Path::new("/model");
            let path = file.below(dir);
            let below = path.strip_prefix(dir).unwrap();
            prop_assert!(below.components().all(|c| matches!(c, Component::Normal(_))));
            let joined: Vec<&str> = below.components().map(|c| c.as_os_str().to_str().unwrap()).collect();
            prop_assert_eq!(joined.join("/"), text);
        }
    }

    #[test]
    fn no_revision_leaves_the_reference_folder(text in "[a-z./-]{0,16}|\\PC{0,12}") {
        if let Ok(revision) = Revision::parse(&text) {
            let path = Path::new(revision.as_str());
            prop_assert!(path.components().all(|c| matches!(c, Component::Normal(_))));
        }
    }
}
