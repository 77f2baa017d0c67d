//! Pages of the pool to the host and back, as plain bytes: layer by layer, keys before values.

use crate::plugin::{CallError, DeviceTensor, SliceSpec};

use super::super::pages::PageId;
use super::{KvPool, LayerPool};

impl KvPool {
    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> usize {
        self.shapes()
            .flatten()
            .map(|[_, positions, heads, width]| (positions * heads * width) as usize)
            .sum::<usize>()
            * self.dtype.size_bytes()
    }

    /// Shapes of one page's keys and values, layer by layer; none where there are none.
    fn shapes(&self) -> impl Iterator<Item = [[i64; 4]; 2]> + '_ {
        self.layers.iter().filter_map(|layer| {
            let (heads, k_dim, v_dim) = layer.dims()?;
            let shape = |width: usize| [1, self.page_size, heads, width].map(|n| n as i64);
            Some([shape(k_dim), shape(v_dim)])
        })
    }

    /// The bytes of a page.
    pub fn read_page(&self, page: PageId) -> Result<Vec<u8>, CallError> {
        let mut bytes = Vec::with_capacity(self.page_bytes());
        let pools = self.pools.borrow();
        for (pool, shapes) in pools.iter().flatten().zip(self.shapes()) {
            for (tensor, shape) in [&pool.keys, &pool.values].into_iter().zip(shapes) {
                let (starts, stops) = place(page, shape);
                let spec = SliceSpec {
                    starts: &starts,
                    stops: &stops,
                    strides: &[1; 4],
                };
                bytes.extend(self.backend.read(&self.backend.slice(tensor, spec)?)?);
            }
        }
        Ok(bytes)
    }

    /// Writes the bytes of a page, which has to have memory.
    pub fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), CallError> {
        let shapes: Vec<_> = self.shapes().collect();
        let element_bytes = self.dtype.size_bytes();
        let mut rest = bytes;
        let mut pools = self.pools.take();
        let mut shapes = shapes.into_iter();
        let mut outcome = Ok(());
        for slot in &mut pools {
            let Some(LayerPool { keys, values }) = slot.take() else {
                continue;
            };
            let Some([k_shape, v_shape]) = shapes.next() else {
                break;
            };
            let mut update = |old: DeviceTensor, shape: [i64; 4]| {
                let len = shape.iter().product::<i64>() as usize * element_bytes;
                let (own, after) = rest.split_at_checked(len).unwrap_or((&[], &[]));
                rest = after;
                self.put(&old, page, own, shape).unwrap_or_else(|error| {
                    outcome = Err(error);
                    old
                })
            };
            // The old tensor is gone before anything is computed, so that the backend may write in place.
            *slot = Some(LayerPool {
                keys: update(keys, k_shape),
                values: update(values, v_shape),
            });
        }
        self.pools = pools.into();
        outcome?;
        self.backend.eval(&self.handles())
    }

    fn put(
        &self,
        pool: &DeviceTensor,
        page: PageId,
        bytes: &[u8],
        shape: [i64; 4],
    ) -> Result<DeviceTensor, CallError> {
        let update = self.backend.from_host(bytes, self.dtype, &shape)?;
        let (starts, stops) = place(page, shape);
        let spec = SliceSpec {
            starts: &starts,
            stops: &stops,
            strides: &[1; 4],
        };
        self.backend.slice_update(pool, &update, spec)
    }
}

/// The box of a page.
fn place(page: PageId, [_, positions, heads, width]: [i64; 4]) -> ([i64; 4], [i64; 4]) {
    let at = i64::from(page.0);
    ([at, 0, 0, 0], [at + 1, positions, heads, width])
}
