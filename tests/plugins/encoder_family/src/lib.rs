//! A family of one architecture, `test_encoder`: one block of self-attention and one of cross-attention over an encoder
//! that adds up its rows in groups of `stride`. Small enough that a test computes the same in float64.
//!
//! `"fail_from"` in the configuration makes the encoder fail for features that begin with that number or a larger one.

use mlxcel_sdk::RopeSpec;
use mlxcel_sdk::nn::{Embedding, Linear};
use mlxcel_sdk::prelude::*;

mlxcel_sdk::export_family! { name: "encoder", vendor: "mlxcel" }

struct TestEncoder;

architecture! {
    TestEncoder,
    id: "test_encoder", display_name: "Test encoder", category: "encoder-decoder", task: "text-generation",
    model_types: ["test_encoder"], gguf: [], aliases: [],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

/// Number of the layer of self-attention and of the one of cross-attention.
const SELF: usize = 0;
const CROSS: usize = 1;

struct Sizes {
    vocab: usize,
    hidden: usize,
    encoder: EncoderDesc,
    fail_from: Option<f64>,
}

impl Sizes {
    fn read(config: &Config<'_>) -> Result<Self> {
        Ok(Self {
            vocab: config.uint("vocab_size")?,
            hidden: config.uint("hidden_size")?,
            encoder: EncoderDesc {
                width: config.uint("feature_width")?,
                max_rows: config.uint("max_rows")?,
                stride: config.uint("stride")?,
            },
            fail_from: config.opt_float("fail_from", 0.0..=1e9)?,
        })
    }
}

impl Architecture for TestEncoder {
    fn probe(&self, _: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type test_encoder")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let sizes = Sizes::read(config)?;
        let (kv_heads, k_dim, v_dim) = (1, sizes.hidden, sizes.hidden);
        Ok(ModelDesc {
            arch: "test_encoder".to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: sizes.vocab,
            hidden_size: sizes.hidden,
            context_length: 256,
            layers: vec![
                CacheDesc::Dense {
                    kv_heads,
                    k_dim,
                    v_dim,
                },
                CacheDesc::Cross {
                    kv_heads,
                    k_dim,
                    v_dim,
                },
            ],
            activation_width: 4 * sizes.hidden,
            encoder: Some(sizes.encoder),
        })
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let sizes = Sizes::read(config)?;
        let (width, hidden) = (sizes.encoder.width, sizes.hidden);
        Ok(Box::new(Decoder {
            embedding: Embedding::load(&weights.at("embedding"), sizes.vocab, hidden)?,
            keys: Linear::load(&weights.at("keys"), width, hidden, false)?,
            values: Linear::load(&weights.at("values"), width, hidden, false)?,
            head: Linear::load(&weights.at("head"), hidden, sizes.vocab, false)?,
            sizes,
        }))
    }
}

struct Decoder {
    embedding: Embedding,
    keys: Linear,
    values: Linear,
    head: Linear,
    sizes: Sizes,
}

impl Model for Decoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let (rows, hidden) = (step.n_rows as i64, self.sizes.hidden as i64);
        let options = AttendOptions {
            scale: 1.0,
            ..AttendOptions::default()
        };
        let split = |x: &Tensor| x.reshape(&[rows, 1, hidden]);
        let x = self.embedding.forward(&step.tokens)?;
        let heads = split(&x)?;
        let rope = RopeSpec {
            dims: self.sizes.hidden as u32,
            interleaved: false,
            base: 10_000.0,
            scale: 1.0,
            freqs: None,
        };
        let turned = heads.rope(&step.positions, &rope)?;
        let own = step.attend(SELF, &turned, &turned, &heads, &options)?;
        let x = x.add(&own.reshape(&[rows, hidden])?)?;
        let encoded = step.attend_encoded(CROSS, &split(&x)?, &options)?;
        let x = x.add(&encoded.reshape(&[rows, hidden])?)?;
        self.head.forward(&step.logit_rows(&x)?)
    }

    fn encode(&self, encode: &Encode<'_>) -> Result<()> {
        let EncoderDesc { width, stride, .. } = self.sizes.encoder;
        if let Some(limit) = self.sizes.fail_from {
            let first = encode.features.to_f32_vec()?;
            if first
                .first()
                .is_some_and(|first| f64::from(*first) >= limit)
            {
                return Err(Error::Other("the encoder fails as told".to_owned()));
            }
        }
        let positions = encode.n_rows.div_ceil(stride);
        let missing = (positions * stride - encode.n_rows) as i64;
        let whole = encode.features.pad(&[0, 0], &[missing, 0], 0.0)?;
        let groups = whole.reshape(&[positions as i64, stride as i64, width as i64])?;
        let rows = groups.sum(&[1], false)?;
        let dims = [positions as i64, 1, self.sizes.hidden as i64];
        let keys = self.keys.forward(&rows)?.reshape(&dims)?;
        let values = self.values.forward(&rows)?.reshape(&dims)?;
        encode.cross_write(CROSS, &keys, &values)
    }
}

#[cfg(test)]
mod tests {
    use mlxcel_sdk::testkit::family::FamilyUnderTest;

    #[test]
    fn it_keeps_the_rules_of_families() {
        let config = serde_json::json!({
            "model_type": "test_encoder", "vocab_size": 40, "hidden_size": 16,
            "feature_width": 6, "max_rows": 30, "stride": 2,
        });
        let family = FamilyUnderTest::this_plugin(config).unwrap();
        family.filled(1).unwrap().verdict().unwrap();
    }
}
