//! Attention in its less common forms, and the choice of keys.

use core::ffi::c_void;

use mlxcel_abi::cache_args::SparseIndexArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_cpu_kernels::attention::{Cells, CellsMut};
use mlxcel_cpu_kernels::sparse::{Attend, Index, Pages, attend, index};

use super::attention::{cells, format_of};
use super::operands::{Floats, integers};
use super::{Outcome, State, attempt, filled, floats};

pub(super) fn install(table: &mut BackendOps) {
    table.sparse_index = sparse_index;
}

/// Where the keys of every row are; none when that is not for a kernel.
///
/// # Safety
/// The caller holds the tensors for `'a`, and `row_starts` has `n_sequences + 1` values.
unsafe fn pages_of<'a>(
    native: &Native<'_>,
    (positions, page_table): (Tensor, Tensor),
    (row_starts, n_sequences): (*const u32, u32),
    pool: &View,
) -> Result<Option<Pages<'a>>> {
    let (Some(positions), Some(page_table)) =
        (integers(native, positions)?, integers(native, page_table)?)
    else {
        return Ok(None);
    };
    let &[pages, page_size, ..] = pool.shape() else {
        return Ok(None);
    };
    let fits = positions.shape().len() == 1
        && page_table.shape().len() == 2
        && page_table.shape().first() == Some(&i64::from(n_sequences));
    if row_starts.is_null() || !fits {
        return Ok(None);
    }
    // SAFETY: contiguous views of the checked type; the caller vouches for the boundaries.
    unsafe {
        Ok(Some(Pages {
            positions: positions.as_slice(),
            page_table: page_table.as_slice(),
            row_starts: core::slice::from_raw_parts(row_starts, n_sequences as usize + 1),
            page_size: page_size as usize,
            pages: pages as usize,
        }))
    }
}

/// Slots `[T]` within the pool; none when they are not.
///
/// # Safety
/// The caller holds the tensor for `'a`.
unsafe fn slots_of<'a>(
    native: &Native<'_>,
    slots: Tensor,
    pages: &Pages<'_>,
) -> Result<Option<&'a [i32]>> {
    let Some(view) = integers(native, slots)? else {
        return Ok(None);
    };
    // SAFETY: a contiguous view of the checked type, of a tensor that the caller holds.
    let slots: &[i32] = unsafe { view.as_slice() };
    let limit = pages.pages * pages.page_size;
    let within = |slot: &i32| usize::try_from(*slot).is_ok_and(|slot| slot < limit);
    Ok((slots.len() == pages.positions.len() && slots.iter().all(within)).then_some(slots))
}

/// The view of a pool that is to be read and written in place, not a copy of it; none where it has gaps.
fn in_place(native: &Native<'_>, t: Tensor) -> Result<Option<View>> {
    let view = native.view(t)?;
    Ok((view.is_contiguous && !view.is_empty()).then_some(view))
}

/// The step over what the pools hold; latent keys hold their values.
fn over<'a>(
    step: Attend<'a>,
    keys: &'a CellsMut<'_>,
    values: Option<&'a CellsMut<'_>>,
) -> Attend<'a> {
    Attend {
        keys: keys.cells(),
        values: values.unwrap_or(keys).cells(),
        ..step
    }
}

/// Attention that appends nothing, or over latent or chosen keys.
///
/// # Safety
/// The caller holds all tensors, and `row_starts` has `n_sequences + 1` values.
pub(super) unsafe fn special_attention(
    native: Native<'_>,
    state: &mut State,
    args: &PagedAttentionArgs,
    dtype: DType,
) -> Result<Option<[Tensor; 3]>> {
    let (Some(q), Some(k_pool)) = (floats(&native, args.q)?, in_place(&native, args.k_pool)?)
    else {
        return Ok(None);
    };
    let optional = |t: Tensor| match t.is_none() {
        true => Ok(Some(None)),
        false => floats(&native, t).map(|view| view.map(Some)),
    };
    let v_pool = match args.v_pool.is_none() {
        true => Some(None),
        false => in_place(&native, args.v_pool)?.map(Some),
    };
    let (Some(k), Some(v), Some(v_pool), Some(sinks)) = (
        optional(args.k)?,
        optional(args.v)?,
        v_pool,
        optional(args.sinks)?,
    ) else {
        return Ok(None);
    };
    let (&[rows, heads, k_dim], &[_, _, kv_heads, stored]) = (q.shape(), k_pool.shape()) else {
        return Ok(None);
    };
    let Some(format) = format_of(&k_pool, k_dim) else {
        return Ok(None);
    };
    let (value_stride, v_dim) = match &v_pool {
        None => (k_dim, i64::from(args.latent_dim)),
        Some(v_pool) => match *v_pool.shape() {
            [pages, size, v_heads, v_stored]
                if [pages, size, v_heads] == k_pool.shape()[..3]
                    && v_pool.dtype == k_pool.dtype
                    && args.latent_dim == 0 =>
            {
                let Some(v_dim) = format.width(v_stored as usize) else {
                    return Ok(None);
                };
                (v_dim as i64, v_dim as i64)
            }
            _ => return Ok(None),
        },
    };
    let reads = args.read_only != 0;
    let rows_fit = |view: &Option<Floats>, wanted: bool, width: i64| match view {
        None => !wanted,
        Some(view) => wanted && view.shape() == [rows, kv_heads, width],
    };
    let fits = format.row_len(k_dim as usize) == stored as usize
        && (1..=value_stride).contains(&v_dim)
        && rows_fit(&k, !reads, k_dim)
        && rows_fit(&v, !reads && v_pool.is_some(), v_dim);
    if !fits {
        return Ok(None);
    }
    let tables = (args.positions, args.page_table);
    let boundaries = (args.row_starts, args.n_sequences);
    // SAFETY: the slot's contract.
    let Some(pages) = (unsafe { pages_of(&native, tables, boundaries, &k_pool) })? else {
        return Ok(None);
    };
    let selection = match args.selection.is_none() {
        true => None,
        false => match integers(&native, args.selection)? {
            Some(view)
                if view.shape().len() == 2 && view.shape()[0] == rows && view.shape()[1] > 0 =>
            {
                Some(view)
            }
            _ => return Ok(None),
        },
    };
    let slots = match reads {
        true => None,
        // SAFETY: the slot's contract.
        false => match unsafe { slots_of(&native, args.slots, &pages) }? {
            Some(slots) => Some(slots),
            None => return Ok(None),
        },
    };
    // SAFETY: contiguous views. The pools are the caller's to give: the slot may write into them, and nothing
    // else reads them meanwhile.
    let (keys, values) = unsafe {
        (
            cells(&k_pool, format),
            v_pool.map(|v_pool| cells(&v_pool, format)),
        )
    };
    let (Some(mut keys), Some(mut values)) = (keys, values.map_or(Some(None), |v| v.map(Some)))
    else {
        return Ok(None);
    };
    // SAFETY: contiguous views of the checked types, of tensors that the caller holds.
    let (queries, selection, sinks, new_keys, new_values) = unsafe {
        let optional = |view: Option<Floats>| view.map_or(&[][..], |view| view.as_slice::<f32>());
        (
            q.as_slice::<f32>(),
            selection.map_or(&[][..], |view| view.as_slice::<i32>()),
            optional(sinks),
            optional(k),
            optional(v),
        )
    };
    let step = Attend {
        q: queries,
        keys: Cells::F32(&[]),
        values: Cells::F32(&[]),
        value_stride: value_stride as usize,
        selection,
        sinks,
        pages,
        heads: heads as usize,
        kv_heads: kv_heads as usize,
        k_dim: k_dim as usize,
        v_dim: v_dim as usize,
        scale: args.scale,
        softcap: args.softcap,
        window: args.window as usize,
        chunk: args.chunk as usize,
    };
    let whole = over(step, &keys, values.as_ref());
    if !whole.is_valid() {
        return Ok(None);
    }
    if let Some(slots) = slots {
        let kv_heads = kv_heads as usize;
        keys.append(slots, new_keys, [kv_heads, k_dim as usize]);
        if let Some(values) = &mut values {
            values.append(slots, new_values, [kv_heads, v_dim as usize]);
        }
    }
    let step = over(step, &keys, values.as_ref());
    let shape = [rows, heads, v_dim];
    let result = filled(&native, dtype, &shape, "paged_attention", |out| {
        attend(state.isa, &mut state.pool, &step, out)
    })?;
    let Some(result) = result else {
        return Ok(None);
    };
    let values = match args.v_pool.is_none() {
        true => Tensor::NONE,
        false => native.retain(args.v_pool)?,
    };
    Ok(Some([result, native.retain(args.k_pool)?, values]))
}

/// # Safety
/// The caller holds all tensors, and `row_starts` has `n_sequences + 1` values.
unsafe fn choose(
    native: Native<'_>,
    state: &mut State,
    args: &SparseIndexArgs,
) -> Result<Option<[Tensor; 2]>> {
    let (Some(q), Some(k), Some(weights), Some(pool)) = (
        floats(&native, args.q)?,
        floats(&native, args.k)?,
        floats(&native, args.weights)?,
        in_place(&native, args.pool)?,
    ) else {
        return Ok(None);
    };
    let (&[rows, heads, dim], &[_, _, stored]) = (q.shape(), pool.shape()) else {
        return Ok(None);
    };
    let Some(format) = format_of(&pool, dim) else {
        return Ok(None);
    };
    let fits = k.shape() == [rows, dim]
        && weights.shape() == [rows, heads]
        && format.row_len(dim as usize) == stored as usize;
    if !fits {
        return Ok(None);
    }
    let tables = (args.positions, args.page_table);
    let boundaries = (args.row_starts, args.n_sequences);
    // SAFETY: the slot's contract.
    let Some(pages) = (unsafe { pages_of(&native, tables, boundaries, &pool) })? else {
        return Ok(None);
    };
    // SAFETY: the slot's contract.
    let Some(slots) = (unsafe { slots_of(&native, args.slots, &pages) })? else {
        return Ok(None);
    };
    // SAFETY: as for attention.
    let Some(mut keys) = (unsafe { cells(&pool, format) }) else {
        return Ok(None);
    };
    // SAFETY: contiguous views of the checked type, of tensors that the caller holds.
    let (queries, weights, new_keys) = unsafe {
        (
            q.as_slice::<f32>(),
            weights.as_slice::<f32>(),
            k.as_slice::<f32>(),
        )
    };
    let step = Index {
        q: queries,
        weights,
        keys: Cells::F32(&[]),
        pages,
        heads: heads as usize,
        dim: dim as usize,
        top_k: args.top_k as usize,
        scale: args.scale,
    };
    let whole = Index {
        keys: keys.cells(),
        ..step
    };
    if !whole.is_valid() {
        return Ok(None);
    }
    keys.append(slots, new_keys, [1, dim as usize]);
    let step = Index {
        keys: keys.cells(),
        ..step
    };
    let (result, view) = native.allocate(DType::I32, &[rows, i64::from(args.top_k)])?;
    // SAFETY: freshly allocated with this type; nobody else knows it.
    let done = index(state.isa, &mut state.pool, &step, unsafe {
        view.as_mut_slice()
    });
    if !done {
        native.release(result)?;
        return Err(Native::panicked("sparse_index"));
    }
    Ok(Some([result, native.retain(args.pool)?]))
}

unsafe extern "C" fn sparse_index(
    ctx: *mut c_void,
    args: *const SparseIndexArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |native: Native<'_>, state: &mut State| {
        // SAFETY: the slot's contract: a live argument struct, tensors and boundaries held.
        match unsafe { choose(native, state, &SparseIndexArgs::read(args)?) }? {
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
            Err(mlx) => (mlx.sparse_index)(ctx, args, out, err),
        }
    }
}
