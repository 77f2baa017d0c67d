//! Sequence breakers of the DRY sampler: texts at which a repetition ends, as the tokens that can spell them.
//!
//! A text may begin in the middle of one token and go on in others, so every token that contains it or ends with its
//! beginning is looked for. That reads the whole vocabulary; [`BreakerCache`] does it once for each list of texts.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

/// Most texts of a list.
const MAX_BREAKERS: usize = 64;

/// Longest text in bytes.
const MAX_BREAKER_BYTES: usize = 128;

/// Texts that cannot be breakers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BreakerError {
    /// Too many.
    #[error("{count} texts, at most {MAX_BREAKERS} are possible")]
    Count {
        /// How many.
        count: usize,
    },
    /// Empty, or too long.
    #[error("a text of {bytes} bytes, expected 1 to {MAX_BREAKER_BYTES}")]
    Length {
        /// Its length.
        bytes: usize,
    },
}

/// Texts, and their tokens once a vocabulary was asked.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceBreakers {
    texts: Vec<String>,
    tokens: Option<Arc<Breakers>>,
}

impl Default for SequenceBreakers {
    /// Line break, colon, double quote and asterisk.
    fn default() -> Self {
        Self::new(["\n", ":", "\"", "*"].map(str::to_owned))
    }
}

impl SequenceBreakers {
    /// From texts of somebody else.
    pub fn checked(texts: Vec<String>) -> Result<Self, BreakerError> {
        if texts.len() > MAX_BREAKERS {
            return Err(BreakerError::Count { count: texts.len() });
        }
        let is_good = |text: &&String| (1..=MAX_BREAKER_BYTES).contains(&text.len());
        match texts.iter().find(|text| !is_good(text)) {
            Some(text) => Err(BreakerError::Length { bytes: text.len() }),
            None => Ok(Self::new(texts)),
        }
    }

    fn new(texts: impl IntoIterator<Item = String>) -> Self {
        Self {
            texts: texts.into_iter().collect(),
            tokens: None,
        }
    }

    /// The texts.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// The tokens; none before they were looked for.
    pub fn tokens(&self) -> Option<&Arc<Breakers>> {
        self.tokens.as_ref()
    }

    /// Sets the tokens.
    pub fn resolve(&mut self, tokens: Arc<Breakers>) {
        self.tokens = Some(tokens);
    }
}

/// Tokens of breakers: by the first one, what has to follow it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Breakers(HashMap<u32, Vec<Vec<u32>>>);

impl Breakers {
    /// Looks through a vocabulary. `bytes` gives the text of a token in the middle of a text, `encode` the tokens of a text.
    pub fn find<E>(
        texts: &[String],
        vocab_size: u32,
        bytes: impl Fn(u32) -> Vec<u8>,
        encode: impl Fn(&str) -> Result<Vec<u32>, E>,
    ) -> Result<Self, E> {
        let mut found = Self::default();
        for id in 0..vocab_size {
            let word = bytes(id);
            for text in texts {
                found.look_at(id, &word, text, &encode)?;
            }
        }
        // A beginning that ends inside a character has no rest that could be encoded; the usual spelling still counts.
        for text in texts {
            if let Some((head, tail)) = encode(text)?.split_first() {
                found.add(*head, tail.to_vec());
            }
        }
        Ok(found)
    }

    fn look_at<E>(
        &mut self,
        id: u32,
        word: &[u8],
        text: &str,
        encode: &impl Fn(&str) -> Result<Vec<u32>, E>,
    ) -> Result<(), E> {
        let bytes = text.as_bytes();
        if bytes.is_empty() {
            return Ok(());
        }
        if word.windows(bytes.len()).any(|part| part == bytes) {
            self.add(id, Vec::new());
            return Ok(());
        }
        for start in (1..bytes.len()).rev() {
            let is_end = bytes
                .get(..start)
                .is_some_and(|beginning| word.ends_with(beginning));
            if is_end && let Some(rest) = text.get(start..) {
                self.add(id, encode(rest)?);
            }
        }
        Ok(())
    }

    /// Adds one spelling.
    pub(super) fn add(&mut self, head: u32, tail: Vec<u32>) {
        let tails = self.0.entry(head).or_default();
        if !tails.contains(&tail) {
            tails.push(tail);
        }
    }

    /// Whether a token is a breaker by itself.
    pub(super) fn is_whole(&self, token: u32) -> bool {
        self.0
            .get(&token)
            .is_some_and(|tails| tails.iter().any(Vec::is_empty))
    }

    /// How many tokens lie behind the last breaker in `ids`; none when there is no breaker.
    pub(super) fn since_last(&self, ids: &[u32]) -> Option<usize> {
        for (start, token) in ids.iter().enumerate().rev() {
            let Some(tails) = self.0.get(token) else {
                continue;
            };
            let after = ids.get(start + 1..).unwrap_or_default();
            let longest = tails
                .iter()
                .filter(|tail| after.starts_with(tail))
                .map(Vec::len)
                .max();
            if let Some(longest) = longest {
                return Some(after.len() - longest);
            }
        }
        None
    }
}

/// Breakers that were looked for before, for one vocabulary. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct BreakerCache(Arc<Mutex<VecDeque<Cached>>>);

type Cached = (Vec<String>, Arc<Breakers>);

/// Lists that are kept.
const CACHED_LISTS: usize = 8;

impl BreakerCache {
    /// The tokens of these texts, from `find` where they are not here.
    pub fn get<E>(
        &self,
        texts: &[String],
        find: impl FnOnce() -> Result<Breakers, E>,
    ) -> Result<Arc<Breakers>, E> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tokens)) = lock().iter().find(|(known, _)| known == texts) {
            return Ok(Arc::clone(tokens));
        }
        // Not under the lock: others need not wait for a whole vocabulary.
        let tokens = Arc::new(find()?);
        let mut lists = lock();
        lists.push_front((texts.to_vec(), Arc::clone(&tokens)));
        lists.truncate(CACHED_LISTS);
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    const WORDS: [&str; 9] = ["a", ":", "x\n", "\n", "b", "ab", "ba", "c", "é"];

    fn find(texts: &[&str]) -> Breakers {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        let id = |c: char| WORDS.iter().position(|word| *word == c.to_string());
        Breakers::find(
            &texts,
            WORDS.len() as u32,
            |token| WORDS[token as usize].as_bytes().to_vec(),
            |text| Ok::<_, Infallible>(text.chars().filter_map(id).map(|id| id as u32).collect()),
        )
        .unwrap()
    }

    #[test]
    fn tokens_that_contain_a_text_break_alone() {
        let breakers = find(&["\n", ":"]);
        let whole: Vec<u32> = (0..9).filter(|id| breakers.is_whole(*id)).collect();
        assert_eq!(whole, [1, 2, 3]);
        assert_eq!(breakers.since_last(&[0, 1, 4, 4]), Some(2));
        assert_eq!(breakers.since_last(&[0, 4, 2]), Some(0));
        assert_eq!(breakers.since_last(&[0, 4]), None);
        assert_eq!(breakers.since_last(&[]), None);
    }

    #[test]
    fn a_text_may_be_spelled_in_several_ways() {
        let breakers = find(&["bac"]);
        // b+a+c, ab+a+c, ba+c.
        let tails = |head| breakers.0.get(&head).cloned().unwrap_or_default();
        assert_eq!(tails(4), [vec![0, 7]]);
        assert_eq!(tails(5), [vec![0, 7]]);
        assert_eq!(tails(6), [vec![7]]);
        assert_eq!(breakers.0.len(), 3);
        assert_eq!(breakers.since_last(&[6, 7, 0]), Some(1));
        assert_eq!(breakers.since_last(&[6, 0, 7]), None);
        assert_eq!(breakers.since_last(&[5, 0, 7, 0, 0]), Some(2));
        assert_eq!(breakers.since_last(&[6]), None);
    }

    #[test]
    fn a_list_is_looked_for_once() {
        let cache = BreakerCache::default();
        let list = |n: usize| vec![n.to_string()];
        let get = |n: usize| {
            let mut ran = false;
            let found = cache.get(&list(n), || {
                ran = true;
                Ok::<_, Infallible>(Breakers::default())
            });
            found.unwrap();
            ran
        };
        assert!(get(0) && !get(0));
        assert!((1..=CACHED_LISTS).all(get));
        assert!(get(0), "the oldest list went");
    }
}
