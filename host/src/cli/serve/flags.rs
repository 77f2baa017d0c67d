//! Flags of the server: where it listens, who may ask, and its bounds.

use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value};

use crate::engine::schedule::AskedBudget;
use crate::engine::{DiskOptions, PrefixOptions};
use crate::sampling::SamplingParams;
use crate::server::{
    ApiKeys, Bind, Defaults, Exposed, HostRule, Limits, OriginRule, ServerOptions, TlsFiles,
    is_loopback,
};

use super::super::error::CliError;
use super::super::memory::parse_bytes;
use super::super::sampling::SamplerArgs;

/// Where the server is found and who may ask it.
#[derive(Debug, Args)]
pub struct ListenArgs {
    /// Address to listen on; a path that ends in .sock is a Unix socket
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        env = "MLXCEL_HOST",
        help_heading = "Server"
    )]
    host: String,
    /// Port; 0 lets the system choose
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8080,
        env = "MLXCEL_PORT",
        help_heading = "Server"
    )]
    port: u16,
    /// Path in front of every route
    #[arg(long, value_name = "PATH", default_value = "", help_heading = "Server")]
    api_prefix: String,
    /// Threads for HTTP; 0 is two
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Server")]
    threads_http: usize,
    /// Answer /metrics
    #[arg(long, help_heading = "Server")]
    metrics: bool,
    /// Do not answer /slots
    #[arg(long, help_heading = "Server")]
    no_slots: bool,
    /// Keys that are accepted, separated by commas; may be repeated
    #[arg(
        long,
        value_name = "KEY",
        value_delimiter = ',',
        env = "MLXCEL_API_KEY",
        hide_env_values = true,
        help_heading = "Access"
    )]
    api_key: Vec<String>,
    /// File of such keys, one a line
    #[arg(
        long,
        value_name = "FILE",
        env = "MLXCEL_API_KEY_FILE",
        help_heading = "Access"
    )]
    api_key_file: Option<PathBuf>,
    /// Listen on an address that others can reach without asking for a key
    #[arg(long, help_heading = "Access")]
    allow_keyless: bool,
    /// Names by which the server may be addressed beside those of this machine, separated by commas; * is any
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        help_heading = "Access"
    )]
    allowed_hosts: Vec<String>,
    /// Web pages that may use the server beside those of this machine, separated by commas; * is any
    #[arg(
        long,
        value_name = "ORIGIN",
        value_delimiter = ',',
        help_heading = "Access"
    )]
    cors_origins: Vec<String>,
    /// File with the TLS certificate and what is between it and its root, in PEM
    #[arg(
        long,
        value_name = "FILE",
        requires = "ssl_key_file",
        help_heading = "Access"
    )]
    ssl_cert_file: Option<PathBuf>,
    /// File with the certificate's private key, in PEM
    #[arg(
        long,
        value_name = "FILE",
        requires = "ssl_cert_file",
        help_heading = "Access"
    )]
    ssl_key_file: Option<PathBuf>,
}

/// Bounds.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Answers at a time; -1 is four
    #[arg(long = "parallel", visible_alias = "np", value_name = "N", default_value_t = -1, allow_negative_numbers = true, value_parser = parallel, help_heading = "Limits")]
    pub parallel: i64,
    /// Requests that may wait beside them
    #[arg(long, value_name = "N", default_value_t = 32, help_heading = "Limits")]
    max_queue_depth: usize,
    /// Answers of one API key that may run or wait at a time; 0 is all there is room for
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Limits")]
    max_requests_per_key: usize,
    /// Open connections; the most silent one makes room for the next
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Limits")]
    max_connections: u32,
    /// Bytes of a request's body
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20, value_parser = body_bytes, help_heading = "Limits")]
    max_body_bytes: usize,
    /// Most rows of prompts and answers in one step of the engine, at least --parallel [default: the backend's, else 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Limits")]
    prefill_chunk_size: Option<u32>,
    /// Of them, most rows of prompts while answers run: less is smoother, more begins sooner [default: a quarter of the backend's, 128 or more]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Limits")]
    prefill_beside_decode: Option<u32>,
    /// Bytes for keys and values: auto is most of what the device has left
    #[arg(long, value_name = "auto|BYTES", default_value = "auto", value_parser = budget, help_heading = "Limits")]
    pub kv_cache_budget: KvBudget,
    /// Keep nothing of finished requests
    #[arg(
        long,
        visible_alias = "no-prompt-cache",
        conflicts_with_all = ["prefix_cache_bytes", "prefix_cache_ttl", "prefix_cache_dir"],
        help_heading = "Prefix cache"
    )]
    no_prefix_cache: bool,
    /// Bytes that finished requests may keep on the device: auto is what the running ones leave free
    #[arg(long, visible_alias = "prompt-cache-capacity-bytes", value_name = "auto|BYTES", default_value = "auto", value_parser = budget, env = "MLXCEL_PROMPT_CACHE_CAPACITY_BYTES", help_heading = "Prefix cache")]
    prefix_cache_bytes: KvBudget,
    /// Seconds after which what nobody asked for goes; -1 keeps it
    #[arg(long, visible_alias = "prompt-cache-ttl", value_name = "S", default_value_t = 3600, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..), env = "MLXCEL_PROMPT_CACHE_TTL", help_heading = "Prefix cache")]
    prefix_cache_ttl: i64,
    /// Folder for what finished requests leave, so that it survives a restart
    #[arg(long, value_name = "DIR", help_heading = "Prefix cache")]
    prefix_cache_dir: Option<PathBuf>,
    /// Most bytes in that folder
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30, value_parser = bytes, requires = "prefix_cache_dir", help_heading = "Prefix cache")]
    prefix_cache_dir_bytes: u64,
    /// Seconds for the headers of a request, or between two requests of a connection
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Limits")]
    header_timeout: u64,
    /// Seconds for the body of a request
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Limits")]
    body_timeout: u64,
    /// Seconds that a client may take nothing of what is written to it
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Limits")]
    write_timeout: u64,
    /// Seconds for a whole answer
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Limits")]
    decode_timeout: u64,
    /// Seconds after which a step of the engine counts as stuck
    #[arg(long, value_name = "S", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Limits")]
    step_timeout: u64,
    /// Seconds of silence before a stream gets a comment line; -1 never sends one
    #[arg(long, value_name = "S", default_value_t = 30, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..), help_heading = "Limits")]
    sse_ping_interval: i64,
    /// Seconds that answers have to end when the server is told to
    #[arg(long, value_name = "S", default_value_t = 30, help_heading = "Limits")]
    drain_timeout: u64,
}

/// What is taken when a request does not say.
#[derive(Debug, Args)]
pub struct DefaultArgs {
    /// Most tokens of an answer; -1 is until the model ends it or the context is full
    #[arg(short = 'n', long = "n-predict", visible_alias = "max-tokens", value_name = "N", default_value_t = -1, allow_negative_numbers = true, value_parser = limit, help_heading = "Defaults of requests")]
    n_predict: i64,
    /// Randomness; 0 always takes the likeliest token
    #[arg(
        long,
        alias = "temperature",
        value_name = "T",
        default_value_t = 0.8,
        help_heading = "Defaults of requests"
    )]
    temp: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 40,
        help_heading = "Defaults of requests"
    )]
    top_k: u32,
    /// Keep the likeliest tokens up to this probability; 1 keeps all
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.95,
        help_heading = "Defaults of requests"
    )]
    top_p: f32,
    /// Drop tokens below this share of the likeliest one's probability; 0 drops none
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.05,
        help_heading = "Defaults of requests"
    )]
    min_p: f32,
    /// Divide the logits of tokens that occurred; 1 is off
    #[arg(
        long,
        alias = "repetition-penalty",
        value_name = "R",
        default_value_t = 1.0,
        help_heading = "Defaults of requests"
    )]
    repeat_penalty: f32,
    /// How many of the last tokens DRY looks at; 0 is none, -1 is all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 64,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1..),
        help_heading = "Defaults of requests"
    )]
    dry_penalty_last_n: i32,
    /// Samplers.
    #[command(flatten, next_help_heading = "Defaults of requests")]
    samplers: SamplerArgs,
    /// Variables of the chat template, as a JSON object
    #[arg(long, value_name = "JSON", default_value = "{}", value_parser = object, help_heading = "Defaults of requests")]
    chat_template_kwargs: Map<String, Value>,
}

/// Bytes for keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    /// Most of what the device has left.
    Auto,
    /// So many.
    Bytes(u64),
}

impl LimitArgs {
    /// Answers at a time.
    pub fn parallel(&self) -> usize {
        usize::try_from(self.parallel).unwrap_or(4)
    }

    /// Rows of a step.
    pub fn budget(&self) -> AskedBudget {
        let asked = |rows: Option<u32>| rows.map(|rows| rows as usize);
        AskedBudget {
            rows: asked(self.prefill_chunk_size),
            prefill_rows_beside_decode: asked(self.prefill_beside_decode),
        }
    }

    /// What is kept of finished requests.
    pub fn prefix(&self) -> PrefixOptions {
        PrefixOptions {
            max_bytes: match (self.no_prefix_cache, self.prefix_cache_bytes) {
                (true, _) => Some(0),
                (false, KvBudget::Auto) => None,
                (false, KvBudget::Bytes(bytes)) => Some(bytes),
            },
            ttl: u64::try_from(self.prefix_cache_ttl)
                .ok()
                .map(Duration::from_secs),
            disk: self.prefix_cache_dir.as_ref().map(|dir| DiskOptions {
                dir: dir.clone(),
                max_bytes: self.prefix_cache_dir_bytes,
            }),
        }
    }

    fn limits(&self) -> Limits {
        let seconds = Duration::from_secs;
        Limits {
            parallel: self.parallel(),
            queue_depth: self.max_queue_depth,
            per_key: self.max_requests_per_key,
            connections: self.max_connections as usize,
            body_bytes: self.max_body_bytes,
            header: seconds(self.header_timeout),
            body: seconds(self.body_timeout),
            write: seconds(self.write_timeout),
            answer: seconds(self.decode_timeout),
            step: seconds(self.step_timeout),
            ping: u64::try_from(self.sse_ping_interval)
                .ok()
                .map(|s| seconds(s.max(1))),
            drain: seconds(self.drain_timeout),
        }
    }
}

impl ListenArgs {
    /// The server's options. What does not make sense, or would be open to everybody, is refused.
    pub fn options(&self, limits: &LimitArgs) -> Result<ServerOptions, CliError> {
        let bind = match self.host.ends_with(".sock") {
            true => Bind::Unix(PathBuf::from(&self.host)),
            false => Bind::Tcp {
                host: self.host.clone(),
                port: self.port,
            },
        };
        let is_local = matches!(bind, Bind::Unix(_)) || is_loopback(&self.host);
        if !is_local {
            known(&self.host)?;
        }
        let keys = self.keys()?;
        if keys.is_empty() && !is_local && !self.allow_keyless {
            let message = format!(
                "{} can be reached by others and no key is set: give --api-key or --api-key-file, or --allow-keyless to let everybody in",
                self.host
            );
            return Err(CliError::usage(message));
        }
        let any = |list: &[String]| list.iter().any(|entry| entry == "*");
        let hosts = match self.allowed_hosts.as_slice() {
            list if any(list) => HostRule::Any,
            [] if !is_local => HostRule::Any,
            list if is_local => HostRule::Loopback(list.to_vec()),
            list => HostRule::Listed(list.to_vec()),
        };
        let origins = match self.cors_origins.as_slice() {
            list if any(list) => OriginRule::Any,
            list if is_local => OriginRule::Loopback(list.to_vec()),
            list => OriginRule::Listed(list.to_vec()),
        };
        let tls = self.ssl_cert_file.clone().zip(self.ssl_key_file.clone());
        Ok(ServerOptions {
            bind,
            prefix: prefix(&self.api_prefix)?,
            keys,
            hosts,
            origins,
            tls: tls.map(|(certificate, key)| TlsFiles { certificate, key }),
            limits: limits.limits(),
            exposed: Exposed {
                metrics: self.metrics,
                slots: !self.no_slots,
            },
            threads: if self.threads_http == 0 {
                2
            } else {
                self.threads_http
            },
        })
    }

    fn keys(&self) -> Result<ApiKeys, CliError> {
        let mut keys = ApiKeys::default();
        self.api_key.iter().for_each(|key| keys.add(key));
        if let Some(file) = &self.api_key_file {
            keys.add_file(file).map_err(|source| {
                CliError::usage(format!("--api-key-file {}: {source}", file.display()))
            })?;
            if keys.is_empty() {
                return Err(CliError::usage(format!(
                    "--api-key-file {}: no key in it",
                    file.display()
                )));
            }
        }
        if keys.is_empty() && !self.api_key.is_empty() {
            return Err(CliError::usage("--api-key is empty"));
        }
        Ok(keys)
    }
}

impl DefaultArgs {
    /// The defaults; what no request could ask for is refused.
    pub fn defaults(&self) -> Result<Defaults, CliError> {
        let sampling = self.samplers.over(SamplingParams {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repeat_penalty,
            dry_penalty_last_n: self.dry_penalty_last_n,
            ..SamplingParams::server()
        })?;
        Ok(Defaults {
            sampling,
            ignore_eos: self.samplers.ignore_eos(),
            max_tokens: usize::try_from(self.n_predict).ok(),
            template_variables: self.chat_template_kwargs.clone(),
        })
    }
}

/// Refuses what is neither an address nor a name that anybody knows.
fn known(host: &str) -> Result<(), CliError> {
    let name = host.trim_matches(['[', ']']);
    if name.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    match (name, 0).to_socket_addrs() {
        Ok(_) => Ok(()),
        Err(error) => Err(CliError::usage(format!(
            "--host {host} is no address, and no name that can be looked up ({error}): give an address of this machine such as 127.0.0.1, or 0.0.0.0 for all of them, or a path that ends in .sock"
        ))),
    }
}

/// `/a/b`, or nothing.
fn prefix(text: &str) -> Result<String, CliError> {
    let path = text.trim_matches('/');
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._~/".contains(c);
    match path {
        "" => Ok(String::new()),
        path if path.chars().all(is_plain) && !path.contains("//") => Ok(format!("/{path}")),
        _ => Err(CliError::usage(format!(
            "--api-prefix is {text:?}, expected a path such as /llm"
        ))),
    }
}

fn parallel(text: &str) -> Result<i64, String> {
    match text.parse::<i64>() {
        Ok(count) if count == -1 || (1..=1024).contains(&count) => Ok(count),
        _ => Err("expected 1 to 1024, or -1 for the default".to_owned()),
    }
}

fn limit(text: &str) -> Result<i64, String> {
    match text.parse::<i64>() {
        Ok(count) if count == -1 || count > 0 => Ok(count),
        _ => Err("expected a whole number above 0, or -1 for no limit".to_owned()),
    }
}

/// What sizes are written like.
const BYTES: &str = "bytes, or a number with K, M, G or T such as 12G";

fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| format!("expected {BYTES}"))
}

fn body_bytes(text: &str) -> Result<usize, String> {
    let bytes = bytes(text)?;
    usize::try_from(bytes).map_err(|_| "more than this machine can address".to_owned())
}

fn budget(text: &str) -> Result<KvBudget, String> {
    match text {
        "auto" => Ok(KvBudget::Auto),
        bytes => parse_bytes(bytes)
            .map(KvBudget::Bytes)
            .ok_or_else(|| format!("expected auto, {BYTES}")),
    }
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        listen: ListenArgs,
        #[command(flatten)]
        limits: LimitArgs,
        #[command(flatten)]
        defaults: DefaultArgs,
    }

    fn options(args: &[&str]) -> Result<ServerOptions, String> {
        let flags =
            Flags::try_parse_from([&["x"], args].concat()).map_err(|error| error.to_string())?;
        flags
            .defaults
            .defaults()
            .map_err(|error| error.to_string())?;
        flags
            .listen
            .options(&flags.limits)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn an_open_address_needs_a_key() {
        assert!(options(&[]).is_ok());
        assert!(
            options(&["--host", "0.0.0.0"])
                .unwrap_err()
                .contains("--allow-keyless")
        );
        assert!(options(&["--host", "::"]).is_err());
        assert_eq!(
            options(&["--host", "0.0.0.0", "--api-key", "a"])
                .unwrap()
                .hosts,
            HostRule::Any
        );
        assert_eq!(
            options(&["--host", "0.0.0.0", "--allow-keyless"])
                .unwrap()
                .origins,
            OriginRule::Listed(Vec::new())
        );
        assert_eq!(
            options(&["--host", "/tmp/x.sock"]).unwrap().bind,
            Bind::Unix("/tmp/x.sock".into())
        );
    }

    #[test]
    fn a_host_that_nobody_knows_is_no_question_of_keys() {
        let refusal = options(&["--host", "no..host"]).unwrap_err();
        assert!(
            refusal.starts_with("--host no..host is no address") && !refusal.contains("key"),
            "{refusal}"
        );
    }

    #[test]
    fn sizes_have_the_suffixes_of_the_memory_limit() {
        let flags = |args: &[&str]| Flags::try_parse_from([&["x"], args].concat()).unwrap();
        let limits = flags(&[
            "--kv-cache-budget",
            "6M",
            "--prefix-cache-bytes",
            "1.5GiB",
            "--prefix-cache-dir",
            "x",
            "--prefix-cache-dir-bytes",
            "2T",
            "--max-body-bytes",
            "3k",
        ])
        .limits;
        assert_eq!(limits.kv_cache_budget, KvBudget::Bytes(6 << 20));
        assert_eq!(limits.prefix().max_bytes, Some(3 << 29));
        assert_eq!(limits.prefix().disk.unwrap().max_bytes, 2 << 40);
        assert_eq!(limits.limits().body_bytes, 3072);
    }

    #[test]
    fn the_page_on_operations_names_every_flag() {
        use clap::CommandFactory;
        let page = include_str!("../../../../docs/OPERATIONS.md");
        for flag in super::super::ServerCli::command().get_arguments() {
            let name = flag.get_long().filter(|_| !flag.is_hide_set());
            if let Some(name) = name.filter(|name| !["help", "version"].contains(name)) {
                assert!(
                    page.contains(&format!("`--{name}`")),
                    "docs/OPERATIONS.md lacks --{name}"
                );
            }
        }
    }

    #[test]
    fn flags_that_make_no_sense_are_refused() {
        for args in [
            ["--api-prefix", "a b"],
            ["--api-key", ""],
            ["--api-key-file", "/nowhere"],
            ["--parallel", "0"],
            ["--temp", "-1"],
            ["--top-p", "nan"],
            ["--ssl-key-file", "only.pem"],
            ["--kv-cache-budget", "much"],
            ["--kv-cache-budget", "6X"],
            ["--max-body-bytes", "-1"],
            ["--chat-template-kwargs", "[]"],
            ["--n-predict", "0"],
        ] {
            assert!(options(&args).is_err(), "{args:?}");
        }
        assert_eq!(options(&["--api-prefix", "/llm/"]).unwrap().prefix, "/llm");
        assert_eq!(
            options(&["--sse-ping-interval", "-1"]).unwrap().limits.ping,
            None
        );
    }
}
