//! Unsafe code stays where the boundary to other machine code is; everywhere else the compiler's proof holds.

use super::Finding;
use super::files::TextFile;
use super::rust_source::lines_with_word;

/// Folders that meet foreign code.
const ALLOWED_FOLDERS: [&str; 3] = ["abi/", "backends/", "host/src/plugin/"];

/// Mapping a file into memory is unsafe by nature (another process may cut it), and so is handing out
/// parts of a map on large pages: one module each.
const MAPPING_MODULES: [&str; 2] = [
    "registry/src/checkpoint/map.rs",
    "registry/src/checkpoint/region.rs",
];

pub fn check(file: &TextFile) -> Vec<Finding> {
    let Some(code) = &file.code else {
        return Vec::new();
    };
    let allowed = ALLOWED_FOLDERS
        .iter()
        .any(|folder| file.path.starts_with(folder))
        || file.is_in_test_folder();
    if allowed || MAPPING_MODULES.contains(&file.path.as_str()) {
        return Vec::new();
    }
    lines_with_word(code, "unsafe")
        .into_iter()
        .map(|line| {
            Finding::error(
                file,
                line,
                "unsafe code outside abi, backends, host/src/plugin and the registry's two modules of memory maps",
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_is_found_in_code_only_and_only_where_it_is_not_allowed() {
        let text = "// unsafe\nlet s = \"unsafe\";\nunsafe { f() }\n";
        let lines = |path: &str| -> Vec<usize> {
            check(&TextFile::new(path, text.to_owned()))
                .into_iter()
                .map(|finding| finding.line)
                .collect()
        };
        assert_eq!(lines("families/llama/src/model.rs"), [3]);
        assert_eq!(lines("registry/src/lib.rs"), [3]);
        for path in [
            "abi/sdk/src/tensor.rs",
            "host/src/plugin/load.rs",
            MAPPING_MODULES[0],
            MAPPING_MODULES[1],
            // Broken plugins, allocators that count.
            "tests/plugins/faulty/src/lib.rs",
            "registry/tests/fuzz.rs",
        ] {
            assert!(lines(path).is_empty(), "{path}");
        }
    }
}
