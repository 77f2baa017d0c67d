//! Attention over the paged pool, which is written in place.

use core::ffi::c_void;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_cpu_kernels::attention::{Cells, CellsMut, Format, Paged, paged};

use super::operands::integers;
use super::{Outcome, State, attempt, filled, floats};

pub(super) fn install(table: &mut BackendOps) {
    table.paged_attention = paged_attention;
}

unsafe extern "C" fn paged_attention(
    ctx: *mut c_void,
    args: *const PagedAttentionArgs,
    out: *mut [Tensor; 3],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |native: Native<'_>, state: &mut State| {
        // SAFETY: the slot's contract: a live argument struct.
        let args = unsafe { PagedAttentionArgs::read(args) }?;
        let dtype = native.view(args.q)?.dtype;
        // SAFETY: the slot's contract: the caller holds the tensors and the boundaries.
        match unsafe { attend(native, state, &args, dtype) }? {
            Some(made) if !out.is_null() => {
                // SAFETY: not null, and the caller's to write.
                unsafe { out.write(made) };
                Ok(Outcome::Done)
            }
            _ => Ok(Outcome::Pass),
        }
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.paged_attention)(ctx, args, out, err),
        }
    }
}

/// A result of the given type, and the pools.
///
/// # Safety
/// The caller holds all tensors, and `row_starts` has `n_sequences + 1` values.
pub(super) unsafe fn attend(
    native: Native<'_>,
    state: &mut State,
    args: &PagedAttentionArgs,
    dtype: DType,
) -> Result<Option<[Tensor; 3]>> {
    if args.row_starts.is_null() {
        return Ok(None);
    }
    if args.latent_dim > 0 || !args.selection.is_none() {
        // SAFETY: forwarded to the caller.
        return unsafe { super::sparse::special_attention(native, state, args, dtype) };
    }
    let reads = args.read_only != 0;
    if reads != args.k.is_none() || reads != args.v.is_none() {
        return Ok(None);
    }
    let appended = |t: Tensor| match t.is_none() {
        true => Ok(Some(None)),
        false => floats(&native, t).map(|view| view.map(Some)),
    };
    let (Some(q), Some(k), Some(v)) = (
        floats(&native, args.q)?,
        appended(args.k)?,
        appended(args.v)?,
    ) else {
        return Ok(None);
    };
    let (k_pool, v_pool) = (native.view(args.k_pool)?, native.view(args.v_pool)?);
    let alike = k_pool.dtype == v_pool.dtype && k_pool.is_contiguous && v_pool.is_contiguous;
    if !alike || k_pool.is_empty() || v_pool.is_empty() {
        return Ok(None);
    }
    let (Some(positions), Some(page_table)) = (
        integers(&native, args.positions)?,
        integers(&native, args.page_table)?,
    ) else {
        return Ok(None);
    };
    let slots = match reads {
        true => None,
        false => match integers(&native, args.slots)? {
            Some(slots) => Some(slots),
            None => return Ok(None),
        },
    };
    let sinks = if args.sinks.is_none() {
        None
    } else {
        Some(floats(&native, args.sinks)?)
    };
    let (&[rows, heads, k_dim], &[pages, page_size, kv_heads, pool_k], &[_, _, _, pool_v]) =
        (q.shape(), k_pool.shape(), v_pool.shape())
    else {
        return Ok(None);
    };
    let Some(format) = format_of(&k_pool, k_dim) else {
        return Ok(None);
    };
    let Some(v_dim) = format.width(pool_v as usize).map(|width| width as i64) else {
        return Ok(None);
    };
    let is_shape =
        |view: Option<&View>, wanted: &[i64]| view.is_none_or(|view| view.shape() == wanted);
    let fits = format.row_len(k_dim as usize) == pool_k as usize
        && v_pool.shape() == [pages, page_size, kv_heads, pool_v]
        && is_shape(k.as_deref(), &[rows, kv_heads, k_dim])
        && is_shape(v.as_deref(), &[rows, kv_heads, v_dim])
        && is_shape(slots.as_ref(), &[rows])
        && positions.shape() == [rows]
        && page_table.shape().len() == 2
        && page_table.shape().first() == Some(&i64::from(args.n_sequences))
        && !matches!(sinks, Some(None));
    if !fits {
        return Ok(None);
    }
    let pool_rows = pages * page_size;
    // SAFETY: contiguous views of the checked types. The pools are the caller's to give: the slot
    // may write into them, and nothing else reads them meanwhile.
    let (slots, cells) = unsafe {
        (
            slots.map_or(&[][..], |slots| slots.as_slice::<i32>()),
            cells(&k_pool, format).zip(cells(&v_pool, format)),
        )
    };
    let Some((mut keys, mut values)) = cells else {
        return Ok(None);
    };
    let outside = |slot: &i32| i64::from(*slot) < 0 || i64::from(*slot) >= pool_rows;
    if slots.iter().any(outside) {
        return Ok(None);
    }
    // SAFETY: contiguous views of the checked types, of tensors that the caller holds.
    let (queries, positions, page_table, row_starts, sinks) = unsafe {
        (
            q.as_slice::<f32>(),
            positions.as_slice::<i32>(),
            page_table.as_slice::<i32>(),
            core::slice::from_raw_parts(args.row_starts, args.n_sequences as usize + 1),
            sinks.flatten().map_or(&[][..], |s| s.as_slice::<f32>()),
        )
    };
    let (heads, kv_heads) = (heads as usize, kv_heads as usize);
    let (k_dim, v_dim) = (k_dim as usize, v_dim as usize);
    let step = Paged {
        q: queries,
        keys: Cells::F32(&[]),
        values: Cells::F32(&[]),
        positions,
        page_table,
        row_starts,
        sinks,
        heads,
        kv_heads,
        k_dim,
        v_dim,
        page_size: page_size as usize,
        scale: args.scale,
        softcap: args.softcap,
        window: args.window as usize,
        chunk: args.chunk as usize,
        keeps_rows_apart: state.keeps_rows_apart,
    };
    let whole = Paged {
        keys: keys.cells(),
        values: values.cells(),
        ..step
    };
    if !whole.is_valid() {
        return Ok(None);
    }
    if let (Some(k), Some(v)) = (k, v) {
        // SAFETY: contiguous views of the checked type, of tensors that the caller holds.
        let (new_k, new_v) = unsafe { (k.as_slice::<f32>(), v.as_slice::<f32>()) };
        keys.append(slots, new_k, [kv_heads, k_dim]);
        values.append(slots, new_v, [kv_heads, v_dim]);
    }
    let step = Paged {
        keys: keys.cells(),
        values: values.cells(),
        ..step
    };
    let shape = [rows, heads as i64, v_dim as i64];
    let result = filled(&native, dtype, &shape, "paged_attention", |out| {
        paged(state.isa, &mut state.pool, &step, out, &state.attention)
    })?;
    let Some(result) = result else {
        return Ok(None);
    };
    Ok(Some([
        result,
        native.retain(args.k_pool)?,
        native.retain(args.v_pool)?,
    ]))
}

/// How a pool whose rows have `width` elements is stored: bytes are quantised rows.
pub(super) fn format_of(pool: &View, width: i64) -> Option<Format> {
    let bytes = *pool.shape().last()?;
    match pool.dtype {
        DType::F32 | DType::F16 | DType::BF16 => Some(Format::Plain),
        DType::U8 => Format::of_bytes(usize::try_from(width).ok()?, usize::try_from(bytes).ok()?),
        _ => None,
    }
}

/// The memory of a pool.
///
/// # Safety
/// The view is contiguous, its tensor lives for `'a`, and nobody else uses it meanwhile.
pub(super) unsafe fn cells<'a>(pool: &View, format: Format) -> Option<CellsMut<'a>> {
    // SAFETY: the type is checked; the rest is the caller's promise.
    unsafe {
        match (pool.dtype, format) {
            (DType::F32, Format::Plain) => Some(CellsMut::F32(pool.as_mut_slice())),
            (DType::F16, Format::Plain) => Some(CellsMut::F16(pool.as_mut_slice())),
            (DType::BF16, Format::Plain) => Some(CellsMut::Bf16(pool.as_mut_slice())),
            (DType::U8, Format::Q8) => Some(CellsMut::Q8(pool.as_mut_slice())),
            (DType::U8, Format::Q4) => Some(CellsMut::Q4(pool.as_mut_slice())),
            _ => None,
        }
    }
}
