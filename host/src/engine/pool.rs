//! The KV pool on the device: per layer one tensor of keys and one of values, in pages.
//!
//! Planned from the family's cache descriptors alone. The layout is the host's and the backend's
//! business; families reach it through `KvSource` only.

mod latent;
mod step;
mod transfer;

use std::cell::RefCell;

use crate::plugin::{Backend, CallError, DType, DeviceTensor, Tensor};

use super::desc::{CacheDesc, ModelDesc};
use super::kv_types::KvType;
use latent::LatentPool;
pub use step::{CrossArrays, StepArrays, StepKv};

/// Keys and values of one layer: `[pages, page_size, heads, stored width]`.
pub(super) struct LayerPool {
    pub keys: DeviceTensor,
    pub values: DeviceTensor,
}

impl LayerPool {
    /// With more pages of zeros behind what is there: `[pages, page_size, heads]` by the widths of keys and values.
    pub(super) fn grown(
        backend: &Backend,
        previous: Option<Self>,
        [pages, page_size, heads]: [usize; 3],
        [k_width, v_width]: [usize; 2],
        dtype: DType,
    ) -> Result<Self, CallError> {
        let zeros = |width: usize| {
            let shape = [pages, page_size, heads, width].map(|n| n as i64);
            backend.full(0.0, dtype, &shape)
        };
        let (keys, values) = (zeros(k_width)?, zeros(v_width)?);
        let Some(previous) = previous else {
            return Ok(Self { keys, values });
        };
        Ok(Self {
            keys: backend.concat(&[previous.keys.handle(), keys.handle()], 0)?,
            values: backend.concat(&[previous.values.handle(), values.handle()], 0)?,
        })
    }
}

/// Pages that a roomy pool has from the first: a sixteenth of all it may have, up to 2 GiB.
fn first_pages(limit: usize, page_bytes: usize) -> usize {
    const MOST_BYTES: usize = 2 << 30;
    (limit / 16).min(MOST_BYTES / page_bytes.max(1))
}

/// Device memory of all layers' keys and values.
pub struct KvPool {
    backend: Backend,
    layers: Vec<CacheDesc>,
    /// Empty until the first step; a layer is out while its attention call runs.
    pools: RefCell<Vec<Option<LayerPool>>>,
    /// The same for latent layers.
    latents: RefCell<Vec<Option<LatentPool>>>,
    pages: usize,
    page_size: usize,
    kv_type: KvType,
    begins_roomy: bool,
}

impl KvPool {
    /// A pool without memory; it grows with the pages that are handed out.
    pub fn new(backend: &Backend, desc: &ModelDesc, page_size: usize, kv_type: KvType) -> Self {
        Self {
            backend: backend.clone(),
            layers: desc.layers.clone(),
            pools: RefCell::default(),
            latents: RefCell::default(),
            pages: 0,
            page_size,
            kv_type,
            begins_roomy: false,
        }
    }

    /// For a device with memory of its own, where room costs nothing until it is short, and a copy stops all answers.
    pub fn begin_roomy(&mut self) {
        self.begins_roomy = true;
    }

    /// Bytes held, the same on every backend.
    pub fn bytes(&self) -> usize {
        self.page_bytes() * self.pages
    }

    /// Makes room for `pages` pages, page 0 included, but at most `limit`. Growth doubles, so that
    /// a long sequence is copied a logarithmic number of times.
    pub fn grow_to(&mut self, pages: usize, limit: usize) -> Result<(), CallError> {
        if pages <= self.pages {
            return Ok(());
        }
        let first = match self.begins_roomy {
            true => first_pages(limit, self.page_bytes()),
            false => 0,
        };
        let target = pages.max(self.pages * 2).max(first).min(limit.max(pages));
        let added = target - self.pages;
        let copies = self.pages > 0;
        let mut pools = Vec::with_capacity(self.layers.len());
        let old = self.pools.take();
        let mut old = old.into_iter();
        for layer in &self.layers {
            let previous = old.next().flatten();
            let Some((heads, k_dim, v_dim)) = layer.dims() else {
                pools.push(None);
                continue;
            };
            let widths = [k_dim, v_dim].map(|width| self.kv_type.stored_width(width));
            let rows = [added, self.page_size, heads];
            let storage = self.kv_type.storage();
            let grown = LayerPool::grown(&self.backend, previous, rows, widths, storage)?;
            if copies {
                self.finish_copy(&[grown.keys.handle(), grown.values.handle()])?;
            }
            pools.push(Some(grown));
        }
        self.pools = RefCell::new(pools);
        let mut old = self.latents.take().into_iter();
        let mut latents = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let added = [added, self.page_size];
            let previous = old.next().flatten();
            let grown = LatentPool::grown(&self.backend, layer, previous, added, self.kv_type)?;
            if let Some(latent) = grown.as_ref().filter(|_| copies) {
                let handles: Vec<Tensor> = latent.handles().collect();
                self.finish_copy(&handles)?;
            }
            latents.push(grown);
        }
        self.latents = RefCell::new(latents);
        self.pages = target;
        let handles = self.handles();
        self.backend.eval(&handles)
    }

    /// Has a layer copied, and what it was copied from given back, before the next one: of all layers at once the device may not
    /// have both sizes, and nothing else asks for buffers of the old one.
    fn finish_copy(&self, layer: &[Tensor]) -> Result<(), CallError> {
        self.backend.eval(layer)?;
        self.backend.clear_cache()
    }

    /// Lets all memory go. After a failed step the pool's tensors may never be computable.
    pub fn reset(&mut self) {
        self.pools.take();
        self.latents.take();
        self.pages = 0;
    }

    /// Handles of all keys and values, to be evaluated with a step.
    pub fn handles(&self) -> Vec<Tensor> {
        let (pools, latents) = (self.pools.borrow(), self.latents.borrow());
        let pairs = pools.iter().flatten();
        pairs
            .flat_map(|pool| [pool.keys.handle(), pool.values.handle()])
            .chain(latents.iter().flatten().flat_map(LatentPool::handles))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::first_pages;

    #[test]
    fn a_roomy_pool_begins_with_a_small_part_of_its_bound() {
        assert_eq!(first_pages(1600, 1 << 20), 100);
        assert_eq!(first_pages(1 << 20, 4 << 20), 512);
        assert_eq!((first_pages(15, 1), first_pages(1 << 20, 4 << 30)), (0, 0));
    }
}
