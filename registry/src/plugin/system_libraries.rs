//! Where the dynamic linker looks by itself: the environment's folders, its cache of names, the system's folders.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The cache that `ldconfig` writes.
const CACHE: &str = "/etc/ld.so.cache";
/// A cache is some hundred kilobytes.
const CACHE_CAP_BYTES: u64 = 16 << 20;
/// Most bytes of one text, and of all that are taken over: entries may share their texts.
const TEXT_CAP_BYTES: usize = 4096;
const TEXTS_CAP_BYTES: usize = 64 << 20;
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
    /// Folders that come before each of these and of a file's own, inside of it: libraries for processors such as this one.
    pub subfolders: Vec<&'static str>,
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
        Self {
            environment,
            cache: cache_at(Path::new(CACHE)),
            folders,
            subfolders: subfolders(),
        }
    }

    /// Files that may be the library `name`, in the linker's order. `places` are those that the file which needs it names; `None`
    /// stands for what is not known.
    pub(super) fn candidates<'a>(
        &'a self,
        name: &'a str,
        places: &'a [Option<PathBuf>],
    ) -> impl Iterator<Item = Option<PathBuf>> + 'a {
        // Which of the first two comes first depends on the file; a name is rarely in both.
        let environment = self.environment.iter().map(|folder| {
            // The linker puts something in for words such as $LIB here too.
            let has_word = folder.as_os_str().as_encoded_bytes().contains(&b'$');
            (!has_word).then_some(folder)
        });
        let named = places.iter().map(Option::as_ref).chain(environment);
        let cached = self.cache.get(name).into_iter().flatten().cloned();
        let own = self.folders.iter().map(Some);
        named
            .flat_map(move |folder| self.inside(folder, name))
            .chain(cached.map(Some))
            .chain(own.flat_map(move |folder| self.inside(folder, name)))
    }

    /// Files of one folder that may be the library `name`.
    fn inside<'a>(
        &'a self,
        folder: Option<&'a PathBuf>,
        name: &'a str,
    ) -> impl Iterator<Item = Option<PathBuf>> + 'a {
        // One that is not known is looked at once.
        let before = match folder {
            Some(_) => self.subfolders.as_slice(),
            None => &[],
        };
        let before = before
            .iter()
            .map(move |part| Some(folder?.join(part).join(name)));
        before.chain([folder.map(|folder| folder.join(name))])
    }
}

/// Those that glibc looks into on this processor, best first.
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
fn subfolders() -> Vec<&'static str> {
    let is_v2 = is_x86_feature_detected!("cmpxchg16b")
        && is_x86_feature_detected!("popcnt")
        && is_x86_feature_detected!("ssse3")
        && is_x86_feature_detected!("sse4.2");
    let is_v3 = is_v2
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("movbe");
    let is_v4 = is_v3
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512cd")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let levels = [
        (is_v4, "glibc-hwcaps/x86-64-v4"),
        (is_v3, "glibc-hwcaps/x86-64-v3"),
        (is_v2, "glibc-hwcaps/x86-64-v2"),
    ];
    let able = levels.into_iter().filter(|(is_able, _)| *is_able);
    able.map(|(_, folder)| folder).collect()
}

/// Other linkers have none.
#[cfg(not(all(target_arch = "x86_64", target_env = "gnu")))]
fn subfolders() -> Vec<&'static str> {
    Vec::new()
}

/// Names and places of the cache at `path`. None for what is not there, or is no cache.
fn cache_at(path: &Path) -> HashMap<String, Vec<PathBuf>> {
    let read = || {
        // Reading anything else may wait for ever, or have no end.
        if !path.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        let file = File::open(path).ok()?;
        file.take(CACHE_CAP_BYTES).read_to_end(&mut bytes).ok()?;
        cached(&bytes)
    };
    read().unwrap_or_default()
}

/// Names and places of a cache, without entries that cannot be read. `None` for one of another form.
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
        let end = rest
            .iter()
            .take(TEXT_CAP_BYTES)
            .position(|&byte| byte == 0)?;
        Some(String::from_utf8_lossy(rest.get(..end)?).into_owned())
    };
    let entries = bytes.get(CACHE_HEADER_BYTES..)?;
    let count = number(CACHE_MAGIC.len())?.min(entries.len() / CACHE_ENTRY_BYTES);
    let mut all: HashMap<String, Vec<PathBuf>> = HashMap::new();
    let mut texts_bytes = 0;
    for index in 0..count {
        let entry = CACHE_HEADER_BYTES + index * CACHE_ENTRY_BYTES;
        let at = |field: usize| number(entry + field).and_then(text);
        let (Some(name), Some(place)) = (at(4), at(8)) else {
            continue;
        };
        texts_bytes += name.len() + place.len();
        if texts_bytes > TEXTS_CAP_BYTES {
            break;
        }
        all.entry(name).or_default().push(PathBuf::from(place));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache with these names and places; a number past its end is an entry that cannot be read.
    fn cache(entries: &[(u32, u32)], texts: &[u8]) -> Vec<u8> {
        let mut bytes = CACHE_MAGIC.to_vec();
        bytes.extend_from_slice(&(entries.len() as u32).to_ne_bytes());
        bytes.resize(CACHE_HEADER_BYTES, 0);
        let texts_at = (bytes.len() + entries.len() * CACHE_ENTRY_BYTES) as u32;
        for (name, place) in entries {
            let end = bytes.len() + CACHE_ENTRY_BYTES;
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(&(texts_at + name).to_ne_bytes());
            bytes.extend_from_slice(&(texts_at + place).to_ne_bytes());
            bytes.resize(end, 0);
        }
        bytes.extend_from_slice(texts);
        bytes
    }

    #[test]
    fn a_bad_entry_does_not_hide_the_others() {
        let entries = [(0, 2), (0, 9999), (9999, 2), (3, 2)];
        let all = cached(&cache(&entries, b"a\0/b\0")).unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all["a"], [Path::new("/b")]);
        assert_eq!(all["b"], [Path::new("/b")]);
    }

    #[test]
    fn entries_that_share_a_long_text_are_taken_over_up_to_a_limit() {
        let texts = [[b'a'; 4000].as_slice(), b"\0"].concat();
        let all = cached(&cache(&[(0, 0); 10_000], &texts)).unwrap();
        let places: usize = all.values().map(Vec::len).sum();
        assert_eq!(places, TEXTS_CAP_BYTES / 8000);
    }

    #[test]
    fn what_is_no_file_is_not_read() {
        for path in ["/dev/zero", "/", "/nonexistent"] {
            assert!(cache_at(Path::new(path)).is_empty(), "{path}");
        }
    }
}
