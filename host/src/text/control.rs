//! Control tokens and where a text spells them.

use std::collections::HashMap;
use std::ops::Range;

use super::trie::Trie;

/// The control (special) tokens of a tokenizer: ids that plain text must never produce.
#[derive(Debug, Clone, Default)]
pub struct ControlTokens {
    by_id: HashMap<u32, String>,
    words: Trie,
    /// Which ASCII characters begin a spelling: nearly all characters of a prompt are turned away here.
    ascii_first: u128,
    /// Added tokens that are not control tokens.
    ordinary: Vec<(u32, String)>,
}

/// One place in a text that spells a control token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spelling {
    /// Byte range in the text.
    pub range: Range<usize>,
    /// The token's id.
    pub id: u32,
}

impl ControlTokens {
    /// Builds the set from `(id, spelling)` pairs. Empty spellings are left out: they cannot be found in a text.
    pub fn new(tokens: impl IntoIterator<Item = (u32, String)>) -> Self {
        let mut set = ControlTokens::default();
        for (id, text) in tokens {
            set.insert(id, text);
        }
        set
    }

    /// Records added tokens that any text may produce. A chat template may still claim some of them for itself: models
    /// exist whose turn marks are not special (DeepSeek).
    pub fn with_ordinary(mut self, tokens: impl IntoIterator<Item = (u32, String)>) -> Self {
        self.ordinary.extend(tokens);
        self
    }

    /// This set and those ordinary added tokens that `is_claimed` picks.
    pub(crate) fn extended(&self, is_claimed: impl Fn(&str) -> bool) -> Self {
        let mut set = self.clone();
        for (id, text) in self.ordinary.iter().filter(|(_, text)| is_claimed(text)) {
            set.insert(*id, text.clone());
        }
        set
    }

    fn insert(&mut self, id: u32, text: String) {
        let Some(first) = text.chars().next() else {
            return;
        };
        if first.is_ascii() {
            self.ascii_first |= 1 << (first as u32);
        }
        self.words.insert(text.chars(), id);
        self.by_id.insert(id, text);
    }

    /// Whether `id` is a control token.
    pub fn contains(&self, id: u32) -> bool {
        self.by_id.contains_key(&id)
    }

    /// How control token `id` is written.
    pub fn spelling(&self, id: u32) -> Option<&str> {
        self.by_id.get(&id).map(String::as_str)
    }

    /// All spellings, in no order.
    pub fn spellings(&self) -> impl Iterator<Item = &str> {
        self.by_id.values().map(String::as_str)
    }

    /// Number of control tokens.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Places where `text` spells a control token, overlapping ones too: the longest at each character.
    pub fn find_overlapping(&self, text: &str) -> Vec<Spelling> {
        text.char_indices()
            .filter_map(|(start, first)| self.longest_at(text, start, first))
            .collect()
    }

    /// Non-overlapping places where `text` spells a control token, leftmost first and the longest at each place, as the
    /// tokenizer itself finds them.
    pub fn find_in(&self, text: &str) -> Vec<Spelling> {
        let mut found = Vec::new();
        let mut resume_at = 0;
        for (start, first) in text.char_indices() {
            if start < resume_at {
                continue;
            }
            if let Some(spelling) = self.longest_at(text, start, first) {
                resume_at = spelling.range.end;
                found.push(spelling);
            }
        }
        found
    }

    fn longest_at(&self, text: &str, start: usize, first: char) -> Option<Spelling> {
        if first.is_ascii() && self.ascii_first & (1 << (first as u32)) == 0 {
            return None;
        }
        let (length, id) = self.words.longest(text.get(start..)?)?;
        Some(Spelling {
            range: start..start + length,
            id,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_is_leftmost_longest() {
        let set = ControlTokens::new([
            (1, "<s>".into()),
            (2, "<s>x".into()),
            (3, "é|".into()),
            (4, String::new()),
        ]);
        assert_eq!(set.len(), 3);
        let found =
            |list: Vec<Spelling>| -> Vec<_> { list.into_iter().map(|s| (s.range, s.id)).collect() };
        assert_eq!(
            found(set.find_in("a<s>x<s>é|é")),
            [(1..5, 2), (5..8, 1), (8..11, 3)]
        );
        let overlapping = ControlTokens::new([(1, "<a>".into()), (2, "a>b".into())]);
        assert_eq!(found(overlapping.find_in("<a>b")), [(0..3, 1)]);
        assert_eq!(
            found(overlapping.find_overlapping("<a>b")),
            [(0..3, 1), (1..4, 2)]
        );
    }

    #[test]
    fn ordinary_tokens_join_when_claimed() {
        let set = ControlTokens::new([(1, "<s>".into())])
            .with_ordinary([(2, "<u>".into()), (3, "<t>".into())]);
        assert!(set.find_in("<u><t>").is_empty());
        let extended = set.extended(|text| text == "<u>");
        assert_eq!(extended.find_in("<u><t><s>").len(), 2);
    }
}
