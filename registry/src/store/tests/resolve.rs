//! From names to files without the network.

use super::fake_hub::COMMIT;
use super::*;

fn put(dir: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

const WHOLE: &[(&str, &str)] = &[("config.json", "{}"), ("model.safetensors", "x")];

fn hf_snapshot(place: &Place, commit: &str) -> PathBuf {
    let hub = place.dir.path().join(".cache/huggingface/hub");
    hub.join("models--o--n/snapshots").join(commit)
}

fn hf_ref(place: &Place, name: &str, commit: &str) {
    let hub = place.dir.path().join(".cache/huggingface/hub");
    put(&hub.join("models--o--n/refs"), &[(name, commit)]);
}

#[test]
fn the_order_is_path_then_store_then_hugging_face_cache() {
    let place = Place::new("https://unused.example");
    let error = place.find("o/n").unwrap_err().to_string();
    let shown = error.replace(place.dir.path().to_str().unwrap(), "~");
    insta::assert_snapshot!(shown, @"model o/n is not on this machine (looked in ~/.cache/mlxcel/models/o/n; ~/.cache/huggingface/hub/models--o--n); get it with `mlxcel download o/n`");

    let snapshot = hf_snapshot(&place, COMMIT);
    put(&snapshot, WHOLE);
    hf_ref(&place, "main", COMMIT);
    let found = place.find("o/n").unwrap();
    assert_eq!((found.path, found.source), (snapshot, ModelSource::HfCache));
    assert_eq!(found.repo_id.unwrap().to_string(), "o/n");

    put(&place.target(), WHOLE);
    let found = place.find("o/n").unwrap();
    assert_eq!(
        (found.path, found.source),
        (place.target(), ModelSource::Store)
    );

    let dir = place.dir.path().join("here");
    put(&dir, WHOLE);
    let found = place.find(dir.to_str().unwrap()).unwrap();
    assert_eq!(
        (found.path, found.source, found.repo_id),
        (dir, ModelSource::Path, None)
    );
}

#[test]
fn the_hugging_face_cache_is_read_by_revision_and_never_written() {
    let place = Place::new("https://unused.example");
    put(&hf_snapshot(&place, COMMIT), WHOLE);
    hf_ref(&place, "v1", COMMIT);
    let before = tree_of(place.dir.path());
    let model = place.store.parse("o/n").unwrap();
    let at = |text: &str| {
        let revision = Revision::parse(text).unwrap();
        place
            .store
            .resolve(&model, Some(&revision))
            .map(|r| r.source)
    };
    assert_eq!(at("v1").unwrap(), ModelSource::HfCache);
    assert_eq!(at(COMMIT).unwrap(), ModelSource::HfCache);
    let error = at("v2").unwrap_err().to_string();
    assert!(
        error.ends_with("get it with `mlxcel download o/n --revision v2`"),
        "{error}"
    );
    assert!(place.find("o/n").is_err());
    assert_eq!(tree_of(place.dir.path()), before);
}

#[test]
fn a_half_filled_hugging_face_cache_is_passed_over_and_mentioned() {
    let place = Place::new("https://unused.example");
    let index = r#"{"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}"#;
    put(
        &hf_snapshot(&place, COMMIT),
        &[
            ("config.json", "{}"),
            ("a.safetensors", ""),
            ("model.safetensors.index.json", index),
        ],
    );
    hf_ref(&place, "main", COMMIT);
    let error = place.find("o/n").unwrap_err().to_string();
    assert!(
        error.contains("incomplete, b.safetensors is missing"),
        "{error}"
    );
}

#[test]
fn a_model_put_into_the_store_by_hand_resolves_but_has_no_revision() {
    let place = Place::new("https://unused.example");
    put(&place.target(), WHOLE);
    let model = place.store.parse("o/n").unwrap();
    assert!(place.store.resolve(&model, None).is_ok());
    let main = Revision::main();
    let error = place.store.resolve(&model, Some(&main)).unwrap_err();
    assert!(matches!(error, StoreError::RevisionConflict { stored, .. } if stored == "unknown"));
}

#[test]
fn an_unfinished_model_in_the_store_does_not_resolve() {
    let place = Place::new("https://unused.example");
    fs::create_dir_all(place.target()).unwrap();
    assert!(matches!(place.find("o/n"), Err(StoreError::Damaged { .. })));
    put(&place.target(), &[("config.json", "{}")]);
    assert!(matches!(place.find("o/n"), Err(StoreError::Damaged { .. })));
    put(
        &place.target(),
        &[("model.safetensors", ""), (".mlxcel.json", "{")],
    );
    assert!(matches!(place.find("o/n"), Err(StoreError::Damaged { .. })));
}

#[test]
fn paths_are_directories_or_gguf_files() {
    let place = Place::new("https://unused.example");
    let at = |name: &str| place.dir.path().join(name).to_str().unwrap().to_owned();
    put(
        place.dir.path(),
        &[
            ("m.gguf", ""),
            ("m.bin", ""),
            ("one/x-Q8_0.gguf", ""),
            ("none/a.txt", ""),
        ],
    );
    put(
        place.dir.path(),
        &[
            ("two/x-Q8_0.gguf", ""),
            ("two/x-Q4_0.gguf", ""),
            ("bare/config.json", ""),
        ],
    );
    let found = place.find(&at("m.gguf")).unwrap();
    assert_eq!(
        (found.path, found.kind),
        (at("m.gguf").into(), CheckpointKind::Gguf)
    );
    let found = place.find(&at("one")).unwrap();
    assert_eq!(
        (found.path, found.kind),
        (at("one/x-Q8_0.gguf").into(), CheckpointKind::Gguf)
    );
    // What is missing in a directory that a user names is for the checkpoint reader to say.
    assert_eq!(place.find(&at("bare")).unwrap().kind, CheckpointKind::Dir);
    assert!(matches!(
        place.find(&at("m.bin")),
        Err(StoreError::NotAModel { .. })
    ));
    assert!(matches!(
        place.find(&at("none")),
        Err(StoreError::NotAModel { .. })
    ));
    assert!(matches!(
        place.find(&at("two")),
        Err(StoreError::AmbiguousGguf { .. })
    ));
    assert!(matches!(
        place.find(&at("absent")),
        Err(StoreError::PathNotFound { .. })
    ));
    assert!(matches!(
        place.find("absent.gguf"),
        Err(StoreError::PathNotFound { .. })
    ));
    assert_eq!(place.find("~/m.gguf").unwrap().kind, CheckpointKind::Gguf);
    let model = place.store.parse(&at("m.gguf")).unwrap();
    let main = Revision::main();
    let error = place.store.resolve(&model, Some(&main)).unwrap_err();
    assert!(matches!(error, StoreError::RevisionOfPath { .. }));
}

#[cfg(unix)]
#[test]
fn a_link_out_of_the_store_is_neither_read_nor_written_nor_removed() {
    let place = Place::new("https://unused.example");
    let outside = place.dir.path().join("outside");
    put(&outside, WHOLE);
    fs::create_dir_all(place.store.root().unwrap().join("o")).unwrap();
    std::os::unix::fs::symlink(&outside, place.target()).unwrap();
    assert!(matches!(
        place.find("o/n"),
        Err(StoreError::SymlinkEscape { .. })
    ));
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::SymlinkEscape { .. })
    ));
    let id = RepoId::parse("o/n").unwrap();
    assert!(matches!(
        place.store.remove(&id),
        Err(StoreError::SymlinkEscape { .. })
    ));
    let listing = place.store.list(ListSort::Name).unwrap();
    assert_eq!((listing.models.len(), listing.problems.len()), (0, 1));

    fs::remove_file(place.target()).unwrap();
    fs::remove_dir(place.store.root().unwrap().join("o")).unwrap();
    fs::create_dir_all(outside.join("n")).unwrap();
    std::os::unix::fs::symlink(&outside, place.store.root().unwrap().join("o")).unwrap();
    assert!(matches!(
        place.store.remove(&id),
        Err(StoreError::SymlinkEscape { .. })
    ));
    assert_eq!(
        tree_of(&outside),
        ["config.json", "model.safetensors", "n/"]
    );
}

#[cfg(unix)]
#[test]
fn a_store_whose_root_is_a_link_works() {
    let place = Place::new("https://unused.example");
    let real = place.dir.path().join("big-disk");
    put(&real.join("o/n"), WHOLE);
    let link = place.dir.path().join("link");
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let store = Store::with_root(place.store.env().clone(), link.clone());
    let model = store.parse("o/n").unwrap();
    assert_eq!(store.resolve(&model, None).unwrap().path, link.join("o/n"));
}

#[test]
fn what_needs_no_store_works_without_a_home() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    put(&model, WHOLE);
    let hub = dir.path().join("hub");
    put(&hub.join("models--o--n/snapshots").join(COMMIT), WHOLE);
    put(&hub.join("models--o--n/refs"), &[("main", COMMIT)]);
    let store = Store::new(StoreEnv {
        hf_hub_cache: Some(hub),
        offline: Some("MLXCEL_OFFLINE"),
        ..StoreEnv::default()
    });
    let find = |name: &str| store.resolve(&store.parse(name)?, None);
    let source = |name: &str| find(name).unwrap().source;
    assert_eq!(source(model.to_str().unwrap()), ModelSource::Path);
    assert_eq!(source("o/n"), ModelSource::HfCache);
    let into = DownloadRequest {
        local_dir: Some(dir.path().join("o")),
        ..request("o/n")
    };
    let told = [
        find("o/other").unwrap_err(),
        find("~/model").unwrap_err(),
        store.list(ListSort::Name).unwrap_err(),
        store.remove(&RepoId::parse("o/n").unwrap()).unwrap_err(),
        store
            .download(&request("o/n"), &mut NoProgress)
            .unwrap_err(),
        store.download(&into, &mut NoProgress).unwrap_err(),
    ];
    insta::assert_snapshot!(told.map(|error| error.to_string()).join("\n"), @r#"
    no folder for models: HOME is not set, so set MLXCEL_MODELS_DIR or MLXCEL_CACHE_DIR
    "~/model" is in the home folder and HOME is not set: give the whole path
    no folder for models: HOME is not set, so set MLXCEL_MODELS_DIR or MLXCEL_CACHE_DIR
    no folder for models: HOME is not set, so set MLXCEL_MODELS_DIR or MLXCEL_CACHE_DIR
    no folder for models: HOME is not set, so set MLXCEL_MODELS_DIR or MLXCEL_CACHE_DIR
    o/n is not on this machine and MLXCEL_OFFLINE forbids the network; unset it to download
    "#);
}
