//! The frozen, layout-checked part: the one root module every plugin exports.
//!
//! Nothing here may change within an ABI major. `abi_stable` compares the layout of these types
//! field by field when a plugin is loaded, and would reject an *older* plugin if a field were
//! added; everything that grows is therefore in tables behind the opaque pointers.

use crate::host::HostApi;
use crate::version::{ABI_MINOR, OLDEST_PLUGIN_MINOR};
use abi_stable::StableAbi;
use abi_stable::library::RootModule;
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::{RBoxError, RResult, RStr};

/// Name of the data symbol by which `abi_stable` finds the root module, NUL included.
pub const ROOT_SYMBOL: &[u8] = b"_1as_0lib_1header_0root_bmodule_bloader\0";

/// Root module of a plugin.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginRootRef, prefix_fields = PluginRootPrefix)))]
pub struct PluginRoot {
    /// The plugin's metadata records, the same text as in its file section.
    pub metadata: extern "C" fn() -> RStr<'static>,
    /// Hands over the host's side and receives the plugin's.
    pub open: extern "C" fn(&HostHello) -> RResult<PluginHello, RBoxError>,
    /// Address of the extension table with this name, or 0.
    #[sabi(last_prefix_field)]
    pub query: extern "C" fn(RStr<'_>) -> usize,
}

impl RootModule for PluginRootRef {
    abi_stable::declare_root_module_statics! {PluginRootRef}
    const BASE_NAME: &'static str = "mlxcel_plugin";
    const NAME: &'static str = "mlxcel_plugin";
    const VERSION_STRINGS: VersionStrings = abi_stable::package_version_strings!();
}

/// What the host says of itself.
#[repr(C)]
#[derive(StableAbi)]
pub struct HostHello {
    /// Minor of the host's ABI.
    pub abi_minor: u32,
    /// Oldest plugin minor the host loads.
    pub oldest_plugin_minor: u32,
    /// Product name and version, for messages only.
    pub product: RStr<'static>,
    /// Host services; they live as long as the process.
    #[sabi(unsafe_opaque_field)]
    pub host_api: *const HostApi,
    /// Zero.
    pub reserved: [u64; 8],
}

impl HostHello {
    /// The greeting of a host built with this crate.
    pub fn new(product: &'static str, host_api: *const HostApi) -> Self {
        Self {
            abi_minor: ABI_MINOR,
            oldest_plugin_minor: OLDEST_PLUGIN_MINOR,
            product: RStr::from_str(product),
            host_api,
            reserved: [0; 8],
        }
    }
}

/// What the plugin says of itself.
#[repr(C)]
#[derive(StableAbi)]
pub struct PluginHello {
    /// Minor the plugin was built at.
    pub abi_minor: u32,
    /// Oldest host minor it can work with.
    pub needs_minor: u32,
    /// One of [`crate::kinds::plugin`].
    pub kind: u32,
    /// `FamilyTable` or `BackendTable`, by `kind`; lives as long as the process.
    #[sabi(unsafe_opaque_field)]
    pub table: *const (),
    /// Zero.
    pub reserved: [u64; 8],
}

/// Exports a root module made of three plain functions, each guarded against panics:
/// `metadata() -> &'static str`, `open(&HostHello) -> Result<PluginHello>` and
/// `query(&str) -> usize`.
#[macro_export]
macro_rules! export_plugin_root {
    (metadata: $metadata:expr, open: $open:expr, query: $query:expr $(,)?) => {
        const _: () = {
            use $crate::abi_stable;

            extern "C" fn root_metadata() -> abi_stable::std_types::RStr<'static> {
                let text = $crate::guard::catch(|| Ok($metadata()));
                abi_stable::std_types::RStr::from_str(text.unwrap_or(""))
            }

            extern "C" fn root_open(
                hello: &$crate::envelope::HostHello,
            ) -> abi_stable::std_types::RResult<
                $crate::envelope::PluginHello,
                abi_stable::std_types::RBoxError,
            > {
                match $crate::guard::catch(|| $open(hello)) {
                    Ok(hello) => abi_stable::std_types::RResult::ROk(hello),
                    Err(error) => abi_stable::std_types::RResult::RErr(
                        abi_stable::std_types::RBoxError::new(error),
                    ),
                }
            }

            extern "C" fn root_query(name: abi_stable::std_types::RStr<'_>) -> usize {
                $crate::guard::catch(|| Ok($query(name.as_str()))).unwrap_or(0)
            }

            fn root() -> $crate::envelope::PluginRootRef {
                use abi_stable::prefix_type::PrefixTypeTrait;
                $crate::envelope::PluginRoot { metadata: root_metadata, open: root_open, query: root_query }.leak_into_prefix()
            }

            extern "C" fn erased_root() -> abi_stable::library::RootModuleResult {
                abi_stable::library::__call_root_module_loader(root)
            }

            // The name and type are those that abi_stable's own export attribute generates; that
            // attribute is not used because it demands `abi_stable` as a direct dependency.
            // SAFETY: the constructor returns an erased `PluginRootRef`, as the type says.
            #[allow(non_upper_case_globals, unsafe_code)]
            #[unsafe(no_mangle)]
            pub static _1as_0lib_1header_0root_bmodule_bloader: abi_stable::library::LibHeader = unsafe {
                abi_stable::library::LibHeader::from_constructor::<$crate::envelope::PluginRootRef>(
                    erased_root,
                    abi_stable::library::CheckTypeLayout::Yes,
                )
            };
        };
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_symbol_is_the_one_abi_stable_looks_for() {
        assert_eq!(
            ROOT_SYMBOL,
            abi_stable::library::ROOT_MODULE_LOADER_NAME_WITH_NUL.as_bytes()
        );
    }
}
