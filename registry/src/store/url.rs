//! Just enough of URLs: origins, redirect targets and percent-encoding.

use std::net::IpAddr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::http::Uri;

/// Everything except RFC 3986's unreserved characters.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Scheme, host and port: what decides whether a token may be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    /// https rather than http.
    pub https: bool,
    host: String,
    port: u16,
}

impl Origin {
    /// The origin of an absolute http or https URL.
    pub fn of(url: &str) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|e| format!("{e}"))?;
        let https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("expected a URL that starts with https:// or http://".to_owned()),
        };
        let authority = uri.authority().ok_or("the URL has no host")?;
        if authority.as_str().contains('@') {
            return Err("a user name or password in a URL is not accepted".to_owned());
        }
        if authority.host().is_empty() {
            return Err("the URL has no host".to_owned());
        }
        Ok(Self {
            https,
            host: authority.host().to_ascii_lowercase(),
            port: authority.port_u16().unwrap_or(if https { 443 } else { 80 }),
        })
    }

    /// The host, for messages.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        self.host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

/// The URL that a `Location` or `Link` header means when it comes with the answer to `base`.
pub(super) fn join(base: &str, target: &str) -> Result<String, String> {
    let target = target.split('#').next().unwrap_or(target);
    let lower = target.to_ascii_lowercase();
    if lower.starts_with("https://") || lower.starts_with("http://") {
        return Ok(target.to_owned());
    }
    let (scheme, rest) = base.split_once("://").ok_or("the base URL has no scheme")?;
    if target.starts_with("//") {
        return Ok(format!("{scheme}:{target}"));
    }
    let path_start = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path_and_query) = rest.split_at(path_start);
    if target.starts_with('/') {
        return Ok(format!("{scheme}://{authority}{target}"));
    }
    if target
        .split(['/', '?'])
        .next()
        .is_some_and(|s| s.contains(':'))
    {
        return Err("only http and https redirects are followed".to_owned());
    }
    let path = path_and_query.split('?').next().unwrap_or_default();
    if target.starts_with('?') {
        return Ok(format!("{scheme}://{authority}{path}{target}"));
    }
    let folder = path.rfind('/').and_then(|i| path.get(..=i)).unwrap_or("/");
    Ok(format!("{scheme}://{authority}{folder}{target}"))
}

/// A URL for messages: signed download links carry secrets in their query.
pub(super) fn without_query(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or(url).to_owned()
}

/// Encodes one path segment, slashes included.
pub(super) fn encode_segment(text: &str) -> String {
    utf8_percent_encode(text, RESERVED).to_string()
}

/// Encodes a path and keeps its slashes.
pub(super) fn encode_path(text: &str) -> String {
    text.split('/')
        .map(encode_segment)
        .collect::<Vec<_>>()
        .join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_compare_with_their_default_ports() {
        let origin = |url| Origin::of(url).unwrap();
        assert_eq!(
            origin("https://Hub.Example/x?y"),
            origin("https://hub.example:443/")
        );
        assert_ne!(
            origin("https://hub.example/"),
            origin("http://hub.example/")
        );
        assert_ne!(
            origin("http://hub.example/"),
            origin("http://hub.example:81/")
        );
        for bad in [
            "ftp://x/",
            "/x",
            "hub.example",
            "https://user:pw@x/",
            "https:///x",
            "",
        ] {
            assert!(Origin::of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn loopback_is_an_address_and_not_a_prefix() {
        let local = |url| Origin::of(url).unwrap().is_loopback();
        assert!(local("http://127.0.0.1:8080/"));
        assert!(local("http://[::1]/"));
        assert!(local("http://localhost/"));
        assert!(!local("http://127.0.0.1.example/"));
        assert!(!local("http://localhost.example/"));
        assert!(!local("http://10.0.0.1/"));
    }

    #[test]
    fn redirect_targets_are_made_whole() {
        let base = "https://h:1/a/b?q=1";
        for (target, whole) in [
            ("https://o/x", "https://o/x"),
            ("//o/x", "https://o/x"),
            ("/x?y#z", "https://h:1/x?y"),
            ("x", "https://h:1/a/x"),
            ("?y", "https://h:1/a/b?y"),
        ] {
            assert_eq!(join(base, target).unwrap(), whole);
        }
        assert_eq!(join("https://h", "x").unwrap(), "https://h/x");
        assert!(join(base, "file:///etc/passwd").is_err());
        assert!(join(base, "javascript:0").is_err());
    }

    #[test]
    fn encoding_keeps_slashes_only_in_paths() {
        assert_eq!(encode_path("a b/ü.json"), "a%20b/%C3%BC.json");
        assert_eq!(encode_segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(without_query("https://h/x?sig=secret"), "https://h/x");
    }
}
