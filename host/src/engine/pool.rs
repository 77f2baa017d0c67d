//! The KV pool on the device: per layer one tensor of keys and one of values, in pages.
//!
//! Planned from the family's cache descriptors alone. The layout is the host's and the backend's
//! business; families reach it through `KvSource::attend` only.

use std::cell::RefCell;

use crate::plugin::{
    AbiError, AttendArgs, Backend, CallError, DType, DeviceTensor, KvSource, PagedAttentionArgs,
    Tensor,
};

use super::desc::{CacheDesc, ModelDesc};

/// Keys and values of one layer: `[pages, page_size, heads, width]`.
struct LayerPool {
    keys: DeviceTensor,
    values: DeviceTensor,
}

/// Device memory of all layers' keys and values.
pub struct KvPool {
    backend: Backend,
    layers: Vec<CacheDesc>,
    /// Empty until the first step; a layer is out while its attention call runs.
    pools: RefCell<Vec<Option<LayerPool>>>,
    pages: usize,
    page_size: usize,
    dtype: DType,
}

impl KvPool {
    /// A pool without memory; it grows with the pages that are handed out.
    pub fn new(backend: &Backend, desc: &ModelDesc, page_size: usize, dtype: DType) -> Self {
        Self {
            backend: backend.clone(),
            layers: desc.layers.clone(),
            pools: RefCell::default(),
            pages: 0,
            page_size,
            dtype,
        }
    }

    /// Bytes held, the same on every backend.
    pub fn bytes(&self) -> usize {
        let per_token: usize = self.layers.iter().map(CacheDesc::elements_per_token).sum();
        per_token * self.dtype.size_bytes() * self.page_size * self.pages
    }

    /// Makes room for `pages` pages, page 0 included, but at most `limit`. Growth doubles, so that
    /// a long sequence is copied a logarithmic number of times.
    pub fn grow_to(&mut self, pages: usize, limit: usize) -> Result<(), CallError> {
        if pages <= self.pages {
            return Ok(());
        }
        let target = pages.max(self.pages * 2).min(limit.max(pages));
        let added = target - self.pages;
        let mut pools = Vec::with_capacity(self.layers.len());
        let old = self.pools.take();
        let mut old = old.into_iter();
        for layer in &self.layers {
            let previous = old.next().flatten();
            let Some((heads, k_dim, v_dim)) = layer.dims() else {
                pools.push(None);
                continue;
            };
            let zeros = |width: usize| {
                let shape = [added, self.page_size, heads, width].map(|n| n as i64);
                self.backend.full(0.0, self.dtype, &shape)
            };
            let (keys, values) = (zeros(k_dim)?, zeros(v_dim)?);
            pools.push(Some(match previous {
                None => LayerPool { keys, values },
                Some(previous) => LayerPool {
                    keys: self
                        .backend
                        .concat(&[previous.keys.handle(), keys.handle()], 0)?,
                    values: self
                        .backend
                        .concat(&[previous.values.handle(), values.handle()], 0)?,
                },
            }));
        }
        self.pools = RefCell::new(pools);
        self.pages = target;
        let handles = self.handles();
        self.backend.eval(&handles)
    }

    /// Lets all memory go. After a failed step the pool's tensors may never be computable.
    pub fn reset(&mut self) {
        self.pools.take();
        self.pages = 0;
    }

    /// Handles of all keys and values, to be evaluated with a step.
    pub fn handles(&self) -> Vec<Tensor> {
        let pools = self.pools.borrow();
        pools
            .iter()
            .flatten()
            .flat_map(|pool| [pool.keys.handle(), pool.values.handle()])
            .collect()
    }
}

/// The caches during one step.
pub struct StepKv<'a> {
    /// The pool.
    pub pool: &'a KvPool,
    /// `[T]` i32.
    pub slots: &'a DeviceTensor,
    /// `[T]` i32.
    pub row_sequences: &'a DeviceTensor,
    /// `[T]` i32.
    pub positions: &'a DeviceTensor,
    /// `[S, P]` i32.
    pub page_table: &'a DeviceTensor,
    /// `S + 1` boundaries.
    pub row_starts: &'a [u32],
}

impl KvSource for StepKv<'_> {
    fn attend(&self, layer: u32, args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        let unknown = || {
            let layers = self.pool.layers.len();
            AbiError::invalid(format!(
                "attend: layer {layer} has no cache (the model described {layers} layers)"
            ))
        };
        let index = layer as usize;
        let desc = self.pool.layers.get(index).ok_or_else(unknown)?;
        let pool = self
            .pool
            .pools
            .borrow_mut()
            .get_mut(index)
            .and_then(Option::take)
            .ok_or_else(unknown)?;
        let window = if args.window > 0 {
            args.window
        } else {
            desc.window() as u32
        };
        let paged = PagedAttentionArgs {
            q: args.q,
            k: args.k,
            v: args.v,
            k_pool: pool.keys.handle(),
            v_pool: pool.values.handle(),
            slots: self.slots.handle(),
            row_sequences: self.row_sequences.handle(),
            positions: self.positions.handle(),
            page_table: self.page_table.handle(),
            window,
            scale: args.scale,
            softcap: args.softcap,
            sinks: args.sinks,
            ..PagedAttentionArgs::default()
        };
        // Dropping the old pool before the step is evaluated lets the backend write in place.
        let (result, pool) = match self.pool.backend.paged_attention(paged, self.row_starts) {
            Ok([result, keys, values]) => (Ok(result), LayerPool { keys, values }),
            Err(error) => (Err(error.into()), pool),
        };
        if let Some(slot) = self.pool.pools.borrow_mut().get_mut(index) {
            *slot = Some(pool);
        }
        result
    }
}
