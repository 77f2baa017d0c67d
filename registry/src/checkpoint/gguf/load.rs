//! Carries out a plan: reads the blocks of one tensor and makes the bytes of one part.
//!
//! Owns conversion of bytes. Must not know names beyond those in messages.

use std::ops::Range;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::centred::centred_scales;
use super::dequant::dequantize;
use super::ggml_type::GgmlType;
use super::plan::{Part, Plan, ValueOp};
use super::repack::{affine_factors, half_factors, half_scale, pack_codes};
use super::rows::RowMap;
use crate::checkpoint::buffer::{AlignedBuffer, TensorBytes, TensorData};
use crate::checkpoint::dtype::DType;
use crate::checkpoint::map::MappedFile;

/// Elements that are decoded at once: a multiple of every block, small enough for the first cache.
const CHUNK: usize = 1024;

/// Why the values of a tensor could not be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A scale or value that is infinite or no number.
    #[error("tensor `{tensor}` has {what} that is infinite or not a number: the file is damaged")]
    NotFinite {
        /// The name in the file.
        tensor: String,
        /// `a scale` or `a value`.
        what: &'static str,
    },
    /// The bytes are not where the header said.
    #[error("tensor `{tensor}` is no longer where the header said: was the file changed?")]
    Moved {
        /// The name in the file.
        tensor: String,
    },
}

impl Plan {
    /// Makes a part from the source tensor at `range` of `file`.
    pub(super) fn load(
        &self,
        file: &Arc<MappedFile>,
        range: Range<usize>,
        part: Part,
    ) -> Result<TensorData, ConvertError> {
        let moved = || ConvertError::Moved {
            tensor: self.from.clone(),
        };
        if let Some(mapped) = self.mapped(&range) {
            let info = self.info(Part::Weight);
            let bytes = TensorBytes::from_file(file, mapped, info.dtype.size_bytes());
            let bytes = bytes.ok_or_else(moved)?;
            return Ok(TensorData {
                dtype: info.dtype,
                shape: info.shape,
                bytes,
            });
        }
        let source = file.bytes().get(range.clone()).ok_or_else(moved)?;
        let info = self.info(part);
        let (dtype, buffer) = match (self.bits, part) {
            (Some(_), Part::Weight) => (DType::U32, self.codes(source, info.byte_len)),
            (Some(_), _) => self.factors(source, part)?,
            (None, _) => self.values(source)?,
        };
        file.release(range);
        Ok(TensorData {
            dtype,
            shape: info.shape,
            bytes: buffer.into(),
        })
    }

    /// The bytes of the file that are the tensor as they stand.
    fn mapped(&self, source: &Range<usize>) -> Option<Range<usize>> {
        match &self.rows {
            RowMap::Span(rows) if self.ty.block_elements() == 1 && self.value_ops.is_empty() => {
                let start = source.start + rows.start * self.row_bytes;
                Some(start..start + rows.len() * self.row_bytes)
            }
            _ => None,
        }
    }

    /// Calls `visit` with the blocks of the selected rows and the number of their first element in the
    /// selection.
    fn for_each_run<'a>(&self, source: &'a [u8], mut visit: impl FnMut(usize, &'a [u8])) {
        let mut done = 0;
        self.rows.for_each_span(|rows| {
            let bytes = rows.start * self.row_bytes..rows.end * self.row_bytes;
            visit(done, source.get(bytes).unwrap_or(&[]));
            done += rows.len() * self.row_elements;
        });
    }

    fn codes(&self, source: &[u8], byte_len: usize) -> AlignedBuffer {
        let bits = self.bits.unwrap_or_default() as usize;
        let mut buffer = AlignedBuffer::lasting(byte_len);
        let out = buffer.as_mut_slice();
        self.for_each_run(source, |first, blocks| {
            pack_codes(
                self.ty,
                blocks,
                out.get_mut(first / 8 * bits..).unwrap_or(&mut []),
            );
        });
        buffer
    }

    fn factors(&self, source: &[u8], part: Part) -> Result<(DType, AlignedBuffer), ConvertError> {
        if self.factor_dtype() == DType::F16
            && let Some(buffer) = self.half_factors(source, part)
        {
            return Ok((DType::F16, buffer));
        }
        let groups = self.rows.len() * self.row_elements / self.group_size;
        let (mut scales, mut biases) = (vec![0f32; groups], vec![0f32; groups]);
        self.for_each_run(source, |first, blocks| {
            let first = first / self.group_size;
            let scales = scales.get_mut(first..).unwrap_or(&mut []);
            let biases = biases.get_mut(first..).unwrap_or(&mut []);
            match self.is_centred {
                true => centred_scales(self.ty, blocks, scales),
                false => affine_factors(self.ty, blocks, scales, biases),
            }
        });
        if !scales.iter().chain(&biases).all(|x| x.is_finite()) {
            let tensor = self.from.clone();
            return Err(ConvertError::NotFinite {
                tensor,
                what: "a scale",
            });
        }
        let wanted = if part == Part::Scales { scales } else { biases };
        let mut buffer = AlignedBuffer::lasting(groups * 4);
        for (value, out) in wanted.iter().zip(buffer.as_mut_slice().as_chunks_mut().0) {
            *out = value.to_le_bytes();
        }
        Ok((DType::F32, buffer))
    }

    /// Scales or biases as halves; `None` when one of either is none, as both must have one type.
    fn half_factors(&self, source: &[u8], part: Part) -> Option<AlignedBuffer> {
        let mut fits = true;
        let groups = self.rows.len() * self.row_elements / self.group_size;
        let mut buffer = AlignedBuffer::lasting(groups * 2);
        let out = buffer.as_mut_slice();
        self.for_each_run(source, |first, blocks| {
            let out = out
                .get_mut(first / self.group_size * 2..)
                .unwrap_or(&mut []);
            let groups = blocks
                .chunks_exact(self.ty.block_bytes())
                .zip(out.as_chunks_mut().0);
            for (block, out) in groups {
                let factors = match self.is_centred {
                    true => half_scale(block).map(|scale| (scale, 0)),
                    false => half_factors(self.ty, block),
                };
                fits &= factors.is_some();
                let (scale, bias) = factors.unwrap_or_default();
                *out = if part == Part::Scales { scale } else { bias }.to_le_bytes();
            }
        });
        fits.then_some(buffer)
    }

    fn values(&self, source: &[u8]) -> Result<(DType, AlignedBuffer), ConvertError> {
        let (dtype, buffer) = if self.ty.block_elements() == 1 {
            (plain_dtype(self.ty), self.copied(source))
        } else if self.adds() {
            (DType::F32, self.dequantized_f32(source)?)
        } else {
            match self.dequantized_f16(source)? {
                Some(buffer) => (DType::F16, buffer),
                None => (DType::F32, self.dequantized_f32(source)?),
            }
        };
        let values = (dtype, buffer);
        Ok(self
            .value_ops
            .iter()
            .fold(values, |(dtype, buffer), op| apply(op, dtype, buffer)))
    }

    fn copied(&self, source: &[u8]) -> AlignedBuffer {
        let mut buffer = AlignedBuffer::zeroed(self.rows.len() * self.row_bytes);
        let out = buffer.as_mut_slice();
        let size = self.ty.block_bytes();
        self.for_each_run(source, |first, bytes| copy(out, first * size, bytes));
        buffer
    }

    /// `None` when a value is beyond the range of a half.
    fn dequantized_f16(&self, source: &[u8]) -> Result<Option<AlignedBuffer>, ConvertError> {
        let mut halves = [f16::ZERO; CHUNK];
        let (mut is_finite, mut fits) = (true, true);
        let buffer = self.dequantized(source, 2, |values, out| {
            is_finite &= values.iter().all(|x| x.is_finite());
            let Some(halves) = halves.get_mut(..values.len()) else {
                return;
            };
            halves.convert_from_f32_slice(values);
            fits &= halves.iter().all(|x| x.is_finite());
            for (half, out) in halves.iter().zip(out.as_chunks_mut().0) {
                *out = half.to_le_bytes();
            }
        });
        if !is_finite {
            return Err(ConvertError::NotFinite {
                tensor: self.from.clone(),
                what: "a value",
            });
        }
        Ok(fits.then_some(buffer))
    }

    fn dequantized_f32(&self, source: &[u8]) -> Result<AlignedBuffer, ConvertError> {
        let mut is_finite = true;
        let buffer = self.dequantized(source, 4, |values, out| {
            is_finite &= values.iter().all(|x| x.is_finite());
            for (value, out) in values.iter().zip(out.as_chunks_mut().0) {
                *out = value.to_le_bytes();
            }
        });
        if !is_finite {
            return Err(ConvertError::NotFinite {
                tensor: self.from.clone(),
                what: "a value",
            });
        }
        Ok(buffer)
    }

    /// Decodes the selected rows a chunk at a time; `write` stores a chunk in its place.
    fn dequantized(
        &self,
        source: &[u8],
        element_bytes: usize,
        mut write: impl FnMut(&[f32], &mut [u8]),
    ) -> AlignedBuffer {
        let mut buffer = AlignedBuffer::zeroed(self.rows.len() * self.row_elements * element_bytes);
        let out = buffer.as_mut_slice();
        let mut values = [0f32; CHUNK];
        let (block_elements, block_bytes) = (self.ty.block_elements(), self.ty.block_bytes());
        self.for_each_run(source, |first, blocks| {
            let out = out.get_mut(first * element_bytes..).unwrap_or(&mut []);
            let chunks = blocks.chunks(CHUNK / block_elements * block_bytes);
            for (blocks, out) in chunks.zip(out.chunks_mut(CHUNK * element_bytes)) {
                let elements = blocks.len() / block_bytes * block_elements;
                let Some(values) = values.get_mut(..elements) else {
                    continue;
                };
                dequantize(self.ty, blocks, values);
                write(values, out);
            }
        });
        buffer
    }
}

fn plain_dtype(ty: GgmlType) -> DType {
    match ty {
        GgmlType::F32 => DType::F32,
        GgmlType::BF16 => DType::BF16,
        _ => DType::F16,
    }
}

fn apply(op: &ValueOp, dtype: DType, source: AlignedBuffer) -> (DType, AlignedBuffer) {
    match op {
        ValueOp::Add(constant) => (DType::F32, add(*constant, dtype, source.as_slice())),
        ValueOp::Rows { map, row_elements } => {
            let row_bytes = row_elements * dtype.size_bytes();
            let mut buffer = AlignedBuffer::zeroed(map.len() * row_bytes);
            let out = buffer.as_mut_slice();
            let mut done = 0;
            map.for_each_span(|rows| {
                let bytes = source
                    .as_slice()
                    .get(rows.start * row_bytes..rows.end * row_bytes);
                copy(out, done, bytes.unwrap_or(&[]));
                done += rows.len() * row_bytes;
            });
            (dtype, buffer)
        }
        ValueOp::Transpose { rows, columns } => {
            let source = source.as_slice();
            let buffer = match dtype.size_bytes() {
                2 => transpose::<2>(source, *rows, *columns),
                _ => transpose::<4>(source, *rows, *columns),
            };
            (dtype, buffer)
        }
    }
}

fn add(constant: f32, dtype: DType, source: &[u8]) -> AlignedBuffer {
    let singles = |values: &mut dyn ExactSizeIterator<Item = f32>| {
        let mut buffer = AlignedBuffer::zeroed(values.len() * 4);
        for (value, out) in values.zip(buffer.as_mut_slice().as_chunks_mut().0) {
            *out = (value + constant).to_le_bytes();
        }
        buffer
    };
    let pairs = source.as_chunks().0.iter();
    match dtype {
        DType::F16 => singles(&mut pairs.map(|b| f16::from_le_bytes(*b).to_f32())),
        DType::BF16 => singles(&mut pairs.map(|b| bf16::from_le_bytes(*b).to_f32())),
        _ => singles(&mut source.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
    }
}

fn transpose<const SIZE: usize>(source: &[u8], rows: usize, columns: usize) -> AlignedBuffer {
    let mut buffer = AlignedBuffer::zeroed(rows * columns * SIZE);
    let elements = source.as_chunks::<SIZE>().0;
    let out = buffer.as_mut_slice().as_chunks_mut::<SIZE>().0;
    for (column, out) in out.chunks_exact_mut(rows.max(1)).enumerate() {
        let source = elements.iter().skip(column).step_by(columns.max(1));
        for (element, out) in source.zip(out) {
            *out = *element;
        }
    }
    buffer
}

fn copy(out: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(out) = out.get_mut(at..at + bytes.len()) {
        out.copy_from_slice(bytes);
    }
}
