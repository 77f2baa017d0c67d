//! Page allocator of the KV pool. Pages are numbered; page 0 belongs to nobody and takes the
//! writes of padding rows.

use super::error::EngineError;

/// Number of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// Hands out pages with reference counts.
#[derive(Debug)]
pub struct PageAllocator {
    references: Vec<u32>,
    free: Vec<PageId>,
    limit: usize,
}

impl PageAllocator {
    /// An allocator that may grow to `limit` pages, page 0 included.
    pub fn new(limit: usize) -> Self {
        Self {
            references: vec![1],
            free: Vec::new(),
            limit,
        }
    }

    /// Pages that exist, page 0 included: what the pool must have room for.
    pub fn capacity(&self) -> usize {
        self.references.len()
    }

    /// Pages that could still be handed out.
    pub fn available(&self) -> usize {
        self.free.len() + self.limit.saturating_sub(self.references.len())
    }

    /// Pages in use, page 0 excluded.
    pub fn in_use(&self) -> usize {
        self.references.len() - 1 - self.free.len()
    }

    /// Takes `n` pages or none.
    pub fn take(&mut self, n: usize) -> Result<Vec<PageId>, EngineError> {
        if n > self.available() {
            return Err(EngineError::KvPoolFull {
                wanted_pages: n,
                available_pages: self.available(),
            });
        }
        let mut pages = Vec::with_capacity(n);
        for _ in 0..n {
            let page = match self.free.pop() {
                Some(page) => page,
                None => {
                    self.references.push(0);
                    PageId((self.references.len() - 1) as u32)
                }
            };
            if let Some(count) = self.references.get_mut(page.0 as usize) {
                *count = 1;
            }
            pages.push(page);
        }
        Ok(pages)
    }

    /// Adds an owner to a page.
    pub fn share(&mut self, page: PageId) {
        if let Some(count) = self
            .references
            .get_mut(page.0 as usize)
            .filter(|count| **count > 0)
        {
            *count += 1;
        }
    }

    /// Whether a page has one owner, who may therefore write to it.
    pub fn is_unique(&self, page: PageId) -> bool {
        self.references.get(page.0 as usize) == Some(&1)
    }

    /// Removes an owner; the last one frees the page.
    pub fn give_back(&mut self, page: PageId) {
        if page.0 == 0 {
            return;
        }
        if let Some(count) = self
            .references
            .get_mut(page.0 as usize)
            .filter(|count| **count > 0)
        {
            *count -= 1;
            if *count == 0 {
                self.free.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn page_zero_is_never_handed_out() {
        let mut pages = PageAllocator::new(4);
        let taken = pages.take(3).unwrap();
        assert!(taken.iter().all(|page| page.0 != 0));
        assert!(pages.take(1).is_err());
        pages.give_back(PageId(0));
        assert!(pages.take(1).is_err());
    }

    proptest! {
        /// Against a model: counts of owners per page.
        #[test]
        fn no_page_has_two_owners_unless_shared(ops in proptest::collection::vec((0u8..3, 0usize..8), 1..200)) {
            let mut pages = PageAllocator::new(9);
            let mut owners: HashMap<PageId, u32> = HashMap::new();
            for (op, n) in ops {
                let nth = owners.keys().copied().nth(n % owners.len().max(1));
                match (op, nth) {
                    (0, _) => match pages.take(n) {
                        Ok(taken) => for page in taken {
                            prop_assert!(owners.insert(page, 1).is_none());
                        },
                        Err(_) => prop_assert!(n > 8 - owners.len()),
                    },
                    (1, Some(page)) => { pages.share(page); *owners.entry(page).or_default() += 1; }
                    (_, Some(page)) => {
                        pages.give_back(page);
                        let left = owners.get_mut(&page).map(|count| { *count -= 1; *count });
                        if left == Some(0) { owners.remove(&page); }
                    }
                    _ => {}
                }
                prop_assert_eq!(pages.in_use(), owners.len());
                prop_assert_eq!(pages.available(), 8 - owners.len());
                for (page, count) in &owners {
                    prop_assert_eq!(pages.is_unique(*page), *count == 1);
                }
            }
        }
    }
}
