//! Read-only memory maps of checkpoint files: one of the two places of this crate with `unsafe`.
//!
//! Owns the mapping. Must not know what the bytes mean.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

/// A regular file, mapped read-only for as long as this lives.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps a regular file (links are followed). Reads none of its pages.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Asked before opening: opening a FIFO would wait for its writer.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "expected a regular file",
            ));
        }
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            // An empty file has no pages to map.
            return Ok(MappedFile {
                path: path.to_owned(),
                map: None,
            });
        }
        // SAFETY: the map is private to this process and never written through. What this process
        // cannot rule out is another process that changes or truncates the file meanwhile: changed
        // bytes are only ever read as plain numbers after the header was copied out, so no invariant
        // of the language rests on them; a truncated file makes the read fault (SIGBUS), which the
        // model store avoids by replacing files with an atomic rename and never writing in place.
        let map = unsafe { Mmap::map(&file)? };
        Ok(MappedFile {
            path: path.to_owned(),
            map: Some(map),
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets go of the pages of a range that were read and are not needed for now; they stay in the
    /// system's cache of the file and come back when they are read again. Without it a file that is
    /// repacked while it is loaded would count twice in the resident size.
    pub fn release(&self, range: std::ops::Range<usize>) {
        #[cfg(unix)]
        if let Some(map) = &self.map {
            let end = range.end.min(map.len());
            let start = range.start;
            if start < end {
                // SAFETY: the map is shared, read-only and backed by its file, so that dropped pages
                // are read from it again, with the same bytes. Advice that is refused changes
                // nothing.
                let _ = unsafe {
                    map.unchecked_advise_range(
                        memmap2::UncheckedAdvice::DontNeed,
                        start,
                        end - start,
                    )
                };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_come_back_with_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let content: Vec<u8> = (0..400_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let file = MappedFile::open(&path).unwrap();
        assert_eq!(file.bytes(), content);
        for range in [0..400_000, 5..70_000, 399_000..900_000, 3..3] {
            file.release(range);
            assert_eq!(file.bytes(), content);
        }
    }

    #[test]
    fn maps_files_and_refuses_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        std::fs::write(&file, b"abc").unwrap();
        assert_eq!(MappedFile::open(&file).unwrap().bytes(), b"abc");

        let empty = dir.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        assert_eq!(MappedFile::open(&empty).unwrap().bytes(), b"");

        let error = MappedFile::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let error = MappedFile::open(&dir.path().join("none")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
