//! How much the prefix cache keeps, and for how long.

use std::time::{Duration, Instant};

use super::{NodeId, PageAllocator, PrefixCache};

/// Bounds beside the pool's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixLimits {
    /// Most pages; none at all switches the cache off.
    pub max_pages: usize,
    /// How long a page stays that nobody asks for; none is for ever.
    pub ttl: Option<Duration>,
}

impl Default for PrefixLimits {
    fn default() -> Self {
        Self {
            max_pages: usize::MAX,
            ttl: None,
        }
    }
}

impl PrefixLimits {
    /// Whether the cache is off.
    pub fn keeps_nothing(&self) -> bool {
        self.max_pages == 0
    }
}

impl PrefixCache {
    /// The bounds.
    pub fn limits(&self) -> PrefixLimits {
        self.limits
    }

    /// Sets the bounds, which hold from the next [`PrefixCache::trim`] on.
    pub fn set_limits(&mut self, limits: PrefixLimits) {
        self.limits = limits;
    }

    /// Keeps the bounds: lets go of what nobody asked for in its time, then of the least recently used.
    /// Pages that running sequences share do not go.
    pub fn trim(&mut self, now: Instant, pages: &mut PageAllocator) {
        if let Some(ttl) = self.limits.ttl {
            self.expire(now, ttl, pages);
        }
        let over = self.pages.saturating_sub(self.limits.max_pages);
        if over > 0 {
            self.stats.capped_pages += self.let_go(over, pages) as u64;
        }
    }

    fn expire(&mut self, now: Instant, ttl: Duration, pages: &mut PageAllocator) {
        while self.expire_leaves(now, ttl, pages) > 0 {}
    }

    fn expire_leaves(&mut self, now: Instant, ttl: Duration, pages: &mut PageAllocator) -> usize {
        let is_old = |used_at: Instant| now.saturating_duration_since(used_at) >= ttl;
        let old: Vec<NodeId> = self
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(id, node)| Some((id, node.as_ref()?)))
            .filter(|(_, node)| {
                let is_free = node.page.is_some_and(|page| pages.is_unique(page));
                node.children.is_empty() && is_free && is_old(node.used_at)
            })
            .map(|(id, _)| id)
            .collect();
        for id in &old {
            self.remove(*id, pages);
        }
        self.stats.expired_pages += old.len() as u64;
        old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4;

    fn keep(cache: &mut PrefixCache, pages: &mut PageAllocator, tokens: &[u32]) {
        let own = pages.take(tokens.len().div_ceil(PAGE)).unwrap();
        cache.keep("", tokens, &own, pages);
        own.into_iter().for_each(|page| pages.give_back(page));
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many() {
        let limits = PrefixLimits {
            max_pages: 3,
            ttl: None,
        };
        let (mut cache, mut pages) = (PrefixCache::new(PAGE, limits), PageAllocator::new(100));
        keep(&mut cache, &mut pages, &[1; 8]);
        keep(&mut cache, &mut pages, &[2; 8]);
        cache.trim(Instant::now(), &mut pages);
        assert_eq!((cache.pages(), pages.in_use()), (3, 3));
        assert_eq!(cache.stats().capped_pages, 1);
        assert_eq!(cache.find("", &[2; 8], 8, &mut pages).len(), 2);
        assert_eq!(cache.find("", &[1; 8], 8, &mut pages).len(), 1);
    }

    #[test]
    fn what_nobody_asks_for_goes_after_its_time() {
        let ttl = Duration::from_secs(60);
        let limits = PrefixLimits {
            ttl: Some(ttl),
            ..PrefixLimits::default()
        };
        let (mut cache, mut pages) = (PrefixCache::new(PAGE, limits), PageAllocator::new(100));
        let now = Instant::now();
        keep(&mut cache, &mut pages, &[1; 12]);
        cache.trim(now, &mut pages);
        assert_eq!(cache.pages(), 3);
        // A page that somebody holds stays, and so does the way to it.
        let held = cache.find("", &[1; 12], 8, &mut pages);
        cache.trim(now + 2 * ttl, &mut pages);
        assert_eq!((cache.pages(), cache.stats().expired_pages), (2, 1));
        held.into_iter().for_each(|page| pages.give_back(page));
        cache.trim(now + 2 * ttl, &mut pages);
        assert_eq!((cache.pages(), pages.in_use()), (0, 0));
    }

    #[test]
    fn a_cache_that_is_off_keeps_nothing() {
        let limits = PrefixLimits {
            max_pages: 0,
            ttl: None,
        };
        let (mut cache, mut pages) = (PrefixCache::new(PAGE, limits), PageAllocator::new(100));
        keep(&mut cache, &mut pages, &[1; 12]);
        assert_eq!((cache.pages(), pages.in_use()), (0, 0));
    }
}
