//! The few things a download asks of a disk, behind a trait so that a test can fill it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

/// Where bytes go.
pub(super) trait Disk: Send + Sync {
    /// Bytes that may still be written below `dir`, which exists.
    fn free_bytes(&self, dir: &Path) -> io::Result<u64>;

    /// Opens a file to append after its first `keep_bytes`; creates it if need be.
    fn open_part(&self, path: &Path, keep_bytes: u64) -> io::Result<Box<dyn PartFile>>;
}

/// A file being written.
pub(super) trait PartFile: Write {
    /// Makes what was written durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl PartFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// The file system.
pub(super) struct SystemDisk;

impl Disk for SystemDisk {
    #[cfg(unix)]
    fn free_bytes(&self, dir: &Path) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(dir)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    #[cfg(not(unix))]
    fn free_bytes(&self, _dir: &Path) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    fn open_part(&self, path: &Path, keep_bytes: u64) -> io::Result<Box<dyn PartFile>> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        file.set_len(keep_bytes)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Box::new(file))
    }
}

/// Whether an error means that there is no room.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}
