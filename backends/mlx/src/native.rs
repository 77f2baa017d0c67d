//! Kernels of a device in place of MLX's: direct access to the memory of arrays.
//!
//! A backend may replace slots of the table by functions that compute at once on memory, and fall
//! back to the slot they replaced. Arrays stay MLX's own, so that both kinds of operation mix. Only
//! for devices whose memory is the host's.

use core::ffi::c_void;
use std::rc::Rc;

use mlxcel_abi::types::MAX_DIMS;
use mlxcel_abi::{AbiError, DType, Result, Tensor};

use crate::blocks::{self, Block};
use crate::bridge;
use crate::context::Context;
use crate::entry::Entry;
use crate::fault::Fault;
use crate::ops::memory::check_room;

/// The tensors of one open backend, on its own thread.
#[derive(Clone, Copy)]
pub struct Native<'a> {
    context: &'a Context,
}

/// Memory of a computed tensor. Valid while the tensor lives.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// First byte; null when there are no elements.
    pub data: *mut u8,
    /// Element type.
    pub dtype: DType,
    /// Whether the elements are in row-major order without gaps.
    pub is_contiguous: bool,
    ndim: usize,
    dims: [i64; MAX_DIMS],
    strides: [i64; MAX_DIMS],
}

impl View {
    pub(crate) fn new(
        data: *mut u8,
        dtype: DType,
        is_contiguous: bool,
        ndim: usize,
        dims: [i64; MAX_DIMS],
        strides: [i64; MAX_DIMS],
    ) -> Self {
        Self {
            data,
            dtype,
            is_contiguous,
            ndim,
            dims,
            strides,
        }
    }

    /// Dimensions.
    #[inline]
    pub fn shape(&self) -> &[i64] {
        self.dims.get(..self.ndim).unwrap_or_default()
    }

    /// Distance of neighbours along each axis, in elements.
    #[inline]
    pub fn strides(&self) -> &[i64] {
        self.strides.get(..self.ndim).unwrap_or_default()
    }

    /// Number of elements.
    #[inline]
    pub fn len(&self) -> usize {
        self.shape().iter().product::<i64>().max(0) as usize
    }

    /// Whether there are no elements.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the elements.
    pub(crate) fn byte_len(&self) -> usize {
        self.len() * self.dtype.size_bytes()
    }

    /// The elements.
    ///
    /// # Safety
    /// The view is contiguous and of `T`'s type, the tensor lives for `'a`, and nobody writes to it
    /// meanwhile.
    #[inline]
    pub unsafe fn as_slice<'a, T>(&self) -> &'a [T] {
        if self.data.is_null() {
            return &[];
        }
        // SAFETY: the caller vouches for the type and the lifetime.
        unsafe { core::slice::from_raw_parts(self.data.cast::<T>(), self.len()) }
    }

    /// The elements, to be written.
    ///
    /// # Safety
    /// As for [`View::as_slice`], and nobody else reads or writes meanwhile.
    #[inline]
    pub unsafe fn as_mut_slice<'a, T>(&self) -> &'a mut [T] {
        if self.data.is_null() {
            return &mut [];
        }
        // SAFETY: the caller vouches for the type, the lifetime and exclusiveness.
        unsafe { core::slice::from_raw_parts_mut(self.data.cast::<T>(), self.len()) }
    }
}

impl<'a> Native<'a> {
    /// The backend behind a slot's first argument. Refuses other threads.
    ///
    /// # Safety
    /// `ctx` must be null or the `ctx` of a table that this crate's `open` gave and `close` has not
    /// taken.
    pub unsafe fn from_raw(ctx: *mut c_void) -> Result<Self> {
        // SAFETY: forwarded to the caller.
        let context = unsafe { Context::from_raw(ctx) }?;
        context.check_thread()?;
        context.drain_deferred();
        Ok(Self { context })
    }

    /// Memory of a tensor, which is computed first if need be.
    pub fn view(&self, t: Tensor) -> Result<View> {
        let tensors = self.context.tensors.borrow();
        let entry = tensors.get(t)?;
        if let Some(view) = entry.known() {
            return Ok(view);
        }
        let found = (|| {
            if !entry.is_computed()? {
                check_room(self.context, 0)?;
            }
            entry.view()
        })();
        found.map_err(|fault| fault.named("view"))
    }

    /// Has [`Native::watched_ends`] change when the tensor ends. False where its memory is not to be remembered.
    pub fn watch(&self, t: Tensor) -> Result<bool> {
        Ok(self.context.tensors.borrow().get(t)?.watch())
    }

    /// Which backend this is, and a number that is another one after a watched tensor has ended: what was remembered of watched
    /// tensors holds as long as both are the same.
    pub fn watched_ends(&self) -> (usize, u64) {
        let context: *const Context = self.context;
        (context as usize, self.context.watched_ends.get())
    }

    /// Whether the memory in use is within the limit.
    pub fn check_room(&self) -> Result<()> {
        check_room(self.context, 0).map_err(|fault| fault.named("memory"))
    }

    /// Whether a tensor's elements are there, so that nothing is left to compute.
    pub fn is_computed(&self, t: Tensor) -> Result<bool> {
        let tensors = self.context.tensors.borrow();
        let found = tensors.get(t)?.is_computed();
        found.map_err(|fault| fault.named("tensor"))
    }

    /// A new tensor whose elements the caller must write before anything else happens to it.
    pub fn allocate(&self, dtype: DType, shape: &[i64]) -> Result<(Tensor, View)> {
        let elements = shape
            .iter()
            .try_fold(1u64, |n, &dim| n.checked_mul(u64::try_from(dim).ok()?));
        let bytes = elements.and_then(|n| n.checked_mul(dtype.size_bytes() as u64));
        let bytes = bytes.ok_or_else(|| {
            AbiError::invalid(format!("a tensor of shape {shape:?} is not possible"))
        })?;
        let block = self.block(bytes).map_err(|fault| fault.named("allocate"))?;
        let entry = block.and_then(|block| Entry::over(block, dtype, shape));
        let entry = match entry {
            Some(entry) => entry,
            None => {
                check_room(self.context, bytes).map_err(|fault| fault.named("allocate"))?;
                let array = bridge::new_array(dtype.0, shape)
                    .map_err(|error| Fault::from(error).named("allocate"))?;
                Entry::of(array)?
            }
        };
        let known = entry.known();
        let t = self.context.insert_entry(entry)?;
        match known {
            Some(view) => Ok((t, view)),
            None => Ok((t, self.view(t)?)),
        }
    }

    /// Memory for a result, where it is a block's; whoever gets none allocates an array, or the error that there is no room.
    fn block(&self, bytes: u64) -> crate::args::Result<Option<Rc<Block>>> {
        if bytes == 0 || bytes > blocks::MOST_BYTES as u64 {
            return Ok(None);
        }
        self.context.blocks.borrow_mut().take(bytes as usize)
    }

    /// The memory of a contiguous tensor under another shape. The caller checked that the number of
    /// elements is the same.
    pub fn share(&self, t: Tensor, shape: &[i64]) -> Result<Tensor> {
        let entry = {
            let tensors = self.context.tensors.borrow();
            let source = tensors.get(t)?;
            match source.share(shape) {
                Some(entry) => entry,
                None => {
                    let array = source.array().map_err(|fault| fault.named("share"))?;
                    let array = bridge::share_array(array, shape)
                        .map_err(|error| Fault::from(error).named("share"))?;
                    Entry::of(array)?
                }
            }
        };
        self.context.insert_entry(entry)
    }

    /// Another reference to a tensor.
    pub fn retain(&self, t: Tensor) -> Result<Tensor> {
        self.context.tensors.borrow_mut().retain(t)?;
        Ok(t)
    }

    /// Drops a reference.
    pub fn release(&self, t: Tensor) -> Result<()> {
        self.context.release(t)
    }

    /// The error of a kernel that panicked.
    pub fn panicked(kernel: &str) -> AbiError {
        AbiError::internal(format!(
            "panicked: kernel {kernel} failed on a compute thread"
        ))
    }
}
