//! Host arrays that cases put on both backends, in several layouts, from fixed pseudo-random data.

use mlxcel_abi::DType;
use mlxcel_abi::ops_args::FromHostArgs;

use crate::testkit::reference::number::{Class, class};
use crate::testkit::reference::shape;
use crate::testkit::reference::value::{Data, Mode, Value, decode, encode};
use crate::{Backend, Result, Tensor};

const MODE: Mode = Mode { shapes_only: false };

/// A tensor in host memory.
#[derive(Debug, Clone)]
pub(in crate::testkit) struct Array(pub Value);

/// How a tensor lies in the backend's memory when an operation gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Row-major.
    Plain,
    /// A view with all axes reversed.
    Transposed,
    /// Every second element of a longer last axis.
    Strided,
}

impl Layout {
    pub(super) const ALL: [Layout; 3] = [Layout::Plain, Layout::Transposed, Layout::Strided];
}

/// Small fixed generator (Knuth's MMIX constants): the same data on every run and machine.
pub(in crate::testkit) struct Numbers(u64);

impl Numbers {
    /// A stream of its own for every seed.
    pub(in crate::testkit) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1))
    }

    /// A number in [0, 1).
    pub(in crate::testkit) fn unit(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A tensor with a copy of `bytes`, which need not be aligned.
pub(in crate::testkit) fn tensor_of_bytes(
    backend: &Backend,
    dtype: DType,
    dims: &[i64],
    bytes: &[u8],
) -> Result<Tensor> {
    // The ABI wants data aligned to its dtype: eight bytes are enough for all of them.
    let mut aligned = vec![0u64; bytes.len().div_ceil(8)];
    for (word, chunk) in aligned.iter_mut().zip(bytes.chunks(8)) {
        let mut padded = [0u8; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(padded);
    }
    let args = FromHostArgs {
        data: aligned.as_ptr().cast(),
        byte_len: bytes.len(),
        dtype,
        ndim: dims.len() as u32,
        dims: dims.as_ptr(),
        ..FromHostArgs::default()
    };
    op!(backend, from_host, &args)
}

fn dims_of(dims: &[i64]) -> Vec<usize> {
    dims.iter().map(|&dim| dim.max(0) as usize).collect()
}

impl Array {
    /// An array of these numbers, rounded or truncated to `dtype`.
    pub(in crate::testkit) fn of(
        dtype: DType,
        dims: &[i64],
        numbers: impl IntoIterator<Item = f64>,
    ) -> Self {
        let shape = dims_of(dims);
        let count = shape.iter().product();
        let data: Vec<f64> = numbers.into_iter().take(count).collect();
        let wide = Value {
            dtype: DType::F64,
            shape,
            data: Data::Real(data),
        };
        Self(wide.cast(MODE, dtype).unwrap_or(wide))
    }

    /// An array of exact integers.
    pub(super) fn ints(dtype: DType, dims: &[i64], numbers: &[i128]) -> Self {
        Self(Value {
            dtype,
            shape: dims_of(dims),
            data: Data::Int(numbers.to_vec()),
        })
    }

    /// An array of complex numbers.
    pub(super) fn complex(dims: &[i64], seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let shape = dims_of(dims);
        let count: usize = shape.iter().product();
        let mut part = || f64::from((4.0 * numbers.unit() - 2.0) as f32);
        let data = (0..count).map(|_| [part(), part()]).collect();
        Self(Value {
            dtype: DType::C64,
            shape,
            data: Data::Complex(data),
        })
    }

    /// Numbers spread over `[low, high)`; integers are truncated.
    pub(in crate::testkit) fn spread(
        dtype: DType,
        dims: &[i64],
        low: f64,
        high: f64,
        seed: u64,
    ) -> Self {
        let mut numbers = Numbers::new(seed);
        Self::of(
            dtype,
            dims,
            core::iter::from_fn(move || Some(low + (high - low) * numbers.unit())),
        )
    }

    /// Numbers as activations have them: floats in [-2, 2), integers in [-9, 9] or [0, 9], bools.
    pub(super) fn usual(dtype: DType, dims: &[i64], seed: u64) -> Self {
        match class(dtype) {
            Ok(Class::Float) => Self::spread(dtype, dims, -2.0, 2.0, seed),
            Ok(Class::Complex) => Self::complex(dims, seed),
            Ok(Class::Bool) => {
                let mut numbers = Numbers::new(seed);
                let bits = core::iter::from_fn(move || Some(f64::from(numbers.unit() < 0.5)));
                Self::of(dtype, dims, bits)
            }
            _ if dtype.0 >= DType::I8.0 => Self::spread(dtype, dims, -9.99, 9.99, seed),
            _ => Self::spread(dtype, dims, 0.0, 9.99, seed),
        }
    }

    /// Indices below `limit`, each as likely.
    pub(super) fn indices(dtype: DType, dims: &[i64], limit: i64, seed: u64) -> Self {
        Self::spread(dtype, dims, 0.0, limit as f64 - 1e-9, seed)
    }

    /// The tensor on a backend, row-major.
    pub(in crate::testkit) fn on(&self, backend: &Backend) -> Result<Tensor> {
        tensor_of_bytes(backend, self.0.dtype, &self.dims(), &encode(&self.0))
    }

    /// The same tensor in another layout.
    pub(super) fn laid_out(&self, backend: &Backend, layout: Layout) -> Result<Tensor> {
        let ndim = self.0.shape.len();
        if ndim == 0 {
            return self.on(backend);
        }
        match layout {
            Layout::Plain => self.on(backend),
            Layout::Transposed => {
                let order: Vec<usize> = (0..ndim).rev().collect();
                let positions = shape::permuted_positions(&self.0.shape, &order);
                let reversed = Self(Value {
                    dtype: self.0.dtype,
                    shape: order.iter().map(|&axis| self.0.shape[axis]).collect(),
                    data: self.0.data.pick(&positions),
                });
                let axes: Vec<i32> = order.iter().map(|&axis| axis as i32).collect();
                reversed.on(backend)?.transpose(&axes)
            }
            Layout::Strided => {
                let positions: Vec<usize> = (0..self.0.count()).flat_map(|i| [i, i]).collect();
                let mut dims = self.0.shape.clone();
                dims[ndim - 1] *= 2;
                let wide = Self(Value {
                    dtype: self.0.dtype,
                    shape: dims,
                    data: self.0.data.pick(&positions),
                });
                let mut strides = vec![1; ndim];
                strides[ndim - 1] = 2;
                let stops: Vec<i64> = wide.dims();
                wide.on(backend)?.slice(&vec![0; ndim], &stops, &strides)
            }
        }
    }

    /// Dimensions.
    pub(in crate::testkit) fn dims(&self) -> Vec<i64> {
        self.0.shape.iter().map(|&dim| dim as i64).collect()
    }

    /// Evaluates a tensor and copies it to the host.
    pub(in crate::testkit) fn read(tensor: &Tensor) -> Result<Self> {
        let info = tensor.info()?;
        let shape = dims_of(info.shape());
        let count: usize = shape.iter().product();
        let byte_len = count * info.dtype.size_bytes();
        let mut words = vec![0u64; byte_len.div_ceil(8)];
        command!(
            tensor.backend().table(),
            read,
            tensor.handle(),
            words.as_mut_ptr().cast(),
            byte_len
        )?;
        let bytes: Vec<u8> = words
            .into_iter()
            .flat_map(u64::to_ne_bytes)
            .take(byte_len)
            .collect();
        let data = decode(info.dtype, &bytes).map_err(|source| crate::Error::Backend {
            op: "read".to_owned(),
            source,
        })?;
        Ok(Self(Value {
            dtype: info.dtype,
            shape,
            data,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{ReferenceOptions, reference_backend};

    #[test]
    fn layouts_hold_the_same_elements() {
        let reference = reference_backend(ReferenceOptions::default());
        let backend = reference.backend();
        for dtype in [DType::F16, DType::BOOL, DType::I64, DType::C64] {
            let array = Array::usual(dtype, &[2, 3, 5], 7);
            for layout in Layout::ALL {
                let tensor = array.laid_out(&backend, layout).unwrap();
                assert_eq!(
                    Array::read(&tensor).unwrap().0,
                    array.0,
                    "{} {layout:?}",
                    dtype.name()
                );
            }
        }
        assert_eq!(reference.statistics().live_tensors, 0);
    }
}
