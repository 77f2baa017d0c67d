//! `docs/ADDING_AN_ARCHITECTURE.md` shows real code: every block is found in the files it speaks of, which
//! are compiled and run like everything else.

const PAGE: &str = include_str!("../../../docs/ADDING_AN_ARCHITECTURE.md");
const FILES: [&str; 3] = [
    include_str!("../src/arcee.rs"),
    include_str!("rules.rs"),
    include_str!("../../../tests/tests/goldens/llama.rs"),
];

/// Blocks of Rust, without the indentation of the list they may stand in.
fn blocks() -> Vec<String> {
    let (mut found, mut open): (Vec<String>, Option<String>) = (Vec::new(), None);
    for line in PAGE.lines() {
        match (line.trim(), &mut open) {
            ("```rust", None) => open = Some(String::new()),
            ("```", Some(block)) => {
                found.push(block.trim_end().to_owned());
                open = None;
            }
            (_, Some(block)) => {
                let in_list = line.starts_with("   arcee");
                block.push_str(if in_list { line.trim() } else { line });
                block.push('\n');
            }
            _ => {}
        }
    }
    found
}

#[test]
fn every_block_of_the_walk_through_is_code_that_is_compiled() {
    let blocks = blocks();
    assert_eq!(blocks.len(), 7);
    for block in &blocks {
        let is_there = FILES.iter().any(|file| file.contains(block.as_str()));
        assert!(is_there, "in no file:\n{block}");
    }
}

/// Whoever types the blocks one after another has the file.
#[test]
fn the_blocks_are_the_whole_file() {
    let blocks = blocks().join("\n");
    let code = |line: &&str| !line.is_empty() && !line.trim_start().starts_with("//");
    let left: Vec<&str> = FILES[0]
        .lines()
        .filter(code)
        .filter(|line| !blocks.contains(line))
        .collect();
    assert!(left.is_empty(), "not on the page:\n{}", left.join("\n"));
}
