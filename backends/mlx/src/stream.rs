//! Kernels of a CUDA device in place of MLX's, on MLX's own stream.
//!
//! A backend may replace slots of the table by functions that submit kernels at once, which costs far less time of the host than
//! a node of MLX's graph. Their results are arrays like others: what MLX does with them is submitted later to the same stream, so
//! it comes after. `wrap` gives arrays over the backend's own memory, `view` says where any array's elements are.

use core::cell::Cell;
use core::ffi::c_void;

use mlxcel_abi::{AbiError, DType, Result, Tensor};

use crate::bridge::Array;
use crate::context::{Context, Tensors};
use crate::fault::Fault;
use crate::native::View;
use crate::ops::memory::check_room;
use crate::slot::get;

#[cxx::bridge(namespace = "mlxcel")]
mod ffi {
    struct DeviceView {
        address: usize,
        dtype: u32,
        ndim: u32,
        dims: [i64; 8],
        strides: [i64; 8],
        row_contiguous: bool,
        is_foreign: bool,
    }

    struct DeviceBlock {
        address: usize,
        bytes: usize,
        device: i32,
        release: usize,
        owner: usize,
    }

    extern "Rust" {
        fn submit_held_launches();
    }

    unsafe extern "C++" {
        include!("mlxcel-backend-mlx/cpp/stream.h");

        type Array = crate::bridge::Array;

        fn device_index() -> i32;
        fn device_stream() -> Result<usize>;
        fn device_view(a: &Array) -> Result<DeviceView>;
        fn wrap_block(block: &DeviceBlock, dtype: u32, dims: &[i64]) -> Result<UniquePtr<Array>>;
        fn hold(a: &Array);
        fn let_go_when_done() -> Result<()>;
    }
}

/// Memory that a backend lends to an array.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// Address on the device.
    pub address: usize,
    /// Size.
    pub bytes: usize,
    /// Number of the device.
    pub device: i32,
    /// Called once, from any thread, when the last array over it is gone: owner, address, size, and whether MLX has moved it to
    /// managed memory at that address and has freed the original.
    pub release: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, bool),
    /// Passed to `release`.
    pub owner: *mut c_void,
}

/// The tensors of one open backend, on its own thread.
#[derive(Clone, Copy)]
pub struct Device<'a> {
    context: &'a Context,
}

thread_local! {
    static HELD: Cell<Option<fn()>> = const { Cell::new(None) };
    static LENT: Cell<Option<fn() -> u64>> = const { Cell::new(None) };
}

/// For a backend whose arrays are over memory of its own: `bytes` says on this thread how much of it is in use, which counts against
/// the limit of memory too.
pub fn set_lent(bytes: Option<fn() -> u64>) {
    LENT.set(bytes);
}

/// What [`set_lent`] was told of is in use; 0 where there is nothing.
pub(crate) fn lent_bytes() -> u64 {
    LENT.get().map_or(0, |bytes| bytes())
}

/// For a backend that holds launches back: `submit` is called on this thread before MLX submits work or waits for it, since what
/// MLX does then comes after those launches.
pub fn set_held(submit: Option<fn()>) {
    HELD.set(submit);
}

fn submit_held_launches() {
    if let Some(submit) = HELD.get() {
        submit();
    }
}

/// Number of the device that is open on this thread.
pub fn device_index() -> i32 {
    ffi::device_index()
}

/// The stream that MLX submits to on this thread, as the driver knows it.
pub fn stream() -> Result<usize> {
    let stream = ffi::device_stream().map_err(|error| Fault::from(error).named("stream"))?;
    if stream == 0 {
        return Err(AbiError::internal("this build of MLX has no CUDA stream"));
    }
    Ok(stream)
}

fn array_of(tensors: &Tensors, t: Tensor) -> Result<&Array> {
    get(tensors, t).map_err(|fault| fault.named("tensor"))
}

impl<'a> Device<'a> {
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

    /// Where a tensor is; what is left to compute is submitted. The flag says that the memory is MLX's: whoever submits kernels
    /// that use it has to [`Device::hold`] the tensor.
    pub fn view(&self, t: Tensor) -> Result<(View, bool)> {
        let tensors = self.context.tensors.borrow();
        let array = array_of(&tensors, t)?;
        let found = ffi::device_view(array).map_err(|error| Fault::from(error).named("view"))?;
        let view = View::new(
            found.address as *mut u8,
            DType(found.dtype),
            found.row_contiguous,
            found.ndim as usize,
            found.dims,
            found.strides,
        );
        Ok((view, found.is_foreign))
    }

    /// A tensor over a block, which it gives back in the end.
    pub fn wrap(&self, block: &Block, dtype: DType, shape: &[i64]) -> Result<Tensor> {
        let block = ffi::DeviceBlock {
            address: block.address,
            bytes: block.bytes,
            device: block.device,
            release: block.release as usize,
            owner: block.owner as usize,
        };
        let array = ffi::wrap_block(&block, dtype.0, shape)
            .map_err(|error| Fault::from(error).named("wrap"))?;
        self.context.insert(array)
    }

    /// The memory of a contiguous tensor under another shape of as many elements.
    pub fn share(&self, t: Tensor, shape: &[i64]) -> Result<Tensor> {
        let array = {
            let tensors = self.context.tensors.borrow();
            crate::bridge::share_array(array_of(&tensors, t)?, shape)
                .map_err(|error| Fault::from(error).named("share"))?
        };
        self.context.insert(array)
    }

    /// Keeps the memory of a tensor until [`Device::let_go_when_done`] is called and everything submitted before it is done.
    pub fn hold(&self, t: Tensor) -> Result<()> {
        ffi::hold(array_of(&self.context.tensors.borrow(), t)?);
        Ok(())
    }

    /// See [`Device::hold`].
    pub fn let_go_when_done(&self) -> Result<()> {
        ffi::let_go_when_done().map_err(|error| Fault::from(error).named("hold"))
    }

    /// Whether memory in use, what was lent included, is within the limit with `wanted` more bytes.
    pub fn check_room(&self, wanted: u64) -> Result<()> {
        check_room(self.context, wanted).map_err(|fault| fault.named("memory"))
    }

    /// Another reference to a tensor.
    pub fn retain(&self, t: Tensor) -> Result<Tensor> {
        self.context.tensors.borrow_mut().retain(t)?;
        Ok(t)
    }

    /// Writes a line of debugging to the host's log.
    pub fn log(&self, message: &str) {
        self.context.log(mlxcel_abi::kinds::log::DEBUG, message);
    }

    /// Writes a line of information to the host's log.
    pub fn note(&self, message: &str) {
        self.context.log(mlxcel_abi::kinds::log::INFO, message);
    }

    /// Drops a reference.
    pub fn release(&self, t: Tensor) -> Result<()> {
        self.context.release(t)
    }
}
