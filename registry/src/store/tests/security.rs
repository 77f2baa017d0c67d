//! Tokens, redirects, encryption and certificates.

use super::fake_hub::FakeHub;
use super::server::Answer;
use super::*;

fn with_token(env: &mut StoreEnv) {
    env.token = Some(Token::new("hf_secret"));
}

fn tokens(server: &Server) -> Vec<bool> {
    let log = server.log();
    log.iter()
        .map(|e| e.request.header("authorization") == Some("Bearer hf_secret"))
        .collect()
}

#[test]
fn the_token_goes_to_the_endpoint_and_not_where_it_redirects_to() {
    let hub = FakeHub::small(5000);
    let server = serve(&hub);
    let elsewhere = serve(&hub);
    hub.cdn(&elsewhere.url());
    let place = Place::with(&server.url(), with_token);
    place.get("o/n").unwrap();
    assert!(tokens(&server).iter().all(|sent| *sent));
    let foreign = elsewhere.log();
    assert_eq!(foreign.len(), 1);
    assert!(foreign[0].request.header("authorization").is_none());
    assert!(foreign[0].request.path.ends_with("model.safetensors"));
}

#[test]
fn the_token_stays_on_redirects_within_the_endpoint() {
    let hub = FakeHub::small(5000);
    let server = Server::start({
        let hub = hub.clone();
        move |request| match request.path.strip_prefix("/renamed") {
            Some(_) => {
                let mut moved = request.clone();
                moved.path = request.path.replace("/renamed", "");
                hub.answer(&moved)
            }
            None => {
                let query = if request.query.is_empty() {
                    String::new()
                } else {
                    format!("?{}", request.query)
                };
                Answer::new(307, "").with("location", format!("/renamed{}{query}", request.path))
            }
        }
    });
    let place = Place::with(&server.url(), with_token);
    place.get("o/n").unwrap();
    assert!(tokens(&server).iter().all(|sent| *sent));
}

#[test]
fn a_resumed_range_follows_the_redirect() {
    let hub = FakeHub::small(1_000_000);
    let server = serve(&hub);
    let elsewhere = serve(&hub);
    hub.cdn(&elsewhere.url());
    hub.faults("model.safetensors", [fake_hub::Fault::Cut(400_000)]);
    let place = Place::new(&server.url());
    place.get("o/n").unwrap();
    let sent: usize = elsewhere.log().iter().map(|e| e.sent_bytes).sum();
    assert_eq!(sent, 1_000_000);
}

#[test]
fn redirects_in_a_circle_end() {
    let server =
        Server::start(|request| Answer::new(302, "").with("location", request.path.clone()));
    let place = Place::new(&server.url());
    assert!(matches!(
        place.get("o/n"),
        Err(StoreError::TooManyRedirects { limit: 8, .. })
    ));
}

#[test]
fn redirects_to_plain_hosts_or_other_schemes_are_refused() {
    for (target, insecure) in [
        ("http://192.0.2.1/x?signature=secret", true),
        ("http://localhost.example/x", true),
        ("file:///etc/passwd", false),
        ("ftp://127.0.0.1/x", false),
        ("http://user:pw@127.0.0.1/x", false),
    ] {
        let server = Server::start(move |_| Answer::new(302, "").with("location", target));
        let place = Place::new(&server.url());
        let error = place.get("o/n").unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
        assert_eq!(
            matches!(error, StoreError::Insecure { .. }),
            insecure,
            "{target}: {error}"
        );
        assert_eq!(server.log().len(), 1);
    }
}

#[test]
fn endpoints_have_to_be_encrypted_or_loopback() {
    let place = Place::new("http://hub.example");
    let error = place.get("o/n").unwrap_err();
    insta::assert_snapshot!(error, @"http://hub.example is not encrypted: use https, or set MLXCEL_ALLOW_INSECURE_ENDPOINT=1 to accept the risk");
    for bad in [
        "hub.example",
        "ftp://hub.example",
        "https://me:pw@hub.example",
        "https://h.example/?x",
        "",
    ] {
        let error = Place::new(bad).get("o/n").unwrap_err();
        assert!(
            matches!(error, StoreError::BadEndpoint { .. }),
            "{bad}: {error}"
        );
        assert!(!error.to_string().contains("pw"), "{error}");
    }
}

#[test]
fn the_switch_for_insecure_endpoints_is_obeyed() {
    let hub = FakeHub::small(500);
    let server = serve(&hub);
    // The unspecified address reaches this machine and is no loopback address.
    let endpoint = server.url().replace("127.0.0.1", "0.0.0.0");
    assert!(matches!(
        Place::new(&endpoint).get("o/n"),
        Err(StoreError::Insecure { .. })
    ));
    assert!(server.log().is_empty());
    let place = Place::with(&endpoint, |env| env.allow_insecure_endpoint = true);
    place.get("o/n").unwrap();
}

#[test]
fn an_endpoint_may_have_a_path() {
    let hub = FakeHub::small(500);
    let server = Server::start({
        let hub = hub.clone();
        move |request| {
            let mut inner = request.clone();
            inner.path = request.path.replace("/artifacts/hf", "");
            hub.answer(&inner)
        }
    });
    let place = Place::new(&format!("{}/artifacts/hf/", server.url()));
    place.get("o/n").unwrap();
    assert!(
        server
            .log()
            .iter()
            .all(|e| e.request.path.starts_with("/artifacts/hf/"))
    );
}

#[test]
fn the_token_file_is_read_and_checked() {
    let hub = FakeHub::small(500);
    let server = serve(&hub);
    let place = Place::new(&server.url());
    let file = place.dir.path().join(".cache/huggingface/token");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, "two words").unwrap();
    assert!(matches!(place.get("o/n"), Err(StoreError::BadToken { .. })));
    fs::write(&file, " hf_secret\n").unwrap();
    place.get("o/n").unwrap();
    assert!(tokens(&server).iter().all(|sent| *sent));
}

#[test]
fn an_unknown_authority_is_refused_and_an_extra_one_accepted() {
    let hub = FakeHub::small(5000);
    let server = Server::start_tls({
        let hub = hub.clone();
        move |request| hub.answer(request)
    });
    let place = Place::new(&server.url());
    let error = place.get("o/n").unwrap_err();
    assert!(matches!(&error, StoreError::Tls { .. }), "{error}");
    assert!(
        error.to_string().contains("MLXCEL_EXTRA_CA_CERTS"),
        "{error}"
    );

    let bundle = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/tests/tls/ca.pem");
    let place = Place::with(&server.url(), |env| env.extra_ca_certs = Some(bundle));
    place.get("o/n").unwrap();

    for (path, reason) in [
        ("no-such-file.pem", "No such file"),
        ("Cargo.toml", "no PEM certificate"),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let place = Place::with(&server.url(), |env| env.extra_ca_certs = Some(path));
        let error = place.get("o/n").unwrap_err();
        assert!(matches!(&error, StoreError::BadCaBundle { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn encryption_is_not_left_by_a_redirect_even_to_loopback() {
    let plain = Server::start(|_| Answer::new(200, ""));
    let target = plain.url();
    let server = Server::start_tls(move |_| Answer::new(302, "").with("location", target.clone()));
    let bundle = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/tests/tls/ca.pem");
    let place = Place::with(&server.url(), |env| env.extra_ca_certs = Some(bundle));
    assert!(matches!(place.get("o/n"), Err(StoreError::Insecure { .. })));
    assert!(plain.log().is_empty());
}
