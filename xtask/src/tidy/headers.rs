//! Every module says what it owns: a `//!` comment before any code.

use super::Finding;
use super::files::TextFile;

pub fn check(file: &TextFile) -> Option<Finding> {
    if !file.is_rust() || file.is_test() || !file.path.contains("src/") {
        return None;
    }
    let has_header = file
        .text
        .lines()
        .map(str::trim_start)
        .take_while(|line| line.is_empty() || line.starts_with("//") || line.starts_with("#!"))
        .any(|line| line.starts_with("//!") && line.len() > "//! ".len());
    (!has_header).then(|| {
        Finding::error(
            file,
            1,
            "no module documentation: begin with `//!`, what it owns and what it must not know",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_before_code() {
        let passes = |text: &str| check(&TextFile::new("a/src/b.rs", text.to_owned())).is_none();
        assert!(passes("//! What it owns.\n\nuse x;\n"));
        assert!(passes("// licence\n#![no_std]\n//! Words.\n"));
        assert!(!passes("use x;\n//! too late\n"));
        assert!(!passes("//!\nuse x;\n"));
        assert!(!passes(""));
    }
}
