//! Listing and removing.

use super::fake_hub::{FakeHub, Fault, pattern};
use super::*;

fn put_model(place: &Place, id: &str, bytes: usize) {
    let dir = place.store.root().unwrap().join(id);
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("config.json"), "{}").unwrap();
    fs::write(dir.join("model.safetensors"), vec![0; bytes]).unwrap();
}

fn ids(listing: &Listing) -> Vec<&str> {
    listing.models.iter().map(|m| m.repo_id.as_str()).collect()
}

#[test]
fn a_store_that_does_not_exist_is_empty() {
    let place = Place::new("https://unused.example");
    assert_eq!(
        place.store.list(ListSort::Name).unwrap(),
        Listing::default()
    );
}

#[test]
fn models_are_sorted_by_name_or_size_and_shown_as_json() {
    let place = Place::new("https://unused.example");
    put_model(&place, "b/small", 10);
    put_model(&place, "a/large", 1000);
    put_model(&place, "a/middle", 100);
    let by_name = place.store.list(ListSort::Name).unwrap();
    assert_eq!(ids(&by_name), ["a/large", "a/middle", "b/small"]);
    let by_size = place.store.list(ListSort::Size).unwrap();
    assert_eq!(ids(&by_size), ["a/large", "a/middle", "b/small"]);
    put_model(&place, "b/small", 10_000);
    assert_eq!(
        ids(&place.store.list(ListSort::Size).unwrap()),
        ["b/small", "a/large", "a/middle"]
    );
    let json = serde_json::to_value(&by_name.models[0]).unwrap();
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["repo_id", "size_bytes", "path", "modified"]);
    assert_eq!(json["size_bytes"], 1002);
    assert!(json["modified"].as_str().unwrap().ends_with('Z'));
}

#[test]
fn damaged_entries_are_reported_and_not_listed() {
    let hub = FakeHub::small(1000);
    hub.faults("model.safetensors", [500, 0, 0, 0, 0].map(Fault::Cut));
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap_err();
    put_model(&place, "a/good", 10);
    let root = place.store.root().unwrap().to_path_buf();
    for folder in [
        "a/empty",
        "a/-bad-",
        "bad owner/x",
        ".hidden/x",
        "a/.hidden",
    ] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::write(root.join("a/file.txt"), "").unwrap();
    let listing = place.store.list(ListSort::Name).unwrap();
    assert_eq!(ids(&listing), ["a/good"]);
    let text: Vec<String> = listing
        .problems
        .iter()
        .map(|p| {
            format!(
                "{}: {}",
                p.path.strip_prefix(&root).unwrap().display(),
                p.reason
            )
        })
        .collect();
    insta::assert_snapshot!(text.join("\n"), @r#"
    a/-bad-: model name "a/-bad-" is not valid: "-bad-" may not start or end with a dash or a dot
    a/empty: damaged: it holds no safetensors or GGUF file; repair it with `mlxcel download a/empty`
    bad owner: "bad owner" is no owner: it may hold only ASCII letters, digits, dash, underscore and dot
    o/.n.partial: unfinished download; continue with `mlxcel download o/n` or drop it with `mlxcel rm o/n`
    "#);
    assert!(listing.problems[3].size_bytes > 500);
}

#[test]
fn a_removed_model_is_gone_with_its_owners_folder_and_its_neighbours_stay() {
    let place = Place::new("https://unused.example");
    put_model(&place, "o/n", 1000);
    put_model(&place, "p/n", 10);
    put_model(&place, "p/m", 10);
    let remove = |id: &str| place.store.remove(&RepoId::parse(id).unwrap());
    let removed = remove("o/n").unwrap();
    assert_eq!((removed.path, removed.freed_bytes), (place.target(), 1002));
    remove("p/n").unwrap();
    assert_eq!(
        tree_of(place.store.root().unwrap()),
        ["p/", "p/m/", "p/m/config.json", "p/m/model.safetensors"]
    );
    assert!(matches!(remove("o/n"), Err(StoreError::NotStored { .. })));
    assert!(matches!(
        place.find("o/n"),
        Err(StoreError::NotFound { .. })
    ));
}

#[test]
fn an_unfinished_download_can_be_removed() {
    let hub = FakeHub::small(1000);
    hub.faults("model.safetensors", [500, 0, 0, 0, 0].map(Fault::Cut));
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap_err();
    assert!(
        place
            .store
            .remove(&RepoId::parse("o/n").unwrap())
            .unwrap()
            .freed_bytes
            > 500
    );
    assert!(tree_of(place.store.root().unwrap()).is_empty());
}

#[test]
fn a_model_in_use_by_a_download_is_not_removed() {
    let place = Place::new("https://unused.example");
    put_model(&place, "o/n", 10);
    let _held =
        super::super::lock::SlotLock::acquire(&place.store.root().unwrap().join("o/.n.lock"))
            .unwrap();
    let id = RepoId::parse("o/n").unwrap();
    assert!(matches!(
        place.store.remove(&id),
        Err(StoreError::Locked { .. })
    ));
    place.find("o/n").unwrap();
}

#[test]
fn what_only_the_hugging_face_cache_holds_is_not_removed() {
    let place = Place::new("https://unused.example");
    let repo = place.dir.path().join(".cache/huggingface/hub/models--o--n");
    fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
    let error = place
        .store
        .remove(&RepoId::parse("o/n").unwrap())
        .unwrap_err();
    assert!(
        matches!(&error, StoreError::OnlyInHfCache { path, .. } if *path == repo),
        "{error}"
    );
    assert!(repo.join("snapshots/abc").exists());
}

#[test]
fn a_removal_that_was_interrupted_is_finished_by_the_next() {
    let place = Place::new("https://unused.example");
    put_model(&place, "o/n", 10);
    put_model(&place, "o/.n.removed", 10);
    let problems = place.store.list(ListSort::Name).unwrap().problems;
    assert_eq!(
        problems[0].reason,
        "half removed; finish with `mlxcel rm o/n`"
    );
    place.store.remove(&RepoId::parse("o/n").unwrap()).unwrap();
    assert!(tree_of(place.store.root().unwrap()).is_empty());
    put_model(&place, "o/.n.removed", 10);
    place.store.remove(&RepoId::parse("o/n").unwrap()).unwrap();
    assert!(tree_of(place.store.root().unwrap()).is_empty());
}

#[test]
fn gguf_models_are_listed_once() {
    let hub = FakeHub::new();
    hub.file("x-Q4_0.gguf", &pattern(100), true);
    hub.file("x-Q8_0.gguf", &pattern(200), true);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n:Q4_0").unwrap();
    place.get("o/n:Q8_0").unwrap();
    let listing = place.store.list(ListSort::Name).unwrap();
    assert_eq!(ids(&listing), ["o/n"]);
    assert!(listing.problems.is_empty());
}
