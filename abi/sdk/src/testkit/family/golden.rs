//! Golden folders: a tiny checkpoint with what another implementation computes on it.

use std::path::Path;

use mlxcel_abi::DType;
use serde_json::Value as Json;

use super::{Caches, FamilyUnderTest, MapWeights, Part, StepOptions, safetensors, words};
use crate::{Backend, Error, Result};

/// `config.json`, `model.safetensors` and `golden.json` of one folder.
#[derive(Debug, Clone)]
pub struct Golden {
    /// The configuration.
    pub config: Json,
    /// The weights, with the configuration's quantisation.
    pub weights: MapWeights,
    /// Prompts with their results.
    pub prompts: Vec<GoldenPrompt>,
}

/// One prompt with its results.
#[derive(Debug, Clone)]
pub struct GoldenPrompt {
    /// Name in the file.
    pub name: String,
    /// Token ids.
    pub ids: Vec<u32>,
    /// Logits of the last position.
    pub last_logits: Vec<f32>,
    /// Best token at every position.
    pub argmax: Vec<u32>,
    /// Greedy continuation.
    pub greedy: Vec<u32>,
    /// Whether a cache gives the same greedy continuation.
    pub cached_agrees: bool,
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| Error::Other(format!("{}: {error}", path.display())))
}

fn json(path: &Path) -> Result<Json> {
    serde_json::from_slice(&read(path)?)
        .map_err(|error| Error::Other(format!("{}: {error}", path.display())))
}

impl Golden {
    /// Reads a folder.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = json(&folder.join("config.json"))?;
        let mut weights = safetensors::parse(&read(&folder.join("model.safetensors"))?)?;
        weights.read_quantization(&config)?;
        let golden = json(&folder.join("golden.json"))?;
        let prompts = golden
            .get("prompts")
            .and_then(Json::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let prompts = prompts
            .iter()
            .map(GoldenPrompt::read)
            .collect::<Option<Vec<_>>>();
        let prompts = prompts
            .filter(|prompts| !prompts.is_empty())
            .ok_or_else(|| {
                Error::Other(format!(
                    "{}: prompts are missing or not understood",
                    folder.display()
                ))
            })?;
        Ok(Self {
            config,
            weights,
            prompts,
        })
    }
}

impl GoldenPrompt {
    fn read(prompt: &Json) -> Option<Self> {
        let ids = |list: &Json| -> Option<Vec<u32>> {
            list.as_array()?
                .iter()
                .map(|x| u32::try_from(x.as_u64()?).ok())
                .collect()
        };
        let numbers = prompt.get("last_logits")?.as_array()?;
        Some(Self {
            name: prompt.get("name")?.as_str()?.to_owned(),
            ids: ids(prompt.get("ids")?)?,
            last_logits: numbers
                .iter()
                .map(|x| Some(x.as_f64()? as f32))
                .collect::<Option<_>>()?,
            argmax: ids(prompt.get("positions")?.get("argmax")?)?,
            greedy: ids(prompt.get("greedy")?)?,
            cached_agrees: prompt
                .get("cached_agrees")
                .and_then(Json::as_bool)
                .unwrap_or(true),
        })
    }
}

fn best(logits: &[f32]) -> u32 {
    let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, better) as u32
}

impl FamilyUnderTest {
    /// The plugin that the test is linked with, on a golden folder's checkpoint.
    pub fn of_golden(golden: &Golden) -> Result<Self> {
        Ok(Self::this_plugin(golden.config.clone())?.with_weights(golden.weights.clone()))
    }

    /// Compares logits, best tokens and greedy continuations in f32 with a golden's. `tolerance` is
    /// the largest allowed distance of a last logit.
    pub fn check_golden(
        &self,
        golden: &Golden,
        backend: &Backend,
        tolerance: f32,
    ) -> core::result::Result<(), String> {
        let model = words(self.load(backend, DType::F32))?;
        for prompt in &golden.prompts {
            let mut caches = Caches::new();
            let mut step = |tokens: &[u32]| {
                let parts = [Part {
                    sequence: 0,
                    tokens,
                }];
                words(model.step(&mut caches, &parts, StepOptions::default()))
                    .map(|mut logits| logits.swap_remove(0).rows)
            };
            let rows = step(&prompt.ids)?;
            let found: Vec<u32> = rows.iter().map(|row| best(row)).collect();
            if found != prompt.argmax {
                return Err(format!(
                    "{}: best tokens are {found:?}, expected {:?}",
                    prompt.name, prompt.argmax
                ));
            }
            let last = &rows[rows.len() - 1];
            let worst = last
                .iter()
                .zip(&prompt.last_logits)
                .fold(0f32, |a, (x, y)| a.max((x - y).abs()));
            let near = last.len() == prompt.last_logits.len() && worst <= tolerance;
            if !near {
                return Err(format!(
                    "{}: the last logits are off by {worst}, allowed is {tolerance}",
                    prompt.name
                ));
            }
            if !prompt.cached_agrees {
                continue;
            }
            let mut greedy = vec![best(last)];
            while greedy.len() < prompt.greedy.len() {
                let next = step(&greedy[greedy.len() - 1..])?;
                greedy.push(best(&next[0]));
            }
            if greedy != prompt.greedy {
                return Err(format!(
                    "{}: greedy tokens are {greedy:?}, expected {:?}",
                    prompt.name, prompt.greedy
                ));
            }
        }
        Ok(())
    }
}
