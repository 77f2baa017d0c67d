//! Requests to a hub: one GET with redirects, the token, and errors that say what to do.
//!
//! Redirects are followed here and not by the HTTP library, because three rules depend on each step: the
//! token goes only to the endpoint's own origin, an encrypted connection is never left for a plain one, and
//! what the hub says beside a redirect (size and digest of a file) is kept.

use std::fs;
use std::io::{self, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ureq::http::{HeaderMap, Response, header};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::env::{StoreEnv, Token};
use super::error::StoreError;
use super::url::{Origin, join, without_query};

const MAX_REDIRECTS: usize = 8;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// A connection on which nothing arrives for this long counts as broken.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_TOKEN_BYTES: u64 = 4096;
const USER_AGENT: &str = concat!("mlxcel/", env!("CARGO_PKG_VERSION"));

/// Talks to one endpoint.
pub(super) struct Client {
    /// One agent for the built-in roots, and one for the extra certificates if there are any: the library
    /// can use one set or the other, so a host that the first does not trust is tried with the second.
    agents: Vec<Agent>,
    preferred: AtomicUsize,
    endpoint: String,
    origin: Origin,
    token: Option<Token>,
    allow_insecure: bool,
}

/// The last answer of a chain of redirects.
pub(super) struct Reply {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    /// The headers of the first answer of the chain, which is the endpoint's own.
    pub hub_headers: HeaderMap,
    /// What answered, without its query.
    pub url: String,
    body: Body,
}

impl Client {
    /// A client for the endpoint, token and certificates of `env`.
    pub fn new(env: &StoreEnv) -> Result<Self, StoreError> {
        let endpoint = env.endpoint.trim_end_matches('/').to_owned();
        let origin = Origin::of(&endpoint).map_err(|reason| StoreError::BadEndpoint {
            // A password in it must not reach a log.
            url: endpoint
                .split('@')
                .next_back()
                .unwrap_or_default()
                .to_owned(),
            reason,
        })?;
        if endpoint.contains(['?', '#']) {
            return Err(StoreError::BadEndpoint {
                url: without_query(&endpoint),
                reason: "it may not have a query or a fragment".to_owned(),
            });
        }
        let mut agents = vec![agent(env, RootCerts::WebPki)];
        if let Some(extra) = extra_roots(env)? {
            agents.push(agent(env, extra));
        }
        let client = Self {
            agents,
            preferred: AtomicUsize::new(0),
            endpoint,
            origin,
            token: token(env)?,
            allow_insecure: env.allow_insecure_endpoint,
        };
        client.check_encryption(&client.origin, &client.endpoint)?;
        Ok(client)
    }

    /// The endpoint, without a slash at its end.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Whether requests to the endpoint carry a token.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// GETs `url` and follows redirects. Any status of the last answer is a success here.
    pub fn get(&self, url: &str, headers: &[(&str, String)]) -> Result<Reply, StoreError> {
        let mut current = url.to_owned();
        let mut hub_headers: Option<HeaderMap> = None;
        for _ in 0..=MAX_REDIRECTS {
            let origin = Origin::of(&current).map_err(malformed(&current))?;
            self.check_encryption(&origin, &current)?;
            let response = self.send(&current, headers, origin == self.origin)?;
            let (parts, body) = response.into_parts();
            let location = parts.headers.get(header::LOCATION);
            if let (301 | 302 | 303 | 307 | 308, Some(location)) = (parts.status.as_u16(), location)
            {
                let target = location
                    .to_str()
                    .map_err(|e| e.to_string())
                    .and_then(|target| join(&current, target))
                    .map_err(malformed(&current))?;
                let next = Origin::of(&target).map_err(malformed(&current))?;
                if origin.https && !next.https && !self.allow_insecure {
                    return Err(StoreError::Insecure {
                        url: without_query(&target),
                    });
                }
                hub_headers.get_or_insert(parts.headers);
                current = target;
                continue;
            }
            return Ok(Reply {
                status: parts.status.as_u16(),
                hub_headers: hub_headers.unwrap_or_else(|| parts.headers.clone()),
                headers: parts.headers,
                url: without_query(&current),
                body,
            });
        }
        Err(StoreError::TooManyRedirects {
            url: without_query(url),
            limit: MAX_REDIRECTS,
        })
    }

    fn send(
        &self,
        url: &str,
        headers: &[(&str, String)],
        with_token: bool,
    ) -> Result<Response<Body>, StoreError> {
        let count = self.agents.len();
        let preferred = self.preferred.load(Ordering::Relaxed);
        let mut refused = None;
        for turn in 0..count {
            let index = (preferred + turn) % count;
            let Some(agent) = self.agents.get(index) else {
                continue;
            };
            let mut request = agent.get(url);
            for (name, value) in headers {
                request = request.header(*name, value);
            }
            if let (true, Some(token)) = (with_token, &self.token) {
                request = request.header("authorization", format!("Bearer {}", token.expose()));
            }
            match request.call() {
                Ok(response) => {
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok(response);
                }
                Err(error) if is_tls(&error) => refused = Some(error),
                Err(error) => return Err(network(url, error)),
            }
        }
        Err(StoreError::Tls {
            url: without_query(url),
            reason: refused.map_or_else(|| "no certificates".to_owned(), |e| e.to_string()),
        })
    }

    fn check_encryption(&self, origin: &Origin, url: &str) -> Result<(), StoreError> {
        if origin.https || origin.is_loopback() || self.allow_insecure {
            return Ok(());
        }
        Err(StoreError::Insecure {
            url: without_query(url),
        })
    }
}

impl Reply {
    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// A header of the endpoint's own answer as text.
    pub fn hub_header(&self, name: &str) -> Option<&str> {
        self.hub_headers.get(name)?.to_str().ok()
    }

    /// How many bytes the body has, if the server says so.
    pub fn content_length(&self) -> Option<u64> {
        self.header("content-length")?.trim().parse().ok()
    }

    /// The host that answered.
    pub fn host(&self) -> String {
        Origin::of(&self.url).map_or_else(|_| self.url.clone(), |o| o.host().to_owned())
    }

    /// Reads a body of bounded size.
    pub fn read(self, limit_bytes: u64) -> Result<Vec<u8>, StoreError> {
        let url = self.url.clone();
        let mut bytes = Vec::new();
        let mut reader = self.into_reader().take(limit_bytes.saturating_add(1));
        reader
            .read_to_end(&mut bytes)
            .map_err(|error| broken(&url, &error))?;
        if bytes.len() as u64 > limit_bytes {
            return Err(StoreError::TooLarge {
                what: format!("the answer of {url}"),
                limit: format!("{} MiB", limit_bytes >> 20),
            });
        }
        Ok(bytes)
    }

    /// The body as a stream.
    pub fn into_reader(self) -> impl Read {
        self.body.into_reader()
    }
}

/// A body that could not be read to its end.
pub(super) fn broken(url: &str, error: &io::Error) -> StoreError {
    StoreError::Network {
        url: without_query(url),
        reason: error.to_string(),
    }
}

fn malformed(url: &str) -> impl Fn(String) -> StoreError {
    let url = without_query(url);
    move |reason| StoreError::MalformedReply {
        url: url.clone(),
        reason,
    }
}

fn network(url: &str, error: ureq::Error) -> StoreError {
    let url = without_query(url);
    let reason = error.to_string();
    match error {
        ureq::Error::Http(_) | ureq::Error::BadUri(_) | ureq::Error::LargeResponseHeader(..) => {
            StoreError::MalformedReply { url, reason }
        }
        _ => StoreError::Network { url, reason },
    }
}

fn is_tls(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::TlsRequired => true,
        // A failed handshake arrives as an I/O error around the TLS library's own.
        ureq::Error::Io(inner) => inner.kind() == io::ErrorKind::InvalidData,
        _ => false,
    }
}

fn agent(env: &StoreEnv, roots: RootCerts) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(USER_AGENT)
        // A compressed body would have neither the size nor the ranges of the file.
        .accept_encoding("identity")
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(RESPONSE_TIMEOUT))
        .timeout_per_read(Some(STALL_TIMEOUT))
        .tls_config(TlsConfig::builder().root_certs(roots).build());
    let config = if env.proxy_from_process {
        config
    } else {
        config.proxy(None)
    };
    config.build().new_agent()
}

fn extra_roots(env: &StoreEnv) -> Result<Option<RootCerts>, StoreError> {
    let Some(path) = &env.extra_ca_certs else {
        return Ok(None);
    };
    let bad = |reason: String| StoreError::BadCaBundle {
        path: path.clone(),
        reason,
    };
    let pem = fs::read(path).map_err(|e| bad(e.to_string()))?;
    let mut certificates: Vec<Certificate<'static>> = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| bad(e.to_string()))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(bad("it holds no PEM certificate".to_owned()));
    }
    Ok(Some(RootCerts::from(certificates)))
}

fn token(env: &StoreEnv) -> Result<Option<Token>, StoreError> {
    let (text, origin) = match (&env.token, env.token_file()) {
        (Some(token), _) => (token.expose().to_owned(), "HF_TOKEN".to_owned()),
        (None, Some(path)) => {
            let file = match fs::File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(StoreError::io("open token file", &path)(error)),
            };
            let mut text = String::new();
            file.take(MAX_TOKEN_BYTES)
                .read_to_string(&mut text)
                .map_err(StoreError::io("read token file", &path))?;
            (text, path.display().to_string())
        }
        (None, None) => return Ok(None),
    };
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(StoreError::BadToken {
            origin,
            reason: "it holds a space or a character that cannot be in a header",
        });
    }
    Ok(Some(Token::new(text)))
}
