//! The HTTP server: OpenAI's and llama-server's dialects over one engine.
//!
//! Owns sockets, keys, limits, the wire formats and the way from a request to tokens and back. Requests live on a tokio
//! runtime; the engine has its own thread and knows none of this: prompts go to it through a channel, events come back
//! through a bounded one (`sink`, `generation`). Health comes from the engine's steps, not from the socket.
//!
//! Every field of a request is honoured or refused by name.

mod answer;
mod app;
mod ask;
mod auth;
mod body;
mod choice;
mod connection;
mod crowd;
mod error;
mod fields;
mod gate;
mod generation;
mod json;
mod listen;
mod metrics;
mod native;
mod openai;
mod options;
mod origin;
mod patience;
mod prompt;
mod reply;
mod room;
mod router;
mod sampling_fields;
mod served;
mod signals;
mod sink;
mod slots;
mod socket;
mod sse;
mod status;
mod tls;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::watch;

pub use auth::ApiKeys;
pub use options::{Bind, Exposed, Limits, ServerOptions, TlsFiles};
pub use origin::{HostRule, OriginRule, is_loopback};
pub use served::{Defaults, Served, unix_seconds};

use app::App;
use connection::Way;
use listen::{Listener, accept_all};
use signals::Asked;

/// Threads for templates and tokenizers.
const BLOCKING_THREADS: usize = 8;

/// For the last events to reach their readers after all answers were ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How often the drain is looked at.
const POLL: Duration = Duration::from_millis(20);

/// Why the server cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be used.
    #[error("cannot listen on {place}: {source}")]
    Bind {
        /// Where.
        place: String,
        /// Why not.
        source: io::Error,
    },
    /// Certificate or key cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// Something of the system.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// A server that listens, with or without its model.
pub struct Server {
    app: Arc<App>,
    runtime: Runtime,
    address: String,
    closing: watch::Sender<bool>,
    accepting: tokio::task::JoinHandle<()>,
    asked: Asked,
}

impl Server {
    /// Listens. Until [`Server::serve`] it answers that the model is loading. Must be called before other threads
    /// start: it takes over the signals that end the process.
    pub fn bind(options: ServerOptions) -> Result<Self, ServerError> {
        let system = |action| move |source| ServerError::System { action, source };
        let tls = options
            .tls
            .as_ref()
            .map(tls::acceptor)
            .transpose()
            .map_err(ServerError::Tls)?;
        let asked = signals::install().map_err(system("take over signals"))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(options.threads.max(1))
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("mlxcel-http")
            .enable_io()
            .enable_time()
            .build()
            .map_err(system("start threads for HTTP"))?;
        let place = match &options.bind {
            Bind::Tcp { host, port } => format!("{host}:{port}"),
            Bind::Unix(path) => path.display().to_string(),
        };
        let bound = runtime
            .block_on(Listener::bind(&options.bind))
            .and_then(|listener| {
                let address = listener.address(tls.is_some())?;
                Ok((listener, address))
            });
        let (listener, address) = bound.map_err(|source| ServerError::Bind { place, source })?;
        let address = format!("{address}{}", options.prefix);
        let app = Arc::new(App::new(options, unix_seconds()));
        let (closing, is_closing) = watch::channel(false);
        let router = router::router(Arc::clone(&app));
        let way = Way {
            tls,
            router,
            limits: app.options.limits,
            closing: is_closing,
        };
        let accepting = runtime.spawn(accept_all(listener, way, Arc::clone(&app.crowd)));
        Ok(Self {
            app,
            runtime,
            address,
            closing,
            accepting,
            asked,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The model is there: requests are taken from now on.
    pub fn serve(&self, served: Served) {
        self.app.serve(served);
        self.asked.serve();
    }

    /// Serves until SIGINT or SIGTERM, then takes nothing new, lets answers end within the grace, and ends the rest
    /// with an error. How many those were.
    pub fn run(self) -> usize {
        let Self {
            app,
            runtime,
            closing,
            accepting,
            mut asked,
            ..
        } = self;
        let cut = runtime.block_on(async {
            asked.wait().await;
            app.drain();
            tracing::info!(
                answers = app.live_count(),
                "the server ends: no new requests"
            );
            let deadline = Instant::now() + app.options.limits.drain;
            while app.live_count() > 0 && Instant::now() < deadline {
                tokio::time::sleep(POLL).await;
            }
            app.end();
            let cut = app.live_count();
            closing.send_replace(true);
            if tokio::time::timeout(LAST_WORDS, accepting).await.is_err() {
                let open = app.crowd.count();
                tracing::warn!(open, "connections were closed before all was written");
            }
            cut
        });
        runtime.shutdown_timeout(LAST_WORDS);
        end_engine(app);
        cut
    }
}

/// Drops the engine, which ends its thread after the step that runs. A step that never ends is left behind.
fn end_engine(app: Arc<App>) {
    let (done, ended) = std::sync::mpsc::channel();
    let spawned = std::thread::Builder::new()
        .name("mlxcel-end".to_owned())
        .spawn(move || {
            drop(app);
            // Nobody waits any more when it took too long.
            let _ = done.send(());
        });
    if spawned.is_ok() && ended.recv_timeout(LAST_WORDS).is_err() {
        tracing::warn!("the engine did not end in time");
    }
}
