//! What a call of attention over the paged pool says, in the form that kernels take.

use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::rotations::{Append, HeadNorms, Turn};
use super::{State, is_half, is_plain, refuse_gaps, small};

/// Query heads that may share a key head: rows of a tile of `prefill_rows`.
pub(super) const MOST_SHARING: usize = 64;

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) rows: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) width: u32,
    pub(super) page_size: i32,
    pub(super) pages: i32,
    /// Rows of the page table, and its columns.
    pub(super) sequences: i32,
    pub(super) table_width: i32,
}

impl Sizes {
    /// Query heads that share a key head.
    pub(super) fn per_key(&self) -> u32 {
        (self.heads / self.kv_heads) as u32
    }

    pub(super) fn page_shift(&self) -> u32 {
        self.page_size.trailing_zeros()
    }

    /// Keys that a sequence can have.
    pub(super) fn keys(&self) -> usize {
        (self.table_width * self.page_size) as usize
    }

    /// Keys that the pool has room for.
    pub(super) fn pool_rows(&self) -> i32 {
        self.pages * self.page_size
    }
}

/// One call; addresses on the device.
pub(super) struct Call {
    pub(super) q: View,
    pub(super) k: View,
    pub(super) sizes: Sizes,
    pub(super) dtype: DType,
    pub(super) append: Append,
    /// None where nothing is normed or turns.
    pub(super) turn: Option<Turn>,
    /// The call is one that may norm and turn.
    pub(super) is_rotated: bool,
    pub(super) row_sequences: usize,
    pub(super) positions: usize,
    pub(super) page_table: usize,
    /// 0 for none.
    pub(super) sinks: usize,
    pub(super) window: i32,
    pub(super) scale: f32,
    pub(super) softcap: f32,
}

impl Call {
    /// None where no kernel of ours takes the call.
    pub(super) fn read(
        device: &Device<'_>,
        state: &mut State,
        args: &PagedAttentionArgs,
        rotate: Option<&RotateArgs>,
    ) -> Result<Option<Self>> {
        let is_plain_form = args.selection.is_none()
            && [args.latent_dim, args.read_only, args.chunk] == [0; 3]
            && args.softcap >= 0.0;
        let window = small(i64::from(args.window));
        let (q, _) = device.view(args.q)?;
        let (Some(window), true, true) = (window, is_plain_form, is_half(q.dtype)) else {
            return Ok(None);
        };
        let views =
            [args.q, args.k, args.v, args.k_pool, args.v_pool].map(|t| state.input(device, t));
        let [q, k, v, k_pool, v_pool] = views;
        let (q, k, v, k_pool, v_pool) = (q?, k?, v?, k_pool?, v_pool?);
        let all = [&q, &k, &v, &k_pool, &v_pool];
        refuse_gaps(state, &[&q, &k, &v])?;
        let same = all
            .iter()
            .all(|view| view.dtype == q.dtype && is_plain(view, 16));
        let (Some(slots), Some(sequences), Some(positions), Some(page_table), true) = (
            integers(device, state, args.slots)?,
            integers(device, state, args.row_sequences)?,
            integers(device, state, args.positions)?,
            integers(device, state, args.page_table)?,
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
            let sinks = state.input(device, args.sinks)?;
            if sinks.dtype != q.dtype
                || !is_plain(&sinks, 2)
                || sinks.shape() != [i64::from(sizes.heads)]
            {
                return Ok(None);
            }
            sinks.data as usize
        };
        let positions = positions.data as usize;
        let turn = match rotate.filter(|rotate| rotate.dims > 0 || rotate.normed != 0) {
            None => None,
            Some(rotate) => match turn(device, state, rotate, positions, &sizes, q.dtype)? {
                None => return Ok(None),
                found => found,
            },
        };
        let append = Append {
            q: q.data as usize,
            k: k.data as usize,
            v: v.data as usize,
            key_pool: k_pool.data as usize,
            value_pool: v_pool.data as usize,
            slots: slots.data as usize,
            pool_rows: sizes.pool_rows(),
        };
        Ok(Some(Self {
            q,
            k,
            sizes,
            dtype: q.dtype,
            append,
            turn,
            is_rotated: rotate.is_some(),
            row_sequences: sequences.data as usize,
            positions,
            page_table: page_table.data as usize,
            sinks,
            window,
            scale: args.scale,
            softcap: args.softcap,
        }))
    }
}

fn integers(device: &Device<'_>, state: &State, t: Tensor) -> Result<Option<View>> {
    let view = state.input(device, t)?;
    Ok((is_plain(&view, 4) && view.dtype == DType::I32).then_some(view))
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
        && heads / kv_heads <= MOST_SHARING as i64
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

/// How queries and keys are turned; none where the kernel cannot.
fn turn(
    device: &Device<'_>,
    state: &mut State,
    rotate: &RotateArgs,
    positions: usize,
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
    let table = if rotate.dims == 0 {
        Some(0)
    } else {
        super::rows::table(device, state, rotate.freqs, rotate.dims, rotate.base)?
    };
    Ok(table.map(|table| Turn {
        positions,
        table,
        dims: rotate.dims as i32,
        interleaved: rotate.interleaved as i32,
        is_inverse: i32::from(!rotate.freqs.is_none()),
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

/// How many rows of a step belong to the same sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lengths {
    /// There are sequences with one row.
    pub(super) has_one: bool,
    /// There are sequences with more.
    pub(super) has_more: bool,
    /// Boundaries are given, and each of the rows is the only one of its sequence.
    pub(super) is_one_each: bool,
}

impl Lengths {
    /// Without boundaries every row is taken by itself.
    ///
    /// # Safety
    /// `row_starts` is null or has `n_sequences + 1` values.
    pub(super) unsafe fn of(args: &PagedAttentionArgs, rows: i32) -> Self {
        if args.row_starts.is_null() {
            return Self {
                has_one: true,
                has_more: false,
                is_one_each: false,
            };
        }
        // SAFETY: forwarded to the caller.
        let starts =
            unsafe { core::slice::from_raw_parts(args.row_starts, args.n_sequences as usize + 1) };
        Self::between(starts, rows)
    }

    fn between(starts: &[u32], rows: i32) -> Self {
        let ends = (starts.first().copied(), starts.last().copied());
        let mut found = Self {
            has_one: false,
            has_more: false,
            is_one_each: ends == (Some(0), u32::try_from(rows).ok()),
        };
        for pair in starts.windows(2) {
            let &[from, to] = pair else { continue };
            match to.checked_sub(from) {
                // Sequences without rows fill up the last bucket.
                Some(0) => {}
                Some(1) => found.has_one = true,
                more => {
                    found.has_more |= more.is_some();
                    found.is_one_each = false;
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_decoding_has_one_row_for_each_sequence_that_has_any() {
        let is_one_each = |starts: &[u32], rows| Lengths::between(starts, rows).is_one_each;
        assert!(is_one_each(&[0, 1], 1));
        assert!(is_one_each(&[0, 1, 2, 3, 3], 3));
        assert!(!is_one_each(&[0, 2], 2));
        assert!(!is_one_each(&[0, 1, 2], 3));
        assert!(!is_one_each(&[0, 1, 0, 1], 1));
        assert!(!is_one_each(&[], 0));
    }

    #[test]
    fn sequences_of_one_row_and_of_more_are_told_apart() {
        let found = |starts: &[u32]| {
            let lengths = Lengths::between(starts, 0);
            (lengths.has_one, lengths.has_more)
        };
        assert_eq!(found(&[0, 1, 1, 2]), (true, false));
        assert_eq!(found(&[0, 5, 7]), (false, true));
        assert_eq!(found(&[0, 5, 6, 6]), (true, true));
        assert_eq!(found(&[3, 2]), (false, false));
        assert_eq!(found(&[]), (false, false));
    }
}
