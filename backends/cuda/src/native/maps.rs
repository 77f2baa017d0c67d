//! Tensor maps of weights, made once and kept on the device.
//!
//! A map says where a weight is and how it is divided, nothing of what it holds, so it stays right when another weight of the
//! same shape comes to the same place.

use std::collections::HashMap;

use mlxcel_abi::Result;

use super::State;
use super::products::Weight;
use crate::driver::{Element, TensorMap, Tiling};
use crate::kernels::TILE_TEAMS;

/// Maps that are kept at most: more than any model has weights.
const MOST_MAPS: usize = 1 << 14;
/// Rows of a half tile of `stream_rows`.
const STREAM_TILE_ROWS: u32 = 8;
/// Groups of which a piece of `stream_rows` has the scales.
pub(super) const STREAM_GROUPS: usize = 8;

/// Who reads through the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Reader {
    Stream,
    Tiles,
    /// `flow`, which reads scales and biases without maps.
    Flow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    weight: Weight,
    reader: Reader,
}

/// Addresses and sizes of maps by weight.
#[derive(Debug, Default)]
pub(super) struct Maps {
    made: HashMap<Key, (usize, usize)>,
}

impl Maps {
    /// Blocks that the maps lie in.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &(usize, usize)> {
        self.made.values()
    }
}

impl Weight {
    /// The weight's values in tiles of rows of 128 bytes.
    fn values(&self, tile_rows: u32) -> Tiling {
        let row_bytes = self.columns * self.bits as usize / 8;
        let (element, size) = if self.bits == 16 {
            (Element::Half, 2)
        } else {
            (Element::Word, 4)
        };
        Tiling {
            element,
            address: self.words,
            rows: self.rows,
            columns: row_bytes / size,
            row_bytes,
            tile_rows,
            tile_columns: 128 / size as u32,
            is_swizzled: true,
        }
    }

    fn of_groups(&self, address: usize) -> Tiling {
        let groups = self.columns / self.group_size as usize;
        Tiling {
            element: Element::Half,
            address,
            rows: self.rows,
            columns: groups,
            row_bytes: 2 * groups,
            tile_rows: STREAM_TILE_ROWS,
            tile_columns: STREAM_GROUPS as u32,
            is_swizzled: false,
        }
    }
}

impl State {
    /// Where the maps of a weight are on the device.
    pub(super) fn maps_of(&mut self, weight: &Weight, reader: Reader) -> Result<usize> {
        let key = Key {
            weight: *weight,
            reader,
        };
        if let Some((address, _)) = self.maps.made.get(&key) {
            return Ok(*address);
        }
        if self.maps.made.len() >= MOST_MAPS {
            for (address, size) in core::mem::take(&mut self.maps).blocks() {
                self.pool.put(*address, *size);
            }
        }
        let tilings = match reader {
            Reader::Tiles => vec![weight.values(64 * TILE_TEAMS as u32)],
            Reader::Flow => vec![weight.values(STREAM_TILE_ROWS)],
            Reader::Stream if weight.bits == 16 => vec![weight.values(STREAM_TILE_ROWS)],
            Reader::Stream => vec![
                weight.values(STREAM_TILE_ROWS),
                weight.of_groups(weight.scales),
                weight.of_groups(weight.biases),
            ],
        };
        let mut bytes = Vec::with_capacity(tilings.len() * size_of::<TensorMap>());
        for tiling in &tilings {
            let map = self.driver.tiles(tiling)?;
            bytes.extend(map.0.iter().flat_map(|word| word.to_ne_bytes()));
        }
        let (address, size) = self.pool.take(self.driver, bytes.len())?;
        // SAFETY: the block has room for the maps.
        let uploaded = unsafe { self.queue.upload(address, bytes.as_ptr(), bytes.len()) };
        if uploaded.is_err() {
            // Nobody may find maps that are not there.
            self.pool.put(address, size);
        } else {
            self.maps.made.insert(key, (address, size));
        }
        uploaded.map(|()| address)
    }
}
