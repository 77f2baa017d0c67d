//! In which type keys and values are kept.

use serde_json::Value;

use crate::plugin::{DType, SelectedBackend};

use super::error::EngineError;

/// Types that are asked for; none is that of the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvTypes {
    /// Of keys.
    pub keys: Option<DType>,
    /// Of values.
    pub values: Option<DType>,
}

impl KvTypes {
    /// One type for both.
    pub fn both(dtype: DType) -> Self {
        Self {
            keys: Some(dtype),
            values: Some(dtype),
        }
    }

    /// The type of the pool. One other than the activations' needs a backend that says that it has it.
    pub fn resolve(
        self,
        activations: DType,
        backend: &SelectedBackend,
    ) -> Result<DType, EngineError> {
        let kept = backend.report.details.get("kv_dtypes");
        self.among(activations, backend.plugin.name(), kept)
    }

    fn among(
        self,
        activations: DType,
        backend: &str,
        kept: Option<&Value>,
    ) -> Result<DType, EngineError> {
        let [keys, values] = [self.keys, self.values].map(|dtype| dtype.unwrap_or(activations));
        if keys != values {
            return Err(EngineError::KvTypesDiffer {
                keys: keys.name(),
                values: values.name(),
            });
        }
        let listed = |name: &Value| name.as_str() == Some(keys.name());
        let is_kept = kept
            .and_then(Value::as_array)
            .is_some_and(|names| names.iter().any(listed));
        if keys != activations && !is_kept {
            return Err(EngineError::KvTypeUnsupported {
                asked: keys.name(),
                activations: activations.name(),
                backend: backend.to_owned(),
            });
        }
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn another_type_needs_a_backend_that_lists_it_and_both_halves() {
        let kept = json!(["f32", "f16"]);
        let f16 = KvTypes::both(DType::F16);
        let with = |types: KvTypes, activations, kept| {
            types
                .among(activations, "toy", kept)
                .map(DType::name)
                .map_err(|error| error.to_string())
        };
        assert_eq!(with(KvTypes::default(), DType::BF16, None), Ok("bf16"));
        assert_eq!(with(f16, DType::F16, None), Ok("f16"));
        assert_eq!(with(f16, DType::F32, Some(&kept)), Ok("f16"));
        let keys_alone = KvTypes {
            keys: Some(DType::F16),
            values: None,
        };
        assert_eq!(with(keys_alone, DType::F16, None), Ok("f16"));
        let refused = [
            with(f16, DType::F32, None),
            with(KvTypes::both(DType::BF16), DType::F32, Some(&kept)),
            with(keys_alone, DType::F32, Some(&kept)),
        ]
        .map(Result::unwrap_err);
        insta::assert_snapshot!(refused.join("\n"), @r"
        backend toy does not keep keys and values in f16 beside activations in f32: leave --cache-type-k and --cache-type-v out, or set --dtype f16
        backend toy does not keep keys and values in bf16 beside activations in f32: leave --cache-type-k and --cache-type-v out, or set --dtype bf16
        keys would be kept in f16 and values in f32: give --cache-type-k and --cache-type-v the same type
        ");
    }
}
