//! Pages of the pool to the host and back, as plain bytes: layer by layer, keys before values or index keys.

use crate::plugin::{CallError, DeviceTensor, SliceSpec};

use super::super::desc::CacheDesc;
use super::super::pages::PageId;
use super::{KvPool, LayerPool};

impl KvPool {
    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        let of_layer = |layer: &CacheDesc| layer.bytes_per_token(self.kv_type);
        self.layers.iter().map(of_layer).sum::<usize>() * self.page_size
    }

    /// Shapes of one page's tensors of a layer; none where there are none.
    fn shapes(&self, layer: &CacheDesc) -> Vec<Vec<i64>> {
        let stored = |width: usize| self.kv_type.stored_width(width);
        let size = self.page_size;
        let shapes: Vec<Vec<usize>> = match (layer.dims(), layer.latent()) {
            (Some((heads, k_dim, v_dim)), _) => vec![
                vec![1, size, heads, stored(k_dim)],
                vec![1, size, heads, stored(v_dim)],
            ],
            (None, Some((k_dim, _, index_dim))) => {
                let index = index_dim.map(|width| vec![1, size, stored(width)]);
                core::iter::once(vec![1, size, 1, stored(k_dim)])
                    .chain(index)
                    .collect()
            }
            (None, None) => Vec::new(),
        };
        let whole = |shape: Vec<usize>| shape.into_iter().map(|n| n as i64).collect();
        shapes.into_iter().map(whole).collect()
    }

    /// The bytes of a page.
    pub fn read_page(&self, page: PageId) -> Result<Vec<u8>, CallError> {
        let mut bytes = Vec::with_capacity(self.page_bytes());
        let (pools, latents) = (self.pools.borrow(), self.latents.borrow());
        for (index, layer) in self.layers.iter().enumerate() {
            let pair = pools.get(index).and_then(Option::as_ref);
            let latent = latents.get(index).and_then(Option::as_ref);
            let pair = pair.into_iter().flat_map(|pool| [&pool.keys, &pool.values]);
            let latent = latent
                .into_iter()
                .flat_map(|pool| [&pool.keys, &pool.index]);
            let tensors = pair.chain(latent.flatten());
            for (tensor, shape) in tensors.zip(self.shapes(layer)) {
                let place = Place::new(page, &shape);
                let part = self.backend.slice(tensor, place.spec())?;
                bytes.extend(self.backend.read(&part)?);
            }
        }
        Ok(bytes)
    }

    /// Writes the bytes of a page, which has to have memory.
    pub fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), CallError> {
        let element_bytes = self.kv_type.storage().size_bytes();
        let mut rest = bytes;
        let (mut pools, mut latents) = (self.pools.take(), self.latents.take());
        let mut outcome = Ok(());
        for (index, layer) in self.layers.iter().enumerate() {
            let mut shapes = self.shapes(layer).into_iter();
            // The old tensor is gone before anything is computed, so that the backend may write in place.
            let mut update = |old: DeviceTensor| {
                let Some(shape) = shapes.next() else {
                    return old;
                };
                let len = shape.iter().product::<i64>() as usize * element_bytes;
                let (own, after) = rest.split_at_checked(len).unwrap_or((&[], &[]));
                rest = after;
                self.put(&old, page, own, &shape).unwrap_or_else(|error| {
                    outcome = Err(error);
                    old
                })
            };
            if let Some(slot) = pools.get_mut(index) {
                *slot = slot.take().map(|pool| LayerPool {
                    keys: update(pool.keys),
                    values: update(pool.values),
                });
            }
            if let Some(Some(pool)) = latents.get_mut(index) {
                pool.keys = pool.keys.take().map(&mut update);
                pool.index = pool.index.take().map(&mut update);
            }
        }
        self.pools = pools.into();
        self.latents = latents.into();
        outcome?;
        self.backend.eval(&self.handles())
    }

    fn put(
        &self,
        pool: &DeviceTensor,
        page: PageId,
        bytes: &[u8],
        shape: &[i64],
    ) -> Result<DeviceTensor, CallError> {
        let update = self
            .backend
            .from_host(bytes, self.kv_type.storage(), shape)?;
        let place = Place::new(page, shape);
        self.backend.slice_update(pool, &update, place.spec())
    }
}

/// The box of a page in a tensor of pages.
struct Place {
    starts: Vec<i64>,
    stops: Vec<i64>,
    strides: Vec<i64>,
}

impl Place {
    fn new(page: PageId, shape: &[i64]) -> Self {
        let at = i64::from(page.0);
        let inner = shape.get(1..).unwrap_or_default();
        let first = |value: i64| core::iter::once(value);
        Self {
            starts: first(at).chain(inner.iter().map(|_| 0)).collect(),
            stops: first(at + 1).chain(inner.iter().copied()).collect(),
            strides: vec![1; shape.len()],
        }
    }

    fn spec(&self) -> SliceSpec<'_> {
        SliceSpec {
            starts: &self.starts,
            stops: &self.stops,
            strides: &self.strides,
        }
    }
}
