//! Operations that wait for the next one, to be submitted with it as one kernel.
//!
//! A launch has its price, and the same few sequences come in every layer: products of one input (queries, keys, values; gate
//! and up), the gated activation after them, a sum and the norm of it, two rotations and the append of their keys. Whatever else
//! is called first submits what waits, so the order of effects is that of the calls. Inputs and outputs are held meanwhile:
//! their memory must not be given out again before the kernel is submitted.

use mlxcel_abi::{AbiError, DType, Result, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_backend_mlx::stream::Device;

use super::State;
use super::maps::Reader;
use super::plan::{Stream, Tiles, Way};
use super::products::Weight;
use super::rows::pairs;
use crate::driver::{Arguments, Element, Shape, Tiling};
use crate::kernels::Text;

/// Products that go together at most.
const MOST_PRODUCTS: usize = 3;
/// Rotations that go together.
const MOST_ROTATIONS: usize = 2;

/// What waits.
#[derive(Debug, Default)]
pub(super) enum Pending {
    /// Nothing.
    #[default]
    Nothing,
    /// Products of one input.
    Products(Products),
    /// A sum of two tensors.
    Sum(Sum),
    /// Rotary embeddings at the same positions.
    Rotations(Rotations),
}

#[derive(Debug)]
pub(super) struct Products {
    x: usize,
    way: Way,
    rows: usize,
    dtype: DType,
    items: Vec<(Weight, usize)>,
    held: Vec<Tensor>,
}

/// What a kernel makes of rows before their product and of the result after it: addresses, 0 for none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Around {
    pub(super) is_normed: bool,
    pub(super) eps: f32,
    pub(super) norm: usize,
    pub(super) residual: usize,
}

impl Around {
    /// As the kernels' struct of that name lies in memory.
    fn words(&self) -> [u64; 3] {
        let normed = match (self.is_normed, self.norm) {
            (false, _) => 0,
            (true, 0) => 1,
            (true, _) => 2,
        };
        let last = u64::from(self.eps.to_bits()) | normed << 32;
        [self.norm as u64, self.residual as u64, last]
    }
}

/// `out = a + b`.
#[derive(Debug)]
pub(super) struct Sum {
    pub(super) a: usize,
    pub(super) b: usize,
    pub(super) out: usize,
    pub(super) pairs: usize,
    pub(super) dtype: DType,
    pub(super) held: Vec<Tensor>,
}

/// What a rotary embedding is made with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Turn {
    pub(super) positions: usize,
    pub(super) table: usize,
    pub(super) dims: i32,
    pub(super) interleaved: i32,
    /// The table holds periods instead of frequencies.
    pub(super) is_inverse: i32,
    pub(super) scale: f32,
    pub(super) rows: i32,
    pub(super) width: i32,
    pub(super) dtype: DType,
}

#[derive(Debug, Clone, Copy)]
struct Rotation {
    x: usize,
    out: usize,
    heads: i32,
}

#[derive(Debug)]
pub(super) struct Rotations {
    turn: Turn,
    items: Vec<Rotation>,
    held: Vec<Tensor>,
}

/// Where keys and values of a step go; addresses on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Append {
    pub(super) q: usize,
    pub(super) k: usize,
    pub(super) v: usize,
    pub(super) key_pool: usize,
    pub(super) value_pool: usize,
    pub(super) slots: usize,
    pub(super) pool_rows: i32,
}

/// Takes references to tensors.
pub(super) fn hold(device: &Device<'_>, ts: &[Tensor]) -> Result<Vec<Tensor>> {
    ts.iter()
        .filter(|t| !t.is_none())
        .map(|t| device.retain(*t))
        .collect()
}

/// Gives references back.
pub(super) fn let_go(device: &Device<'_>, held: &[Tensor]) -> Result<()> {
    held.iter().try_for_each(|t| device.release(*t))
}

/// Blocks for so many elements of a row.
fn across(elements: i32) -> u32 {
    (elements as u32).div_ceil(256).clamp(1, 64)
}

impl State {
    /// Submits what waits if one of `inputs` is not computed: MLX's operations on what waits must come after it.
    pub(super) fn settle(&mut self, device: &Device<'_>, inputs: &[Tensor]) -> Result<()> {
        if matches!(self.pending, Pending::Nothing) {
            return Ok(());
        }
        // SAFETY: the context of this backend, which is open while its slots are called.
        let native = unsafe { Native::from_raw(self.ctx as *mut core::ffi::c_void) }?;
        for t in inputs.iter().filter(|t| !t.is_none()) {
            if !native.is_computed(*t)? {
                return self.flush(device);
            }
        }
        Ok(())
    }

    /// Submits what waits.
    pub(super) fn flush(&mut self, device: &Device<'_>) -> Result<()> {
        let held = match core::mem::take(&mut self.pending) {
            Pending::Nothing => return Ok(()),
            Pending::Products(products) => {
                self.submit_products(&products)?;
                products.held
            }
            Pending::Sum(sum) => {
                let arguments = Arguments::new()
                    .wide(sum.a)
                    .wide(sum.b)
                    .wide(sum.out)
                    .wide(sum.pairs)
                    .wide(sum.pairs)
                    .int(0);
                let shape = pairs(sum.pairs);
                // SAFETY: three arrays of so many pairs, which are held.
                unsafe { self.launch(Text::Rows, sum.dtype, "combine", &shape, 0, arguments) }?;
                sum.held
            }
            Pending::Rotations(rotations) => {
                for item in &rotations.items {
                    self.submit_rotation(&rotations.turn, item)?;
                }
                rotations.held
            }
        };
        let_go(device, &held)
    }

    /// Puts a product off; `made` is the result and its memory.
    pub(super) fn defer_product(
        &mut self,
        device: &Device<'_>,
        x: &View,
        w: &Weight,
        (way, rows): (Way, usize),
        made: (Tensor, usize),
        inputs: &[Tensor],
    ) -> Result<()> {
        let mut held = hold(device, inputs)?;
        held.push(device.retain(made.0)?);
        let address = x.data as usize;
        if let Pending::Products(products) = &mut self.pending {
            let joins = products.x == address
                && products.way == way
                && products.rows == rows
                && products.dtype == x.dtype
                && products.items.len() < MOST_PRODUCTS
                && products.items.iter().all(|(other, _)| {
                    (other.bits, other.group_size, other.columns)
                        == (w.bits, w.group_size, w.columns)
                });
            if joins {
                products.items.push((*w, made.1));
                products.held.extend(held);
                return Ok(());
            }
        }
        self.flush(device)?;
        self.pending = Pending::Products(Products {
            x: address,
            way,
            rows,
            dtype: x.dtype,
            items: vec![(*w, made.1)],
            held,
        });
        Ok(())
    }

    fn submit_products(&mut self, products: &Products) -> Result<()> {
        match products.way {
            Way::Tiles => self.submit_tiles(products),
            way => {
                let x = (products.x, products.rows, products.dtype);
                self.submit_around(way, x, &products.items, None, Around::default())
            }
        }
    }

    /// With `gated`, address and kind of the gated activation of two products.
    pub(super) fn submit_few(
        &mut self,
        (x, rows, dtype): (usize, usize, DType),
        products: &[(Weight, usize)],
        gated: Option<(usize, i32)>,
        around: Around,
    ) -> Result<()> {
        let Some((first, _)) = products.first() else {
            return Ok(());
        };
        // With more rows the activations weigh more: two groups of 16 columns of the result share them.
        let (name, each) = match (gated, rows) {
            (Some(_), _) => ("few_rows_gated", 16),
            (None, 0..=2) => ("few_rows_1", 16),
            (None, _) => ("few_rows_2", 32),
        };
        let (weights, blocks) = weights(products, each);
        let mut arguments = Arguments::new().record(&weights).wide(x);
        if let Some((out, _)) = gated {
            arguments = arguments.wide(out);
        }
        arguments = arguments.int(first.columns as i32).int(rows as i32);
        if let Some((_, kind)) = gated {
            arguments = arguments.int(kind);
        }
        let arguments = arguments.record(&around.words());
        let blocks = match gated {
            Some(_) => first.rows.div_ceil(16) as u32,
            None => blocks,
        };
        let shape = Shape::line(blocks, 256);
        // SAFETY: each weight has its rows of k values, x `rows` of k, the results as many columns as weights have rows; what is
        // around the products is as long as their rows.
        unsafe { self.launch(first.text(), dtype, name, &shape, 0, arguments) }
    }

    /// By the kernel for so few rows.
    pub(super) fn submit_around(
        &mut self,
        way: Way,
        x: (usize, usize, DType),
        products: &[(Weight, usize)],
        gated: Option<(usize, i32)>,
        around: Around,
    ) -> Result<()> {
        match way {
            Way::Few => self.submit_few(x, products, gated, around),
            _ => self.submit_stream(x, products, gated, around),
        }
    }

    /// The same through the copy engine. With `gated`, address and kind of the gated activation of two products.
    pub(super) fn submit_stream(
        &mut self,
        (x, rows, dtype): (usize, usize, DType),
        products: &[(Weight, usize)],
        gated: Option<(usize, i32)>,
        around: Around,
    ) -> Result<()> {
        let Some((first, _)) = products.first().copied() else {
            return Ok(());
        };
        let mut items = products.to_vec();
        let mut waits = false;
        for (w, _) in &mut items {
            // A quantised weight comes from the host; a plain one may have been made by the kernel before.
            waits = waits || (w.bits == 16 && !self.pool.is_constant(w.words));
            w.words = self.maps_of(w, Reader::Stream)?;
        }
        let (record, tiles) = weights(&items, 16);
        // Without the addresses of scales and biases, which are in the maps.
        let (maps, rest) = (record.get(..3), record.get(9..));
        let (Some(maps), Some(rest)) = (maps, rest) else {
            return Ok(());
        };
        let mut fields = [0; 9];
        for (to, from) in fields.iter_mut().zip(maps.iter().chain(rest)) {
            *to = *from;
        }
        let (name, tiles) = match gated {
            Some(_) => ("stream_gated", first.rows.div_ceil(8) as u32),
            None => ("stream_rows", tiles),
        };
        let plan = Stream::of(
            &first,
            rows,
            dtype == DType::F16,
            tiles as usize,
            self.processors,
        );
        let mut arguments = Arguments::new().record(&fields).wide(x);
        if let Some((out, _)) = gated {
            arguments = arguments.wide(out);
        }
        arguments = arguments.int(first.columns as i32).int(rows as i32);
        if let Some((_, kind)) = gated {
            arguments = arguments.int(kind);
        }
        arguments = arguments
            .int(tiles as i32)
            .int(i32::from(waits))
            .record(&around.words());
        let shape = Shape {
            grid: [plan.blocks, 1, 1],
            threads: 32 * crate::kernels::STREAM_WARPS as u32,
            shared_bytes: plan.shared_bytes,
        };
        let text = Text::Streamed {
            bits: first.bits,
            group_size: first.group_size,
            stages: plan.stages,
        };
        let most = self.most_shared_bytes;
        // SAFETY: as above; the maps are those of the weights, and what is around the products is as long as their rows.
        unsafe { self.launch(text, dtype, name, &shape, most, arguments) }
    }

    fn submit_tiles(&mut self, products: &Products) -> Result<()> {
        let Some((first, _)) = products.items.first().copied() else {
            return Ok(());
        };
        let mut items = products.items.clone();
        let mut waits = false;
        for (w, _) in &mut items {
            waits = waits || (w.bits == 16 && !self.pool.is_constant(w.words));
            w.words = self.maps_of(w, Reader::Tiles)?;
        }
        let (record, tiles) = weights(&items, Tiles::ROWS);
        let Some(plan) = Tiles::of(&first, products.rows, tiles as usize, self.processors) else {
            return Err(AbiError::internal("a product with too many tiles"));
        };
        let x = self.driver.tiles(&Tiling {
            element: Element::Half,
            address: products.x,
            rows: products.rows,
            columns: first.columns,
            row_bytes: 2 * first.columns,
            tile_rows: plan.columns as u32,
            tile_columns: 64,
            is_swizzled: true,
        })?;
        let scratch = self.scratch(plan.scratch_bytes)?;
        let arguments = Arguments::new()
            .record(&record)
            .record(&x.0)
            .wide(scratch)
            .wide(self.counters)
            .int(first.columns as i32)
            .int(products.rows as i32)
            .int(tiles as i32)
            .int(i32::from(waits));
        let shape = Shape {
            grid: [plan.blocks as u32, plan.columns_of_tiles as u32, 1],
            threads: 128 * crate::kernels::TILE_TEAMS as u32 + 32,
            shared_bytes: plan.shared_bytes,
        };
        let text = Text::Tiled {
            bits: first.bits,
            group_size: first.group_size,
        };
        let most = self.most_shared_bytes;
        // SAFETY: as above; the scratch holds two parts of every block, the counters one number for every tile.
        unsafe { self.launch(text, products.dtype, plan.name, &shape, most, arguments) }
    }

    /// Makes a gated activation together with the two products that wait, if they are its inputs.
    pub(super) fn take_gated(
        &mut self,
        device: &Device<'_>,
        inputs: [usize; 2],
        out: usize,
        kind: i32,
    ) -> Result<bool> {
        let Pending::Products(products) = &self.pending else {
            return Ok(false);
        };
        let [(gate, gate_out), (up, up_out)] = products.items.as_slice() else {
            return Ok(false);
        };
        if [*gate_out, *up_out] != inputs || gate.rows != up.rows || products.way == Way::Tiles {
            return Ok(false);
        }
        let Pending::Products(products) = core::mem::take(&mut self.pending) else {
            return Ok(false);
        };
        let x = (products.x, products.rows, products.dtype);
        let gated = Some((out, kind));
        self.submit_around(products.way, x, &products.items, gated, Around::default())?;
        let_go(device, &products.held)?;
        Ok(true)
    }

    /// The sum that waits, if `x` is its result; everything else that waits is submitted.
    pub(super) fn take_sum(&mut self, device: &Device<'_>, x: usize) -> Result<Option<Sum>> {
        if !matches!(&self.pending, Pending::Sum(sum) if sum.out == x) {
            self.flush(device)?;
            return Ok(None);
        }
        match core::mem::take(&mut self.pending) {
            Pending::Sum(sum) => Ok(Some(sum)),
            _ => Ok(None),
        }
    }

    /// Puts a rotation off.
    pub(super) fn defer_rotation(
        &mut self,
        device: &Device<'_>,
        turn: Turn,
        x: &View,
        heads: i32,
        inputs: [Tensor; 3],
    ) -> Result<Tensor> {
        let joins = matches!(&self.pending, Pending::Rotations(waiting)
            if waiting.turn == turn && waiting.items.len() < MOST_ROTATIONS);
        if !joins {
            self.flush(device)?;
        }
        let (t, out) = self.output(device, x.dtype, x.shape())?;
        let item = Rotation {
            x: x.data as usize,
            out,
            heads,
        };
        let mut held = hold(device, &inputs)?;
        held.push(device.retain(t)?);
        match &mut self.pending {
            Pending::Rotations(waiting) => {
                waiting.items.push(item);
                waiting.held.extend(held);
            }
            pending => {
                *pending = Pending::Rotations(Rotations {
                    turn,
                    items: vec![item],
                    held,
                });
            }
        }
        Ok(t)
    }

    fn submit_rotation(&mut self, turn: &Turn, item: &Rotation) -> Result<()> {
        let arguments = Arguments::new()
            .wide(item.x)
            .wide(turn.positions)
            .wide(turn.table)
            .wide(item.out)
            .int(item.heads)
            .int(turn.width)
            .int(turn.dims)
            .int(turn.interleaved)
            .int(turn.is_inverse)
            .float(turn.scale);
        let shape = Shape {
            grid: [
                turn.rows as u32,
                across(item.heads * (turn.width - turn.dims / 2)),
                1,
            ],
            threads: 256,
            shared_bytes: 0,
        };
        // SAFETY: shapes were checked when it was put off.
        unsafe { self.launch(Text::Rows, turn.dtype, "rope", &shape, 0, arguments) }
    }

    /// Rotates and appends in one kernel, if rotations of just these queries and keys wait. Says whether it did; everything else
    /// that waits is submitted.
    pub(super) fn rotate_and_append(&mut self, device: &Device<'_>, to: &Append) -> Result<bool> {
        let (turn, q, k) = match &self.pending {
            Pending::Rotations(waiting) => match waiting.items.as_slice() {
                [q, k] if q.out == to.q && k.out == to.k => (waiting.turn, *q, *k),
                _ => return self.flush(device).map(|()| false),
            },
            _ => return self.flush(device).map(|()| false),
        };
        let Pending::Rotations(waiting) = core::mem::take(&mut self.pending) else {
            return Ok(false);
        };
        let to = Append {
            q: q.x,
            k: k.x,
            ..*to
        };
        self.submit_rotations(&turn, [q.heads, k.heads], [q.out, k.out], &to)?;
        let_go(device, &waiting.held)?;
        Ok(true)
    }

    /// Rotates the queries and keys that `to` names, writes them to `outs`, and appends keys and values.
    pub(super) fn submit_rotations(
        &mut self,
        turn: &Turn,
        [heads, kv_heads]: [i32; 2],
        outs: [usize; 2],
        to: &Append,
    ) -> Result<()> {
        let arguments = Arguments::new()
            .wide(to.q)
            .wide(to.k)
            .wide(to.v)
            .wide(turn.positions)
            .wide(turn.table)
            .wide(outs[0])
            .wide(outs[1])
            .wide(to.key_pool)
            .wide(to.value_pool)
            .wide(to.slots)
            .int(heads)
            .int(kv_heads)
            .int(turn.width)
            .int(turn.dims)
            .int(turn.interleaved)
            .int(turn.is_inverse)
            .float(turn.scale)
            .int(to.pool_rows);
        let own = turn.width - turn.dims / 2;
        let shape = Shape {
            grid: [
                turn.rows as u32,
                across((heads + kv_heads) * own + kv_heads * turn.width),
                1,
            ],
            threads: 256,
            shared_bytes: 0,
        };
        // SAFETY: shapes were checked, those of the pools by the caller; slots outside are skipped.
        unsafe { self.launch(Text::Rows, turn.dtype, "rope_append", &shape, 0, arguments) }
    }
}

/// The kernels' `Weights`: addresses, widths and first blocks of up to three, and the number of blocks.
fn weights(items: &[(Weight, usize)], each: usize) -> ([u64; 15], u32) {
    let mut record = [0_u64; 15];
    let (mut widths, mut starts) = ([0_u32; 3], [i32::MAX as u32; 3]);
    let mut blocks = 0;
    for (i, (w, out)) in items.iter().enumerate().take(MOST_PRODUCTS) {
        for (field, value) in [w.words, w.scales, w.biases, *out].into_iter().enumerate() {
            if let Some(slot) = record.get_mut(field * MOST_PRODUCTS + i) {
                *slot = value as u64;
            }
        }
        if let (Some(width), Some(start)) = (widths.get_mut(i), starts.get_mut(i)) {
            *width = w.rows as u32;
            *start = blocks;
        }
        blocks += w.rows.div_ceil(each) as u32;
    }
    let numbers = [
        widths[0], widths[1], widths[2], starts[0], starts[1], starts[2],
    ];
    for (slot, pair) in record.iter_mut().skip(12).zip(numbers.chunks_exact(2)) {
        // Two 32-bit numbers lie in one word, the first in its low half.
        *slot = pair
            .iter()
            .rev()
            .fold(0, |word, number| word << 32 | u64::from(*number));
    }
    (record, blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_lie_as_the_kernels_read_them() {
        let weight = |words: usize, rows: usize| Weight {
            words,
            scales: words + 1,
            biases: words + 2,
            bits: 4,
            group_size: 64,
            rows,
            columns: 64,
        };
        let items = [(weight(10, 33), 100), (weight(20, 16), 200)];
        let (record, blocks) = weights(&items, 16);
        assert_eq!(record[..6], [10, 20, 0, 11, 21, 0]);
        assert_eq!(record[9..12], [100, 200, 0]);
        assert_eq!(record[12], 16 << 32 | 33);
        // Widths of the third and start of the first, then starts of the second and third.
        assert_eq!(record[13], 0);
        assert_eq!(record[14], (i32::MAX as u64) << 32 | 3);
        assert_eq!(blocks, 4);
    }
}
