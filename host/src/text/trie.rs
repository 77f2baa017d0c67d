//! Words by character, for finding them in a text.

/// A set of words with a number each.
#[derive(Debug, Clone)]
pub(crate) struct Trie {
    nodes: Vec<Node>,
}

#[derive(Debug, Clone, Default)]
struct Node {
    /// Children by character, sorted.
    next: Vec<(char, u32)>,
    value: Option<u32>,
}

impl Default for Trie {
    fn default() -> Self {
        Trie {
            nodes: vec![Node::default()],
        }
    }
}

impl Trie {
    /// Adds a word. An empty one is ignored, and a repeated one gets the new number.
    pub(crate) fn insert(&mut self, word: impl Iterator<Item = char>, value: u32) {
        let mut at = 0;
        for character in word {
            at = match self.child(at, character) {
                Some(child) => child,
                None => self.add_child(at, character),
            };
        }
        if at != 0
            && let Some(node) = self.nodes.get_mut(at)
        {
            node.value = Some(value);
        }
    }

    /// The longest word that `text` begins with: its length in bytes and its number.
    pub(crate) fn longest(&self, text: &str) -> Option<(usize, u32)> {
        let mut at = 0;
        let mut found = None;
        for (offset, character) in text.char_indices() {
            let Some(child) = self.child(at, character) else {
                break;
            };
            at = child;
            if let Some(value) = self.nodes.get(at).and_then(|node| node.value) {
                found = Some((offset + character.len_utf8(), value));
            }
        }
        found
    }

    /// How many characters `text` shares with the beginning of any word.
    pub(crate) fn shared<'a>(&self, text: impl Iterator<Item = &'a char>) -> usize {
        let mut at = 0;
        let mut length = 0;
        for &character in text {
            let Some(child) = self.child(at, character) else {
                break;
            };
            at = child;
            length += 1;
        }
        length
    }

    fn child(&self, at: usize, character: char) -> Option<usize> {
        let next = &self.nodes.get(at)?.next;
        let found = next
            .binary_search_by_key(&character, |(key, _)| *key)
            .ok()?;
        next.get(found).map(|(_, child)| *child as usize)
    }

    fn add_child(&mut self, at: usize, character: char) -> usize {
        let index = self.nodes.len();
        self.nodes.push(Node::default());
        if let Some(node) = self.nodes.get_mut(at) {
            let place = node.next.partition_point(|(key, _)| *key < character);
            node.next.insert(place, (character, index as u32));
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::Trie;

    #[test]
    fn longest_word_and_longest_beginning() {
        let mut trie = Trie::default();
        for (word, value) in [("ab", 1), ("abcd", 2), ("é", 3), ("", 4)] {
            trie.insert(word.chars(), value);
        }
        assert_eq!(trie.longest("abcx"), Some((2, 1)));
        assert_eq!(trie.longest("abcde"), Some((4, 2)));
        assert_eq!(trie.longest("éé"), Some((2, 3)));
        assert_eq!(trie.longest("x"), None);
        assert_eq!(trie.longest(""), None);
        assert_eq!(trie.shared(['a', 'b', 'c', 'x'].iter()), 3);
        assert_eq!(trie.shared([].iter()), 0);
    }
}
