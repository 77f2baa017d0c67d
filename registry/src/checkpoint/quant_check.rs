//! Compares what `config.json` says of quantised weights with the tensors that are there.
//!
//! Works on headers alone. Owns no state.

use super::dtype::{DType, TensorInfo};
use super::quant::{QuantError, QuantMismatch, QuantMode, QuantSpec, QuantTable};

/// Bits of the words that carry packed codes.
const WORD_BITS: u128 = 32;

/// Checks every module that has packed weights or an override.
///
/// `names` lists the tensors, `info` looks one up.
pub(super) fn check<'a>(
    table: &QuantTable,
    names: impl Iterator<Item = &'a str>,
    info: impl Fn(&str) -> Option<&'a TensorInfo>,
) -> Result<(), QuantError> {
    for name in names {
        let Some(path) = name.strip_suffix(".scales") else {
            continue;
        };
        // A tensor of another kind may be called `scales` too: only packed weights count.
        let weight = info(&format!("{path}.weight"));
        let (Some(weight), Some(scales)) = (weight, info(name)) else {
            continue;
        };
        if weight.dtype != DType::U32 {
            continue;
        }
        let spec = spec_of(table, path, weight, scales)?;
        check_shapes(path, &spec, weight, scales)?;
        check_parts(path, &spec, scales, info(&format!("{path}.biases")))?;
    }
    for (path, spec) in &table.overrides {
        let weight = info(&format!("{path}.weight"));
        let scales = info(&format!("{path}.scales"));
        if let (Some(spec), Some(weight), None) = (spec, weight, scales) {
            return Err(QuantError::Part {
                tensor: format!("{path}.scales"),
                expected: "scales beside the weight".to_owned(),
                found: format!(
                    "none, and a {} weight of shape {:?}",
                    weight.dtype, weight.shape
                ),
                spec: *spec,
            });
        }
    }
    Ok(())
}

fn spec_of(
    table: &QuantTable,
    path: &str,
    weight: &TensorInfo,
    scales: &TensorInfo,
) -> Result<QuantSpec, QuantError> {
    match table.overrides.get(path) {
        Some(Some(spec)) => Ok(*spec),
        Some(None) => Err(QuantError::NotQuantised {
            path: path.to_owned(),
        }),
        None => table.global.ok_or_else(|| QuantError::Undescribed {
            weight: format!("{path}.weight"),
            weight_shape: weight.shape.clone(),
            scales_shape: scales.shape.clone(),
            fits: fits(weight, scales),
        }),
    }
}

fn check_shapes(
    path: &str,
    spec: &QuantSpec,
    weight: &TensorInfo,
    scales: &TensorInfo,
) -> Result<(), QuantError> {
    if fit(spec, weight, scales) {
        return Ok(());
    }
    Err(QuantError::Mismatch(Box::new(QuantMismatch {
        weight: format!("{path}.weight"),
        weight_shape: weight.shape.clone(),
        scales_shape: scales.shape.clone(),
        spec: *spec,
        expected_bits: spec.bits * spec.group_size,
        found: bits_per_group(weight, scales),
        fits: fits(weight, scales),
    })))
}

fn check_parts(
    path: &str,
    spec: &QuantSpec,
    scales: &TensorInfo,
    biases: Option<&TensorInfo>,
) -> Result<(), QuantError> {
    let part = |tensor: &str, expected: String, found: String| {
        Err(QuantError::Part {
            tensor: format!("{path}.{tensor}"),
            expected,
            found,
            spec: *spec,
        })
    };
    let describe = |info: &TensorInfo| format!("{} {:?}", info.dtype, info.shape);
    if spec.mode != QuantMode::Affine {
        if scales.dtype != DType::U8 {
            return part("scales", "U8".to_owned(), scales.dtype.to_string());
        }
        return match biases {
            None => Ok(()),
            Some(biases) => part("biases", "no such tensor".to_owned(), describe(biases)),
        };
    }
    if !matches!(scales.dtype, DType::F16 | DType::BF16 | DType::F32) {
        return part(
            "scales",
            "F16, BF16 or F32".to_owned(),
            scales.dtype.to_string(),
        );
    }
    match biases {
        Some(biases) if biases.dtype == scales.dtype && biases.shape == scales.shape => Ok(()),
        Some(biases) => part("biases", describe(scales), describe(biases)),
        None => part("biases", describe(scales), "none".to_owned()),
    }
}

/// Packed width times 32 is the number of groups times the bits of a group.
fn fit(spec: &QuantSpec, weight: &TensorInfo, scales: &TensorInfo) -> bool {
    let (Some((words, outer)), Some((groups, scales_outer))) =
        (weight.shape.split_last(), scales.shape.split_last())
    else {
        return false;
    };
    let group_bits = u128::from(spec.bits) * u128::from(spec.group_size);
    outer == scales_outer && *words as u128 * WORD_BITS == *groups as u128 * group_bits
}

/// Bits that the shapes give a group, in words.
fn bits_per_group(weight: &TensorInfo, scales: &TensorInfo) -> String {
    let (Some((words, outer)), Some((groups, scales_outer))) =
        (weight.shape.split_last(), scales.shape.split_last())
    else {
        return "a scalar".to_owned();
    };
    let bits = *words as u128 * WORD_BITS;
    match bits.checked_div(*groups as u128) {
        _ if outer != scales_outer => "another number of rows".to_owned(),
        Some(each) if each * *groups as u128 == bits => format!("{each} bits"),
        _ => format!("{bits} bits for {groups} groups"),
    }
}

/// The specs that fit the shapes, in words.
fn fits(weight: &TensorInfo, scales: &TensorInfo) -> String {
    let mut found = Vec::new();
    for mode in QuantMode::ALL {
        if (mode == QuantMode::Affine) == (scales.dtype == DType::U8) {
            continue;
        }
        let (bits, groups) = mode.supported();
        for &group_size in groups {
            for &bits in bits {
                let spec = QuantSpec {
                    mode,
                    bits,
                    group_size,
                };
                if fit(&spec, weight, scales) {
                    found.push(spec.to_string());
                }
            }
        }
    }
    match found.is_empty() {
        true => "no known quantisation fits".to_owned(),
        false => format!("{} would fit", found.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn info(dtype: DType, shape: &[usize]) -> TensorInfo {
        TensorInfo::new(dtype, shape.to_vec()).unwrap()
    }

    fn verdict(table: &QuantTable, tensors: &[(&str, TensorInfo)]) -> String {
        let tensors: BTreeMap<&str, &TensorInfo> = tensors.iter().map(|(n, i)| (*n, i)).collect();
        match check(table, tensors.keys().copied(), |name| {
            tensors.get(name).copied()
        }) {
            Ok(()) => "fits".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    fn global(mode: QuantMode, bits: u32, group_size: u32) -> QuantTable {
        QuantTable {
            global: Some(QuantSpec {
                mode,
                bits,
                group_size,
            }),
            ..QuantTable::default()
        }
    }

    fn affine_parts(weight: &[usize], scales: &[usize]) -> Vec<(&'static str, TensorInfo)> {
        vec![
            ("a.weight", info(DType::U32, weight)),
            ("a.scales", info(DType::F16, scales)),
            ("a.biases", info(DType::F16, scales)),
        ]
    }

    #[test]
    fn matching_shapes_pass() {
        let four = global(QuantMode::Affine, 4, 64);
        assert_eq!(verdict(&four, &affine_parts(&[8, 16], &[8, 2])), "fits");
        assert_eq!(
            verdict(&four, &affine_parts(&[3, 8, 16], &[3, 8, 2])),
            "fits"
        );
        let three = global(QuantMode::Affine, 3, 32);
        assert_eq!(verdict(&three, &affine_parts(&[8, 6], &[8, 2])), "fits");
        let nvfp4 = global(QuantMode::Nvfp4, 4, 16);
        let parts = [
            ("a.weight", info(DType::U32, &[2, 8])),
            ("a.scales", info(DType::U8, &[2, 4])),
        ];
        assert_eq!(verdict(&nvfp4, &parts), "fits");
        let other = [
            ("a.weight", info(DType::F16, &[2, 8])),
            ("a.scales", info(DType::F16, &[5])),
        ];
        assert_eq!(verdict(&QuantTable::default(), &other), "fits");
    }

    #[test]
    fn contradictions_say_what_would_fit() {
        let four = global(QuantMode::Affine, 4, 64);
        let mut not = global(QuantMode::Affine, 4, 64);
        not.overrides.insert("a".to_owned(), None);
        let mut plain = global(QuantMode::Affine, 4, 64);
        plain.overrides.insert("a".to_owned(), four.global);
        let mut no_biases = affine_parts(&[8, 16], &[8, 2]);
        no_biases.pop();
        let mut wide = affine_parts(&[8, 16], &[8, 2]);
        wide[1].1 = info(DType::U8, &[8, 2]);
        let refusals = [
            verdict(&four, &affine_parts(&[8, 32], &[8, 2])),
            verdict(&four, &affine_parts(&[8, 16], &[4, 2])),
            verdict(&QuantTable::default(), &affine_parts(&[8, 32], &[8, 4])),
            verdict(&not, &affine_parts(&[8, 16], &[8, 2])),
            verdict(&plain, &[("a.weight", info(DType::F16, &[8, 64]))]),
            verdict(&four, &no_biases),
            verdict(&four, &wide),
            verdict(
                &global(QuantMode::Mxfp4, 4, 32),
                &affine_parts(&[8, 8], &[8, 2]),
            ),
        ];
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        `a.weight` of shape [8, 32] with scales [8, 2] cannot be affine bits 4 group_size 64, as config.json says: expected 256 bits a group, found 512 bits; affine bits 8 group_size 64 or affine bits 4 group_size 128 would fit
        `a.weight` of shape [8, 16] with scales [4, 2] cannot be affine bits 4 group_size 64, as config.json says: expected 256 bits a group, found another number of rows; no known quantisation fits
        `a.weight` of shape [8, 32] with scales [8, 4] is packed, but config.json has no `quantization` that says how: affine bits 8 group_size 32 or affine bits 4 group_size 64 or affine bits 2 group_size 128 would fit
        config.json says that `a` is not quantised, but `a.scales` exists
        `a.scales`: expected scales beside the weight for affine bits 4 group_size 64, found none, and a F16 weight of shape [8, 64]
        `a.biases`: expected F16 [8, 2] for affine bits 4 group_size 64, found none
        `a.scales`: expected F16, BF16 or F32 for affine bits 4 group_size 64, found U8
        `a.scales`: expected U8 for mxfp4 bits 4 group_size 32, found F16
        "#);
    }
}
