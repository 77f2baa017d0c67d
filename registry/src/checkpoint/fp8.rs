//! Weights of `quantization_config: {"quant_method": "fp8"}`: 8-bit floats with a scale for each block
//! of a matrix, or one for the whole. They are made plain floats when they are loaded.
//!
//! Owns which tensors belong together and the arithmetic. Must not know any architecture.
//! Format: E4M3 of the OCP 8-bit floating point specification (no infinities), value = scale * code.
//! Activations stay in the compute type: scales for them are known and not used.

use std::collections::{BTreeMap, BTreeSet};

use half::{bf16, f16};

use super::buffer::{AlignedBuffer, TensorData};
use super::dtype::{DType, TensorInfo, element_count};
use super::fp8_settings::{Block, DEFAULT_BLOCK, SCALE_FORMAT, SKIPPED, ScaleFormat, Settings};
use super::quant::{Foreign, QuantError};

/// Name of the method in `quantization_config`.
pub(super) const METHOD: &str = "fp8";
/// What follows a weight's name in the name of its scales.
const SCALE_SUFFIX: &str = "_scale_inv";
/// Scales of activations, in the spellings that are found.
const ACTIVATION_SUFFIXES: [&str; 3] = [".activation_scale", "_activation_scale", ".input_scale"];

/// Where the scales of one weight are and what they cover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scaled {
    /// Name of the scales.
    pub scale: String,
    /// Matrices in the weight (experts that are stacked), rows and columns of one.
    pub matrices: [usize; 3],
    /// Rows and columns that share a scale.
    pub block: [usize; 2],
    /// Whether the description says that scales are powers of two, which floats need not be.
    pub powers: bool,
}

/// The 8-bit weights of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Fp8 {
    /// By name.
    pub weights: BTreeMap<String, Scaled>,
    /// Tensors that nobody sees from outside: scales.
    pub hidden: BTreeSet<String>,
}

impl Fp8 {
    /// What a checkpoint without this method has: no matrices of 8-bit floats.
    pub(super) fn none<'a>(
        mut names: impl Iterator<Item = &'a str>,
        info: impl Fn(&str) -> Option<&'a TensorInfo>,
    ) -> Result<Self, QuantError> {
        let is_matrix =
            |name: &&str| info(name).is_some_and(|info| is_fp8(info) && info.shape.len() > 1);
        match names.find(is_matrix) {
            None => Ok(Self::default()),
            Some(name) => Err(QuantError::UndescribedFp8 {
                tensor: name.to_owned(),
                dtype: info(name).map_or("", |info| info.dtype.name()),
            }),
        }
    }

    /// Finds the weights of a checkpoint that is described by `described`.
    pub(super) fn read<'a>(
        described: &Foreign,
        names: impl Iterator<Item = &'a str>,
        info: impl Fn(&str) -> Option<&'a TensorInfo>,
    ) -> Result<Self, QuantError> {
        let Settings {
            block,
            plain,
            scale_format,
        } = Settings::read(described)?;
        let mut found = Fp8::default();
        for name in names {
            if ACTIVATION_SUFFIXES.iter().any(|end| name.ends_with(end)) {
                found.hidden.insert(name.to_owned());
                continue;
            }
            let Some(weight) = info(name).filter(|info| is_fp8(info)) else {
                continue;
            };
            if weight.dtype != DType::F8E4M3 {
                return Err(QuantError::Fp8 {
                    tensor: name.to_owned(),
                    expected: "F8_E4M3, the one kind of 8-bit float that is read".to_owned(),
                    found: weight.dtype.to_string(),
                });
            }
            let module = name.strip_suffix(".weight").unwrap_or(name);
            if plain.contains(&module) {
                return Err(QuantError::Fp8 {
                    tensor: name.to_owned(),
                    expected: format!("plain floats, as {SKIPPED} lists {module}"),
                    found: weight.dtype.to_string(),
                });
            }
            let candidates = [format!("{name}{SCALE_SUFFIX}"), format!("{module}.scale")];
            let scale = candidates.iter().find_map(|name| Some((name, info(name)?)));
            let Some((scale_name, scale)) = scale else {
                return Err(QuantError::Fp8 {
                    tensor: name.to_owned(),
                    expected: format!("scales `{name}{SCALE_SUFFIX}` beside a weight of F8_E4M3"),
                    found: "none".to_owned(),
                });
            };
            let scaled = fit(name, weight, scale_name, scale, (block, scale_format))?;
            found.hidden.insert(scaled.scale.clone());
            found.weights.insert(name.to_owned(), scaled);
        }
        Ok(found)
    }
}

fn is_fp8(info: &TensorInfo) -> bool {
    matches!(info.dtype, DType::F8E4M3 | DType::F8E5M2)
}

fn fit(
    name: &str,
    weight: &TensorInfo,
    scale_name: &str,
    scale: &TensorInfo,
    (block, scale_format): (Block, ScaleFormat),
) -> Result<Scaled, QuantError> {
    let refuse = |expected: String| {
        Err(QuantError::Fp8 {
            tensor: scale_name.to_owned(),
            expected,
            found: format!("{} {:?}", scale.dtype, scale.shape),
        })
    };
    let is_float = matches!(scale.dtype, DType::F32 | DType::F16 | DType::BF16);
    let (fits, types) = match scale_format {
        ScaleFormat::Unsaid => (scale.dtype == DType::F8E8M0, "F32, F16, BF16 or F8_E8M0"),
        ScaleFormat::Float => (false, "F32, F16 or BF16, as `scale_fmt` is float"),
        ScaleFormat::Exponent => (
            matches!(scale.dtype, DType::F8E8M0 | DType::U8),
            "F8_E8M0 or U8, or floats that are powers of two, as `scale_fmt` is ue8m0",
        ),
    };
    if !fits && !is_float {
        return refuse(format!("scales of {types}"));
    }
    let (leading, [rows, columns]) = match weight.shape.as_slice() {
        [leading @ .., rows, columns] => (leading, [*rows, *columns]),
        shape => {
            return Err(QuantError::Fp8 {
                tensor: name.to_owned(),
                expected: "a matrix, or matrices stacked".to_owned(),
                found: format!("{} {shape:?}", weight.dtype),
            });
        }
    };
    let count = element_count(leading).unwrap_or(0);
    let scaled = |block: [usize; 2]| Scaled {
        scale: scale_name.to_owned(),
        matrices: [count, rows, columns],
        block,
        powers: is_float && scale_format == ScaleFormat::Exponent,
    };
    // A scale for each matrix, whatever ones its shape has.
    let one_each = element_count(&scale.shape) == Some(count);
    let block = match block {
        Block::Of(block) => Some(block),
        Block::Unsaid if !one_each => Some(DEFAULT_BLOCK),
        Block::Unsaid | Block::Matrix => None,
    };
    if let Some([block_rows, block_columns]) = block {
        let mut wanted = leading.to_vec();
        wanted.extend([rows.div_ceil(block_rows), columns.div_ceil(block_columns)]);
        if scale.shape == wanted {
            return Ok(scaled([block_rows, block_columns]));
        }
        return refuse(format!(
            "shape {wanted:?} for blocks of [{block_rows}, {block_columns}] in {:?}",
            weight.shape
        ));
    }
    if one_each {
        return Ok(scaled([rows.max(1), columns.max(1)]));
    }
    refuse(format!(
        "{count} scale(s) for {:?}, as `weight_block_size` is null",
        weight.shape
    ))
}

/// Value of an E4M3 code: sign, 4 bits of exponent (bias 7), 3 bits of fraction; all ones is NaN.
fn e4m3(code: u8) -> f32 {
    let fraction = f32::from(code & 7) / 8.0;
    let exponent = i32::from(code >> 3 & 15);
    let magnitude = match exponent {
        0 => fraction * 2f32.powi(-6),
        15 if code & 7 == 7 => f32::NAN,
        exponent => (1.0 + fraction) * 2f32.powi(exponent - 7),
    };
    if code & 128 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Scales as singles.
fn singles(scales: &TensorData) -> Vec<f32> {
    let bytes = scales.bytes.as_slice();
    match scales.dtype {
        DType::F32 => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect(),
        DType::F16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| f16::from_le_bytes(*b).to_f32())
            .collect(),
        DType::BF16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| bf16::from_le_bytes(*b).to_f32())
            .collect(),
        // A power of two by its biased exponent, all ones is NaN; opening let no other type through.
        _ => bytes
            .iter()
            .map(|b| match *b {
                u8::MAX => f32::NAN,
                exponent => 2f32.powi(i32::from(exponent) - 127),
            })
            .collect(),
    }
}

fn is_power_of_two(scale: f32) -> bool {
    const FRACTION: u32 = (1 << 23) - 1;
    scale.is_normal() && scale > 0.0 && scale.to_bits() & FRACTION == 0
}

/// Plain values of a weight in `float`: `F32`, `F16` or `BF16`.
pub(super) fn dequantize(
    weight: &TensorData,
    scales: &TensorData,
    scaled: &Scaled,
    float: DType,
) -> Result<TensorData, QuantError> {
    let table: Vec<f32> = (0..=255u8).map(e4m3).collect();
    let scales = singles(scales);
    if scaled.powers
        && let Some(other) = scales.iter().find(|scale| !is_power_of_two(**scale))
    {
        return Err(QuantError::Fp8 {
            tensor: scaled.scale.clone(),
            expected: format!("powers of two, as `{SCALE_FORMAT}` is ue8m0"),
            found: other.to_string(),
        });
    }
    let [_, rows, columns] = scaled.matrices;
    let [block_rows, block_columns] = scaled.block;
    let scales_a_row = columns.div_ceil(block_columns);
    let scale_rows = rows.div_ceil(block_rows);
    let codes = weight.bytes.as_slice();
    let size = float.size_bytes();
    let mut buffer = AlignedBuffer::zeroed(codes.len() * size);
    let out = buffer
        .as_mut_slice()
        .chunks_exact_mut((columns * size).max(1));
    for (row, (codes, out)) in codes.chunks_exact(columns.max(1)).zip(out).enumerate() {
        let scale_row = row / rows * scale_rows + row % rows / block_rows;
        let scales = scales.iter().skip(scale_row * scales_a_row);
        let blocks = codes.chunks(block_columns);
        let values = blocks.zip(scales).flat_map(|(codes, scale)| {
            let table = &table;
            codes
                .iter()
                .map(move |code| table.get(usize::from(*code)).unwrap_or(&f32::NAN) * scale)
        });
        match float {
            DType::F32 => {
                for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                    *out = value.to_le_bytes();
                }
            }
            DType::F16 => {
                for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    *out = f16::from_f32(value).to_le_bytes();
                }
            }
            _ => {
                for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    *out = bf16::from_f32(value).to_le_bytes();
                }
            }
        }
    }
    Ok(TensorData {
        dtype: float,
        shape: weight.shape.clone(),
        bytes: buffer.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn tensor(dtype: DType, shape: &[usize], bytes: &[u8]) -> TensorData {
        TensorData {
            dtype,
            shape: shape.to_vec(),
            bytes: AlignedBuffer::copy_of(bytes).into(),
        }
    }

    fn read(config: Value, tensors: &[(&str, DType, &[usize])]) -> Result<Fp8, String> {
        let infos: BTreeMap<&str, TensorInfo> = tensors
            .iter()
            .map(|(name, dtype, shape)| (*name, TensorInfo::new(*dtype, shape.to_vec()).unwrap()))
            .collect();
        let described = Foreign {
            method: METHOD.to_owned(),
            place: "quantization_config".to_owned(),
            settings: config.as_object().unwrap().clone(),
        };
        Fp8::read(&described, infos.keys().copied(), |name| infos.get(name))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn codes_have_the_values_of_the_specification() {
        // Table 2 of the OCP specification: zero, least and largest subnormal, least and largest normal.
        for (code, value) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 0.875 * 2f32.powi(-6)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }

    #[test]
    fn blocks_at_the_borders_are_narrower() {
        let fp8 = read(
            json!({"weight_block_size": [2, 2]}),
            &[
                ("a.weight", DType::F8E4M3, &[3, 3]),
                ("a.weight_scale_inv", DType::F32, &[2, 2]),
            ],
        )
        .unwrap();
        assert!(fp8.hidden.contains("a.weight_scale_inv"));
        let weight = tensor(DType::F8E4M3, &[3, 3], &[0x38; 9]);
        let scales: Vec<u8> = [1f32, 2.0, 3.0, 4.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let scales = tensor(DType::F32, &[2, 2], &scales);
        let plain = dequantize(&weight, &scales, &fp8.weights["a.weight"], DType::F32).unwrap();
        let plain = singles(&plain);
        assert_eq!(plain, [1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0]);
    }

    #[test]
    fn one_scale_a_matrix_and_stacked_matrices() {
        let fp8 = read(
            json!({"weight_block_size": null}),
            &[
                ("e.gate", DType::F8E4M3, &[2, 1, 2]),
                ("e.gate_scale_inv", DType::BF16, &[2, 1, 1]),
                ("e.activation_scale", DType::F32, &[]),
                ("w.weight", DType::F8E4M3, &[1, 2]),
                ("w.weight_scale_inv", DType::F32, &[]),
            ],
        )
        .unwrap();
        assert!(fp8.hidden.contains("e.activation_scale"));
        let weight = tensor(DType::F8E4M3, &[2, 1, 2], &[0x38, 0x40, 0xb8, 0x00]);
        let scales: Vec<u8> = [0.5f32, 2.0]
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect();
        let scales = tensor(DType::BF16, &[2, 1, 1], &scales);
        let half = dequantize(&weight, &scales, &fp8.weights["e.gate"], DType::F16).unwrap();
        assert_eq!(singles(&half), [0.5, 1.0, -2.0, 0.0]);
    }

    #[test]
    fn without_a_block_size_it_is_128_or_a_matrix() {
        for (scales, block) in [
            (&[2, 3][..], [128, 128]),
            (&[], [200, 300]),
            (&[1, 1], [200, 300]),
        ] {
            let weight = ("a.weight", DType::F8E4M3, &[200, 300][..]);
            let fp8 = read(
                json!({}),
                &[weight, ("a.weight_scale_inv", DType::F32, scales)],
            );
            assert_eq!(fp8.unwrap().weights["a.weight"].block, block);
        }
    }

    #[test]
    fn scales_have_the_form_that_is_said() {
        let of = |format: Value, dtype: DType, bytes: &[u8]| {
            let config = json!({"weight_block_size": [2, 2], "scale_fmt": format});
            let weight = ("a.weight", DType::F8E4M3, &[2, 2][..]);
            let fp8 = read(config, &[weight, ("a.weight_scale_inv", dtype, &[1, 1])])?;
            let weight = tensor(DType::F8E4M3, &[2, 2], &[0x38; 4]);
            let scales = tensor(dtype, &[1, 1], bytes);
            let plain = dequantize(&weight, &scales, &fp8.weights["a.weight"], DType::F32);
            plain
                .map(|plain| singles(&plain)[0])
                .map_err(|error| error.to_string())
        };
        let (quarter, third) = (0.25f32.to_le_bytes(), 0.3f32.to_le_bytes());
        for format in [json!("ue8m0"), json!("UE8M0")] {
            for dtype in [DType::F8E8M0, DType::U8] {
                assert_eq!(of(format.clone(), dtype, &[125]), Ok(0.25));
            }
            assert!(of(format.clone(), DType::F8E8M0, &[255]).unwrap().is_nan());
            // DeepSeek-V3.1's are singles.
            assert_eq!(of(format, DType::F32, &quarter), Ok(0.25));
        }
        assert_eq!(of(json!("float"), DType::F32, &third), Ok(0.3));
        assert_eq!(of(Value::Null, DType::F8E8M0, &[125]), Ok(0.25));
        let refusals = [
            of(json!("ue8m0"), DType::F32, &third),
            of(json!("ue8m0"), DType::F32, &(-0.25f32).to_le_bytes()),
            of(json!("ue8m0"), DType::I32, &[0; 4]),
            of(json!("float"), DType::F8E8M0, &[125]),
            of(Value::Null, DType::U8, &[125]),
            of(json!("e4m3"), DType::F32, &quarter),
            of(json!(8), DType::F32, &quarter),
        ]
        .map(Result::unwrap_err);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
    `a.weight_scale_inv`: expected powers of two, as `scale_fmt` is ue8m0, found 0.3
    `a.weight_scale_inv`: expected powers of two, as `scale_fmt` is ue8m0, found -0.25
    `a.weight_scale_inv`: expected scales of F8_E8M0 or U8, or floats that are powers of two, as `scale_fmt` is ue8m0, found I32 [1, 1]
    `a.weight_scale_inv`: expected scales of F32, F16 or BF16, as `scale_fmt` is float, found F8_E8M0 [1, 1]
    `a.weight_scale_inv`: expected scales of F32, F16, BF16 or F8_E8M0, found U8 [1, 1]
    `quantization_config.scale_fmt` in config.json: expected float or ue8m0, found "e4m3"
    `quantization_config.scale_fmt` in config.json: expected float or ue8m0, found 8
    "#);
    }

    #[test]
    fn matrices_of_8_bit_floats_need_a_description() {
        let info = TensorInfo::new(DType::F8E4M3, vec![2, 2]).unwrap();
        let error = Fp8::none(["a.weight"].into_iter(), |_| Some(&info)).unwrap_err();
        insta::assert_snapshot!(error.to_string(), @"`a.weight` is F8_E4M3, but config.json has no `quantization_config` that says how: expected quant_method fp8 with F8_E4M3 weights and scales beside them, or weights of F32, F16 or BF16");
        let vector = TensorInfo::new(DType::F8E4M3, vec![2]).unwrap();
        assert!(Fp8::none(["a"].into_iter(), |_| Some(&vector)).is_ok());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let weight = ("a.weight", DType::F8E4M3, &[3, 3][..]);
        let refusals = [
            read(json!({"weight_block_size": [2]}), &[weight]),
            read(json!({"weight_block_size": [0, 2]}), &[weight]),
            read(json!({"weight_block_size": [2, 2]}), &[weight]),
            read(
                json!({"weight_block_size": [2, 2]}),
                &[weight, ("a.weight_scale_inv", DType::F32, &[1, 2])],
            ),
            read(
                json!({"weight_block_size": null}),
                &[weight, ("a.weight_scale_inv", DType::F32, &[3])],
            ),
            read(
                json!({}),
                &[weight, ("a.weight_scale_inv", DType::F32, &[3])],
            ),
            read(json!({}), &[("a.weight", DType::F8E5M2, &[3, 3])]),
            read(json!({"fmt": "e5m2"}), &[]),
            read(json!({"activation_scheme": 8}), &[]),
            read(json!({"expert_dtype": "fp6"}), &[]),
            read(json!({"modules_to_not_convert": "lm_head"}), &[]),
            read(json!({"modules_to_not_convert": [1]}), &[]),
            read(
                json!({"modules_to_not_convert": ["a"]}),
                &[weight, ("a.weight_scale_inv", DType::F32, &[])],
            ),
            read(
                json!({}),
                &[weight, ("a.weight_scale_inv", DType::I32, &[])],
            ),
            read(
                json!({}),
                &[
                    ("a.weight", DType::F8E4M3, &[3]),
                    ("a.scale", DType::F32, &[]),
                ],
            ),
        ]
        .map(Result::unwrap_err);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        `quantization_config.weight_block_size` in config.json: expected null or a list of two positive integers, found [2]
        `quantization_config.weight_block_size` in config.json: expected null or a list of two positive integers, found [0,2]
        `a.weight`: expected scales `a.weight_scale_inv` beside a weight of F8_E4M3, found none
        `a.weight_scale_inv`: expected shape [2, 2] for blocks of [2, 2] in [3, 3], found F32 [1, 2]
        `a.weight_scale_inv`: expected 1 scale(s) for [3, 3], as `weight_block_size` is null, found F32 [3]
        `a.weight_scale_inv`: expected shape [1, 1] for blocks of [128, 128] in [3, 3], found F32 [3]
        `a.weight`: expected F8_E4M3, the one kind of 8-bit float that is read, found F8_E5M2
        `quantization_config.fmt` in config.json: expected e4m3, found "e5m2"
        `quantization_config.activation_scheme` in config.json: expected dynamic or static, found 8
        `quantization_config.expert_dtype` in config.json: expected fp8 or fp4, found "fp6"
        `quantization_config.modules_to_not_convert` in config.json: expected null or a list of module names, found "lm_head"
        `quantization_config.modules_to_not_convert` in config.json: expected null or a list of module names, found [1]
        `a.weight`: expected plain floats, as modules_to_not_convert lists a, found F8_E4M3
        `a.weight_scale_inv`: expected scales of F32, F16, BF16 or F8_E8M0, found I32 []
        `a.weight`: expected a matrix, or matrices stacked, found F8_E4M3 [3]
        "#);
    }
}
