//! Attention over the paged pool, which is written in place: which kernels take a call (`paged.rs`), and how it is divided.

use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::decode::{self, Decode};
use super::paged::{Call, Lengths, MOST_SHARING, Sizes};
use super::{COUNTERS, State, slot};
use crate::driver::{Arguments, Element, MOST_ACROSS, Shape, TensorMap, Tiling};
use crate::kernels::{GROUP_ARCHITECTURE, PREFILL_KEYS, PREFILL_ROWS, PREFILL_STAGES, Text};

/// Query rows of a block of `prefill_rows`.
const TILE: usize = MOST_SHARING;
/// Query heads that share a key head, as `decode_rows` is compiled for.
const GROUPS: [u32; 5] = [8, 4, 3, 2, 1];
/// Rows of a page from which on the copy engine brings them: its swizzle is of 8 rows.
const LEAST_PAGE: i32 = 8;
/// Most parts that a sequence is divided into.
const MOST_SPLITS: usize = 64;
/// Parts of every row where rows are kept apart, and rows that are submitted at a time then.
const APART_SPLITS: usize = 16;
const APART_ROWS: usize = 512;
/// Keys below which another part does not pay.
const LEAST_KEYS: usize = 64;

pub(super) fn install(table: &mut BackendOps) {
    table.paged_attention = paged_attention;
    table.rotated_paged_attention = rotated_paged_attention;
}

slot!(join paged_attention(args: *const PagedAttentionArgs) -> [Tensor; 3] |device, state| {
    // SAFETY: the slot's contract: a live argument struct, whose boundaries are as many as it says.
    unsafe { attend(device, state, &PagedAttentionArgs::read(args)?, None) }
});
slot!(join rotated_paged_attention(args: *const PagedAttentionArgs, rotate: *const RotateArgs) -> [Tensor; 3] |device, state| {
    // SAFETY: the slot's contract: live argument structs, and boundaries as above.
    unsafe { attend(device, state, &PagedAttentionArgs::read(args)?, Some(&RotateArgs::read(rotate)?)) }
});

/// # Safety
/// As for [`Lengths::of`].
unsafe fn attend(
    device: Device<'_>,
    state: &mut State,
    args: &PagedAttentionArgs,
    rotate: Option<&RotateArgs>,
) -> Result<Option<[Tensor; 3]>> {
    state.settle(
        &device,
        &[
            args.q,
            args.k,
            args.v,
            args.k_pool,
            args.v_pool,
            args.slots,
            args.positions,
            args.sinks,
        ],
    )?;
    let Some(call) = Call::read(&device, state, args, rotate)? else {
        return Ok(None);
    };
    state.queue.set_busy(call.sizes.rows > IDLE_ROWS)?;
    // SAFETY: forwarded to the caller.
    let lengths = unsafe { Lengths::of(args, call.sizes.rows) };
    let (t, out) = state.output(&device, call.dtype, call.q.shape())?;
    match call.as_one(state, lengths, out) {
        Some(decode) => {
            state.flush(&device)?;
            state.submit_decode(&decode)?;
        }
        None => call.in_parts(&device, state, lengths, out)?,
    }
    Ok(Some([
        t,
        device.retain(args.k_pool)?,
        device.retain(args.v_pool)?,
    ]))
}

/// Rows of a step up to which the device may have to wait for the host.
const IDLE_ROWS: i32 = 256;

/// Query heads of a block: the most of those that a kernel is compiled for, up to `most`.
fn group_of(per_key: u32, most: u32) -> u32 {
    let fits = |group: &u32| per_key.is_multiple_of(*group) && *group <= most;
    GROUPS.into_iter().find(fits).unwrap_or(1)
}

impl Call {
    /// As the kernel for rows that are alone in their sequences takes it, if it does.
    fn as_one(&self, state: &State, lengths: Lengths, out: usize) -> Option<Decode> {
        let takes = !state.keeps_rows_apart
            && self.is_rotated
            && decode::can_turn(self.turn.as_ref())
            && lengths.is_one_each;
        if !takes {
            return None;
        }
        let sizes = self.sizes;
        // It has room for fewer heads; blocks that share a key head read it once more.
        let group = group_of(sizes.per_key(), decode::MOST_HEADS);
        let blocks = sizes.heads as usize / group as usize * sizes.rows as usize;
        Some(Decode {
            division: state.division((sizes.width, group), blocks, sizes.keys())?,
            append: self.append,
            turn: self.turn,
            row_sequences: self.row_sequences,
            positions: self.positions,
            page_table: self.page_table,
            sinks: self.sinks,
            out,
            rows: sizes.rows,
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            width: sizes.width,
            group,
            page_shift: sizes.page_shift(),
            table_width: sizes.table_width,
            pages: sizes.pages,
            window: self.window,
            sequences: sizes.sequences,
            scale: self.scale,
            softcap: self.softcap,
            dtype: self.dtype,
        })
    }

    /// Rotation, append and attention by kernels of their own.
    fn in_parts(
        &self,
        device: &Device<'_>,
        state: &mut State,
        lengths: Lengths,
        out: usize,
    ) -> Result<()> {
        let Some(turn) = &self.turn else {
            if !state.rotate_and_append(device, &self.append)? {
                self.append(state)?;
            }
            return self.attend(state, self.append.q, lengths, out);
        };
        state.flush(device)?;
        let element = self.dtype.size_bytes();
        let (q_bytes, k_bytes) = (self.q.len() * element, self.k.len() * element);
        // Rotated queries are needed by the next kernels alone: whoever is given their memory comes after those.
        let (queries, taken) = state.pool.take(state.driver, q_bytes + k_bytes)?;
        let heads = [self.sizes.heads, self.sizes.kv_heads];
        let submitted = state
            .submit_rotations(turn, heads, [queries, queries + q_bytes], &self.append)
            .and_then(|()| self.attend(state, queries, lengths, out));
        state.pool.put(queries, taken);
        submitted
    }

    fn append(&self, state: &mut State) -> Result<()> {
        let to = &self.append;
        let words = self.sizes.kv_heads * self.sizes.width as i32 / 2;
        let arguments = Arguments::new()
            .wide(to.k)
            .wide(to.v)
            .wide(to.key_pool)
            .wide(to.value_pool)
            .wide(to.slots)
            .int(words)
            .int(words)
            .int(to.pool_rows);
        let shape = Shape::line(self.sizes.rows as u32, 128);
        // SAFETY: the pools are the caller's to give: the slot may write into them. Slots outside are skipped.
        unsafe { state.launch(Text::Rows, DType::BF16, "append", &shape, 0, arguments) }
    }

    /// Attention of `queries`, whose keys and values are in the pool.
    fn attend(
        &self,
        state: &mut State,
        queries: usize,
        lengths: Lengths,
        out: usize,
    ) -> Result<()> {
        let prefills = lengths.has_more && self.sizes.width <= 128 && !state.keeps_rows_apart;
        if lengths.has_one || !prefills {
            self.row_by_row(state, (queries, out), prefills)?;
        }
        if !prefills {
            return Ok(());
        }
        let in_tiles = state.architecture == GROUP_ARCHITECTURE
            && self.sizes.page_size >= LEAST_PAGE
            && self.scale > 0.0;
        match in_tiles {
            true => self.prefill_tiles(state, (queries, out)),
            false => self.prefill_rows(state, (queries, out)),
        }
    }

    /// Query heads of a block of `decode_rows`.
    fn group(&self) -> u32 {
        let most = if self.sizes.width < 256 { 8 } else { 4 };
        group_of(self.sizes.per_key(), most)
    }

    fn text(&self) -> Text {
        Text::Attention {
            width: self.sizes.width,
            group: self.group(),
        }
    }

    /// What all three kernels take, of `rows` rows from `first` on. With `alone_only` rows of longer sequences are left out.
    fn arguments(
        &self,
        start: Arguments,
        (queries, out): (usize, usize),
        (first, rows): (usize, usize),
        (parts, counters): (usize, usize),
        alone_only: bool,
    ) -> Arguments {
        let sizes = &self.sizes;
        let of_row = sizes.heads as usize * sizes.width as usize * self.dtype.size_bytes();
        start
            .wide(queries + first * of_row)
            .wide(self.append.key_pool)
            .wide(self.append.value_pool)
            .wide(self.row_sequences + first * size_of::<i32>())
            .wide(self.positions + first * size_of::<i32>())
            .wide(self.page_table)
            .wide(self.sinks)
            .wide(out + first * of_row)
            .wide(parts)
            .wide(counters)
            .int(rows as i32)
            .int(sizes.heads)
            .int(sizes.kv_heads)
            .int(sizes.page_shift() as i32)
            .int(sizes.table_width)
            .int(sizes.pages)
            .int(self.window)
            .float(self.scale)
            .float(self.softcap)
            .int(i32::from(alone_only))
    }

    /// By `decode_rows`.
    fn row_by_row(
        &self,
        state: &mut State,
        places: (usize, usize),
        alone_only: bool,
    ) -> Result<()> {
        let rows = self.sizes.rows as usize;
        let blocks = self.sizes.heads as usize / self.group() as usize;
        // A part's keys follow from the row's own position and how many parts there are.
        let (splits, most_rows) = match state.keeps_rows_apart {
            true => (
                APART_SPLITS,
                APART_ROWS.min(COUNTERS / blocks.max(1)).max(1),
            ),
            false => {
                let most_rows = rows.min(MOST_ACROSS);
                let processors = state.processors as usize;
                (
                    splits(blocks * most_rows, self.sizes.keys(), processors),
                    most_rows,
                )
            }
        };
        for first in (0..rows).step_by(most_rows) {
            let rows = (rows - first).min(most_rows);
            let parts = if splits > 1 {
                let of_row = self.sizes.heads as usize * splits * (self.sizes.width as usize + 2);
                state.scratch(rows * of_row * size_of::<f32>())?
            } else {
                0
            };
            let shape = Shape {
                grid: [splits as u32, blocks as u32, rows as u32],
                threads: 128,
                shared_bytes: 0,
            };
            let adds = (parts, state.counters);
            let arguments =
                self.arguments(Arguments::new(), places, (first, rows), adds, alone_only);
            // SAFETY: shapes were checked; the scratch holds a part of every row, head and split.
            unsafe { state.launch(self.text(), self.dtype, "decode_rows", &shape, 0, arguments) }?;
        }
        Ok(())
    }

    /// Blocks of `each` query rows, a row being a token and one of the heads that share a key head.
    fn tiles(&self, each: usize) -> [u32; 3] {
        let tokens_each = each / self.sizes.per_key() as usize;
        let blocks = (self.sizes.rows as usize).div_ceil(tokens_each);
        [blocks as u32, self.sizes.kv_heads as u32, 1]
    }

    /// Through the copy engine and by groups of warps.
    fn prefill_tiles(&self, state: &mut State, places: (usize, usize)) -> Result<()> {
        let pools = [self.append.key_pool, self.append.value_pool];
        let [keys, values] = pool_maps(state, &self.sizes, pools)?;
        let start = Arguments::new().record(&keys.0).record(&values.0);
        let head = self.sizes.width as usize * 2;
        let tiles = PREFILL_ROWS + 2 * PREFILL_STAGES * PREFILL_KEYS;
        let shape = Shape {
            grid: self.tiles(PREFILL_ROWS),
            threads: 2 * PREFILL_ROWS as u32 + 32,
            shared_bytes: (tiles * head + 3 * PREFILL_STAGES * size_of::<u64>()) as u32,
        };
        let text = Text::Prefill {
            width: self.sizes.width,
        };
        let all = (0, self.sizes.rows as usize);
        let arguments = self.arguments(start, places, all, (0, 0), true);
        let most = state.most_shared_bytes;
        // SAFETY: shapes were checked; the maps are those of the pools.
        unsafe { state.launch(text, self.dtype, "prefill_tiles", &shape, most, arguments) }
    }

    /// On any device.
    fn prefill_rows(&self, state: &mut State, places: (usize, usize)) -> Result<()> {
        let shape = Shape {
            grid: self.tiles(TILE),
            threads: 128,
            shared_bytes: 4 * TILE as u32 * self.sizes.width * 2,
        };
        let all = (0, self.sizes.rows as usize);
        let arguments = self.arguments(Arguments::new(), places, all, (0, 0), true);
        let (text, most) = (self.text(), shape.shared_bytes);
        // SAFETY: shapes were checked.
        unsafe { state.launch(text, self.dtype, "prefill_rows", &shape, most, arguments) }
    }
}

/// Pages of keys and of values for the copy engine.
fn pool_maps(state: &State, sizes: &Sizes, pools: [usize; 2]) -> Result<[TensorMap; 2]> {
    let columns = sizes.kv_heads as usize * sizes.width as usize;
    let tiling = |address| Tiling {
        element: Element::Half,
        address,
        rows: sizes.pages as usize * sizes.page_size as usize,
        columns,
        row_bytes: 2 * columns,
        tile_rows: (sizes.page_size as u32).min(PREFILL_KEYS as u32),
        tile_columns: 64,
        is_swizzled: true,
    };
    let [keys, values] = pools;
    Ok([
        state.driver.tiles(&tiling(keys))?,
        state.driver.tiles(&tiling(values))?,
    ])
}

/// Parts of a sequence: enough blocks to fill the device twice, each with enough keys.
fn splits(blocks: usize, keys: usize, processors: usize) -> usize {
    if blocks > COUNTERS {
        return 1;
    }
    let to_fill = (2 * processors) / blocks.max(1);
    to_fill.min(keys.div_ceil(LEAST_KEYS)).clamp(1, MOST_SPLITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sequences_and_full_devices_are_not_divided() {
        assert_eq!(splits(8, 32, 132), 1);
        assert_eq!(splits(512, 4096, 132), 1);
        assert_eq!(splits(8, 4096, 132), 33);
        assert_eq!(splits(1, 1 << 20, 132), 64);
    }

    #[test]
    fn blocks_have_as_many_heads_as_a_kernel_takes() {
        assert_eq!(
            [1, 2, 3, 4, 6, 7, 8, 12].map(|n| group_of(n, 8)),
            [1, 2, 3, 4, 3, 1, 8, 4]
        );
        assert_eq!([1, 8, 6, 64].map(|n| group_of(n, 4)), [1, 4, 3, 4]);
    }
}
