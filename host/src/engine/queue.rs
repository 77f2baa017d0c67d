//! Who of those that wait is served next.
//!
//! Pure order, no clock. What is more urgent goes first. Among equals the tenant that was served longest ago has its
//! turn, so that one with a thousand requests does not keep one with a single request waiting. Within a tenant the
//! oldest goes first. Urgency cannot keep anybody waiting for ever: whoever was overtaken by so many later ones counts
//! as most urgent.

use std::collections::HashMap;

/// Later requests that may pass an earlier one because they are more urgent.
pub const MAX_OVERTAKEN: u32 = 32;

/// Tenants that are remembered although none of theirs waits.
const REMEMBERED_TENANTS: usize = 1024;

/// What the order looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rank {
    /// Lower is more urgent.
    pub priority: i32,
    /// Whose it is.
    pub tenant: String,
}

struct Waiting<T> {
    item: T,
    rank: Rank,
    /// Order of arrival.
    number: u64,
    overtaken: u32,
}

impl<T> Waiting<T> {
    fn urgency(&self) -> i32 {
        match self.overtaken {
            MAX_OVERTAKEN.. => i32::MIN,
            _ => self.rank.priority,
        }
    }
}

/// Requests that wait.
pub struct Queue<T> {
    waiting: Vec<Waiting<T>>,
    arrived: u64,
    turn: u64,
    /// When each tenant was last served, in turns.
    served: HashMap<String, u64>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            waiting: Vec::new(),
            arrived: 0,
            turn: 0,
            served: HashMap::new(),
        }
    }
}

impl<T> Queue<T> {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds one at the end.
    pub fn push(&mut self, item: T, rank: Rank) {
        self.arrived += 1;
        let number = self.arrived;
        self.waiting.push(Waiting {
            item,
            rank,
            number,
            overtaken: 0,
        });
    }

    /// Puts back one that was served before and had to step back: it is older than all that wait.
    pub fn put_back(&mut self, item: T, rank: Rank) {
        self.waiting.insert(
            0,
            Waiting {
                item,
                rank,
                number: 0,
                overtaken: 0,
            },
        );
    }

    fn next_index(&self) -> Option<usize> {
        let turn_of = |tenant: &str| self.served.get(tenant).copied().unwrap_or(0);
        self.waiting
            .iter()
            .enumerate()
            .min_by_key(|(_, one)| (one.urgency(), turn_of(&one.rank.tenant), one.number))
            .map(|(index, _)| index)
    }

    /// Urgency of the one that is next.
    pub fn next_urgency(&self) -> Option<i32> {
        let index = self.next_index()?;
        self.waiting.get(index).map(Waiting::urgency)
    }

    /// Takes the one that is next.
    pub fn pop(&mut self) -> Option<T> {
        let index = self.next_index()?;
        let next = self.waiting.remove(index);
        for passed in &mut self.waiting {
            if passed.number < next.number && passed.rank.priority > next.rank.priority {
                passed.overtaken = passed.overtaken.saturating_add(1);
            }
        }
        self.turn += 1;
        if self.served.len() >= REMEMBERED_TENANTS {
            let waiting = &self.waiting;
            self.served
                .retain(|tenant, _| waiting.iter().any(|one| one.rank.tenant == *tenant));
        }
        self.served.insert(next.rank.tenant, self.turn);
        Some(next.item)
    }

    /// Takes all for which `is_out` holds.
    pub fn take_if(&mut self, mut is_out: impl FnMut(&T) -> bool) -> Vec<T> {
        self.waiting
            .extract_if(.., |one| is_out(&one.item))
            .map(|one| one.item)
            .collect()
    }

    /// Takes all.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.waiting.drain(..).map(|one| one.item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rank(priority: i32, tenant: &str) -> Rank {
        Rank {
            priority,
            tenant: tenant.to_owned(),
        }
    }

    fn order(items: &[(&'static str, i32, &str)]) -> Vec<&'static str> {
        let mut queue = Queue::default();
        for (name, priority, tenant) in items {
            queue.push(*name, rank(*priority, tenant));
        }
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn urgent_ones_first_then_in_order() {
        let found = order(&[("a", 0, ""), ("b", 5, ""), ("c", -1, ""), ("d", 0, "")]);
        assert_eq!(found, ["c", "a", "d", "b"]);
    }

    #[test]
    fn tenants_take_turns() {
        let found = order(&[
            ("a1", 0, "a"),
            ("a2", 0, "a"),
            ("a3", 0, "a"),
            ("b1", 0, "b"),
            ("b2", 0, "b"),
        ]);
        assert_eq!(found, ["a1", "b1", "a2", "b2", "a3"]);
    }

    #[test]
    fn one_that_stepped_back_is_older_than_all_of_its_urgency() {
        let mut queue = Queue::default();
        queue.push(1, rank(0, ""));
        queue.push(2, rank(-1, ""));
        queue.put_back(3, rank(0, ""));
        assert_eq!(queue.next_urgency(), Some(-1));
        assert_eq!(queue.pop(), Some(2));
        assert_eq!(queue.take_if(|item| *item == 1), [1]);
        assert_eq!(queue.pop(), Some(3));
        assert!(queue.is_empty());
    }

    #[test]
    fn nobody_is_overtaken_for_ever() {
        let mut queue = Queue::default();
        queue.push(0, rank(9, ""));
        for number in 1..=2 * MAX_OVERTAKEN {
            queue.push(number, rank(0, ""));
            let popped = queue.pop();
            if popped == Some(0) {
                assert_eq!(number, MAX_OVERTAKEN + 1);
                return;
            }
        }
        panic!("the patient one was never served");
    }

    proptest! {
        #[test]
        fn all_are_served_once_and_turns_are_even(
            items in proptest::collection::vec((-2i32..3, 0usize..4), 1..MAX_OVERTAKEN as usize)
        ) {
            let mut queue = Queue::default();
            for (index, (priority, tenant)) in items.iter().enumerate() {
                queue.push(index, rank(*priority, &tenant.to_string()));
            }
            let mut served: Vec<usize> = std::iter::from_fn(|| queue.pop()).collect();
            // Too few for anybody to be overtaken too often, so priorities are in order.
            prop_assert!(served.is_sorted_by_key(|index| items[*index].0));
            served.sort_unstable();
            prop_assert_eq!(served, (0..items.len()).collect::<Vec<_>>());
        }
    }
}
