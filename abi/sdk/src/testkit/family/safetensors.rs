//! Reading of small safetensors files for golden data. The product's reader is the host's; this one
//! knows no sharding and trusts its files a little more.

use mlxcel_abi::DType;
use serde_json::Value as Json;

use super::MapWeights;
use crate::{Error, Result};

fn bad(what: impl Into<String>) -> Error {
    Error::Other(format!("safetensors: {}", what.into()))
}

fn dtype_of(name: &str) -> Option<DType> {
    DType::from_name(&name.to_ascii_lowercase())
}

/// Tensors of a file that was read whole.
pub(super) fn parse(bytes: &[u8]) -> Result<MapWeights> {
    let (length, rest) = bytes
        .split_first_chunk::<8>()
        .ok_or_else(|| bad("the file has no header"))?;
    let length =
        usize::try_from(u64::from_le_bytes(*length)).map_err(|_| bad("the header is too long"))?;
    if length > rest.len() {
        return Err(bad(format!(
            "the header has {length} bytes, the file {}",
            rest.len()
        )));
    }
    let (header, data) = rest.split_at(length);
    let header: Json = serde_json::from_slice(header).map_err(|e| bad(e.to_string()))?;
    let entries = header
        .as_object()
        .ok_or_else(|| bad("the header is no object"))?;
    let mut weights = MapWeights::new();
    for (name, entry) in entries
        .iter()
        .filter(|(name, _)| name.as_str() != "__metadata__")
    {
        let wrong = || bad(format!("entry \"{name}\" is not understood: {entry}"));
        let dtype = entry
            .get("dtype")
            .and_then(Json::as_str)
            .and_then(dtype_of)
            .ok_or_else(wrong)?;
        let list = |key: &str| -> Option<Vec<i64>> {
            entry
                .get(key)?
                .as_array()?
                .iter()
                .map(Json::as_i64)
                .collect()
        };
        let shape = list("shape").ok_or_else(wrong)?;
        let range = match list("data_offsets").ok_or_else(wrong)?[..] {
            [start, end] if 0 <= start && start <= end => start as usize..end as usize,
            _ => return Err(wrong()),
        };
        let bytes = data
            .get(range)
            .ok_or_else(|| bad(format!("\"{name}\" lies outside the file")))?;
        weights.insert(name, dtype, &shape, bytes.to_vec())?;
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [
            &(header.len() as u64).to_le_bytes(),
            header.as_bytes(),
            data,
        ]
        .concat()
    }

    #[test]
    fn a_file_gives_its_tensors() {
        let header =
            r#"{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let weights = parse(&file(header, &[0; 8])).unwrap();
        assert_eq!(weights.info("w"), Some((DType::F32, [2].as_slice())));
    }

    #[test]
    fn damaged_files_are_refused() {
        let entry = |dtype: &str, shape: &str, offsets: &str| {
            let header = format!(
                r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#
            );
            parse(&file(&header, &[0; 8])).map(|_| ())
        };
        assert!(entry("F32", "[2]", "[0,8]").is_ok());
        for (dtype, shape, offsets) in [
            ("F33", "[2]", "[0,8]"),
            ("F32", "[3]", "[0,8]"),
            ("F32", "[2]", "[0,9]"),
            ("F32", "[2]", "[8,0]"),
            ("F32", "2", "[0,8]"),
        ] {
            assert!(
                entry(dtype, shape, offsets).is_err(),
                "{dtype} {shape} {offsets}"
            );
        }
        assert!(parse(&[1, 2, 3]).is_err());
        assert!(parse(&u64::MAX.to_le_bytes()).is_err());
    }
}
