//! sha256 of files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::Error;

/// Lower-case hexadecimal sha256 of a file.
pub fn sha256_of(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 20];
    loop {
        let count = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if count == 0 {
            break;
        }
        hash.update(buffer.get(..count).unwrap_or_default());
    }
    Ok(hex(&hash.finalize()))
}

/// An error that names both values unless the file has the expected sha256.
pub fn verify(path: &Path, expected: &str) -> Result<(), Error> {
    let found = sha256_of(path)?;
    if found == expected {
        return Ok(());
    }
    Err(Error::Digest {
        path: path.to_path_buf(),
        expected: expected.to_owned(),
        found,
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_a_known_text() {
        let path = std::env::temp_dir().join(format!("xtask-digest-{}", std::process::id()));
        std::fs::write(&path, b"abc").expect("writes");
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256_of(&path).expect("hashes"), expected);
        verify(&path, expected).expect("equal");
        let error = verify(&path, "00").expect_err("differs").to_string();
        assert!(error.contains("expected sha256 00") && error.contains(expected));
        std::fs::remove_file(&path).expect("removes");
    }
}
