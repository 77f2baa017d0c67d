//! Products with plain and quantised weights, and the expansion of quantised rows.

use mlxcel_abi::kinds::quant;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::KernelPrecision;
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_cpu_kernels::gemm::{self, Product, Weight};
use mlxcel_cpu_kernels::qmatmul::{self, Precision};
use mlxcel_cpu_kernels::{Isa, QuantizedMatrix, Scales, dense, gemm_integers};

use super::centred::{expanded_product, is_centred};
use super::operands::half_of;
use super::{State, filled, floats, joint, remembered, slot};

pub(super) fn install(table: &mut BackendOps) {
    table.quantized_matmul = quantized_matmul;
    table.matmul = matmul;
    table.dequantize = dequantize;
}

/// What a setting means on a processor. Where there are dot products of integers, 16 bits are faster
/// than f32 for few rows and for many, and as good (ADR 9).
pub(super) fn precision(setting: KernelPrecision, isa: Isa) -> Precision {
    match setting {
        KernelPrecision::Auto if isa == Isa::Avx512Vnni => Precision::Int16,
        KernelPrecision::Auto | KernelPrecision::Exact => Precision::Exact,
        KernelPrecision::High => Precision::Int16,
        KernelPrecision::Fast => Precision::Int8,
    }
}

/// What `auto` is here, for the probe.
pub(crate) fn preferred_precision() -> &'static str {
    match precision(KernelPrecision::Auto, Isa::best()) {
        Precision::Exact => "exact",
        Precision::Int16 => "high",
        Precision::Int8 => "fast",
    }
}

slot!(quantized_matmul(args: *const QuantizedMatmulArgs) |native, state| {
    // SAFETY: the slot's contract: a live argument struct.
    let args = unsafe { QuantizedMatmulArgs::read(args) }?;
    match quantized(native, state, &args)? {
        None if is_centred(&args.w) => expanded_product(native, state, &args, false),
        made => Ok(made),
    }
});
slot!(matmul(a: Tensor, b: Tensor) |native, state| plain(native, state, a, b));
slot!(dequantize(w: *const QuantizedWeight, dtype: DType) |native, _state| {
    // SAFETY: the slot's contract: a live argument struct.
    expand(native, &unsafe { QuantizedWeight::read(w) }?, dtype)
});

/// # Safety
/// The tensor behind the view must live for `'a`.
unsafe fn scales<'a>(view: &View) -> Option<Scales<'a>> {
    // SAFETY: the type is checked; the rest is the caller's promise.
    unsafe {
        match view.dtype {
            DType::F16 => Some(Scales::F16(view.as_slice())),
            DType::BF16 => Some(Scales::Bf16(view.as_slice())),
            DType::F32 => Some(Scales::F32(view.as_slice())),
            _ => None,
        }
    }
}

/// The matrix behind a quantised weight of rank 2 or more, all leading axes as rows.
///
/// # Safety
/// The tensors must live for `'a`.
pub(super) unsafe fn matrix<'a>(
    native: &Native<'_>,
    w: &QuantizedWeight,
    only_two: bool,
) -> Result<Option<QuantizedMatrix<'a>>> {
    // SAFETY: forwarded to the caller.
    unsafe {
        if let Some(matrix) = remembered::find(native, w, only_two) {
            return Ok(Some(matrix));
        }
        let made = resolved(native, w, only_two)?;
        if let Some(matrix) = &made {
            remembered::keep(native, w, only_two, matrix)?;
        }
        Ok(made)
    }
}

/// As [`matrix`], from the tensors.
///
/// # Safety
/// As for [`matrix`].
unsafe fn resolved<'a>(
    native: &Native<'_>,
    w: &QuantizedWeight,
    only_two: bool,
) -> Result<Option<QuantizedMatrix<'a>>> {
    if w.spec.mode == quant::MXFP4 {
        // SAFETY: forwarded to the caller.
        return unsafe { mxfp4_matrix(native, w, only_two) };
    }
    let is_centred = is_centred(w);
    if !is_centred && (w.spec.mode != quant::AFFINE || w.biases.is_none()) {
        return Ok(None);
    }
    let (words, s) = (native.view(w.weight)?, native.view(w.scales)?);
    let b = if is_centred {
        s
    } else {
        native.view(w.biases)?
    };
    let rank = words.shape().len();
    let usable = [&words, &s, &b]
        .iter()
        .all(|view| view.is_contiguous && !view.is_empty())
        && words.dtype == DType::U32
        && rank >= 2
        && (!only_two || rank == 2)
        && s.shape().len() == rank
        && s.shape() == b.shape()
        && s.shape().get(..rank - 1) == words.shape().get(..rank - 1);
    if !usable {
        return Ok(None);
    }
    let groups = s.shape().last().map_or(0, |n| *n as usize);
    let rows = words.shape().iter().rev().skip(1).product::<i64>() as usize;
    let columns = groups * w.spec.group_size as usize;
    // SAFETY: contiguous views; the tensors live as long as the caller says.
    unsafe {
        let (Some(s), Some(b)) = (scales(&s), scales(&b)) else {
            return Ok(None);
        };
        let (bits, group) = (w.spec.bits as usize, w.spec.group_size as usize);
        if is_centred {
            let words = words.as_slice();
            return Ok(QuantizedMatrix::centred(
                words, s, rows, columns, bits, group,
            ));
        }
        Ok(QuantizedMatrix::new(
            words.as_slice(),
            s,
            b,
            rows,
            columns,
            bits,
            group,
        ))
    }
}

/// As [`matrix`], of a weight in mxfp4.
///
/// # Safety
/// The tensors must live for `'a`.
unsafe fn mxfp4_matrix<'a>(
    native: &Native<'_>,
    w: &QuantizedWeight,
    only_two: bool,
) -> Result<Option<QuantizedMatrix<'a>>> {
    if (w.spec.bits, w.spec.group_size) != (4, 32) || !w.biases.is_none() {
        return Ok(None);
    }
    let (words, exponents) = (native.view(w.weight)?, native.view(w.scales)?);
    let rank = words.shape().len();
    let usable = [&words, &exponents]
        .iter()
        .all(|view| view.is_contiguous && !view.is_empty())
        && (words.dtype, exponents.dtype) == (DType::U32, DType::U8)
        && rank >= 2
        && (!only_two || rank == 2)
        && exponents.shape().len() == rank
        && exponents.shape().get(..rank - 1) == words.shape().get(..rank - 1);
    if !usable {
        return Ok(None);
    }
    let rows = words.shape().iter().rev().skip(1).product::<i64>() as usize;
    let columns = words.shape().last().map_or(0, |n| *n as usize * 8);
    // SAFETY: contiguous views of the checked types; the tensors live as long as the caller says.
    unsafe {
        let (words, exponents) = (words.as_slice(), exponents.as_slice());
        Ok(QuantizedMatrix::mxfp4(words, exponents, rows, columns))
    }
}

fn with_last(shape: &[i64], last: usize) -> Vec<i64> {
    let mut shape = shape.to_vec();
    if let Some(end) = shape.last_mut() {
        *end = last as i64;
    }
    shape
}

fn quantized(
    native: Native<'_>,
    state: &mut State,
    args: &QuantizedMatmulArgs,
) -> Result<Option<Tensor>> {
    if args.transpose != 1 {
        return Ok(None);
    }
    // SAFETY: the caller holds the tensors during the call.
    let (Some(x), Some(w)) = (floats(&native, args.x)?, unsafe {
        matrix(&native, &args.w, true)
    }?) else {
        return Ok(None);
    };
    if x.shape().last() != Some(&(w.columns() as i64)) {
        return Ok(None);
    }
    // SAFETY: a contiguous f32 view of a tensor that the caller holds.
    let input = unsafe { x.as_slice::<f32>() };
    let shape = with_last(x.shape(), w.rows());
    filled(&native, x.given, &shape, "quantized_matmul", |out| {
        packed_product(state, input, w, out)
    })
}

impl State {
    /// Rows of x that kernels for few rows take at a time.
    fn most_joined_rows(&self) -> usize {
        /// With four rows and more they scale the weight's values in place of their sums.
        const MOST_EXACT: usize = 3;
        match (self.keeps_rows_apart, self.precision) {
            (true, Precision::Exact) => MOST_EXACT,
            _ => qmatmul::MAX_ROWS,
        }
    }

    /// Whether those kernels take a product of `m` rows.
    pub(super) fn joins(&self, m: usize, w: &QuantizedMatrix<'_>) -> bool {
        m <= self.most_joined_rows() && qmatmul::takes(m, w)
    }
}

/// Rows through `product`, so many at a time that one kernel takes them all. False when it was false.
fn in_slabs(
    state: &mut State,
    x: &[f32],
    out: &mut [f32],
    [columns, rows]: [usize; 2],
    most_rows: usize,
    product: impl Fn(&mut State, &[f32], &mut [f32]) -> bool,
) -> bool {
    let slabs = x.chunks(most_rows * columns);
    slabs
        .zip(out.chunks_mut(most_rows * rows))
        .all(|(x, out)| product(state, x, out))
}

/// `x @ w.T`. False when a kernel panicked.
pub(super) fn packed_product(
    state: &mut State,
    x: &[f32],
    w: QuantizedMatrix<'_>,
    out: &mut [f32],
) -> bool {
    let most_rows = if w.has_one_type() {
        state.most_joined_rows()
    } else {
        1
    };
    if state.keeps_rows_apart && x.len() > most_rows * w.columns() {
        // Kernels for more rows round activations, and order sums, in another way.
        let sizes = [w.columns(), w.rows()];
        return in_slabs(state, x, out, sizes, most_rows, |state, x, out| {
            packed_product(state, x, w, out)
        });
    }
    if state.joins(x.len() / w.columns(), &w) {
        let mut targets = [qmatmul::Target { w, y: out }];
        return qmatmul::matmul(
            state.isa,
            state.precision,
            &mut state.pool,
            x,
            &mut targets,
            &mut state.prepared,
        );
    }
    if state.precision != Precision::Exact && w.has_one_type() {
        return gemm_integers::matmul(
            state.isa,
            state.precision,
            &mut state.pool,
            x,
            &w,
            out,
            &mut state.prepared,
            &state.rounded,
        );
    }
    let (rows, columns) = (w.rows(), w.columns());
    let product = Product {
        x,
        weight: Weight::Quantized(w),
        rows,
        columns,
    };
    gemm::matmul(state.isa, &mut state.pool, &product, out, &state.panels)
}

/// `a @ b` where `b` is the transposed view of a row-major weight.
fn plain(native: Native<'_>, state: &mut State, a: Tensor, b: Tensor) -> Result<Option<Tensor>> {
    let b = native.view(b)?;
    // SAFETY: the caller holds the tensors during the call.
    let (Some(x), Some((w, shape))) = (floats(&native, a)?, unsafe { plain_weight(&b) }) else {
        return Ok(None);
    };
    let [rows, columns] = shape;
    if x.shape().last() != Some(&(columns as i64)) || x.shape().len() < 2 {
        return Ok(None);
    }
    // SAFETY: a contiguous f32 view of a tensor that the caller holds.
    let input = unsafe { x.as_slice::<f32>() };
    let (dtype, dims) = (joint(x.given, b.dtype), with_last(x.shape(), rows));
    filled(&native, dtype, &dims, "matmul", |out| {
        plain_product(state, input, w, shape, out)
    })
}

/// The row-major weight `[rows, columns]` behind a transposed view, f32 or half.
///
/// # Safety
/// The tensor must live for `'a`.
pub(super) unsafe fn plain_weight<'a>(view: &View) -> Option<(Weight<'a>, [usize; 2])> {
    let (&[columns, rows], &[1, stride]) = (view.shape(), view.strides()) else {
        return None;
    };
    if stride != columns || rows <= 0 || columns <= 0 {
        return None;
    }
    // SAFETY: the transpose is row-major, so that the memory is `rows * columns` elements in order; the
    // types are checked.
    let weight = unsafe {
        match view.dtype {
            DType::F32 => Weight::F32(view.as_slice()),
            DType::F16 => Weight::F16(view.as_slice()),
            DType::BF16 => Weight::Bf16(view.as_slice()),
            _ => return None,
        }
    };
    Some((weight, [rows as usize, columns as usize]))
}

/// `x @ w.T` with `w` `[rows, columns]`. False when a kernel panicked.
pub(super) fn plain_product(
    state: &mut State,
    x: &[f32],
    weight: Weight<'_>,
    [rows, columns]: [usize; 2],
    out: &mut [f32],
) -> bool {
    if state.keeps_rows_apart && x.len() > dense::MAX_ROWS * columns {
        let sizes = [columns, rows];
        return in_slabs(state, x, out, sizes, dense::MAX_ROWS, |state, x, out| {
            plain_product(state, x, weight, [rows, columns], out)
        });
    }
    if dense::takes(x.len() / columns, &weight) {
        return dense::matmul(state.isa, &mut state.pool, x, weight, [rows, columns], out);
    }
    let product = Product {
        x,
        weight,
        rows,
        columns,
    };
    gemm::matmul(state.isa, &mut state.pool, &product, out, &state.panels)
}

pub(super) fn expand(
    native: Native<'_>,
    w: &QuantizedWeight,
    dtype: DType,
) -> Result<Option<Tensor>> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Ok(None);
    }
    // SAFETY: the caller holds the tensors during the call.
    let Some(matrix) = (unsafe { matrix(&native, w, false) })? else {
        return Ok(None);
    };
    let shape = with_last(native.view(w.weight)?.shape(), matrix.columns());
    let (columns, mut factors) = (matrix.columns(), vec![0.0; 2 * matrix.groups()]);
    if let Some(half) = half_of(dtype) {
        let (t, out) = native.allocate(dtype, &shape)?;
        let mut wide = vec![0.0; columns];
        // SAFETY: freshly allocated with elements of 16 bits; nobody else knows it.
        let rows = unsafe { out.as_mut_slice::<u16>() }.chunks_exact_mut(columns);
        for (row, out) in rows.enumerate() {
            matrix.expand_row(row, &mut factors, &mut wide);
            half.narrow(&wide, out);
        }
        return Ok(Some(t));
    }
    filled(&native, dtype, &shape, "dequantize", |out| {
        for (row, out) in out.chunks_exact_mut(columns).enumerate() {
            matrix.expand_row(row, &mut factors, out);
        }
        true
    })
}
