//! A prompt whose control tokens can be told from text that only looks like them.

use std::ops::Range;

/// Text for the tokenizer together with the places where a spelled control token is *not* one.
///
/// A chat template writes control tokens (`<|im_end|>`) as ordinary characters, and so may the person who talks to the
/// model. The template renderer knows which is which and records the second kind in [`Prompt::literal`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prompt {
    text: String,
    literal: Vec<Range<usize>>,
}

impl Prompt {
    /// A prompt in which every spelled control token is meant: the whole text comes from a trusted author.
    pub fn trusted(text: impl Into<String>) -> Self {
        Prompt {
            text: text.into(),
            literal: Vec::new(),
        }
    }

    /// A prompt with `literal` byte ranges. Ranges that are empty, out of bounds or not on character boundaries are
    /// widened or dropped so that a wrong range can never make more of the text trusted.
    pub fn with_literal(
        text: impl Into<String>,
        literal: impl IntoIterator<Item = Range<usize>>,
    ) -> Self {
        let text = text.into();
        let mut kept: Vec<Range<usize>> = literal
            .into_iter()
            .map(|range| floor(&text, range.start)..ceil(&text, range.end))
            .filter(|range| range.start < range.end)
            .collect();
        kept.sort_by_key(|range| (range.start, range.end));
        Prompt {
            text,
            literal: kept,
        }
    }

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Byte ranges, in order, that are plain text whatever they spell.
    pub fn literal(&self) -> &[Range<usize>] {
        &self.literal
    }

    /// The text, without the ranges.
    pub fn into_text(self) -> String {
        self.text
    }
}

fn floor(text: &str, index: usize) -> usize {
    let mut index = index.min(text.len());
    while !text.is_char_boundary(index) {
        index -= 1;
    }
    index
}

fn ceil(text: &str, index: usize) -> usize {
    let mut index = index.min(text.len());
    while !text.is_char_boundary(index) {
        index += 1;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_widened_to_characters_and_clipped() {
        let prompt = Prompt::with_literal("aé<s>", [2..3, 5..99, 4..4]);
        assert_eq!(prompt.literal(), [1..3, 5..6]);
    }
}
