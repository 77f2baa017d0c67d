//! Names that stand in files of others, as messages quote them.

use serde_json::Value;

/// Most characters of a name that a message repeats.
const SHOWN_CHARACTERS: usize = 64;

/// `text` in quotation marks, with control characters and marks of writing direction escaped and no more than a
/// line of it.
pub fn quoted(text: &str) -> String {
    let shown: String = text.chars().take(SHOWN_CHARACTERS).collect();
    if shown.len() == text.len() {
        return format!("{text:?}");
    }
    format!("{shown:?}... ({} characters)", text.chars().count())
}

/// A value of a JSON file as it stands there, in the same bounds.
pub fn shown(value: &Value) -> String {
    if let Value::String(text) = value {
        return quoted(text);
    }
    let text = value.to_string();
    let mut characters = text.chars();
    let mut head = String::new();
    for c in characters.by_ref().take(SHOWN_CHARACTERS) {
        match c {
            '"' | '\'' | '\\' => head.push(c),
            // JSON itself escapes only some of what a terminal obeys.
            other => head.extend(other.escape_debug()),
        }
    }
    match characters.count() {
        0 => head,
        rest => format!("{head}... ({} characters)", SHOWN_CHARACTERS + rest),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{quoted, shown};

    #[test]
    fn names_are_escaped_and_cut() {
        assert_eq!(quoted("llama"), r#""llama""#);
        assert_eq!(
            quoted("a\x1b[2J\u{9b}\u{202e}\n\"b"),
            r#""a\u{1b}[2J\u{9b}\u{202e}\n\"b""#
        );
        assert_eq!(quoted(&"é".repeat(64)), format!("{:?}", "é".repeat(64)));
        assert_eq!(
            quoted(&"é".repeat(65)),
            format!("{:?}... (65 characters)", "é".repeat(64))
        );
    }

    #[test]
    fn values_are_shown_as_their_files_have_them() {
        let values = [
            json!("a\nb"),
            json!(3),
            json!(["it's", "\\"]),
            json!({"a\u{9b}": null}),
        ];
        insta::assert_snapshot!(values.each_ref().map(shown).join("\n"), @r#"
        "a\nb"
        3
        ["it's","\\"]
        {"a\u{9b}":null}
        "#);
        let long = json!(vec![1; 100]);
        assert_eq!(
            shown(&long),
            format!("[{}1... (201 characters)", "1,".repeat(31))
        );
    }
}
