//! The last page of a sequence, which is not full: what lets the next turn of a conversation begin at the very token
//! where the last one ended.
//!
//! A page can be shared only as long as nobody writes to it, and whoever goes on behind a tail writes to its page. So a
//! tail is not shared but taken: it leaves the cache and belongs to the sequence, which gives it back, longer, when it
//! ends. A tail whose page somebody else holds is not taken.

use super::{NodeId, PageAllocator, PageId, PrefixCache};

impl PrefixCache {
    /// The node that the first `full` pages of `tokens` lead to.
    fn walk(&self, namespace: &str, tokens: &[u32], full: usize) -> Option<NodeId> {
        let mut at = self.roots.get(namespace).copied()?;
        for chunk in tokens.chunks_exact(self.page_size).take(full) {
            at = self.node(at)?.children.get(chunk).copied()?;
        }
        Some(at)
    }

    /// The full pages of `tokens` that are in the cache, from the first on. Nothing is counted.
    pub fn pages_of(&self, namespace: &str, tokens: &[u32]) -> Vec<PageId> {
        let mut at = self.roots.get(namespace).copied();
        let mut found = Vec::new();
        for chunk in tokens.chunks_exact(self.page_size) {
            let node = at.and_then(|id| self.node(id));
            at = node.and_then(|node| node.children.get(chunk).copied());
            let Some(page) = at.and_then(|id| self.node(id)?.page) else {
                break;
            };
            found.push(page);
        }
        found
    }

    /// Counts tokens that came from the disk; for a look-up that had found nothing it is a hit after all.
    pub fn count_restored(&mut self, was_miss: bool, tokens: usize) {
        if was_miss {
            self.stats.misses = self.stats.misses.saturating_sub(1);
            self.stats.hits += 1;
        }
        self.stats.reused_tokens += tokens as u64;
    }

    /// Takes the tail that has most of what follows the first `full` pages of `tokens`, which were found before. Gives
    /// its page, now the caller's alone, and how many tokens of it are right. Not more than `limit` tokens in all.
    pub fn take_tail(
        &mut self,
        namespace: &str,
        tokens: &[u32],
        full: usize,
        limit: usize,
        pages: &PageAllocator,
    ) -> Option<(PageId, usize)> {
        let start = full * self.page_size;
        let rest = tokens.get(start..limit.min(tokens.len()))?;
        let parent = self.node(self.walk(namespace, tokens, full)?)?;
        let in_common = |tail: &[u32]| tail.iter().zip(rest).take_while(|(a, b)| a == b).count();
        let (common, _, id) = parent
            .children
            .iter()
            .filter(|(tail, _)| tail.len() < self.page_size)
            .filter_map(|(tail, id)| {
                let node = self.node(*id)?;
                let is_free = node.page.is_some_and(|page| pages.is_unique(page));
                is_free.then(|| (in_common(tail), node.used, *id))
            })
            .max()
            .filter(|(common, _, _)| *common > 0)?;
        let page = self.take_off(id)?;
        self.count_restored(full == 0, common);
        Some((page, common))
    }

    /// Keeps the last page of a sequence whose full pages are kept. Shorter tails that it begins with go.
    pub fn keep_tail(
        &mut self,
        namespace: &str,
        tokens: &[u32],
        sequence: &[PageId],
        pages: &mut PageAllocator,
    ) {
        let full = tokens.len() / self.page_size;
        let tail = tokens.get(full * self.page_size..).unwrap_or_default();
        let (Some(page), Some(at)) = (sequence.get(full), self.walk(namespace, tokens, full))
        else {
            return;
        };
        if tail.is_empty() || self.limits.keeps_nothing() {
            return;
        }
        let Some(parent) = self.node(at) else { return };
        let short = |known: &[u32]| known.len() < self.page_size;
        // A tail that has these tokens and more is as good.
        if parent
            .children
            .keys()
            .any(|known| short(known) && known.starts_with(tail))
        {
            return;
        }
        let replaced: Vec<NodeId> = parent
            .children
            .iter()
            .filter(|(known, _)| short(known) && tail.starts_with(known))
            .map(|(_, id)| *id)
            .collect();
        for id in replaced {
            self.remove(id, pages);
        }
        pages.share(*page);
        let id = self.hang(at, tail, *page);
        self.touch(id);
    }
}

#[cfg(test)]
mod tests {
    use super::super::PrefixLimits;
    use super::*;
    use proptest::prelude::*;

    const PAGE: usize = 4;

    fn cache() -> (PrefixCache, PageAllocator) {
        (
            PrefixCache::new(PAGE, PrefixLimits::default()),
            PageAllocator::new(1000),
        )
    }

    /// A sequence that runs `tokens` and ends. Gives how many of them it found.
    fn run(cache: &mut PrefixCache, pages: &mut PageAllocator, tokens: &[u32]) -> usize {
        let limit = tokens.len().saturating_sub(1);
        let mut own = cache.find("", tokens, limit, pages);
        let mut found = own.len() * PAGE;
        if let Some((page, more)) = cache.take_tail("", tokens, own.len(), limit, pages) {
            assert!(pages.is_unique(page));
            own.push(page);
            found += more;
        }
        own.extend(pages.take(tokens.len().div_ceil(PAGE) - own.len()).unwrap());
        cache.keep("", tokens, &own, pages);
        cache.keep_tail("", tokens, &own, pages);
        own.into_iter().for_each(|page| pages.give_back(page));
        found
    }

    #[test]
    fn a_turn_begins_where_the_last_one_ended() {
        let (mut cache, mut pages) = cache();
        let tokens: Vec<u32> = (0..40).collect();
        assert_eq!(run(&mut cache, &mut pages, &tokens[..6]), 0);
        assert_eq!(run(&mut cache, &mut pages, &tokens[..7]), 6);
        assert_eq!(run(&mut cache, &mut pages, &tokens[..19]), 7);
        assert_eq!(run(&mut cache, &mut pages, &tokens[..19]), 18);
        assert_eq!(run(&mut cache, &mut pages, &tokens), 19);
        assert_eq!(cache.stats().hits, 4);
        assert_eq!(pages.in_use(), cache.pages());
    }

    #[test]
    fn a_tail_that_somebody_writes_to_is_not_there_for_others() {
        let (mut cache, mut pages) = cache();
        run(&mut cache, &mut pages, &[1, 2, 3, 4, 5, 6]);
        let first = cache.take_tail("", &[1, 2, 3, 4, 5, 6, 7], 1, 6, &pages);
        assert_eq!(first.map(|(_, common)| common), Some(2));
        assert_eq!(
            cache.take_tail("", &[1, 2, 3, 4, 5, 6, 7], 1, 6, &pages),
            None
        );
        // Another tenant never finds it.
        run(&mut cache, &mut pages, &[1, 2]);
        assert_eq!(cache.take_tail("b", &[1, 2, 3], 0, 2, &pages), None);
    }

    proptest! {
        #[test]
        fn tails_never_leak_and_are_prefixes_of_what_ran(
            runs in proptest::collection::vec((proptest::collection::vec(0u32..2, 1..15), 0usize..4), 1..60)
        ) {
            let (mut cache, mut pages) = cache();
            let mut all: Vec<Vec<u32>> = Vec::new();
            for (tokens, evicted) in runs {
                let found = run(&mut cache, &mut pages, &tokens);
                prop_assert!(found == 0 || all.iter().any(|ran| ran.starts_with(&tokens[..found])));
                all.push(tokens);
                cache.evict(evicted, &mut pages);
                prop_assert_eq!(pages.in_use(), cache.pages());
            }
            cache.clear(&mut pages);
            prop_assert_eq!(pages.in_use(), 0);
        }
    }
}
