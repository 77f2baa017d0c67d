//! The dynamic linker: opens a file, and turns its complaints into reasons.

use std::error::Error;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mlxcel_registry::plugin::{PluginInfo, ReasonCode, Rejection, Stage};

use super::unlinked::Unlinked;

/// Keep the library mapped even if somebody closed it: threads and thread-local destructors of a plugin
/// make unloading unsafe.
#[cfg(any(target_os = "linux", target_os = "android"))]
const RTLD_NODELETE: c_int = 0x1000;
#[cfg(target_vendor = "apple")]
const RTLD_NODELETE: c_int = 0x80;
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
const RTLD_NODELETE: c_int = 0;

/// Opens a plugin's library for the life of the process. Its constructors run here. `info` is what its file says.
pub(super) fn open(path: &Path, info: &PluginInfo) -> Result<ManuallyDrop<Library>, Rejection> {
    // Symbols stay local: two backends may carry different builds of one C++ library.
    let flags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
    // SAFETY: constructors of the file run. It was peeked at, and tried in a child process when it did
    // not come with the installation; beyond that plugins are trusted code.
    match unsafe { Library::open(Some(path), flags) } {
        Ok(library) => Ok(ManuallyDrop::new(library)),
        Err(error) => Err(link_rejection(path, Some(info), &linker_text(&error))),
    }
}

/// What the linker said: libloading keeps it in the error's source.
pub(super) fn linker_text(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// Sorts a complaint of the linker. The texts are those of glibc, musl and dyld.
fn link_rejection(path: &Path, info: Option<&PluginInfo>, text: &str) -> Rejection {
    let reject = |code, text: String| Rejection::new(Stage::Link, code, text);
    let own_prefix = format!("{}: ", path.display());
    let text = text.strip_prefix(&own_prefix).unwrap_or(text);

    if let Some(library) = absent_library(text) {
        return Unlinked::read(path, info).without(library);
    }
    if let Some(symbol) = absent_symbol(text) {
        let advice = Unlinked::read(path, info)
            .lacking(symbol)
            .unwrap_or_else(|| {
                "a library it uses is of another version than the one it was built with".to_owned()
            });
        return reject(ReasonCode::UndefinedSymbol, format!("{text}: {advice}"));
    }
    if text.contains("version `") && text.contains("not found") {
        return reject(
            ReasonCode::MissingLibrary,
            format!("{text}: the plugin was built for a newer system, get a build for this one"),
        );
    }
    if text.contains("code signature") || text.contains("different Team IDs") {
        return reject(
            ReasonCode::Signature,
            format!(
                "{text}: the system refuses the file's signature; remove its quarantine flag (xattr -d com.apple.quarantine {}) or use a host with library validation disabled",
                path.display()
            ),
        );
    }
    let said = match Unlinked::read(path, info).faults() {
        Some(faults) => format!("cannot be linked: {text}: {faults}"),
        None => format!("cannot be linked: {text}"),
    };
    reject(ReasonCode::LinkError, said)
}

/// The library that is not there.
fn absent_library(text: &str) -> Option<&str> {
    if let Some((library, _)) = text.split_once(": cannot open shared object file") {
        return Some(library);
    }
    if let Some(rest) = text.strip_prefix("Error loading shared library ") {
        return rest.split(':').next();
    }
    let (_, rest) = text.split_once("Library not loaded: ")?;
    rest.split_whitespace().next()
}

/// The function that no library has.
fn absent_symbol(text: &str) -> Option<&str> {
    let words = [
        "undefined symbol: ",
        "Symbol not found: ",
        "symbol not found",
    ];
    let rest = words
        .iter()
        .find_map(|words| Some(text.split_once(words)?.1));
    match rest {
        // musl: "Error relocating FILE: SYMBOL: symbol not found".
        Some("") => text.rsplit(": ").nth(1),
        Some(rest) => rest.split([',', ' ', '\n']).next(),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use mlxcel_registry::plugin::parse_metadata;

    use super::*;

    fn code_and_text(text: &str) -> (ReasonCode, String) {
        let rejection = link_rejection(Path::new("/p/libx.so"), None, text);
        (rejection.code, rejection.text)
    }

    #[test]
    fn a_missing_library_is_named_on_every_platform() {
        for text in [
            "libcublasLt.so.13: cannot open shared object file: No such file or directory",
            "Error loading shared library libcublasLt.so.13: No such file or directory (needed by /p/libx.so)",
            "dlopen(/p/libx.so, 0x0006): Library not loaded: libcublasLt.so.13\n  Referenced from: /p/libx.so",
        ] {
            let (code, text) = code_and_text(text);
            assert_eq!(code, ReasonCode::MissingLibrary);
            assert!(
                text.starts_with(
                    "needs a library that is not installed: libcublasLt.so.13. Looked for"
                ),
                "{text}"
            );
        }
    }

    #[test]
    fn other_complaints_keep_the_linkers_words() {
        let (code, text) = code_and_text("/p/libx.so: undefined symbol: not_there");
        assert_eq!(code, ReasonCode::UndefinedSymbol);
        assert!(text.starts_with("undefined symbol: not_there"), "{text}");
        for text in [
            "/p/liby.so: undefined symbol: cuInit, version CUDA_2",
            "Error relocating /p/liby.so: cuInit: symbol not found",
            "dlopen(/p/libx.so, 0x0006): Symbol not found: cuInit\n  Referenced from: /p/liby.so",
        ] {
            assert_eq!(absent_symbol(text), Some("cuInit"), "{text}");
        }
        let (code, text) = code_and_text(
            "/lib/libc.so.6: version `GLIBC_2.99' not found (required by /p/libx.so)",
        );
        assert_eq!(code, ReasonCode::MissingLibrary);
        assert!(text.contains("GLIBC_2.99"), "{text}");
        assert_eq!(
            code_and_text("/p/libx.so: file too short").0,
            ReasonCode::LinkError
        );
    }

    #[test]
    fn the_text_of_a_failed_open_is_the_linkers() {
        let file = Path::new("/nonexistent/libmlxcel_family_x.so");
        let info = parse_metadata(br#"{"plugin":{"format":1,"abi":[1,0],"needs_minor":0,"kind":"family","name":"x","version":"1.0.0","arch":"x86_64","os":"linux","panic":"unwind"}}"#);
        let rejection = open(file, &info.unwrap().plugin).unwrap_err();
        assert_eq!(rejection.stage, Stage::Link);
        assert!(
            !rejection.text.contains("dlopen failed"),
            "{}",
            rejection.text
        );
    }
}
