//! Files that one person can hold in mind.

use super::files::TextFile;
use super::{Finding, rust_source};

const WARN_LINES: usize = 600;
const FAIL_LINES: usize = 800;

pub fn check(file: &TextFile) -> Option<Finding> {
    let is_code = file.is_rust()
        || matches!(
            file.extension(),
            "cpp" | "cc" | "h" | "hpp" | "cu" | "cuh" | "metal"
        );
    if !is_code || file.is_test() {
        return None;
    }
    let tests = file
        .code
        .as_deref()
        .map_or(0, rust_source::test_module_lines);
    let lines = file.text.lines().count() - tests;
    let message = format!(
        "{lines} lines without tests (warning above {WARN_LINES}, error above {FAIL_LINES}); split it by idea"
    );
    if lines > FAIL_LINES {
        Some(Finding::error(file, 0, message))
    } else if lines > WARN_LINES {
        Some(Finding::warning(file, 0, message))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    #[test]
    fn long_files_are_told_and_tests_are_not_counted() {
        let of = |path: &str, code: usize, tests: usize| {
            let text = format!(
                "{}#[cfg(test)]\nmod tests {{\n{}}}\n",
                "x();\n".repeat(code),
                "    y();\n".repeat(tests)
            );
            check(&TextFile::new(path, text)).map(|finding| finding.severity)
        };
        assert_eq!(of("host/src/a.rs", 600, 5_000), None);
        assert_eq!(of("host/src/a.rs", 601, 0), Some(Severity::Warning));
        assert_eq!(of("host/src/a.rs", 801, 0), Some(Severity::Error));
        assert_eq!(of("tests/src/a.rs", 5_000, 0), None);
        assert_eq!(of("docs/a.md", 5_000, 0), None);
    }
}
