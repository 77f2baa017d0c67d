//! What the server does not begin with: no address is printed for flags that the model's headers alone refute.

use mlxcel_tests::cli::{Finished, Mlxcel, real_model};
use mlxcel_tests::server::Server;
use serde_json::json;

fn serve(home: &Mlxcel, flags: &[&str]) -> Finished {
    let model = real_model();
    let model = model.to_str().expect("text");
    let done = home.run([&["serve", model, "--port", "0"], flags].concat());
    assert_eq!(done.stdout, "", "{}", done.show());
    done
}

/// The exit code and the error.
fn refusal(home: &Mlxcel, flags: &[&str]) -> String {
    let done = serve(home, flags);
    let error = done.stderr.lines().find(|line| line.starts_with("error: "));
    format!("{:?} {}", done.code, error.unwrap_or_default())
}

#[test]
fn flags_that_headers_refute_are_refused_before_an_address_is_printed() {
    let home = Mlxcel::new().with_real_plugins();
    insta::assert_snapshot!(refusal(&home, &["--kv-cache-budget", "1000"]), @"Some(2) error: --kv-cache-budget of 1000 bytes holds no page of 32 tokens, which takes 737280: give at least 737280, or auto");
    let long = refusal(&home, &["--ctx-size", "9000"]);
    insta::assert_snapshot!(long, @"Some(2) error: --ctx-size 9000 is beyond the model's 8192 tokens: ask for at most that");
    // An estimate is one of what would be loaded.
    assert_eq!(
        refusal(&home, &["--ctx-size", "9000", "--estimate-memory"]),
        long
    );
    assert!(
        refusal(&home, &["--ctx-size", "9000", "--kv-cache-budget", "1"]).contains("--ctx-size")
    );
    insta::assert_snapshot!(refusal(&home, &["--tensor-parallel", "3", "--prefix-cache-dir", "pages"]), @"Some(2) error: --tensor-parallel does not go with a folder for the prefix cache: each rank has a part of what would be kept");
    home.file("occupied", "");
    let dir = refusal(&home, &["--prefix-cache-dir", "occupied"]);
    assert!(
        dir.contains("the folder of the prefix cache occupied: "),
        "{dir}"
    );
}

#[test]
fn places_where_nobody_can_listen_are_refused_with_what_to_do() {
    let home = Mlxcel::new().with_real_plugins();
    let host = refusal(&home, &["--host", "no..host"]);
    assert!(
        host.starts_with("Some(2) error: --host no..host is no address, and no name")
            && host.contains("such as 127.0.0.1"),
        "{host}"
    );
    let other = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = other.local_addr().expect("an address").port().to_string();
    let model = real_model();
    let model = model.to_str().expect("text");
    let done = home.run(["serve", model, "--port", &port]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""));
    let text = done.stderr.replace(&port, "PORT");
    insta::assert_snapshot!(text, @"error: cannot listen on 127.0.0.1:PORT: Address already in use (os error 98); give another --port, or --port 0, which takes a free one and says on stdout which");
}

#[test]
fn a_budget_that_holds_less_than_the_context_is_said_at_the_start() {
    let home = Mlxcel::new().with_real_plugins();
    let flags = [
        "--kv-cache-budget",
        "6M",
        "--cache-type-k",
        "f16",
        "--cache-type-v",
        "f16",
    ];
    let mut server = Server::start(home, &real_model(), &flags);
    let prompt = "word ".repeat(400);
    let answer = server.post("/v1/completions", &json!({"prompt": prompt}));
    assert_eq!(answer.status, 400);
    let process = rustix::process::Pid::from_raw(server.id() as i32).expect("a process");
    rustix::process::kill_process(process, rustix::process::Signal::TERM).expect("signalled");
    let ended = server.wait();
    let note = "holds 273 of the context's 8192 tokens: longer conversations do not fit";
    assert!(ended.stderr.contains(note), "{ended:?}");
}
