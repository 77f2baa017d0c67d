//! Attention over the paged pool, which is written in place.

use core::ffi::c_void;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_cpu_kernels::attention::{Cells, CellsMut, Paged, paged};

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
        // SAFETY: the slot's contract: the caller holds the tensors and the boundaries.
        match unsafe { attend(native, state, &args) }? {
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

fn integers(native: &Native<'_>, t: Tensor) -> Result<Option<View>> {
    let view = native.view(t)?;
    Ok((view.is_contiguous && view.dtype == DType::I32).then_some(view))
}

/// # Safety
/// The caller holds all tensors, and `row_starts` has `n_sequences + 1` values.
unsafe fn attend(
    native: Native<'_>,
    state: &mut State,
    args: &PagedAttentionArgs,
) -> Result<Option<[Tensor; 3]>> {
    if args.row_starts.is_null() {
        return Ok(None);
    }
    if args.read_only != 0 || args.latent_dim > 0 || !args.selection.is_none() {
        // SAFETY: forwarded to the caller.
        return unsafe { super::sparse::special_attention(native, state, args) };
    }
    let (Some(q), Some(k), Some(v)) = (
        floats(&native, args.q)?,
        floats(&native, args.k)?,
        floats(&native, args.v)?,
    ) else {
        return Ok(None);
    };
    let (k_pool, v_pool) = (native.view(args.k_pool)?, native.view(args.v_pool)?);
    let alike = k_pool.dtype == v_pool.dtype && k_pool.is_contiguous && v_pool.is_contiguous;
    if !alike || k_pool.is_empty() || v_pool.is_empty() {
        return Ok(None);
    }
    let (Some(slots), Some(positions), Some(page_table)) = (
        integers(&native, args.slots)?,
        integers(&native, args.positions)?,
        integers(&native, args.page_table)?,
    ) else {
        return Ok(None);
    };
    let sinks = if args.sinks.is_none() {
        None
    } else {
        Some(floats(&native, args.sinks)?)
    };
    let (&[rows, heads, k_dim], &[k_rows, kv_heads, k_width], &[v_rows, v_heads, v_dim]) =
        (q.shape(), k.shape(), v.shape())
    else {
        return Ok(None);
    };
    let (&[pages, page_size, pool_heads, pool_k], &[v_pages, v_page_size, v_pool_heads, pool_v]) =
        (k_pool.shape(), v_pool.shape())
    else {
        return Ok(None);
    };
    let fits = [k_rows, v_rows] == [rows; 2]
        && k_width == k_dim
        && pool_k == k_dim
        && pool_v == v_dim
        && [v_heads, pool_heads, v_pool_heads] == [kv_heads; 3]
        && [v_pages, v_page_size] == [pages, page_size]
        && slots.shape() == [rows]
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
    let (slots, new_k, new_v, cells) = unsafe {
        (
            slots.as_slice::<i32>(),
            k.as_slice::<f32>(),
            v.as_slice::<f32>(),
            cells(&k_pool).zip(cells(&v_pool)),
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
    };
    let whole = Paged {
        keys: keys.cells(),
        values: values.cells(),
        ..step
    };
    if !whole.is_valid() {
        return Ok(None);
    }
    keys.append(slots, new_k, kv_heads * k_dim);
    values.append(slots, new_v, kv_heads * v_dim);
    let step = Paged {
        keys: keys.cells(),
        values: values.cells(),
        ..step
    };
    let shape = [rows, heads as i64, v_dim as i64];
    let result = filled(&native, &shape, "paged_attention", |out| {
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

/// The memory of a pool.
///
/// # Safety
/// The view is contiguous, its tensor lives for `'a`, and nobody else uses it meanwhile.
unsafe fn cells<'a>(pool: &View) -> Option<CellsMut<'a>> {
    // SAFETY: the type is checked; the rest is the caller's promise.
    unsafe {
        match pool.dtype {
            DType::F32 => Some(CellsMut::F32(pool.as_mut_slice())),
            DType::F16 => Some(CellsMut::F16(pool.as_mut_slice())),
            DType::BF16 => Some(CellsMut::Bf16(pool.as_mut_slice())),
            _ => None,
        }
    }
}
