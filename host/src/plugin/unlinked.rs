//! What is told of a plugin whose libraries are not in order: all that are missing or damaged, where they were looked for, and where
//! they come from.

use std::path::Path;

use mlxcel_registry::plugin::{
    Linkage, PluginInfo, ReasonCode, Rejection, Stage, SystemLibraries, linkage,
};

use super::providers::Providers;

/// The places of the linker, for people.
const LINKERS_OWN: &str = if cfg!(target_vendor = "apple") {
    "where the system looks (DYLD_LIBRARY_PATH, @rpath)"
} else {
    "where the system looks (LD_LIBRARY_PATH, ldconfig)"
};

/// A plugin and what its file says of the libraries it needs.
pub(super) struct Unlinked<'a> {
    path: &'a Path,
    providers: Providers,
    linkage: Linkage,
}

impl<'a> Unlinked<'a> {
    /// Reads the plugin's file and those of its libraries.
    pub(super) fn read(path: &'a Path, info: Option<&PluginInfo>) -> Self {
        Self {
            path,
            providers: info.map(Providers::of).unwrap_or_default(),
            linkage: linkage(path, &SystemLibraries::of_process()),
        }
    }

    /// The linker says that `library` is not there.
    pub(super) fn without(mut self, library: &str) -> Rejection {
        let listed = &self.linkage;
        let file_name = Path::new(library).file_name().unwrap_or_default();
        let is_told = listed.missing.iter().any(|name| name == library)
            || listed
                .damaged
                .iter()
                .any(|(path, _)| path.file_name() == Some(file_name));
        if !is_told {
            self.linkage.missing.insert(0, library.to_owned());
        }
        let mut parts = Vec::new();
        parts.extend(self.faults());
        parts.extend(self.missing());
        let code = match self.linkage.missing.is_empty() {
            true => ReasonCode::LinkError,
            false => ReasonCode::MissingLibrary,
        };
        Rejection::new(Stage::Link, code, parts.join("; "))
    }

    /// What to do about a function that none of the libraries has.
    pub(super) fn lacking(&self, symbol: &str) -> Option<String> {
        let provider = self.providers.of_symbol(symbol)?;
        let found = &self.linkage.found;
        let library = found
            .iter()
            .find(|(name, _)| provider.libraries.iter().any(|brought| brought == name));
        let at = library.map_or_else(String::new, |(_, path)| format!(" ({})", path.display()));
        Some(format!(
            "{}{at} lacks {symbol}, so it is older than this plugin needs: update it",
            provider.name
        ))
    }

    /// Who else may be at fault when loading ends the process: those who bring libraries, each with a place.
    pub(super) fn suspects(&self) -> Vec<String> {
        let all = self.names();
        let mut known = Vec::new();
        let mut told = Vec::new();
        for (name, path) in &self.linkage.found {
            let Some((number, provider)) = self.providers.of_library(name, &all) else {
                continue;
            };
            if !known.contains(&number) {
                known.push(number);
                told.push(format!("{} ({})", provider.name, path.display()));
            }
        }
        told
    }

    /// Files that cannot be used, if there are any.
    pub(super) fn faults(&self) -> Option<String> {
        let all = self.names();
        let damaged = self.linkage.damaged.iter().map(|(path, fault)| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let origin = self.providers.of_library(&name, &all);
            let origin = origin.map_or_else(String::new, |(_, provider)| {
                format!(" (it comes with {})", provider.name)
            });
            format!("{} {fault}{origin}", path.display())
        });
        let damaged: Vec<String> = damaged.collect();
        (!damaged.is_empty())
            .then(|| format!("a library it needs cannot be used: {}", damaged.join("; ")))
    }

    fn missing(&self) -> Option<String> {
        let missing = &self.linkage.missing;
        let (all, folder) = (self.names(), self.path.parent());
        // Libraries of one origin are told together, in the order in which the first of each is needed.
        let mut groups: Vec<(Option<usize>, String, Vec<&str>)> = Vec::new();
        for name in missing {
            let provider = self.providers.of_library(name, &all);
            let number = provider.map(|(number, _)| number);
            match groups.iter_mut().find(|(known, ..)| *known == number) {
                Some((_, _, names)) => names.push(name),
                None => {
                    let words = provider.map_or_else(String::new, |(_, provider)| {
                        format!(", of {} ({})", provider.name, provider.get(self.path))
                    });
                    groups.push((number, words, vec![name]));
                }
            }
        }
        let told: Vec<String> = groups
            .into_iter()
            .map(|(_, words, names)| format!("{}{words}", names.join(", ")))
            .collect();
        let needs = match missing.as_slice() {
            [] => return None,
            [_] => "needs a library that is not installed".to_owned(),
            more => format!("needs {} libraries that are not installed", more.len()),
        };
        let (mut inside, mut places) = (Vec::new(), Vec::new());
        for place in &self.linkage.looked_in {
            match folder.and_then(|folder| place.strip_prefix(folder).ok()) {
                Some(part) if part.as_os_str().is_empty() => inside.push(".".to_owned()),
                Some(part) => inside.push(part.display().to_string()),
                None => places.push(format!("in {}", place.display())),
            }
        }
        if let (false, Some(folder)) = (inside.is_empty(), folder) {
            places.insert(
                0,
                format!("in {} of {}", inside.join(", "), folder.display()),
            );
        }
        places.push(LINKERS_OWN.to_owned());
        let looked = places.join(", ");
        Some(format!("{needs}: {}. Looked for {looked}", told.join("; ")))
    }

    fn names(&self) -> Vec<String> {
        let found = self.linkage.found.iter().map(|(name, _)| name.clone());
        found.chain(self.linkage.missing.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlxcel_registry::plugin::parse_metadata;

    /// What MLX for CUDA 13 needs, and where it comes from.
    fn unlinked(missing: &[&str]) -> Unlinked<'static> {
        let record = br#"{"plugin":{"format":1,"abi":[1,0],"needs_minor":0,"kind":"backend","name":"x","version":"1.0.0","arch":"x86_64","os":"linux","panic":"unwind","providers":[
            {"name":"the driver","libraries":["libdriver.so.1"],"symbols":["cu"],"get":"install it"},
            {"name":"packages 12","libraries":["libblas.so.12","libnn.so.9"],"symbols":["cublas"],"get":"fetch 12 into {folder}"},
            {"name":"packages 13","libraries":["libblas.so.13","libnn.so.9"],"get":"fetch 13 into {folder}"}]}}"#;
        let record: Vec<u8> = record
            .iter()
            .map(|&byte| if byte == b'\n' { b' ' } else { byte })
            .collect();
        let info = parse_metadata(&record).unwrap().plugin;
        Unlinked {
            path: Path::new("/p/mlxcel-backend-x/libmlxcel_backend_x.so"),
            providers: Providers::of(&info),
            linkage: Linkage {
                found: vec![
                    ("libblas.so.13".to_owned(), "/usr/lib/libblas.so.13".into()),
                    (
                        "libdriver.so.1".to_owned(),
                        "/usr/lib/libdriver.so.1".into(),
                    ),
                ],
                missing: missing.iter().map(ToString::to_string).collect(),
                damaged: Vec::new(),
                looked_in: vec!["/p/mlxcel-backend-x/v/lib".into(), "/opt/v".into()],
            },
        }
    }

    #[test]
    fn all_that_is_missing_is_told_with_its_origin() {
        let rejection = unlinked(&["libnn.so.9", "libother.so.1"]).without("libnn.so.9");
        assert_eq!(rejection.code, ReasonCode::MissingLibrary);
        insta::assert_snapshot!(rejection, @"needs 2 libraries that are not installed: libnn.so.9, of packages 13 (fetch 13 into /p/mlxcel-backend-x); libother.so.1. Looked for in v/lib of /p/mlxcel-backend-x, in /opt/v, where the system looks (LD_LIBRARY_PATH, ldconfig)");
    }

    #[test]
    fn what_the_linker_alone_misses_is_told_too() {
        let text = unlinked(&[]).without("libhidden.so.1").text;
        assert!(
            text.starts_with("needs a library that is not installed: libhidden.so.1. "),
            "{text}"
        );
    }

    #[test]
    fn a_file_that_cannot_be_used_is_not_called_missing() {
        let mut unlinked = unlinked(&[]);
        let damaged = (
            "/q/libnn.so.9".into(),
            "cannot be read: Permission denied".to_owned(),
        );
        unlinked.linkage.damaged.push(damaged);
        let rejection = unlinked.without("libnn.so.9");
        assert_eq!(rejection.code, ReasonCode::LinkError);
        insta::assert_snapshot!(rejection, @"a library it needs cannot be used: /q/libnn.so.9 cannot be read: Permission denied (it comes with packages 13)");
    }

    #[test]
    fn a_function_that_is_not_there_is_the_fault_of_who_brings_it() {
        let unlinked = unlinked(&[]);
        let text = unlinked.lacking("cuNewFunction").unwrap();
        assert_eq!(
            text,
            "the driver (/usr/lib/libdriver.so.1) lacks cuNewFunction, so it is older than this plugin needs: update it"
        );
        assert!(
            unlinked
                .lacking("cublasNew")
                .unwrap()
                .starts_with("packages 12 lacks")
        );
        assert_eq!(unlinked.lacking("malloc"), None);
    }
}
