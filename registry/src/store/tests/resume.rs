//! Downloads that break: what is kept, what is fetched again, what is never believed.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::fake_hub::{FakeHub, Fault, pattern};
use super::*;

const SIZE: usize = 3_000_000;

fn sent(server: &Server) -> usize {
    server
        .about("model.safetensors")
        .iter()
        .map(|e| e.sent_bytes)
        .sum()
}

fn check_whole(place: &Place) {
    place.find("o/n").unwrap();
    let bytes = fs::read(place.target().join("model.safetensors")).unwrap();
    assert!(bytes == pattern(SIZE));
}

#[test]
fn a_stopped_download_is_not_loadable_and_continues_where_it_stopped() {
    let hub = FakeHub::small(SIZE);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let wish = request("o/n");
    let mut recorder = Recorder {
        cancel_after: Some((1_000_000, wish.cancel.clone())),
        ..Recorder::default()
    };
    let error = place.store.download(&wish, &mut recorder).unwrap_err();
    assert!(matches!(error, StoreError::Cancelled));

    assert!(matches!(
        place.find("o/n"),
        Err(StoreError::NotFound { .. })
    ));
    let staging = place.store.root().unwrap().join("o/.n.partial");
    assert!(matches!(
        place.find(staging.to_str().unwrap()),
        Err(StoreError::Unfinished { .. })
    ));
    assert!(place.find("o/.n.partial").is_err());
    assert!(place.store.list(ListSort::Name).unwrap().models.is_empty());

    let kept = fs::metadata(place.part("model.safetensors")).unwrap().len() as usize;
    assert!((1_000_000..SIZE).contains(&kept));
    server.forget();
    let mut recorder = Recorder::default();
    place
        .store
        .download(&request("o/n"), &mut recorder)
        .unwrap();
    assert_eq!(sent(&server), SIZE - kept);
    assert_eq!(recorder.received_bytes as usize, SIZE - kept);
    assert!(server.about("config.json").is_empty());
    let again = server.about("model.safetensors").remove(0).request;
    assert_eq!(
        again.header("range"),
        Some(format!("bytes={kept}-").as_str())
    );
    assert!(again.header("if-range").is_some());
    check_whole(&place);
}

/// Not a test of its own: the process that the next test kills.
#[test]
fn child_that_downloads_until_killed() {
    let (Ok(endpoint), Ok(home)) = (
        std::env::var("MLXCEL_TEST_CHILD_ENDPOINT"),
        std::env::var("MLXCEL_TEST_CHILD_HOME"),
    ) else {
        return;
    };
    struct Print(u64);
    impl Progress for Print {
        fn event(&mut self, event: &ProgressEvent<'_>) {
            if let ProgressEvent::Received { bytes, .. } = event {
                self.0 += bytes;
                println!("\nreceived {}", self.0);
            }
        }
    }
    let env = StoreEnv {
        home: Some(home.into()),
        endpoint,
        ..StoreEnv::default()
    };
    let store = Store::new(env);
    store.download(&request("o/n"), &mut Print(0)).unwrap();
}

#[test]
fn a_killed_process_leaves_a_part_that_the_next_one_continues() {
    let hub = FakeHub::small(SIZE);
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Mutex::new(held);
    let server = Server::start({
        let hub = hub.clone();
        move |request| {
            // A restarted file would wait here for ever, were the killer not gone by then.
            if request.header("range").is_some() {
                let _ = held.lock().unwrap().recv();
            }
            hub.answer(request)
        }
    });
    // The first answer breaks off half way, and the child hangs in its second request until it is killed.
    hub.faults("model.safetensors", [Fault::Cut(SIZE / 2)]);
    let place = Place::new(&server.url());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "store::tests::resume::child_that_downloads_until_killed",
            "--nocapture",
        ])
        .env("MLXCEL_TEST_CHILD_ENDPOINT", server.url())
        .env("MLXCEL_TEST_CHILD_HOME", place.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let half = format!("received {}", SIZE / 2 + 22);
    assert!(lines.any(|line| line == half));
    child.kill().unwrap();
    child.wait().unwrap();
    drop(release);

    assert!(matches!(
        place.find("o/n"),
        Err(StoreError::NotFound { .. })
    ));
    let kept = fs::metadata(place.part("model.safetensors")).unwrap().len() as usize;
    assert_eq!(kept, SIZE / 2);
    let mut recorder = Recorder::default();
    place
        .store
        .download(&request("o/n"), &mut recorder)
        .unwrap();
    assert_eq!(recorder.received_bytes as usize, SIZE - kept);
    check_whole(&place);
}

#[test]
fn dropped_connections_are_continued_and_cost_no_byte_twice() {
    let hub = FakeHub::small(SIZE);
    let cuts = [0, 0, 500_000, 0, 700_000, 1].map(Fault::Cut);
    hub.faults("model.safetensors", cuts);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let mut recorder = Recorder::default();
    place
        .store
        .download(&request("o/n"), &mut recorder)
        .unwrap();
    assert_eq!(sent(&server), SIZE);
    check_whole(&place);
    let waits = recorder
        .lines
        .iter()
        .filter(|l| l.starts_with("Retrying"))
        .count();
    assert_eq!(waits, 6);
    // 500 ms doubled per failure in a row; progress starts the row again.
    assert_eq!(
        place.clock.0.load(Ordering::SeqCst),
        500 + 1000 + 500 + 1000 + 500 + 500
    );
}

#[test]
fn a_server_that_never_delivers_is_given_up_and_the_part_is_kept() {
    let hub = FakeHub::small(SIZE);
    let cuts = [100_000, 0, 0, 0, 0, 0, 0].map(Fault::Cut);
    hub.faults("model.safetensors", cuts);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(&error, StoreError::GaveUp { attempts: 5, .. }),
        "{error}"
    );
    assert_eq!(
        fs::metadata(place.part("model.safetensors")).unwrap().len(),
        100_000
    );
    hub.faults("model.safetensors", []);
    server.forget();
    place.get("o/n").unwrap();
    assert_eq!(sent(&server), SIZE - 100_000);
}

#[test]
fn a_server_that_sends_a_byte_at_a_time_is_given_up_too() {
    let hub = FakeHub::small(SIZE);
    hub.faults("model.safetensors", vec![Fault::Cut(1); 1000]);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::GaveUp { attempts: 64, .. })
    ));
}

#[test]
fn changed_content_is_noticed_by_its_tag_and_fetched_whole() {
    let hub = FakeHub::small(SIZE);
    hub.faults("model.safetensors", [Fault::Cut(100_000)]);
    hub.etag("model.safetensors", "\"one\"");
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let cancel = CancelFlag::default();
    let mut wish = request("o/n");
    wish.cancel = cancel.clone();
    let mut recorder = Recorder {
        cancel_after: Some((100_000, cancel)),
        ..Recorder::default()
    };
    place.store.download(&wish, &mut recorder).unwrap_err();
    hub.faults("model.safetensors", []);
    hub.etag("model.safetensors", "\"two\"");
    server.forget();
    let mut recorder = Recorder::default();
    place
        .store
        .download(&request("o/n"), &mut recorder)
        .unwrap();
    assert_eq!(sent(&server), SIZE);
    let restarts: Vec<_> = recorder
        .lines
        .iter()
        .filter(|l| l.starts_with("FileRestarted"))
        .cloned()
        .collect();
    insta::assert_snapshot!(restarts.join("\n"), @r#"FileRestarted { file: "model.safetensors", lost_bytes: 100000, reason: "the server sends it whole: it changed, or cannot resume" }"#);
    check_whole(&place);
}

#[test]
fn servers_that_resume_badly_cost_a_fresh_start_and_no_wrong_byte() {
    for (fault, expected) in [
        (Fault::Whole, "the server sends it whole"),
        (Fault::WrongRange, "the server sends another range"),
        (Fault::Status(416, vec![]), "no such range"),
        (Fault::Garbage, "its digest is wrong"),
    ] {
        let hub = FakeHub::small(SIZE);
        hub.faults("model.safetensors", [Fault::Cut(1_000_000), fault]);
        let server = serve(&hub);
        let place = Place::new(&server.url());
        let mut recorder = Recorder::default();
        place
            .store
            .download(&request("o/n"), &mut recorder)
            .unwrap();
        let restarted = recorder.lines.iter().any(|l| l.contains(expected));
        assert!(restarted, "{expected}: {:?}", recorder.lines);
        check_whole(&place);
    }
}

#[test]
fn a_part_that_rotted_on_the_disk_is_replaced() {
    let hub = FakeHub::small(SIZE);
    hub.faults("model.safetensors", [1_000_000, 0, 0, 0, 0].map(Fault::Cut));
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap_err();
    fs::write(place.part("model.safetensors"), vec![0; 1_000_000]).unwrap();
    place.get("o/n").unwrap();
    check_whole(&place);
}

#[test]
fn a_part_of_another_content_is_not_continued() {
    let hub = FakeHub::small(SIZE);
    hub.faults("model.safetensors", [1_000_000, 0, 0, 0, 0].map(Fault::Cut));
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap_err();
    hub.file("model.safetensors", &pattern(SIZE / 2), true);
    hub.file("tokenizer.txt", b"new", false);
    place.get("o/n").unwrap();
    assert_eq!(
        fs::read(place.target().join("model.safetensors")).unwrap(),
        pattern(SIZE / 2)
    );
}

#[test]
fn files_of_a_commit_that_is_gone_do_not_stay_behind() {
    let hub = FakeHub::small(SIZE);
    hub.file("old/notes.txt", b"old", false);
    hub.faults("model.safetensors", [0, 0, 0, 0, 0].map(Fault::Cut));
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap_err();
    let fresh = FakeHub::small(SIZE);
    let server = serve(&fresh);
    let mut place = place;
    place.store.env.endpoint = server.url();
    place.get("o/n").unwrap();
    assert!(!place.target().join("old").exists());
    check_whole(&place);
}

#[test]
fn wrong_content_in_one_piece_is_an_error_and_nothing_is_kept() {
    let hub = FakeHub::small(SIZE);
    hub.faults("model.safetensors", [Fault::Garbage]);
    hub.faults("config.json", [Fault::Garbage]);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(&error, StoreError::HashMismatch { file, expected, .. } if file == "config.json" && expected.starts_with("git blob ")),
        "{error}"
    );
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(&error, StoreError::HashMismatch { expected, .. } if expected.starts_with("sha256 ")),
        "{error}"
    );
    assert!(!place.part("model.safetensors").exists());
    assert!(place.find("o/n").is_err());
    place.get("o/n").unwrap();
    check_whole(&place);
}

#[test]
fn sizes_other_than_listed_are_refused() {
    for fault in [Fault::Short, Fault::Endless] {
        let hub = FakeHub::small(SIZE);
        hub.faults("model.safetensors", [fault.clone()]);
        let server = serve(&hub);
        let place = Place::new(&server.url());
        let error = place.get("o/n").unwrap_err();
        assert!(
            matches!(error, StoreError::SizeMismatch { .. }),
            "{fault:?}: {error}"
        );
        assert!(place.find("o/n").is_err());
        place.get("o/n").unwrap();
        check_whole(&place);
    }
}

#[test]
fn a_full_disk_keeps_what_arrived() {
    let hub = FakeHub::small(SIZE);
    let server = serve(&hub);
    let mut place = Place::new(&server.url());
    let quota = place.disk(u64::MAX, 1_000_000);
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(error, StoreError::DiskFull { kept_bytes, .. } if kept_bytes > 700_000),
        "{error}"
    );
    assert!(place.find("o/n").is_err());
    let kept = fs::metadata(place.part("model.safetensors")).unwrap().len() as usize;
    assert_eq!(kept, 1_000_000 - 22);
    quota.store(u64::MAX, Ordering::SeqCst);
    server.forget();
    place.get("o/n").unwrap();
    assert_eq!(sent(&server), SIZE - kept);
    check_whole(&place);
}

#[test]
fn passing_server_faults_are_waited_for_and_lasting_ones_are_named() {
    let hub = FakeHub::small(SIZE);
    let retry_after = vec![("retry-after", "7".to_owned())];
    hub.faults(
        "config.json",
        [
            Fault::Status(503, vec![]),
            Fault::Status(429, retry_after),
            Fault::Status(500, vec![]),
        ],
    );
    let server = serve(&hub);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap();
    assert_eq!(place.clock.0.load(Ordering::SeqCst), 500 + 7000 + 2000);

    for (status, pattern) in [
        (500, "500: the server has a problem"),
        (401, "may be private, gated or misspelt; set HF_TOKEN"),
        (403, "forbids access to o/n (as told)"),
        (404, "lists config.json, but the endpoint does not have it"),
        (418, "answered 418 (as told), which was not expected"),
    ] {
        let place = Place::new(&server.url());
        hub.faults("config.json", vec![Fault::Status(status, vec![]); 8]);
        let error = place.get("o/n").unwrap_err().to_string();
        assert!(error.contains(pattern), "{status}: {error}");
    }
    let place = Place::new(&server.url());
    hub.faults(
        "config.json",
        [Fault::Status(
            429,
            vec![("retry-after", "86400".to_owned())],
        )],
    );
    let error = place.get("o/n").unwrap_err();
    insta::assert_snapshot!(error, @"127.0.0.1 limits the rate of requests (retry after 86400 s); try again later, or set HF_TOKEN for a higher limit");
}

#[test]
fn nobody_listening_is_a_network_error_after_some_attempts() {
    // Port 1 is reserved for a service that no machine runs.
    let place = Place::new("http://127.0.0.1:1");
    let error = place.get("o/n").unwrap_err();
    assert!(
        matches!(&error, StoreError::GaveUp { attempts: 5, last } if matches!(**last, StoreError::Network { .. })),
        "{error}"
    );
}

#[test]
fn a_wait_ends_when_cancelled() {
    struct CancelOnRetry(CancelFlag);
    impl Progress for CancelOnRetry {
        fn event(&mut self, event: &ProgressEvent<'_>) {
            if matches!(event, ProgressEvent::Retrying { .. }) {
                self.0.cancel();
            }
        }
    }
    let hub = FakeHub::small(SIZE);
    hub.faults("config.json", [Fault::Status(503, vec![])]);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let wish = request("o/n");
    let mut progress = CancelOnRetry(wish.cancel.clone());
    let error = place.store.download(&wish, &mut progress).unwrap_err();
    assert!(matches!(error, StoreError::Cancelled));
    assert_eq!(place.clock.0.load(Ordering::SeqCst), 0);
}
