//! Weights in mxfp4: products, expansion and experts.

use mlxcel_abi::kinds::quant;
use mlxcel_abi::ops_args::{QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::qmatmul::{self, Mxfp4, Mxfp4Target};

use super::experts::{Choice, choice};
use super::products::{packed_product, with_last};
use super::{State, filled, floats};

/// The matrix behind a weight in mxfp4, all leading axes as rows; none for other modes and what is no such weight.
///
/// # Safety
/// The tensors must live for `'a`.
unsafe fn matrix<'a>(native: &Native<'_>, w: &QuantizedWeight) -> Result<Option<Mxfp4<'a>>> {
    let is_form = (w.spec.mode, w.spec.bits, w.spec.group_size) == (quant::MXFP4, 4, 32);
    if !is_form || !w.biases.is_none() {
        return Ok(None);
    }
    let (words, exponents) = (native.view(w.weight)?, native.view(w.scales)?);
    let rank = words.shape().len();
    let usable = [&words, &exponents]
        .iter()
        .all(|view| view.is_contiguous && !view.is_empty())
        && (words.dtype, exponents.dtype) == (DType::U32, DType::U8)
        && rank >= 2
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
        Ok(Mxfp4::new(words, exponents, rows, columns))
    }
}

/// `x @ w.T`. False when a kernel panicked.
fn times(state: &mut State, x: &[f32], w: &Mxfp4<'_>, out: &mut [f32]) -> bool {
    if x.len() / w.columns() <= qmatmul::MAX_ROWS {
        let mut targets = [Mxfp4Target { w: *w, y: out }];
        return qmatmul::matmul_mxfp4(
            state.isa,
            state.precision,
            &mut state.pool,
            x,
            &mut targets,
            &mut state.prepared,
        );
    }
    // Many rows are worth a spread weight.
    let mut spread = qmatmul::Spread::default();
    let whole = spread.whole(state.isa, w);
    whole.is_some_and(|w| packed_product(state, x, w, out))
}

/// The product of a call with a weight in mxfp4, where the kernels take it.
pub(super) fn product(
    native: Native<'_>,
    state: &mut State,
    args: &QuantizedMatmulArgs,
) -> Result<Option<Tensor>> {
    // SAFETY: the caller holds the tensors during the call.
    let Some(w) = (unsafe { matrix(&native, &args.w) })? else {
        return Ok(None);
    };
    let is_matrix = native.view(args.w.weight)?.shape().len() == 2;
    let Some(x) = floats(&native, args.x)?.filter(|_| is_matrix && args.transpose == 1) else {
        return Ok(None);
    };
    if x.shape().last() != Some(&(w.columns() as i64)) {
        return Ok(None);
    }
    // SAFETY: a contiguous f32 view of a tensor that the caller holds.
    let input = unsafe { x.as_slice::<f32>() };
    let shape = with_last(x.shape(), w.rows());
    filled(&native, &shape, "quantized_matmul", |out| {
        times(state, input, &w, out)
    })
}

/// The same with chosen matrices.
pub(super) fn gathered(
    native: Native<'_>,
    state: &mut State,
    args: &QuantizedMatmulArgs,
) -> Result<Option<Tensor>> {
    // SAFETY: the caller holds the tensors during the call.
    let Some(w) = (unsafe { matrix(&native, &args.w) })? else {
        return Ok(None);
    };
    let &[matrices, rows, _] = native.view(args.w.weight)?.shape() else {
        return Ok(None);
    };
    let Some(x) = floats(&native, args.x)?.filter(|_| args.transpose == 1) else {
        return Ok(None);
    };
    if x.shape().last() != Some(&(w.columns() as i64)) {
        return Ok(None);
    }
    let (matrices, rows) = (matrices as usize, rows as usize);
    let Some(choice) = choice(&native, &x, [args.lhs_indices, args.rhs_indices], matrices)? else {
        return Ok(None);
    };
    // SAFETY: a contiguous f32 view of a tensor that the caller holds.
    let input = unsafe { x.as_slice::<f32>() };
    let shape = choice.result(rows);
    filled(&native, &shape, "gather_quantized_matmul", |out| {
        chosen(state, &choice, input, &w, rows, out)
    })
}

fn chosen(
    state: &mut State,
    choice: &Choice,
    x: &[f32],
    w: &Mxfp4<'_>,
    rows: usize,
    out: &mut [f32],
) -> bool {
    let of = |index: usize| w.rows_from(index * rows, rows);
    if let Some(row) = choice.only_row() {
        let x = x.get(row * w.columns()..(row + 1) * w.columns());
        let pairs = choice.matrices().zip(out.chunks_exact_mut(rows));
        let targets = pairs.map(|(of_w, y)| of(of_w).map(|w| Mxfp4Target { w, y }));
        let targets: Option<Vec<_>> = targets.collect();
        let (Some(x), Some(mut targets)) = (x, targets) else {
            return false;
        };
        return qmatmul::matmul_mxfp4(
            state.isa,
            state.precision,
            &mut state.pool,
            x,
            &mut targets,
            &mut state.prepared,
        );
    }
    choice.by_matrix(x, rows, out, |index, x, out| {
        of(index).is_some_and(|w| times(state, x, &w, out))
    })
}

/// The weight as f32.
pub(super) fn expand(
    native: Native<'_>,
    w: &QuantizedWeight,
    dtype: DType,
) -> Result<Option<Tensor>> {
    if dtype != DType::F32 {
        return Ok(None);
    }
    // SAFETY: the caller holds the tensors during the call.
    let Some(matrix) = (unsafe { matrix(&native, w) })? else {
        return Ok(None);
    };
    let shape = with_last(native.view(w.weight)?.shape(), matrix.columns());
    filled(&native, &shape, "dequantize", |out| {
        for (row, out) in out.chunks_exact_mut(matrix.columns()).enumerate() {
            matrix.expand_row(row, out);
        }
        true
    })
}
