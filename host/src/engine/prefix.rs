//! The prefix cache: full pages of finished and running sequences, found again by their tokens.
//!
//! A tree of pages. The path from a root to a node is the exact list of tokens whose keys and values
//! the node's page ends, so that a hit is never a matter of hashes. Roots are apart by namespace
//! (tenant, adapter): nobody finds another's pages. Each node owns one reference to its page.
//!
//! A boundary between pages is exact for dense and windowed caches, since the pool keeps all positions.
//! Pages that are not full are a matter of their own: see `tail`. How much is kept and for how long:
//! see `limits`.

mod limits;
mod tail;

use std::collections::HashMap;
use std::time::Instant;

pub use limits::PrefixLimits;

use super::pages::{PageAllocator, PageId};

/// Number of a node; roots are made on demand.
type NodeId = usize;

struct Node {
    parent: NodeId,
    /// Tokens of this page, the key under the parent.
    tokens: Box<[u32]>,
    /// None for a root.
    page: Option<PageId>,
    children: HashMap<Box<[u32]>, NodeId>,
    used: u64,
    /// When it was last found or kept.
    used_at: Instant,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Look-ups that found at least one page.
    pub hits: u64,
    /// Look-ups that found none.
    pub misses: u64,
    /// Tokens that did not have to be computed.
    pub reused_tokens: u64,
    /// Pages evicted because others needed the room.
    pub evicted_pages: u64,
    /// Pages let go because nobody asked for them for long.
    pub expired_pages: u64,
    /// Pages let go because the cache had its share.
    pub capped_pages: u64,
}

/// Pages by the tokens that lead to them.
pub struct PrefixCache {
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    roots: HashMap<String, NodeId>,
    clock: u64,
    page_size: usize,
    pages: usize,
    limits: PrefixLimits,
    stats: PrefixStats,
}

impl PrefixCache {
    /// An empty cache for pages of `page_size` positions.
    pub fn new(page_size: usize, limits: PrefixLimits) -> Self {
        Self {
            limits,
            nodes: Vec::new(),
            free: Vec::new(),
            roots: HashMap::new(),
            clock: 0,
            page_size,
            pages: 0,
            stats: PrefixStats::default(),
        }
    }

    /// Pages held.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Counters.
    pub fn stats(&self) -> PrefixStats {
        self.stats
    }

    fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id).and_then(Option::as_ref)
    }

    fn touch(&mut self, id: NodeId) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(node) = self.nodes.get_mut(id).and_then(Option::as_mut) {
            node.used = clock;
            node.used_at = Instant::now();
        }
    }

    fn add(&mut self, node: Node) -> NodeId {
        match self.free.pop() {
            Some(id) => {
                if let Some(slot) = self.nodes.get_mut(id) {
                    *slot = Some(node);
                }
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        }
    }

    /// Pages of the longest cached prefix of `tokens`, at most `limit` tokens long, each with a new
    /// reference for the caller.
    pub fn find(
        &mut self,
        namespace: &str,
        tokens: &[u32],
        limit: usize,
        pages: &mut PageAllocator,
    ) -> Vec<PageId> {
        let mut found = Vec::new();
        let mut at = self.roots.get(namespace).copied();
        let within = tokens.get(..limit.min(tokens.len())).unwrap_or_default();
        for chunk in within.chunks_exact(self.page_size) {
            let child = at
                .and_then(|id| self.node(id))
                .and_then(|node| node.children.get(chunk).copied());
            let Some(id) = child else { break };
            if let Some(page) = self.node(id).and_then(|node| node.page) {
                pages.share(page);
                found.push(page);
            }
            self.touch(id);
            at = Some(id);
        }
        if found.is_empty() {
            self.stats.misses += 1;
        } else {
            self.stats.hits += 1;
            self.stats.reused_tokens += (found.len() * self.page_size) as u64;
        }
        found
    }

    /// Takes back from the counters what was found and could not be used: of `found` pages only `used`.
    pub fn not_used(&mut self, found: usize, used: usize) {
        if found > 0 && used == 0 {
            self.stats.hits -= 1;
            self.stats.misses += 1;
        }
        self.stats.reused_tokens -= ((found - used.min(found)) * self.page_size) as u64;
    }

    /// Keeps the full pages of a sequence. Where the cache has a page for the same tokens already,
    /// that one stays.
    pub fn keep(
        &mut self,
        namespace: &str,
        tokens: &[u32],
        sequence: &[PageId],
        pages: &mut PageAllocator,
    ) {
        if self.limits.keeps_nothing() {
            return;
        }
        let root = match self.roots.get(namespace) {
            Some(root) => *root,
            None => {
                let root = self.add(Node {
                    parent: 0,
                    tokens: Box::default(),
                    page: None,
                    children: HashMap::new(),
                    used: 0,
                    used_at: Instant::now(),
                });
                self.roots.insert(namespace.to_owned(), root);
                root
            }
        };
        let mut at = root;
        for (chunk, page) in tokens.chunks_exact(self.page_size).zip(sequence) {
            let child = self
                .node(at)
                .and_then(|node| node.children.get(chunk).copied());
            let id = match child {
                Some(id) => id,
                None => {
                    pages.share(*page);
                    self.hang(at, chunk, *page)
                }
            };
            self.touch(id);
            at = id;
        }
    }

    /// Adds a page under a node; the reference to it is the cache's from now on.
    fn hang(&mut self, parent: NodeId, tokens: &[u32], page: PageId) -> NodeId {
        self.pages += 1;
        let key: Box<[u32]> = tokens.into();
        let id = self.add(Node {
            parent,
            tokens: key.clone(),
            page: Some(page),
            children: HashMap::new(),
            used: 0,
            used_at: Instant::now(),
        });
        if let Some(parent) = self.nodes.get_mut(parent).and_then(Option::as_mut) {
            parent.children.insert(key, id);
        }
        id
    }

    /// Makes room: lets go of pages until `wanted` were freed or none is left. Gives how many.
    pub fn evict(&mut self, wanted: usize, pages: &mut PageAllocator) -> usize {
        let freed = self.let_go(wanted, pages);
        self.stats.evicted_pages += freed as u64;
        freed
    }

    /// Lets go of pages that nobody else uses, least recently used first, leaves before their
    /// parents, until `wanted` were freed or none is left. Gives how many.
    fn let_go(&mut self, wanted: usize, pages: &mut PageAllocator) -> usize {
        let mut freed = 0;
        while freed < wanted {
            let leaf = self
                .nodes
                .iter()
                .enumerate()
                .filter_map(|(id, node)| Some((id, node.as_ref()?)))
                .filter(|(_, node)| {
                    node.children.is_empty() && node.page.is_some_and(|page| pages.is_unique(page))
                })
                .min_by_key(|(_, node)| node.used)
                .map(|(id, _)| id);
            let Some(id) = leaf else { break };
            self.remove(id, pages);
            freed += 1;
        }
        freed
    }

    fn remove(&mut self, id: NodeId, pages: &mut PageAllocator) {
        if let Some(page) = self.take_off(id) {
            pages.give_back(page);
        }
    }

    /// Removes a leaf; the reference to its page is the caller's from now on.
    fn take_off(&mut self, id: NodeId) -> Option<PageId> {
        let node = self.nodes.get_mut(id).and_then(Option::take)?;
        if node.page.is_some() {
            self.pages -= 1;
        }
        if let Some(parent) = self.nodes.get_mut(node.parent).and_then(Option::as_mut) {
            parent.children.remove(&node.tokens);
        }
        self.free.push(id);
        node.page
    }

    /// Lets go of everything.
    pub fn clear(&mut self, pages: &mut PageAllocator) {
        for page in self.nodes.iter().flatten().filter_map(|node| node.page) {
            pages.give_back(page);
        }
        self.nodes.clear();
        self.free.clear();
        self.roots.clear();
        self.pages = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: usize = 4;

    fn kept(
        cache: &mut PrefixCache,
        pages: &mut PageAllocator,
        namespace: &str,
        tokens: &[u32],
    ) -> Vec<PageId> {
        let own = pages.take(tokens.len().div_ceil(PAGE)).unwrap();
        cache.keep(namespace, tokens, &own, pages);
        own
    }

    #[test]
    fn a_prefix_is_found_to_the_last_full_page() {
        let (mut cache, mut pages) = (
            PrefixCache::new(PAGE, PrefixLimits::default()),
            PageAllocator::new(100),
        );
        let tokens: Vec<u32> = (0..11).collect();
        let own = kept(&mut cache, &mut pages, "", &tokens);
        assert_eq!(cache.find("", &tokens, 99, &mut pages), own[..2]);
        assert_eq!(cache.find("", &tokens, 7, &mut pages), own[..1]);
        assert_eq!(cache.find("", &[0, 1, 2, 9, 4], 99, &mut pages), []);
        assert_eq!(
            cache.stats(),
            PrefixStats {
                hits: 2,
                misses: 1,
                reused_tokens: 12,
                ..PrefixStats::default()
            }
        );
    }

    #[test]
    fn namespaces_do_not_see_each_other() {
        let (mut cache, mut pages) = (
            PrefixCache::new(PAGE, PrefixLimits::default()),
            PageAllocator::new(100),
        );
        let tokens: Vec<u32> = (0..8).collect();
        kept(&mut cache, &mut pages, "a", &tokens);
        assert!(cache.find("b", &tokens, 99, &mut pages).is_empty());
        assert_eq!(cache.find("a", &tokens, 99, &mut pages).len(), 2);
    }

    #[test]
    fn pages_in_use_are_not_evicted_and_old_ones_go_first() {
        let (mut cache, mut pages) = (
            PrefixCache::new(PAGE, PrefixLimits::default()),
            PageAllocator::new(100),
        );
        let (old, new): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (100..108).collect());
        for tokens in [&old, &new] {
            for page in kept(&mut cache, &mut pages, "", tokens) {
                pages.give_back(page);
            }
        }
        let held = cache.find("", &old, 99, &mut pages);
        assert_eq!(cache.evict(9, &mut pages), 2);
        assert!(cache.find("", &new, 99, &mut pages).is_empty());
        held.into_iter().for_each(|page| pages.give_back(page));
        assert_eq!(cache.evict(1, &mut pages), 1);
        assert_eq!(cache.find("", &old, 99, &mut pages).len(), 1);
    }

    proptest! {
        /// Against a model that keeps every list of tokens ever kept.
        #[test]
        fn what_is_found_was_kept_and_no_page_leaks(ops in proptest::collection::vec((0u8..3, proptest::collection::vec(0u32..3, 0..14)), 1..60)) {
            let (mut cache, mut pages) = (PrefixCache::new(PAGE, PrefixLimits::default()), PageAllocator::new(10_000));
            let mut all: Vec<Vec<u32>> = Vec::new();
            for (op, tokens) in ops {
                match op {
                    0 => {
                        for page in kept(&mut cache, &mut pages, "", &tokens) { pages.give_back(page); }
                        all.push(tokens);
                    }
                    1 => {
                        let found = cache.find("", &tokens, tokens.len(), &mut pages);
                        let len = found.len() * PAGE;
                        prop_assert!(found.is_empty() || all.iter().any(|kept| kept.starts_with(&tokens[..len])));
                        found.into_iter().for_each(|page| pages.give_back(page));
                    }
                    _ => { cache.evict(tokens.len(), &mut pages); }
                }
                prop_assert_eq!(pages.in_use(), cache.pages());
            }
            cache.clear(&mut pages);
            prop_assert_eq!(pages.in_use(), 0);
        }
    }
}
