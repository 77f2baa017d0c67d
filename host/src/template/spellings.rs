//! Control-token spellings, prepared for the search of fragments in request text.

use std::collections::BTreeSet;

use crate::text::{ControlTokens, Trie};

/// The spellings of the tokens that only a template may write.
#[derive(Debug)]
pub(super) struct Spellings {
    control: ControlTokens,
    forward: Trie,
    /// The same with every spelling reversed.
    backward: Trie,
    whole: Vec<Vec<char>>,
    /// Characters that begin or end a spelling, sorted.
    ends: Vec<char>,
    /// Characters in the longest spelling.
    longest: usize,
}

impl Spellings {
    pub(super) fn new(control: ControlTokens) -> Self {
        let mut whole: Vec<Vec<char>> = control
            .spellings()
            .map(|text| text.chars().collect())
            .collect();
        whole.sort();
        let (mut forward, mut backward) = (Trie::default(), Trie::default());
        let mut ends = BTreeSet::new();
        for word in &whole {
            forward.insert(word.iter().copied(), 0);
            backward.insert(word.iter().rev().copied(), 0);
            ends.extend(word.first().into_iter().chain(word.last()));
        }
        let longest = whole.iter().map(Vec::len).max().unwrap_or(0);
        Spellings {
            control,
            forward,
            backward,
            whole,
            ends: ends.into_iter().collect(),
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
        self.whole.binary_search(&characters).is_ok()
    }

    /// Whether `part` occurs inside a spelling.
    pub(super) fn is_inside(&self, part: &[char]) -> bool {
        self.whole.iter().any(|whole| {
            whole
                .windows(part.len().max(1))
                .any(|window| window == part)
        })
    }

    /// Length of the longest beginning of a spelling that `text` begins with.
    pub(super) fn prefix_length(&self, text: &[char]) -> usize {
        self.forward.shared(text.iter())
    }

    /// Length of the longest end of a spelling that `text` ends with.
    pub(super) fn suffix_length(&self, text: &[char]) -> usize {
        self.backward.shared(text.iter().rev())
    }

    /// The characters that can be marked. Blanks are not, since templates trim them, nor are the characters that JSON
    /// escapes. Spellings made of nothing else cannot be told from text.
    pub(super) fn markable(&self) -> Vec<char> {
        let all: BTreeSet<char> = self.whole.iter().flatten().copied().collect();
        all.into_iter()
            .filter(|&c| !c.is_whitespace() && !c.is_control() && c != '"' && c != '\\')
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_are_found_at_both_ends() {
        let control = ControlTokens::new([(1, "<|im_end|>".to_owned()), (2, "<s>".to_owned())]);
        let spellings = Spellings::new(control);
        let prefix = |text: &str| spellings.prefix_length(&text.chars().collect::<Vec<_>>());
        let suffix = |text: &str| spellings.suffix_length(&text.chars().collect::<Vec<_>>());
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
