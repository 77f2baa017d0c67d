//! Matrix products of plain tensors.

use mlxcel_abi::{AbiError, DType, Result};

use super::number::{need_int, promote};
use super::shape;
use super::value::{Data, Mode, Value};

/// A batch of matrices as f64, row-major.
pub(super) struct Matrices {
    pub batch: Vec<usize>,
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Matrices {
    fn size(&self) -> usize {
        self.rows * self.cols
    }

    pub(super) fn matrix(&self, index: usize) -> &[f64] {
        &self.data[index * self.size()..(index + 1) * self.size()]
    }

    /// The same with rows and columns swapped.
    pub(super) fn transposed(self) -> Self {
        let Self {
            batch,
            rows,
            cols,
            data,
        } = self;
        let count = data.len().checked_div(rows * cols).unwrap_or(0);
        let mut out = Vec::with_capacity(data.len());
        for matrix in 0..count {
            let start = matrix * rows * cols;
            for col in 0..cols {
                out.extend((0..rows).map(|row| data[start + row * cols + col]));
            }
        }
        Self {
            batch,
            rows: cols,
            cols: rows,
            data: out,
        }
    }
}

/// Sum of products. Tests run in unoptimised builds, where an iterator costs several times as much
/// as the arithmetic; this is the one loop where that matters.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (mut sum, mut i, n) = (0.0, 0, a.len().min(b.len()));
    while i < n {
        sum += a[i] * b[i];
        i += 1;
    }
    sum
}

/// `out[i][j] = sum over k of a[i][k] * b[j][k]`: rows of both operands are contiguous.
pub(super) fn product_nt(a: &[f64], b: &[f64], inner: usize, n: usize, out: &mut Vec<f64>) {
    if inner == 0 {
        return;
    }
    for a_row in a.chunks_exact(inner) {
        for b_row in b.chunks_exact(inner).take(n) {
            out.push(dot(a_row, b_row));
        }
    }
}

fn need_product_dtype(a: DType, b: DType) -> Result<DType> {
    let dtype = promote(a, b);
    if dtype == DType::C64 {
        return Err(AbiError::unimplemented(
            "a product of complex matrices is not in this backend",
        ));
    }
    if !dtype.is_float() {
        return Err(AbiError::invalid(format!(
            "a matrix product needs floats, found {} and {}",
            a.name(),
            b.name()
        )));
    }
    Ok(dtype)
}

/// Rank-1 operands count as a row on the left and as a column on the right.
fn as_matrix(shape: &[usize], left: bool) -> Result<Vec<usize>> {
    match shape {
        [] => Err(AbiError::invalid(
            "a scalar cannot be an operand of a matrix product",
        )),
        &[n] if left => Ok(vec![1, n]),
        &[n] => Ok(vec![n, 1]),
        dims => Ok(dims.to_vec()),
    }
}

struct Plan {
    dtype: DType,
    batch: Vec<usize>,
    m: usize,
    k: usize,
    n: usize,
    a: Vec<usize>,
    b: Vec<usize>,
}

fn plan(a: &Value, b: &Value) -> Result<Plan> {
    let dtype = need_product_dtype(a.dtype, b.dtype)?;
    let (a_dims, b_dims) = (as_matrix(&a.shape, true)?, as_matrix(&b.shape, false)?);
    let (a_batch, a_last) = a_dims.split_at(a_dims.len() - 2);
    let (b_batch, b_last) = b_dims.split_at(b_dims.len() - 2);
    if a_last[1] != b_last[0] {
        return Err(AbiError::invalid(format!(
            "inner dimensions differ in the product of {:?} and {:?}",
            a.shape, b.shape
        )));
    }
    Ok(Plan {
        dtype,
        batch: shape::broadcast(&[a_batch, b_batch])?,
        m: a_last[0],
        k: a_last[1],
        n: b_last[1],
        a: a_batch.to_vec(),
        b: b_batch.to_vec(),
    })
}

/// Shape of the result, without the axes that rank-1 operands got.
fn result_shape(plan: &Plan, a: &Value, b: &Value) -> Vec<usize> {
    let mut out = plan.batch.clone();
    if a.shape.len() > 1 {
        out.push(plan.m);
    }
    if b.shape.len() > 1 {
        out.push(plan.n);
    }
    out
}

fn compute(plan: &Plan, a: &Value, b: &Value) -> Vec<f64> {
    let b = Matrices {
        batch: plan.b.clone(),
        rows: plan.k,
        cols: plan.n,
        data: b.reals().into_owned(),
    }
    .transposed();
    let a = a.reals();
    let count: usize = plan.batch.iter().product();
    let mut out = Vec::with_capacity(count * plan.m * plan.n);
    let lefts = shape::broadcast_positions(&plan.a, &plan.batch);
    let rights = shape::broadcast_positions(&plan.b, &plan.batch);
    let left_size = plan.m * plan.k;
    for (left, right) in lefts.into_iter().zip(rights) {
        product_nt(
            &a[left * left_size..][..left_size],
            b.matrix(right),
            plan.k,
            plan.n,
            &mut out,
        );
    }
    // An empty sum is 0.
    out.resize(count * plan.m * plan.n, 0.0);
    out
}

/// Batched matrix product.
pub(super) fn matmul(mode: Mode, a: &Value, b: &Value) -> Result<Value> {
    let plan = plan(a, b)?;
    mode.value(plan.dtype, result_shape(&plan, a, b), || {
        Ok(Data::Real(compute(&plan, a, b)))
    })
}

/// `alpha * a @ b + beta * c`, rounded once.
pub(super) fn addmm(
    mode: Mode,
    c: &Value,
    a: &Value,
    b: &Value,
    alpha: f32,
    beta: f32,
) -> Result<Value> {
    let plan = plan(a, b)?;
    let dtype = need_product_dtype(plan.dtype, c.dtype)?;
    let out = result_shape(&plan, a, b);
    if shape::broadcast(&[&c.shape, &out]).ok().as_ref() != Some(&out) {
        return Err(AbiError::invalid(format!(
            "an addend of shape {:?} does not fit the product's {out:?}",
            c.shape
        )));
    }
    mode.value(dtype, out.clone(), || {
        let addend = c.reals();
        let spread = shape::broadcast_positions(&c.shape, &out);
        Ok(Data::Real(
            compute(&plan, a, b)
                .into_iter()
                .zip(spread)
                .map(|(x, i)| f64::from(alpha) * x + f64::from(beta) * addend[i])
                .collect(),
        ))
    })
}

/// Which matrix of each operand every product takes.
pub(super) struct Choice {
    pub shape: Vec<usize>,
    pub left: Vec<usize>,
    pub right: Vec<usize>,
}

/// Broadcasts two optional index tensors; a missing one counts the operand's own matrices, in the
/// shape of its batch axes. In shapes-only mode the lists are empty.
pub(super) fn choose(
    mode: Mode,
    batches: [&[usize]; 2],
    indices: [Option<&Value>; 2],
) -> Result<Choice> {
    let mut shapes = Vec::new();
    for (index, batch) in indices.iter().zip(batches) {
        if let Some(index) = index {
            need_int("a matrix index tensor", index.dtype)?;
        }
        shapes.push(index.map_or(batch, |index| &index.shape));
    }
    let common = shape::broadcast(&shapes)?;
    if mode.shapes_only {
        return Ok(Choice {
            shape: common,
            left: Vec::new(),
            right: Vec::new(),
        });
    }
    let list = |side: usize| -> Result<Vec<usize>> {
        let count: usize = batches[side].iter().product();
        let spread = shape::broadcast_positions(shapes[side], &common);
        let Some(index) = indices[side] else {
            return Ok(spread);
        };
        let values = index.ints()?;
        spread
            .into_iter()
            .map(|i| {
                usize::try_from(values[i])
                    .ok()
                    .filter(|&x| x < count)
                    .ok_or_else(|| {
                        AbiError::invalid(format!(
                            "matrix index {} is outside a batch of {count}",
                            values[i]
                        ))
                    })
            })
            .collect()
    };
    Ok(Choice {
        left: list(0)?,
        right: list(1)?,
        shape: common,
    })
}

/// Products of chosen matrices: `a[lhs] @ b[rhs]`.
pub(super) fn gather_matmul(
    mode: Mode,
    a: &Value,
    b: &Value,
    lhs: Option<&Value>,
    rhs: Option<&Value>,
) -> Result<Value> {
    if a.shape.len() < 2 || b.shape.len() < 2 {
        return Err(AbiError::invalid(format!(
            "gathered products need matrices, found {:?} and {:?}",
            a.shape, b.shape
        )));
    }
    // Batch axes need not broadcast here, so only the last two are planned.
    let dtype = need_product_dtype(a.dtype, b.dtype)?;
    let (a_batch, a_last) = a.shape.split_at(a.shape.len() - 2);
    let (b_batch, b_last) = b.shape.split_at(b.shape.len() - 2);
    if a_last[1] != b_last[0] {
        return Err(AbiError::invalid(format!(
            "inner dimensions differ in the product of {:?} and {:?}",
            a.shape, b.shape
        )));
    }
    let choice = choose(mode, [a_batch, b_batch], [lhs, rhs])?;
    let out = [choice.shape.as_slice(), &[a_last[0], b_last[1]]].concat();
    let total = shape::count(&out)?;
    mode.value(dtype, out, || {
        let right = Matrices {
            batch: b_batch.to_vec(),
            rows: b_last[0],
            cols: b_last[1],
            data: b.reals().into_owned(),
        }
        .transposed();
        let left = a.reals();
        Ok(Data::Real(chosen_products(
            &left, a_last, &right, &choice, total,
        )))
    })
}

/// `left[choice.left[i]] @ right[choice.right[i]].T` for every i.
pub(super) fn chosen_products(
    left: &[f64],
    left_dims: &[usize],
    right: &Matrices,
    choice: &Choice,
    total: usize,
) -> Vec<f64> {
    let size = left_dims[0] * left_dims[1];
    let mut out = Vec::with_capacity(total);
    for (&l, &r) in choice.left.iter().zip(&choice.right) {
        product_nt(
            &left[l * size..][..size],
            right.matrix(r),
            left_dims[1],
            right.rows,
            &mut out,
        );
    }
    out.resize(total, 0.0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    fn real(shape: &[usize], v: &[f64]) -> Value {
        Value {
            dtype: DType::F32,
            shape: shape.to_vec(),
            data: Data::Real(v.to_vec()),
        }
    }

    #[test]
    fn products_of_every_rank() {
        let a = real(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let v = real(&[2], &[5.0, 6.0]);
        assert_eq!(
            *matmul(MODE, &a, &a).unwrap().reals(),
            [7.0, 10.0, 15.0, 22.0]
        );
        assert_eq!(*matmul(MODE, &a, &v).unwrap().reals(), [17.0, 39.0]);
        assert_eq!(*matmul(MODE, &v, &a).unwrap().reals(), [23.0, 34.0]);
        let dot = matmul(MODE, &v, &v).unwrap();
        assert_eq!((dot.shape.len(), dot.reals()[0]), (0, 61.0));
        let empty = matmul(MODE, &real(&[2, 0], &[]), &real(&[0, 3], &[])).unwrap();
        assert_eq!(*empty.reals(), [0.0; 6]);
        assert!(matmul(MODE, &a, &real(&[3, 1], &[0.0; 3])).is_err());
    }

    #[test]
    fn batches_broadcast_and_indices_choose() {
        let a = real(&[2, 1, 1, 1], &[2.0, 3.0]);
        let b = real(&[3, 1, 1], &[5.0, 7.0, 11.0]);
        let all = matmul(MODE, &a, &b).unwrap();
        assert_eq!(
            (all.shape.as_slice(), all.reals()[4]),
            ([2, 3, 1, 1].as_slice(), 21.0)
        );
        let index = Value {
            dtype: DType::U32,
            shape: vec![2],
            data: Data::Int(vec![2, 0]),
        };
        let x = real(&[2, 1, 1], &[2.0, 3.0]);
        let some = gather_matmul(MODE, &x, &b, None, Some(&index)).unwrap();
        assert_eq!(*some.reals(), [22.0, 15.0]);
        let bad = Value {
            dtype: DType::U32,
            shape: vec![1],
            data: Data::Int(vec![3]),
        };
        assert!(gather_matmul(MODE, &x, &b, None, Some(&bad)).is_err());
    }
}
