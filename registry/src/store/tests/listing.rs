//! What a hub says about a repository: pages, caps, nonsense, and refusals with their advice.

use serde_json::json;

use super::fake_hub::{COMMIT, FakeHub, not_found};
use super::server::Answer;
use super::*;

#[test]
fn listings_in_pages_are_joined() {
    let hub = FakeHub::small(100);
    for i in 0..7 {
        hub.file(&format!("extra_{i}.json"), b"{}", false);
    }
    hub.paged(2);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap();
    assert_eq!(tree_of(&place.target()).len(), 10);
    let pages = server
        .log()
        .iter()
        .filter(|e| e.request.path.contains("/tree/"))
        .count();
    assert_eq!(pages, 5);
}

#[test]
fn endless_pages_end() {
    let hub = FakeHub::small(100);
    hub.tree_answer(Answer::new(200, "[]").with("link", "<?recursive=true>; rel=\"next\""));
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let error = place.get("o/n").unwrap_err();
    insta::assert_snapshot!(error, @"the listing of o/n is larger than 200 pages");
}

#[test]
fn huge_listings_are_refused() {
    let entry = r#"{"type":"file","path":"a.json","size":1}"#;
    let many = format!("[{}]", vec![entry; 100_001].join(","));
    let hub = FakeHub::small(100);
    hub.tree_answer(Answer::new(200, many));
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let error = place.get("o/n").unwrap_err();
    insta::assert_snapshot!(error, @"the listing of o/n is larger than 100000 files");

    let mut text = b"[".to_vec();
    text.resize(33 << 20, b' ');
    hub.tree_answer(Answer::new(200, text));
    assert!(matches!(place.get("o/n"), Err(StoreError::TooLarge { .. })));
}

#[test]
fn sizes_that_overflow_or_fit_no_disk_are_refused() {
    let hub = FakeHub::small(100);
    let server = serve(&hub);
    let tree = |sizes: [u64; 2]| {
        let [a, b] = sizes;
        json!([
            {"type": "file", "path": "a.safetensors", "size": a},
            {"type": "file", "path": "b.safetensors", "size": b},
        ])
        .to_string()
    };
    let place = Place::new(&server.url());
    hub.tree_answer(Answer::new(200, tree([u64::MAX, 1])));
    assert!(matches!(place.get("o/n"), Err(StoreError::TooLarge { .. })));
    hub.tree_answer(Answer::new(200, tree([u64::MAX - 10, 1])));
    assert!(matches!(place.get("o/n"), Err(StoreError::TooLarge { .. })));
    hub.tree_answer(Answer::new(200, tree([1 << 60, 1])));
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::NotEnoughSpace { .. })
    ));
}

#[test]
fn answers_that_make_no_sense_are_named() {
    let hub = FakeHub::small(100);
    let server = serve(&hub);
    for body in [
        String::new(),
        "<html>".to_owned(),
        "{}".to_owned(),
        "{\"sha\":\"../../x\"}".to_owned(),
        format!("{{\"sha\":\"{COMMIT}\",\"siblings\":3}}"),
        "[".repeat(100_000),
    ] {
        let place = Place::new(&server.url());
        hub.info_answer(Answer::new(200, body.clone()));
        let error = place.get("o/n").unwrap_err();
        assert!(
            matches!(error, StoreError::MalformedReply { .. }),
            "{error}"
        );
    }
    for body in [
        "{}",
        "[{}]",
        r#"[{"type":"file","path":"a.safetensors","size":-1}]"#,
        r#"[{"type":"file","path":"a.safetensors","size":1,"lfs":{"oid":"xyz"}}]"#,
    ] {
        let place = Place::new(&server.url());
        hub.tree_answer(Answer::new(200, body));
        let error = place.get("o/n").unwrap_err();
        assert!(
            matches!(error, StoreError::MalformedReply { .. }),
            "{body}: {error}"
        );
    }
}

#[test]
fn hostile_names_write_nothing_anywhere() {
    let hub = FakeHub::small(100);
    let server = serve(&hub);
    for name in [
        "../../../evil.json",
        "/tmp/evil.json",
        "a/../../evil.json",
        "..\\evil.json",
    ] {
        let tree = json!([
            {"type": "file", "path": "model.safetensors", "size": 100},
            {"type": "file", "path": name, "size": 2},
        ]);
        hub.tree_answer(Answer::new(200, tree.to_string()));
        let place = Place::new(&server.url());
        let error = place.get("o/n").unwrap_err();
        assert!(
            matches!(error, StoreError::HostileListing { .. }),
            "{name}: {error}"
        );
        assert!(tree_of(place.store.root().unwrap()).is_empty(), "{name}");
    }
}

#[test]
fn a_mirror_without_the_tree_interface_still_gives_a_model() {
    for status in [404, 405, 501] {
        let hub = FakeHub::small(5000);
        hub.tree_answer(Answer::new(status, ""));
        let server = serve(&hub);
        hub.cdn(&server.url());
        let place = Place::new(&server.url());
        let mut recorder = Recorder::default();
        place
            .store
            .download(&request("o/n"), &mut recorder)
            .unwrap();
        let planned = &recorder.lines[0];
        assert!(planned.contains("total_bytes: None"), "{planned}");
        place.find("o/n").unwrap();
        let record = fs::read_to_string(place.target().join(".mlxcel.json")).unwrap();
        // The digest came with the redirect.
        assert!(record.contains("\"hub\""), "{record}");
    }
}

#[test]
fn the_redirects_digest_is_held_to() {
    let hub = FakeHub::small(5000);
    hub.tree_answer(Answer::new(404, ""));
    let server = serve(&hub);
    hub.cdn(&server.url());
    hub.faults("model.safetensors", [fake_hub::Fault::Garbage]);
    let place = Place::new(&server.url());
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::HashMismatch { .. })
    ));
}

#[test]
fn what_does_not_exist_is_named() {
    let hub = FakeHub::small(100);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let mut wish = request("o/n");
    wish.revision = Some(Revision::parse("refs/pr/7").unwrap());
    let error = place.store.download(&wish, &mut NoProgress).unwrap_err();
    insta::assert_snapshot!(error, @"o/n has no revision refs/pr/7");
    let asked = server.log().remove(0).request.path;
    assert_eq!(asked, "/api/models/o/n/revision/refs/pr/7");

    let error = place.get("o/absent").unwrap_err().to_string();
    assert!(error.ends_with(
        "has no repository o/absent: check the spelling, and HF_TOKEN if it is private"
    ));
}

#[test]
fn gated_and_private_repositories_say_what_to_do() {
    let gated = |status| {
        let body = json!({"error": "Access to model o/n is restricted.\u{1b}[31m"});
        Answer::new(status, body.to_string()).with("x-error-code", "GatedRepo")
    };
    let hub = FakeHub::small(100);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    hub.info_answer(gated(401));
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(
            &error,
            StoreError::Unauthorized {
                with_token: false,
                ..
            }
        ),
        "{error}"
    );
    let place = Place::with(&server.url(), |env| env.token = Some(Token::new("hf_x")));
    hub.info_answer(gated(403));
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(
            &error,
            StoreError::Unauthorized {
                with_token: true,
                ..
            }
        ),
        "{error}"
    );
    insta::assert_snapshot!(error, @"the endpoint refused access to o/n (Access to model o/n is restricted.[31m): it may be private, gated or misspelt; the token that was sent does not give access");
    hub.info_answer(not_found("RepoNotFound"));
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::RepoNotFound { .. })
    ));
}
