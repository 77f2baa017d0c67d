//! Keys and values of cross-attention: pages of their own, written once for a request and then only read.
//!
//! They belong to the request and not to its tokens: nothing of them is shared or kept for others, since
//! computing them again takes one pass of the encoder. The pool has room for all requests that may run, so
//! that one that was admitted always finds its pages.

use std::cell::RefCell;

use crate::plugin::{
    AbiError, AttendArgs, Backend, CallError, DType, DeviceTensor, KvSource, Tensor,
};

use super::desc::ModelDesc;
use super::error::EngineError;
use super::pages::{PageAllocator, PageId};
use super::pool::LayerPool;

/// Positions in a page.
pub const CROSS_PAGE_SIZE: usize = 32;

/// Pages of one request's encoder, and the positions in them.
#[derive(Debug, Default)]
pub struct CrossRows {
    pages: Vec<PageId>,
    positions: usize,
}

impl CrossRows {
    /// Pages in order.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Positions of the encoder's output; 0 for models without.
    pub fn positions(&self) -> usize {
        self.positions
    }
}

/// Device memory of all cross-attention layers.
pub struct CrossPool {
    backend: Backend,
    /// Heads and widths of keys and values, for layers of this kind.
    layers: Vec<Option<(usize, usize, usize)>>,
    pools: RefCell<Vec<Option<LayerPool>>>,
    pages: PageAllocator,
    /// Pages that there is memory for.
    held: usize,
    most: usize,
    dtype: DType,
    bytes_per_position: usize,
}

impl CrossPool {
    /// A pool for `sequences` requests at a time, without memory as yet.
    pub fn new(backend: &Backend, desc: &ModelDesc, sequences: usize, dtype: DType) -> Self {
        let most = sequences * desc.cross_pages_per_sequence() + 1;
        Self {
            backend: backend.clone(),
            layers: desc.layers.iter().map(|layer| layer.cross()).collect(),
            pools: RefCell::default(),
            pages: PageAllocator::new(most),
            held: 0,
            most,
            dtype,
            bytes_per_position: desc.cross_bytes_per_position(dtype.size_bytes()),
        }
    }

    /// Type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes_per_position * CROSS_PAGE_SIZE * self.held
    }

    /// Pages in use.
    pub fn pages_in_use(&self) -> usize {
        self.pages.in_use()
    }

    /// Handles of all keys and values, to be evaluated with a step.
    pub fn handles(&self) -> Vec<Tensor> {
        let pools = self.pools.borrow();
        let pairs = pools.iter().flatten();
        pairs
            .flat_map(|pool| [pool.keys.handle(), pool.values.handle()])
            .collect()
    }

    /// Lets all memory go. Whoever has pages gives them back as ever.
    pub fn reset(&mut self) {
        self.pools.take();
        self.held = 0;
    }

    /// Takes the pages of a request back.
    pub fn give_back(&mut self, rows: CrossRows) {
        rows.pages
            .into_iter()
            .for_each(|page| self.pages.give_back(page));
    }

    fn grow(&mut self) -> Result<(), CallError> {
        let pages = self.pages.capacity();
        if pages <= self.held {
            return Ok(());
        }
        let target = pages.max(self.held * 2).min(self.most.max(pages));
        let added = target - self.held;
        let mut old = self.pools.take().into_iter();
        let mut pools = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let previous = old.next().flatten();
            let Some((heads, k_dim, v_dim)) = *layer else {
                pools.push(None);
                continue;
            };
            let rows = [added, CROSS_PAGE_SIZE, heads];
            let widths = [k_dim, v_dim];
            let grown = LayerPool::grown(&self.backend, previous, rows, widths, self.dtype)?;
            pools.push(Some(grown));
        }
        self.pools = RefCell::new(pools);
        self.held = target;
        self.backend.eval(&self.handles())?;
        self.backend.clear_cache()
    }

    /// Writes what an encoder gave into pages.
    pub fn write(&mut self, encoded: Encoded) -> Result<CrossRows, EngineError> {
        let Encoded { positions, written } = encoded;
        let pages = self.pages.take(positions.div_ceil(CROSS_PAGE_SIZE))?;
        let rows = CrossRows { pages, positions };
        match self.fill(&rows, written) {
            Ok(()) => Ok(rows),
            Err(error) => {
                self.give_back(rows);
                Err(error.into())
            }
        }
    }

    fn fill(&mut self, rows: &CrossRows, written: Vec<Option<Pair>>) -> Result<(), CallError> {
        self.grow()?;
        let slot = |position: usize| {
            let page = rows.pages.get(position / CROSS_PAGE_SIZE);
            let first = page.map_or(0, |page| page.0 as usize * CROSS_PAGE_SIZE);
            (first + position % CROSS_PAGE_SIZE) as i32
        };
        let words = (0..rows.positions).flat_map(|position| slot(position).to_ne_bytes());
        let bytes: Vec<u8> = words.collect();
        let slots = self
            .backend
            .from_host(&bytes, DType::I32, &[rows.positions as i64])?;
        let put = |pool: DeviceTensor, rows: &DeviceTensor| {
            let shape = self.backend.info(&pool)?.shape().to_vec();
            let (heads, width) = match *shape {
                [.., heads, width] => (heads, width),
                _ => (1, 1),
            };
            let flat = self.backend.reshape(&pool, &[-1, heads, width])?;
            // The backend may write in place once nobody else has the pool.
            drop(pool);
            let written = self.backend.put_rows(&flat, &slots, rows)?;
            self.backend.reshape(&written, &shape)
        };
        for (index, pair) in written.into_iter().enumerate() {
            let taken = self
                .pools
                .borrow_mut()
                .get_mut(index)
                .and_then(Option::take);
            let (Some(pool), Some(pair)) = (taken, pair) else {
                continue;
            };
            let pool = LayerPool {
                keys: put(pool.keys, &pair.keys)?,
                values: put(pool.values, &pair.values)?,
            };
            if let Some(place) = self.pools.borrow_mut().get_mut(index) {
                *place = Some(pool);
            }
        }
        self.backend.eval(&self.handles())
    }

    /// Keys and values of a layer, for a call that only reads them.
    pub fn with_layer<T>(
        &self,
        layer: u32,
        body: impl FnOnce(&LayerPool) -> Result<T, AbiError>,
    ) -> Result<T, AbiError> {
        let pools = self.pools.borrow();
        let pool = pools.get(layer as usize).and_then(Option::as_ref);
        body(pool.ok_or_else(|| {
            AbiError::invalid(format!(
                "layer {layer} attends to an encoder that did not run"
            ))
        })?)
    }
}

struct Pair {
    keys: DeviceTensor,
    values: DeviceTensor,
}

/// What an encoder gave, by layer.
pub struct Encoded {
    positions: usize,
    written: Vec<Option<Pair>>,
}

/// The caches during `encode`: they take what the cross-attention layers will attend to.
pub struct EncodeKv<'a> {
    pool: &'a CrossPool,
    positions: usize,
    written: RefCell<Vec<Option<Pair>>>,
}

impl<'a> EncodeKv<'a> {
    /// Caches that take `positions` of every layer.
    pub fn new(pool: &'a CrossPool, positions: usize) -> Self {
        let nothing = pool.layers.iter().map(|_| None).collect();
        Self {
            pool,
            positions,
            written: RefCell::new(nothing),
        }
    }

    /// What was written.
    pub fn into_encoded(self) -> Encoded {
        Encoded {
            positions: self.positions,
            written: self.written.into_inner(),
        }
    }

    /// Handles of what was written, to be evaluated. An error when a layer was left out.
    pub fn finish(&self) -> Result<Vec<Tensor>, AbiError> {
        let written = self.written.borrow();
        let of_layer = |(index, layer): (usize, &Option<_>)| {
            let is_missing = layer.is_some() && written.get(index).is_none_or(Option::is_none);
            is_missing.then_some(index)
        };
        if let Some(index) = self.pool.layers.iter().enumerate().find_map(of_layer) {
            return Err(AbiError::internal(format!(
                "encode set no keys and values of layer {index}, which attends to the encoder"
            )));
        }
        let pairs = written.iter().flatten();
        Ok(pairs
            .flat_map(|pair| [pair.keys.handle(), pair.values.handle()])
            .collect())
    }
}

impl KvSource for EncodeKv<'_> {
    fn attend(&self, layer: u32, _: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        Err(AbiError::invalid(format!(
            "layer {layer} attends inside of encode, which has no caches to attend over: compute attention densely"
        )))
    }

    fn cross_write(&self, layer: u32, k: Tensor, v: Tensor) -> Result<(), AbiError> {
        let desc = self.pool.layers.get(layer as usize).copied().flatten();
        let (heads, k_dim, v_dim) = desc.ok_or_else(|| {
            AbiError::invalid(format!(
                "cross_write: layer {layer} is no layer of cross-attention in the model's description"
            ))
        })?;
        let backend = &self.pool.backend;
        let stored = |what: &str, value: Tensor, width: usize| {
            let info = backend.info(value)?;
            let wanted = [self.positions, heads, width].map(|n| n as i64);
            if info.shape() != wanted {
                return Err(AbiError::invalid(format!(
                    "cross_write: {what} of layer {layer} have shape {:?}, expected {wanted:?}",
                    info.shape()
                )));
            }
            if info.dtype == self.pool.dtype {
                return Ok(backend.retain(value)?);
            }
            Ok(backend.cast(value, self.pool.dtype)?)
        };
        let pair = Pair {
            keys: stored("keys", k, k_dim)?,
            values: stored("values", v, v_dim)?,
        };
        let mut written = self.written.borrow_mut();
        match written.get_mut(layer as usize) {
            Some(place @ None) => {
                *place = Some(pair);
                Ok(())
            }
            _ => Err(AbiError::invalid(format!(
                "cross_write: layer {layer} was set before in this call"
            ))),
        }
    }
}
