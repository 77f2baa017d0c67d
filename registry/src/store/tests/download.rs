//! Whole downloads: what arrives, where it goes, and what stands in the way.

use super::fake_hub::{COMMIT, FakeHub, OTHER_COMMIT, pattern};
use super::*;

#[test]
fn a_model_arrives_whole_with_a_record_and_resolves() {
    let hub = FakeHub::small(600_000);
    hub.file("README.md", b"# no", false);
    hub.file("voices/a.safetensors", &pattern(10), true);
    hub.file("empty.txt", b"", false);
    hub.file("modeling.py", b"import os", false);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let mut recorder = Recorder::default();
    let found = place
        .store
        .download(&request("o/n"), &mut recorder)
        .unwrap();

    assert_eq!(found.path, place.target());
    assert_eq!(found.kind, CheckpointKind::Dir);
    assert_eq!(found.source, ModelSource::Store);
    assert_eq!(place.find("o/n").unwrap(), found);
    assert_eq!(recorder.received_bytes, 600_000 + 10 + 22);
    insta::assert_snapshot!(tree_of(place.store.root().unwrap()).join("\n"), @r"
    o/
    o/n/
    o/n/.mlxcel.json
    o/n/config.json
    o/n/empty.txt
    o/n/model.safetensors
    o/n/voices/
    o/n/voices/a.safetensors
    ");
    insta::assert_snapshot!(recorder.lines.join("\n"), @r#"
    Planned { files: 4, total_bytes: Some(600032), present_bytes: 0 }
    FileStarted { file: "config.json", size_bytes: Some(22), resumed_bytes: 0 }
    FileFinished { file: "config.json", size_bytes: 22 }
    FileStarted { file: "empty.txt", size_bytes: Some(0), resumed_bytes: 0 }
    FileFinished { file: "empty.txt", size_bytes: 0 }
    FileStarted { file: "model.safetensors", size_bytes: Some(600000), resumed_bytes: 0 }
    FileFinished { file: "model.safetensors", size_bytes: 600000 }
    FileStarted { file: "voices/a.safetensors", size_bytes: Some(10), resumed_bytes: 0 }
    FileFinished { file: "voices/a.safetensors", size_bytes: 10 }
    Finishing
    "#);
    let mut record: serde_json::Value =
        serde_json::from_slice(&fs::read(place.target().join(".mlxcel.json")).unwrap()).unwrap();
    let completed = record["completed"].take();
    assert_eq!(
        completed.as_str().map(str::len),
        Some("2026-01-01T00:00:00Z".len())
    );
    assert_eq!(record["endpoint"], server.url());
    assert_eq!(record["revision"], "main");
    assert_eq!(record["commit"], COMMIT);
    insta::assert_json_snapshot!(record["files"]["config.json"], @r#"
    {
      "size": 22,
      "sha256": "fd11fd11fceeb9df51a63f347cec3af4051d086fccb030e78777a83a4d3289e8",
      "hub": {
        "git_blob": "0972e95c1405cc1507c19dcbe784f7a36c930907"
      }
    }
    "#);
}

#[test]
fn a_complete_model_is_not_asked_for_again() {
    let hub = FakeHub::small(1000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let first = place.get("o/n").unwrap();
    server.forget();
    assert_eq!(place.get("o/n").unwrap(), first);
    assert!(server.log().is_empty());
}

#[test]
fn a_bare_name_gets_the_default_organisation() {
    let server = Server::start(|_| fake_hub::not_found("RepoNotFound"));
    let place = Place::new(&server.url());
    assert!(matches!(
        place.get("some-model"),
        Err(StoreError::RepoNotFound { .. })
    ));
    let asked = server.log().remove(0).request.path;
    assert_eq!(asked, "/api/models/mlx-community/some-model/revision/main");
    assert!(tree_of(place.store.root().unwrap()).is_empty());
}

#[test]
fn a_local_folder_receives_everything_and_the_store_nothing() {
    let hub = FakeHub::small(1000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let dir = place.dir.path().join("chosen/folder");
    let mut wish = request("o/n");
    wish.local_dir = Some(dir.clone());
    let found = place.store.download(&wish, &mut NoProgress).unwrap();
    assert_eq!(found.source, ModelSource::Path);
    assert_eq!(found.path, dir);
    assert!(!place.store.root().unwrap().exists());
    assert_eq!(tree_of(&place.dir.path().join("chosen")).len(), 4);
    let again = place.find(dir.to_str().unwrap()).unwrap();
    assert_eq!((again.path, again.kind), (dir, CheckpointKind::Dir));
}

#[test]
fn a_folder_with_other_files_is_left_alone() {
    let hub = FakeHub::small(1000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    fs::create_dir_all(place.target()).unwrap();
    fs::write(place.target().join("thesis.txt"), "mine").unwrap();
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::TargetOccupied { .. })
    ));
    assert_eq!(tree_of(&place.target()), ["thesis.txt"]);
    fs::remove_file(place.target().join("thesis.txt")).unwrap();
    place.get("o/n").unwrap();
}

#[test]
fn another_models_folder_is_refused() {
    let hub = FakeHub::small(1000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap();
    let mut wish = request("o/other");
    wish.local_dir = Some(place.target());
    let error = place.store.download(&wish, &mut NoProgress).unwrap_err();
    assert!(matches!(error, StoreError::TargetOccupied { reason, .. } if reason == "holds o/n"));
}

#[test]
fn a_further_quantisation_joins_the_first() {
    let hub = FakeHub::new();
    hub.file("x-Q4_0.gguf", &pattern(100), true);
    hub.file("x-Q8_0.gguf", &pattern(200), true);
    hub.file("sub/x-F16-00001-of-00002.gguf", &pattern(300), true);
    hub.file("sub/x-F16-00002-of-00002.gguf", &pattern(400), true);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let error = place.get("o/n").unwrap_err();
    insta::assert_snapshot!(error, @"o/n holds several GGUF files; choose one as `o/n:LABEL` out of F16, Q4_0, Q8_0");
    let first = place.get("o/n:Q4_0").unwrap();
    assert_eq!(first.path, place.target().join("x-Q4_0.gguf"));
    assert_eq!(first.kind, CheckpointKind::Gguf);
    assert_eq!(place.find("o/n").unwrap(), first);
    let error = place.find("o/n:Q8_0").unwrap_err().to_string();
    assert!(error.contains("holds only Q4_0"), "{error}");

    let second = place.get("o/n:f16").unwrap();
    assert_eq!(
        second.path,
        place.target().join("sub/x-F16-00001-of-00002.gguf")
    );
    assert!(matches!(
        place.find("o/n"),
        Err(StoreError::AmbiguousGguf { .. })
    ));
    assert_eq!(place.find("o/n:Q4_0").unwrap(), first);
    let named = place.find("o/n/x-Q4_0.gguf").unwrap();
    assert_eq!(named, first);
    assert!(!place.store.root().unwrap().join("o/.n.partial").exists());
    assert_eq!(server.about("x-Q4_0.gguf").len(), 1);
}

#[test]
fn another_revision_than_the_stored_one_is_refused_with_both_named() {
    let hub = FakeHub::small(1000);
    hub.revision("v2", OTHER_COMMIT);
    hub.revision("same", COMMIT);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap();

    let at = |revision: &str| {
        let mut wish = request("o/n");
        wish.revision = Some(Revision::parse(revision).unwrap());
        place.store.download(&wish, &mut NoProgress)
    };
    assert!(at("same").is_ok());
    assert!(at("main").is_ok());
    assert!(at("c0ffee0000000000000000000000000000000001").is_ok());
    let error = at("v2").unwrap_err();
    insta::assert_snapshot!(error, @"the store holds revision main (commit c0ffee000000) of o/n, but revision v2 (commit c0ffee000000) was asked for; remove it with `mlxcel rm o/n`, or download the other one elsewhere with --local-dir");

    let model = place.store.parse("o/n").unwrap();
    let v2 = Revision::parse("v2").unwrap();
    let error = place.store.resolve(&model, Some(&v2)).unwrap_err();
    insta::assert_snapshot!(error, @"the store holds revision main (commit c0ffee000000) of o/n, but revision v2 was asked for; remove it with `mlxcel rm o/n`, or download the other one elsewhere with --local-dir");
}

#[test]
fn a_moved_branch_does_not_mix_two_commits() {
    let hub = FakeHub::new();
    hub.file("x-Q4_0.gguf", &pattern(100), true);
    hub.file("x-Q8_0.gguf", &pattern(200), true);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n:Q4_0").unwrap();
    hub.revision("main", OTHER_COMMIT);
    // Without a revision the stored commit goes on to be the one.
    place.get("o/n:Q8_0").unwrap();
    let asked = server.about("x-Q8_0.gguf").remove(0).request.path;
    assert!(asked.contains(COMMIT), "{asked}");
}

#[test]
fn a_damaged_model_does_not_resolve_and_is_repaired_by_what_is_missing() {
    let hub = FakeHub::small(50_000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap();
    fs::write(place.target().join("model.safetensors"), b"short").unwrap();
    let error = place.find("o/n").unwrap_err().to_string();
    assert!(
        error.contains("model.safetensors has 5 bytes instead of 50000"),
        "{error}"
    );
    server.forget();
    place.get("o/n").unwrap();
    assert_eq!(place.find("o/n").unwrap().path, place.target());
    assert!(server.about("config.json").is_empty());
    assert_eq!(
        fs::read(place.target().join("model.safetensors")).unwrap(),
        pattern(50_000)
    );
}

#[test]
fn an_index_that_names_absent_shards_stops_before_the_first_shard() {
    let hub = FakeHub::small(1000);
    let index = br#"{"weight_map":{"a":"model.safetensors","b":"gone.safetensors"}}"#;
    hub.file("model.safetensors.index.json", index, false);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let error = place.get("o/n").unwrap_err();
    insta::assert_snapshot!(error, @"o/n is incomplete: model.safetensors.index.json names gone.safetensors, which the repository does not have");
    assert!(server.about("model.safetensors").is_empty());
    assert!(matches!(
        place.find("o/n"),
        Err(StoreError::NotFound { .. })
    ));
}

#[test]
fn a_second_process_is_told_and_the_first_is_not_disturbed() {
    let hub = FakeHub::small(1000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let held =
        super::super::lock::SlotLock::acquire(&place.store.root().unwrap().join("o/.n.lock"))
            .unwrap();
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::Locked {
            holder: Some(_),
            ..
        })
    ));
    assert!(server.log().is_empty());
    drop(held);
    place.get("o/n").unwrap();
}

#[test]
fn many_downloads_at_once_leave_one_whole_model() {
    let hub = FakeHub::small(400_000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let results: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..6).map(|_| scope.spawn(|| place.get("o/n"))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    assert!(results.iter().any(Result::is_ok));
    for error in results.into_iter().filter_map(Result::err) {
        assert!(matches!(error, StoreError::Locked { .. }), "{error}");
    }
    assert_eq!(server.about("model.safetensors").len(), 1);
    place.find("o/n").unwrap();
}

#[test]
fn offline_uses_what_is_here_and_never_the_network() {
    let hub = FakeHub::small(1000);
    let server = serve(&hub);
    let mut place = Place::new(&server.url());
    place.store.env.offline = Some("HF_HUB_OFFLINE");
    let error = place.get("o/n").unwrap_err();
    insta::assert_snapshot!(error, @"o/n is not on this machine and HF_HUB_OFFLINE forbids the network; unset it to download");
    assert!(server.log().is_empty());
    place.store.env.offline = None;
    place.get("o/n").unwrap();
    place.store.env.offline = Some("HF_HUB_OFFLINE");
    place.get("o/n").unwrap();
}

#[test]
fn too_little_space_is_found_before_the_first_byte() {
    let hub = FakeHub::small(1000);
    let server = serve(&hub);
    let mut place = Place::new(&server.url());
    place.disk(1000, u64::MAX);
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(error, StoreError::NotEnoughSpace { need_bytes, free_bytes: 1000, .. } if need_bytes == 1022 + (16 << 20)),
        "{error}"
    );
    assert!(server.about("model.safetensors").is_empty());
    assert!(tree_of(place.store.root().unwrap()).is_empty());
}

#[test]
fn a_download_stopped_just_before_its_rename_is_finished_without_the_files() {
    let hub = FakeHub::small(50_000);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap();
    // Put back what the last steps changed.
    let staging = place.store.root().unwrap().join("o/.n.partial");
    let mut state = super::super::record::PartialState::read(Path::new("/nonexistent"));
    let record = super::super::record::Record::read(&place.target())
        .unwrap()
        .unwrap();
    for (name, file) in record.files {
        let known = super::super::record::PartialFile {
            size: Some(file.size),
            content: file.hub,
            etag: None,
            sha256: Some(file.sha256),
        };
        state.files.insert(name, known);
    }
    fs::rename(place.target(), &staging).unwrap();
    state.write(&staging).unwrap();
    server.forget();
    place.get("o/n").unwrap();
    assert!(
        server
            .log()
            .iter()
            .all(|e| !e.request.path.contains("/resolve/"))
    );
    assert_eq!(
        tree_of(&place.target()),
        [".mlxcel.json", "config.json", "model.safetensors"]
    );
}
