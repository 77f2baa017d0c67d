//! The checks on a right family, and on families that are wrong in known ways.

use mlxcel_abi::ops_args::QuantSpec;
use serde_json::json;

use super::*;
use crate::RopeSpec;
use crate::prelude::*;
use crate::testkit::{ReferenceOptions, reference_backend};

/// Two blocks of attention and a gated sum, in as few lines as a family can have.
struct Tiny;

architecture! {
    Tiny,
    id: "testkit-tiny", display_name: "Tiny", category: "dense", task: "text-generation",
    model_types: ["testkit-tiny"], gguf: [], aliases: [],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;

struct Sizes {
    hidden: usize,
    vocab: usize,
    layers: usize,
    window: usize,
    bug: String,
}

fn read(config: &Config<'_>) -> Result<Sizes> {
    Ok(Sizes {
        hidden: config.uint("hidden_size")?,
        vocab: config.uint("vocab_size")?,
        layers: config.uint("num_hidden_layers")?,
        window: config.opt_uint("sliding_window", 1..=1 << 20)?.unwrap_or(0),
        bug: config.opt_str("bug")?.unwrap_or_default().to_owned(),
    })
}

impl Architecture for Tiny {
    fn probe(&self, _: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let sizes = read(config)?;
        let dim = sizes.hidden / HEADS;
        let cache = match sizes.window {
            0 => CacheDesc::Dense {
                kv_heads: KV_HEADS,
                k_dim: dim,
                v_dim: dim,
            },
            window => CacheDesc::Window {
                kv_heads: KV_HEADS,
                k_dim: dim,
                v_dim: dim,
                window,
            },
        };
        let extra = usize::from(sizes.bug == "describes a layer too many");
        let desc = json!({
            "arch": "testkit-tiny", "task": "text-generation", "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden, "context_length": 128, "layers": vec![cache; sizes.layers + extra],
            "activation_width": 4 * sizes.hidden,
        });
        serde_json::from_value(desc).map_err(|e| Error::Other(e.to_string()))
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let sizes = read(config)?;
        if sizes.bug == "hides what is missing"
            && !weights.contains("layers.1.q.weight")
            && weights.contains("layers.0.q.weight")
            && weights.contains("head.weight")
        {
            return Err(Error::Other("the checkpoint is not complete".to_owned()));
        }
        let hidden = sizes.hidden;
        let dim = hidden / HEADS;
        let layer = |index: usize| -> Result<Layer> {
            let at = weights.at("layers").at_index(index);
            let linear = |name: &str, outputs| {
                nn::Linear::load(&at.at(name), hidden, outputs, at.at(name).contains("bias"))
            };
            Ok(Layer {
                norm: nn::RmsNorm::load(&at.at("norm"), hidden, 1e-5)?,
                q: linear("q", hidden)?,
                k: linear("k", KV_HEADS * dim)?,
                v: linear("v", KV_HEADS * dim)?,
                gate: linear("gate", hidden)?,
            })
        };
        Ok(Box::new(TinyModel {
            embedding: nn::Embedding::load(&weights.at("embed"), sizes.vocab, hidden)?,
            layers: (0..sizes.layers).map(layer).collect::<Result<_>>()?,
            head: nn::Linear::load(&weights.at("head"), hidden, sizes.vocab, false)?,
            dim,
            bug: sizes.bug,
        }))
    }
}

struct Layer {
    norm: nn::RmsNorm,
    q: nn::Linear,
    k: nn::Linear,
    v: nn::Linear,
    gate: nn::Linear,
}

struct TinyModel {
    embedding: nn::Embedding,
    layers: Vec<Layer>,
    head: nn::Linear,
    dim: usize,
    bug: String,
}

impl TinyModel {
    fn attend(&self, index: usize, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let layer = &self.layers[index];
        let (rows, dim) = (step.n_rows as i64, self.dim as i64);
        let heads = |t: Tensor| t.reshape(&[rows, -1, dim]);
        let rope = RopeSpec {
            dims: self.dim as u32,
            interleaved: false,
            base: 100.0,
            scale: 1.0,
            freqs: None,
        };
        let counted = Tensor::arange(step.backend(), 0.0, rows as f64, 1.0, DType::I32)?;
        let positions = if self.bug == "positions count rows" {
            &counted
        } else {
            &step.positions
        };
        let (q, k) = (heads(layer.q.forward(x)?)?, heads(layer.k.forward(x)?)?);
        let (q, k) = (q.rope(positions, &rope)?, k.rope(positions, &rope)?);
        let v = heads(layer.v.forward(x)?)?;
        let options = AttendOptions {
            scale: 1.0 / (self.dim as f32).sqrt(),
            ..AttendOptions::default()
        };
        let index = if self.bug == "one cache for all layers" {
            0
        } else {
            index
        };
        step.attend(index, &q, &k, &v, &options)?
            .reshape(&[rows, -1])
    }
}

impl Model for TinyModel {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let mut x = self.embedding.forward(&step.tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let mut normed = layer.norm.forward(&x)?;
            match self.bug.as_str() {
                "mixes rows" => normed = normed.add(&normed.mean(&[0], true)?)?,
                "widens" => normed = normed.cast(DType::F32)?,
                "leaks" => {
                    normed.square()?.into_handle()?;
                }
                "reads back" => {
                    normed.to_f32_vec()?;
                }
                "branches on data" if step.tokens.to_vec::<u32>()?[0] % 2 == 0 => {
                    normed = normed.mul_scalar(1.0)?
                }
                _ => {}
            }
            let mut mixed = self.attend(index, &normed, step)?;
            if self.bug == "drops attention" {
                mixed = normed.clone();
            }
            let gate = layer.gate.forward(&normed)?;
            let gated = gate.glu(mlxcel_abi::kinds::glu::SILU, &mixed);
            x = x.add(&match gated {
                Err(_) if self.bug == "swallows errors" => normed,
                gated => gated?,
            })?;
        }
        let logits = self.head.forward(&step.logit_rows(&x)?)?;
        if self.bug == "tells another error" {
            return logits
                .add_scalar(0.0)
                .map_err(|_| Error::Other("sorry".to_owned()));
        }
        Ok(logits)
    }
}

fn config(bug: &str, window: usize) -> serde_json::Value {
    let mut config = json!({
        "model_type": "testkit-tiny", "hidden_size": 32, "vocab_size": 48, "num_hidden_layers": 2, "bug": bug,
    });
    if window > 0 {
        config["sliding_window"] = json!(window);
    }
    config
}

fn family(bug: &str) -> FamilyUnderTest {
    FamilyUnderTest::this_plugin(config(bug, 0))
        .unwrap()
        .filled(1)
        .unwrap()
}

#[test]
fn a_right_family_keeps_every_rule() {
    let family = family("");
    assert_eq!(
        (family.arch(), family.desc().layers.len()),
        ("testkit-tiny", 2)
    );
    assert_eq!(family.weights().names().count(), 12);
    family.verdict().unwrap();
}

#[test]
fn windows_biases_and_quantised_weights_keep_them_too() {
    let windowed = FamilyUnderTest::this_plugin(config("", 4)).unwrap();
    windowed
        .with_tensor("layers.0.q.bias", &[32])
        .filled(2)
        .unwrap()
        .verdict()
        .unwrap();
    let quantized = family("")
        .quantized(
            QuantSpec {
                bits: 4,
                group_size: 32,
                ..QuantSpec::default()
            },
            |path| path != "head",
        )
        .unwrap();
    assert_eq!(quantized.weights().info("embed.scales").unwrap().1, [48, 1]);
    quantized.verdict().unwrap();
}

#[test]
fn large_configurations_are_checked_by_shapes() {
    let config = json!({
        "model_type": "testkit-tiny", "hidden_size": 8192, "vocab_size": 200_000, "num_hidden_layers": 30,
    });
    let family = FamilyUnderTest::this_plugin(config)
        .unwrap()
        .shaped()
        .unwrap();
    assert_eq!(
        family.weights().info("embed.weight"),
        Some((DType::F32, [200_000, 8192].as_slice()))
    );
    family.check_shapes().unwrap();
}

#[test]
fn every_fault_is_found_by_its_rule() {
    for (bug, rule, words) in [
        (
            "positions count rows",
            "cached step = uncached",
            "instead of",
        ),
        ("drops attention", "order matters", "did not change"),
        (
            "one cache for all layers",
            "cached step = uncached",
            "layer 0 attended 2 time(s)",
        ),
        ("mixes rows", "batch = solo", "in a batch"),
        ("mixes rows", "padding rows change nothing", "padding"),
        ("widens", "dtypes stay", "layer 0: k is f32"),
        ("leaks", "no handle is left", "after a step"),
        (
            "reads back",
            "a step reads nothing back",
            "reads 2 tensor(s)",
        ),
        (
            "branches on data",
            "a step reads nothing back",
            "reads 2 tensor(s)",
        ),
        (
            "swallows errors",
            "failures of the backend come through",
            "the step succeeded",
        ),
        (
            "tells another error",
            "failures of the backend come through",
            "told as",
        ),
        (
            "describes a layer too many",
            "shapes without computing",
            "layer 2 attended 0 time(s)",
        ),
        (
            "hides what is missing",
            "missing tensors are named",
            "does not name it",
        ),
    ] {
        let family = family(bug);
        let check = CHECKS.iter().find(|check| check.name == rule).unwrap();
        let text = check.run(&family).expect_err(bug);
        assert!(text.contains(words), "{bug}: {text}");
    }
}

#[test]
fn a_failed_step_leaves_the_caches() {
    let reference = reference_backend(ReferenceOptions::default());
    let model = family("").load(&reference.backend(), DType::F32).unwrap();
    let mut caches = Caches::new();
    let step = |caches: &mut Caches, tokens: &[u32]| {
        model.step(
            caches,
            &[Part {
                sequence: 3,
                tokens,
            }],
            StepOptions::default(),
        )
    };
    step(&mut caches, &[1, 2, 3]).unwrap();
    assert!(
        step(&mut caches, &[4, 9999]).is_err(),
        "token 9999 does not exist"
    );
    assert_eq!(caches.length(3), 3);
    assert_eq!(step(&mut caches, &[4]).unwrap()[0].rows.len(), 1);
    caches.remove(3);
    assert_eq!(caches.length(3), 0);
}

#[test]
fn configurations_that_nobody_takes_are_refused() {
    let error = FamilyUnderTest::this_plugin(json!({"model_type": "nobody"})).unwrap_err();
    assert!(
        error.to_string().contains("no architecture fits"),
        "{error}"
    );
}
