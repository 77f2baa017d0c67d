//! `cargo xtask bench-server`: our server and llama.cpp's on the same file, the same clients in turn.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::args::{ServerArgs, typed};
use super::bench::publish;
use super::install::{Llama, Scratch};
use super::machine::Machine;
use super::mlx_lm::mib;
use super::models::Subject;
use super::ours::Ours;
use super::table::{Measure, ServerFigure, Table};
use crate::error::Error;
use crate::model;
use crate::process::Run;
use crate::workspace::Workspace;

/// A server that has not loaded its model by then never will.
const PATIENCE: Duration = Duration::from_secs(180);

/// A server under measurement. It ends with this.
pub struct Running {
    child: Child,
    /// `http://127.0.0.1:PORT`.
    pub url: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already, and nothing more can be done about it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// Our server, on a port that the system chooses.
    pub fn ours(ours: &Ours, model: &Path, flags: &[String], log: &Path) -> Result<Self, Error> {
        let mut command = Command::new(&ours.program);
        command.arg("serve").arg(model).args(["--port", "0"]);
        command.args(flags).args(ours.common());
        let mut child = start(command.stdout(Stdio::piped()), &ours.program, log)?;
        let mut first = String::new();
        if let Some(stdout) = child.stdout.take() {
            // Nothing that can be read is told below, by the missing address.
            let _ = BufReader::new(stdout).read_line(&mut first);
        }
        let url = first
            .trim()
            .strip_prefix("listening on ")
            .unwrap_or_default();
        let running = Self {
            child,
            url: url.trim_end_matches('/').to_owned(),
        };
        if running.url.is_empty() {
            let problem = format!("it did not begin; its log is {}", log.display());
            return Err(Error::measurement("mlxcel serve", problem));
        }
        running.ready(log)
    }

    /// llama.cpp's, with as much context for each of its slots as the longest conversation needs.
    fn llama(llama: &Llama, model: &Path, args: &ServerArgs, log: &Path) -> Result<Self, Error> {
        let slots = args.clients.iter().copied().max().unwrap_or(1);
        let longest = (args.prompt + args.answer).max(args.history * 5 / 4 + 128);
        let context = slots * longest.next_multiple_of(256);
        let port = free_port()?;
        let program = llama.tool("llama-server");
        let mut command = Command::new(&program);
        command.arg("-m").arg(model);
        for (flag, value) in [
            ("-t", args.common.threads),
            ("-np", slots),
            ("-c", context),
            ("--port", u32::from(port)),
        ] {
            command.arg(flag).arg(value.to_string());
        }
        let child = start(command.stdout(Stdio::null()), &program, log)?;
        let running = Self {
            child,
            url: format!("http://127.0.0.1:{port}"),
        };
        running.ready(log)
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    fn ready(mut self, log: &Path) -> Result<Self, Error> {
        let deadline = Instant::now() + PATIENCE;
        while !is_healthy(&self.url) {
            let has_ended = self
                .child
                .try_wait()
                .map_or(true, |status| status.is_some());
            if has_ended || Instant::now() > deadline {
                let problem = format!("it did not become ready; its log is {}", log.display());
                return Err(Error::measurement(self.url.clone(), problem));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(self)
    }

    /// Largest resident size so far.
    fn max_rss_bytes(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib * 1024)
    }
}

fn start(command: &mut Command, program: &Path, log: &Path) -> Result<Child, Error> {
    let file = std::fs::File::create(log).map_err(Error::io("create", log))?;
    command
        .stdin(Stdio::null())
        .stderr(file)
        .env_remove("LD_LIBRARY_PATH")
        .spawn()
        .map_err(Error::io("run", program))
}

fn free_port() -> Result<u16, Error> {
    let place = Path::new("127.0.0.1");
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(Error::io("listen on", place))?;
    Ok(listener
        .local_addr()
        .map_err(Error::io("listen on", place))?
        .port())
}

fn is_healthy(url: &str) -> bool {
    let authority = url.trim_start_matches("http://");
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(authority)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let request =
            format!("GET /health HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.starts_with("HTTP/1.1 200"))
    };
    ask().unwrap_or(false)
}

pub fn run(workspace: &Workspace, args: &ServerArgs) -> Result<(), Error> {
    let scratch = Scratch::of(workspace)?;
    let llama = scratch.llama()?;
    let common = &args.common;
    let ours = Ours::prepare(workspace, !common.no_build, common.threads, &common.ours)?;
    let subject = match &args.gguf {
        Some(path) => Subject::file(path)?,
        None => Subject::file(&model::fetch(workspace)?)?,
    };
    let logs = scratch.dir.join("runs");
    std::fs::create_dir_all(&logs).map_err(Error::io("create", &logs))?;
    let machine = Machine::now(&workspace.root);
    let slots = args.clients.iter().copied().max().unwrap_or(1);
    let flags = ["--parallel".to_owned(), slots.to_string()];
    let servers = [
        Running::ours(
            &ours,
            &subject.path,
            &flags,
            &logs.join("mlxcel-server.log"),
        )?,
        Running::llama(&llama, &subject.path, args, &logs.join("llama-server.log"))?,
    ];
    let table = measure(args, &ours, &servers)?;
    let text = format!(
        "`{}`, {}, {} threads, {} rounds in turn, {} requests a client; prompts of {} tokens that no cache knows, answers of {}, streaming; median (least to largest) of the rounds. llama.cpp's server as in llama-cpp-python {}, built here, `-np {slots}`.{}\n\n{}",
        typed(std::env::args().skip(1)),
        subject.name,
        common.threads,
        common.rounds,
        args.requests_per_client,
        args.prompt,
        args.answer,
        llama.version,
        match common.ours.as_slice() {
            [] => String::new(),
            options => format!(" Our options: `{}`.", options.join(" ")),
        },
        table.markdown()
    );
    let json = json!({
        "machine": machine.json(),
        "model": subject.name,
        "threads": common.threads,
        "rounds": common.rounds,
        "options": common.ours,
        "llama_cpp": llama.version,
        "rows": table.json(),
    });
    publish(workspace, common, &machine, "server", &text, &json)
}

fn measure(args: &ServerArgs, ours: &Ours, servers: &[Running; 2]) -> Result<Table, Error> {
    let mut table = Table::new(&["mlxcel", "llama.cpp"]);
    // A first answer from both: what is made once is not measured.
    for server in servers {
        load(
            ours,
            server,
            &[
                "run",
                "--clients",
                "1",
                "--requests",
                "1",
                "--seed",
                "0",
                "--json",
            ],
        )?;
    }
    for round in 0..args.common.rounds.max(1) {
        eprintln!("round {}", round + 1);
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for clients in &args.clients {
            for who in order {
                let Some(server) = servers.get(who) else {
                    continue;
                };
                // The same prompts for both, and others in every round.
                let seed = 1000 * (u64::from(round) + 1) + u64::from(*clients);
                let report = load(
                    ours,
                    server,
                    &[
                        "run",
                        "--clients",
                        &clients.to_string(),
                        "--requests",
                        &(clients * args.requests_per_client.max(1)).to_string(),
                        "--prompt-tokens",
                        &args.prompt.to_string(),
                        "--max-tokens",
                        &args.answer.to_string(),
                        "--seed",
                        &seed.to_string(),
                        "--json",
                    ],
                )?;
                table.add_all(who, &of_run(&report, *clients)?);
            }
        }
        if args.history > 0 {
            for who in order {
                let Some(server) = servers.get(who) else {
                    continue;
                };
                let report = load(
                    ours,
                    server,
                    &[
                        "chat",
                        "--history-tokens",
                        &args.history.to_string(),
                        "--rounds",
                        "1",
                        "--seed",
                        &(u64::from(round) + 1).to_string(),
                    ],
                )?;
                table.add_all(who, &of_chat(&report, args.history)?);
            }
        }
    }
    for (who, server) in servers.iter().enumerate() {
        if let Some(bytes) = server.max_rss_bytes() {
            table.add(who, Measure::ServerMemory, mib(bytes));
        }
    }
    Ok(table)
}

/// Runs the load generator against a server; gives the object that it writes.
fn load(ours: &Ours, server: &Running, args: &[&str]) -> Result<Value, Error> {
    let text = Run::new(&ours.load)
        .args(args.iter().copied())
        .args(["--url", &server.url])
        .capture()?
        .ok()?
        .stdout;
    serde_json::from_str(&text).map_err(|error| Error::measurement("mlxcel-load", error))
}

fn of_run(report: &Value, clients: u32) -> Result<Vec<(Measure, f64)>, Error> {
    let row = |what| Measure::Server { clients, what };
    let throughput = number(report, "/tokens_per_second")?;
    let mut figures = vec![(row(ServerFigure::Throughput), throughput)];
    for percent in [50, 95, 99] {
        let first = number(report, &format!("/ttft_ms/p{percent}"))?;
        let next = number(report, &format!("/inter_token_ms/p{percent}"))?;
        figures.push((row(ServerFigure::FirstToken { percent }), first));
        figures.push((row(ServerFigure::NextToken { percent }), next));
    }
    Ok(figures)
}

fn of_chat(report: &Value, history: u32) -> Result<Vec<(Measure, f64)>, Error> {
    let turn = |number| Measure::Turn { number, history };
    Ok(vec![
        (turn(1), number(report, "/turn_one_median_ms")?),
        (turn(2), number(report, "/turn_two_median_ms")?),
        (Measure::TurnGain { history }, number(report, "/ratio")?),
    ])
}

fn number(report: &Value, path: &str) -> Result<f64, Error> {
    report
        .pointer(path)
        .and_then(Value::as_f64)
        .ok_or_else(|| Error::measurement("mlxcel-load", format!("no number at {path}: {report}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_becomes_rows() {
        let percentiles = json!({"p50": 1.0, "p95": 2.0, "p99": 3.0});
        let report = json!({"tokens_per_second": 50.0, "ttft_ms": percentiles, "inter_token_ms": percentiles});
        let rows = of_run(&report, 4).expect("rows");
        assert_eq!(rows.len(), 7);
        let throughput = Measure::Server {
            clients: 4,
            what: ServerFigure::Throughput,
        };
        assert_eq!(rows[0], (throughput, 50.0));
        assert!(of_run(&json!({"tokens_per_second": 1.0}), 4).is_err());
    }
}
