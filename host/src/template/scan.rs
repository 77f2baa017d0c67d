//! The tags of a template, found without parsing it.
//!
//! Follows Jinja's lexer: strings and brackets inside a tag hide its end, comments and raw blocks hide tags.

use std::ops::Range;

/// What a tag is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TagKind {
    /// `{% %}`
    Block,
    /// `{{ }}`
    Variable,
}

/// One tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) kind: TagKind,
    /// Delimiters included; up to the end of the source if the tag is not closed.
    pub(super) range: Range<usize>,
    /// What is between the delimiters and their white-space signs.
    pub(super) code: Range<usize>,
    /// The contents of string literals.
    pub(super) literals: Vec<Range<usize>>,
}

impl Tag {
    /// The first word of a block tag (`set`, `for`), or nothing.
    pub(super) fn word<'a>(&self, source: &'a str) -> &'a str {
        let code = source
            .get(self.code.clone())
            .unwrap_or_default()
            .trim_start();
        let end = code
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(code.len());
        code.get(..end).unwrap_or_default()
    }

    /// Bytes of code that are not inside string literals.
    pub(super) fn code_bytes(&self) -> usize {
        self.code.len() - self.literals.iter().map(Range::len).sum::<usize>()
    }
}

/// All block and variable tags, in order. Tags in comments and raw blocks are left out, `raw` and `endraw` are not.
pub(super) fn tags(source: &str) -> Vec<Tag> {
    let mut found = Vec::new();
    let mut at = 0;
    let mut raw = false;
    while let Some(start) = next_open(source, at) {
        let rest = source.get(start..).unwrap_or_default();
        if rest.starts_with("{#") {
            at = if raw {
                start + 2
            } else {
                rest.find("#}").map_or(source.len(), |end| start + end + 2)
            };
            continue;
        }
        let kind = if rest.starts_with("{{") {
            TagKind::Variable
        } else {
            TagKind::Block
        };
        let tag = scan_tag(source, start, kind);
        let word = if kind == TagKind::Block {
            tag.word(source)
        } else {
            ""
        };
        if raw && word != "endraw" {
            at = start + 2;
            continue;
        }
        match word {
            "raw" => raw = true,
            "endraw" => raw = false,
            _ => {}
        }
        at = tag.range.end;
        found.push(tag);
    }
    found
}

fn next_open(source: &str, from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        let brace = at + source.get(at..)?.find('{')?;
        match source.as_bytes().get(brace + 1) {
            Some(b'{' | b'%' | b'#') => return Some(brace),
            _ => at = brace + 1,
        }
    }
}

fn scan_tag(source: &str, start: usize, kind: TagKind) -> Tag {
    let close = if kind == TagKind::Variable {
        "}}"
    } else {
        "%}"
    };
    let code_start = start
        + 2
        + usize::from(matches!(
            source.as_bytes().get(start + 2),
            Some(b'-' | b'+')
        ));
    let mut literals = Vec::new();
    let mut quote: Option<(char, usize)> = None;
    let mut escaped = false;
    let mut depth = 0usize;
    let rest = source.get(code_start..).unwrap_or_default();
    for (offset, character) in rest.char_indices() {
        let at = code_start + offset;
        match quote {
            Some((mark, literal_start)) => {
                if escaped {
                    escaped = false;
                } else if character == '\\' {
                    escaped = true;
                } else if character == mark {
                    literals.push(literal_start..at);
                    quote = None;
                }
            }
            None if depth == 0 && source.get(at..).is_some_and(|rest| rest.starts_with(close)) => {
                let sign = matches!(
                    source.as_bytes().get(at.saturating_sub(1)),
                    Some(b'-' | b'+')
                );
                let code_end = (at - usize::from(sign)).max(code_start);
                return Tag {
                    kind,
                    range: start..at + 2,
                    code: code_start..code_end,
                    literals,
                };
            }
            None => match character {
                '\'' | '"' => quote = Some((character, at + 1)),
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                _ => {}
            },
        }
    }
    Tag {
        kind,
        range: start..source.len(),
        code: code_start.min(source.len())..source.len(),
        literals,
    }
}

/// The string literals that a template looks for in other text, each once, escapes kept as written: arguments of calls
/// (`split('</think>')`), sides of comparisons, elements of lists, values of variables. What is left are literals that
/// are printed or joined.
pub(super) fn sought_literals(source: &str, tags: &[Tag]) -> Vec<String> {
    let mut found = Vec::new();
    for tag in tags {
        for range in tag
            .literals
            .iter()
            .filter(|range| is_sought(source, tag, range))
        {
            found.push(source.get(range.clone()).unwrap_or_default().to_owned());
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

fn is_sought(source: &str, tag: &Tag, literal: &Range<usize>) -> bool {
    let before = source
        .get(tag.code.start..literal.start - 1)
        .unwrap_or_default()
        .trim_end();
    let after = source
        .get(literal.end + 1..tag.code.end)
        .unwrap_or_default()
        .trim_start();
    if ["==", "!=", "in ", "not in "]
        .iter()
        .any(|word| after.starts_with(word))
    {
        return true;
    }
    match before.chars().next_back() {
        Some('=' | ',' | '[') => true,
        Some('(') => {
            // A call, unlike a bracket around an expression, has a name in front.
            let name = before.trim_end_matches(|c: char| c == '(' || c.is_whitespace());
            let start = name
                .rfind(|c: char| !c.is_alphanumeric() && c != '_')
                .map_or(0, |at| at + 1);
            !matches!(
                name.get(start..),
                None | Some("" | "if" | "elif" | "else" | "and" | "or" | "not")
            )
        }
        _ => before.ends_with(" in"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(source: &str) -> Vec<&str> {
        tags(source)
            .into_iter()
            .map(|tag| &source[tag.code])
            .collect()
    }

    #[test]
    fn strings_brackets_comments_and_raw_blocks_hide_delimiters() {
        assert_eq!(
            codes("a{{- {'x': {'y': 1}} -}}b{% if '%}' %}c"),
            [" {'x': {'y': 1}} ", " if '%}' "]
        );
        assert_eq!(codes("{# {{ no }} #}{{ yes }}{# open {{ no }}"), [" yes "]);
        assert_eq!(
            codes("{% raw %}{{ no }}{# {%- endraw %}{{ yes }}"),
            [" raw ", " endraw ", " yes "]
        );
        assert_eq!(codes("{ {{ open"), [" open"]);
        assert_eq!(codes("{{"), [""]);
        assert_eq!(codes("{%-%}{%--%}"), ["", ""]);
    }

    #[test]
    fn sought_literals_are_those_that_text_is_compared_with() {
        let source = r#"it's {{ 'printed' + "b}}" ~ ('c' ~ d) }} {# x == 'no' #}{% if x == '\'' or 'in' in y %}don't{% endif %}
            {%- set stop = 'var' %}{{ m.split( 'arg', 1) }}{% if x.endswith(('l', "r")) %}{% endif %}{{ "k" if z else 'q' }}"#;
        assert_eq!(
            sought_literals(source, &tags(source)),
            ["\\'", "arg", "in", "l", "r", "var"]
        );
        assert!(sought_literals("{{ 'open", &tags("{{ 'open")).is_empty());
        assert_eq!(tags("{{ 'abc' ~ x }}")[0].code_bytes(), 8);
    }
}
