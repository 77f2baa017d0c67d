//! Attention over the paged pool, which is written in place.

use core::ffi::c_void;

use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::decode::{self, Decode};
use super::pending::{Append, HeadNorms, Turn};
use super::{COUNTERS, Outcome, State, attempt, is_half, is_plain, refuse_gaps, small};
use crate::driver::{Arguments, Element, Shape, TensorMap, Tiling};
use crate::kernels::{GROUP_ARCHITECTURE, PREFILL_KEYS, PREFILL_ROWS, PREFILL_STAGES, Text};

/// Query rows of a block of `prefill_rows`.
const TILE: usize = 64;
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

unsafe extern "C" fn paged_attention(
    ctx: *mut c_void,
    args: *const PagedAttentionArgs,
    out: *mut [Tensor; 3],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        if out.is_null() {
            return Ok(Outcome::Pass);
        }
        // SAFETY: the slot's contract: a live argument struct.
        let args = unsafe { PagedAttentionArgs::read(args) }?;
        // SAFETY: the slot's contract: the boundaries are as many as it says.
        match unsafe { attend(device, state, &args, None) }? {
            Some(made) => {
                // SAFETY: not null, and the caller's to write.
                unsafe { out.write(made) };
                Ok(Outcome::Done)
            }
            None => Ok(Outcome::Pass),
        }
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, true, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.paged_attention)(ctx, args, out, err),
        }
    }
}

unsafe extern "C" fn rotated_paged_attention(
    ctx: *mut c_void,
    args: *const PagedAttentionArgs,
    rotate: *const RotateArgs,
    out: *mut [Tensor; 3],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        if out.is_null() {
            return Ok(Outcome::Pass);
        }
        // SAFETY: the slot's contract: live argument structs.
        let (args, rotate) =
            unsafe { (PagedAttentionArgs::read(args)?, RotateArgs::read(rotate)?) };
        // SAFETY: the slot's contract: the boundaries are as many as it says.
        match unsafe { attend(device, state, &args, Some(&rotate)) }? {
            Some(made) => {
                // SAFETY: not null, and the caller's to write.
                unsafe { out.write(made) };
                Ok(Outcome::Done)
            }
            None => Ok(Outcome::Pass),
        }
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, true, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.rotated_paged_attention)(ctx, args, rotate, out, err),
        }
    }
}

fn integers(device: &Device<'_>, state: &State, t: Tensor) -> Result<Option<View>> {
    let view = state.input(device, t)?;
    Ok((is_plain(&view, 4) && view.dtype == DType::I32).then_some(view))
}

/// The sizes of one call.
struct Sizes {
    rows: i32,
    heads: i32,
    kv_heads: i32,
    width: u32,
    page_size: i32,
    pages: i32,
    /// Rows of the page table, and its columns.
    sequences: i32,
    table_width: i32,
}

/// With `flat`, queries, keys and values may come as products give them, a row without its heads.
fn sizes(
    views: [&View; 5],
    page_table: &View,
    slots: &View,
    positions: &View,
    flat: bool,
) -> Option<Sizes> {
    let [q, k, v, k_pool, v_pool] = views;
    let &[pages, page_size, pool_heads, pool_width] = k_pool.shape() else {
        return None;
    };
    let split = |view: &View| match *view.shape() {
        [rows, heads, width] => Some([rows, heads, width]),
        [rows, all] if flat && pool_width > 0 && all % pool_width == 0 => {
            Some([rows, all / pool_width, pool_width])
        }
        _ => None,
    };
    let ([rows, heads, width], [k_rows, kv_heads, k_width]) = (split(q)?, split(k)?);
    let &[sequences, table_width] = page_table.shape() else {
        return None;
    };
    let fits = k_rows == rows
        && split(v)? == split(k)?
        && v_pool.shape() == k_pool.shape()
        && [k_width, pool_width] == [width; 2]
        && pool_heads == kv_heads
        && heads % kv_heads == 0
        && heads / kv_heads <= TILE as i64
        && matches!(width, 64 | 128 | 256)
        && (page_size as u64).is_power_of_two()
        && slots.shape() == [rows]
        && positions.shape() == [rows]
        && table_width > 0
        && small(pages * page_size).is_some()
        && small(table_width * page_size).is_some();
    fits.then_some(())?;
    Some(Sizes {
        rows: small(rows)?,
        heads: small(heads)?,
        kv_heads: small(kv_heads)?,
        width: width as u32,
        page_size: small(page_size)?,
        pages: small(pages)?,
        sequences: small(sequences)?,
        table_width: small(table_width)?,
    })
}

/// Whether there are sequences with one row, and with more; without boundaries every row is taken by itself.
///
/// # Safety
/// `row_starts` is null or has `n_sequences + 1` values.
unsafe fn shape_of_step(args: &PagedAttentionArgs) -> (bool, bool) {
    if args.row_starts.is_null() {
        return (true, false);
    }
    // SAFETY: forwarded to the caller.
    let starts =
        unsafe { core::slice::from_raw_parts(args.row_starts, args.n_sequences as usize + 1) };
    let lengths = || {
        starts
            .windows(2)
            .filter_map(|pair| pair.last()?.checked_sub(*pair.first()?))
    };
    (lengths().any(|n| n == 1), lengths().any(|n| n > 1))
}

/// # Safety
/// As for [`shape_of_step`].
pub(super) unsafe fn attend(
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
    let is_plain_form = args.selection.is_none()
        && [args.latent_dim, args.read_only, args.chunk] == [0; 3]
        && args.softcap >= 0.0
        && small(i64::from(args.window)).is_some();
    let (q, _) = device.view(args.q)?;
    if !is_plain_form || !is_half(q.dtype) {
        return Ok(None);
    }
    let views = [args.q, args.k, args.v, args.k_pool, args.v_pool].map(|t| state.input(&device, t));
    let [q, k, v, k_pool, v_pool] = views;
    let (q, k, v, k_pool, v_pool) = (q?, k?, v?, k_pool?, v_pool?);
    let all = [&q, &k, &v, &k_pool, &v_pool];
    refuse_gaps(state, &[&q, &k, &v])?;
    let same = all
        .iter()
        .all(|view| view.dtype == q.dtype && is_plain(view, 16));
    let (Some(slots), Some(sequences), Some(positions), Some(page_table), true) = (
        integers(&device, state, args.slots)?,
        integers(&device, state, args.row_sequences)?,
        integers(&device, state, args.positions)?,
        integers(&device, state, args.page_table)?,
        same,
    ) else {
        return Ok(None);
    };
    let Some(sizes) = sizes(all, &page_table, &slots, &positions, rotate.is_some()) else {
        return Ok(None);
    };
    let sinks = if args.sinks.is_none() {
        0
    } else {
        let sinks = state.input(&device, args.sinks)?;
        if sinks.dtype != q.dtype
            || !is_plain(&sinks, 2)
            || sinks.shape() != [i64::from(sizes.heads)]
        {
            return Ok(None);
        }
        sinks.data as usize
    };
    let rotation = match rotate.filter(|rotate| rotate.dims > 0 || rotate.normed != 0) {
        None => None,
        Some(rotate) => match turn(&device, state, rotate, &positions, &sizes, q.dtype)? {
            None => return Ok(None),
            found => found,
        },
    };
    let (t, out) = state.output(&device, q.dtype, q.shape())?;
    let per_key = (sizes.heads / sizes.kv_heads) as u32;
    let group = GROUPS
        .into_iter()
        .find(|g| per_key.is_multiple_of(*g) && (sizes.width < 256 || *g <= 4))
        .unwrap_or(1);
    let of_block = |group: u32| sizes.heads as usize / group as usize;
    let blocks = of_block(group);
    // The kernel for one row each has room for fewer heads; blocks that share a key head read it once more.
    let fewer = GROUPS
        .into_iter()
        .find(|g| per_key.is_multiple_of(*g) && *g <= decode::MOST_HEADS)
        .unwrap_or(1);
    let keys = (sizes.table_width * sizes.page_size) as usize;
    let to = Append {
        q: q.data as usize,
        k: k.data as usize,
        v: v.data as usize,
        key_pool: k_pool.data as usize,
        value_pool: v_pool.data as usize,
        slots: slots.data as usize,
        pool_rows: sizes.pages * sizes.page_size,
    };
    // SAFETY: forwarded to the caller.
    let is_decode = !state.keeps_rows_apart
        && rotate.is_some()
        && decode::can_turn(rotation.as_ref())
        && unsafe { decode::has_one_row_each(args, sizes.rows) };
    let division = is_decode
        .then(|| {
            let blocks = of_block(fewer) * sizes.rows as usize;
            state.division((sizes.width, fewer), blocks, keys)
        })
        .flatten();
    if let Some(division) = division {
        state.flush(&device)?;
        state.submit_decode(&Decode {
            division,
            append: to,
            turn: rotation,
            row_sequences: sequences.data as usize,
            positions: positions.data as usize,
            page_table: page_table.data as usize,
            sinks,
            out,
            rows: sizes.rows,
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            width: sizes.width,
            group: fewer,
            page_shift: sizes.page_size.trailing_zeros(),
            table_width: sizes.table_width,
            pages: sizes.pages,
            window: args.window as i32,
            sequences: sizes.sequences,
            scale: args.scale,
            softcap: args.softcap,
            dtype: q.dtype,
        })?;
        return Ok(Some([
            t,
            device.retain(args.k_pool)?,
            device.retain(args.v_pool)?,
        ]));
    }
    let mut queries = (q.data as usize, 0, 0);
    let appended = match rotation {
        None => state.rotate_and_append(&device, &to)?,
        Some(turn) => {
            state.flush(&device)?;
            // Rotated queries are needed by the next kernels alone: whoever is given their memory comes after those.
            let bytes = q.len() * q.dtype.size_bytes() + k.len() * q.dtype.size_bytes();
            let (address, size) = state.pool.take(state.driver, bytes)?;
            queries = (address, address, size);
            let keys = address + q.len() * q.dtype.size_bytes();
            state.submit_rotations(&turn, [sizes.heads, sizes.kv_heads], [address, keys], &to)?;
            true
        }
    };
    if !appended {
        append(state, &k, &v, &k_pool, &v_pool, &slots, &sizes)?;
    }
    // SAFETY: forwarded to the caller.
    let (has_alone, has_more) = unsafe { shape_of_step(args) };
    let text = Text::Attention {
        width: sizes.width,
        group,
    };
    let prefills = has_more && sizes.width <= 128 && !state.keeps_rows_apart;
    // Of `rows` rows from `first` on.
    let arguments = |start: Arguments, (first, rows): (usize, usize), (parts, counters)| {
        let before = first * sizes.heads as usize * sizes.width as usize * q.dtype.size_bytes();
        start
            .wide(queries.0 + before)
            .wide(k_pool.data as usize)
            .wide(v_pool.data as usize)
            .wide(sequences.data as usize + first * size_of::<i32>())
            .wide(positions.data as usize + first * size_of::<i32>())
            .wide(page_table.data as usize)
            .wide(sinks)
            .wide(out + before)
            .wide(parts)
            .wide(counters)
            .int(rows as i32)
            .int(sizes.heads)
            .int(sizes.kv_heads)
            .int(sizes.page_size.trailing_zeros() as i32)
            .int(sizes.table_width)
            .int(sizes.pages)
            .int(args.window as i32)
            .float(args.scale)
            .float(args.softcap)
            .int(i32::from(prefills))
    };
    let all_rows = (0, sizes.rows as usize);
    if has_alone || !prefills {
        // A part's keys follow from the row's own position and how many parts there are.
        let (splits, most_rows) = match state.keeps_rows_apart {
            true => (
                APART_SPLITS,
                APART_ROWS.min(COUNTERS / blocks.max(1)).max(1),
            ),
            false => (
                splits(blocks * all_rows.1, keys, state.processors as usize),
                all_rows.1,
            ),
        };
        let mut first = 0;
        while first < all_rows.1 {
            let rows = (all_rows.1 - first).min(most_rows);
            let parts = if splits > 1 {
                let of_row = sizes.heads as usize * splits * (sizes.width as usize + 2);
                state.scratch(rows * of_row * size_of::<f32>())?
            } else {
                0
            };
            let shape = Shape {
                grid: [splits as u32, blocks as u32, rows as u32],
                threads: 128,
                shared_bytes: 0,
            };
            let to = (parts, state.counters);
            let arguments = arguments(Arguments::new(), (first, rows), to);
            // SAFETY: shapes were checked; the scratch holds a part of every row, head and split.
            unsafe { state.launch(text, q.dtype, "decode_rows", &shape, 0, arguments) }?;
            first += rows;
        }
    }
    let in_tiles = state.architecture == GROUP_ARCHITECTURE
        && sizes.page_size >= LEAST_PAGE
        && args.scale > 0.0;
    if prefills && in_tiles {
        let pools = [k_pool.data as usize, v_pool.data as usize];
        let [keys, values] = pool_maps(state, &sizes, pools)?;
        let start = Arguments::new().record(&keys.0).record(&values.0);
        let tokens_each = PREFILL_ROWS / per_key as usize;
        let head = sizes.width as usize * 2;
        let tiles = PREFILL_ROWS + 2 * PREFILL_STAGES * PREFILL_KEYS;
        let shape = Shape {
            grid: [
                (sizes.rows as usize).div_ceil(tokens_each) as u32,
                sizes.kv_heads as u32,
                1,
            ],
            threads: 2 * PREFILL_ROWS as u32 + 32,
            shared_bytes: (tiles * head + 3 * PREFILL_STAGES * size_of::<u64>()) as u32,
        };
        let text = Text::Prefill { width: sizes.width };
        let (arguments, most) = (arguments(start, all_rows, (0, 0)), state.most_shared_bytes);
        // SAFETY: shapes were checked; the maps are those of the pools.
        unsafe { state.launch(text, q.dtype, "prefill_tiles", &shape, most, arguments) }?;
    } else if prefills {
        let tokens_each = TILE / per_key as usize;
        let shape = Shape {
            grid: [
                (sizes.rows as usize).div_ceil(tokens_each) as u32,
                sizes.kv_heads as u32,
                1,
            ],
            threads: 128,
            shared_bytes: 4 * TILE as u32 * sizes.width * 2,
        };
        let arguments = arguments(Arguments::new(), all_rows, (0, 0));
        // SAFETY: shapes were checked.
        unsafe {
            state.launch(
                text,
                q.dtype,
                "prefill_rows",
                &shape,
                shape.shared_bytes,
                arguments,
            )
        }?;
    }
    if queries.2 > 0 {
        state.pool.put(queries.1, queries.2);
    }
    Ok(Some([
        t,
        device.retain(args.k_pool)?,
        device.retain(args.v_pool)?,
    ]))
}

/// How queries and keys are turned; none where the kernel cannot.
fn turn(
    device: &Device<'_>,
    state: &mut State,
    rotate: &RotateArgs,
    positions: &View,
    sizes: &Sizes,
    dtype: DType,
) -> Result<Option<Turn>> {
    let fits = rotate.normed <= 1
        && rotate.dims.is_multiple_of(2)
        && rotate.dims <= sizes.width
        && rotate.interleaved <= 1;
    if !fits {
        return Ok(None);
    }
    let Some(norms) = head_norms(device, state, rotate, sizes, dtype)? else {
        return Ok(None);
    };
    let is_given = !rotate.freqs.is_none();
    let table = if rotate.dims == 0 {
        0
    } else if is_given {
        let freqs = state.input(device, rotate.freqs)?;
        let half = i64::from(rotate.dims / 2);
        if freqs.dtype != DType::F32 || !is_plain(&freqs, 4) || freqs.shape() != [half] {
            return Ok(None);
        }
        freqs.data as usize
    } else if rotate.base > 0.0 {
        super::rows::frequencies(state, rotate.dims, rotate.base)?
    } else {
        return Ok(None);
    };
    Ok(Some(Turn {
        positions: positions.data as usize,
        table,
        dims: rotate.dims as i32,
        interleaved: rotate.interleaved as i32,
        is_inverse: i32::from(is_given),
        scale: rotate.scale,
        rows: sizes.rows,
        width: sizes.width as i32,
        dtype,
        norms,
    }))
}

/// How heads are normed; none where the kernels cannot.
fn head_norms(
    device: &Device<'_>,
    state: &State,
    rotate: &RotateArgs,
    sizes: &Sizes,
    dtype: DType,
) -> Result<Option<HeadNorms>> {
    if rotate.normed == 0 {
        return Ok(Some(HeadNorms::default()));
    }
    let mut found = HeadNorms {
        eps: rotate.eps,
        is_normed: true,
        ..HeadNorms::default()
    };
    for (weight, to) in [(rotate.q_norm, &mut found.q), (rotate.k_norm, &mut found.k)] {
        if weight.is_none() {
            continue;
        }
        let view = state.input(device, weight)?;
        if view.dtype != dtype || !is_plain(&view, 16) || view.shape() != [i64::from(sizes.width)] {
            return Ok(None);
        }
        *to = view.data as usize;
    }
    Ok(Some(found))
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

fn append(
    state: &mut State,
    k: &View,
    v: &View,
    k_pool: &View,
    v_pool: &View,
    slots: &View,
    sizes: &Sizes,
) -> Result<()> {
    let words = sizes.kv_heads * sizes.width as i32 / 2;
    let arguments = Arguments::new()
        .wide(k.data as usize)
        .wide(v.data as usize)
        .wide(k_pool.data as usize)
        .wide(v_pool.data as usize)
        .wide(slots.data as usize)
        .int(words)
        .int(words)
        .int(sizes.pages * sizes.page_size);
    let shape = Shape::line(sizes.rows as u32, 128);
    // SAFETY: the pools are the caller's to give: the slot may write into them. Slots outside are skipped.
    unsafe { state.launch(Text::Rows, DType::BF16, "append", &shape, 0, arguments) }
}

#[cfg(test)]
mod tests {
    use super::splits;

    #[test]
    fn short_sequences_and_full_devices_are_not_divided() {
        assert_eq!(splits(8, 32, 132), 1);
        assert_eq!(splits(512, 4096, 132), 1);
        assert_eq!(splits(8, 4096, 132), 33);
        assert_eq!(splits(1, 1 << 20, 132), 64);
    }
}
