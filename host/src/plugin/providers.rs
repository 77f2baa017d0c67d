//! Where libraries come from that a plugin needs and does not bring: its record says so (`providers`), since the host knows no
//! vendor. Read from the file, so it is there for a plugin that cannot be opened.

use std::path::Path;

use mlxcel_registry::plugin::PluginInfo;
use serde::Deserialize;

/// Key of the plugin's record.
const KEY: &str = "providers";
/// Stands for the plugin's folder in what a provider says.
const FOLDER: &str = "{folder}";

/// Somebody or something that brings libraries.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Provider {
    /// What brings them, for instance `NVIDIA's driver`.
    pub(super) name: String,
    /// Names of the libraries, as a file that needs them writes them.
    #[serde(default)]
    pub(super) libraries: Vec<String>,
    /// How names of functions in them begin.
    #[serde(default)]
    pub(super) symbols: Vec<String>,
    /// How to get them.
    #[serde(default)]
    get: String,
}

impl Provider {
    /// How to get what is missing for the plugin at `path`.
    pub(super) fn get(&self, path: &Path) -> String {
        let folder = path.parent().unwrap_or(Path::new("."));
        self.get.replace(FOLDER, &folder.to_string_lossy())
    }

    fn brings(&self, library: &str) -> bool {
        self.libraries.iter().any(|name| name == library)
    }
}

/// Those that a plugin's record names.
#[derive(Debug, Clone, Default)]
pub(super) struct Providers(Vec<Provider>);

impl Providers {
    /// A record that names them in another form than is known names none.
    pub(super) fn of(info: &PluginInfo) -> Self {
        let value = info.extra.get(KEY).cloned().unwrap_or_default();
        Self(serde_json::from_value(value).unwrap_or_default())
    }

    /// Who brings a library. Two releases of a vendor share some names: then it is the one that brings more of `all`.
    pub(super) fn of_library<'a>(
        &'a self,
        library: &str,
        all: &[String],
    ) -> Option<(usize, &'a Provider)> {
        let share = |provider: &Provider| all.iter().filter(|name| provider.brings(name)).count();
        let bringing = self.0.iter().enumerate();
        bringing
            .filter(|(_, provider)| provider.brings(library))
            // Of equals the last is taken, so they are looked at from the end.
            .rev()
            .max_by_key(|(_, provider)| share(provider))
    }

    /// Who brings a function, by the longest beginning of its name. Releases of a vendor have the same names: they are told together,
    /// with the libraries of all, since the name alone does not say which of them is linked.
    pub(super) fn of_symbol(&self, symbol: &str) -> Option<Provider> {
        let beginning = |provider: &Provider| {
            let beginnings = provider.symbols.iter();
            let fitting = beginnings.filter(|beginning| symbol.starts_with(beginning.as_str()));
            fitting.map(String::len).max()
        };
        let longest = self.0.iter().filter_map(beginning).max()?;
        let fitting = self.0.iter().filter(|one| beginning(one) == Some(longest));
        fitting.cloned().reduce(|mut all, other| {
            all.name = format!("{} or {}", all.name, other.name);
            all.libraries.extend(other.libraries);
            all
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(name: &str, library: &str, symbols: &[&str]) -> Provider {
        Provider {
            name: name.to_owned(),
            libraries: vec![library.to_owned()],
            symbols: symbols.iter().map(ToString::to_string).collect(),
            get: String::new(),
        }
    }

    #[test]
    fn a_function_of_two_releases_is_told_of_both() {
        let providers = Providers(vec![
            provider("the driver", "libdriver.so.1", &["cu"]),
            provider("packages 13", "libblas.so.13", &["cublas"]),
            provider("packages 12", "libblas.so.12", &["cublas"]),
        ]);
        let both = providers.of_symbol("cublasNew").unwrap();
        assert_eq!(both.name, "packages 13 or packages 12");
        assert_eq!(both.libraries, ["libblas.so.13", "libblas.so.12"]);
        assert_eq!(providers.of_symbol("cuNew").unwrap().name, "the driver");
        assert!(providers.of_symbol("malloc").is_none());
    }
}
