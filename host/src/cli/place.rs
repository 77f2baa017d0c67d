//! Where things are on this machine, after flags and environment: the store, the cache, the plugins.

use std::path::PathBuf;

use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use mlxcel_registry::store::{Store, StoreEnv};

use crate::plugin::{Loader, LoaderOptions, ProbeSettings};

use super::args::{PluginArgs, StoreArgs};
use super::console::Console;
use super::error::CliError;

/// The model store.
pub fn open_store(args: &StoreArgs) -> Result<Store, CliError> {
    let env = StoreEnv::from_process()?;
    Ok(match &args.models_dir {
        Some(root) => Store::with_root(env, root.clone()),
        None => Store::new(env),
    })
}

/// The folder of the product's own caches: answers of probes, the history of the chat.
pub fn cache_root(env: &StoreEnv) -> Option<PathBuf> {
    env.cache_dir.clone().or_else(|| {
        env.home
            .as_ref()
            .map(|home| home.join(".cache").join("mlxcel"))
    })
}

/// Where plugins are looked for.
pub fn search_inputs(args: &PluginArgs) -> SearchInputs {
    SearchInputs::from_process(args.plugin.clone(), args.plugins_dir.clone())
}

/// Every plugin found. A folder that a flag names has to be there; what its files are like is theirs to tell.
pub fn found(args: &PluginArgs) -> Result<Catalogue, CliError> {
    let catalogue = Catalogue::build(&search_inputs(args), HostProfile::CURRENT)?;
    catalogue.require_places()?;
    Ok(catalogue)
}

/// As [`found`], for commands that show plugins. What a variable names and what is left out of the standard places
/// for a reason is a warning.
pub fn catalogue(args: &PluginArgs, console: &Console) -> Result<Catalogue, CliError> {
    let catalogue = found(args)?;
    for note in catalogue.notes().iter().filter(|note| note.is_notable()) {
        console.warning(&note.text);
    }
    Ok(catalogue)
}

/// As [`catalogue`], for commands that use plugins: a file that a flag names has to be usable.
pub fn usable_catalogue(args: &PluginArgs, console: &Console) -> Result<Catalogue, CliError> {
    let catalogue = catalogue(args, console)?;
    catalogue.require_explicit()?;
    Ok(catalogue)
}

/// A loader that tries new files in a child process first.
pub fn loader() -> Result<Loader, CliError> {
    let cache = cache_root(&StoreEnv::from_process()?).map(|root| root.join("probes"));
    let settings = ProbeSettings::from_process(cache).map_err(|source| CliError::System {
        action: "find this program's own file",
        source,
    })?;
    Ok(Loader::new(LoaderOptions {
        probe: Some(settings),
    }))
}
