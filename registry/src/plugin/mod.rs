//! Plugins on disk: where they are looked for, what their files say, and the state each ends in.
//!
//! Owns discovery, the reading of embedded metadata and the catalogue. Runs no code of a plugin and
//! must not know how a library is opened: that is the host's `plugin` module.

mod catalogue;
mod digest;
mod discover;
mod filter;
mod linkage;
mod metadata;
mod needed;
mod object_file;
mod peek;
mod reason;
mod report;
mod search;
mod system_libraries;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::files as test_files;

pub use catalogue::{Catalogue, CatalogueError, PluginRecord, State};
pub use digest::sha256_of_file;
pub use discover::{Discovery, FileId, FoundFile, PlaceNote, PlaceProblem, discover, name_in_file};
pub use filter::{DISABLE, Filter, FilterError, SELECT};
pub use linkage::{Linkage, linkage};
pub use metadata::{
    ArchRecord, METADATA_CAP_BYTES, Metadata, MetadataError, PluginInfo, PluginKind, parse_metadata,
};
pub use needed::{Needed, needed_libraries};
pub use peek::{HostProfile, Peek, peek, peek_reader};
pub use reason::{ReasonCode, Rejection, Stage};
pub use report::plugins_document;
pub use search::{SearchInputs, Tier};
pub use system_libraries::SystemLibraries;
