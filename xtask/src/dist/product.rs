//! Where a folder and its archive are made, and how they take the place of what was there: whole, or not at all.

use std::path::{Path, PathBuf};

use super::archive;
use crate::error::Error;
use crate::fetch::install::{self, Lock, remove_tree};

/// Under the folder of products: what is not whole yet.
const MAKING: &str = ".making";

/// A product being made; what was made of one that fails is removed.
#[derive(Debug)]
pub struct Product {
    home: PathBuf,
    name: String,
    _lock: Lock,
}

impl Product {
    /// Waits for another that is being made in the same place, and sees that it can be written.
    pub fn begin(home: &Path, name: &str) -> Result<Self, Error> {
        install::writable(home)?;
        let lock = Lock::take(home)?;
        remove_tree(&home.join(MAKING))?;
        let product = Product {
            home: home.to_path_buf(),
            name: name.to_owned(),
            _lock: lock,
        };
        let folder = product.folder();
        std::fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        Ok(product)
    }

    /// What is to be filled.
    pub fn folder(&self) -> PathBuf {
        self.home.join(MAKING).join(&self.name)
    }

    /// Packs the folder, and puts it, the archive and its digest in place of earlier ones; returns the archive's path.
    pub fn finish(self, time: u64) -> Result<PathBuf, Error> {
        let making = self.home.join(MAKING);
        let packed = archive::pack(&making, &self.name, time)?;
        // There is never a digest beside an archive that it is not of.
        let digest = self.home.join(&packed.digest);
        if digest.exists() {
            std::fs::remove_file(&digest).map_err(Error::io("remove", &digest))?;
        }
        for file in [&packed.archive, &packed.digest] {
            let place = self.home.join(file);
            std::fs::rename(making.join(file), &place)
                .map_err(Error::io("move into place", &place))?;
        }
        let folder = self.home.join(&self.name);
        remove_tree(&folder)?;
        std::fs::rename(self.folder(), &folder).map_err(Error::io("move into place", &folder))?;
        Ok(self.home.join(packed.archive))
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // What is left is removed by the next one.
        let _ = remove_tree(&self.home.join(MAKING));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("xtask-product-{name}-{}", std::process::id()))
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(dir)
            .expect("lists")
            .map(|entry| {
                entry
                    .expect("is read")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }

    fn make(home: &Path, text: &str) -> PathBuf {
        let product = Product::begin(home, "thing-1.0").expect("begins");
        std::fs::write(product.folder().join("file"), text).expect("writes");
        product.finish(1_700_000_000).expect("finishes")
    }

    #[test]
    fn a_product_takes_the_place_of_the_one_before() {
        let home = home("replace");
        make(&home, "one");
        let archive = make(&home, "two");
        assert_eq!(archive, home.join("thing-1.0.tar.gz"));
        assert_eq!(
            names(&home),
            [
                ".lock",
                "thing-1.0",
                "thing-1.0.tar.gz",
                "thing-1.0.tar.gz.sha256"
            ]
        );
        let text = std::fs::read_to_string(home.join("thing-1.0/file")).expect("reads");
        assert_eq!(text, "two");
        let sum = std::fs::read_to_string(home.join("thing-1.0.tar.gz.sha256")).expect("reads");
        let found = crate::fetch::digest::sha256_of(&archive).expect("hashes");
        assert_eq!(sum, format!("{found}  thing-1.0.tar.gz\n"));
        std::fs::remove_dir_all(&home).expect("removes");
    }

    #[test]
    fn one_that_fails_leaves_the_one_before() {
        let home = home("fails");
        make(&home, "one");
        let before = names(&home);
        let product = Product::begin(&home, "thing-1.0").expect("begins");
        std::fs::write(product.folder().join("half"), "half").expect("writes");
        drop(product);
        assert_eq!(names(&home), before);
        // Cut off without a word, as by a signal.
        std::fs::create_dir_all(home.join(MAKING).join("thing-1.0/half")).expect("creates");
        make(&home, "two");
        assert_eq!(names(&home), before);
        assert_eq!(names(&home.join("thing-1.0")), ["file"]);
        std::fs::remove_dir_all(&home).expect("removes");
    }

    #[test]
    fn the_same_content_gives_the_same_archive() {
        let (one, two) = (home("same-1"), home("same-2"));
        let first = make(&one, "text");
        let product = Product::begin(&two, "thing-1.0").expect("begins");
        let file = product.folder().join("file");
        std::fs::write(&file, "text").expect("writes");
        // Another time and other rights for others, as on another machine.
        std::fs::File::options()
            .write(true)
            .open(&file)
            .and_then(|file| {
                file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(99))
            })
            .expect("sets");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("sets");
        }
        let second = product.finish(1_700_000_000).expect("finishes");
        if cfg!(target_os = "linux") {
            let bytes = |path: &Path| std::fs::read(path).expect("reads");
            assert!(bytes(&first) == bytes(&second));
        }
        for home in [one, two] {
            std::fs::remove_dir_all(&home).expect("removes");
        }
    }
}
