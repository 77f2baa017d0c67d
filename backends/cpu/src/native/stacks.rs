//! Matrices one after another, all of one shape: the experts of a mixture.

use mlxcel_abi::fused_args::LinearWeight;
use mlxcel_abi::ops_args::QuantizedWeight;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::QuantizedMatrix;
use mlxcel_cpu_kernels::gemm::Weight;

use super::State;
use super::products::{matrix, packed_product, plain_product};

/// `[matrices, rows, columns]`.
pub(super) struct Stack<'a> {
    form: Form<'a>,
    pub(super) matrices: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Of plain matrices.
    pub(super) dtype: Option<DType>,
}

#[derive(Clone, Copy)]
enum Form<'a> {
    /// With the rows of all matrices.
    Packed(QuantizedMatrix<'a>),
    /// Matrices that begin so many elements after each other.
    Plain(Weight<'a>, usize),
}

impl<'a> Stack<'a> {
    /// None where the kernels do not take it.
    ///
    /// # Safety
    /// The tensors must live for `'a`.
    pub(super) unsafe fn of_layer(native: &Native<'_>, raw: &LinearWeight) -> Result<Option<Self>> {
        if !raw.bias.is_none() {
            return Ok(None);
        }
        // SAFETY: forwarded to the caller.
        unsafe {
            match raw.plain.is_none() {
                true => Self::packed(native, &raw.quantized),
                false => Self::plain(native, raw.plain),
            }
        }
    }

    /// # Safety
    /// As for [`Stack::of_layer`].
    pub(super) unsafe fn packed(native: &Native<'_>, w: &QuantizedWeight) -> Result<Option<Self>> {
        // SAFETY: forwarded to the caller.
        let Some(whole) = (unsafe { matrix(native, w, false) })? else {
            return Ok(None);
        };
        let &[matrices, rows, _] = native.view(w.weight)?.shape() else {
            return Ok(None);
        };
        Ok(Some(Self {
            form: Form::Packed(whole),
            matrices: matrices as usize,
            rows: rows as usize,
            columns: whole.columns(),
            dtype: None,
        }))
    }

    /// Of the transposed view `[matrices, columns, rows]` of row-major weights.
    ///
    /// # Safety
    /// As for [`Stack::of_layer`].
    pub(super) unsafe fn plain(native: &Native<'_>, t: Tensor) -> Result<Option<Self>> {
        let w = native.view(t)?;
        let (&[matrices, columns, rows], &[apart, 1, stride]) = (w.shape(), w.strides()) else {
            return Ok(None);
        };
        let fits = stride == columns
            && [matrices, columns, rows].iter().all(|n| *n > 0)
            && apart >= rows * columns;
        if !fits {
            return Ok(None);
        }
        let [matrices, columns, rows, apart] = [matrices, columns, rows, apart].map(|n| n as usize);
        let len = (matrices - 1) * apart + rows * columns;
        // SAFETY: matrices of `rows * columns` elements in order, `apart` elements from each other, are what the
        // strides say; the types are checked, and the tensors live as long as the caller says.
        let elements = unsafe {
            match w.dtype {
                DType::F32 => Weight::F32(core::slice::from_raw_parts(w.data.cast(), len)),
                DType::F16 => Weight::F16(core::slice::from_raw_parts(w.data.cast(), len)),
                DType::BF16 => Weight::Bf16(core::slice::from_raw_parts(w.data.cast(), len)),
                _ => return Ok(None),
            }
        };
        Ok(Some(Self {
            form: Form::Plain(elements, apart),
            matrices,
            rows,
            columns,
            dtype: Some(w.dtype),
        }))
    }

    /// The quantised matrix, where it is one for products with `m` rows that go together.
    pub(super) fn joining(
        &self,
        state: &State,
        index: usize,
        m: usize,
    ) -> Option<QuantizedMatrix<'a>> {
        match self.form {
            Form::Packed(whole) if state.joins(m, &whole) => {
                whole.rows_from(index * self.rows, self.rows)
            }
            _ => None,
        }
    }

    /// `x` times the transposed matrix. False when a kernel panicked, or where there is no such matrix.
    pub(super) fn product(
        &self,
        state: &mut State,
        index: usize,
        x: &[f32],
        out: &mut [f32],
    ) -> bool {
        let (rows, columns) = (self.rows, self.columns);
        match self.form {
            Form::Packed(whole) => whole
                .rows_from(index * rows, rows)
                .is_some_and(|w| packed_product(state, x, w, out)),
            Form::Plain(elements, apart) => {
                let range = index * apart..index * apart + rows * columns;
                let one = match elements {
                    Weight::F32(w) => w.get(range).map(Weight::F32),
                    Weight::F16(w) => w.get(range).map(Weight::F16),
                    Weight::Bf16(w) => w.get(range).map(Weight::Bf16),
                    Weight::Quantized(_) => None,
                };
                one.is_some_and(|w| plain_product(state, x, w, [rows, columns], out))
            }
        }
    }
}
