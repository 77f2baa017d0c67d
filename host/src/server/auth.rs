//! API keys: which there are, and whose request it is.
//!
//! Keys are kept as digests only. A given key is hashed and its digest compared with every known one, without stopping
//! early, so that the time says nothing of how much was right.

use std::fmt;
use std::io;
use std::path::Path;

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use super::error::{ApiError, Kind};

type KeyDigest = [u8; 32];

/// The keys that are accepted.
#[derive(Clone, Default)]
pub struct ApiKeys {
    digests: Vec<KeyDigest>,
}

/// Whose request it is: cached prefixes are shared within a tenant only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tenant(String);

impl Tenant {
    /// Name of the tenant's part of the prefix cache.
    pub fn namespace(&self) -> &str {
        &self.0
    }
}

impl ApiKeys {
    /// Adds a key.
    pub fn add(&mut self, key: &str) {
        let digest = digest(key);
        if !key.is_empty() && !self.digests.contains(&digest) {
            self.digests.push(digest);
        }
    }

    /// Adds the keys of a file, one a line; empty lines and those that begin with `#` are left out.
    pub fn add_file(&mut self, path: &Path) -> io::Result<()> {
        let text = std::fs::read_to_string(path)?;
        for line in text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            self.add(line);
        }
        Ok(())
    }

    /// Whether everybody may ask.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// Whose request has these headers. `Authorization` counts first, then `X-Api-Key`.
    pub fn check(&self, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if self.is_empty() {
            return Ok(Tenant::default());
        }
        let Some(given) = given(headers) else {
            let message = "no API key was given: send it as \"Authorization: Bearer KEY\"";
            return Err(ApiError::new(Kind::Authentication, message).with_code("missing_api_key"));
        };
        let digest = digest(given);
        let mut is_known = 0;
        for known in &self.digests {
            let difference = known
                .iter()
                .zip(&digest)
                .fold(0, |all, (a, b)| all | (a ^ b));
            is_known |= u8::from(std::hint::black_box(difference) == 0);
        }
        if is_known == 0 {
            let message = "the API key is not one of this server's";
            return Err(ApiError::new(Kind::Authentication, message).with_code("invalid_api_key"));
        }
        Ok(Tenant(
            digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        ))
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.digests.len())
    }
}

fn given(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::trim)
    };
    match text(header::AUTHORIZATION.as_str()).filter(|text| !text.is_empty()) {
        Some(text) => match text.split_at_checked("Bearer ".len()) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case("Bearer ") => Some(key.trim()),
            _ => Some(text),
        },
        None => text("x-api-key").filter(|text| !text.is_empty()),
    }
}

fn digest(key: &str) -> KeyDigest {
    Sha256::digest(key.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn keys_are_found_in_both_headers_and_make_tenants() {
        let mut keys = ApiKeys::default();
        assert_eq!(keys.check(&HeaderMap::new()).unwrap(), Tenant::default());
        keys.add("one");
        keys.add("two");
        let one = keys.check(&headers("authorization", "Bearer one")).unwrap();
        assert_eq!(
            keys.check(&headers("authorization", "bearer one")).unwrap(),
            one
        );
        assert_eq!(keys.check(&headers("x-api-key", "one")).unwrap(), one);
        assert_ne!(keys.check(&headers("x-api-key", "two")).unwrap(), one);
        for wrong in ["Bearer", "Bearer on", "Bearer onee", "Basic one", ""] {
            assert!(
                keys.check(&headers("authorization", wrong)).is_err(),
                "{wrong}"
            );
        }
        assert!(!format!("{keys:?} {one:?}").contains("one\""));
    }

    #[test]
    fn files_have_comments_and_blank_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# mine\n\n  first \nsecond\nfirst\n").unwrap();
        let mut keys = ApiKeys::default();
        keys.add_file(file.path()).unwrap();
        assert_eq!(format!("{keys:?}"), "2 keys");
        assert!(keys.check(&headers("x-api-key", "first")).is_ok());
    }
}
