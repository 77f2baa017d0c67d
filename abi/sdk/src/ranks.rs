//! The ranks over which a model is split: which part each of them has, and sums over them.

use core::ffi::c_void;
use std::rc::Rc;

use mlxcel_abi::collectives::{COLLECTIVES, Collectives};
use mlxcel_abi::host::HostApi;
use mlxcel_abi::{Str, Table, Tensor as Handle};

use crate::{Backend, Error, Result, Tensor};

struct Inner {
    table: Collectives,
    /// `ctx` of the backend that tensors belong to.
    backend: *mut c_void,
    rank: usize,
    size: usize,
}

/// The group of processes that compute one model. Each is a rank and has a part of the weights.
#[derive(Clone)]
pub struct Ranks(Rc<Inner>);

impl core::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Ranks({} of {})", self.0.rank, self.0.size)
    }
}

/// One of several equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Which, from 0.
    pub index: usize,
    /// Of how many.
    pub count: usize,
}

/// Parts of the heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShares {
    /// Of query heads.
    pub queries: Share,
    /// Of key and value heads; several ranks have the same one where there are fewer than ranks.
    pub keys: Share,
}

impl Ranks {
    /// The group that the host lends while it loads a model; none where the model is whole.
    ///
    /// # Safety
    /// `host` must be null or point to a table that outlives the value, and so must what it lends.
    pub(crate) unsafe fn from_host(
        host: *const HostApi,
        backend: &Backend,
    ) -> Result<Option<Self>> {
        if host.is_null() {
            return Ok(None);
        }
        // SAFETY: not null, and the caller vouches for it.
        let host = unsafe { HostApi::import(host) };
        let mut address = 0_usize;
        match command!(&host, query, Str::new(COLLECTIVES), &mut address) {
            Ok(()) if address != 0 => {}
            Err(error) if !error.is_unimplemented() => return Err(error),
            _ => return Ok(None),
        }
        // SAFETY: what a host answers under this name is such a table (docs/ABI.md, extensions).
        let table = unsafe { Collectives::import(address as *const Collectives) };
        let backend = backend.table().ctx;
        let (mut rank, mut size) = (0_u32, 0_u32);
        command!(&table, rank, backend, &mut rank)?;
        command!(&table, size, backend, &mut size)?;
        Ok(Some(Self(Rc::new(Inner {
            table,
            backend,
            rank: rank as usize,
            size: size as usize,
        }))))
    }

    /// Number of this rank.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// This rank's part of `units` of something, which has to divide by the ranks.
    pub fn share(&self, units: usize, what: &str) -> Result<Share> {
        if !units.is_multiple_of(self.size()) {
            return Err(self.refused(
                &format!("{units} {what}"),
                "they have to divide by the ranks",
            ));
        }
        Ok(Share {
            index: self.rank(),
            count: self.size(),
        })
    }

    /// This rank's part of the heads of a layer, of which `kv_heads` divide `heads`.
    pub fn heads(&self, heads: usize, kv_heads: usize) -> Result<HeadShares> {
        let queries = self.share(heads, "attention heads")?;
        let keys = if kv_heads.is_multiple_of(self.size()) {
            queries
        } else if kv_heads > 0 && self.size().is_multiple_of(kv_heads) {
            Share {
                index: self.rank() * kv_heads / self.size(),
                count: kv_heads,
            }
        } else {
            return Err(self.refused(
                &format!("{kv_heads} key and value heads"),
                "they have to divide by the ranks, or the ranks by them",
            ));
        };
        Ok(HeadShares { queries, keys })
    }

    fn refused(&self, what: &str, supported: &str) -> Error {
        Error::Unsupported {
            what: format!("splitting {what} over {} ranks", self.size()),
            supported: supported.to_owned(),
        }
    }

    /// The sum of what all ranks have here.
    pub fn all_sum(&self, x: &Tensor) -> Result<Tensor> {
        let mut out = Handle::NONE;
        let inner = &self.0;
        command!(&inner.table, all_sum, inner.backend, x.handle(), &mut out)?;
        Ok(Tensor::from_handle(x.backend(), out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(rank: usize, size: usize) -> Ranks {
        Ranks(Rc::new(Inner {
            table: Collectives::stubs(),
            backend: core::ptr::null_mut(),
            rank,
            size,
        }))
    }

    fn share(index: usize, count: usize) -> Share {
        Share { index, count }
    }

    #[test]
    fn every_rank_has_the_keys_that_its_queries_need() {
        for (heads, kv_heads, size) in [(8, 8, 2), (8, 4, 4), (8, 2, 4), (12, 3, 6), (8, 1, 8)] {
            for rank in 0..size {
                let shares = ranks(rank, size).heads(heads, kv_heads).unwrap();
                assert_eq!(shares.queries, share(rank, size));
                let first_query = rank * heads / size;
                let needed = first_query / (heads / kv_heads);
                let first_key = shares.keys.index * kv_heads / shares.keys.count;
                assert_eq!(first_key, needed, "{heads}/{kv_heads} over {size}");
            }
        }
    }

    #[test]
    fn what_does_not_divide_is_refused_with_its_numbers() {
        let text = |heads, kv_heads, size| {
            let error = ranks(0, size).heads(heads, kv_heads).unwrap_err();
            error.to_string()
        };
        assert!(text(9, 3, 2).starts_with("splitting 9 attention heads over 2 ranks"));
        assert!(text(12, 3, 2).starts_with("splitting 3 key and value heads over 2 ranks"));
        assert!(ranks(0, 3).share(10, "columns").is_err());
    }
}
