//! NVIDIA's driver, opened when it is asked for: this crate is built and loaded on machines that have none.

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use mlxcel_abi::{AbiError, Result, status};

/// A stream of the driver.
pub(crate) type Stream = *mut c_void;
/// A kernel of a loaded module.
pub(crate) type Function = *mut c_void;

const SUCCESS: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Stream,
    attributes: *const LaunchAttribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute`: an id, padding to 8 bytes, a union of 64.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: c_uint,
    padding: u32,
    value: [u32; 16],
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const EARLY_START: c_uint = 6;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MOST_SHARED_BYTES: c_int = 8;

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
    allocate = "cuMemAllocAsync"(out: *mut usize, bytes: usize, stream: Stream);
    free_in_order = "cuMemFreeAsync"(address: usize, stream: Stream);
    free_now = "cuMemFree_v2"(address: usize);
    set_bytes = "cuMemsetD8Async"(address: usize, value: u8, bytes: usize, stream: Stream);
    copy_in = "cuMemcpyHtoDAsync_v2"(to: usize, from: *const c_void, bytes: usize, stream: Stream);
    copy_out = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: usize, bytes: usize, stream: Stream);
    wait = "cuStreamSynchronize"(stream: Stream);
    load_module = "cuModuleLoadData"(out: *mut *mut c_void, image: *const c_void);
    get_function = "cuModuleGetFunction"(out: *mut Function, module: *mut c_void, name: *const c_char);
    set_function = "cuFuncSetAttribute"(function: Function, attribute: c_int, value: c_int);
    launch_kernel = "cuLaunchKernelEx"(config: *const LaunchConfig, function: Function, arguments: *mut *mut c_void, extra: *mut *mut c_void);
    encode_tiled = "cuTensorMapEncodeTiled"(out: *mut c_void, element: c_uint, rank: c_uint, address: *mut c_void, dims: *const u64, strides: *const u64, tile: *const c_uint, steps: *const c_uint, interleave: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint);
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

/// Why there is no driver.
pub(crate) const NO_DRIVER: &str = "NVIDIA's driver is not installed (libcuda.so.1 is not there)";

impl Driver {
    /// The driver of this machine.
    pub(crate) fn get() -> Result<&'static Self> {
        static FOUND: OnceLock<core::result::Result<Driver, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            // SAFETY: the driver's library is made to be opened; its constructors are its own.
            let library = unsafe { libloading::Library::new("libcuda.so.1") }
                .map_err(|error| format!("{NO_DRIVER}: {error}"))?;
            let driver = Driver::open(library)
                .map_err(|error| format!("NVIDIA's driver is too old for this backend: {error}"))?;
            // SAFETY: the first call that the driver asks for.
            unsafe { driver.init(0) }.map_err(|error| error.message)?;
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

    /// Makes a device's own context the calling thread's.
    pub(crate) fn use_device(&self, device: i32) -> Result<()> {
        let mut context = core::ptr::null_mut();
        // SAFETY: the context is retained for the rest of the process, as MLX's runtime does.
        unsafe {
            self.retain_context(&raw mut context, device)?;
            self.set_context(context)
        }
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

    /// A kernel by name, allowed to use `shared_bytes` of shared memory.
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
                self.set_function(function, MOST_SHARED_BYTES, shared_bytes as c_int)?;
            }
        }
        Ok(function)
    }

    /// Submits a kernel. With `early`, it may be started before the one before it ends: such kernels wait by themselves.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and what they point to is as large as it takes.
    pub(crate) unsafe fn launch(
        &self,
        function: Function,
        shape: &Shape,
        arguments: &mut Arguments,
        stream: Stream,
        early: bool,
    ) -> Result<()> {
        let attribute = LaunchAttribute {
            id: EARLY_START,
            padding: 0,
            value: core::array::from_fn(|i| u32::from(i == 0)),
        };
        let config = LaunchConfig {
            grid: shape.grid,
            block: [shape.threads, 1, 1],
            shared_bytes: shape.shared_bytes,
            stream,
            attributes: &raw const attribute,
            attribute_count: u32::from(early),
        };
        let mut pointers = arguments.pointers();
        // SAFETY: forwarded to the caller; the driver copies the arguments before it returns.
        unsafe {
            self.launch_kernel(
                &raw const config,
                function,
                pointers.as_mut_ptr(),
                core::ptr::null_mut(),
            )
        }
    }
}

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

impl Shape {
    /// So many blocks in a row.
    pub(crate) fn line(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            threads,
            shared_bytes: 0,
        }
    }
}

/// Arguments of a kernel, each in 8 bytes: the driver reads as many of them as the parameter has.
#[derive(Debug)]
pub(crate) struct Arguments {
    values: [u64; Self::MOST],
    len: usize,
    /// Where each argument starts.
    starts: [u8; Self::MOST],
    count: usize,
}

impl Arguments {
    const MOST: usize = 64;

    /// No arguments yet.
    pub(crate) fn new() -> Self {
        Self {
            values: [0; Self::MOST],
            len: 0,
            starts: [0; Self::MOST],
            count: 0,
        }
    }

    #[inline(always)]
    fn push(self, value: u64) -> Self {
        self.record(&[value])
    }

    /// A struct of 64-bit words.
    #[inline(always)]
    pub(crate) fn record(mut self, words: &[u64]) -> Self {
        // More than there is room for would be a kernel of ours with more parameters than any has.
        let place = self.values.get_mut(self.len..self.len + words.len());
        let (Some(place), Some(start)) = (place, self.starts.get_mut(self.count)) else {
            return self;
        };
        place.copy_from_slice(words);
        *start = self.len as u8;
        self.len += words.len();
        self.count += 1;
        self
    }

    /// A pointer or a 64-bit number.
    #[inline(always)]
    pub(crate) fn wide(self, value: usize) -> Self {
        self.push(value as u64)
    }

    /// A 32-bit number.
    #[inline(always)]
    pub(crate) fn int(self, value: i32) -> Self {
        self.push(u64::from(value as u32))
    }

    /// A float.
    #[inline(always)]
    pub(crate) fn float(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }

    fn pointers(&mut self) -> [*mut c_void; Self::MOST] {
        let first = self.values.as_mut_ptr();
        // SAFETY: every start is inside the values.
        self.starts
            .map(|start| unsafe { first.add(usize::from(start)) }.cast())
    }
}
