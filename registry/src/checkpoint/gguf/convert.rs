//! Puts an adapter on a GGUF file: the tensors of the checkpoint, each with its plan.
//!
//! Owns the rule that every tensor of the file is accounted for. Reads headers only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::adapter::{Adapter, AdapterError, AdapterTensor};
use super::centred::{CentredForm, centred_form};
use super::file::GgufFile;
use super::load::ConvertError;
use super::plan::{Part, Plan};
use crate::checkpoint::buffer::TensorData;
use crate::checkpoint::dtype::TensorInfo;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::quant::QuantSpec;

/// A tensor of the checkpoint: what it is, which plan makes it, and which part of that it is.
pub(crate) type PlannedTensor = (TensorInfo, usize, Part);

/// A GGUF file seen through an adapter.
#[derive(Debug)]
pub(crate) struct Converted {
    pub(crate) file: Arc<GgufFile>,
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: BTreeMap<String, PlannedTensor>,
    /// By module path.
    pub(crate) quant: BTreeMap<String, QuantSpec>,
    plans: Vec<Plan>,
    wanted: Arc<[AdapterTensor]>,
}

impl Converted {
    pub(crate) fn new(file: GgufFile, adapter: Adapter) -> Result<Self, CheckpointError> {
        let path = file.path().to_owned();
        Self::build(file, adapter).map_err(|source| CheckpointError::Adapter {
            path,
            source: Box::new(source),
        })
    }

    fn build(file: GgufFile, adapter: Adapter) -> Result<Self, AdapterError> {
        for key in ["quantization", "quantization_config"] {
            if adapter.config.contains_key(key) {
                return Err(AdapterError::Quantization { key });
            }
        }
        refuse_leftovers(&file, &adapter)?;
        let empty = Converted {
            file: Arc::new(file),
            config: adapter.config,
            tensors: BTreeMap::new(),
            quant: BTreeMap::new(),
            plans: Vec::new(),
            wanted: adapter.tensors.into(),
        };
        empty.planned(&[])
    }

    /// The same with tensors in the given centred forms, where there are such; none otherwise.
    pub(crate) fn with_centred(&self, forms: &[CentredForm]) -> Result<Option<Self>, AdapterError> {
        let is_such = |plan: &Plan| centred_form(plan.ty).is_some_and(|form| forms.contains(&form));
        if !self.plans.iter().any(is_such) {
            return Ok(None);
        }
        self.planned(forms).map(Some)
    }

    fn planned(&self, centred: &[CentredForm]) -> Result<Self, AdapterError> {
        let (mut tensors, mut quant, mut plans) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for wanted in self.wanted.iter() {
            let Some(source) = self.file.tensor(&wanted.from) else {
                let (from, to) = (wanted.from.clone(), wanted.to.clone());
                return Err(AdapterError::UnknownSource { from, to });
            };
            let plan = Plan::new(source, &wanted.to, &wanted.ops, centred)?;
            for (name, part) in parts(&plan, &wanted.to) {
                let info = plan.info(part);
                if tensors
                    .insert(name.clone(), (info, plans.len(), part))
                    .is_some()
                {
                    return Err(AdapterError::DuplicateTarget {
                        name,
                        from: wanted.from.clone(),
                    });
                }
            }
            if let (Some(spec), Some(path)) = (plan.quant(), wanted.to.strip_suffix(".weight")) {
                quant.insert(path.to_owned(), spec);
            }
            plans.push(plan);
        }
        Ok(Converted {
            file: Arc::clone(&self.file),
            config: self.config.clone(),
            tensors,
            quant,
            plans,
            wanted: Arc::clone(&self.wanted),
        })
    }

    /// Makes one tensor.
    pub(crate) fn load(&self, plan: usize, part: Part) -> Result<TensorData, CheckpointError> {
        let convert = |source| CheckpointError::Convert {
            path: self.file.path().to_owned(),
            source: Box::new(source),
        };
        let moved = |tensor: &str| {
            convert(ConvertError::Moved {
                tensor: tensor.to_owned(),
            })
        };
        let plan = self.plans.get(plan).ok_or_else(|| moved("?"))?;
        let (file, range) = self
            .file
            .place(&plan.from)
            .ok_or_else(|| moved(&plan.from))?;
        plan.load(file, range, part)
            .map_err(|source| CheckpointError::Convert {
                path: file.path().to_owned(),
                source: Box::new(source),
            })
    }
}

fn parts(plan: &Plan, to: &str) -> impl Iterator<Item = (String, Part)> {
    // What is packed ends in `.weight`, see `Plan::new`.
    let path = to.strip_suffix(".weight").unwrap_or(to);
    plan.parts().iter().map(move |part| match part {
        Part::Weight => (to.to_owned(), Part::Weight),
        Part::Scales => (format!("{path}.scales"), Part::Scales),
        Part::Biases => (format!("{path}.biases"), Part::Biases),
    })
}

fn refuse_leftovers(file: &GgufFile, adapter: &Adapter) -> Result<(), AdapterError> {
    let used: BTreeSet<&str> = adapter
        .tensors
        .iter()
        .map(|tensor| tensor.from.as_str())
        .collect();
    let ignored: BTreeSet<&str> = adapter.ignore.iter().map(String::as_str).collect();
    if let Some(name) = used.intersection(&ignored).next() {
        return Err(AdapterError::UsedAndIgnored {
            name: (*name).to_owned(),
        });
    }
    let leftover: Vec<&str> = file
        .tensors()
        .map(|tensor| tensor.name.as_str())
        .filter(|name| !used.contains(name) && !ignored.contains(name))
        .collect();
    if leftover.is_empty() {
        Ok(())
    } else {
        Err(AdapterError::leftover(&leftover))
    }
}
