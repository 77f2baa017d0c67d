//! Products with chosen matrices: the experts of a mixture.
//!
//! Rows are brought together by expert, so that an expert's weight is read once for all of its rows, and
//! go through the same kernels as any other product.

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::QuantizedMatmulArgs;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_cpu_kernels::qmatmul;

use super::centred::{expanded_product, is_centred};
use super::stacks::Stack;
use super::{State, filled, floats, joint, slot};

pub(super) fn install(table: &mut BackendOps) {
    table.gather_quantized_matmul = gather_quantized_matmul;
    table.gather_matmul = gather_matmul;
}

slot!(gather_quantized_matmul(args: *const QuantizedMatmulArgs) |native, state| {
    // SAFETY: the slot's contract: a live argument struct.
    let args = unsafe { QuantizedMatmulArgs::read(args) }?;
    match quantized(native, state, &args)? {
        None if is_centred(&args.w) => expanded_product(native, state, &args, true),
        made => Ok(made),
    }
});
slot!(gather_matmul(a: Tensor, b: Tensor, lhs: Tensor, rhs: Tensor, sorted: u32) |native, state| {
    // Rows are sorted here anyway.
    let _ = sorted;
    // SAFETY: the caller holds the tensors during the call.
    match unsafe { Stack::plain(&native, b) }? {
        Some(stack) => gathered(native, state, a, &stack, [lhs, rhs], "gather_matmul"),
        None => Ok(None),
    }
});

/// Which rows meet which matrix: `pairs` products of `m` rows each.
struct Choice {
    /// Matrix of `x` and matrix of the weight for every product.
    pairs: Vec<(usize, usize)>,
    /// Rows of a matrix of `x`.
    m: usize,
    /// Columns of `x`.
    columns: usize,
    /// Leading axes of the result.
    shape: Vec<i64>,
}

/// Values of indices in order, whatever the strides. None for other types and for negative ones.
pub(super) fn indices(view: &View) -> Option<Vec<usize>> {
    if !matches!(view.dtype, DType::U32 | DType::I32) {
        return None;
    }
    let mut at = vec![0i64; view.shape().len()];
    let mut values = Vec::with_capacity(view.len());
    for _ in 0..view.len() {
        let offset: i64 = at.iter().zip(view.strides()).map(|(i, s)| i * s).sum();
        // SAFETY: the strides of a view lead to elements of its tensor, which the caller holds; both types
        // have 32 bits.
        let bits = unsafe { view.data.cast::<u32>().offset(offset as isize).read() };
        let is_negative = view.dtype == DType::I32 && bits.cast_signed() < 0;
        values.push((!is_negative).then_some(bits as usize)?);
        for (i, dim) in at.iter_mut().zip(view.shape()).rev() {
            *i += 1;
            if *i < *dim {
                break;
            }
            *i = 0;
        }
    }
    Some(values)
}

/// None where the indices do not fit, or choose in another way than the kernels do.
fn choice(
    native: &Native<'_>,
    x: &View,
    [lhs, rhs]: [Tensor; 2],
    matrices: usize,
) -> Result<Option<Choice>> {
    let &[ref leading @ .., m, columns] = x.shape() else {
        return Ok(None);
    };
    if rhs.is_none() {
        return Ok(None);
    }
    let chosen = native.view(rhs)?;
    let of_x = match lhs.is_none() {
        true if leading == chosen.shape() => Some((0..chosen.len()).collect()),
        true => None,
        false => {
            let view = native.view(lhs)?;
            (view.shape() == chosen.shape())
                .then(|| indices(&view))
                .flatten()
        }
    };
    let (Some(of_x), Some(of_w)) = (of_x, indices(&chosen)) else {
        return Ok(None);
    };
    let most_x = leading.iter().product::<i64>() as usize;
    let is_inside = of_x.iter().all(|i| *i < most_x) && of_w.iter().all(|i| *i < matrices);
    if !is_inside || of_w.is_empty() {
        return Ok(None);
    }
    Ok(Some(Choice {
        pairs: of_x.into_iter().zip(of_w).collect(),
        m: m as usize,
        columns: columns as usize,
        shape: chosen.shape().to_vec(),
    }))
}

impl Choice {
    /// Shape of the result with `rows` columns.
    fn result(&self, rows: usize) -> Vec<i64> {
        let mut shape = self.shape.clone();
        shape.extend([self.m as i64, rows as i64]);
        shape
    }

    /// The matrix of `x` that all products share, if they do and it is one row.
    fn only_row(&self) -> Option<usize> {
        let (first, _) = *self.pairs.first()?;
        let is_same = self.pairs.iter().all(|(of_x, _)| *of_x == first);
        (is_same && self.m == 1).then_some(first)
    }

    /// The matrix of the weight for every product.
    fn matrices(&self) -> impl Iterator<Item = usize> {
        self.pairs.iter().map(|(_, of_w)| *of_w)
    }

    /// Calls `product` once for every matrix of the weight that is chosen, with all of its rows. False when it
    /// gave false.
    fn by_matrix(
        &self,
        x: &[f32],
        rows: usize,
        out: &mut [f32],
        mut product: impl FnMut(usize, &[f32], &mut [f32]) -> bool,
    ) -> bool {
        let (taken, given) = (self.m * self.columns, self.m * rows);
        let input = |of_x: usize| of_x * taken..(of_x + 1) * taken;
        let output = |pair: usize| pair * given..(pair + 1) * given;
        let mut order: Vec<usize> = (0..self.pairs.len()).collect();
        order.sort_by_key(|pair| self.pairs.get(*pair).map(|(_, of_w)| *of_w));
        let same = |a: &usize, b: &usize| {
            let of_w = |pair: &usize| self.pairs.get(*pair).map(|(_, of_w)| *of_w);
            of_w(a) == of_w(b)
        };
        let (mut together, mut results) = (Vec::new(), Vec::new());
        for pairs in order.chunk_by(same) {
            let Some(&(first, of_w)) = pairs.first().and_then(|pair| self.pairs.get(*pair)) else {
                continue;
            };
            if let [pair] = *pairs {
                let (Some(x), Some(out)) = (x.get(input(first)), out.get_mut(output(pair))) else {
                    return false;
                };
                if !product(of_w, x, out) {
                    return false;
                }
                continue;
            }
            together.clear();
            for (of_x, _) in pairs.iter().filter_map(|pair| self.pairs.get(*pair)) {
                together.extend_from_slice(x.get(input(*of_x)).unwrap_or_default());
            }
            results.clear();
            results.resize(pairs.len() * given, 0.0);
            if !product(of_w, &together, &mut results) {
                return false;
            }
            for (pair, result) in pairs.iter().zip(results.chunks_exact(given)) {
                if let Some(out) = out.get_mut(output(*pair)) {
                    out.copy_from_slice(result);
                }
            }
        }
        true
    }
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
    let Some(stack) = (unsafe { Stack::packed(&native, &args.w) })? else {
        return Ok(None);
    };
    let indices = [args.lhs_indices, args.rhs_indices];
    gathered(
        native,
        state,
        args.x,
        &stack,
        indices,
        "gather_quantized_matmul",
    )
}

/// `x[lhs] @ w[rhs].T`.
fn gathered(
    native: Native<'_>,
    state: &mut State,
    x: Tensor,
    stack: &Stack<'_>,
    indices: [Tensor; 2],
    name: &str,
) -> Result<Option<Tensor>> {
    let Some(x) = floats(&native, x)? else {
        return Ok(None);
    };
    if x.shape().last() != Some(&(stack.columns as i64)) {
        return Ok(None);
    }
    let Some(choice) = choice(&native, &x, indices, stack.matrices)? else {
        return Ok(None);
    };
    // SAFETY: a contiguous f32 view of a tensor that the caller holds.
    let input = unsafe { x.as_slice::<f32>() };
    let dtype = stack.dtype.map_or(x.given, |w| joint(x.given, w));
    filled(&native, dtype, &choice.result(stack.rows), name, |out| {
        products(state, &choice, input, stack, out)
    })
}

fn products(
    state: &mut State,
    choice: &Choice,
    x: &[f32],
    stack: &Stack<'_>,
    out: &mut [f32],
) -> bool {
    // One row that meets several matrices is prepared once, and threads meet once for all of them.
    if let Some(row) = choice.only_row() {
        let x = x.get(row * choice.columns..(row + 1) * choice.columns);
        let chosen = choice.matrices().zip(out.chunks_exact_mut(stack.rows));
        let targets = chosen.map(|(of_w, y)| {
            let w = stack.joining(state, of_w, 1)?;
            Some(qmatmul::Target { w, y })
        });
        let targets: Option<Vec<_>> = targets.collect();
        if let (Some(x), Some(mut targets)) = (x, targets) {
            return qmatmul::matmul(
                state.isa,
                state.precision,
                &mut state.pool,
                x,
                &mut targets,
                &mut state.prepared,
            );
        }
    }
    choice.by_matrix(x, stack.rows, out, |index, x, out| {
        stack.product(state, index, x, out)
    })
}
