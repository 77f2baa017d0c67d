//! The disk tier with folders that are small, damaged, shared or gone.

use std::path::Path;

use super::*;

const PAGE: usize = 4;

fn open(dir: &Path, max_bytes: u64, model: u8) -> DiskTier {
    let options = DiskOptions {
        dir: dir.to_path_buf(),
        max_bytes,
    };
    DiskTier::open(options, [model; 32], PAGE).unwrap()
}

/// Writes the page at the end of `tokens` and waits for it.
fn write(mut tier: DiskTier, tokens: &[u32], payload: &[u8]) -> DiskStats {
    let (chain, key) = key(&tier, "", tokens);
    assert!(tier.write(&chain, (Part::Page, key), tokens, payload));
    tier.jobs.take();
    tier.writer.take().unwrap().join().unwrap();
    tier.stats()
}

fn key(tier: &DiskTier, namespace: &str, tokens: &[u32]) -> (KeyChain, Digest32) {
    let mut chain = tier.chain(namespace);
    let mut key = [0; 32];
    for page in tokens.chunks_exact(PAGE) {
        key = chain.next(page);
    }
    (chain, key)
}

fn read(tier: &DiskTier, namespace: &str, tokens: &[u32]) -> Option<Vec<u8>> {
    let (chain, key) = key(tier, namespace, tokens);
    tier.read(&chain, (Part::Page, &key), tokens, 5)
}

fn only_file(dir: &Path) -> PathBuf {
    let mut files: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    assert_eq!(files.len(), 1);
    files.remove(0)
}

#[test]
fn a_page_survives_and_belongs_to_one_model_and_one_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    write(open(dir.path(), 10_000, 1), &tokens, b"bytes");
    let tier = open(dir.path(), 10_000, 1);
    assert_eq!(read(&tier, "", &tokens).unwrap(), b"bytes");
    assert_eq!(read(&tier, "tenant", &tokens), None);
    assert_eq!(read(&tier, "", &tokens[4..]), None);
    assert_eq!((tier.stats().read_pages, tier.stats().files), (1, 1));
    let mut other = open(dir.path(), 10_000, 2);
    assert_eq!(read(&other, "", &tokens), None);
    // Another model's pages count, and stay when this one's are dropped.
    other.clear();
    assert_eq!(other.stats().files, 1);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = only_file(dir.path())
            .metadata()
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[test]
fn states_and_the_page_they_are_behind_are_apart() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = [1, 2, 3, 4];
    let mut tier = open(dir.path(), 10_000, 1);
    let (chain, page) = key(&tier, "", &tokens);
    let states = chain.states();
    assert_ne!(page, states);
    assert_ne!(states, key(&tier, "", &[1, 2, 3, 5]).0.states());
    for (part, key, payload) in [
        (Part::Page, page, b"bytes"),
        (Part::States, states, b"state"),
    ] {
        assert!(tier.write(&chain, (part, key), &tokens, payload));
    }
    tier.jobs.take();
    tier.writer.take().unwrap().join().unwrap();
    let read = |part, key| tier.read(&chain, (part, &key), &tokens, 5);
    assert_eq!(read(Part::Page, page).unwrap(), b"bytes");
    assert_eq!(read(Part::States, states).unwrap(), b"state");
    // A file of the other kind under this name is not what was asked for.
    let path = |key| tier.shared.path(key);
    fs::copy(path(&page), path(&states)).unwrap();
    assert_eq!(read(Part::States, states), None);
    assert_eq!(tier.stats().damaged_files, 1);
}

#[test]
fn damaged_pages_are_misses_and_are_deleted() {
    let tokens = [1, 2, 3, 4];
    for at in [0, 8, 40, 98, 110, 120] {
        let dir = tempfile::tempdir().unwrap();
        write(open(dir.path(), 10_000, 1), &tokens, b"bytes");
        let file = only_file(dir.path());
        let mut bytes = fs::read(&file).unwrap();
        bytes[at] ^= 1;
        fs::write(&file, bytes).unwrap();
        let tier = open(dir.path(), 10_000, 1);
        assert_eq!(read(&tier, "", &tokens), None, "{at}");
        assert_eq!(
            (tier.stats().damaged_files, tier.stats().files),
            (1, 0),
            "{at}"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    write(open(dir.path(), 10_000, 1), &tokens, b"bytes");
    let file = only_file(dir.path());
    File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(99)
        .unwrap();
    fs::write(dir.path().join("notes.txt"), "somebody's").unwrap();
    let tier = open(dir.path(), 10_000, 1);
    assert_eq!((tier.stats().damaged_files, tier.stats().files), (1, 0));
    assert_eq!(only_file(dir.path()).file_name().unwrap(), "notes.txt");
}

#[test]
fn a_page_that_vanishes_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    write(open(dir.path(), 10_000, 1), &[1, 2, 3, 4], b"bytes");
    let tier = open(dir.path(), 10_000, 1);
    fs::remove_file(only_file(dir.path())).unwrap();
    assert_eq!(read(&tier, "", &[1, 2, 3, 4]), None);
    assert_eq!((tier.stats().files, tier.stats().bytes), (0, 0));
}

#[test]
fn the_bound_holds_for_all_models_together() {
    let dir = tempfile::tempdir().unwrap();
    let size = write(open(dir.path(), 10_000, 1), &[1, 2, 3, 4], b"bytes").bytes;
    write(open(dir.path(), 10_000, 2), &[1, 2, 3, 4], b"bytes");
    let stats = write(open(dir.path(), 2 * size, 1), &[5, 6, 7, 8], b"bytes");
    assert_eq!(
        (stats.files, stats.bytes, stats.evicted_files),
        (2, 2 * size, 1)
    );
    let stats = write(open(dir.path(), size - 1, 1), &[9, 9, 9, 9], b"bytes");
    assert_eq!((stats.files, stats.written_pages), (0, 0));
}

#[test]
fn a_disk_that_takes_nothing_costs_pages_only() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(&dir.path().join("gone"), 10_000, 1);
    fs::remove_dir(dir.path().join("gone")).unwrap();
    let stats = write(tier, &[1, 2, 3, 4], b"bytes");
    assert_eq!(
        (stats.failed_writes, stats.written_pages, stats.files),
        (1, 0, 0)
    );
}
