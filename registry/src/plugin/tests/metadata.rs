//! The records: what is let through and what is refused.

use super::files::Described;
use crate::plugin::{METADATA_CAP_BYTES, parse_metadata};

fn parsed(text: &str) -> Result<crate::plugin::Metadata, String> {
    parse_metadata(text.as_bytes()).map_err(|error| error.to_string())
}

fn refused(text: &str) -> String {
    parsed(text).expect_err("refused")
}

fn with(from: &str, to: &str) -> String {
    let text = Described::family("llama", &["llama"]).metadata();
    assert!(text.contains(from), "{text}");
    text.replace(from, to)
}

#[test]
fn records_come_in_any_order_with_padding_between() {
    let text = Described::family("llama", &["mistral", "llama"]).metadata();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.reverse();
    let metadata = parsed(&lines.join("\n\0\0\0\n\r\n")).unwrap();
    assert_eq!(metadata.plugin.name, "llama");
    let ids: Vec<&str> = metadata.archs.iter().map(|arch| arch.id.as_str()).collect();
    assert_eq!(ids, ["llama", "mistral"]);
}

#[test]
fn what_a_newer_plugin_adds_is_kept() {
    let text = with(r#""panic""#, r#""mlx_version":"0.32.4","panic""#) + "\n{\"later\":{\"x\":1}}";
    let metadata = parsed(&text).unwrap();
    assert_eq!(metadata.plugin.extra["mlx_version"], "0.32.4");
    let text = with(r#""gguf""#, r#""quant":["mxfp4"],"gguf""#);
    assert_eq!(parsed(&text).unwrap().archs[0].extra["quant"][0], "mxfp4");
}

#[test]
fn optional_keys_have_defaults() {
    let arch = &parsed(&Described::family("x", &["x"]).metadata())
        .unwrap()
        .archs[0];
    assert_eq!(
        (arch.display_name.as_str(), arch.task.as_str()),
        ("x", "text-generation")
    );
    assert!(arch.kv_modes.is_empty() && !arch.tensor_parallel);
}

#[test]
fn wrong_types_are_refused() {
    insta::assert_snapshot!(refused(&with("[1,0]", "[1,0,0]")), @"metadata record 1: trailing characters at column 34");
    insta::assert_snapshot!(refused(&with("[1,0]", "[1,-1]")), @"metadata record 1: invalid value: integer `-1`, expected u32 at column 33");
    insta::assert_snapshot!(refused(&with(r#"["llama"],"gguf""#, r#""llama","gguf""#)), @r#"metadata record 2: invalid type: string "llama", expected a sequence at column 43"#);
    insta::assert_snapshot!(refused(&with(r#""version":"1.0.0""#, r#""version":"new""#)), @"metadata record 1: unexpected character 'n' while parsing major version number at column 96");
}

#[test]
fn records_that_contradict_are_refused() {
    let text = Described::family("a", &["x"]).metadata();
    insta::assert_snapshot!(refused(&format!("{text}\n{text}")), @"metadata has 2 plugin records, expected 1");
    insta::assert_snapshot!(refused(""), @"metadata has 0 plugin records, expected 1");
    let twice = Described::family("a", &["x", "y", "x"]).metadata();
    insta::assert_snapshot!(refused(&twice), @"metadata has architecture x twice");
    insta::assert_snapshot!(refused("not json"), @"metadata record 1: expected ident at column 2");
    assert!(parse_metadata(&[b'{', 0xff]).is_err());
}

#[test]
fn names_and_texts_cannot_reach_the_terminal_or_a_path() {
    for name in [
        "",
        "../up",
        "a b",
        "-x",
        "a\\u001b[31m",
        "llama\\u0000",
        &"x".repeat(65),
    ] {
        let text = with(r#""name":"llama""#, &format!(r#""name":"{name}""#));
        assert!(
            refused(&text).starts_with("metadata key name is "),
            "{name}"
        );
    }
    let text = with(r#""vendor":"us""#, r#""vendor":"\u001b]0;x\u0007""#);
    assert!(refused(&text).starts_with("metadata key vendor is "));
    let text = with(r#""model_types":["llama"]"#, r#""model_types":["a\nb"]"#);
    assert!(refused(&text).starts_with("metadata key model_types is "));
}

#[test]
fn sizes_and_depths_are_bounded() {
    let huge = vec![b' '; METADATA_CAP_BYTES + 1];
    assert!(
        parse_metadata(&huge)
            .unwrap_err()
            .to_string()
            .contains("the limit is 1048576")
    );
    let deep = format!("\"x\":{}{},\"panic\"", "[".repeat(5000), "]".repeat(5000));
    let deep = with(r#""panic""#, &deep);
    assert!(refused(&deep).contains("recursion limit"));
    let many: Vec<String> = (0..1100)
        .map(|i| format!(r#"{{"arch":{{"id":"a{i}","model_types":[]}}}}"#))
        .collect();
    let text = Described::backend("b").metadata() + "\n" + &many.join("\n");
    insta::assert_snapshot!(refused(&text), @"metadata has 1100 architectures, the limit is 1024");
}
