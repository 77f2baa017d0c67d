//! Plain data that crosses the boundary: text, bytes, tensor handles, dtypes.

use core::ffi::c_void;

/// Borrowed UTF-8 text, valid for the duration of the call that carries it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Str {
    /// First byte; may be null when `len` is 0.
    pub ptr: *const u8,
    /// Length in bytes.
    pub len: usize,
}

impl Str {
    /// No text.
    pub const EMPTY: Self = Self {
        ptr: core::ptr::null(),
        len: 0,
    };

    /// Borrows `text`.
    pub const fn new(text: &str) -> Self {
        Self {
            ptr: text.as_ptr(),
            len: text.len(),
        }
    }

    /// The text, if it is valid UTF-8.
    ///
    /// # Safety
    /// `ptr` and `len` must describe readable memory that lives for `'a`.
    pub unsafe fn as_str<'a>(self) -> Result<&'a str, core::str::Utf8Error> {
        if self.len == 0 {
            return Ok("");
        }
        // SAFETY: the caller vouches for the range.
        core::str::from_utf8(unsafe { core::slice::from_raw_parts(self.ptr, self.len) })
    }
}

/// Borrowed bytes, valid for the duration of the call that carries them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Bytes {
    /// First byte; may be null when `len` is 0.
    pub ptr: *const u8,
    /// Length in bytes.
    pub len: usize,
}

/// Bytes made by one side and freed by the same side through `free`.
#[repr(C)]
pub struct OwnedBytes {
    /// First byte; null when empty.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
    /// Allocation size, for `free`.
    pub capacity: usize,
    /// Frees the allocation; `None` when empty.
    pub free: Option<unsafe extern "C" fn(ptr: *mut u8, len: usize, capacity: usize)>,
}

impl OwnedBytes {
    /// Nothing.
    pub const EMPTY: Self = Self {
        ptr: core::ptr::null_mut(),
        len: 0,
        capacity: 0,
        free: None,
    };

    /// Takes over a vector's buffer.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        unsafe extern "C" fn free(ptr: *mut u8, len: usize, capacity: usize) {
            // SAFETY: the three values come unchanged from `from_vec` below.
            drop(unsafe { Vec::from_raw_parts(ptr, len, capacity) });
        }
        let mut bytes = core::mem::ManuallyDrop::new(bytes);
        Self {
            ptr: bytes.as_mut_ptr(),
            len: bytes.len(),
            capacity: bytes.capacity(),
            free: Some(free),
        }
    }

    /// Copies the bytes out and frees the original.
    ///
    /// # Safety
    /// The value must come from the other side unchanged and must not be used again.
    pub unsafe fn take(self) -> Vec<u8> {
        if self.ptr.is_null() {
            return Vec::new();
        }
        // SAFETY: the maker vouches for the range until `free` is called.
        let copy = unsafe { core::slice::from_raw_parts(self.ptr, self.len) }.to_vec();
        if let Some(free) = self.free {
            // SAFETY: called once, with the maker's own values.
            unsafe { free(self.ptr, self.len, self.capacity) };
        }
        copy
    }
}

/// Opaque, generation-checked tensor handle, scoped to one opened backend. Zero is "none".
/// A stale or foreign handle is answered with `INVALID_ARGUMENT`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tensor(pub u64);

impl Tensor {
    /// No tensor (an optional argument left out).
    pub const NONE: Self = Self(0);

    /// Whether this is [`Tensor::NONE`].
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// Element type code. A plain integer on the wire: unknown values are refused, never undefined.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DType(pub u32);

macro_rules! dtypes {
    ($($name:ident = $value:literal, $text:literal, $size:literal;)*) => {
        #[allow(missing_docs)]
        impl DType { $(pub const $name: DType = DType($value);)* }

        impl DType {
            /// Every dtype of this build.
            pub const ALL: &'static [DType] = &[$(DType($value),)*];

            /// Short name, as in safetensors but lower case; `unknown` for foreign codes.
            pub const fn name(self) -> &'static str {
                match self.0 { $($value => $text,)* _ => "unknown" }
            }

            /// Bytes an element takes; 0 for foreign codes.
            pub const fn size_bytes(self) -> usize {
                match self.0 { $($value => $size,)* _ => 0 }
            }

            /// The dtype called `name`.
            pub fn from_name(name: &str) -> Option<DType> {
                match name { $($text => Some(DType($value)),)* _ => None }
            }
        }
    };
}

dtypes! {
    BOOL = 1, "bool", 1;
    U8 = 2, "u8", 1;
    U16 = 3, "u16", 2;
    U32 = 4, "u32", 4;
    U64 = 5, "u64", 8;
    I8 = 6, "i8", 1;
    I16 = 7, "i16", 2;
    I32 = 8, "i32", 4;
    I64 = 9, "i64", 8;
    F16 = 10, "f16", 2;
    BF16 = 11, "bf16", 2;
    F32 = 12, "f32", 4;
    F64 = 13, "f64", 8;
    C64 = 14, "c64", 8;
}

impl DType {
    /// Whether the type is f16, bf16, f32 or f64.
    pub const fn is_float(self) -> bool {
        self.0 >= Self::F16.0 && self.0 <= Self::F64.0
    }
}

/// Most dimensions a tensor may have.
pub const MAX_DIMS: usize = 8;

abi_struct! {
    /// Shape and type of a tensor.
    pub struct TensorInfo {
        /// Element type.
        pub dtype: DType,
        /// Number of dimensions, at most [`MAX_DIMS`].
        pub ndim: u32,
        /// Sizes of the first `ndim` dimensions, row-major; the rest is 0.
        pub dims: [i64; MAX_DIMS],
    }
}

impl TensorInfo {
    /// An empty value to be filled by a call.
    pub const ZERO: Self = Self {
        dtype: DType(0),
        ndim: 0,
        dims: [0; MAX_DIMS],
    };

    /// Builds the description of a tensor; `None` when `shape` has too many dimensions.
    pub fn new(dtype: DType, shape: &[i64]) -> Option<Self> {
        let mut info = Self {
            dtype,
            ndim: u32::try_from(shape.len()).ok()?,
            ..Self::ZERO
        };
        info.dims.get_mut(..shape.len())?.copy_from_slice(shape);
        Some(info)
    }

    /// The dimensions in use.
    pub fn shape(&self) -> &[i64] {
        self.dims.get(..self.ndim as usize).unwrap_or(&self.dims)
    }
}

/// Called once when a backend no longer needs borrowed memory.
pub type ReleaseFn = unsafe extern "C" fn(owner: *mut c_void);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_bytes_round_trip() {
        let owned = OwnedBytes::from_vec(b"hello".to_vec());
        // SAFETY: made on the line above and used once.
        assert_eq!(unsafe { owned.take() }, b"hello");
        // SAFETY: the empty value owns nothing.
        assert!(unsafe { OwnedBytes::EMPTY.take() }.is_empty());
    }

    #[test]
    fn dtype_names_round_trip() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
            assert!(dtype.size_bytes() > 0);
        }
        assert_eq!(DType(99).name(), "unknown");
    }

    #[test]
    fn too_many_dimensions_are_refused() {
        assert!(TensorInfo::new(DType::F32, &[1; MAX_DIMS]).is_some());
        assert!(TensorInfo::new(DType::F32, &[1; MAX_DIMS + 1]).is_none());
    }
}
