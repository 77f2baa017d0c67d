//! NVIDIA's driver, opened when it is asked for: this crate is built and loaded on machines that have none.

mod event;
mod graph;
mod launch;
mod peer;
mod rows;

use core::cell::Cell;
use core::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use mlxcel_abi::{AbiError, Result, status};

use crate::library::said;
use crate::probe::not_started;

pub(crate) use event::Event;
pub(crate) use graph::Graph;
pub(crate) use launch::{Arguments, Launch, MOST_ACROSS, Shape, pair};
pub(crate) use peer::Handle;
pub(crate) use rows::Rows;

/// A stream of the driver.
pub(crate) type Stream = *mut c_void;
/// A kernel of a loaded module.
pub(crate) type Function = *mut c_void;

const SUCCESS: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MOST_SHARED_BYTES: c_int = 8;
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`.
const OWN_SHARED_BYTES: c_int = 1;
/// `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
pub(crate) const BLOCK_SHARED_BYTES: c_int = 97;

macro_rules! driver {
    ($($field:ident = $symbol:literal ( $($arg:ident : $ty:ty),* $(,)? );)*) => {
        /// Entry points of the driver that are used.
        pub(crate) struct Driver {
            $($field: unsafe extern "C" fn($($ty),*) -> c_int,)*
            _library: libloading::Library,
        }

        impl Driver {
            fn open(library: libloading::Library) -> core::result::Result<Self, libloading::Error> {
                // SAFETY: the types are those of the driver's documented interface.
                unsafe {
                    Ok(Self {
                        $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                        _library: library,
                    })
                }
            }

            $(
                /// # Safety
                /// As the driver documents it.
                #[allow(dead_code, reason = "the one that names errors is called by its pointer, since it must not fail")]
                #[allow(clippy::too_many_arguments, reason = "as many as the driver's function has")]
                unsafe fn $field(&self, $($arg: $ty),*) -> Result<()> {
                    let _away = self.at_home();
                    // SAFETY: forwarded to the caller.
                    let code = unsafe { (self.$field)($($arg),*) };
                    self.checked($symbol, code)
                }
            )*
        }
    };
}

driver! {
    init = "cuInit"(flags: c_uint);
    version = "cuDriverGetVersion"(out: *mut c_int);
    device_count = "cuDeviceGetCount"(out: *mut c_int);
    device_attribute = "cuDeviceGetAttribute"(out: *mut c_int, attribute: c_int, device: c_int);
    retain_context = "cuDevicePrimaryCtxRetain"(out: *mut *mut c_void, device: c_int);
    set_context = "cuCtxSetCurrent"(context: *mut c_void);
    current_context = "cuCtxGetCurrent"(out: *mut *mut c_void);
    memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    allocate = "cuMemAllocAsync"(out: *mut usize, bytes: usize, stream: Stream);
    free_in_order = "cuMemFreeAsync"(address: usize, stream: Stream);
    free_now = "cuMemFree_v2"(address: usize);
    set_bytes = "cuMemsetD8Async"(address: usize, value: u8, bytes: usize, stream: Stream);
    copy_in = "cuMemcpyHtoDAsync_v2"(to: usize, from: *const c_void, bytes: usize, stream: Stream);
    copy_out = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: usize, bytes: usize, stream: Stream);
    copy_plane = "cuMemcpy2DAsync_v2"(plane: *const rows::Plane, stream: Stream);
    wait = "cuStreamSynchronize"(stream: Stream);
    new_event = "cuEventCreate"(out: *mut event::Event, flags: c_uint);
    record_event = "cuEventRecord"(event: event::Event, stream: Stream);
    wait_event = "cuStreamWaitEvent"(stream: Stream, event: event::Event, flags: c_uint);
    destroy_event = "cuEventDestroy_v2"(event: event::Event);
    load_module = "cuModuleLoadData"(out: *mut *mut c_void, image: *const c_void);
    get_function = "cuModuleGetFunction"(out: *mut Function, module: *mut c_void, name: *const c_char);
    context_device = "cuCtxGetDevice"(out: *mut c_int);
    function_attribute = "cuFuncGetAttribute"(out: *mut c_int, attribute: c_int, function: Function);
    set_function = "cuFuncSetAttribute"(function: Function, attribute: c_int, value: c_int);
    launch_kernel = "cuLaunchKernelEx"(config: *const launch::Config, function: Function, arguments: *mut *mut c_void, extra: *mut *mut c_void);
    new_stream = "cuStreamCreate"(out: *mut Stream, flags: c_uint);
    end_stream = "cuStreamDestroy_v2"(stream: Stream);
    begin_capture = "cuStreamBeginCapture_v2"(stream: Stream, mode: c_uint);
    end_capture = "cuStreamEndCapture"(stream: Stream, out: *mut *mut c_void);
    make_executable = "cuGraphInstantiateWithFlags"(out: *mut Graph, captured: *mut c_void, flags: u64);
    upload_executable = "cuGraphUpload"(graph: Graph, stream: Stream);
    launch_executable = "cuGraphLaunch"(graph: Graph, stream: Stream);
    end_executable = "cuGraphExecDestroy"(graph: Graph);
    end_captured = "cuGraphDestroy"(captured: *mut c_void);
    encode_tiled = "cuTensorMapEncodeTiled"(out: *mut c_void, element: c_uint, rank: c_uint, address: *mut c_void, dims: *const u64, strides: *const u64, tile: *const c_uint, steps: *const c_uint, interleave: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint);
    uuid = "cuDeviceGetUuid_v2"(out: *mut c_void, device: c_int);
    can_access = "cuDeviceCanAccessPeer"(out: *mut c_int, device: c_int, other: c_int);
    allocate_now = "cuMemAlloc_v2"(out: *mut usize, bytes: usize);
    allocate_host = "cuMemHostAlloc"(out: *mut *mut c_void, bytes: usize, flags: c_uint);
    get_handle = "cuIpcGetMemHandle"(out: *mut peer::Handle, address: usize);
    open_handle = "cuIpcOpenMemHandle_v2"(out: *mut usize, handle: peer::Handle, flags: c_uint);
    error_name = "cuGetErrorName"(code: c_int, out: *mut *const c_char);
}

/// What the copy engine brings: tiles of a matrix in memory (`CUtensorMap`).
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

/// A matrix and how it is divided. Rows lie one after another, `row_bytes` apart, a multiple of 16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiling {
    pub(crate) element: Element,
    pub(crate) address: usize,
    pub(crate) rows: usize,
    /// Elements of a row.
    pub(crate) columns: usize,
    pub(crate) row_bytes: usize,
    pub(crate) tile_rows: u32,
    /// Elements of a tile's row.
    pub(crate) tile_columns: u32,
    /// Rows of a tile have 128 bytes, and their pieces of 16 change places by row.
    pub(crate) is_swizzled: bool,
}

/// `CUtensorMapDataType`, of those that are used.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub(crate) enum Element {
    Half = 1,
    Word = 2,
}

/// `CU_TENSOR_MAP_SWIZZLE_128B` and `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`.
const SWIZZLE_128: c_uint = 3;
const PROMOTION_256: c_uint = 3;

thread_local! {
    /// The context that this thread's calls are for, where there are several devices; 0 where it does not matter.
    static HOME: Cell<usize> = const { Cell::new(0) };
}

/// Another context is current for a while.
pub(crate) struct Away<'a> {
    driver: &'a Driver,
    before: *mut c_void,
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        // SAFETY: the context that was current, or none.
        unsafe { (self.driver.set_context)(self.before) };
    }
}

/// Why there is no driver.
pub(crate) const NO_DRIVER: &str = "NVIDIA's driver is not installed (libcuda.so.1 is not there)";

impl Driver {
    /// The driver of this machine.
    pub(crate) fn get() -> Result<&'static Self> {
        static FOUND: OnceLock<core::result::Result<Driver, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            // SAFETY: the driver's library is made to be opened; its constructors are its own.
            let library = unsafe { libloading::Library::new("libcuda.so.1") }
                .map_err(|error| format!("{NO_DRIVER}: {}", said(&error)))?;
            let driver = Driver::open(library).map_err(|error| {
                format!(
                    "NVIDIA's driver is too old for this backend, update it: {}",
                    said(&error)
                )
            })?;
            // SAFETY: the first call that the driver asks for.
            let code = unsafe { (driver.init)(0) };
            driver
                .checked("cuInit", code)
                .map_err(|error| not_started(code, &error.message))?;
            Ok(driver)
        });
        found
            .as_ref()
            .map_err(|reason| AbiError::new(status::UNAVAILABLE, reason.clone()))
    }

    fn checked(&self, what: &str, code: c_int) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name: *const c_char = core::ptr::null();
        // SAFETY: the driver writes a static text or leaves null.
        let name = unsafe {
            (self.error_name)(code, &raw mut name);
            if name.is_null() {
                format!("error {code}")
            } else {
                core::ffi::CStr::from_ptr(name)
                    .to_string_lossy()
                    .into_owned()
            }
        };
        let status = if code == OUT_OF_MEMORY {
            status::RESOURCE_EXHAUSTED
        } else {
            status::INTERNAL
        };
        Err(AbiError::new(status, format!("{what}: {name}")))
    }

    /// Version of CUDA that the driver has: 13000 is 13.0.
    pub(crate) fn cuda_version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: writes one number.
        unsafe { self.version(&raw mut version) }?;
        Ok(version)
    }

    /// Devices that the driver shows to this process.
    pub(crate) fn devices(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: writes one number.
        unsafe { self.device_count(&raw mut count) }?;
        Ok(count)
    }

    /// One of `CUdevice_attribute`.
    pub(crate) fn attribute(&self, attribute: i32, device: i32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: writes one number; devices and attributes are handles by number.
        unsafe { self.device_attribute(&raw mut value, attribute, device) }?;
        Ok(value)
    }

    /// Makes a device's own context the calling thread's. Where there are several devices, it is that of every later call on this
    /// thread, whichever MLX has made current meanwhile.
    pub(crate) fn use_device(&self, device: i32) -> Result<()> {
        let mut context = core::ptr::null_mut();
        // SAFETY: the context is retained for the rest of the process, as MLX's runtime does.
        unsafe {
            self.retain_context(&raw mut context, device)?;
            self.set_context(context)?;
        }
        if self.devices()? > 1 {
            HOME.set(context as usize);
        }
        Ok(())
    }

    /// Goes to this thread's context, and back when what is returned ends.
    pub(crate) fn at_home(&self) -> Option<Away<'_>> {
        let home = HOME.get();
        if home == 0 {
            return None;
        }
        let mut before = core::ptr::null_mut();
        // SAFETY: writes one handle; the other is retained for the rest of the process. An error is told by the call that follows.
        unsafe {
            if (self.current_context)(&raw mut before) != SUCCESS || before as usize == home {
                return None;
            }
            (self.set_context)(home as *mut c_void);
        }
        Some(Away {
            driver: self,
            before,
        })
    }

    /// Memory of the current context's device that nobody has, processes besides this one included.
    pub(crate) fn free_bytes(&self) -> Result<usize> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { self.memory_info(&raw mut free, &raw mut total) }?;
        Ok(free)
    }

    /// Memory in stream order.
    pub(crate) fn allocate_bytes(&self, bytes: usize, stream: Stream) -> Result<usize> {
        let mut address = 0;
        // SAFETY: writes one address.
        unsafe { self.allocate(&raw mut address, bytes, stream) }?;
        Ok(address)
    }

    /// Gives memory of [`Driver::allocate_bytes`] back in stream order.
    ///
    /// # Safety
    /// `address` came from there and is used by nothing that is submitted later.
    pub(crate) unsafe fn free(&self, address: usize, stream: Stream) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.free_in_order(address, stream) }
    }

    /// Gives managed memory back.
    ///
    /// # Safety
    /// `address` is managed memory that nothing uses.
    pub(crate) unsafe fn free_managed(&self, address: usize) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.free_now(address) }
    }

    /// Zeros memory.
    ///
    /// # Safety
    /// `bytes` of device memory at `address`.
    pub(crate) unsafe fn zero(&self, address: usize, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.set_bytes(address, 0, bytes, stream) }
    }

    /// Copies to the device. The source may change when this returns.
    ///
    /// # Safety
    /// `bytes` readable bytes at `from`, and as many on the device at `to`.
    pub(crate) unsafe fn upload(
        &self,
        to: usize,
        from: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: forwarded to the caller. The driver copies pageable memory before it returns.
        unsafe { self.copy_in(to, from.cast(), bytes, stream) }
    }

    /// Copies from the device, and waits for it.
    ///
    /// # Safety
    /// `bytes` writable bytes at `to`, and as many on the device at `from`.
    pub(crate) unsafe fn download(
        &self,
        to: *mut u8,
        from: usize,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: forwarded to the caller.
        unsafe { self.copy_out(to.cast(), from, bytes, stream)? };
        self.synchronize(stream)
    }

    /// Waits for all that was submitted.
    pub(crate) fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: a stream that lives as long as the backend.
        unsafe { self.wait(stream) }
    }

    /// Describes tiles of a matrix for the copy engine.
    pub(crate) fn tiles(&self, tiling: &Tiling) -> Result<TensorMap> {
        let mut map = TensorMap([0; 16]);
        let dims = [tiling.columns as u64, tiling.rows as u64];
        let strides = [tiling.row_bytes as u64];
        let tile = [tiling.tile_columns, tiling.tile_rows];
        let steps = [1; 2];
        let swizzle = if tiling.is_swizzled { SWIZZLE_128 } else { 0 };
        // SAFETY: two dimensions in each array; the driver writes 128 bytes that are aligned as it wants them.
        unsafe {
            self.encode_tiled(
                (&raw mut map).cast(),
                tiling.element as c_uint,
                2,
                tiling.address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                0,
                swizzle,
                PROMOTION_256,
                0,
            )
        }?;
        Ok(map)
    }

    /// Loads machine code.
    pub(crate) fn load(&self, image: &[u8]) -> Result<*mut c_void> {
        let mut module = core::ptr::null_mut();
        // SAFETY: a whole image, as the compiler made it.
        unsafe { self.load_module(&raw mut module, image.as_ptr().cast()) }?;
        Ok(module)
    }

    /// A kernel by name, allowed to be given `shared_bytes` of shared memory, or what its own leaves of the device's.
    pub(crate) fn function(
        &self,
        module: *mut c_void,
        name: &core::ffi::CStr,
        shared_bytes: u32,
    ) -> Result<Function> {
        let mut function = core::ptr::null_mut();
        // SAFETY: a loaded module, which is never unloaded.
        unsafe {
            self.get_function(&raw mut function, module, name.as_ptr())?;
            if shared_bytes > 0 {
                let (mut device, mut own_bytes) = (0, 0);
                self.context_device(&raw mut device)?;
                self.function_attribute(&raw mut own_bytes, OWN_SHARED_BYTES, function)?;
                let most = self.attribute(BLOCK_SHARED_BYTES, device)? - own_bytes;
                let most = most.min(shared_bytes as c_int);
                self.set_function(function, MOST_SHARED_BYTES, most)?;
            }
        }
        Ok(function)
    }
}
