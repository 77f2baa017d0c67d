//! Which names the server answers to and which web pages may use it.
//!
//! A page on the open web can make a browser send requests to a server on this machine, by a name that it points here
//! (DNS rebinding) or from its own origin. Both are recognised by headers that browsers do not let pages write.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Uri, Version, header};

use super::error::{ApiError, Kind};

/// Names by which the server may be addressed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostRule {
    /// Any name.
    Any,
    /// Names of this machine for itself, and these.
    Loopback(Vec<String>),
    /// These only.
    Listed(Vec<String>),
}

/// Web pages that may use the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OriginRule {
    /// Any page.
    Any,
    /// Pages of this machine, and of these origins.
    Loopback(Vec<String>),
    /// These origins only.
    Listed(Vec<String>),
}

/// Refuses a request without a `Host` header, with several, or with one that is no host (RFC 9112, 3.2). Before HTTP/1.1
/// there was none.
pub fn check_host_header(version: Version, headers: &HeaderMap) -> Result<(), ApiError> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let Some(host) = hosts.next() else {
        if version < Version::HTTP_11 {
            return Ok(());
        }
        return Err(ApiError::invalid(
            "the request has no Host header, which HTTP/1.1 requires",
        ));
    };
    if hosts.next().is_some() {
        return Err(ApiError::invalid(
            "the request has several Host headers, expected one",
        ));
    }
    // An empty one is for targets without a host.
    let is_host =
        |host: &str| host.is_empty() || (!host.contains('@') && host.parse::<Authority>().is_ok());
    if !host.to_str().is_ok_and(is_host) {
        let message =
            format!("the Host header is {host:?}, expected a host with or without a port");
        return Err(ApiError::invalid(message));
    }
    Ok(())
}

impl HostRule {
    /// Refuses a request that was sent to another name, whether a header or the request line has it. Requests without a
    /// name do not come from browsers.
    pub fn check(&self, target: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        let of_header = headers
            .get(header::HOST)
            .map(|host| host.to_str().unwrap_or_default());
        let of_target = target.authority().map(Authority::as_str);
        let (allowed, with_loopback) = match self {
            Self::Any => return Ok(()),
            Self::Loopback(listed) => (listed, true),
            Self::Listed(listed) => (listed, false),
        };
        let is_allowed = |name: &str| {
            (with_loopback && is_loopback(name))
                || allowed.iter().any(|other| other.eq_ignore_ascii_case(name))
        };
        let names = of_header.into_iter().chain(of_target).map(host_name);
        let Some(name) = names.into_iter().find(|name| !is_allowed(name)) else {
            return Ok(());
        };
        let message =
            format!("this server is not addressed as {name:?}: --allowed-hosts permits a name");
        Err(ApiError::new(Kind::Forbidden, message).with_code("host_not_allowed"))
    }
}

impl OriginRule {
    /// The value of `Access-Control-Allow-Origin` for a request: none when no page sent it, an error when the page may
    /// not.
    pub fn check(&self, headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
        let Some(value) = headers.get(header::ORIGIN) else {
            return Ok(None);
        };
        let origin = value.to_str().unwrap_or_default();
        let host = headers
            .get(header::HOST)
            .and_then(|host| host.to_str().ok());
        let is_allowed = match self {
            Self::Any => return Ok(Some(HeaderValue::from_static("*"))),
            Self::Loopback(listed) => {
                is_loopback_origin(origin) || listed.iter().any(|other| other == origin)
            }
            Self::Listed(listed) => listed.iter().any(|other| other == origin),
        };
        // A page that this server, or the proxy before it, delivered.
        let is_own = host.is_some_and(|host| {
            origin
                .split_once("://")
                .is_some_and(|(_, rest)| rest == host)
        });
        if is_allowed || is_own {
            return Ok(Some(value.clone()));
        }
        let message = format!(
            "pages of {origin:?} may not use this server: --cors-origins permits an origin"
        );
        Err(ApiError::new(Kind::Forbidden, message).with_code("origin_not_allowed"))
    }
}

/// The name in `name:port` or `[address]:port`.
fn host_name(authority: &str) -> &str {
    match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(name, _)| name),
        None => authority
            .rsplit_once(':')
            .map_or(authority, |(name, _)| name),
    }
}

/// Whether a name or address means this machine itself.
pub fn is_loopback(name: &str) -> bool {
    let name = name.trim_start_matches('[').trim_end_matches(']');
    if name.eq_ignore_ascii_case("localhost") {
        return true;
    }
    match name.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => address.is_loopback(),
        Ok(IpAddr::V6(address)) => {
            address == Ipv6Addr::LOCALHOST
                || address.to_ipv4_mapped().is_some_and(|v4| v4.is_loopback())
        }
        Err(_) => false,
    }
}

fn is_loopback_origin(origin: &str) -> bool {
    let Some((scheme, rest)) = origin.split_once("://") else {
        return false;
    };
    matches!(scheme, "http" | "https") && is_loopback(host_name(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&str, &str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn a_name_that_points_here_is_not_enough() {
        let rule = HostRule::Loopback(vec!["gpu.lan".to_owned()]);
        let here = Uri::from_static("/health");
        let allows =
            |rule: &HostRule, host: &str| rule.check(&here, &headers(&[("host", host)])).is_ok();
        for host in [
            "localhost",
            "LocalHost:8080",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:8080",
            "[::1]",
            "gpu.lan:80",
        ] {
            assert!(allows(&rule, host), "{host}");
        }
        for host in [
            "evil.com",
            "localhost.evil.com",
            "127.0.0.1.evil.com:80",
            "10.0.0.1",
            "[::2]",
            "",
            "gpu.lan.evil.com",
        ] {
            assert!(!allows(&rule, host), "{host}");
        }
        assert!(rule.check(&here, &HeaderMap::new()).is_ok());
        let local = headers(&[("host", "localhost")]);
        let elsewhere = Uri::from_static("http://evil.com/health");
        assert!(rule.check(&elsewhere, &local).is_err());
        assert!(rule.check(&elsewhere, &HeaderMap::new()).is_err());
        let whole = Uri::from_static("http://127.0.0.1:80/health");
        assert!(rule.check(&whole, &local).is_ok());
        assert!(!allows(
            &HostRule::Listed(vec!["a".to_owned()]),
            "localhost"
        ));
        assert!(allows(&HostRule::Any, "evil.com"));
    }

    #[test]
    fn a_request_has_one_host() {
        let check = |version, list: &[&str]| {
            let list: Vec<(&str, &str)> = list.iter().map(|host| ("host", *host)).collect();
            check_host_header(version, &headers(&list)).is_ok()
        };
        for host in ["localhost", "a:80", "[::1]:80", "10.0.0.1", "my_host", ""] {
            assert!(check(Version::HTTP_11, &[host]), "{host}");
        }
        for host in ["a b", "user@a", "a/b", "http://a", "a:b:c"] {
            assert!(!check(Version::HTTP_11, &[host]), "{host}");
        }
        assert!(!check(Version::HTTP_11, &[]));
        assert!(check(Version::HTTP_10, &[]));
        for version in [Version::HTTP_10, Version::HTTP_11] {
            assert!(!check(version, &["a", "a"]));
        }
    }

    #[test]
    fn pages_are_allowed_by_their_whole_origin() {
        let rule = OriginRule::Loopback(vec!["https://chat.example".to_owned()]);
        let check = |rule: &OriginRule, origin: &str| {
            rule.check(&headers(&[("origin", origin), ("host", "srv:1")]))
        };
        for origin in [
            "http://localhost",
            "http://localhost:3000",
            "https://127.0.0.1:1",
            "https://chat.example",
            "https://srv:1",
        ] {
            assert_eq!(check(&rule, origin).unwrap().unwrap(), origin, "{origin}");
        }
        for origin in [
            "null",
            "",
            "http://localhost.evil.com",
            "https://chat.example.evil",
            "file://localhost",
            "http://srv",
        ] {
            assert!(check(&rule, origin).is_err(), "{origin}");
        }
        assert_eq!(rule.check(&HeaderMap::new()).unwrap(), None);
        assert_eq!(check(&OriginRule::Any, "null").unwrap().unwrap(), "*");
    }
}
