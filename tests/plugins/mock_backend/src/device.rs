//! Tensors in host memory and what can be done with them, as plain Rust.

use std::cell::Cell;
use std::ffi::c_void;
use std::thread::ThreadId;

use mlxcel_abi::arena::Arena;
use mlxcel_abi::types::ReleaseFn;
use mlxcel_abi::{AbiError, DType, Result, Tensor, TensorInfo};

/// Elements of a tensor.
enum Data {
    Owned(Vec<u8>),
    Borrowed {
        ptr: *const u8,
        len: usize,
        release: ReleaseFn,
        owner: *mut c_void,
    },
}

/// A tensor.
pub struct Value {
    info: TensorInfo,
    data: Data,
    /// Whether the first element is to be taken for one that is no number.
    is_spoilt: Cell<bool>,
}

impl Value {
    /// A tensor with its own bytes.
    pub fn owned(dtype: DType, shape: &[i64], bytes: Vec<u8>) -> Result<Self> {
        Self::checked(dtype, shape, bytes.len(), Data::Owned(bytes))
    }

    /// A tensor over memory of the host.
    pub fn borrowed(
        dtype: DType,
        shape: &[i64],
        bytes: &[u8],
        release: ReleaseFn,
        owner: *mut c_void,
    ) -> Result<Self> {
        let mut value = Self::checked(dtype, shape, bytes.len(), Data::Owned(Vec::new()))?;
        // Only now: on an error the memory stays the host's, and dropping `value` must not release it.
        value.data = Data::Borrowed {
            ptr: bytes.as_ptr(),
            len: bytes.len(),
            release,
            owner,
        };
        Ok(value)
    }

    fn checked(dtype: DType, shape: &[i64], len: usize, data: Data) -> Result<Self> {
        let info = TensorInfo::new(dtype, shape)
            .ok_or_else(|| AbiError::invalid(format!("{} dimensions are too many", shape.len())))?;
        if byte_len(&info) != Some(len) || dtype.size_bytes() == 0 {
            return Err(AbiError::invalid(format!(
                "shape {shape:?} of {} does not fit {len} bytes",
                dtype.name()
            )));
        }
        Ok(Self {
            info,
            data,
            is_spoilt: Cell::new(false),
        })
    }

    /// Makes the first element something that is no number.
    pub fn spoil(&self) {
        self.is_spoilt.set(self.info.dtype == DType::F32);
    }

    /// Whether it was made so.
    pub fn is_spoilt(&self) -> bool {
        self.is_spoilt.get()
    }

    /// The elements.
    pub fn numbers(&self) -> Result<Vec<f64>> {
        let words = self.words().map(|word| decode(word, self.info.dtype));
        let mut numbers: Vec<f64> = words.collect::<Result<_>>()?;
        if let Some(first) = numbers.first_mut().filter(|_| self.is_spoilt()) {
            *first = f64::NAN;
        }
        Ok(numbers)
    }

    /// Shape and dtype.
    pub fn info(&self) -> TensorInfo {
        self.info
    }

    /// The elements' bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Owned(bytes) => bytes,
            // SAFETY: the host keeps the range alive until `release` is called, in `drop`.
            Data::Borrowed { ptr, len, .. } => unsafe { std::slice::from_raw_parts(*ptr, *len) },
        }
    }

    fn words(&self) -> impl Iterator<Item = [u8; 4]> + '_ {
        self.bytes()
            .chunks_exact(4)
            .filter_map(|word| word.try_into().ok())
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        if let Data::Borrowed { release, owner, .. } = self.data {
            // SAFETY: the host's function with the host's value, once.
            unsafe { release(owner) };
        }
    }
}

// SAFETY: owned bytes move freely; the host allows reading and releasing borrowed ones on any thread.
unsafe impl Send for Value {}

fn byte_len(info: &TensorInfo) -> Option<usize> {
    info.shape()
        .iter()
        .try_fold(info.dtype.size_bytes(), |bytes, &dim| {
            bytes.checked_mul(usize::try_from(dim).ok()?)
        })
}

/// Everything on one opened device.
pub struct Device {
    /// The tensors.
    pub arena: Arena<Value>,
    owner: ThreadId,
}

impl Device {
    /// A device of the calling thread.
    pub fn new() -> Self {
        Self {
            arena: Arena::default(),
            owner: std::thread::current().id(),
        }
    }

    /// Refuses other threads than the one that opened it.
    pub fn check_thread(&self) -> Result<()> {
        let here = std::thread::current().id();
        match here == self.owner {
            true => Ok(()),
            false => Err(AbiError::internal(format!(
                "called on {here:?}, opened on {:?}",
                self.owner
            ))),
        }
    }

    /// A constant tensor.
    pub fn full(&mut self, value: f64, dtype: DType, shape: &[i64]) -> Result<Tensor> {
        let info = TensorInfo::new(dtype, shape);
        let len = info.as_ref().and_then(byte_len);
        let len = len.ok_or_else(|| AbiError::invalid(format!("impossible shape {shape:?}")))?;
        let word = encode(value, dtype)?;
        let bytes = word.iter().copied().cycle().take(len).collect();
        self.arena.insert(Value::owned(dtype, shape, bytes)?)
    }

    /// The same elements in another type.
    pub fn cast(&mut self, a: Tensor, dtype: DType) -> Result<Tensor> {
        let value = self.arena.get(a)?;
        let info = value.info();
        let mut bytes = Vec::new();
        for word in value.words() {
            bytes.extend(encode(decode(word, info.dtype)?, dtype)?);
        }
        let shape = info.shape().to_vec();
        self.arena.insert(Value::owned(dtype, &shape, bytes)?)
    }

    /// The same elements in another shape.
    pub fn reshape(&mut self, a: Tensor, shape: &[i64]) -> Result<Tensor> {
        let value = self.arena.get(a)?;
        let (dtype, bytes) = (value.info().dtype, value.bytes().to_vec());
        self.arena.insert(Value::owned(dtype, shape, bytes)?)
    }

    /// Rows of `a` by integer indices.
    pub fn take_rows(&mut self, a: Tensor, indices: Tensor) -> Result<Tensor> {
        let (a, indices) = (self.arena.get(a)?, self.arena.get(indices)?);
        let info = a.info();
        let (&rows, rest) = info
            .shape()
            .split_first()
            .ok_or_else(|| AbiError::invalid("take: a scalar has no rows"))?;
        let row_len = a.bytes().len() / usize::try_from(rows).unwrap_or(1).max(1);
        let mut bytes = Vec::new();
        for word in indices.words() {
            let index = decode(word, indices.info().dtype)?;
            let row = (index >= 0.0 && index < rows as f64).then(|| index as usize * row_len);
            let row = row.and_then(|start| a.bytes().get(start..start + row_len));
            bytes.extend_from_slice(row.ok_or_else(|| {
                AbiError::invalid(format!("take: index {index} is outside of {rows} rows"))
            })?);
        }
        let shape = [indices.info().shape(), rest].concat();
        let taken = Value::owned(info.dtype, &shape, bytes)?;
        if a.is_spoilt() && indices.numbers()?.first() == Some(&0.0) {
            taken.spoil();
        }
        self.arena.insert(taken)
    }

    /// Tensors one after another along their first axis.
    pub fn concat(&mut self, ts: &[Tensor]) -> Result<Tensor> {
        let (mut rows, mut bytes, mut first) = (0, Vec::new(), None);
        for &t in ts {
            let value = self.arena.get(t)?;
            let info = value.info();
            rows += info.shape().first().copied().unwrap_or_default();
            bytes.extend_from_slice(value.bytes());
            first = first.or(Some(info));
        }
        let info = first.ok_or_else(|| AbiError::invalid("concat: expected tensors"))?;
        let rest = info.shape().get(1..).unwrap_or_default();
        let shape = [&[rows], rest].concat();
        self.arena.insert(Value::owned(info.dtype, &shape, bytes)?)
    }

    /// Every element, but at most `most`.
    pub fn at_most(&mut self, a: Tensor, most: f64) -> Result<Tensor> {
        let value = self.arena.get(a)?;
        let info = value.info();
        let mut bytes = Vec::new();
        for number in value.numbers()? {
            bytes.extend(encode(number.min(most), info.dtype)?);
        }
        let shape = info.shape().to_vec();
        self.arena.insert(Value::owned(info.dtype, &shape, bytes)?)
    }

    /// Index of the largest element of every row; ties go to the lowest.
    pub fn argmax(&mut self, a: Tensor) -> Result<Tensor> {
        let value = self.arena.get(a)?;
        let info = value.info();
        let (&width, lead) = info
            .shape()
            .split_last()
            .filter(|(width, _)| **width > 0)
            .ok_or_else(|| AbiError::invalid("arg_reduce: expected a last axis with elements"))?;
        let all: Vec<f64> = value
            .words()
            .map(|word| decode(word, info.dtype))
            .collect::<Result<_>>()?;
        let mut bytes = Vec::new();
        for row in all.chunks(usize::try_from(width).unwrap_or(1)) {
            let mut best = (0_u32, f64::NEG_INFINITY);
            for (index, &element) in (0_u32..).zip(row) {
                if element > best.1 {
                    best = (index, element);
                }
            }
            bytes.extend(best.0.to_ne_bytes());
        }
        let shape = lead.to_vec();
        self.arena.insert(Value::owned(DType::U32, &shape, bytes)?)
    }
}

fn encode(value: f64, dtype: DType) -> Result<[u8; 4]> {
    match dtype {
        DType::F32 => Ok((value as f32).to_ne_bytes()),
        DType::U32 => Ok((value as u32).to_ne_bytes()),
        DType::I32 => Ok((value as i32).to_ne_bytes()),
        other => Err(unknown(other)),
    }
}

fn decode(word: [u8; 4], dtype: DType) -> Result<f64> {
    match dtype {
        DType::F32 => Ok(f64::from(f32::from_ne_bytes(word))),
        DType::U32 => Ok(f64::from(u32::from_ne_bytes(word))),
        DType::I32 => Ok(f64::from(i32::from_ne_bytes(word))),
        other => Err(unknown(other)),
    }
}

fn unknown(dtype: DType) -> AbiError {
    AbiError::unimplemented(format!(
        "dtype {}: this backend has f32, u32 and i32",
        dtype.name()
    ))
}
