//! Layers and inputs of fused operations as kernels read them.

use mlxcel_abi::fused_args::{InputNorm, LinearWeight};
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::{QuantizedMatrix, gemm, row};

use super::made::Made;
use super::products::{matrix, plain_weight};
use super::rows::{SERIAL_BELOW, Shared};
use super::{State, floats, joint};

#[derive(Clone, Copy)]
pub(super) enum Weight<'a> {
    Packed(QuantizedMatrix<'a>),
    /// `[rows, columns]`.
    Plain(gemm::Weight<'a>, [usize; 2]),
}

#[derive(Clone, Copy)]
pub(super) struct Layer<'a> {
    pub(super) weight: Weight<'a>,
    pub(super) bias: Option<&'a [f32]>,
    /// What a plain weight and the bias have in common.
    dtype: Option<DType>,
}

impl Layer<'_> {
    /// The type of its result for an input of another, as its parts give it.
    pub(super) fn result(&self, x: DType) -> DType {
        self.dtype.map_or(x, |dtype| joint(x, dtype))
    }

    /// Columns of its result.
    pub(super) fn rows(&self) -> usize {
        match &self.weight {
            Weight::Packed(w) => w.rows(),
            Weight::Plain(_, [rows, _]) => *rows,
        }
    }

    pub(super) fn columns(&self) -> usize {
        match &self.weight {
            Weight::Packed(w) => w.columns(),
            Weight::Plain(_, [_, columns]) => *columns,
        }
    }
}

/// The layer behind its handles, if the kernels take it.
///
/// # Safety
/// The tensors and the call under way must live for `'a`.
pub(super) unsafe fn layer<'a>(
    native: &Native<'_>,
    raw: &LinearWeight,
) -> Result<Option<Layer<'a>>> {
    let mut dtype = None;
    // SAFETY: forwarded to the caller.
    let weight = unsafe {
        if raw.plain.is_none() {
            match matrix(native, &raw.quantized, true)? {
                Some(matrix) => Weight::Packed(matrix),
                None => return Ok(None),
            }
        } else {
            let view = native.view(raw.plain)?;
            dtype = Some(view.dtype);
            match plain_weight(&view) {
                Some((weight, shape)) => Weight::Plain(weight, shape),
                None => return Ok(None),
            }
        }
    };
    let mut layer = Layer {
        weight,
        bias: None,
        dtype,
    };
    if !raw.bias.is_none() {
        match floats(native, raw.bias)? {
            Some(bias) if bias.shape() == [layer.rows() as i64] => {
                // SAFETY: a contiguous f32 view; the rest is the caller's promise.
                layer.bias = Some(unsafe { bias.as_slice() });
                layer.dtype = Some(dtype.map_or(bias.given, |dtype| joint(dtype, bias.given)));
            }
            _ => return Ok(None),
        }
    }
    Ok(Some(layer))
}

/// `[T, columns]` as f32, contiguous, with the number of rows and the type that it came in.
///
/// # Safety
/// The tensor and the call under way must live for `'a`.
pub(super) unsafe fn rows_of<'a>(
    native: &Native<'_>,
    t: Tensor,
    columns: usize,
) -> Result<Option<(&'a [f32], usize, DType)>> {
    let Some(view) = floats(native, t)? else {
        return Ok(None);
    };
    match view.shape() {
        &[rows, width] if width == columns as i64 => {
            // SAFETY: a contiguous f32 view; the rest is the caller's promise.
            let elements = unsafe { view.as_slice() };
            Ok(Some((elements, rows as usize, view.given)))
        }
        _ => Ok(None),
    }
}

/// The optional weight of a norm of `width` elements; the outer option says whether the kernels take
/// it.
///
/// # Safety
/// The tensor and the call under way must live for `'a`.
pub(super) unsafe fn norm_weight<'a>(
    native: &Native<'_>,
    w: Tensor,
    width: usize,
) -> Result<Option<Option<&'a [f32]>>> {
    if w.is_none() {
        return Ok(Some(None));
    }
    match floats(native, w)? {
        // SAFETY: a contiguous f32 view; the rest is the caller's promise.
        Some(w) if w.shape() == [width as i64] => Ok(Some(Some(unsafe { w.as_slice() }))),
        _ => Ok(None),
    }
}

/// Norms rows of `width` elements into `out`. False when a kernel panicked.
pub(super) fn norm_rows(
    state: &mut State,
    x: &[f32],
    (weight, eps): (Option<&[f32]>, f32),
    width: usize,
    out: &mut [f32],
) -> bool {
    let (isa, out) = (state.isa, Shared::new(out));
    let rows = x.len() / width;
    state
        .pool
        .split(rows, 1, SERIAL_BELOW / width + 1, &|range| {
            let range = range.start * width..range.end * width;
            // SAFETY: the pool's ranges are disjoint.
            row::rms_norm(isa, &x[range.clone()], weight, eps, width, unsafe {
                out.part(range)
            });
        })
}

/// The input of a fused operation, normed where that is asked for.
pub(super) struct Input<'a> {
    given: &'a [f32],
    normed: Option<Made<'a>>,
    pub(super) rows: usize,
    pub(super) dtype: DType,
}

impl<'a> Input<'a> {
    /// # Safety
    /// The tensors and the call under way must live for `'a`.
    pub(super) unsafe fn new(
        native: Native<'a>,
        state: &mut State,
        x: Tensor,
        norm: &InputNorm,
        columns: usize,
    ) -> Result<Option<Self>> {
        // SAFETY: forwarded to the caller.
        let Some((given, rows, dtype)) = (unsafe { rows_of(&native, x, columns) })? else {
            return Ok(None);
        };
        let mut input = Self {
            given,
            normed: None,
            rows,
            dtype,
        };
        if norm.normed == 0 {
            return Ok(Some(input));
        }
        // SAFETY: forwarded to the caller.
        let Some(weight) = (unsafe { norm_weight(&native, norm.weight, columns) })? else {
            return Ok(None);
        };
        let mut made = Made::new(native, &[rows as i64, columns as i64])?;
        if !norm_rows(state, given, (weight, norm.eps), columns, made.slice()) {
            return Err(Native::panicked("rms_norm"));
        }
        input.normed = Some(made);
        Ok(Some(input))
    }

    pub(super) fn slice(&mut self) -> &[f32] {
        match &mut self.normed {
            Some(made) => made.slice(),
            None => self.given,
        }
    }
}
