//! What the encoder of a request reads: plain data, with a digest by which caches tell requests apart.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::desc::{EncoderDesc, ModelDesc};
use super::error::EngineError;

/// Features of one request, `[rows, width]`. Cheap to clone.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    rows: usize,
    width: usize,
    values: Arc<[f32]>,
}

impl Features {
    /// Rows of `width` values each. None when `values` are no whole rows, or none at all.
    pub fn new(width: usize, values: Vec<f32>) -> Option<Self> {
        let rows = values.len().checked_div(width)?;
        let is_whole = rows > 0 && rows * width == values.len();
        is_whole.then(|| Self {
            rows,
            width,
            values: values.into(),
        })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows, one after another.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Namespace of what was computed with these features: keys and values of the decoder depend on them, so
    /// that equal tokens beside other features are another prefix.
    pub(super) fn namespace(&self, of: &str) -> String {
        let mut digest = Sha256::new();
        digest.update((self.width as u64).to_le_bytes());
        for value in self.values.iter() {
            digest.update(value.to_bits().to_le_bytes());
        }
        let mut text = format!("{of}\0encoder:");
        for byte in digest.finalize() {
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }
}

impl EncoderDesc {
    /// Positions of the cross-attention layers that `rows` become.
    pub fn positions(&self, rows: usize) -> usize {
        rows.div_ceil(self.stride.max(1))
    }
}

/// Checks what a request brings against what the model reads.
pub(super) fn check(desc: &ModelDesc, features: Option<&Features>) -> Result<(), EngineError> {
    let arch = || desc.arch.clone();
    match (desc.encoder, features) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(EngineError::FeaturesUnexpected { arch: arch() }),
        (Some(_), None) => Err(EngineError::FeaturesMissing { arch: arch() }),
        (Some(encoder), Some(features)) => {
            let (rows, width) = (features.rows(), features.width());
            let fits = width == encoder.width && rows <= encoder.max_rows;
            fits.then_some(()).ok_or(EngineError::FeaturesDoNotFit {
                arch: desc.arch.clone(),
                rows,
                width,
                most_rows: encoder.max_rows,
                wanted_width: encoder.width,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_whole_rows() {
        assert!(Features::new(3, vec![0.0; 7]).is_none());
        assert!(Features::new(3, Vec::new()).is_none());
        assert!(Features::new(0, vec![0.0; 3]).is_none());
        assert_eq!(Features::new(3, vec![0.0; 6]).unwrap().rows(), 2);
    }

    #[test]
    fn namespaces_differ_with_every_bit_and_with_the_shape() {
        let of = |width, values: &[f32]| {
            Features::new(width, values.to_vec())
                .unwrap()
                .namespace("key")
        };
        let all = [
            of(2, &[1.0, 2.0]),
            of(1, &[1.0, 2.0]),
            of(2, &[1.0, -2.0]),
            of(2, &[2.0, 1.0]),
            of(2, &[0.0, 2.0]),
            of(2, &[-0.0, 2.0]),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(one.starts_with("key\0encoder:"));
            assert!(!all[index + 1..].contains(one));
        }
    }
}
