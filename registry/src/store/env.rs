//! The part of the process environment that the store obeys, read once into a value.
//!
//! Owns variable names, their defaults and the folders that follow from them. Nothing else in the store
//! reads the environment, so a test builds a [`StoreEnv`] by hand and never mutates the process.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use super::name::{RepoId, check_segment};

/// The public hub, used when `HF_ENDPOINT` is not set.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// The organisation put before a bare model name when `MLXCEL_DEFAULT_ORG` is not set.
pub const DEFAULT_ORG: &str = "mlx-community";

/// A variable of the environment holds something that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvError {
    /// A switch is neither on nor off.
    #[error("{variable} is {value:?}: expected 1, true, yes, on, 0, false, no or off")]
    BadSwitch {
        /// Name of the variable.
        variable: &'static str,
        /// What it holds.
        value: String,
    },
    /// The value is not UTF-8 although it names something that must be.
    #[error("{variable} is not valid UTF-8: set it to plain text")]
    NotUnicode {
        /// Name of the variable.
        variable: &'static str,
    },
    /// The organisation would not be a valid first half of `owner/name`.
    #[error("MLXCEL_DEFAULT_ORG is {value:?}: {reason}")]
    BadOrg {
        /// What the variable holds.
        value: String,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// No variable says where models are and there is no home directory to fall back on.
    #[error("no folder for models: HOME is not set, so set MLXCEL_MODELS_DIR or MLXCEL_CACHE_DIR")]
    NoHome,
}

/// A bearer token. Its `Debug` form never shows the value.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Wraps the text of a token.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(super) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

/// What the store takes from the environment.
#[derive(Debug, Clone)]
pub struct StoreEnv {
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `MLXCEL_MODELS_DIR`: the store's root.
    pub models_dir: Option<PathBuf>,
    /// `MLXCEL_CACHE_DIR`: the store's root is its `models` folder.
    pub cache_dir: Option<PathBuf>,
    /// `MLXCEL_DEFAULT_ORG`.
    pub default_org: String,
    /// `HF_HUB_CACHE`: the Hugging Face cache to read.
    pub hf_hub_cache: Option<PathBuf>,
    /// `HF_HOME`: holds `hub` and `token`.
    pub hf_home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`: where the Hugging Face libraries keep their home when `HF_HOME` is not set.
    pub xdg_cache_home: Option<PathBuf>,
    /// `HF_ENDPOINT`.
    pub endpoint: String,
    /// `HF_TOKEN`.
    pub token: Option<Token>,
    /// `HF_TOKEN_PATH`: a file with the token, in place of `$HF_HOME/token`.
    pub token_path: Option<PathBuf>,
    /// Which variable (`MLXCEL_OFFLINE` or `HF_HUB_OFFLINE`) forbids the network, if one does.
    pub offline: Option<&'static str>,
    /// `MLXCEL_ALLOW_INSECURE_ENDPOINT`: permits plain http to a host that is not loopback.
    pub allow_insecure_endpoint: bool,
    /// `MLXCEL_EXTRA_CA_CERTS`: a PEM bundle trusted beside the built-in roots.
    pub extra_ca_certs: Option<PathBuf>,
    /// Whether the HTTP client may look up the usual proxy variables in the process environment.
    pub proxy_from_process: bool,
}

impl Default for StoreEnv {
    /// An empty environment: every default, no proxy, no home.
    fn default() -> Self {
        Self {
            home: None,
            models_dir: None,
            cache_dir: None,
            default_org: DEFAULT_ORG.to_owned(),
            hf_hub_cache: None,
            hf_home: None,
            xdg_cache_home: None,
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            token: None,
            token_path: None,
            offline: None,
            allow_insecure_endpoint: false,
            extra_ca_certs: None,
            proxy_from_process: false,
        }
    }
}

impl StoreEnv {
    /// Reads the environment of this process.
    pub fn from_process() -> Result<Self, EnvError> {
        let mut env = Self::from_lookup(|name| std::env::var_os(name))?;
        env.proxy_from_process = true;
        Ok(env)
    }

    /// Reads variables through `lookup`. A variable that is set but empty counts as not set.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, EnvError> {
        let os = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let path = |name: &str| os(name).map(PathBuf::from);
        let text = |variable: &'static str| {
            os(variable)
                .map(OsString::into_string)
                .transpose()
                .map_err(|_| EnvError::NotUnicode { variable })
        };
        let switch = |variable: &'static str| match text(variable)? {
            None => Ok(false),
            Some(value) => parse_switch(variable, value),
        };

        let default_org = text("MLXCEL_DEFAULT_ORG")?.unwrap_or_else(|| DEFAULT_ORG.to_owned());
        if let Err(reason) = check_segment(&default_org) {
            return Err(EnvError::BadOrg {
                value: default_org,
                reason,
            });
        }
        let mut offline = None;
        for variable in ["MLXCEL_OFFLINE", "HF_HUB_OFFLINE"] {
            if switch(variable)? && offline.is_none() {
                offline = Some(variable);
            }
        }
        Ok(Self {
            home: path("HOME"),
            models_dir: path("MLXCEL_MODELS_DIR"),
            cache_dir: path("MLXCEL_CACHE_DIR"),
            default_org,
            hf_hub_cache: path("HF_HUB_CACHE"),
            hf_home: path("HF_HOME"),
            xdg_cache_home: path("XDG_CACHE_HOME"),
            endpoint: text("HF_ENDPOINT")?.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
            token: text("HF_TOKEN")?.map(Token::new),
            token_path: path("HF_TOKEN_PATH"),
            offline,
            allow_insecure_endpoint: switch("MLXCEL_ALLOW_INSECURE_ENDPOINT")?,
            extra_ca_certs: path("MLXCEL_EXTRA_CA_CERTS"),
            proxy_from_process: false,
        })
    }

    /// The store's root: `MLXCEL_MODELS_DIR`, else `models` below the cache folder.
    pub fn store_root(&self) -> Result<PathBuf, EnvError> {
        if let Some(root) = &self.models_dir {
            return Ok(root.clone());
        }
        let cache = match (&self.cache_dir, &self.home) {
            (Some(cache), _) => cache.clone(),
            (None, Some(home)) => home.join(".cache").join("mlxcel"),
            (None, None) => return Err(EnvError::NoHome),
        };
        Ok(cache.join("models"))
    }

    /// The Hugging Face cache to read: `HF_HUB_CACHE`, else `hub` below the Hugging Face home.
    pub fn hf_cache(&self) -> Option<PathBuf> {
        self.hf_hub_cache
            .clone()
            .or_else(|| self.hf_home_dir().map(|home| home.join("hub")))
    }

    /// The file that holds the Hugging Face token when `HF_TOKEN` does not.
    pub fn token_file(&self) -> Option<PathBuf> {
        self.token_path
            .clone()
            .or_else(|| self.hf_home_dir().map(|home| home.join("token")))
    }

    /// The folder of one model in a Hugging Face cache.
    pub(super) fn hf_repo_dir(&self, id: &RepoId) -> Option<PathBuf> {
        let folder = format!("models--{}--{}", id.owner(), id.name());
        self.hf_cache().map(|cache| cache.join(folder))
    }

    fn hf_home_dir(&self) -> Option<PathBuf> {
        if let Some(home) = &self.hf_home {
            return Some(home.clone());
        }
        let cache = match (&self.xdg_cache_home, &self.home) {
            (Some(cache), _) => cache.clone(),
            (None, Some(home)) => home.join(".cache"),
            (None, None) => return None,
        };
        Some(cache.join("huggingface"))
    }
}

fn parse_switch(variable: &'static str, value: String) -> Result<bool, EnvError> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err(EnvError::BadSwitch { variable, value }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn env(pairs: &[(&str, &str)]) -> Result<StoreEnv, EnvError> {
        let map: HashMap<String, OsString> = pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), OsString::from(v)))
            .collect();
        StoreEnv::from_lookup(|name| map.get(name).cloned())
    }

    fn root(pairs: &[(&str, &str)]) -> String {
        let root = env(pairs).unwrap().store_root().unwrap();
        root.to_str().unwrap().to_owned()
    }

    #[test]
    fn root_follows_the_documented_order() {
        assert_eq!(root(&[("HOME", "/h")]), "/h/.cache/mlxcel/models");
        assert_eq!(
            root(&[("HOME", "/h"), ("MLXCEL_CACHE_DIR", "/c")]),
            "/c/models"
        );
        assert_eq!(
            root(&[
                ("HOME", "/h"),
                ("MLXCEL_CACHE_DIR", "/c"),
                ("MLXCEL_MODELS_DIR", "/m")
            ]),
            "/m"
        );
        assert_eq!(
            root(&[("HOME", "/h"), ("MLXCEL_CACHE_DIR", "")]),
            "/h/.cache/mlxcel/models"
        );
        assert!(matches!(
            env(&[]).unwrap().store_root(),
            Err(EnvError::NoHome)
        ));
    }

    #[test]
    fn hugging_face_cache_follows_the_order_of_its_own_libraries() {
        let cache = |pairs: &[(&str, &str)]| env(pairs).unwrap().hf_cache();
        let at = |text: &str| Some(PathBuf::from(text));
        assert_eq!(cache(&[("HOME", "/h")]), at("/h/.cache/huggingface/hub"));
        assert_eq!(
            cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]),
            at("/x/huggingface/hub")
        );
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/f")]), at("/f/hub"));
        assert_eq!(
            cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/k")]),
            at("/k")
        );
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn switches_are_strict_and_name_the_variable() {
        assert_eq!(
            env(&[("MLXCEL_OFFLINE", "yes")]).unwrap().offline,
            Some("MLXCEL_OFFLINE")
        );
        assert_eq!(
            env(&[("HF_HUB_OFFLINE", "ON")]).unwrap().offline,
            Some("HF_HUB_OFFLINE")
        );
        assert_eq!(env(&[("HF_HUB_OFFLINE", "0")]).unwrap().offline, None);
        let bad = env(&[("MLXCEL_ALLOW_INSECURE_ENDPOINT", "maybe")]).unwrap_err();
        insta::assert_snapshot!(bad, @r#"MLXCEL_ALLOW_INSECURE_ENDPOINT is "maybe": expected 1, true, yes, on, 0, false, no or off"#);
    }

    #[test]
    fn the_default_organisation_is_validated() {
        assert_eq!(env(&[]).unwrap().default_org, "mlx-community");
        assert!(matches!(
            env(&[("MLXCEL_DEFAULT_ORG", "../up")]),
            Err(EnvError::BadOrg { .. })
        ));
    }

    #[test]
    fn a_token_never_shows_in_debug_output() {
        let env = env(&[("HF_TOKEN", "hf_verysecret")]).unwrap();
        assert!(!format!("{env:?}").contains("verysecret"));
    }
}
