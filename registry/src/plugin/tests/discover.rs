//! Where plugins are looked for, and in which order.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::files::Described;
use crate::plugin::{PlaceProblem, PluginKind, SearchInputs, Tier, discover, name_in_file};

fn names(inputs: &SearchInputs) -> Vec<(Tier, String)> {
    let found = discover(inputs).files.into_iter();
    found
        .map(|file| {
            (
                file.tier,
                file.path.file_stem().unwrap().to_string_lossy()[10..].to_owned(),
            )
        })
        .collect()
}

fn backend(dir: &Path, name: &'static str) -> PathBuf {
    Described::backend(name).write_to(dir)
}

#[test]
fn only_plugin_names_count() {
    let parsed =
        |name: &str| name_in_file(Path::new(name)).map(|(kind, name)| (kind, name.to_owned()));
    assert_eq!(
        parsed("/x/libmlxcel_family_llama.so"),
        Some((PluginKind::Family, "llama".to_owned()))
    );
    assert_eq!(
        parsed("libmlxcel_backend_mlx_cpu.dylib"),
        Some((PluginKind::Backend, "mlx_cpu".to_owned()))
    );
    for other in [
        "libmlx.so",
        "libmlxcel_family_.so",
        "libmlxcel_kernel_x.so",
        "libmlxcel_family_x.so.1",
        "mlxcel_family_x.so",
    ] {
        assert_eq!(parsed(other), None, "{other}");
    }
}

#[test]
fn places_come_in_order_of_rank_and_files_in_order_of_name() {
    let root = tempfile::tempdir().unwrap();
    let dir = |name: &str| root.path().join(name);
    let file = backend(&dir("single"), "f");
    for (place, name) in [
        ("flag", "z"),
        ("flag", "a"),
        ("env1", "e1"),
        ("env2", "e2"),
        ("user", "u"),
        ("bundled", "b"),
        ("system", "s"),
    ] {
        backend(&dir(place), name);
    }
    let inputs = SearchInputs {
        files: vec![file],
        dirs: vec![dir("flag")],
        plugin_path: Some(std::env::join_paths([dir("env1"), dir("env2")]).unwrap()),
        user_dir: Some(dir("user")),
        bundled_dir: Some(dir("bundled")),
        system_dir: Some(dir("system")),
        ..SearchInputs::default()
    };
    let expected = [
        (Tier::File, "backend_f"),
        (Tier::Directory, "backend_a"),
        (Tier::Directory, "backend_z"),
        (Tier::Directory, "backend_e1"),
        (Tier::Directory, "backend_e2"),
        (Tier::User, "backend_u"),
        (Tier::Bundled, "backend_b"),
        (Tier::System, "backend_s"),
    ];
    assert_eq!(
        names(&inputs),
        expected.map(|(tier, name)| (tier, name.to_owned()))
    );

    // With raised rights the environment and the user's folder are not trusted; flags are the caller's business.
    let elevated = SearchInputs {
        elevated: true,
        ..inputs
    };
    let kept: Vec<String> = names(&elevated).into_iter().map(|(_, name)| name).collect();
    assert_eq!(
        kept,
        [
            "backend_f",
            "backend_a",
            "backend_z",
            "backend_b",
            "backend_s"
        ]
    );
    let notes = discover(&elevated).notes;
    assert!(
        notes
            .iter()
            .all(|note| note.problem == PlaceProblem::Elevated)
            && notes.len() == 3
    );
}

#[test]
fn packages_are_one_folder_deep() {
    let root = tempfile::tempdir().unwrap();
    backend(&root.path().join("cpu-package"), "cpu");
    backend(&root.path().join("a/b"), "too_deep");
    fs::write(root.path().join("cpu-package/libmlx.so"), "x").unwrap();
    let inputs = SearchInputs {
        dirs: vec![root.path().to_path_buf()],
        ..SearchInputs::default()
    };
    assert_eq!(
        names(&inputs),
        [(Tier::Directory, "backend_cpu".to_owned())]
    );
}

#[test]
fn a_file_counts_once_whatever_path_leads_to_it() {
    let root = tempfile::tempdir().unwrap();
    let real = backend(&root.path().join("real"), "x");
    fs::create_dir(root.path().join("links")).unwrap();
    symlink(&real, root.path().join("links/libmlxcel_backend_x.so")).unwrap();
    fs::hard_link(&real, root.path().join("links/libmlxcel_backend_y.so")).unwrap();
    let inputs = SearchInputs {
        dirs: vec![root.path().join("real")],
        user_dir: Some(root.path().join("links")),
        ..SearchInputs::default()
    };
    let found = discover(&inputs).files;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].tier, &found[0].path), (Tier::Directory, &real));
}

#[test]
fn a_link_to_nowhere_and_a_loop_are_listed_to_be_refused() {
    let root = tempfile::tempdir().unwrap();
    symlink(
        "/nonexistent/x",
        root.path().join("libmlxcel_backend_gone.so"),
    )
    .unwrap();
    let looped = root.path().join("libmlxcel_backend_loop.so");
    symlink(&looped, &looped).unwrap();
    let inputs = SearchInputs {
        dirs: vec![root.path().to_path_buf()],
        ..SearchInputs::default()
    };
    assert_eq!(names(&inputs).len(), 2);
}

#[test]
fn places_that_give_nothing_are_noted() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "x").unwrap();
    let closed = root.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    let inputs = SearchInputs {
        dirs: vec![root.path().join("absent"), file],
        plugin_path: Some(OsString::from("relative/dir::/nonexistent/env")),
        user_dir: Some(root.path().join("nobody")),
        system_dir: Some(closed.clone()),
        ..SearchInputs::default()
    };
    let notes = discover(&inputs).notes;
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let place = root.path().display().to_string();
    let lines: Vec<String> = notes
        .iter()
        // Root may read any folder, so the closed one gives no note to it.
        .filter(|note| note.problem != PlaceProblem::Unreadable)
        .map(|note| {
            format!(
                "{} {} {}",
                note.explicit,
                note.is_notable(),
                note.text.replace(&place, "DIR")
            )
        })
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @"true true plugin folder DIR/absent does not exist
true true plugin folder DIR/file is not a folder: for one file use --plugin DIR/file
false true plugin folder relative/dir in MLXCEL_PLUGIN_PATH is relative and was ignored: give an absolute path
false true plugin folder /nonexistent/env does not exist
false false plugin folder DIR/nobody does not exist");
}

#[test]
fn the_standard_places_follow_the_environment() {
    let inputs = |pairs: &[(&str, &str)]| {
        let find = |name: &str| {
            pairs
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(value))
        };
        SearchInputs::from_lookup(find, Some(Path::new("/opt/mlxcel/bin/mlxcel")))
    };
    let user = |pairs: &[(&str, &str)]| inputs(pairs).user_dir;
    let home = if cfg!(target_os = "macos") {
        "/h/Library/Application Support"
    } else {
        "/h/.local/share"
    };
    assert_eq!(
        user(&[("HOME", "/h")]),
        Some(Path::new(home).join("mlxcel/plugins"))
    );
    if cfg!(target_os = "linux") {
        assert_eq!(
            user(&[("HOME", "/h"), ("XDG_DATA_HOME", "/d")]),
            Some(PathBuf::from("/d/mlxcel/plugins"))
        );
        assert_eq!(
            user(&[("HOME", "/h"), ("XDG_DATA_HOME", "d")]),
            Some(PathBuf::from("/h/.local/share/mlxcel/plugins"))
        );
    }
    assert_eq!(user(&[]), None);
    assert_eq!(user(&[("HOME", "h")]), None);
    assert_eq!(
        inputs(&[]).bundled_dir,
        Some(PathBuf::from("/opt/mlxcel/lib/mlxcel/plugins"))
    );
    let set = inputs(&[
        ("MLXCEL_PLUGIN_PATH", "/p"),
        ("MLXCEL_PLUGINS_DISABLE", "x"),
        ("MLXCEL_PLUGINS_SELECT", ""),
    ]);
    assert_eq!(
        (set.plugin_path, set.disable, set.select),
        (Some("/p".into()), Some("x".into()), None)
    );
    assert!(!SearchInputs::from_process(Vec::new(), Vec::new()).elevated);
}
