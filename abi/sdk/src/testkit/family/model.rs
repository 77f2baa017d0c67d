//! A model that a family loaded, and steps over it.

use core::cell::RefCell;
use core::ffi::c_void;

use mlxcel_abi::family::{FamilyTable, LoadArgs, StepArgs, StepOutput};
use mlxcel_abi::{AbiError, DType, Str};

use super::caches::{Caches, Rows, Server};
use super::weights;
use super::{FamilyUnderTest, MapWeights};
use crate::testkit::conformance::array::Array;
use crate::{Backend, CacheDesc, Error, ModelDesc, Result, Tensor};

/// Rows that one sequence has in a step, after what its cache holds.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// Number of the sequence in the caches.
    pub sequence: usize,
    /// Tokens, at least one.
    pub tokens: &'a [u32],
}

/// How a step is run.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepOptions {
    /// Rows behind the real ones that belong to no sequence.
    pub padding_rows: usize,
    /// Ask for the logits of the last row of every part only.
    pub last_rows: bool,
}

/// Logits of one part of a step, a row for every position that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// Type the family gave them in.
    pub dtype: DType,
    /// Rows of `vocab_size` numbers.
    pub rows: Vec<Vec<f32>>,
}

/// A loaded model. It is unloaded when it is dropped.
pub struct LoadedModel {
    table: FamilyTable,
    model: *mut c_void,
    backend: Backend,
    desc: ModelDesc,
    compute_dtype: DType,
}

impl core::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "LoadedModel({} in {})",
            self.desc.arch,
            self.compute_dtype.name()
        )
    }
}

impl LoadedModel {
    /// Loads the family's model with these weights.
    pub(super) fn load(
        family: &FamilyUnderTest,
        weights: &MapWeights,
        backend: &Backend,
        compute_dtype: DType,
    ) -> Result<Self> {
        let server = weights::Server::new(weights, backend);
        let api = server.table();
        let args = LoadArgs {
            arch: Str::new(&family.arch),
            config: Str::new(&family.config),
            ops: backend.table(),
            weights: &api,
            compute_dtype,
            context_length: family.context_length,
            ..LoadArgs::default()
        };
        let mut model = core::ptr::null_mut();
        command!(&family.table, load, &args, &mut model)?;
        if model.is_null() {
            return Err(Error::Other("load succeeded and gave no model".to_owned()));
        }
        Ok(Self {
            table: family.table,
            model,
            backend: backend.clone(),
            desc: family.desc.clone(),
            compute_dtype,
        })
    }

    /// The family's description of the model.
    pub fn desc(&self) -> &ModelDesc {
        &self.desc
    }

    pub(super) fn table(&self) -> &FamilyTable {
        &self.table
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.model
    }

    pub(super) fn compute_dtype(&self) -> DType {
        self.compute_dtype
    }

    /// The backend it lives on.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Computes one packed step of all `parts` and appends to the caches. When it fails the caches
    /// stay as they were.
    pub fn step(
        &self,
        caches: &mut Caches,
        parts: &[Part<'_>],
        options: StepOptions,
    ) -> Result<Vec<Logits>> {
        for part in parts {
            self.encode_if_new(caches, part.sequence)?;
        }
        let mut rows = Vec::new();
        let (mut tokens, mut positions, mut logit_rows) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            let start = caches.length(part.sequence);
            rows.push(Rows {
                sequence: part.sequence,
                first: tokens.len(),
                count: part.tokens.len(),
            });
            let first = if options.last_rows {
                part.tokens.len().saturating_sub(1)
            } else {
                0
            };
            logit_rows.extend(
                (tokens.len() + first..tokens.len() + part.tokens.len()).map(|row| row as i32),
            );
            tokens.extend_from_slice(part.tokens);
            positions.extend((start..start + part.tokens.len()).map(|position| position as i32));
        }
        tokens.resize(tokens.len() + options.padding_rows, 0);
        positions.resize(tokens.len(), 0);

        let n_positions = positions.len() as i64;
        let server = Server {
            positions: Tensor::from_slice(&self.backend, &positions, &[n_positions])?,
            backend: &self.backend,
            layers: &self.desc.layers,
            dtype: self.compute_dtype,
            parts: &rows,
            n_rows: tokens.len(),
            caches: RefCell::new(caches.clone()),
            attended: RefCell::new(vec![0; self.desc.layers.len()]),
            written: RefCell::default(),
        };
        let logits = self.forward(&server, &tokens, &logit_rows)?;
        let logits = self.read_logits(&logits, logit_rows.len())?;
        self.check_attended(&server.attended.borrow())?;
        *caches = server.caches.into_inner();
        rows.iter()
            .for_each(|rows| caches.advance(rows.sequence, rows.count));
        let mut logits = logits.into_iter();
        Ok(parts
            .iter()
            .map(|part| Logits {
                dtype: self.compute_dtype,
                rows: logits
                    .by_ref()
                    .take(if options.last_rows {
                        1
                    } else {
                        part.tokens.len()
                    })
                    .collect(),
            })
            .collect())
    }

    fn forward(&self, server: &Server<'_>, tokens: &[u32], logit_rows: &[i32]) -> Result<Tensor> {
        let n = tokens.len() as i64;
        let tokens = Tensor::from_slice(&self.backend, tokens, &[n])?;
        let logit_rows = Tensor::from_slice(&self.backend, logit_rows, &[logit_rows.len() as i64])?;
        let kv = server.table();
        let args = StepArgs {
            tokens: tokens.handle(),
            positions: server.positions.handle(),
            logit_rows: logit_rows.handle(),
            n_rows: n as u32,
            n_sequences: server.n_sequences() as u32,
            kv: &kv,
            ..StepArgs::default()
        };
        let mut out = StepOutput::default();
        command!(&self.table, forward, self.model, &args, &mut out)?;
        Ok(Tensor::from_handle(&self.backend, out.logits))
    }

    fn read_logits(&self, logits: &Tensor, rows: usize) -> Result<Vec<Vec<f32>>> {
        let info = logits.info()?;
        let wanted = [rows as i64, self.desc.vocab_size as i64];
        if info.shape() != wanted || info.dtype != self.compute_dtype {
            return Err(Error::Other(format!(
                "logits are {} {:?}, expected {} {wanted:?}",
                info.dtype.name(),
                info.shape(),
                self.compute_dtype.name()
            )));
        }
        let numbers = Array::read(logits)?
            .0
            .reals()
            .iter()
            .map(|&x| x as f32)
            .collect::<Vec<f32>>();
        Ok(numbers
            .chunks(self.desc.vocab_size.max(1))
            .map(<[f32]>::to_vec)
            .collect())
    }

    fn check_attended(&self, attended: &[usize]) -> Result<()> {
        for (layer, (desc, &times)) in self.desc.layers.iter().zip(attended).enumerate() {
            let (expected, what) = match desc {
                CacheDesc::None => (0, "attended"),
                CacheDesc::Recurrent { states } => (states.len(), "wrote states"),
                // A layer may use its index keys alone.
                CacheDesc::Latent {
                    index_dim: Some(_), ..
                } if times == 0 => (0, "attended"),
                _ => (1, "attended"),
            };
            if times != expected {
                return Err(Error::Other(format!(
                    "layer {layer} {what} {times} time(s) in a step, its description implies {expected}"
                )));
            }
        }
        Ok(())
    }

    /// Unloads now and says whether that worked.
    pub fn unload(mut self) -> Result<()> {
        let model = core::mem::replace(&mut self.model, core::ptr::null_mut());
        command!(&self.table, unload, model)
    }
}

impl Drop for LoadedModel {
    fn drop(&mut self) {
        if !self.model.is_null() {
            // A failed unload cannot be reported from a drop; leak checks find what it left.
            let _ = command!(&self.table, unload, self.model);
        }
    }
}

/// The error behind a failed call into a family.
pub(super) fn source_of(error: &Error) -> Option<&AbiError> {
    match error {
        Error::Backend { source, .. } => Some(source),
        _ => None,
    }
}
