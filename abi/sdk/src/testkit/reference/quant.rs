//! Quantised weights: packing, expansion, products.
//!
//! Values are packed along the last axis as a little-endian bit stream: element i takes the bits
//! `[i * bits, (i + 1) * bits)`. Affine is MLX's scheme (mlx/ops.cpp, `affine_quantize`); mxfp4 and
//! mxfp8 follow the OCP Microscaling Formats specification 1.0 (e2m1 or e4m3 elements, an e8m0
//! exponent for 32 elements); nvfp4 has e2m1 elements and an e4m3 scale for 16 of them.

use mlxcel_abi::kinds::quant as mode_of;
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{class, need_float};
use super::product::{Matrices, choose, chosen_products, product_nt};
use super::shape;
use super::value::{Data, Mode, Value};

/// A quantised weight as it came from outside.
pub(super) struct Quantized<'a> {
    pub weight: &'a Value,
    pub scales: &'a Value,
    pub biases: Option<&'a Value>,
    pub spec: QuantSpec,
}

/// Checks mode, bits and group size.
fn check_spec(spec: &QuantSpec) -> Result<()> {
    let (bits, group) = (spec.bits, spec.group_size);
    let fits = match spec.mode {
        mode_of::AFFINE => matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) && matches!(group, 32 | 64 | 128),
        mode_of::MXFP4 => (bits, group) == (4, 32),
        mode_of::MXFP8 => (bits, group) == (8, 32),
        mode_of::NVFP4 => (bits, group) == (4, 16),
        mode => {
            return Err(AbiError::unimplemented(format!(
                "quantisation mode {mode} is not known to this backend"
            )));
        }
    };
    if fits {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "{bits} bits in groups of {group} do not exist in mode {}",
        mode_of::name(spec.mode)
    )))
}

impl Quantized<'_> {
    /// Checks the parts against each other; gives the shape of the expanded weight.
    fn check(&self) -> Result<Vec<usize>> {
        check_spec(&self.spec)?;
        let (bits, group) = (self.spec.bits as usize, self.spec.group_size as usize);
        if self.weight.dtype != DType::U32 {
            return Err(AbiError::invalid(format!(
                "packed weights must be u32, found {}",
                self.weight.dtype.name()
            )));
        }
        let affine = self.spec.mode == mode_of::AFFINE;
        if affine {
            need_float("scales", self.scales.dtype)?;
        } else if self.scales.dtype != DType::U8 {
            return Err(AbiError::invalid(format!(
                "scales of {} must be u8, found {}",
                mode_of::name(self.spec.mode),
                self.scales.dtype.name()
            )));
        }
        match self.biases {
            Some(biases) if affine => {
                need_float("biases", biases.dtype)?;
                shape::need("biases", &biases.shape, &self.scales.shape)?;
            }
            None if affine => return Err(AbiError::invalid("affine quantisation needs biases")),
            Some(_) => return Err(AbiError::invalid("only affine quantisation has biases")),
            None => {}
        }
        let Some((&words, batch)) = self.weight.shape.split_last() else {
            return Err(AbiError::invalid("a packed weight cannot be a scalar"));
        };
        let scaled = [batch, &[words * 32 / bits / group]].concat();
        if !(words * 32).is_multiple_of(bits * group) || self.scales.shape != scaled {
            return Err(AbiError::invalid(format!(
                "packed weight {:?} and scales {:?} do not fit together at {bits} bits in groups of {group}",
                self.weight.shape, self.scales.shape
            )));
        }
        Ok([batch, &[words * 32 / bits]].concat())
    }

    /// The weight's elements, exact.
    fn expand(&self) -> Result<Vec<f64>> {
        let bits = self.spec.bits as usize;
        let group = self.spec.group_size as usize;
        let codes = unpack(self.weight.ints()?, bits);
        let mut out = Vec::with_capacity(codes.len());
        match self.spec.mode {
            mode_of::AFFINE => {
                let scales = self.scales.reals();
                let biases = self.biases.map(Value::reals).unwrap_or_default();
                for ((codes, scale), bias) in codes
                    .chunks_exact(group)
                    .zip(scales.iter())
                    .zip(biases.iter())
                {
                    out.extend(codes.iter().map(|&q| f64::from(q) * scale + bias));
                }
            }
            mode => {
                for (codes, &scale) in codes.chunks_exact(group).zip(self.scales.ints()?) {
                    let scale = block_scale(mode, scale as u8);
                    let element = if bits == 4 { e2m1 } else { e4m3 };
                    out.extend(codes.iter().map(|&code| scale * element(code as u8)));
                }
            }
        }
        Ok(out)
    }
}

/// Elements of a bit stream. Rows hold whole words, so the stream runs on over row ends.
fn unpack(words: &[i128], bits: usize) -> Vec<u32> {
    let mut out = Vec::with_capacity(words.len() * 32 / bits);
    let (mut window, mut filled) = (0u64, 0);
    for &word in words {
        window |= (word as u64) << filled;
        filled += 32;
        while filled >= bits {
            out.push((window & ((1 << bits) - 1)) as u32);
            window >>= bits;
            filled -= bits;
        }
    }
    out
}

fn pack(codes: &[u32], bits: usize) -> Vec<i128> {
    let mut out = Vec::with_capacity(codes.len() * bits / 32);
    let (mut window, mut filled) = (0u64, 0);
    for &code in codes {
        window |= u64::from(code) << filled;
        filled += bits;
        if filled >= 32 {
            out.push(i128::from(window as u32));
            window >>= 32;
            filled -= 32;
        }
    }
    out
}

/// e2m1: sign, two exponent bits of bias 1, one mantissa bit.
fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// e4m3: sign, four exponent bits of bias 7, three mantissa bits, no infinity.
///
/// The two NaN codes (0x7f, 0xff) read as 480 in MLX; packers never write them.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = if exponent == 0 {
        mantissa / 8.0 * 2f64.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

fn block_scale(mode: u32, code: u8) -> f64 {
    if mode == mode_of::NVFP4 {
        e4m3(code)
    } else {
        2f64.powi(i32::from(code) - 127)
    }
}

/// Expands a quantised weight to `dtype`.
pub(super) fn dequantize(mode: Mode, w: &Quantized<'_>, dtype: DType) -> Result<Value> {
    class(dtype)?;
    need_float("the expanded weight", dtype)?;
    let out = w.check()?;
    mode.value(dtype, out, || Ok(Data::Real(w.expand()?)))
}

/// The weight as matrices whose rows run along the inner dimension of the product.
fn matrices(w: &Quantized<'_>, dims: &[usize], transpose: bool) -> Result<Matrices> {
    let (batch, last) = dims.split_at(dims.len() - 2);
    let stored = Matrices {
        batch: batch.to_vec(),
        rows: last[0],
        cols: last[1],
        data: w.expand()?,
    };
    Ok(if transpose {
        stored
    } else {
        stored.transposed()
    })
}

/// Dimensions of a product with a quantised weight.
fn product_dims(x: &Value, w: &Quantized<'_>, transpose: bool) -> Result<(Vec<usize>, usize)> {
    need_float("the activation", x.dtype)?;
    let dims = w.check()?;
    if dims.len() < 2 || x.shape.is_empty() {
        return Err(AbiError::invalid(format!(
            "a product needs matrices, found x {:?} and weight {dims:?}",
            x.shape
        )));
    }
    let [n, k] = [dims[dims.len() - 2], dims[dims.len() - 1]];
    let (inner, outer) = if transpose { (k, n) } else { (n, k) };
    if x.last_dim() != inner {
        return Err(AbiError::invalid(format!(
            "the activation {:?} has {} features, the weight {dims:?} takes {inner}",
            x.shape,
            x.last_dim()
        )));
    }
    Ok((dims, outer))
}

/// Product with a quantised weight, in `x`'s dtype.
pub(super) fn quantized_matmul(
    mode: Mode,
    x: &Value,
    w: &Quantized<'_>,
    transpose: bool,
) -> Result<Value> {
    let (dims, outer) = product_dims(x, w, transpose)?;
    let inner = x.last_dim();
    let batch = &dims[..dims.len() - 2];
    if batch.is_empty() {
        let mut out = x.shape.clone();
        out[x.shape.len() - 1] = outer;
        let total = shape::count(&out)?;
        return mode.value(x.dtype, out, || {
            let right = matrices(w, &dims, transpose)?;
            let mut data = Vec::with_capacity(total);
            product_nt(&x.reals(), right.matrix(0), inner, outer, &mut data);
            data.resize(total, 0.0);
            Ok(Data::Real(data))
        });
    }
    if x.shape.len() < 2 {
        return Err(AbiError::invalid(format!(
            "a batched product needs matrices, found x {:?}",
            x.shape
        )));
    }
    let (x_batch, x_last) = x.shape.split_at(x.shape.len() - 2);
    let common = shape::broadcast(&[x_batch, batch])?;
    let out = [common.as_slice(), &[x_last[0], outer]].concat();
    let total = shape::count(&out)?;
    mode.value(x.dtype, out, || {
        let choice = super::product::Choice {
            left: shape::broadcast_positions(x_batch, &common),
            right: shape::broadcast_positions(batch, &common),
            shape: common,
        };
        let right = matrices(w, &dims, transpose)?;
        Ok(Data::Real(chosen_products(
            &x.reals(),
            x_last,
            &right,
            &choice,
            total,
        )))
    })
}

/// As [`quantized_matmul`] for chosen matrices of either operand.
pub(super) fn gather_quantized_matmul(
    mode: Mode,
    x: &Value,
    w: &Quantized<'_>,
    transpose: bool,
    lhs: Option<&Value>,
    rhs: Option<&Value>,
) -> Result<Value> {
    let (dims, outer) = product_dims(x, w, transpose)?;
    if x.shape.len() < 2 {
        return Err(AbiError::invalid(format!(
            "gathered products need matrices, found x {:?}",
            x.shape
        )));
    }
    let (x_batch, x_last) = x.shape.split_at(x.shape.len() - 2);
    let choice = choose(mode, [x_batch, &dims[..dims.len() - 2]], [lhs, rhs])?;
    let out = [choice.shape.as_slice(), &[x_last[0], outer]].concat();
    let total = shape::count(&out)?;
    mode.value(x.dtype, out, || {
        let right = matrices(w, &dims, transpose)?;
        Ok(Data::Real(chosen_products(
            &x.reals(),
            x_last,
            &right,
            &choice,
            total,
        )))
    })
}

/// Quantises the last axis: packed weight, scales and, when affine, biases.
pub(in crate::testkit) fn quantize(
    mode: Mode,
    w: &Value,
    spec: &QuantSpec,
) -> Result<(Value, Value, Option<Value>)> {
    check_spec(spec)?;
    need_float("a weight to quantise", w.dtype)?;
    let (bits, group) = (spec.bits as usize, spec.group_size as usize);
    if w.shape.len() < 2 || !w.last_dim().is_multiple_of(group) {
        return Err(AbiError::invalid(format!(
            "a weight to quantise needs two dimensions or more and a last axis that is a multiple of {group}, found {:?}",
            w.shape
        )));
    }
    let batch = &w.shape[..w.shape.len() - 1];
    let packed = [batch, &[w.last_dim() * bits / 32]].concat();
    let scaled = [batch, &[w.last_dim() / group]].concat();
    let affine = spec.mode == mode_of::AFFINE;
    let (mut codes, mut scales, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    if !mode.shapes_only {
        for row in w.reals().chunks_exact(group) {
            if affine {
                let (scale, bias) = affine_group(row, bits, &mut codes);
                scales.push(scale);
                biases.push(bias);
            } else {
                scales.push(float_group(row, spec.mode, &mut codes));
            }
        }
    }
    let weight = mode.value(DType::U32, packed, || Ok(Data::Int(pack(&codes, bits))))?;
    if affine {
        let scales = mode.value(w.dtype, scaled.clone(), || Ok(Data::Real(scales)))?;
        let biases = mode.value(w.dtype, scaled, || Ok(Data::Real(biases)))?;
        return Ok((weight, scales, Some(biases)));
    }
    let codes = || Ok(Data::Int(scales.iter().map(|&code| code as i128).collect()));
    Ok((weight, mode.value(DType::U8, scaled, codes)?, None))
}

/// MLX's affine group: the end of the range that is farther from 0 is met exactly and 0 falls on
/// a code. Computed in f32, as MLX does, so that ties fall the same way.
fn affine_group(row: &[f64], bits: usize, codes: &mut Vec<u32>) -> (f64, f64) {
    let bins = ((1u32 << bits) - 1) as f32;
    let low = row.iter().fold(f32::INFINITY, |a, &x| a.min(x as f32));
    let high = row.iter().fold(f32::NEG_INFINITY, |a, &x| a.max(x as f32));
    let low_is_edge = low.abs() > high.abs();
    let step = ((high - low) / bins).max(1e-7);
    let mut scale = if low_is_edge { step } else { -step };
    let edge = if low_is_edge { low } else { high };
    let zero_code = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    if zero_code != 0.0 {
        scale = edge / zero_code;
        bias = edge;
    }
    codes.extend(row.iter().map(|&x| {
        ((x as f32 - bias) / scale)
            .round_ties_even()
            .clamp(0.0, bins) as u32
    }));
    (f64::from(scale), f64::from(bias))
}

/// A block of a float format: pushes the element codes, gives the scale's code.
fn float_group(row: &[f64], mode: u32, codes: &mut Vec<u32>) -> f64 {
    let largest = if mode == mode_of::MXFP8 { 448.0 } else { 6.0 };
    let wanted = row.iter().fold(0f64, |a, x| a.max(x.abs())) / largest;
    let code = if mode == mode_of::NVFP4 {
        nearest(wanted, 0x7e, e4m3)
    } else if wanted == 0.0 {
        127
    } else {
        (wanted.log2().round_ties_even() + 127.0).clamp(0.0, 254.0) as u8
    };
    let scale = block_scale(mode, code);
    for &x in row {
        let scaled = if scale == 0.0 { 0.0 } else { x.abs() / scale };
        let (top, element, sign) = if mode == mode_of::MXFP8 {
            (0x7e, e4m3 as fn(u8) -> f64, 0x80)
        } else {
            (7, e2m1 as fn(u8) -> f64, 8)
        };
        let negative = if x < 0.0 { sign } else { 0 };
        codes.push(u32::from(nearest(scaled, top, element)) | negative);
    }
    f64::from(code)
}

/// Code up to `top` whose value is nearest to `x >= 0`; ties to the even code.
fn nearest(x: f64, top: u8, value: fn(u8) -> f64) -> u8 {
    let mut best = 0;
    for code in 1..=top {
        let (old, new) = ((value(best) - x).abs(), (value(code) - x).abs());
        if new < old || (new == old && code % 2 == 0) {
            best = code;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    fn spec(mode: u32, bits: u32, group_size: u32) -> QuantSpec {
        QuantSpec {
            mode,
            bits,
            group_size,
            ..QuantSpec::default()
        }
    }

    #[test]
    fn packing_is_a_little_endian_bit_stream() {
        assert_eq!(pack(&[1, 2, 3, 4, 5, 6, 7, 8], 4), [0x8765_4321]);
        for bits in [2usize, 3, 4, 5, 6, 8] {
            let codes: Vec<u32> = (0..64).map(|i| (i * 7 + 1) % (1 << bits)).collect();
            let words = pack(&codes, bits);
            assert_eq!(words.len(), 2 * bits);
            assert_eq!(unpack(&words, bits), codes, "{bits} bits");
        }
    }

    #[test]
    fn small_floats_have_their_specified_values() {
        assert_eq!(e4m3(0x7e), 448.0);
        assert_eq!(e4m3(0x01), 2f64.powi(-9));
        assert_eq!(e4m3(0x38), 1.0);
        assert_eq!(e4m3(0xb8), -1.0);
        assert_eq!((e2m1(7), e2m1(9)), (6.0, -0.5));
        assert_eq!(block_scale(mode_of::MXFP4, 127), 1.0);
        assert_eq!(nearest(5.0, 7, e2m1), 6, "a tie goes to the even code");
    }

    #[test]
    fn expansion_comes_back_near_the_values() {
        let values: Vec<f64> = (0..256)
            .map(|i| f64::from((i * 37 % 101) - 50) / 25.0)
            .collect();
        let w = Value {
            dtype: DType::F32,
            shape: vec![2, 128],
            data: Data::Real(values.clone()),
        };
        let specs = [2, 3, 4, 5, 6, 8]
            .map(|bits| spec(mode_of::AFFINE, bits, 64))
            .into_iter();
        let floats = [
            spec(mode_of::MXFP4, 4, 32),
            spec(mode_of::MXFP8, 8, 32),
            spec(mode_of::NVFP4, 4, 16),
        ];
        for spec in specs.chain(floats) {
            let (weight, scales, biases) = quantize(MODE, &w, &spec).unwrap();
            let q = Quantized {
                weight: &weight,
                scales: &scales,
                biases: biases.as_ref(),
                spec,
            };
            let expanded = dequantize(MODE, &q, DType::F32).unwrap();
            let worst = expanded
                .reals()
                .iter()
                .zip(&values)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f64::max);
            let bound = match (spec.mode, spec.bits) {
                (mode_of::AFFINE, bits) => 4.0 / f64::from((1 << bits) - 1),
                // The shared power of two may be too small for the largest element, which saturates.
                (mode_of::MXFP8, _) => 0.25,
                (mode_of::MXFP4, _) => 0.5,
                _ => 0.42,
            };
            assert!(
                worst <= bound,
                "{spec:?}: {worst}",
                spec = (spec.mode, spec.bits)
            );
        }
    }

    #[test]
    fn contradicting_parts_are_refused() {
        let word = |shape: &[usize]| Value {
            dtype: DType::U32,
            shape: shape.to_vec(),
            data: Data::Int(vec![0; shape.iter().product()]),
        };
        let scale = |shape: &[usize]| Value {
            dtype: DType::F16,
            shape: shape.to_vec(),
            data: Data::Real(vec![1.0; shape.iter().product()]),
        };
        let check = |w: &[usize], s: &[usize], spec: QuantSpec| {
            let (weight, scales) = (word(w), scale(s));
            let q = Quantized {
                weight: &weight,
                scales: &scales,
                biases: Some(&scales),
                spec,
            };
            q.check()
        };
        assert_eq!(
            check(&[4, 8], &[4, 1], spec(mode_of::AFFINE, 4, 64)),
            Ok(vec![4, 64])
        );
        assert!(check(&[4, 8], &[4, 2], spec(mode_of::AFFINE, 4, 64)).is_err());
        assert!(check(&[4, 8], &[4, 1], spec(mode_of::AFFINE, 7, 64)).is_err());
        assert!(check(&[4, 8], &[4, 1], spec(mode_of::MXFP4, 4, 32)).is_err());
    }
}
