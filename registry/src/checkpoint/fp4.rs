//! 4-bit weights beside 8-bit floats (`quant_method` `fp8`, `expert_dtype` `fp4`), as DeepSeek-V4 ships its
//! experts: `I8` tensors of two E2M1 codes a byte, the first in the lower half, and an E8M0 scale for each
//! 32 elements of a row (MXFP4 of the OCP microscaling specification).
//!
//! Eight such codes are a little-endian word and a scale is its byte, so that MLX's `mxfp4` is the same
//! bytes under other names and types: headers change here, no data. Must not know any architecture.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::dtype::{DType, TensorInfo};
use super::fp8_settings::{SCALE_FORMAT, SKIPPED, ScaleFormat, Settings};
use super::quant::{Foreign, QuantError, QuantMode, QuantSpec};
use super::safetensors::SafetensorsEntry;
use crate::shown;

/// Says of what type experts are, in the description or, in older files, beside it.
const KEY: &str = "expert_dtype";
const GROUP: usize = 32;
const CODES_A_BYTE: usize = 2;
const BYTES_A_WORD: usize = 4;

/// What the weights are called from here on.
pub(super) const SPEC: QuantSpec = QuantSpec {
    mode: QuantMode::Mxfp4,
    bits: 4,
    group_size: GROUP as u32,
};

/// Tensors of a checkpoint with the file that each is in.
type Tensors = BTreeMap<String, (usize, SafetensorsEntry)>;

/// Gives 4-bit weights the names, types and shapes of `mxfp4`. Returns their modules.
pub(super) fn rename(
    described: &Foreign,
    config: &Map<String, Value>,
    tensors: &mut Tensors,
) -> Result<Vec<String>, QuantError> {
    let said = expert_dtype(described, config)?;
    let settings = Settings::read(described)?;
    let is_packed = |(name, (_, entry)): (&String, &(usize, SafetensorsEntry))| {
        let is_matrix = entry.info.dtype == DType::I8 && entry.info.shape.len() > 1;
        let module = name.strip_suffix(".weight").filter(|_| is_matrix);
        module.map(str::to_owned)
    };
    let modules: Vec<String> = tensors.iter().filter_map(is_packed).collect();
    if let Some((place, "fp4")) = &said
        && modules.is_empty()
    {
        return Err(QuantError::Key {
            place: place.clone(),
            key: KEY.to_owned(),
            expected: "fp8 or no such key, as no weight is packed in I8",
            found: "\"fp4\"".to_owned(),
        });
    }
    if let Some(module) = modules.first()
        && settings.scale_format == ScaleFormat::Float
    {
        return Err(QuantError::Key {
            place: described.place.clone(),
            key: SCALE_FORMAT.to_owned(),
            expected: "ue8m0 or no such key, as weights are packed in I8, whose scales are exponents",
            found: format!("\"float\" (beside `{module}.weight`)"),
        });
    }
    for module in &modules {
        let plain = match &said {
            Some((_, "fp8")) => Some(format!("F8_E4M3, as {KEY} is fp8")),
            _ if settings.plain.contains(&module.as_str()) => {
                Some(format!("plain floats, as {SKIPPED} lists {module}"))
            }
            _ => None,
        };
        if let Some(expected) = plain {
            return Err(refusal(
                format!("{module}.weight"),
                expected,
                "I8".to_owned(),
            ));
        }
        rename_module(module, tensors)?;
    }
    Ok(modules)
}

fn refusal(tensor: String, expected: String, found: String) -> QuantError {
    QuantError::Fp8 {
        tensor,
        expected,
        found,
    }
}

/// Where the type of experts is said, and which it is.
fn expert_dtype(
    described: &Foreign,
    config: &Map<String, Value>,
) -> Result<Option<(String, &'static str)>, QuantError> {
    let mut said: Option<(String, &'static str)> = None;
    let text = config.get("text_config").and_then(Value::as_object);
    for (place, object) in [
        (described.place.as_str(), Some(&described.settings)),
        ("<root>", Some(config)),
        ("text_config", text),
    ] {
        let value = match object.and_then(|object| object.get(KEY)) {
            None | Some(Value::Null) => continue,
            Some(value) => value,
        };
        let wrong = |expected| QuantError::Key {
            place: place.to_owned(),
            key: KEY.to_owned(),
            expected,
            found: shown(value),
        };
        let word = value.as_str().map(str::to_ascii_lowercase);
        let dtype = match word.as_deref() {
            Some("fp4") => "fp4",
            Some("fp8") => "fp8",
            _ => return Err(wrong("fp8 or fp4")),
        };
        match &said {
            Some((_, other)) if *other != dtype => {
                let expected = match *other {
                    "fp8" => "fp8, as the other place that says it",
                    _ => "fp4, as the other place that says it",
                };
                return Err(wrong(expected));
            }
            Some(_) => {}
            None => said = Some((place.to_owned(), dtype)),
        }
    }
    Ok(said)
}

fn rename_module(module: &str, tensors: &mut Tensors) -> Result<(), QuantError> {
    let name = format!("{module}.weight");
    let scales_name = format!("{module}.scales");
    let candidates = [format!("{module}.scale"), format!("{name}_scale_inv")];
    let found = candidates.iter().find(|name| tensors.contains_key(*name));
    let (Some(scale_name), Some((_, weight))) = (found, tensors.get(&name)) else {
        let [expected, other] = candidates;
        let expected = format!("scales `{expected}` or `{other}` beside a weight of I8");
        return Err(refusal(name, expected, "none".to_owned()));
    };
    let weight = weight.info.clone();
    let (packed, scales) = match (tensors.get(scale_name), as_words(&weight)) {
        (Some((_, scale)), Some((packed, scales))) if fits(&scale.info, &scales) => {
            (packed, scales)
        }
        (Some((_, scale)), Some((_, scales))) => {
            let expected = format!(
                "F8_E8M0 or U8 of shape {:?}, a scale for each {GROUP} codes in {:?}",
                scales.shape, weight.shape
            );
            let found = format!("{} {:?}", scale.info.dtype, scale.info.shape);
            return Err(refusal(scale_name.clone(), expected, found));
        }
        _ => {
            let bytes = GROUP / CODES_A_BYTE;
            let expected = format!("rows of a multiple of {bytes} bytes, {GROUP} codes");
            return Err(refusal(name, expected, format!("I8 {:?}", weight.shape)));
        }
    };
    if tensors.contains_key(&scales_name) {
        let expected = format!("no such tensor beside `{scale_name}`");
        return Err(refusal(scales_name, expected, "one".to_owned()));
    }
    if let Some((_, entry)) = tensors.get_mut(&name) {
        entry.info = packed;
    }
    if let Some((file, entry)) = tensors.remove(scale_name) {
        let entry = SafetensorsEntry {
            info: scales,
            ..entry
        };
        tensors.insert(scales_name, (file, entry));
    }
    Ok(())
}

fn fits(scale: &TensorInfo, wanted: &TensorInfo) -> bool {
    matches!(scale.dtype, DType::F8E8M0 | DType::U8) && scale.shape == wanted.shape
}

/// A weight and its scales as `mxfp4` has them. None where a row is no whole number of groups.
fn as_words(weight: &TensorInfo) -> Option<(TensorInfo, TensorInfo)> {
    let (bytes, leading) = weight.shape.split_last()?;
    let codes = bytes.checked_mul(CODES_A_BYTE)?;
    if !codes.is_multiple_of(GROUP) {
        return None;
    }
    let shape = |last: usize| leading.iter().copied().chain([last]).collect();
    Some((
        TensorInfo::new(DType::U32, shape(bytes / BYTES_A_WORD))?,
        TensorInfo::new(DType::U8, shape(codes / GROUP))?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    type Header<'a> = &'a [(&'a str, DType, &'a [usize])];

    fn rename_all(config: Value, header: Header<'_>) -> Result<Vec<String>, String> {
        let entry = |(name, dtype, shape): &(&str, DType, &[usize])| {
            let info = TensorInfo::new(*dtype, shape.to_vec()).unwrap();
            let range = 0..info.byte_len;
            ((*name).to_owned(), (0, SafetensorsEntry { info, range }))
        };
        let mut tensors: Tensors = header.iter().map(entry).collect();
        let config = config.as_object().unwrap();
        let described = Foreign {
            method: "fp8".to_owned(),
            place: "quantization_config".to_owned(),
            settings: config["quantization_config"].as_object().unwrap().clone(),
        };
        rename(&described, config, &mut tensors).map_err(|error| error.to_string())?;
        let shown = |(name, (_, entry)): (&String, &(usize, SafetensorsEntry))| {
            let info = &entry.info;
            assert_eq!(info.byte_len, entry.range.len(), "{name}: the same bytes");
            format!("{name} {} {:?}", info.dtype, info.shape)
        };
        Ok(tensors.iter().map(shown).collect())
    }

    const WEIGHT: (&str, DType, &[usize]) = ("e.w1.weight", DType::I8, &[6, 32]);
    const SCALE: (&str, DType, &[usize]) = ("e.w1.scale", DType::F8E8M0, &[6, 2]);

    #[test]
    fn packed_weights_are_mxfp4_by_another_name() {
        let expected = ["e.w1.scales U8 [6, 2]", "e.w1.weight U32 [6, 8]"];
        for config in [
            json!({"quantization_config": {}, "expert_dtype": "fp4"}),
            json!({"quantization_config": {"expert_dtype": "FP4"}, "expert_dtype": "fp4"}),
            json!({"quantization_config": {}}),
        ] {
            assert_eq!(rename_all(config, &[WEIGHT, SCALE]).unwrap(), expected);
        }
        let other = ("e.w1.weight_scale_inv", DType::U8, &[2, 3, 1][..]);
        let stacked = ("e.w1.weight", DType::I8, &[2, 3, 16][..]);
        let config = json!({"quantization_config": {}});
        assert_eq!(
            rename_all(config, &[stacked, other]).unwrap(),
            ["e.w1.scales U8 [2, 3, 1]", "e.w1.weight U32 [2, 3, 4]"]
        );
        let untouched: Header<'_> = &[
            ("table", DType::I8, &[6, 32]),
            ("row.weight", DType::I8, &[32]),
            ("f.weight", DType::F8E4M3, &[6, 32]),
        ];
        let names = rename_all(json!({"quantization_config": {}}), untouched).unwrap();
        assert_eq!(
            names,
            [
                "f.weight F8_E4M3 [6, 32]",
                "row.weight I8 [32]",
                "table I8 [6, 32]"
            ]
        );
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let plain = json!({"quantization_config": {}});
        let refusals = [
            rename_all(plain.clone(), &[WEIGHT]),
            rename_all(
                plain.clone(),
                &[("e.w1.weight", DType::I8, &[6, 24]), SCALE],
            ),
            rename_all(
                plain.clone(),
                &[WEIGHT, ("e.w1.scale", DType::F8E8M0, &[6, 1])],
            ),
            rename_all(
                plain.clone(),
                &[WEIGHT, ("e.w1.scale", DType::F32, &[6, 2])],
            ),
            rename_all(
                plain.clone(),
                &[WEIGHT, SCALE, ("e.w1.scales", DType::U8, &[6, 2])],
            ),
            rename_all(
                json!({"quantization_config": {"modules_to_not_convert": ["e.w1"]}}),
                &[WEIGHT, SCALE],
            ),
            rename_all(
                json!({"quantization_config": {}, "expert_dtype": "fp8"}),
                &[WEIGHT, SCALE],
            ),
            rename_all(
                json!({"quantization_config": {"expert_dtype": "fp8"}, "expert_dtype": "fp4"}),
                &[WEIGHT, SCALE],
            ),
            rename_all(
                json!({"quantization_config": {}, "expert_dtype": "fp4"}),
                &[],
            ),
            rename_all(
                json!({"quantization_config": {}, "expert_dtype": "int4"}),
                &[],
            ),
            rename_all(
                json!({"quantization_config": {"scale_fmt": "float"}}),
                &[WEIGHT, SCALE],
            ),
        ]
        .map(Result::unwrap_err);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
    `e.w1.weight`: expected scales `e.w1.scale` or `e.w1.weight_scale_inv` beside a weight of I8, found none
    `e.w1.weight`: expected rows of a multiple of 16 bytes, 32 codes, found I8 [6, 24]
    `e.w1.scale`: expected F8_E8M0 or U8 of shape [6, 2], a scale for each 32 codes in [6, 32], found F8_E8M0 [6, 1]
    `e.w1.scale`: expected F8_E8M0 or U8 of shape [6, 2], a scale for each 32 codes in [6, 32], found F32 [6, 2]
    `e.w1.scales`: expected no such tensor beside `e.w1.scale`, found one
    `e.w1.weight`: expected plain floats, as modules_to_not_convert lists e.w1, found I8
    `e.w1.weight`: expected F8_E4M3, as expert_dtype is fp8, found I8
    `<root>.expert_dtype` in config.json: expected fp8, as the other place that says it, found "fp4"
    `<root>.expert_dtype` in config.json: expected fp8 or no such key, as no weight is packed in I8, found "fp4"
    `<root>.expert_dtype` in config.json: expected fp8 or fp4, found "int4"
    `quantization_config.scale_fmt` in config.json: expected ue8m0 or no such key, as weights are packed in I8, whose scales are exponents, found "float" (beside `e.w1.weight`)
    "#);
    }
}
