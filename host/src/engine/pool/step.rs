//! The caches during one step, as the family asks for them.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::plugin::{
    AbiError, AttendArgs, CallError, DType, DeviceTensor, GatedDeltaArgs, GatedDeltaPoolArgs,
    IndexArgs, KvSource, PagedAttentionArgs, RotateArgs, ShortConvArgs, ShortConvPoolArgs,
    SparseIndexArgs, StateRows, Tensor,
};

use super::super::cross::CrossPool;
use super::super::states::StatePool;
use super::{KvPool, LayerPool};

/// A step's arrays on the device, those that the family does not get with its arguments.
pub struct StepArrays<'a> {
    /// `[T]` i32.
    pub slots: &'a DeviceTensor,
    /// `[T]` i32.
    pub row_sequences: &'a DeviceTensor,
    /// `[T]` i32.
    pub positions: &'a DeviceTensor,
    /// `[S, P]` i32.
    pub page_table: &'a DeviceTensor,
    /// `S + 1` boundaries.
    pub row_starts: &'a [u32],
    /// P.
    pub pages_per_sequence: usize,
    /// `[S]`: slots of states that sequences start from, -1 for none.
    pub state_sources: &'a [i32],
    /// `[S]`: slots that take the new states.
    pub state_targets: &'a [i32],
    /// Where the model has an encoder.
    pub cross: Option<CrossArrays<'a>>,
}

/// Arrays by which rows find the encoder's output of their sequence.
pub struct CrossArrays<'a> {
    /// `[T]` i32: its last position, so that every row sees all of it.
    pub positions: &'a DeviceTensor,
    /// `[S, Pc]` i32.
    pub page_table: &'a DeviceTensor,
}

/// `[S]` and `[S + 1]` i32 tensors that only models with states need.
struct StateArrays {
    sources: DeviceTensor,
    targets: DeviceTensor,
    row_starts: DeviceTensor,
}

/// The caches during one step.
pub struct StepKv<'a> {
    pool: &'a KvPool,
    states: &'a StatePool,
    cross: &'a CrossPool,
    arrays: StepArrays<'a>,
    state_arrays: Option<StateArrays>,
    /// States set by `state_write` in this step.
    written: RefCell<HashMap<(u32, u32), DeviceTensor>>,
}

impl<'a> StepKv<'a> {
    /// The caches for one step.
    pub fn new(
        pool: &'a KvPool,
        states: &'a StatePool,
        cross: &'a CrossPool,
        arrays: StepArrays<'a>,
    ) -> Result<Self, CallError> {
        let mut kv = Self {
            pool,
            states,
            cross,
            arrays,
            state_arrays: None,
            written: RefCell::default(),
        };
        if states.is_needed() {
            kv.state_arrays = Some(StateArrays {
                sources: kv.ints(kv.arrays.state_sources)?,
                targets: kv.ints(kv.arrays.state_targets)?,
                row_starts: kv.boundaries()?,
            });
        }
        Ok(kv)
    }

    fn ints(&self, values: &[i32]) -> Result<DeviceTensor, CallError> {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let shape = [values.len() as i64];
        self.pool.backend.from_host(&bytes, DType::I32, &shape)
    }

    fn boundaries(&self) -> Result<DeviceTensor, CallError> {
        let starts: Vec<i32> = self
            .arrays
            .row_starts
            .iter()
            .map(|row| *row as i32)
            .collect();
        self.ints(&starts)
    }

    fn state_arrays(&self) -> Result<&StateArrays, AbiError> {
        self.state_arrays
            .as_ref()
            .ok_or_else(|| AbiError::invalid("the model's description has no recurrent states"))
    }

    fn rows(&self) -> Result<StateRows, AbiError> {
        let arrays = self.state_arrays()?;
        Ok(StateRows {
            sources: arrays.sources.handle(),
            targets: arrays.targets.handle(),
            row_sequences: self.arrays.row_sequences.handle(),
            row_starts: arrays.row_starts.handle(),
            ..StateRows::default()
        })
    }

    fn unknown(&self, what: &str, layer: u32) -> AbiError {
        let layers = self.pool.layers.len();
        AbiError::invalid(format!(
            "{what}: layer {layer} has no such cache (the model described {layers} layers)"
        ))
    }

    /// Arguments of attention that do not depend on the kind of cache.
    fn paged(&self, args: &AttendArgs, window: usize) -> PagedAttentionArgs {
        PagedAttentionArgs {
            q: args.q,
            k: args.k,
            v: args.v,
            slots: self.arrays.slots.handle(),
            row_sequences: self.arrays.row_sequences.handle(),
            positions: self.arrays.positions.handle(),
            page_table: self.arrays.page_table.handle(),
            window: if args.window > 0 {
                args.window
            } else {
                window as u32
            },
            scale: args.scale,
            softcap: args.softcap,
            sinks: args.sinks,
            chunk: args.chunk,
            selection: args.selection,
            read_only: u32::from(args.k.is_none()),
            ..PagedAttentionArgs::default()
        }
    }

    /// A backend of minor 0 would not see what is new and compute something else.
    fn check_minor(&self, args: &AttendArgs, is_latent: bool) -> Result<(), AbiError> {
        let needs = [
            (is_latent, "latent keys"),
            (args.k.is_none(), "a layer that uses another's keys"),
            (!args.selection.is_none(), "a selection of keys"),
            (args.chunk > 0, "attention in chunks"),
        ];
        let minor = self.pool.backend.minor();
        match needs.into_iter().find(|(needed, _)| *needed && minor < 1) {
            None => Ok(()),
            Some((_, what)) => Err(AbiError::unimplemented(format!(
                "attend: the backend was built at ABI minor {minor} and does not know {what}: update it"
            ))),
        }
    }

    fn attend_pair(
        &self,
        layer: u32,
        window: usize,
        args: &AttendArgs,
        rotate: Option<&RotateArgs>,
    ) -> Result<DeviceTensor, AbiError> {
        if args.k.is_none() != args.v.is_none() {
            return Err(AbiError::invalid(format!(
                "attend: layer {layer} needs keys and values, or neither to append nothing"
            )));
        }
        let index = layer as usize;
        let pool = self
            .pool
            .pools
            .borrow_mut()
            .get_mut(index)
            .and_then(Option::take);
        let pool = pool.ok_or_else(|| self.unknown("attend", layer))?;
        let paged = PagedAttentionArgs {
            k_pool: pool.keys.handle(),
            v_pool: pool.values.handle(),
            ..self.paged(args, window)
        };
        // Dropping the old pool before the step is evaluated lets the backend write in place.
        let backend = &self.pool.backend;
        let row_starts = self.arrays.row_starts;
        let attended = match rotate {
            Some(rotate) => backend.rotated_paged_attention(paged, rotate, row_starts),
            None => backend.paged_attention(paged, row_starts),
        };
        let (result, pool) = match attended {
            Ok(attended) => match attended.values {
                Some(values) => {
                    let keys = attended.keys;
                    (Ok(attended.result), LayerPool { keys, values })
                }
                None => (
                    Err(AbiError::internal("attention gave no values back")),
                    pool,
                ),
            },
            Err(error) => (Err(error.into()), pool),
        };
        if let Some(slot) = self.pool.pools.borrow_mut().get_mut(index) {
            *slot = Some(pool);
        }
        result
    }

    fn attend_latent(
        &self,
        layer: u32,
        v_dim: usize,
        args: &AttendArgs,
    ) -> Result<DeviceTensor, AbiError> {
        if !args.v.is_none() {
            return Err(AbiError::invalid(format!(
                "attend: layer {layer} is latent, its values are part of its keys"
            )));
        }
        let mut latents = self.pool.latents.borrow_mut();
        let pool = latents.get_mut(layer as usize).and_then(Option::as_mut);
        let pool = pool.ok_or_else(|| self.unknown("attend", layer))?;
        pool.attend(|keys| {
            let paged = PagedAttentionArgs {
                k_pool: keys.handle(),
                latent_dim: v_dim as u32,
                ..self.paged(args, 0)
            };
            self.pool
                .backend
                .paged_attention(paged, self.arrays.row_starts)
        })
    }

    /// Attention over an encoder's output, of which every row sees all of its sequence's.
    fn attend_cross(&self, layer: u32, args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        let is_plain = args.k.is_none()
            && args.v.is_none()
            && args.selection.is_none()
            && args.window == 0
            && args.chunk == 0;
        if !is_plain {
            return Err(AbiError::invalid(format!(
                "attend: layer {layer} attends to an encoder: it takes queries alone, without keys, values, window, chunk or selection"
            )));
        }
        let arrays = self.arrays.cross.as_ref().ok_or_else(|| {
            AbiError::internal(format!("no sequence has what layer {layer} attends to"))
        })?;
        self.cross.with_layer(layer, |pool| {
            let paged = PagedAttentionArgs {
                k_pool: pool.keys.handle(),
                v_pool: pool.values.handle(),
                positions: arrays.positions.handle(),
                page_table: arrays.page_table.handle(),
                ..self.paged(args, 0)
            };
            let backend = &self.pool.backend;
            Ok(backend
                .paged_attention(paged, self.arrays.row_starts)?
                .result)
        })
    }

    /// Shape of what a family writes as a state: `[S, shape..]`.
    fn state_shape(&self, layer: u32, state: u32) -> Result<Vec<i64>, AbiError> {
        let sequences = self.arrays.state_sources.len() as i64;
        let shape = self.states.shape(layer, state)?.iter().map(|n| *n as i64);
        Ok(core::iter::once(sequences).chain(shape).collect())
    }
}

impl KvSource for StepKv<'_> {
    fn attend(&self, layer: u32, args: &AttendArgs) -> Result<DeviceTensor, AbiError> {
        let desc = self.pool.layers.get(layer as usize);
        let desc = desc.ok_or_else(|| self.unknown("attend", layer))?;
        self.check_minor(args, desc.latent().is_some())?;
        if desc.cross().is_some() {
            return self.attend_cross(layer, args);
        }
        match desc.latent() {
            Some((_, v_dim, _)) => self.attend_latent(layer, v_dim, args),
            None => self.attend_pair(layer, desc.window(), args, None),
        }
    }

    fn attend_rotated(
        &self,
        layer: u32,
        args: &AttendArgs,
        rotate: &RotateArgs,
    ) -> Result<DeviceTensor, AbiError> {
        let desc = self.pool.layers.get(layer as usize);
        let desc = desc.ok_or_else(|| self.unknown("attend_rotated", layer))?;
        if desc.dims().is_none() || args.k.is_none() {
            return Err(AbiError::unimplemented(format!(
                "attend_rotated: layer {layer} has no keys of its own that could be rotated: norm, rotate and attend"
            )));
        }
        self.attend_pair(layer, desc.window(), args, Some(rotate))
    }

    fn index(&self, layer: u32, args: &IndexArgs) -> Result<DeviceTensor, AbiError> {
        let mut latents = self.pool.latents.borrow_mut();
        let pool = latents.get_mut(layer as usize).and_then(Option::as_mut);
        let pool = pool.ok_or_else(|| self.unknown("index", layer))?;
        pool.over_index(|keys| {
            let sparse = SparseIndexArgs {
                q: args.q,
                k: args.k,
                weights: args.weights,
                pool: keys.handle(),
                slots: self.arrays.slots.handle(),
                row_sequences: self.arrays.row_sequences.handle(),
                positions: self.arrays.positions.handle(),
                page_table: self.arrays.page_table.handle(),
                top_k: args.top_k,
                scale: args.scale,
                ..SparseIndexArgs::default()
            };
            self.pool
                .backend
                .sparse_index(sparse, self.arrays.row_starts)
        })
    }

    fn index_keys(&self, layer: u32, k: Tensor) -> Result<DeviceTensor, AbiError> {
        let mut latents = self.pool.latents.borrow_mut();
        let pool = latents.get_mut(layer as usize).and_then(Option::as_mut);
        let pool = pool.ok_or_else(|| self.unknown("index_keys", layer))?;
        let backend = &self.pool.backend;
        pool.over_index(|keys| {
            let shape = backend.info(keys)?.shape().to_vec();
            let width = shape.last().copied().unwrap_or_default();
            let flat = backend.reshape(keys, &[-1, width])?;
            let written = backend.put_rows(&flat, self.arrays.slots, k)?;
            let new = backend.reshape(&written, &shape)?;
            // [S, P, page_size, D]
            let pages = backend.take(&new, self.arrays.page_table, 0)?;
            let length = self.arrays.pages_per_sequence * self.pool.page_size;
            let sequences = self.arrays.row_starts.len().saturating_sub(1);
            let all = backend.reshape(&pages, &[sequences as i64, length as i64, width])?;
            Ok([all, new])
        })
    }

    fn short_conv(
        &self,
        layer: u32,
        state: u32,
        args: &ShortConvArgs,
    ) -> Result<DeviceTensor, AbiError> {
        let rows = self.rows()?;
        self.states.exchange(layer, state, |pool| {
            let args = ShortConvPoolArgs {
                x: args.x,
                weight: args.weight,
                bias: args.bias,
                pool: pool.handle(),
                rows,
                activation: args.activation,
                ..ShortConvPoolArgs::default()
            };
            let [result, pool] = self.pool.backend.short_conv(args, self.arrays.row_starts)?;
            Ok((result, Some(pool)))
        })
    }

    fn gated_delta(
        &self,
        layer: u32,
        state: u32,
        args: &GatedDeltaArgs,
    ) -> Result<DeviceTensor, AbiError> {
        let rows = self.rows()?;
        self.states.exchange(layer, state, |pool| {
            let args = GatedDeltaPoolArgs {
                q: args.q,
                k: args.k,
                v: args.v,
                g: args.g,
                beta: args.beta,
                pool: pool.handle(),
                rows,
                ..GatedDeltaPoolArgs::default()
            };
            let [result, pool] = self
                .pool
                .backend
                .gated_delta(args, self.arrays.row_starts)?;
            Ok((result, Some(pool)))
        })
    }

    fn state_read(&self, layer: u32, state: u32) -> Result<DeviceTensor, AbiError> {
        let shape = self.state_shape(layer, state)?;
        if let Some(written) = self.written.borrow().get(&(layer, state)) {
            return Ok(written.try_clone()?);
        }
        let sources = self.arrays.state_sources;
        let known: Vec<u8> = sources.iter().map(|slot| u8::from(*slot >= 0)).collect();
        let slots: Vec<i32> = sources.iter().map(|slot| (*slot).max(0)).collect();
        let slots = self.ints(&slots)?;
        let backend = &self.pool.backend;
        self.states.exchange(layer, state, |pool| {
            let held = backend.take(pool, &slots, 0)?;
            let mut mask = vec![1; shape.len()];
            if let Some(first) = mask.first_mut() {
                *first = known.len() as i64;
            }
            let known = backend.from_host(&known, DType::BOOL, &mask)?;
            let zero = backend.full(0.0, DType::F32, &[])?;
            Ok((backend.select(&known, &held, &zero)?, None))
        })
    }

    fn state_write(&self, layer: u32, state: u32, value: Tensor) -> Result<(), AbiError> {
        let wanted = self.state_shape(layer, state)?;
        let backend = &self.pool.backend;
        let info = backend.info(value)?;
        if info.shape() != wanted || info.dtype != DType::F32 {
            return Err(AbiError::invalid(format!(
                "state_write: state {state} of layer {layer} is {} {:?}, expected f32 {wanted:?}",
                info.dtype.name(),
                info.shape()
            )));
        }
        let targets = &self.state_arrays()?.targets;
        self.states.exchange(layer, state, |pool| {
            Ok(((), Some(backend.put_rows(pool, targets, value)?)))
        })?;
        let value = backend.retain(value)?;
        self.written.borrow_mut().insert((layer, state), value);
        Ok(())
    }

    fn row_starts(&self) -> Result<DeviceTensor, AbiError> {
        match &self.state_arrays {
            Some(arrays) => Ok(arrays.row_starts.try_clone()?),
            None => Ok(self.boundaries()?),
        }
    }

    fn row_sequences(&self) -> Result<DeviceTensor, AbiError> {
        Ok(self.arrays.row_sequences.try_clone()?)
    }
}
