//! Where the dynamic linker looks by itself: the environment's folders, its cache of names, the system's folders.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The cache that `ldconfig` writes.
const CACHE: &str = "/etc/ld.so.cache";
/// A cache is some hundred kilobytes.
const CACHE_CAP_BYTES: u64 = 16 << 20;
/// Starts the cache's part that is read.
const CACHE_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Bytes before its entries, and of one entry.
const CACHE_HEADER_BYTES: usize = 48;
const CACHE_ENTRY_BYTES: usize = 24;

/// Places of the dynamic linker of this system.
#[derive(Debug, Clone, Default)]
pub struct SystemLibraries {
    /// Folders that the environment names.
    pub environment: Vec<PathBuf>,
    /// Places of libraries by name.
    pub cache: HashMap<String, Vec<PathBuf>>,
    /// Folders that are always looked into.
    pub folders: Vec<PathBuf>,
}

impl SystemLibraries {
    /// Those of this process.
    pub fn of_process() -> Self {
        let environment = std::env::var_os("LD_LIBRARY_PATH")
            .map(|list| std::env::split_paths(&list).collect())
            .unwrap_or_default();
        let arch = std::env::consts::ARCH;
        let folders = [
            format!("/lib/{arch}-linux-gnu"),
            format!("/usr/lib/{arch}-linux-gnu"),
            "/lib64".to_owned(),
            "/usr/lib64".to_owned(),
            "/lib".to_owned(),
            "/usr/lib".to_owned(),
        ];
        let mut folders: Vec<PathBuf> = folders.map(PathBuf::from).to_vec();
        if cfg!(target_env = "musl") {
            folders.push(PathBuf::from("/usr/local/lib"));
        }
        let cache = std::fs::metadata(CACHE)
            .ok()
            .filter(|about| about.len() <= CACHE_CAP_BYTES)
            .and_then(|_| std::fs::read(CACHE).ok());
        Self {
            environment,
            cache: cache.and_then(|bytes| cached(&bytes)).unwrap_or_default(),
            folders,
        }
    }

    /// Files that may be the library `name`, in the linker's order. `places` are those that the file which needs it names.
    pub(super) fn candidates(&self, name: &str, places: &[PathBuf]) -> Vec<PathBuf> {
        if name.contains('/') {
            return vec![PathBuf::from(name)];
        }
        let inside = |folder: &PathBuf| folder.join(name);
        // Which of the first two comes first depends on the file; a name is rarely in both.
        let mut all: Vec<PathBuf> = places.iter().map(inside).collect();
        all.extend(self.environment.iter().map(inside));
        all.extend(self.cache.get(name).into_iter().flatten().cloned());
        all.extend(self.folders.iter().map(inside));
        all
    }
}

/// Names and places of a cache. `None` for one of another form.
fn cached(bytes: &[u8]) -> Option<HashMap<String, Vec<PathBuf>>> {
    // An older form may stand before the one that is read, whose texts are counted from its own start.
    let start = bytes
        .windows(CACHE_MAGIC.len())
        .position(|window| window == CACHE_MAGIC)?;
    let bytes = bytes.get(start..)?;
    let number = |at: usize| -> Option<usize> {
        let four = bytes.get(at..at.checked_add(4)?)?;
        Some(u32::from_ne_bytes(four.try_into().ok()?) as usize)
    };
    let text = |at: usize| -> Option<String> {
        let rest = bytes.get(at..)?;
        let end = rest.iter().position(|&byte| byte == 0)?;
        Some(String::from_utf8_lossy(rest.get(..end)?).into_owned())
    };
    let mut all: HashMap<String, Vec<PathBuf>> = HashMap::new();
    for index in 0..number(CACHE_MAGIC.len())? {
        let entry = CACHE_HEADER_BYTES.checked_add(index.checked_mul(CACHE_ENTRY_BYTES)?)?;
        let (name, place) = (text(number(entry + 4)?)?, text(number(entry + 8)?)?);
        all.entry(name)
            .or_default()
            .push(Path::new(&place).to_path_buf());
    }
    Some(all)
}
