//! The bound of the queue: places of answers that run or wait, and how many of them one tenant may have.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// All places.
#[derive(Debug)]
pub struct Room {
    free: Arc<Semaphore>,
    places: usize,
    shares: Arc<Shares>,
}

#[derive(Debug)]
struct Shares {
    /// Most places of one tenant.
    most: usize,
    /// Tenants that have any.
    held: Mutex<BTreeMap<String, usize>>,
}

/// One place, given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    _permit: OwnedSemaphorePermit,
    shares: Arc<Shares>,
    tenant: String,
}

/// Why there is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// All are taken.
    Full,
    /// The tenant has as many as it may.
    Share {
        /// Most places of one tenant.
        most: usize,
    },
}

impl Room {
    /// So many free places, of which a tenant may have `share` at a time; 0 is all.
    pub fn new(places: usize, share: usize) -> Self {
        let most = if share == 0 { usize::MAX } else { share };
        Self {
            free: Arc::new(Semaphore::new(places)),
            places,
            shares: Arc::new(Shares {
                most,
                held: Mutex::default(),
            }),
        }
    }

    /// Places there are.
    pub fn places(&self) -> usize {
        self.places
    }

    /// Most places that one request can ever get.
    pub fn most(&self) -> usize {
        self.places.min(self.shares.most)
    }

    /// So many places, or none.
    pub fn take(&self, tenant: &str, count: usize) -> Result<Vec<Place>, NoPlace> {
        (0..count).map(|_| self.take_one(tenant)).collect()
    }

    fn take_one(&self, tenant: &str) -> Result<Place, NoPlace> {
        let mut held = self
            .shares
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let most = self.shares.most;
        if held.get(tenant).is_some_and(|held| *held >= most) {
            return Err(NoPlace::Share { most });
        }
        let permit = Arc::clone(&self.free)
            .try_acquire_owned()
            .map_err(|_| NoPlace::Full)?;
        *held.entry(tenant.to_owned()).or_default() += 1;
        Ok(Place {
            _permit: permit,
            shares: Arc::clone(&self.shares),
            tenant: tenant.to_owned(),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut held = self
            .shares
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = held.get_mut(&self.tenant) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_its_share_and_everybody_together_all() {
        let room = Room::new(5, 3);
        assert_eq!(room.take("a", 4).unwrap_err(), NoPlace::Share { most: 3 });
        // What was taken on the way was given back.
        let first = room.take("a", 3).unwrap();
        assert_eq!(room.take("a", 1).unwrap_err(), NoPlace::Share { most: 3 });
        let second = room.take("b", 2).unwrap();
        assert_eq!(room.take("c", 1).unwrap_err(), NoPlace::Full);
        drop((first, second));
        assert!(room.take("a", 3).is_ok());
        assert_eq!((room.places(), room.most()), (5, 3));
        assert_eq!(Room::new(5, 0).most(), 5);
        assert!(room.shares.held.lock().unwrap().is_empty());
    }
}
