//! Submitting products of one input by each of their kernels.

use mlxcel_abi::{AbiError, DType, Result};

use super::State;
use super::maps::Reader;
use super::pending::{MOST_PRODUCTS, Products};
use super::plan::{Plan, Stream, Tiles, Way};
use super::products::Weight;
use crate::driver::{Arguments, Element, Shape, Tiling, pair};
use crate::kernels::Text;

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
    pub(super) fn words(&self) -> [u64; 3] {
        let normed = match (self.is_normed, self.norm) {
            (false, _) => 0,
            (true, 0) => 1,
            (true, _) => 2,
        };
        let last = pair(self.eps.to_bits(), normed);
        [self.norm as u64, self.residual as u64, last]
    }
}

impl State {
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
        let (record, blocks) = weights(products, each);
        let arguments = of_products(&record, x, (first.columns, rows), gated);
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
            Way::Clusters => self.submit_clustered(x, products, around),
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
        let arguments = of_products(&record, x, (first.columns, rows), gated)
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

    /// `out = x @ w.T` for many rows of x, divided as `plan` says; addresses on the device.
    pub(super) fn submit_many(
        &mut self,
        w: &Weight,
        (x, rows, dtype): (usize, usize, DType),
        out: usize,
        plan: &Plan,
    ) -> Result<()> {
        let parts = match plan.splits {
            1 => 0,
            splits => self.scratch(splits * rows * w.rows * size_of::<f32>())?,
        };
        let arguments = Arguments::new()
            .wide(w.words)
            .wide(w.scales)
            .wide(w.biases)
            .wide(x)
            .wide(out)
            .wide(parts)
            .wide(self.counters)
            .int(w.rows as i32)
            .int(w.columns as i32)
            .int(rows as i32)
            .int(plan.steps_each as i32);
        let shape = Shape {
            grid: [plan.tiles.0 as u32, plan.tiles.1 as u32, plan.splits as u32],
            threads: 128,
            shared_bytes: plan.shared_bytes,
        };
        let most = self.most_shared_bytes;
        // SAFETY: the weight has its rows of values, x and the result have `rows`; the scratch holds a result of every split, the
        // counters one number for every tile.
        unsafe { self.launch(w.text(), dtype, plan.name, &shape, most, arguments) }
    }

    /// Through the copy engine and by groups of warps.
    pub(super) fn submit_tiles(&mut self, products: &Products) -> Result<()> {
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
            is_grouped: false,
        };
        let most = self.most_shared_bytes;
        // SAFETY: as above; the scratch holds two parts of every block, the counters one number for every tile.
        unsafe { self.launch(text, products.dtype, plan.name, &shape, most, arguments) }
    }
}

/// What kernels for products of one input take first: with `gated`, address and kind of the gated activation of two of them.
fn of_products(
    record: &[u64],
    x: usize,
    (columns, rows): (usize, usize),
    gated: Option<(usize, i32)>,
) -> Arguments {
    let start = Arguments::new().record(record).wide(x);
    let (columns, rows) = (columns as i32, rows as i32);
    match gated {
        None => start.int(columns).int(rows),
        Some((out, kind)) => start.wide(out).int(columns).int(rows).int(kind),
    }
}

/// The kernels' `Weights`: addresses, widths and first blocks of up to three, and the number of blocks.
pub(super) fn weights(items: &[(Weight, usize)], each: usize) -> ([u64; 15], u32) {
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
    for (slot, fields) in record.iter_mut().skip(12).zip(numbers.as_chunks().0) {
        let [first, second] = *fields;
        *slot = pair(first, second);
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
