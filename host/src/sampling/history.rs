//! The ids of a request so far, as far as samplers look at them.

use std::collections::HashMap;

/// How far a sampler looks back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Window {
    /// Not at all.
    Nothing,
    /// So many ids.
    Last(usize),
    /// To the beginning of the prompt.
    All,
}

impl Window {
    /// From a setting in which -1 means all.
    pub(super) fn of(last_n: i32) -> Self {
        match usize::try_from(last_n) {
            Ok(0) => Self::Nothing,
            Ok(count) => Self::Last(count),
            Err(_) => Self::All,
        }
    }
}

/// Ids, prompt first, and how often each is in the window of the penalties.
#[derive(Debug, Clone)]
pub(super) struct History {
    ids: Vec<u32>,
    counted: Window,
    counts: HashMap<u32, u32>,
    /// Whether ids beyond the counted window are needed.
    keeps: bool,
}

impl History {
    /// Of a request that has not begun. `counted` is the penalties' window; without `keeps` nobody asks for ids.
    pub(super) fn new(counted: Window, keeps: bool) -> Self {
        Self {
            ids: Vec::new(),
            counted,
            counts: HashMap::new(),
            keeps,
        }
    }

    /// Adds ids.
    pub(super) fn extend(&mut self, ids: &[u32]) {
        if self.counted != Window::Nothing || self.keeps {
            ids.iter().for_each(|id| self.push(*id));
        }
    }

    /// Adds an id.
    pub(super) fn push(&mut self, id: u32) {
        if self.counted == Window::Nothing && !self.keeps {
            return;
        }
        if self.counted != Window::Nothing {
            *self.counts.entry(id).or_default() += 1;
        }
        if let Window::Last(window) = self.counted
            && let Some(out) = self.ids.len().checked_sub(window)
            && let Some(old) = self.ids.get(out)
            && let Some(count) = self.counts.get_mut(old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(old);
            }
        }
        self.ids.push(id);
    }

    /// How often each id is in the window of the penalties.
    pub(super) fn counts(&self) -> &HashMap<u32, u32> {
        &self.counts
    }

    /// The last ids.
    pub(super) fn tail(&self, window: Window) -> &[u32] {
        let start = match window {
            Window::Nothing => self.ids.len(),
            Window::Last(count) => self.ids.len().saturating_sub(count),
            Window::All => 0,
        };
        self.ids.get(start..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_are_those_of_the_window(ids in prop::collection::vec(0u32..6, 0..60), last_n in -1i32..20) {
            let window = Window::of(last_n);
            let mut history = History::new(window, true);
            for (len, id) in (1..).zip(&ids) {
                history.push(*id);
                let mut counts = HashMap::new();
                for id in history.tail(window) {
                    *counts.entry(*id).or_default() += 1;
                }
                prop_assert_eq!(history.counts(), &counts);
                let expected = match last_n { -1 => len, n => len.min(n as usize) };
                prop_assert_eq!(history.tail(window), &ids[len - expected..len]);
            }
        }
    }
}
