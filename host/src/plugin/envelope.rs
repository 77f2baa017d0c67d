//! Layout check and handshake with a library that is open.

use std::error::Error;

use abi_stable::library::{AbiHeaderRef, LibraryError};
use abi_stable::std_types::RStr;
use libloading::os::unix::Library;
use mlxcel_abi::envelope::{HostHello, PluginHello, PluginRootRef, ROOT_SYMBOL};
use mlxcel_abi::version::{ABI_MAJOR, ABI_MINOR, OLDEST_PLUGIN_MINOR, PluginVersion, negotiate};
use mlxcel_abi::{AbiError, Table, guard};
use mlxcel_registry::plugin::{
    PluginInfo, PluginKind, ReasonCode, Rejection, Stage, parse_metadata,
};

use super::host_api::host_api;
use super::library::linker_text;

/// Name and version that plugins are told.
const PRODUCT: &str = concat!("mlxcel ", env!("CARGO_PKG_VERSION"));

/// A plugin after a good handshake.
pub(super) struct Opened {
    /// Its own record.
    pub info: PluginInfo,
    /// Its kind.
    pub kind: PluginKind,
    /// Minor its tables were built at.
    pub abi_minor: u32,
    /// Its entry table, of the type that `kind` says.
    pub table: *const (),
    /// Addresses of its extension tables by name.
    pub query: Query,
}

/// A plugin's answer to the name of an extension table: its address, or 0.
pub(super) type Query = extern "C" fn(RStr<'_>) -> usize;

fn header(code: ReasonCode, text: impl AsRef<str>) -> Rejection {
    Rejection::new(Stage::Header, code, text)
}

fn opening(code: ReasonCode, text: impl AsRef<str>) -> Rejection {
    Rejection::new(Stage::Open, code, text)
}

/// Checks the root module of `library` and opens the plugin. `expected` is what its file says.
pub(super) fn shake_hands(library: &Library, expected: &PluginInfo) -> Result<Opened, Rejection> {
    let root = guard::catch(|| Ok(root_module(library)))
        .map_err(|error| header(ReasonCode::LayoutMismatch, error.to_string()))??;
    let info = running_info(root)?;
    if (&info.name, &info.kind, info.abi, info.needs_minor)
        != (
            &expected.name,
            &expected.kind,
            expected.abi,
            expected.needs_minor,
        )
    {
        return Err(opening(
            ReasonCode::HelloMismatch,
            format!(
                "its file says {} {} at ABI {}.{}, the running plugin says {} {} at ABI {}.{}: rebuild it",
                expected.kind,
                expected.name,
                expected.abi[0],
                expected.abi[1],
                info.kind,
                info.name,
                info.abi[0],
                info.abi[1],
            ),
        ));
    }
    let kind = info.known_kind().ok_or_else(|| {
        opening(
            ReasonCode::UnknownKind,
            format!("a plugin of kind {}: update mlxcel", info.kind),
        )
    })?;
    let hello = greet(root)?;
    check_hello(&hello, &info, kind)?;
    Ok(Opened {
        info,
        kind,
        abi_minor: hello.abi_minor,
        table: hello.table,
        query: root.query(),
    })
}

fn root_module(library: &Library) -> Result<PluginRootRef, Rejection> {
    // SAFETY: the symbol is a static whose address is what `AbiHeaderRef` holds, so the looked-up
    // address itself is copied as the reference. A null address is an error of `get`.
    let found = unsafe { library.get::<AbiHeaderRef>(ROOT_SYMBOL) };
    let reference: AbiHeaderRef = match found {
        Ok(symbol) => *symbol,
        Err(error) => {
            return Err(header(
                ReasonCode::NoRootModule,
                format!(
                    "exports no plugin root ({}): export it with the macro of mlxcel-sdk",
                    linker_text(&error)
                ),
            ));
        }
    };
    reference
        .upgrade()
        .and_then(|checked| checked.init_root_module::<PluginRootRef>())
        .map_err(|error| root_rejection(&error))
}

fn root_rejection(error: &LibraryError) -> Rejection {
    match error {
        LibraryError::InvalidAbiHeader(_) | LibraryError::InvalidCAbi { .. } => header(
            ReasonCode::LayoutMismatch,
            "built on another version of the plugin envelope: rebuild it with a current mlxcel-sdk",
        ),
        LibraryError::IncompatibleVersionNumber {
            expected_version,
            actual_version,
            ..
        } => header(
            ReasonCode::AbiMismatch,
            format!(
                "plugin has envelope {actual_version}, this host has {expected_version}: use matching versions"
            ),
        ),
        LibraryError::RootModule { err, .. } => header(
            ReasonCode::Panicked,
            format!("its root module failed: {err}"),
        ),
        other => {
            tracing::debug!("layout check: {other}");
            header(
                ReasonCode::LayoutMismatch,
                format!(
                    "plugin envelope has another layout ({}): rebuild it with a current mlxcel-sdk",
                    last_group(&other.to_string())
                ),
            )
        }
    }
}

/// The layout checker writes hundreds of lines; its last group of lines names the innermost difference.
fn last_group(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let start = lines
        .iter()
        .rposition(|line| line.starts_with("Error:"))
        .unwrap_or(0);
    let group = lines.get(start..).unwrap_or_default();
    group.iter().take(6).copied().collect::<Vec<_>>().join(" ")
}

/// What the plugin's `metadata` function says.
fn running_info(root: PluginRootRef) -> Result<PluginInfo, Rejection> {
    let text = root.metadata()();
    if text.is_empty() {
        return Err(opening(
            ReasonCode::Panicked,
            "its metadata function panicked or gave nothing: report this to its author",
        ));
    }
    parse_metadata(text.as_str().as_bytes())
        .map(|metadata| metadata.plugin)
        .map_err(|error| opening(ReasonCode::BadMetadata, error.to_string()))
}

fn greet(root: PluginRootRef) -> Result<PluginHello, Rejection> {
    let hello = HostHello::new(PRODUCT, host_api());
    root.open()(&hello).into_result().map_err(|error| {
        let text = linker_text(&error as &(dyn Error + 'static));
        let code = match text.starts_with("panicked") {
            true => ReasonCode::Panicked,
            false => ReasonCode::OpenFailed,
        };
        opening(code, format!("refused to open: {text}"))
    })
}

fn check_hello(hello: &PluginHello, info: &PluginInfo, kind: PluginKind) -> Result<(), Rejection> {
    let version = PluginVersion {
        major: ABI_MAJOR,
        built_minor: hello.abi_minor,
        needs_minor: hello.needs_minor,
    };
    negotiate(version, ABI_MINOR, OLDEST_PLUGIN_MINOR)
        .map_err(|mismatch| opening(ReasonCode::AbiMismatch, mismatch.to_string()))?;
    if hello.abi_minor != info.abi[1]
        || hello.needs_minor != info.needs_minor
        || hello.kind != kind.code()
    {
        return Err(opening(
            ReasonCode::HelloMismatch,
            format!(
                "its file says kind {} at ABI minor {} needing {}, its open says kind {} at {} needing {}: rebuild it",
                kind.code(),
                info.abi[1],
                info.needs_minor,
                hello.kind,
                hello.abi_minor,
                hello.needs_minor,
            ),
        ));
    }
    Ok(())
}

/// Copies a table of the plugin over stubs, after looking at its address and size.
///
/// # Safety
/// `table` must be null or point to a table of type `T` that lives as long as the process, or as the
/// object whose functions it holds.
pub(super) unsafe fn import_table<T: Table>(table: *const T) -> Result<T, AbiError> {
    if table.is_null() || !table.is_aligned() {
        return Err(AbiError::internal(format!(
            "{} is null or misaligned",
            T::NAME
        )));
    }
    // SAFETY: every table starts with its size; the caller vouches for the address.
    let struct_size = unsafe { table.cast::<usize>().read() };
    let first_slot = T::SLOTS.first().map_or(0, |slot| slot.offset);
    if struct_size < first_slot || struct_size > TABLE_CAP_BYTES {
        return Err(AbiError::internal(format!(
            "{} says it has {struct_size} bytes, expected {first_slot} to {TABLE_CAP_BYTES}",
            T::NAME
        )));
    }
    // SAFETY: forwarded to the caller; the size was looked at above.
    Ok(unsafe { T::import(table) })
}

/// Far above any table there will be; a larger size is garbage.
const TABLE_CAP_BYTES: usize = 1 << 16;

/// As a rejection of the `open` stage.
pub(super) fn bad_table(error: AbiError) -> Rejection {
    opening(ReasonCode::BadTable, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlxcel_abi::backend::BackendTable;

    #[test]
    fn the_innermost_difference_is_kept() {
        let text = "Compared <this>\n\nError:too many fields\nExpected:\n    3\nFound:\n    2\n\nError:mismatched type\nExpected:\n    u64\nFound:\n    u32\n";
        assert_eq!(
            last_group(text),
            "Error:mismatched type Expected: u64 Found: u32"
        );
        assert_eq!(last_group(""), "");
    }

    #[test]
    fn impossible_tables_are_refused() {
        let mut table = BackendTable::stubs();
        table.struct_size = 3;
        // SAFETY: the table lives on the stack for the call.
        let small = unsafe { import_table(&raw const table) };
        assert!(small.err().unwrap().message.contains("3 bytes"));
        // SAFETY: null is allowed.
        assert!(unsafe { import_table::<BackendTable>(std::ptr::null()) }.is_err());
    }
}
