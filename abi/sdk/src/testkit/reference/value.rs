//! What is behind a handle: dtype, shape and the elements as exact or f64 numbers.

use std::borrow::Cow;

use half::{bf16, f16};
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{Class, class, float_to_int, round_float, wrap_int};
use super::shape;

/// Elements, row-major.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::testkit) enum Data {
    /// Shapes-only mode: nothing is kept, every element reads as 0.
    Absent,
    /// Float types.
    Real(Vec<f64>),
    /// Integer types and bool. Wide enough for i64 and u64 alike.
    Int(Vec<i128>),
    /// Complex: real and imaginary part.
    Complex(Vec<[f64; 2]>),
}

/// A tensor.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::testkit) struct Value {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Data,
}

/// Whether elements are computed or only described.
#[derive(Debug, Clone, Copy)]
pub(in crate::testkit) struct Mode {
    /// Described only.
    pub shapes_only: bool,
}

impl Mode {
    /// A tensor whose elements `data` gives, rounded to `dtype`; not called in shapes-only mode.
    pub(in crate::testkit) fn value(
        self,
        dtype: DType,
        shape: Vec<usize>,
        data: impl FnOnce() -> Result<Data>,
    ) -> Result<Value> {
        class(dtype)?;
        let count = shape::count(&shape)?;
        let data = if self.shapes_only {
            Data::Absent
        } else {
            let mut data = data()?;
            if data.len() != Some(count) {
                return Err(AbiError::internal(format!(
                    "reference backend computed {:?} elements for shape {shape:?}",
                    data.len()
                )));
            }
            data.settle(dtype);
            data
        };
        Ok(Value { dtype, shape, data })
    }
}

impl Data {
    /// Number of elements; unknown when absent.
    pub(in crate::testkit) fn len(&self) -> Option<usize> {
        match self {
            Self::Absent => None,
            Self::Real(v) => Some(v.len()),
            Self::Int(v) => Some(v.len()),
            Self::Complex(v) => Some(v.len()),
        }
    }

    /// `count` elements of value `x`.
    pub(in crate::testkit) fn filled(dtype: DType, x: f64, count: usize) -> Result<Self> {
        Ok(match class(dtype)? {
            Class::Float => Self::Real(vec![x; count]),
            Class::Complex => Self::Complex(vec![[x, 0.0]; count]),
            Class::Int | Class::Bool => Self::Int(vec![float_to_int(dtype, x); count]),
        })
    }

    /// Rounds or wraps every element to what `dtype` can hold.
    fn settle(&mut self, dtype: DType) {
        match self {
            Self::Real(v) if dtype != DType::F64 => {
                v.iter_mut().for_each(|x| *x = round_float(dtype, *x));
            }
            Self::Int(v) => v.iter_mut().for_each(|x| *x = wrap_int(dtype, *x)),
            Self::Complex(v) => v
                .iter_mut()
                .for_each(|x| *x = x.map(|part| f64::from(part as f32))),
            Self::Real(_) | Self::Absent => {}
        }
    }

    /// The elements at `positions`.
    pub(in crate::testkit) fn pick(&self, positions: &[usize]) -> Self {
        match self {
            Self::Absent => Self::Absent,
            Self::Real(v) => Self::Real(positions.iter().map(|&i| v[i]).collect()),
            Self::Int(v) => Self::Int(positions.iter().map(|&i| v[i]).collect()),
            Self::Complex(v) => Self::Complex(positions.iter().map(|&i| v[i]).collect()),
        }
    }

    /// Overwrites the elements at `positions` with those of `source` in order.
    pub(in crate::testkit) fn put(&mut self, positions: &[usize], source: &Self) -> Result<()> {
        match (self, source) {
            (Self::Real(to), Self::Real(from)) => write(to, positions, from),
            (Self::Int(to), Self::Int(from)) => write(to, positions, from),
            (Self::Complex(to), Self::Complex(from)) => write(to, positions, from),
            _ => return Err(AbiError::internal("elements of two classes were mixed")),
        }
        Ok(())
    }
}

fn write<T: Copy>(to: &mut [T], positions: &[usize], from: &[T]) {
    for (&position, &x) in positions.iter().zip(from) {
        to[position] = x;
    }
}

impl Value {
    /// Number of elements.
    pub(in crate::testkit) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes that the elements take on a real backend.
    pub(in crate::testkit) fn byte_len(&self) -> usize {
        self.count() * self.dtype.size_bytes()
    }

    /// Size of the last axis; 1 for scalars.
    pub(in crate::testkit) fn last_dim(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Elements as f64; complex ones give their real part.
    pub(in crate::testkit) fn reals(&self) -> Cow<'_, [f64]> {
        match &self.data {
            Data::Absent => Cow::Owned(vec![0.0; self.count()]),
            Data::Real(v) => Cow::Borrowed(v),
            Data::Int(v) => Cow::Owned(v.iter().map(|&x| x as f64).collect()),
            Data::Complex(v) => Cow::Owned(v.iter().map(|x| x[0]).collect()),
        }
    }

    /// Elements of an integer or bool tensor.
    pub(in crate::testkit) fn ints(&self) -> Result<&[i128]> {
        match &self.data {
            Data::Int(v) => Ok(v),
            _ => Err(AbiError::invalid(format!(
                "an integer tensor is needed, found {}",
                self.dtype.name()
            ))),
        }
    }

    /// Elements as complex numbers.
    pub(in crate::testkit) fn complexes(&self) -> Cow<'_, [[f64; 2]]> {
        match &self.data {
            Data::Complex(v) => Cow::Borrowed(v),
            _ => Cow::Owned(self.reals().iter().map(|&x| [x, 0.0]).collect()),
        }
    }

    /// The same elements in another dtype.
    pub(in crate::testkit) fn cast(&self, mode: Mode, dtype: DType) -> Result<Value> {
        let target = class(dtype)?;
        mode.value(dtype, self.shape.clone(), || {
            Ok(match (&self.data, target) {
                (Data::Complex(v), Class::Bool) => Data::Int(
                    v.iter()
                        .map(|x| i128::from(x[0] != 0.0 || x[1] != 0.0))
                        .collect(),
                ),
                (Data::Int(v), Class::Int | Class::Bool) => Data::Int(v.clone()),
                // One rounding from the integer, not two by way of f64.
                (Data::Int(v), Class::Float) if dtype == DType::F32 => {
                    Data::Real(v.iter().map(|&x| f64::from(x as f32)).collect())
                }
                (_, Class::Int | Class::Bool) => Data::Int(
                    self.reals()
                        .iter()
                        .map(|&x| float_to_int(dtype, x))
                        .collect(),
                ),
                (_, Class::Float) => Data::Real(self.reals().into_owned()),
                (_, Class::Complex) => Data::Complex(self.complexes().into_owned()),
            })
        })
    }
}

/// Elements from their bytes; `bytes` must hold whole elements.
pub(in crate::testkit) fn decode(dtype: DType, bytes: &[u8]) -> Result<Data> {
    macro_rules! ints {
        ($ty:ty) => {
            Data::Int(
                chunks(bytes)
                    .map(|b| <$ty>::from_ne_bytes(b).into())
                    .collect(),
            )
        };
    }
    macro_rules! floats {
        ($ty:ty) => {
            Data::Real(
                chunks(bytes)
                    .map(|b| <$ty>::from_ne_bytes(b).into())
                    .collect(),
            )
        };
    }
    Ok(match dtype {
        DType::BOOL => Data::Int(bytes.iter().map(|&b| i128::from(b != 0)).collect()),
        DType::U8 => ints!(u8),
        DType::U16 => ints!(u16),
        DType::U32 => ints!(u32),
        DType::U64 => ints!(u64),
        DType::I8 => ints!(i8),
        DType::I16 => ints!(i16),
        DType::I32 => ints!(i32),
        DType::I64 => ints!(i64),
        DType::F16 => floats!(f16),
        DType::BF16 => floats!(bf16),
        DType::F32 => floats!(f32),
        DType::F64 => floats!(f64),
        DType::C64 => Data::Complex(
            chunks::<4>(bytes)
                .map(|b| f64::from(f32::from_ne_bytes(b)))
                .collect::<Vec<f64>>()
                .chunks_exact(2)
                .map(|pair| [pair[0], pair[1]])
                .collect(),
        ),
        other => return class(other).map(|_| Data::Absent),
    })
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

/// Bytes of the elements.
pub(in crate::testkit) fn encode(value: &Value) -> Vec<u8> {
    macro_rules! write {
        ($items:expr, $convert:expr) => {
            $items
                .iter()
                .flat_map(|&x| $convert(x).to_ne_bytes())
                .collect()
        };
    }
    match &value.data {
        Data::Absent => vec![0; value.byte_len()],
        Data::Complex(v) => v
            .iter()
            .flat_map(|x| x.map(|part| (part as f32).to_ne_bytes()))
            .flatten()
            .collect(),
        Data::Real(v) => match value.dtype {
            // The elements are representable already: these conversions are exact.
            DType::F16 => write!(v, f16::from_f64),
            DType::BF16 => write!(v, bf16::from_f64),
            DType::F32 => write!(v, |x| x as f32),
            _ => write!(v, |x| x),
        },
        Data::Int(v) => match value.dtype.size_bytes() {
            1 => write!(v, |x| x as u8),
            2 => write!(v, |x| x as u16),
            4 => write!(v, |x| x as u32),
            _ => write!(v, |x| x as u64),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    #[test]
    fn bytes_round_trip_in_every_dtype() {
        for &dtype in DType::ALL {
            let source = Value {
                dtype: DType::F32,
                shape: vec![3],
                data: Data::Real(vec![0.0, 1.0, 5.0]),
            };
            let value = source.cast(MODE, dtype).unwrap();
            let bytes = encode(&value);
            assert_eq!(bytes.len(), 3 * dtype.size_bytes());
            assert_eq!(
                decode(dtype, &bytes).unwrap(),
                value.data,
                "{}",
                dtype.name()
            );
        }
        assert!(decode(DType(99), &[]).is_err());
    }

    #[test]
    fn negative_integers_keep_their_sign() {
        let value = Value {
            dtype: DType::I64,
            shape: vec![2],
            data: Data::Int(vec![-3, i128::from(i64::MIN)]),
        };
        assert_eq!(decode(DType::I64, &encode(&value)).unwrap(), value.data);
        let wrapped = value.cast(MODE, DType::U16).unwrap();
        assert_eq!(wrapped.ints().unwrap(), [65533, 0]);
    }

    #[test]
    fn shapes_only_keeps_nothing_and_reads_zero() {
        let value = Mode { shapes_only: true }
            .value(DType::F16, vec![2, 2], || {
                Err(AbiError::internal("must not be computed"))
            })
            .unwrap();
        assert_eq!(value.data, Data::Absent);
        assert_eq!(encode(&value), [0; 8]);
    }
}
