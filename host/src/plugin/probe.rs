//! The parent's side of a probe: starts the child, waits for a bounded time, and reads its fate.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use mlxcel_registry::plugin::{HostProfile, PluginKind, ReasonCode, Rejection, Stage, peek};
use serde::{Deserialize, Serialize};

use super::backend::ProbeReport;
use super::child::PROBE_COMMAND;
use super::probe_cache;
use super::unlinked::Unlinked;

/// Starts the line that holds the answer; a plugin may print other lines.
pub(super) const ANSWER_MARK: &str = "mlxcel-probe-answer: ";

/// Most bytes kept of each of the child's streams.
const OUTPUT_CAP_BYTES: usize = 1 << 20;

/// How the child is run.
#[derive(Debug, Clone)]
pub struct ProbeSettings {
    /// The program to start.
    pub program: PathBuf,
    /// Its arguments before the file.
    pub args: Vec<OsString>,
    /// How long it may take, in milliseconds.
    pub timeout_ms: u64,
    /// Folder where good answers about families are kept; `None` keeps none.
    pub cache_dir: Option<PathBuf>,
}

impl ProbeSettings {
    /// This program as its own child, with five seconds' time.
    pub fn from_process(cache_dir: Option<PathBuf>) -> std::io::Result<Self> {
        Ok(Self {
            program: std::env::current_exe()?,
            args: vec![PROBE_COMMAND.into()],
            timeout_ms: 5000,
            cache_dir,
        })
    }
}

/// What a good plugin told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProbeOutcome {
    /// Its name.
    pub name: String,
    /// Its own version.
    pub version: String,
    /// ABI minor of its tables.
    pub abi_minor: u32,
    /// What a backend found on this machine.
    pub backend: Option<ProbeReport>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Good(ProbeOutcome),
    Refused(Rejection),
}

fn refuse(code: ReasonCode, text: impl AsRef<str>) -> Rejection {
    Rejection::new(Stage::Probe, code, text)
}

/// Tries the plugin at `path` in a child. Good answers about families are taken from the cache; those about backends
/// never are, because drivers and free memory change without the file.
pub(super) fn probe_in_child(
    settings: &ProbeSettings,
    path: &Path,
    kind: Option<PluginKind>,
) -> Result<ProbeOutcome, Rejection> {
    let cached = (kind == Some(PluginKind::Family))
        .then(|| probe_cache::entry(settings, path))
        .flatten();
    if let Some(outcome) = cached.as_ref().and_then(probe_cache::Entry::read) {
        return Ok(outcome);
    }
    let outcome = run_child(settings, path)?;
    if let Some(entry) = cached {
        entry.write(&outcome);
    }
    Ok(outcome)
}

fn run_child(settings: &ProbeSettings, path: &Path) -> Result<ProbeOutcome, Rejection> {
    let mut child = Command::new(&settings.program)
        .args(&settings.args)
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| {
            let program = settings.program.display();
            refuse(
                ReasonCode::ProbeFailed,
                format!("the child {program} cannot be started: {error}"),
            )
        })?;
    let stdout = Captured::start(child.stdout.take());
    let stderr = Captured::start(child.stderr.take());
    let deadline = Instant::now() + Duration::from_millis(settings.timeout_ms);
    let status = wait_until(&mut child, deadline);
    let (stdout, stderr) = (stdout.finish(), stderr.finish());
    let Some(status) = status? else {
        return Err(refuse(
            ReasonCode::TimedOut,
            format!(
                "did not finish loading within {} ms: {}",
                settings.timeout_ms,
                blame(path)
            ),
        ));
    };
    judge(path, status, &stdout, &stderr)
}

/// `None` when the time is over; the child is then killed.
fn wait_until(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>, Rejection> {
    let lost = |error: std::io::Error| {
        refuse(
            ReasonCode::ProbeFailed,
            format!("the child was lost: {error}"),
        )
    };
    let mut pause = Duration::from_micros(500);
    loop {
        if let Some(status) = child.try_wait().map_err(lost)? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            // Both fail only for a child that has just ended, which is as good.
            let _ = child.kill();
            let _ = child.wait();
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// Who is at fault when loading the plugin at `path` ends a process, as far as files tell, and what to do.
fn blame(path: &Path) -> String {
    const PLUGIN: &str = "remove it or report this to its author";
    let metadata = peek(path, HostProfile::CURRENT).metadata;
    let unlinked = Unlinked::read(path, metadata.as_ref().map(|metadata| &metadata.plugin));
    if let Some(faults) = unlinked.faults() {
        return format!("{faults}: install or copy that again");
    }
    match unlinked.suspects().as_slice() {
        [] => PLUGIN.to_owned(),
        suspects => format!(
            "one of the libraries it uses may be damaged or not fit: {}; if these are in order, {PLUGIN}",
            suspects.join(", ")
        ),
    }
}

fn judge(
    path: &Path,
    status: ExitStatus,
    stdout: &[u8],
    stderr: &[u8],
) -> Result<ProbeOutcome, Rejection> {
    let said = last_line(stderr);
    if let Some(signal) = status.signal() {
        let name = signal_name(signal);
        return Err(refuse(
            ReasonCode::Crashed,
            format!("crashed while loading ({name}){said}: {}", blame(path)),
        ));
    }
    let text = String::from_utf8_lossy(stdout);
    let answer = text
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix(ANSWER_MARK));
    let Some(answer) = answer else {
        let code = status.code().unwrap_or_default();
        return Err(refuse(
            ReasonCode::Crashed,
            format!(
                "ended the process with exit code {code} while loading{said}: {}",
                blame(path)
            ),
        ));
    };
    match serde_json::from_str(answer) {
        Ok(Answer::Good(outcome)) => Ok(outcome),
        Ok(Answer::Refused(rejection)) => Err(rejection),
        Err(error) => Err(refuse(
            ReasonCode::ProbeFailed,
            format!("the child's answer cannot be read: {error}"),
        )),
    }
}

/// The last thing a dying child said, for instance the text of an uncaught exception.
fn last_line(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    match text
        .lines()
        .rev()
        .map(str::trim)
        .find(|line| !line.is_empty())
    {
        Some(line) => format!(", saying {:?}", line.chars().take(200).collect::<String>()),
        None => String::new(),
    }
}

fn signal_name(signal: i32) -> String {
    use rustix::process::Signal;
    let known = [
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::ILL, "SIGILL"),
        (Signal::KILL, "SIGKILL"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::SYS, "SIGSYS"),
        (Signal::TERM, "SIGTERM"),
        (Signal::TRAP, "SIGTRAP"),
    ];
    match known.iter().find(|(known, _)| known.as_raw() == signal) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("signal {signal}"),
    }
}

/// One stream of the child, read on a thread of its own so that a full pipe does not hold the child up.
struct Captured {
    bytes: Arc<Mutex<Vec<u8>>>,
    done: mpsc::Receiver<()>,
}

impl Captured {
    fn start(stream: Option<impl Read + Send + 'static>) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (sender, done) = mpsc::channel();
        if let Some(stream) = stream {
            let kept = Arc::clone(&bytes);
            thread::spawn(move || {
                drain(stream, &kept);
                drop(sender);
            });
        }
        Self { bytes, done }
    }

    /// What was read. Processes that the child left behind may hold the stream open, so this does not wait for them.
    fn finish(self) -> Vec<u8> {
        let _ = self.done.recv_timeout(Duration::from_millis(500));
        std::mem::take(&mut *self.bytes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn drain(mut stream: impl Read, kept: &Mutex<Vec<u8>>) {
    let mut block = [0u8; 8192];
    while let Ok(n @ 1..) = stream.read(&mut block) {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(block.get(..n).unwrap_or_default());
        // The end matters: the answer and the last words are there.
        if kept.len() > 2 * OUTPUT_CAP_BYTES {
            let surplus = kept.len() - OUTPUT_CAP_BYTES;
            kept.drain(..surplus);
        }
    }
}
