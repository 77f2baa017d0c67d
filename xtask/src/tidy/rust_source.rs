//! Rust text without its comments and literals, so that a word in a comment is not taken for code.
//!
//! A small scanner, not a parser: it knows nested block comments, strings, raw strings, byte and C strings, characters and
//! lifetimes. Every blanked byte becomes a space and line breaks stay, so line numbers hold.

/// The same number of lines; comments and the inside of literals are spaces.
pub fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = token_end(bytes, at);
        if let Some(end) = end {
            for byte in bytes.get(at..end).unwrap_or_default() {
                out.push(if *byte == b'\n' { b'\n' } else { b' ' });
            }
            at = end;
        } else {
            out.extend(bytes.get(at));
            at += 1;
        }
    }
    // Blanked ranges begin and end at ASCII characters, so what is left is valid.
    String::from_utf8_lossy(&out).into_owned()
}

/// Where the comment or literal that starts at `at` ends; `None` if none starts there.
fn token_end(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = bytes.get(at..)?;
    if rest.starts_with(b"//") {
        return Some(find(bytes, at, b'\n').unwrap_or(bytes.len()));
    }
    if rest.starts_with(b"/*") {
        return Some(block_comment_end(bytes, at));
    }
    let starts_word = at == 0 || !is_word(byte(bytes, at - 1));
    match byte(bytes, at) {
        b'"' => Some(string_end(bytes, at + 1)),
        b'\'' => char_end(bytes, at),
        b'r' | b'b' | b'c' if starts_word => prefixed_string_end(bytes, at),
        _ => None,
    }
}

/// `r"..."`, `r#"..."#`, `b"..."`, `br#"..."#`, `c"..."`, `b'x'`.
fn prefixed_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    let mut next = at;
    while matches!(byte(bytes, next), b'r' | b'b' | b'c') && next - at < 2 {
        next += 1;
    }
    let raw = byte(bytes, next - 1) == b'r';
    if raw {
        let mut hashes = 0;
        while byte(bytes, next + hashes) == b'#' {
            hashes += 1;
        }
        if byte(bytes, next + hashes) != b'"' {
            return None;
        }
        return Some(raw_string_end(bytes, next + hashes + 1, hashes));
    }
    match byte(bytes, next) {
        b'"' => Some(string_end(bytes, next + 1)),
        b'\'' => char_end(bytes, next),
        _ => None,
    }
}

fn raw_string_end(bytes: &[u8], from: usize, hashes: usize) -> usize {
    let mut at = from;
    while at < bytes.len() {
        let closes =
            byte(bytes, at) == b'"' && (1..=hashes).all(|offset| byte(bytes, at + offset) == b'#');
        if closes {
            return at + 1 + hashes;
        }
        at += 1;
    }
    bytes.len()
}

fn string_end(bytes: &[u8], from: usize) -> usize {
    let mut at = from;
    while at < bytes.len() {
        match byte(bytes, at) {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// A character literal, or `None` for a lifetime.
fn char_end(bytes: &[u8], at: usize) -> Option<usize> {
    if byte(bytes, at + 1) == b'\\' {
        return find(bytes, at + 3, b'\'').map(|end| end + 1);
    }
    // One character of at most four bytes, then the closing quote.
    let width = match byte(bytes, at + 1) {
        0..=0x7f => 1,
        0x80..=0xdf => 2,
        0xe0..=0xef => 3,
        _ => 4,
    };
    (byte(bytes, at + 1 + width) == b'\'').then_some(at + 2 + width)
}

fn block_comment_end(bytes: &[u8], at: usize) -> usize {
    let (mut at, mut depth) = (at, 0_usize);
    while at < bytes.len() {
        let rest = bytes.get(at..).unwrap_or_default();
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

/// 0 past the end, which is part of no token.
fn byte(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

fn find(bytes: &[u8], from: usize, wanted: u8) -> Option<usize> {
    let rest = bytes.get(from..)?;
    rest.iter()
        .position(|byte| *byte == wanted)
        .map(|offset| from + offset)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Lines (from 1) on which `word` stands as a whole word in code.
pub fn lines_with_word(code: &str, word: &str) -> Vec<usize> {
    code.lines()
        .enumerate()
        .filter(|(_, line)| has_word(line, word))
        .map(|(index, _)| index + 1)
        .collect()
}

fn has_word(line: &str, word: &str) -> bool {
    let bytes = line.as_bytes();
    line.match_indices(word).any(|(at, _)| {
        let before = at.checked_sub(1).map_or(0, |before| byte(bytes, before));
        !is_word(before) && !is_word(byte(bytes, at + word.len()))
    })
}

/// Names in `#[cfg(test)] mod name;`, as rustfmt lays them out.
pub fn test_module_names(code: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut previous = "";
    for line in code.lines().map(str::trim) {
        if previous == "#[cfg(test)]" {
            let name = line
                .split_once("mod ")
                .and_then(|(_, rest)| rest.strip_suffix(';'));
            names.extend(name);
        }
        previous = line;
    }
    names
}

/// The lines of `#[cfg(test)] mod ... { }` blocks, as rustfmt lays them out (closing brace at the indent of `mod`).
pub fn test_module_lines(code: &str) -> usize {
    let lines: Vec<&str> = code.lines().collect();
    let mut count = 0;
    let mut at = 0;
    while let Some(line) = lines.get(at) {
        let indent = line.len() - line.trim_start().len();
        let next = lines.get(at + 1).map_or("", |next| next.trim_start());
        let opens = line.trim() == "#[cfg(test)]"
            && (next.starts_with("mod ") || next.starts_with("pub mod "))
            && next.ends_with('{');
        if !opens {
            at += 1;
            continue;
        }
        let closes = |line: &&str| line.trim() == "}" && line.len() - 1 == indent;
        let length = lines
            .iter()
            .skip(at)
            .position(closes)
            .map_or(lines.len() - at, |offset| offset + 1);
        count += length;
        at += length;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_in_place() {
        let text = "let a = \"x // y\"; // unsafe\n/* unsafe /* deep */ unsafe */ let b = 'c';\n";
        let code = code_only(text);
        assert_eq!(code.lines().count(), text.lines().count());
        assert_eq!(code.len(), text.len());
        assert!(!code.contains("unsafe") && !code.contains('x') && !code.contains("'c'"));
        assert!(code.contains("let a =") && code.contains("let b ="));
    }

    #[test]
    fn raw_strings_escapes_and_lifetimes() {
        let code = code_only(
            r####"fn f<'a>(x: &'a str) { g(r#"un"safe"#, "a\"b", b'\'', '\u{1F600}', '"', 'é'); unsafe_name(); }"####,
        );
        assert!(code.contains("fn f<'a>(x: &'a str)"), "{code}");
        assert!(code.contains("unsafe_name();"), "{code}");
        assert!(
            !code.contains("un\"safe") && !code.contains("1F600"),
            "{code}"
        );
    }

    #[test]
    fn a_word_is_whole() {
        let code = "deny(unsafe_code)\nunsafe { x }\nlet not_unsafe = 1;\n";
        assert_eq!(lines_with_word(code, "unsafe"), [2]);
    }

    #[test]
    fn unterminated_text_ends_with_the_file() {
        for text in ["\"abc", "r#\"abc\"", "/* abc", "'", "b'", "r", "// x"] {
            assert_eq!(code_only(text).len(), text.len(), "{text}");
        }
    }

    #[test]
    fn test_modules_are_counted_to_their_closing_brace() {
        let code = "fn a() {\n}\n#[cfg(test)]\nmod tests {\n    fn b() {\n    }\n}\nfn c() {}\n";
        assert_eq!(test_module_lines(code), 5);
        assert_eq!(test_module_lines("#[cfg(test)]\nmod tests;\n"), 0);
        assert_eq!(test_module_lines("#[cfg(test)]\nmod tests {\n"), 2);
    }
}
