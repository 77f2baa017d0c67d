//! The state that every plugin ends in.

use std::fs;
use std::path::Path;

use super::files::Described;
use crate::plugin::{Catalogue, HostProfile, PluginKind, SearchInputs, plugins_document};

/// `tier kind/name: state (reason)` of every plugin, with the root folder's path shortened.
fn states(root: &Path, inputs: &SearchInputs) -> String {
    let catalogue = Catalogue::build(inputs, HostProfile::CURRENT).unwrap();
    let root = root.canonicalize().unwrap().display().to_string();
    let lines: Vec<String> = catalogue
        .records()
        .iter()
        .map(|record| {
            let kind = record.kind().map_or("?", PluginKind::name);
            let reason = record
                .state
                .reason()
                .map(|reason| format!(" ({reason})"))
                .unwrap_or_default();
            let line = format!(
                "{} {kind}/{}: {}{reason}",
                record.tier.name(),
                record.name(),
                record.state.name()
            );
            line.replace(&root, "DIR")
        })
        .collect();
    lines.join("\n")
}

fn inputs(root: &Path) -> SearchInputs {
    SearchInputs {
        dirs: vec![root.join("flag")],
        user_dir: Some(root.join("user")),
        bundled_dir: Some(root.join("bundled")),
        ..SearchInputs::default()
    }
}

#[test]
fn a_better_place_shadows_a_worse_one() {
    let root = tempfile::tempdir().unwrap();
    let dir = |name: &str| root.path().join(name);
    Described::family("llama", &["llama"])
        .version("0.9.0")
        .write_to(&dir("flag"));
    Described::family("llama", &["llama"])
        .version("1.0.0")
        .write_to(&dir("user"));
    Described::family("llama", &["llama"])
        .version("0.8.0")
        .write_to(&dir("bundled"));
    Described::backend("llama").write_to(&dir("bundled"));
    insta::assert_snapshot!(states(root.path(), &inputs(root.path())), @"directory family/llama: available
user family/llama: shadowed (shadowed by DIR/flag/libmlxcel_family_llama.so, which is older (version 0.9.0): remove it if that is not meant)
bundled backend/llama: available
bundled family/llama: shadowed (shadowed by DIR/flag/libmlxcel_family_llama.so)");
}

#[test]
fn equals_are_in_conflict_and_a_rejected_one_shadows_nothing() {
    let root = tempfile::tempdir().unwrap();
    let dir = |name: &str| root.path().join(name);
    Described::family("a", &["a"]).write_to(&dir("flag"));
    Described::family("a", &["a"]).write_to(&dir("flag/package"));
    fs::create_dir_all(dir("user")).unwrap();
    fs::write(dir("user/libmlxcel_family_b.so"), "text").unwrap();
    Described::family("a", &["a"]).write_to(&dir("bundled"));
    Described::family("b", &["b"]).write_to(&dir("bundled"));
    insta::assert_snapshot!(states(root.path(), &inputs(root.path())), @r#"directory family/a: conflict (same name and rank as DIR/flag/package/libmlxcel_family_a.so: remove one, or name the one to use with --plugin FILE)
directory family/a: conflict (same name and rank as DIR/flag/libmlxcel_family_a.so: remove one, or name the one to use with --plugin FILE)
user family/b: rejected (expected an ELF library, found text that starts with "text": the file is not a plugin, remove or rename it)
bundled family/a: shadowed (shadowed by DIR/flag/libmlxcel_family_a.so)
bundled family/b: available"#);
}

#[test]
fn filters_switch_plugins_off_but_not_one_that_was_named() {
    let root = tempfile::tempdir().unwrap();
    let dir = |name: &str| root.path().join(name);
    for name in ["cuda", "cpu", "metal"] {
        Described::backend(name).write_to(&dir("flag"));
    }
    Described::family("cuda", &["c"]).write_to(&dir("flag"));
    let named = Described::backend("custom").write_to(&dir("else"));
    let filtered = |disable: Option<&str>, select: Option<&str>| {
        let inputs = SearchInputs {
            files: vec![named.clone()],
            disable: disable.map(str::to_owned),
            select: select.map(str::to_owned),
            ..inputs(root.path())
        };
        states(root.path(), &inputs)
    };
    insta::assert_snapshot!(filtered(Some("backend/c*, metal"), None), @"file backend/custom: available
directory backend/cpu: disabled (disabled by MLXCEL_PLUGINS_DISABLE)
directory backend/cuda: disabled (disabled by MLXCEL_PLUGINS_DISABLE)
directory backend/metal: disabled (disabled by MLXCEL_PLUGINS_DISABLE)
directory family/cuda: available");
    insta::assert_snapshot!(filtered(None, Some("c?u")), @"file backend/custom: available
directory backend/cpu: available
directory backend/cuda: disabled (disabled by MLXCEL_PLUGINS_SELECT)
directory backend/metal: disabled (disabled by MLXCEL_PLUGINS_SELECT)
directory family/cuda: disabled (disabled by MLXCEL_PLUGINS_SELECT)");
    let bad = SearchInputs {
        disable: Some("[".to_owned()),
        ..inputs(root.path())
    };
    let error = Catalogue::build(&bad, HostProfile::CURRENT).unwrap_err();
    insta::assert_snapshot!(error, @r#"MLXCEL_PLUGINS_DISABLE has the pattern "[": error parsing glob '[': unclosed character class; missing ']'"#);
}

#[test]
fn what_a_flag_named_must_be_usable() {
    let root = tempfile::tempdir().unwrap();
    let text = root.path().join("x.so");
    fs::write(&text, "text").unwrap();
    let good = Described::backend("cpu").write_to(root.path());
    let refused = |files: &[&Path], dirs: &[&Path]| {
        let inputs = SearchInputs {
            files: files.iter().map(|path| path.to_path_buf()).collect(),
            dirs: dirs.iter().map(|path| path.to_path_buf()).collect(),
            user_dir: Some(root.path().join("absent")),
            ..SearchInputs::default()
        };
        let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
        let error = catalogue
            .require_explicit()
            .err()
            .map(|error| error.to_string());
        error.map(|text| {
            text.replace(
                &root.path().canonicalize().unwrap().display().to_string(),
                "DIR",
            )
        })
    };
    assert_eq!(refused(&[&good], &[root.path()]), None);
    insta::assert_snapshot!(refused(&[&text], &[]).unwrap(), @r#"--plugin DIR/x.so: expected an ELF library, found text that starts with "text": the file is not a plugin, remove or rename it"#);
    insta::assert_snapshot!(refused(&[], &[Path::new("/nonexistent/dir")]).unwrap(), @"--plugins-dir: plugin folder /nonexistent/dir does not exist");
}

#[test]
fn names_are_found_usable_ones_first() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("flag")).unwrap();
    fs::write(root.path().join("flag/libmlxcel_backend_cpu.so"), "text").unwrap();
    let good = Described::backend("cpu").write_to(&root.path().join("user"));
    let catalogue = Catalogue::build(&inputs(root.path()), HostProfile::CURRENT).unwrap();
    assert_eq!(
        catalogue.find(PluginKind::Backend, "cpu").unwrap().path,
        good
    );
    assert!(catalogue.find(PluginKind::Family, "cpu").is_none());
    assert_eq!(catalogue.at(&good).unwrap().sha256().unwrap().len(), 64);
}

#[test]
fn the_list_for_programs() {
    let root = tempfile::tempdir().unwrap();
    let flag = root.path().join("flag");
    Described::family("llama", &["mistral", "llama"]).write_to(&flag);
    fs::write(flag.join("libmlxcel_backend_bad.so"), "text").unwrap();
    let catalogue = Catalogue::build(&inputs(root.path()), HostProfile::CURRENT).unwrap();
    let text = serde_json::to_string_pretty(&plugins_document(&catalogue)).unwrap();
    let text = text.replace(
        &root.path().canonicalize().unwrap().display().to_string(),
        "DIR",
    );
    insta::assert_snapshot!(text, @r#"{
  "plugins": [
    {
      "name": "bad",
      "kind": "backend",
      "state": "rejected",
      "stage": "peek",
      "code": "not_an_object",
      "reason": "expected an ELF library, found text that starts with \"text\": the file is not a plugin, remove or rename it",
      "path": "DIR/flag/libmlxcel_backend_bad.so",
      "tier": "directory"
    },
    {
      "name": "llama",
      "kind": "family",
      "state": "available",
      "path": "DIR/flag/libmlxcel_family_llama.so",
      "tier": "directory",
      "version": "1.0.0",
      "vendor": "us",
      "abi": {
        "major": 1,
        "minor": 0,
        "needs_minor": 0
      },
      "archs": [
        "llama",
        "mistral"
      ]
    }
  ],
  "places": [
    {
      "path": "DIR/user",
      "tier": "user",
      "problem": "absent",
      "text": "plugin folder DIR/user does not exist"
    },
    {
      "path": "DIR/bundled",
      "tier": "bundled",
      "problem": "absent",
      "text": "plugin folder DIR/bundled does not exist"
    }
  ]
}"#);
}
