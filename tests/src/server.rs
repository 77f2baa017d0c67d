//! The real server on an address of its own, on the loopback device.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Child;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cli::{Mlxcel, give_up, program, read_all, real_model};
use crate::http::{Connection, Response, request};
use crate::scripted::scripted_model;

/// A server that has not begun or ended by then never will.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The mock device claims to have next to no memory, and has no half precision.
const FLAGS: [&str; 5] = [
    "--force",
    "--kv-cache-budget",
    "100000000",
    "--dtype",
    "f32",
];

/// Values of `--lookahead`: no answer depends on it.
pub const LOOKAHEAD: [&str; 2] = ["off", "on"];

/// A running server. Dropping it kills the process.
pub struct Server {
    child: Child,
    address: String,
    stderr: Option<JoinHandle<Vec<u8>>>,
    /// Headers of every request.
    headers: Vec<String>,
    /// Its home folder.
    pub home: Mlxcel,
}

/// How a server ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to stderr.
    pub stderr: String,
}

impl Server {
    /// Starts the program with these arguments, and waits until it listens; the model may still be loading.
    pub fn listening(home: Mlxcel, model: &Path, flags: &[&str]) -> Self {
        let mut args = vec!["serve".into(), model.as_os_str().to_owned()];
        args.extend(flags.iter().map(Into::into));
        Self::launch(&program(), home, args)
    }

    /// With the scripted model, by another program beside that one, which takes the model as a flag.
    pub fn scripted_by(name: &str, script: &Value, flags: &[&str]) -> Self {
        let home = Mlxcel::new().with_mock_plugins();
        let model = scripted_model(&home, "scripted", script);
        let mut args = vec!["-m".into(), model.as_os_str().to_owned()];
        args.extend(FLAGS.iter().chain(flags).map(Into::into));
        let mut server = Self::launch(&program().with_file_name(name), home, args);
        server.wait_until_ready();
        server
    }

    fn launch(program: &Path, home: Mlxcel, mut args: Vec<OsString>) -> Self {
        if !args.iter().any(|arg| arg == "--host") {
            args.extend(["--port", "0"].map(Into::into));
        }
        let mut child = match home.command(program, args).spawn() {
            Ok(child) => child,
            Err(error) => give_up(&format!("{}: {error}", program.display())),
        };
        let stderr = child
            .stderr
            .take()
            .map(|stream| std::thread::spawn(move || read_all(stream)));
        let mut first = String::new();
        if let Some(stdout) = child.stdout.take() {
            // Nothing that can be read is handled below.
            let _ = BufReader::new(stdout).read_line(&mut first);
        }
        let address = first
            .trim()
            .strip_prefix("listening on ")
            .map(str::to_owned);
        let mut server = Self {
            child,
            address: address.unwrap_or_default(),
            stderr,
            headers: vec!["Content-Type: application/json".to_owned()],
            home,
        };
        if server.address.is_empty() {
            let ended = server.wait();
            give_up(&format!("the server did not begin: {ended:?}"));
        }
        server
    }

    /// Starts the program and waits until it answers.
    pub fn start(home: Mlxcel, model: &Path, flags: &[&str]) -> Self {
        let mut server = Self::listening(home, model, flags);
        server.wait_until_ready();
        server
    }

    /// With the small real model.
    pub fn real(flags: &[&str]) -> Self {
        Self::start(Mlxcel::new().with_real_plugins(), &real_model(), flags)
    }

    /// With the scripted model; `script` are members of its configuration.
    pub fn scripted(script: &Value, flags: &[&str]) -> Self {
        Self::scripted_in(Mlxcel::new().with_mock_plugins(), script, flags)
    }

    /// With the scripted model in a home that is prepared already.
    pub fn scripted_in(home: Mlxcel, script: &Value, flags: &[&str]) -> Self {
        let mut server = Self::scripted_listening(home, script, flags);
        server.wait_until_ready();
        server
    }

    /// With the scripted model, which may still be loading.
    pub fn scripted_listening(home: Mlxcel, script: &Value, flags: &[&str]) -> Self {
        let model = scripted_model(&home, "scripted", script);
        Self::listening(home, &model, &[&FLAGS, flags].concat())
    }

    /// Where it listens, as it said.
    pub fn url(&self) -> &str {
        &self.address
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        let authority = self
            .address
            .split("://")
            .nth(1)
            .and_then(|rest| rest.split('/').next());
        match authority.and_then(|text| text.parse().ok()) {
            Some(address) => address,
            None => give_up(&format!("{:?} is no address", self.address)),
        }
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Requests have this key from now on.
    #[must_use]
    pub fn with_key(mut self, key: &str) -> Self {
        self.headers.push(format!("Authorization: Bearer {key}"));
        self
    }

    /// One request without a body.
    pub fn get(&self, path: &str) -> Response {
        self.ask("GET", path, b"")
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> Response {
        let headers: Vec<&str> = self.headers.iter().map(String::as_str).collect();
        request(self.address(), method, path, &headers, body)
    }

    /// One request with a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    /// One request with any body.
    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Response {
        self.ask("POST", path, body)
    }

    /// A number of the metrics page: the sum of all series of this name.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").text();
        let values = page.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            (rest.starts_with(' ') || rest.starts_with('{'))
                .then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        });
        values.sum()
    }

    /// Waits until a condition holds, which it has to.
    #[track_caller]
    pub fn wait_for(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !condition(self) {
            if Instant::now() > deadline {
                give_up(&format!("waited in vain until {what}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // Whoever uses another way in asks for itself.
            let is_ready = !self.address.starts_with("http:") || self.is_healthy();
            let has_ended = matches!(self.child.try_wait(), Ok(Some(_)));
            if is_ready && !has_ended {
                return;
            }
            if has_ended || Instant::now() > deadline {
                let ended = self.wait();
                give_up(&format!("the server did not become ready: {ended:?}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn is_healthy(&self) -> bool {
        let Ok(mut connection) = Connection::try_open(self.address()) else {
            return false;
        };
        let path = format!("{}/health", self.prefix());
        connection.send("GET", &path, &[], b"");
        connection.response().status == 200
    }

    /// What is in front of every route.
    fn prefix(&self) -> &str {
        let rest = self.address.split("://").nth(1).unwrap_or_default();
        rest.find('/')
            .and_then(|at| rest.get(at..))
            .unwrap_or_default()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Ended {
        let deadline = Instant::now() + TIMEOUT;
        let code = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status.code(),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                _ => {
                    // It is given up anyway.
                    let _ = self.child.kill();
                    give_up("the server did not end");
                }
            }
        };
        let stderr = self
            .stderr
            .take()
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default();
        Ended {
            code,
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
