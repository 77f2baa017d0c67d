//! Control-token spellings, prepared for the search of fragments in request text.

use std::collections::BTreeSet;

use crate::text::ControlTokens;

/// The spellings of a tokenizer's control tokens.
#[derive(Debug)]
pub(super) struct Spellings {
    control: ControlTokens,
    /// Sorted, so that the longest common prefix with a text is found next to where the text would be inserted.
    forward: Vec<Vec<char>>,
    /// The same with every spelling reversed.
    backward: Vec<Vec<char>>,
    /// Characters that begin or end a spelling, sorted.
    ends: Vec<char>,
    /// Characters in the longest spelling.
    longest: usize,
}

impl Spellings {
    pub(super) fn new(control: &ControlTokens) -> Self {
        let mut forward: Vec<Vec<char>> = control
            .spellings()
            .map(|text| text.chars().collect())
            .collect();
        let mut backward: Vec<Vec<char>> = control
            .spellings()
            .map(|text| text.chars().rev().collect())
            .collect();
        forward.sort();
        backward.sort();
        let mut ends: Vec<char> = forward
            .iter()
            .chain(&backward)
            .filter_map(|s| s.first().copied())
            .collect();
        ends.sort_unstable();
        ends.dedup();
        let longest = forward.iter().map(Vec::len).max().unwrap_or(0);
        Spellings {
            control: control.clone(),
            forward,
            backward,
            ends,
            longest,
        }
    }

    pub(super) fn control(&self) -> &ControlTokens {
        &self.control
    }

    /// Characters in the longest spelling.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// Whether a spelling begins or ends with `character`.
    pub(super) fn is_end(&self, character: char) -> bool {
        self.ends.binary_search(&character).is_ok()
    }

    /// Whether `text` is a spelling.
    pub(super) fn is_whole(&self, text: &str) -> bool {
        let characters: Vec<char> = text.chars().collect();
        self.forward.binary_search(&characters).is_ok()
    }

    /// Whether `part` occurs inside a spelling.
    pub(super) fn is_inside(&self, part: &[char]) -> bool {
        self.forward.iter().any(|whole| {
            whole
                .windows(part.len().max(1))
                .any(|window| window == part)
        })
    }

    /// Length of the longest beginning of a spelling that `text` begins with.
    pub(super) fn prefix_length(&self, text: &[char]) -> usize {
        longest_common_prefix(&self.forward, text)
    }

    /// Length of the longest end of a spelling that a text ends with; the text is given reversed.
    pub(super) fn suffix_length(&self, reversed: &[char]) -> usize {
        longest_common_prefix(&self.backward, reversed)
    }

    /// The characters that can be marked. Blanks are not, since templates trim them, nor are the characters that JSON
    /// escapes. Spellings made of nothing else cannot be told from text.
    pub(super) fn markable(&self) -> Vec<char> {
        let all: BTreeSet<char> = self.forward.iter().flatten().copied().collect();
        all.into_iter()
            .filter(|&c| !c.is_whitespace() && !c.is_control() && c != '"' && c != '\\')
            .collect()
    }
}

/// Length of the longest prefix that `text` shares with any of the sorted `spellings`.
fn longest_common_prefix(spellings: &[Vec<char>], text: &[char]) -> usize {
    if text.is_empty() {
        return 0;
    }
    let at = spellings.partition_point(|spelling| spelling.as_slice() < text);
    let neighbours = [at.checked_sub(1), Some(at)].into_iter().flatten();
    let shared = |spelling: &Vec<char>| {
        spelling
            .iter()
            .zip(text)
            .take_while(|(a, b)| a == b)
            .count()
    };
    neighbours
        .filter_map(|index| spellings.get(index))
        .map(shared)
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_are_found_at_both_ends() {
        let control = ControlTokens::new([(1, "<|im_end|>".to_owned()), (2, "<s>".to_owned())]);
        let spellings = Spellings::new(&control);
        let prefix = |text: &str| spellings.prefix_length(&text.chars().collect::<Vec<_>>());
        let suffix = |text: &str| spellings.suffix_length(&text.chars().rev().collect::<Vec<_>>());
        assert_eq!(
            (prefix("<|im x"), prefix("<s>"), prefix("<x"), prefix("x")),
            (4, 3, 1, 0)
        );
        assert_eq!(
            (suffix("x_end|>"), suffix("x>"), suffix("<s"), suffix("")),
            (6, 1, 0, 0)
        );
        assert!(spellings.is_inside(&['i', 'm']) && !spellings.is_inside(&['m', 'i']));
        assert!(spellings.is_whole("<s>") && !spellings.is_whole("<s"));
        assert_eq!(
            spellings.markable().iter().collect::<String>(),
            "<>_deimns|"
        );
    }
}
