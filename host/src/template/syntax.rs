//! Rewriting of a template before it is compiled.
//!
//! * `{% generation %}`, which `transformers` uses to find the assistant's text for training, only groups. The engine
//!   does not have it; `{% with %}` groups too, has a scope of its own as the original has, and keeps the tag's
//!   white-space signs.
//! * `{% set ns.name = value %}` is the only way to keep a value from one turn of a loop to the next, and so the only
//!   way to nest values without end. The engine walks values by recursion, also to free them, and a value nested
//!   100,000 times (or a namespace inside itself) would overflow the stack. The value is passed through a filter that
//!   makes it plain data of bounded depth.

use super::scan::{Tag, TagKind};

/// The filter that bounds what namespaces keep.
pub(super) const PLAIN_DATA: &str = "__plain_data";

/// Rewrites `source`, whose tags are `tags`.
pub(super) fn rewrite(source: &str, tags: &[Tag]) -> String {
    let mut out = String::with_capacity(source.len() + 32);
    let mut copied = 0;
    let mut replace = |from: usize, to: usize, text: &str| {
        out.push_str(source.get(copied..from).unwrap_or_default());
        out.push_str(text);
        copied = to;
    };
    for tag in tags.iter().filter(|tag| tag.kind == TagKind::Block) {
        let word = tag.word(source);
        let code = source.get(tag.code.clone()).unwrap_or_default();
        let start = tag.code.start + (code.len() - code.trim_start().len());
        match word {
            "generation" => replace(start, start + word.len(), "with"),
            "endgeneration" => replace(start, start + word.len(), "endwith"),
            "set" => {
                if let Some(value_start) = namespace_value(source, tag) {
                    replace(value_start, value_start, " (");
                    replace(tag.code.end, tag.code.end, &format!(")|{PLAIN_DATA} "));
                }
            }
            _ => {}
        }
    }
    out.push_str(source.get(copied..).unwrap_or_default());
    out
}

/// Where the value of `set a.b = value` starts.
fn namespace_value(source: &str, tag: &Tag) -> Option<usize> {
    let code = source.get(tag.code.clone())?;
    let equals = code.find('=')?;
    let is_assignment = !code.get(equals + 1..)?.starts_with('=');
    let target = code.get(..equals)?;
    let start = tag.code.start + equals + 1;
    (is_assignment && target.contains('.') && !target.contains(['\'', '"', '('])).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::super::scan::tags;

    fn rewrite(source: &str) -> String {
        super::rewrite(source, &tags(source))
    }

    #[test]
    fn generation_groups() {
        for (source, expected) in [
            (
                "a{% generation %}b{% endgeneration %}",
                "a{% with %}b{% endwith %}",
            ),
            (
                "{%- generation -%} b {%- endgeneration -%}",
                "{%- with -%} b {%- endwith -%}",
            ),
            ("{%generation%}", "{%with%}"),
            ("{# {% generation %} #}x", "{# {% generation %} #}x"),
            (
                "{% raw %}{% generation %}{% endraw %}",
                "{% raw %}{% generation %}{% endraw %}",
            ),
            (
                "{{ generation }}{% if generation %}",
                "{{ generation }}{% if generation %}",
            ),
            ("{% set generation_x = 1 %}", "{% set generation_x = 1 %}"),
            ("{% generation", "{% with"),
            ("{# generation", "{# generation"),
        ] {
            assert_eq!(rewrite(source), expected);
        }
    }

    #[test]
    fn namespace_values_are_bounded() {
        for (source, expected) in [
            (
                "{%- set ns.x = ns.x + [1] -%}",
                "{%- set ns.x = ( ns.x + [1] )|__plain_data -%}",
            ),
            (
                "{% set ns.x = 1, 2 %}",
                "{% set ns.x = ( 1, 2 )|__plain_data %}",
            ),
            (
                "{%set ns.x='a=%}b'%}",
                "{%set ns.x= ('a=%}b')|__plain_data %}",
            ),
            ("{% set x = a.b == 1 %}", "{% set x = a.b == 1 %}"),
            (
                "{% set ns.x %}text{% endset %}",
                "{% set ns.x %}text{% endset %}",
            ),
        ] {
            assert_eq!(rewrite(source), expected);
        }
    }
}
