//! What cached keys and values depend on, as one digest: checkpoint, plugins, and how the caches are laid out.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use super::prefix_disk::Digest32;

/// Bytes of every file of a checkpoint that are looked at: configurations and headers of weights are in them. What is
/// behind is told by length and time.
const LOOKED_AT_BYTES: u64 = 1 << 20;

/// A digest of parts that cannot be confused with each other.
pub struct Fingerprint(Sha256);

impl Fingerprint {
    /// Of nothing.
    pub fn new() -> Self {
        Self(Sha256::new())
    }

    /// Adds bytes, with their length.
    pub fn add(&mut self, part: impl AsRef<[u8]>) {
        let part = part.as_ref();
        self.0.update((part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    /// Adds the whole content of a file.
    pub fn add_content(&mut self, path: &Path) -> io::Result<()> {
        let mut content = Sha256::new();
        let mut file = File::open(path)?;
        let mut buffer = vec![0; 1 << 16];
        loop {
            let len = file.read(&mut buffer)?;
            if len == 0 {
                break;
            }
            content.update(buffer.get(..len).unwrap_or_default());
        }
        self.add(content.finalize());
        Ok(())
    }

    /// Adds a checkpoint: a file, or the files of a folder.
    pub fn add_checkpoint(&mut self, path: &Path) -> io::Result<()> {
        let mut files: Vec<PathBuf> = if path.is_dir() {
            fs::read_dir(path)?
                .map(|file| Ok(file?.path()))
                .collect::<io::Result<_>>()?
        } else {
            vec![path.to_path_buf()]
        };
        files.retain(|file| file.is_file());
        files.sort();
        for file in files {
            let meta = file.metadata()?;
            let changed = meta.modified()?.duration_since(UNIX_EPOCH);
            self.add(file.file_name().unwrap_or_default().as_encoded_bytes());
            self.add(meta.len().to_le_bytes());
            self.add(changed.unwrap_or_default().as_nanos().to_le_bytes());
            let mut begin = Vec::new();
            File::open(&file)?
                .take(LOOKED_AT_BYTES)
                .read_to_end(&mut begin)?;
            self.add(begin);
        }
        Ok(())
    }

    /// The digest.
    pub fn finish(self) -> Digest32 {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &Path) -> Digest32 {
        let mut fingerprint = Fingerprint::new();
        fingerprint.add_checkpoint(path).unwrap();
        fingerprint.finish()
    }

    #[test]
    fn a_changed_checkpoint_has_another_fingerprint() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        fs::write(&file, "{}").unwrap();
        let first = of(dir.path());
        assert_eq!(of(dir.path()), first);
        fs::write(dir.path().join("weights"), "w").unwrap();
        let second = of(dir.path());
        assert_ne!(first, second);
        File::options()
            .write(true)
            .open(&file)
            .unwrap()
            .set_modified(UNIX_EPOCH)
            .unwrap();
        assert_ne!(of(dir.path()), second);
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let of = |parts: &[&str]| {
            let mut fingerprint = Fingerprint::new();
            parts.iter().for_each(|part| fingerprint.add(part));
            fingerprint.finish()
        };
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
    }
}
