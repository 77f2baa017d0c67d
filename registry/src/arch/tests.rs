//! Tests of the architecture index, on plugin files made byte by byte.

use std::fs;
use std::path::Path;

use super::{ArchIndex, DocumentOptions, ProbeScore, Query, arch_document, decide};
use crate::plugin::test_files::{Described, elf_with};
use crate::plugin::{Catalogue, HostProfile, SearchInputs};

fn catalogue(root: &Path) -> Catalogue {
    let inputs = SearchInputs {
        dirs: vec![root.join("flag")],
        user_dir: Some(root.join("user")),
        ..SearchInputs::default()
    };
    Catalogue::build(&inputs, HostProfile::CURRENT).unwrap()
}

fn score(plugin: &str, arch: &str, score: u32) -> ProbeScore {
    ProbeScore {
        plugin: plugin.to_owned(),
        arch: arch.to_owned(),
        score,
        why: format!("because of {arch}"),
    }
}

fn decided(
    catalogue: &Catalogue,
    pin: Option<&str>,
    query: Query<'_>,
    scores: &[ProbeScore],
) -> String {
    match decide(&ArchIndex::build(catalogue, pin), query, scores) {
        Ok(decision) => format!(
            "{}/{} {}: {}",
            decision.plugin, decision.arch, decision.score, decision.why
        ),
        Err(error) => error.to_string(),
    }
}

const LLAMA: Query<'static> = Query::ModelType("llama");

#[test]
fn the_highest_score_wins() {
    let root = tempfile::tempdir().unwrap();
    Described::family("llama", &["llama", "mistral"]).write_to(&root.path().join("flag"));
    Described::family("embed", &["llama_embed"]).write_to(&root.path().join("flag"));
    let catalogue = catalogue(root.path());
    let scores = [
        score("llama", "llama", 60),
        score("embed", "llama_embed", 90),
        score("llama", "mistral", 10),
    ];
    insta::assert_snapshot!(decided(&catalogue, None, LLAMA, &scores), @"embed/llama_embed 90: because of llama_embed");
    insta::assert_snapshot!(decided(&catalogue, Some("llama"), LLAMA, &scores), @"llama/llama 60: because of llama");
    // A family answers for its own architectures only.
    insta::assert_snapshot!(decided(&catalogue, None, LLAMA, &[score("embed", "llama", 100), score("llama", "llama", 1)]), @"llama/llama 1: because of llama");
}

#[test]
fn equals_and_zeros_are_told_apart_from_nothing() {
    let root = tempfile::tempdir().unwrap();
    Described::family("llama", &["llama", "mistral"]).write_to(&root.path().join("flag"));
    let catalogue = catalogue(root.path());
    let says = |scores: &[ProbeScore]| decided(&catalogue, None, LLAMA, scores);
    insta::assert_snapshot!(says(&[score("llama", "llama", 50), score("llama", "mistral", 50)]), @r#"model_type "llama" fits several architectures equally well (llama/llama (score 50), llama/mistral (score 50)): choose the plugin with --family NAME"#);
    insta::assert_snapshot!(says(&[score("llama", "llama", 0)]), @r#"model_type "llama" is recognised but not supported: llama/llama: because of llama"#);
    insta::assert_snapshot!(says(&[]), @r#"model_type "llama" is claimed by llama, which does not recognise this configuration: see `mlxcel inspect`"#);
    let empty = tempfile::tempdir().unwrap();
    let nothing = self::catalogue(empty.path());
    insta::assert_snapshot!(decided(&nothing, None, Query::Gguf("gemma3"), &[]), @r#"no plugin knows GGUF architecture "gemma3", and no usable plugin of a model family was found"#);
    insta::assert_snapshot!(decided(&catalogue, None, Query::Gguf("lama"), &[]), @r#"no plugin knows GGUF architecture "lama": did you mean llama"#);
}

#[test]
fn a_better_place_hides_single_architectures() {
    let root = tempfile::tempdir().unwrap();
    Described::family("mine", &["llama"]).write_to(&root.path().join("flag"));
    Described::family("stock", &["llama", "mistral"]).write_to(&root.path().join("user"));
    let catalogue = catalogue(root.path());
    let index = ArchIndex::build(&catalogue, None);
    let names = |query| {
        let candidates = index.candidates(query).into_iter();
        candidates
            .map(|c| (c.plugin.name(), c.archs.len()))
            .collect::<Vec<_>>()
    };
    assert_eq!(names(LLAMA), [("mine", 1)]);
    assert_eq!(names(Query::ModelType("mistral")), [("stock", 1)]);
    assert_eq!(names(Query::Untyped), [("mine", 1), ("stock", 1)]);
    let scores = [score("mine", "llama", 10), score("stock", "llama", 99)];
    assert!(decided(&catalogue, None, LLAMA, &scores).starts_with("mine/llama"));
    assert!(decided(&catalogue, Some("stock"), LLAMA, &scores).starts_with("stock/llama"));
}

#[test]
fn a_conflict_concerns_one_architecture() {
    let root = tempfile::tempdir().unwrap();
    Described::family("one", &["llama", "phi"]).write_to(&root.path().join("flag"));
    Described::family("two", &["llama", "qwen3"]).write_to(&root.path().join("flag"));
    let catalogue = catalogue(root.path());
    let scores = [
        score("one", "llama", 90),
        score("two", "llama", 80),
        score("one", "phi", 70),
    ];
    insta::assert_snapshot!(decided(&catalogue, None, LLAMA, &scores), @"architecture llama is offered by the plugins one, two: choose one with --family one or --family two");
    assert!(decided(&catalogue, None, Query::ModelType("phi"), &scores).starts_with("one/phi"));
    assert!(decided(&catalogue, Some("two"), LLAMA, &scores).starts_with("two/llama"));
    let document = arch_document(&ArchIndex::build(&catalogue, None), OPTIONS);
    let rows: Vec<String> = document["families"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            format!(
                "{} {} {}",
                row["id"], row["plugin"]["name"], row["conflict_with"]
            )
        })
        .collect();
    insta::assert_snapshot!(rows.join("\n"), @r#""llama" "one" ["two"]
"llama" "two" ["one"]
"phi" "one" null
"qwen3" "two" null"#);
}

#[test]
fn a_pin_that_cannot_be_followed_says_why() {
    let root = tempfile::tempdir().unwrap();
    let flag = root.path().join("flag");
    Described::family("llama", &["llama"]).write_to(&flag);
    fs::write(flag.join("libmlxcel_family_broken.so"), "text").unwrap();
    let catalogue = catalogue(root.path());
    let place = root.path().canonicalize().unwrap().display().to_string();
    insta::assert_snapshot!(decided(&catalogue, Some("lama"), LLAMA, &[]), @"--family lama: no family plugin has this name; there are llama");
    insta::assert_snapshot!(decided(&catalogue, Some("broken"), LLAMA, &[]).replace(&place, "DIR"), @r#"--family broken: DIR/flag/libmlxcel_family_broken.so: expected an ELF library, found text that starts with "text": the file is not a plugin, remove or rename it"#);
    insta::assert_snapshot!(decided(&Catalogue::default(), Some("x"), LLAMA, &[]), @"--family x: no family plugin was found: see `mlxcel doctor`");
}

#[test]
fn rejected_and_disabled_plugins_are_named_by_what_they_would_serve() {
    let root = tempfile::tempdir().unwrap();
    let flag = root.path().join("flag");
    fs::create_dir_all(&flag).unwrap();
    let old = Described::family("qwen", &["qwen3"])
        .metadata()
        .replace("[1,0]", "[0,1]");
    fs::write(
        flag.join("libmlxcel_family_qwen.so"),
        elf_with(old.as_bytes()),
    )
    .unwrap();
    fs::write(flag.join("libmlxcel_family_phi.so"), &elf_with(b"x")[..80]).unwrap();
    let catalogue = catalogue(root.path());
    let place = root.path().canonicalize().unwrap().display().to_string();
    let says =
        |key: &str| decided(&catalogue, None, Query::ModelType(key), &[]).replace(&place, "DIR");
    insta::assert_snapshot!(says("qwen3"), @r#"no plugin knows model_type "qwen3"; a plugin for it exists but is not used: DIR/flag/libmlxcel_family_qwen.so: plugin uses ABI major 0, this host has 1: update the plugin"#);
    insta::assert_snapshot!(says("phi"), @r#"no plugin knows model_type "phi"; a plugin for it exists but is not used: DIR/flag/libmlxcel_family_phi.so: truncated: the segment table ends at byte 120, the file has 80; copy the file again"#);
    insta::assert_snapshot!(says("mamba"), @r#"no plugin knows model_type "mamba", and no usable plugin of a model family was found"#);
}

const OPTIONS: DocumentOptions<'static> = DocumentOptions {
    mlxcel_version: "1.2.3",
    with_paths: false,
};

#[test]
fn the_document() {
    let root = tempfile::tempdir().unwrap();
    let text = Described::family("llama", &["mistral", "llama"])
        .metadata()
        .replacen("\"gguf\"", "\"category\":\"dense\",\"backends\":{\"cpu\":\"supported\"},\"drafters\":[\"mtp\"],\"quant\":[\"mxfp4\"],\"gguf\"", 1);
    fs::create_dir_all(root.path().join("flag")).unwrap();
    fs::write(
        root.path().join("flag/libmlxcel_family_llama.so"),
        elf_with(text.as_bytes()),
    )
    .unwrap();
    let catalogue = catalogue(root.path());
    let index = ArchIndex::build(&catalogue, None);
    let document = arch_document(&index, OPTIONS);
    assert_eq!(document, arch_document(&index, OPTIONS));
    let hash = catalogue.records()[0].sha256().unwrap();
    let text = serde_json::to_string_pretty(&document)
        .unwrap()
        .replace(&hash, "HASH");
    insta::assert_snapshot!(text, @r#"{
  "mlxcel_version": "1.2.3",
  "families": [
    {
      "id": "llama",
      "display_name": "llama",
      "category": "",
      "model_types": [
        "llama"
      ],
      "aliases": [],
      "runtimes": [],
      "modalities_in": [],
      "output": "",
      "backends": {},
      "tensor_parallel": false,
      "pipeline_parallel": false,
      "drafters": [],
      "kv_modes": [],
      "gguf": [
        "llama"
      ],
      "task": "text-generation",
      "abi": {
        "major": 1,
        "minor": 0
      },
      "plugin": {
        "name": "llama",
        "version": "1.0.0",
        "sha256": "HASH"
      }
    },
    {
      "id": "mistral",
      "display_name": "mistral",
      "category": "dense",
      "model_types": [
        "mistral"
      ],
      "aliases": [],
      "runtimes": [],
      "modalities_in": [],
      "output": "",
      "backends": {
        "cpu": "supported"
      },
      "tensor_parallel": false,
      "pipeline_parallel": false,
      "drafters": [
        "mtp"
      ],
      "kv_modes": [],
      "gguf": [
        "mistral"
      ],
      "task": "text-generation",
      "abi": {
        "major": 1,
        "minor": 0
      },
      "plugin": {
        "name": "llama",
        "version": "1.0.0",
        "sha256": "HASH"
      },
      "quant": [
        "mxfp4"
      ]
    }
  ]
}"#);
    let with_paths = DocumentOptions {
        with_paths: true,
        ..OPTIONS
    };
    let path = arch_document(&index, with_paths)["families"][0]["plugin"]["path"].clone();
    assert!(
        path.as_str()
            .unwrap()
            .ends_with("libmlxcel_family_llama.so")
    );
    let empty = arch_document(&ArchIndex::build(&Catalogue::default(), None), OPTIONS);
    assert_eq!(
        empty.to_string(),
        r#"{"mlxcel_version":"1.2.3","families":[]}"#
    );
}
