//! Whether and how a model is split: what is refused, and what each rank gets of the machine.

use super::super::desc::ModelDesc;
use super::super::detect::OpenedModel;
use super::super::error::EngineError;
use super::super::load::{LoadOptions, Precision, default_threads};
use super::super::part::Settled;
use super::RankPlan;
use super::failure::Failure;
use super::group::{Environment, Ranks};
use super::message::{Setup, VERSION};
use crate::plugin::SelectedBackend;

/// A split that is possible.
pub struct Split<'a> {
    plan: &'a RankPlan,
    opened: &'a OpenedModel,
    selected: &'a SelectedBackend,
    /// What one rank keeps.
    pub desc: ModelDesc,
}

impl<'a> Split<'a> {
    /// Checks everything that can be checked before anything is started or read.
    pub fn new(
        plan: &'a RankPlan,
        opened: &'a OpenedModel,
        selected: &'a SelectedBackend,
        options: &LoadOptions,
    ) -> Result<Self, EngineError> {
        if !opened.is_splittable {
            return Err(EngineError::CannotSplit {
                arch: opened.decision.arch.clone(),
                ranks: plan.size,
                reason:
                    "its family runs it whole only (`mlxcel arch --json` says which can be split)"
                        .to_owned(),
            });
        }
        if options.deterministic {
            return Err(EngineError::NotWithRanks {
                option: "--deterministic",
                reason: "the order of sums over ranks follows the number of rows",
            });
        }
        if options.prefix.disk.is_some() {
            return Err(EngineError::NotWithRanks {
                option: "a folder for the prefix cache",
                reason: "each rank has a part of what would be kept",
            });
        }
        if !selected.plugin.has_collectives() {
            return Err(EngineError::CannotSplit {
                arch: opened.decision.arch.clone(),
                ranks: plan.size,
                reason: format!(
                    "backend {} has no operations over ranks (mlxcel.ext.collectives/1)",
                    selected.plugin.name()
                ),
            });
        }
        Ok(Self {
            desc: opened.desc.of_rank(plan.size)?,
            plan,
            opened,
            selected,
        })
    }

    /// Ranks.
    pub fn size(&self) -> usize {
        self.plan.size
    }

    /// Ranks on one device: all, unless there is a device for each.
    pub fn sharing(&self) -> usize {
        if self.selected.report.devices.len() >= self.plan.size {
            1
        } else {
            self.plan.size
        }
    }

    /// The device of a rank; empty is the first.
    pub fn device(&self, rank: usize) -> String {
        let devices = &self.selected.report.devices;
        match devices.get(rank) {
            // A rank that sees no other device has it as its first.
            Some(device) if self.sharing() == 1 && self.alone(rank).is_empty() => {
                device.name.clone()
            }
            _ => String::new(),
        }
    }

    /// Variables with which a rank that is started sees its device alone, where the backend has such.
    fn alone(&self, rank: usize) -> Environment {
        if self.sharing() > 1 || rank == 0 {
            return Environment::new();
        }
        let each = self.selected.report.details.get("alone");
        let own = each.and_then(|each| each.get(rank)?.as_object());
        let text = |(name, value): (&String, &serde_json::Value)| {
            Some((name.clone(), value.as_str()?.to_owned()))
        };
        own.into_iter().flatten().filter_map(text).collect()
    }

    /// Compute threads of each rank: as asked, else what the backend would take, divided by the ranks that share it.
    pub fn threads(&self, asked: usize) -> usize {
        match (asked, default_threads(self.selected)) {
            (0, None) => 0,
            (0, Some(all)) => (all / self.sharing()).max(1),
            (asked, _) => asked,
        }
    }

    /// Starts the other ranks.
    pub fn start(&self, settled: &Settled, failure: Failure) -> Result<Ranks, EngineError> {
        let Self {
            plan,
            opened,
            selected,
            ..
        } = self;
        let named = |name: &str, version: &str| (name.to_owned(), version.to_owned());
        let setup = |rank: usize, addresses: &[String]| Setup {
            version: VERSION.to_owned(),
            rank,
            addresses: addresses.to_vec(),
            model: opened.checkpoint.path().to_path_buf(),
            plugins_dir: plan.plugins_dir.clone(),
            plugin: plan.plugin.clone(),
            family: named(opened.family.name(), opened.family.version()),
            arch: opened.decision.arch.clone(),
            backend: named(selected.plugin.name(), selected.plugin.version()),
            device: self.device(rank),
            dtype: settled.dtype.name().to_owned(),
            kv_type: settled.kv_type.name().to_owned(),
            precision: settled.precision.map_or("", Precision::name).to_owned(),
            threads: settled.threads,
            context_tokens: settled.context_tokens,
        };
        Ranks::start(plan.size, failure, |rank, addresses| {
            (setup(rank, addresses), self.alone(rank))
        })
    }
}
