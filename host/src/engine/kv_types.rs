//! In which type keys and values are kept.

use serde_json::Value;

use crate::plugin::{DType, SelectedBackend};

use super::desc::{CacheDesc, ModelDesc};
use super::error::EngineError;
use super::load::Precision;

/// Elements that share a scale in quantised rows.
const GROUP: usize = 32;

/// Bytes of a scale, which is f16.
const SCALE_BYTES: usize = 2;

/// A type of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// Plain elements.
    Float(DType),
    /// A byte an element and an f16 scale for 32 of them.
    Q8_0,
    /// Half a byte an element and an f16 scale for 32 of them.
    Q4_0,
}

impl From<DType> for KvType {
    fn from(dtype: DType) -> Self {
        Self::Float(dtype)
    }
}

impl KvType {
    /// Quantised types.
    pub const QUANTISED: [Self; 2] = [Self::Q8_0, Self::Q4_0];

    /// As flags, reports and backends' `kv_dtypes` have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(dtype) => dtype.name(),
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    /// The type called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        let quantised = Self::QUANTISED.into_iter().find(|kind| kind.name() == name);
        quantised.or_else(|| DType::from_name(name).map(Self::Float))
    }

    /// Element type of the pool's tensors: quantised rows are bytes, scales in front of codes.
    pub fn storage(self) -> DType {
        match self {
            Self::Float(dtype) => dtype,
            Self::Q8_0 | Self::Q4_0 => DType::U8,
        }
    }

    /// Elements of the pool's tensors that a row of `width` takes.
    pub fn stored_width(self, width: usize) -> usize {
        let scales = width.div_ceil(GROUP) * SCALE_BYTES;
        match self {
            Self::Float(_) => width,
            Self::Q8_0 => width + scales,
            Self::Q4_0 => width.div_ceil(2) + scales,
        }
    }

    /// Bytes that a row of `width` takes.
    pub fn row_bytes(self, width: usize) -> usize {
        self.stored_width(width) * self.storage().size_bytes()
    }

    /// What of a model cannot be kept in this type, if anything.
    fn obstacle(self, desc: &ModelDesc) -> Option<String> {
        if matches!(self, Self::Float(_)) {
            return None;
        }
        let of_layer = |(index, layer): (usize, &CacheDesc)| {
            if layer.latent().is_some() {
                return Some(format!("layer {index} has latent keys"));
            }
            let (_, k_dim, v_dim) = layer.dims()?;
            let is_odd =
                self == Self::Q4_0 && !(k_dim.is_multiple_of(2) && v_dim.is_multiple_of(2));
            is_odd.then(|| format!("layer {index} has keys of {k_dim} and values of {v_dim} elements, expected even widths"))
        };
        desc.layers.iter().enumerate().find_map(of_layer)
    }
}

/// Types that are asked for; none is the default, see [`KvTypes::resolve`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvTypes {
    /// Of keys.
    pub keys: Option<KvType>,
    /// Of values.
    pub values: Option<KvType>,
}

impl KvTypes {
    /// One type for both.
    pub fn both(kind: impl Into<KvType>) -> Self {
        let kind = kind.into();
        Self {
            keys: Some(kind),
            values: Some(kind),
        }
    }

    /// The one type that is asked for, beside the type that is taken when none is.
    pub fn asked(self, unasked: DType) -> Result<KvType, EngineError> {
        let [keys, values] = [self.keys, self.values].map(|kind| kind.unwrap_or(unasked.into()));
        if keys == values {
            return Ok(keys);
        }
        Err(EngineError::KvTypesDiffer {
            keys: keys.name(),
            values: values.name(),
        })
    }

    /// The type of the pool. One other than the activations' needs a backend that says that it has it, and
    /// a quantised one a model without latent keys. Unless a type is asked for, it is `unasked`.
    pub fn resolve(
        self,
        activations: DType,
        precision: Option<Precision>,
        backend: &SelectedBackend,
        desc: &ModelDesc,
    ) -> Result<KvType, EngineError> {
        let details = &backend.report.details;
        let preferred = details.get("preferred_kv_dtype").and_then(Value::as_str);
        let unasked = unasked(activations, precision, preferred, desc);
        let kind = self.among(
            activations,
            unasked,
            backend.plugin.name(),
            details.get("kv_dtypes"),
        )?;
        match kind.obstacle(desc) {
            None => Ok(kind),
            Some(obstacle) => Err(EngineError::KvTypeForModel {
                asked: kind.name(),
                arch: desc.arch.clone(),
                obstacle,
            }),
        }
    }

    fn among(
        self,
        activations: DType,
        unasked: DType,
        backend: &str,
        listed: Option<&Value>,
    ) -> Result<KvType, EngineError> {
        let kind = self.asked(unasked)?;
        let is_name = |name: &Value| name.as_str() == Some(kind.name());
        let is_listed = listed
            .and_then(Value::as_array)
            .is_some_and(|names| names.iter().any(is_name));
        if kind == activations.into() || is_listed {
            return Ok(kind);
        }
        let backend = backend.to_owned();
        Err(match kind {
            KvType::Float(asked) => EngineError::KvTypeUnsupported {
                asked: asked.name(),
                activations: activations.name(),
                backend,
            },
            KvType::Q8_0 | KvType::Q4_0 => EngineError::KvTypeQuantised {
                asked: kind.name(),
                backend,
            },
        })
    }
}

/// The type that is taken when none is asked for: the one that the backend prefers beside f32 activations,
/// else that of the activations. Exact products have caches in the type of the activations too. Latent keys hold
/// their values and are read whole, which backends do best in the type of the activations.
fn unasked(
    activations: DType,
    precision: Option<Precision>,
    preferred: Option<&str>,
    desc: &ModelDesc,
) -> DType {
    let is_latent = |layer: &CacheDesc| layer.latent().is_some();
    let may_be_other = activations == DType::F32
        && precision != Some(Precision::Exact)
        && !desc.layers.iter().any(is_latent);
    let floats = [DType::F32, DType::F16, DType::BF16];
    let preferred = preferred.and_then(DType::from_name);
    let preferred = preferred.filter(|dtype| may_be_other && floats.contains(dtype));
    preferred.unwrap_or(activations)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_of_quantised_types_have_their_scales() {
        let bytes = |width| KvType::QUANTISED.map(|kind| kind.row_bytes(width));
        assert_eq!(bytes(64), [68, 36]);
        assert_eq!(bytes(128), [136, 72]);
        assert_eq!(bytes(40), [44, 24]);
        assert_eq!(bytes(8), [10, 6]);
        assert_eq!(KvType::from(DType::F16).row_bytes(64), 128);
    }

    fn desc(layer: &str) -> ModelDesc {
        let json = format!(
            r#"{{"arch":"toy","task":"t","vocab_size":4,"hidden_size":4,"context_length":16,"layers":[{{"kind":"none"}},{layer}],"activation_width":1}}"#
        );
        ModelDesc::parse(&json).unwrap()
    }

    #[test]
    fn what_a_backend_prefers_is_the_default_beside_f32_alone() {
        let dense = desc(r#"{"kind":"dense","kv_heads":1,"k_dim":8,"v_dim":8}"#);
        let latent = desc(r#"{"kind":"latent","k_dim":6,"v_dim":4}"#);
        let of = |activations, precision, preferred, desc| {
            unasked(activations, precision, preferred, desc).name()
        };
        assert_eq!(of(DType::F32, None, Some("f16"), &dense), "f16");
        let fast = Some(Precision::Fast);
        assert_eq!(of(DType::F32, fast, Some("f16"), &dense), "f16");
        let exact = Some(Precision::Exact);
        assert_eq!(of(DType::F32, exact, Some("f16"), &dense), "f32");
        assert_eq!(of(DType::F32, None, Some("f16"), &latent), "f32");
        assert_eq!(of(DType::F32, None, None, &dense), "f32");
        assert_eq!(of(DType::F32, None, Some("u8"), &dense), "f32");
        assert_eq!(of(DType::BF16, None, Some("f16"), &dense), "bf16");
    }

    #[test]
    fn a_model_that_cannot_be_kept_so_is_named() {
        let latent = desc(r#"{"kind":"latent","k_dim":6,"v_dim":4}"#);
        let odd = desc(r#"{"kind":"dense","kv_heads":1,"k_dim":8,"v_dim":7}"#);
        assert_eq!(KvType::Q8_0.obstacle(&odd), None);
        assert_eq!(KvType::Float(DType::F16).obstacle(&latent), None);
        let found = [KvType::Q8_0.obstacle(&latent), KvType::Q4_0.obstacle(&odd)];
        insta::assert_debug_snapshot!(found.map(Option::unwrap), @r#"
        [
            "layer 1 has latent keys",
            "layer 1 has keys of 8 and values of 7 elements, expected even widths",
        ]
        "#);
    }

    #[test]
    fn another_type_needs_a_backend_that_lists_it_and_both_halves() {
        let kept = json!(["f32", "f16"]);
        let f16 = KvTypes::both(DType::F16);
        let with = |types: KvTypes, activations, kept| {
            types
                .among(activations, activations, "toy", kept)
                .map(KvType::name)
                .map_err(|error| error.to_string())
        };
        assert_eq!(with(KvTypes::default(), DType::BF16, None), Ok("bf16"));
        assert_eq!(with(f16, DType::F16, None), Ok("f16"));
        assert_eq!(with(f16, DType::F32, Some(&kept)), Ok("f16"));
        let keys_alone = KvTypes {
            keys: Some(DType::F16.into()),
            values: None,
        };
        assert_eq!(with(keys_alone, DType::F16, None), Ok("f16"));
        let q8 = KvTypes::both(KvType::Q8_0);
        let quantised = json!(["q8_0"]);
        assert_eq!(with(q8, DType::F32, Some(&quantised)), Ok("q8_0"));
        let refused = [
            with(f16, DType::F32, None),
            with(KvTypes::both(DType::BF16), DType::F32, Some(&kept)),
            with(keys_alone, DType::F32, Some(&kept)),
            with(KvTypes::both(KvType::Q8_0), DType::F32, Some(&kept)),
        ]
        .map(Result::unwrap_err);
        insta::assert_snapshot!(refused.join("\n"), @r"
        backend toy does not keep keys and values in f16 beside activations in f32: leave --cache-type-k and --cache-type-v out, or set --dtype f16
        backend toy does not keep keys and values in bf16 beside activations in f32: leave --cache-type-k and --cache-type-v out, or set --dtype bf16
        keys would be kept in f16 and values in f32: give --cache-type-k and --cache-type-v the same type
        backend toy does not keep keys and values in q8_0: leave --cache-type-k and --cache-type-v out, or choose a backend that lists q8_0
        ");
    }
}
