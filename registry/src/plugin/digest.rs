//! The hash by which a plugin file is pinned.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

/// SHA-256 of the whole file, in lower-case hexadecimal.
pub fn sha256_of_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut block = vec![0u8; 1 << 18];
    loop {
        match file.read(&mut block)? {
            0 => break,
            n => hasher.update(block.get(..n).unwrap_or_default()),
        }
    }
    let digest = hasher.finalize();
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}
