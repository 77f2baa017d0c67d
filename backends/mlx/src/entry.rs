//! What a handle stands for: an array of MLX, or a block that becomes one when MLX has to see it.
//!
//! Kernels of a device's own ask for a tensor's memory hundreds of times a step. Where it is and what shape
//! it has stays the same as long as the handle lives, once it is computed, so that is remembered here, in
//! one line of a cache, in place of MLX's four objects of an array.

use core::cell::{Cell, OnceCell};
use core::ptr::NonNull;
use std::rc::Rc;

use cxx::UniquePtr;
use mlxcel_abi::types::MAX_DIMS;
use mlxcel_abi::{AbiError, DType, TensorInfo};

use crate::args::Result;
use crate::blocks::Block;
use crate::bridge::{self, Array};
use crate::native::View;

/// Axes that are remembered; tensors with more are asked for each time.
const MOST_AXES: usize = 4;

type Dims = [i32; MOST_AXES];

/// What is remembered of a tensor.
#[derive(Debug, Clone, Copy)]
struct Form {
    data: *mut u8,
    dims: Dims,
    dtype: u8,
    ndim: u8,
    order: Order,
    is_watched: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Nobody asked yet, or it is not to be remembered.
    Unknown,
    /// Row-major without gaps.
    Rows,
    /// Of two axes, the transpose of a row-major matrix.
    Columns,
}

const UNKNOWN: Form = Form {
    data: core::ptr::null_mut(),
    dims: [0; MOST_AXES],
    dtype: 0,
    ndim: 0,
    order: Order::Unknown,
    is_watched: false,
};

impl Form {
    /// Row-major elements at `data`, if that can be remembered.
    fn rows(data: *mut u8, dtype: DType, shape: &[i64]) -> Option<Self> {
        let mut form = Self {
            data,
            dtype: u8::try_from(dtype.0).ok()?,
            ndim: shape.len() as u8,
            order: Order::Rows,
            ..UNKNOWN
        };
        let kept = form.dims.get_mut(..shape.len())?;
        for (to, &dim) in kept.iter_mut().zip(shape) {
            *to = i32::try_from(dim).ok().filter(|&dim| dim > 0)?;
        }
        Some(form)
    }

    /// What `view` says, if it can be remembered to the last stride.
    fn of(view: &View) -> Option<Self> {
        let form = Self::rows(view.data, view.dtype, view.shape())?;
        if view.data.is_null() {
            return None;
        }
        let mut columns = form;
        columns.order = Order::Columns;
        [form, columns].into_iter().find(|form| {
            let own = form.view();
            own.is_contiguous == view.is_contiguous && own.strides() == view.strides()
        })
    }

    fn view(&self) -> View {
        let (mut dims, mut strides) = ([0; MAX_DIMS], [0; MAX_DIMS]);
        let ndim = usize::from(self.ndim).min(MOST_AXES);
        let mut stride = 1;
        for axis in (0..ndim).rev() {
            dims[axis] = i64::from(self.dims[axis]);
            strides[axis] = stride;
            stride *= dims[axis];
        }
        if self.order == Order::Columns {
            [strides[0], strides[1]] = [1, dims[0]];
        }
        View::new(
            self.data,
            DType(u32::from(self.dtype)),
            self.order == Order::Rows,
            ndim,
            dims,
            strides,
        )
    }
}

/// What a handle stands for.
pub(crate) struct Entry {
    /// Owned; unset only where there is a block.
    array: OnceCell<NonNull<Array>>,
    block: Option<Rc<Block>>,
    form: Cell<Form>,
}

impl Entry {
    /// Of an array.
    pub(crate) fn of(array: UniquePtr<Array>) -> core::result::Result<Self, AbiError> {
        let array = NonNull::new(array.into_raw())
            .ok_or_else(|| AbiError::internal("an operation gave no array"))?;
        Ok(Self {
            array: OnceCell::from(array),
            block: None,
            form: Cell::new(UNKNOWN),
        })
    }

    /// Of a block's first bytes, row-major; none for what cannot be remembered.
    pub(crate) fn over(block: Rc<Block>, dtype: DType, shape: &[i64]) -> Option<Self> {
        let form = Form::rows(block.data(), dtype, shape)?;
        Some(Self {
            array: OnceCell::new(),
            block: Some(block),
            form: Cell::new(form),
        })
    }

    /// The same block under another shape of as many elements.
    pub(crate) fn share(&self, shape: &[i64]) -> Option<Self> {
        let block = Rc::clone(self.block.as_ref()?);
        Self::over(block, DType(u32::from(self.form.get().dtype)), shape)
    }

    /// The array, which is made of the block where nobody needed it before.
    pub(crate) fn array(&self) -> Result<&Array> {
        let array = match (self.array.get(), &self.block) {
            (Some(array), _) => array,
            (None, Some(block)) => {
                let form = self.form.get();
                let view = form.view();
                let made = block.array(u32::from(form.dtype), view.shape())?;
                let made = NonNull::new(made.into_raw())
                    .ok_or_else(|| AbiError::internal("a block gave no array"))?;
                self.array.get_or_init(|| made)
            }
            (None, None) => return Err(AbiError::internal("a handle has no array").into()),
        };
        // SAFETY: owned by this entry until it ends, and only ever lent.
        Ok(unsafe { array.as_ref() })
    }

    /// Type and shape.
    pub(crate) fn info(&self) -> Result<TensorInfo> {
        let form = self.form.get();
        if form.order != Order::Unknown {
            let view = form.view();
            let mut info = TensorInfo {
                dtype: view.dtype,
                ndim: view.shape().len() as u32,
                dims: [0; MAX_DIMS],
            };
            for (to, &dim) in info.dims.iter_mut().zip(view.shape()) {
                *to = dim;
            }
            return Ok(info);
        }
        let info = bridge::info(self.array()?);
        Ok(TensorInfo {
            dtype: DType(info.dtype),
            ndim: info.ndim,
            dims: info.dims,
        })
    }

    /// Whether the elements are there.
    pub(crate) fn is_computed(&self) -> Result<bool> {
        Ok(self.form.get().order != Order::Unknown || bridge::is_computed(self.array()?))
    }

    /// The memory, where it is known.
    pub(crate) fn known(&self) -> Option<View> {
        let form = self.form.get();
        (form.order != Order::Unknown).then(|| form.view())
    }

    /// Has the end of the entry be told. False where the memory is not known, which can then change.
    pub(crate) fn watch(&self) -> bool {
        let mut form = self.form.get();
        form.is_watched = form.order != Order::Unknown;
        self.form.set(form);
        form.is_watched
    }

    /// Whether somebody wants to know of the entry's end.
    pub(crate) fn is_watched(&self) -> bool {
        self.form.get().is_watched
    }

    /// The memory. Computes the array first when it is not yet.
    pub(crate) fn view(&self) -> Result<View> {
        if let Some(view) = self.known() {
            return Ok(view);
        }
        let raw = bridge::raw_array(self.array()?)?;
        let view = View::new(
            raw.data as *mut u8,
            DType(raw.dtype),
            raw.row_contiguous,
            raw.ndim as usize,
            raw.dims,
            raw.strides,
        );
        if let Some(form) = Form::of(&view) {
            self.form.set(form);
        }
        Ok(view)
    }

    /// Ends the entry and gives its block.
    pub(crate) fn into_block(mut self) -> Option<Rc<Block>> {
        self.block.take()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(array) = self.array.take() {
            // SAFETY: made of a `UniquePtr` by this entry, which ends here.
            drop(unsafe { UniquePtr::from_raw(array.as_ptr()) });
        }
    }
}
