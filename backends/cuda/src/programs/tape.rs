//! Launches in order, with all that tells them from others.

use crate::driver::{Launch, Shape};

/// A launch without its arguments, which end where it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    function: usize,
    shape: Shape,
    starts_early: bool,
    words: usize,
    starts: usize,
}

/// Launches in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tape {
    /// First, because addresses differ sooner than shapes.
    words: Vec<u64>,
    entries: Vec<Entry>,
    starts: Vec<u8>,
}

impl Tape {
    pub(super) fn push(&mut self, launch: &Launch<'_>) {
        self.words.extend_from_slice(launch.words);
        self.starts.extend_from_slice(launch.starts);
        self.entries.push(Entry {
            function: launch.function,
            shape: launch.shape,
            starts_early: launch.starts_early,
            words: self.words.len(),
            starts: self.starts.len(),
        });
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.words.clear();
        self.starts.clear();
    }

    fn get(&self, i: usize) -> Option<Launch<'_>> {
        let entry = self.entries.get(i)?;
        let before = i.checked_sub(1).and_then(|i| self.entries.get(i));
        let (words, starts) = before.map_or((0, 0), |before| (before.words, before.starts));
        Some(Launch {
            function: entry.function,
            shape: entry.shape,
            starts_early: entry.starts_early,
            words: self.words.get(words..entry.words)?,
            starts: self.starts.get(starts..entry.starts)?,
        })
    }

    pub(crate) fn launches(&self) -> impl Iterator<Item = Launch<'_>> {
        (0..self.len()).filter_map(|i| self.get(i))
    }

    /// Whether launches `from..to` of both are the same; those before are.
    pub(super) fn agrees(&self, other: &Self, from: usize, to: usize) -> bool {
        let (Some(a), Some(b)) = (self.entries.get(from..to), other.entries.get(from..to)) else {
            return false;
        };
        // Where arguments end is a part of the entries, so that these are equally long.
        let before = from.checked_sub(1).and_then(|i| self.entries.get(i));
        let (words, starts) = before.map_or((0, 0), |before| (before.words, before.starts));
        let (last_word, last_start) = a.last().map_or((words, starts), |e| (e.words, e.starts));
        self.words.get(words..last_word) == other.words.get(words..last_word)
            && a == b
            && self.starts.get(starts..last_start) == other.starts.get(starts..last_start)
    }

    /// A number that equal tapes share, and hardly any others.
    pub(super) fn hash(&self) -> u64 {
        /// 2^64 divided by the golden ratio.
        const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
        let of_entries = self.entries.iter().flat_map(|entry| {
            let [x, y, z] = entry.shape.grid.map(u64::from);
            let block = u64::from(entry.shape.threads) << 32 | u64::from(entry.shape.shared_bytes);
            let early = u64::from(entry.starts_early);
            [entry.function as u64, x << 32 | y, z << 1 | early, block]
        });
        of_entries
            .chain(self.words.iter().copied())
            .fold(self.len() as u64, |hash, word| {
                (hash.rotate_left(29) ^ word).wrapping_mul(FACTOR)
            })
    }
}
