//! Calls the operation table the way a host does: through raw slots, with handles.
#![allow(dead_code, reason = "every test binary uses a part")]
#![allow(clippy::expect_used, clippy::panic, reason = "a test fails that way")]

use std::ptr::null_mut;

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{FromHostArgs, MemoryInfo, MemoryLimits};
use mlxcel_abi::{AbiError, DType, OwnedBytes, Result, Str, Table, Tensor, TensorInfo};

/// Calls a slot that gives one tensor.
macro_rules! op {
    ($device:expr, $slot:ident $(, $arg:expr)* $(,)?) => {{
        let mut out = mlxcel_abi::Tensor::NONE;
        run!($device, $slot $(, $arg)*, &raw mut out).map(|()| out)
    }};
}

/// Calls a slot whose arguments are given in full.
macro_rules! run {
    ($device:expr, $slot:ident $(, $arg:expr)* $(,)?) => {{
        let mut err = std::ptr::null_mut();
        let ops = &$device.ops;
        // SAFETY: the table is open, and every pointer of a test lives for the call.
        #[allow(unused_unsafe, reason = "an argument may be a call of its own")]
        let code = unsafe { (ops.$slot)(ops.ctx $(, $arg)*, &raw mut err) };
        // SAFETY: both come from the call above.
        #[allow(unused_unsafe, reason = "as above")]
        let checked = unsafe { mlxcel_abi::AbiError::check(code, err) };
        checked
    }};
}

/// An open CPU backend that belongs to the test's thread.
pub struct Device {
    pub ops: BackendOps,
    pub table: *const BackendOps,
}

/// The operations of an open backend in the hands of another thread.
pub struct Elsewhere(BackendOps);

// SAFETY: the table is plain data, and the backend itself refuses what another thread may not do.
unsafe impl Send for Elsewhere {}

impl Elsewhere {
    pub fn ops(&self) -> &BackendOps {
        &self.0
    }
}

pub fn entry() -> BackendTable {
    // SAFETY: the table lives as long as the process.
    unsafe { BackendTable::import(mlxcel_backend_cpu::backend_table()) }
}

pub fn probe() -> String {
    let entry = entry();
    let mut out = OwnedBytes::EMPTY;
    let mut err = null_mut();
    // SAFETY: the entry table and both results live for the call.
    let bytes = unsafe {
        let code = (entry.probe)(entry.ctx, &raw mut out, &raw mut err);
        AbiError::check(code, err).expect("probes");
        out.take()
    };
    String::from_utf8(bytes).expect("is text")
}

impl Device {
    pub fn open() -> Self {
        Self::open_with("", "").expect("opens")
    }

    pub fn open_with(device: &str, options: &str) -> Result<Self> {
        let entry = entry();
        let args = OpenArgs {
            device: Str::new(device),
            options: Str::new(options),
            ..OpenArgs::default()
        };
        let mut table = std::ptr::null();
        let mut err = null_mut();
        // SAFETY: the arguments and results live for the call.
        unsafe {
            let code = (entry.open)(entry.ctx, &raw const args, &raw mut table, &raw mut err);
            AbiError::check(code, err)?;
            Ok(Self {
                ops: BackendOps::import(table),
                table,
            })
        }
    }

    pub fn elsewhere(&self) -> Elsewhere {
        Elsewhere(self.ops)
    }

    pub fn close_table(table: *const BackendOps) -> Result<()> {
        let entry = entry();
        let mut err = null_mut();
        // SAFETY: closing compares the pointer before it uses it.
        unsafe {
            let code = (entry.close)(entry.ctx, table, &raw mut err);
            AbiError::check(code, err)
        }
    }

    pub fn bytes(&self, dtype: DType, data: &[u8], dims: &[i64]) -> Tensor {
        let args = FromHostArgs {
            data: data.as_ptr(),
            byte_len: data.len(),
            dtype,
            ndim: dims.len() as u32,
            dims: dims.as_ptr(),
            ..FromHostArgs::default()
        };
        op!(self, from_host, &raw const args).expect("copies")
    }

    pub fn f32s(&self, values: &[f32], dims: &[i64]) -> Tensor {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        self.bytes(DType::F32, &bytes, dims)
    }

    pub fn i32s(&self, values: &[i32], dims: &[i64]) -> Tensor {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        self.bytes(DType::I32, &bytes, dims)
    }

    pub fn u32s(&self, values: &[u32], dims: &[i64]) -> Tensor {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        self.bytes(DType::U32, &bytes, dims)
    }

    pub fn bools(&self, values: &[bool], dims: &[i64]) -> Tensor {
        let bytes: Vec<u8> = values.iter().map(|&value| u8::from(value)).collect();
        self.bytes(DType::BOOL, &bytes, dims)
    }

    /// The values in another type.
    pub fn of(&self, dtype: DType, values: &[f32], dims: &[i64]) -> Tensor {
        op!(self, cast, self.f32s(values, dims), dtype).expect("casts")
    }

    pub fn info(&self, t: Tensor) -> TensorInfo {
        let mut info = TensorInfo::ZERO;
        run!(self, info, t, &raw mut info).expect("describes");
        info
    }

    pub fn shape(&self, t: Tensor) -> Vec<i64> {
        self.info(t).shape().to_vec()
    }

    pub fn dtype(&self, t: Tensor) -> DType {
        self.info(t).dtype
    }

    pub fn read_bytes(&self, t: Tensor) -> Vec<u8> {
        let info = self.info(t);
        let count: i64 = info.shape().iter().product();
        let mut bytes = vec![0_u8; count as usize * info.dtype.size_bytes()];
        run!(self, read, t, bytes.as_mut_ptr(), bytes.len()).expect("reads");
        bytes
    }

    /// The values as f32, whatever the type.
    pub fn read(&self, t: Tensor) -> Vec<f32> {
        let wide = op!(self, cast, t, DType::F32).expect("casts");
        let bytes = self.read_bytes(wide);
        self.release(wide);
        bytes
            .chunks_exact(4)
            .map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]))
            .collect()
    }

    pub fn release(&self, t: Tensor) {
        run!(self, release, t).expect("releases");
    }

    pub fn eval(&self, ts: &[Tensor]) {
        run!(self, eval, ts.as_ptr(), ts.len()).expect("evaluates");
    }

    pub fn memory(&self) -> MemoryInfo {
        let mut info = MemoryInfo::default();
        run!(self, memory, &raw mut info).expect("tells");
        info
    }

    pub fn set_limits(&self, limits: MemoryLimits) -> Result<()> {
        run!(self, set_memory_limits, &raw const limits)
    }

    /// Checks dtype, shape and values of a result.
    pub fn expect(&self, t: Result<Tensor>, dtype: DType, dims: &[i64], values: &[f32]) {
        let t = t.unwrap_or_else(|error| panic!("failed: {error}"));
        assert_eq!(self.dtype(t).name(), dtype.name(), "dtype");
        assert_eq!(self.shape(t), dims, "shape");
        close_to(
            &self.read(t),
            values,
            if dtype.size_bytes() == 2 { 1e-2 } else { 1e-5 },
        );
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let closed = Self::close_table(self.table);
        if !std::thread::panicking() {
            closed.expect("closes");
        }
    }
}

/// Compares with a tolerance relative to the larger of the value and 1.
pub fn close_to(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "length of {found:?}");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        let close =
            f == e || (f.is_nan() && e.is_nan()) || (f - e).abs() <= tolerance * e.abs().max(1.0);
        assert!(
            close,
            "element {i}: found {f}, expected {e}\nfound {found:?}\nexpected {expected:?}"
        );
    }
}

/// Numbers that look random and are the same on every run.
pub fn noise(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(12_345);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}
