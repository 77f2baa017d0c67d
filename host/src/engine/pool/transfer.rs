//! Pages of the pool to the host and back, as plain bytes: layer by layer, keys before values or index keys.

use crate::plugin::{CallError, DeviceTensor};

use super::super::desc::CacheDesc;
use super::super::entry::Entry;
use super::super::pages::PageId;
use super::{KvPool, LayerPool};

impl KvPool {
    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        let of_layer = |layer: &CacheDesc| layer.bytes_per_token(self.kv_type);
        self.layers.iter().map(of_layer).sum::<usize>() * self.page_size
    }

    /// A page in the tensors of a layer, in order; none where there are none.
    fn entries(&self, page: PageId, layer: &CacheDesc) -> Vec<Entry> {
        let stored = |width: usize| self.kv_type.stored_width(width);
        let size = self.page_size;
        let entry = |inner: &[usize]| Entry::new(page.0, inner);
        match (layer.dims(), layer.latent()) {
            (Some((heads, k_dim, v_dim)), _) => vec![
                entry(&[size, heads, stored(k_dim)]),
                entry(&[size, heads, stored(v_dim)]),
            ],
            (None, Some((k_dim, _, index_dim))) => {
                let index = index_dim.map(|width| entry(&[size, stored(width)]));
                core::iter::once(entry(&[size, 1, stored(k_dim)]))
                    .chain(index)
                    .collect()
            }
            (None, None) => Vec::new(),
        }
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
            for (tensor, entry) in tensors.zip(self.entries(page, layer)) {
                bytes.extend(entry.read(&self.backend, tensor)?);
            }
        }
        Ok(bytes)
    }

    /// Writes the bytes of a page, which has to have memory.
    pub fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), CallError> {
        let mut rest = bytes;
        let (mut pools, mut latents) = (self.pools.take(), self.latents.take());
        let mut outcome = Ok(());
        for (index, layer) in self.layers.iter().enumerate() {
            let mut entries = self.entries(page, layer).into_iter();
            let mut update = |old: DeviceTensor| {
                let Some(entry) = entries.next() else {
                    return old;
                };
                let dtype = self.kv_type.storage();
                let (new, written) = entry.replace(&self.backend, old, dtype, &mut rest);
                if written.is_err() {
                    outcome = written;
                }
                new
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
}
