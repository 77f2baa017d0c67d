//! The real `mlxcel` program in an environment of its own: what it writes, and how it ends.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mlxcel_registry::checkpoint::testing::SafetensorsBuilder;

use crate::plugins::Healthy;

/// A command that has not ended by then never will.
const TIMEOUT: Duration = Duration::from_secs(300);

/// How a missing part of the test's surroundings is told.
#[expect(
    clippy::panic,
    reason = "a test that cannot begin has failed, and this is its message"
)]
pub(crate) fn give_up(text: &str) -> ! {
    panic!("{text}")
}

/// A path that `cargo xtask test` hands to tests.
pub fn prepared(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => give_up(&format!(
            "{variable} is not set: run the tests with `cargo xtask test`"
        )),
    }
}

/// A plugins folder with every family and the CPU backend.
pub fn real_plugins() -> PathBuf {
    prepared("MLXCEL_TEST_PLUGINS_DIR")
}

/// The small real model, a GGUF file.
pub fn real_model() -> PathBuf {
    prepared("MLXCEL_TEST_MODEL_GGUF")
}

/// The program under test: `MLXCEL_TEST_BIN`, or the one beside the running test.
pub(crate) fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("MLXCEL_TEST_BIN") {
        return PathBuf::from(path);
    }
    let exe = std::env::current_exe().unwrap_or_default();
    let dir = exe
        .parent()
        .and_then(Path::parent)
        .unwrap_or(Path::new("."));
    let path = dir.join("mlxcel");
    if !path.is_file() {
        let path = path.display();
        give_up(&format!(
            "{path} is missing: run the tests with `cargo xtask test`, or build it with `cargo build -p mlxcel`"
        ));
    }
    path
}

/// The program with a home, a store and a cache that nobody else has, and no plugins.
pub struct Mlxcel {
    home: tempfile::TempDir,
    variables: Vec<(OsString, OsString)>,
    /// Paths that differ from machine to machine, and what is shown in their place.
    shown: Vec<(String, &'static str)>,
}

impl Mlxcel {
    /// A fresh environment.
    pub fn new() -> Self {
        let home = match tempfile::tempdir() {
            Ok(home) => home,
            Err(error) => give_up(&format!("no temporary folder: {error}")),
        };
        // The program reports canonical paths.
        let path = home
            .path()
            .canonicalize()
            .unwrap_or_else(|_| home.path().to_path_buf());
        let shown = vec![(path.to_string_lossy().into_owned(), "[home]")];
        Self {
            home,
            variables: Vec::new(),
            shown,
        }
    }

    /// Sets a variable.
    #[must_use]
    pub fn with(mut self, variable: &str, value: impl AsRef<OsStr>) -> Self {
        self.variables
            .push((variable.into(), value.as_ref().to_owned()));
        self
    }

    /// Uses the family and the backend of this repository's tests, which run nothing but tables.
    #[must_use]
    pub fn with_mock_plugins(self) -> Self {
        for plugin in [Healthy::Family, Healthy::Backend] {
            if let Err(error) = plugin.copy_to(&self.dir("plugins")) {
                give_up(&error.to_string());
            }
        }
        let path = self.path("plugins");
        self.with("MLXCEL_PLUGIN_PATH", path)
    }

    /// As [`Mlxcel::with_mock_plugins`], with a fault in the backend; see `tests/plugins/mock_backend`.
    #[must_use]
    pub fn with_faulty_device(self, fault: &str) -> Self {
        let home = self.with_mock_plugins();
        if let Err(error) = Healthy::Backend.with_fault(&home.dir("plugins"), fault) {
            give_up(&error.to_string());
        }
        home
    }

    /// Uses the real plugins; their folder is shown as `[plugins]`.
    #[must_use]
    pub fn with_real_plugins(mut self) -> Self {
        let path = real_plugins();
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        self.shown
            .push((real.to_string_lossy().into_owned(), "[plugins]"));
        self.with("MLXCEL_PLUGIN_PATH", path)
    }

    /// A place in the home folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// A folder in the home folder, made if need be.
    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        if let Err(error) = std::fs::create_dir_all(&path) {
            give_up(&format!("{}: {error}", path.display()));
        }
        path
    }

    /// A file in the home folder.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        self.dir(name.rsplit_once('/').map_or("", |(dir, _)| dir));
        if let Err(error) = std::fs::write(&path, content) {
            give_up(&format!("{}: {error}", path.display()));
        }
        path
    }

    /// A checkpoint that the mock family knows, in the folder `name`.
    pub fn mock_model(&self, name: &str) -> PathBuf {
        let config = r#"{"model_type": "mock", "vocab_size": 3, "attend": true}"#;
        self.file(&format!("{name}/config.json"), config);
        let weights = SafetensorsBuilder::new()
            .f32("table", &[3, 3], &[0.0; 9])
            .build();
        self.file(&format!("{name}/model.safetensors"), weights);
        self.path(name)
    }

    /// Runs the program to its end, with nothing on stdin.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Finished {
        self.run_with_input(args, "")
    }

    /// Runs the program to its end with `input` on stdin.
    pub fn run_with_input<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: &str,
    ) -> Finished {
        let mut running = self.start(args);
        running.write(input);
        running.finish()
    }

    /// Starts the program.
    pub fn start<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Running {
        let mut child = match self.command(&program(), args).spawn() {
            Ok(child) => child,
            Err(error) => give_up(&format!("{}: {error}", program().display())),
        };
        let stderr = child
            .stderr
            .take()
            .map(|stream| std::thread::spawn(move || read_all(stream)));
        Running {
            child,
            stderr,
            read: Vec::new(),
            shown: self.shown.clone(),
        }
    }

    /// A program in this environment, its streams piped.
    pub(crate) fn command<S: AsRef<OsStr>>(
        &self,
        program: &Path,
        args: impl IntoIterator<Item = S>,
    ) -> Command {
        let home = self.home.path();
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .env("HOME", home)
            .env("MLXCEL_CACHE_DIR", home.join("cache"))
            .env("HF_HOME", home.join("huggingface"))
            // A test that means the network says so; a mistake goes nowhere.
            .env("HF_ENDPOINT", "http://127.0.0.1:9")
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .current_dir(home)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

impl Default for Mlxcel {
    fn default() -> Self {
        Self::new()
    }
}

pub(crate) fn read_all(mut stream: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    // What was read before an error is what the test looks at.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// The program while it runs.
pub struct Running {
    child: Child,
    stderr: Option<JoinHandle<Vec<u8>>>,
    /// What was read of stdout so far.
    read: Vec<u8>,
    shown: Vec<(String, &'static str)>,
}

impl Running {
    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes to its stdin, which it need not read.
    pub fn write(&mut self, text: &str) {
        if let Some(stdin) = &mut self.child.stdin {
            let _ = stdin
                .write_all(text.as_bytes())
                .and_then(|()| stdin.flush());
        }
    }

    /// Waits until it has written `bytes` more to stdout.
    pub fn read_some(&mut self, bytes: usize) -> String {
        let mut block = vec![0; bytes];
        if let Some(stdout) = &mut self.child.stdout {
            match stdout.read_exact(&mut block) {
                Ok(()) => self.read.extend_from_slice(&block),
                Err(error) => give_up(&format!("the program wrote too little: {error}")),
            }
        }
        String::from_utf8_lossy(&block).into_owned()
    }

    /// Closes its stdout, as a reader that has seen enough does.
    pub fn close_stdout(&mut self) {
        self.child.stdout.take();
    }

    /// Ends its input and waits for its end.
    pub fn finish(mut self) -> Finished {
        self.child.stdin.take();
        let stdout = self
            .child
            .stdout
            .take()
            .map(|stream| std::thread::spawn(move || read_all(stream)));
        let status = self.wait();
        let rest = |stream: Option<JoinHandle<Vec<u8>>>| {
            stream
                .and_then(|thread| thread.join().ok())
                .unwrap_or_default()
        };
        let mut out = std::mem::take(&mut self.read);
        out.extend(rest(stdout));
        let text = |bytes: Vec<u8>| {
            let mut text = String::from_utf8_lossy(&bytes).into_owned();
            for (path, name) in &self.shown {
                text = text.replace(path, name);
            }
            text
        };
        Finished {
            code: status.code(),
            stdout: text(out),
            stderr: text(rest(self.stderr.take())),
        }
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status,
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                Ok(None) => {
                    let _ = self.child.kill();
                    give_up(&format!(
                        "the program did not end within {} s",
                        TIMEOUT.as_secs()
                    ));
                }
                Err(error) => give_up(&format!("the program was lost: {error}")),
            }
        }
    }
}

/// What came of a run.
#[derive(Debug)]
pub struct Finished {
    /// Exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
}

impl Finished {
    /// All of it, for snapshots.
    pub fn show(&self) -> String {
        let code = self
            .code
            .map_or_else(|| "signal".to_owned(), |code| code.to_string());
        format!(
            "exit {code}\n--- stdout\n{}--- stderr\n{}",
            self.stdout, self.stderr
        )
    }

    /// Its stdout, which has to be one JSON document.
    pub fn json(&self) -> serde_json::Value {
        match serde_json::from_str(&self.stdout) {
            Ok(value) => value,
            Err(error) => give_up(&format!("stdout is not JSON ({error}):\n{}", self.show())),
        }
    }

    /// Fails unless it ended well.
    #[track_caller]
    pub fn expect_success(self) -> Self {
        if self.code != Some(0) {
            give_up(&self.show());
        }
        self
    }
}
