//! Control tokens and where a text spells them.

use std::collections::HashMap;
use std::ops::Range;

/// The control (special) tokens of a tokenizer: ids that plain text must never produce.
#[derive(Debug, Clone, Default)]
pub struct ControlTokens {
    by_id: HashMap<u32, String>,
    /// Spellings by first character, longest first, so that a scan is leftmost-longest as the tokenizer's own is.
    by_first: HashMap<char, Vec<(String, u32)>>,
    /// Which ASCII characters begin a spelling: nearly all characters of a prompt are turned away here.
    ascii_first: u128,
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
            if let Some(first) = text.chars().next() {
                if first.is_ascii() {
                    set.ascii_first |= 1 << (first as u32);
                }
                set.by_first
                    .entry(first)
                    .or_default()
                    .push((text.clone(), id));
                set.by_id.insert(id, text);
            }
        }
        for list in set.by_first.values_mut() {
            list.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then_with(|| a.0.cmp(&b.0)));
        }
        set
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
        let starts = text
            .char_indices()
            .filter(|(_, first)| self.may_begin(*first));
        starts
            .filter_map(|(start, first)| self.longest_at(text, start, first))
            .collect()
    }

    /// Non-overlapping places where `text` spells a control token, leftmost first and the longest at each place.
    pub fn find_in(&self, text: &str) -> Vec<Spelling> {
        let mut found = Vec::new();
        let mut resume_at = 0;
        for (start, first) in text.char_indices() {
            if start < resume_at || !self.may_begin(first) {
                continue;
            }
            if let Some(spelling) = self.longest_at(text, start, first) {
                resume_at = spelling.range.end;
                found.push(spelling);
            }
        }
        found
    }

    fn may_begin(&self, first: char) -> bool {
        if first.is_ascii() {
            self.ascii_first & (1 << (first as u32)) != 0
        } else {
            self.by_first.contains_key(&first)
        }
    }

    fn longest_at(&self, text: &str, start: usize, first: char) -> Option<Spelling> {
        let rest = text.get(start..)?;
        let candidates = self.by_first.get(&first)?;
        let (spelling, id) = candidates
            .iter()
            .find(|(spelling, _)| rest.starts_with(spelling.as_str()))?;
        Some(Spelling {
            range: start..start + spelling.len(),
            id: *id,
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
        let found: Vec<_> = set
            .find_in("a<s>x<s>é|é")
            .into_iter()
            .map(|s| (s.range, s.id))
            .collect();
        assert_eq!(found, [(1..5, 2), (5..8, 1), (8..11, 3)]);
    }
}
