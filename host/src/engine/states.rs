//! Recurrent states on the device: for every state of every layer one tensor of slots.
//!
//! Slot 0 belongs to nobody and takes what padding sequences write. Which sequence has which slot is
//! `state_slots`' business.

mod transfer;

use std::cell::RefCell;

use crate::plugin::{AbiError, Backend, CallError, DType, DeviceTensor, Tensor};

use super::desc::{ModelDesc, StateDesc};

/// Device memory of all layers' states.
pub struct StatePool {
    backend: Backend,
    /// States of every layer; empty for most.
    layers: Vec<Vec<StateDesc>>,
    bytes_per_slot: usize,
    /// By layer and state, `[slots, shape..]`. Empty until the first step; a state is out during a
    /// call.
    pools: RefCell<Vec<Vec<Option<DeviceTensor>>>>,
    slots: usize,
}

impl StatePool {
    /// A pool without memory; it grows with the slots that are handed out.
    pub fn new(backend: &Backend, desc: &ModelDesc) -> Self {
        Self {
            backend: backend.clone(),
            layers: desc
                .layers
                .iter()
                .map(|layer| layer.states().to_vec())
                .collect(),
            bytes_per_slot: desc.state_bytes_per_sequence(),
            pools: RefCell::default(),
            slots: 0,
        }
    }

    /// Whether the model has states at all.
    pub fn is_needed(&self) -> bool {
        self.bytes_per_slot > 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes_per_slot * self.slots
    }

    /// Makes room for `slots` slots, slot 0 included, but at most `limit`.
    pub fn grow_to(&mut self, slots: usize, limit: usize) -> Result<(), CallError> {
        if slots <= self.slots || !self.is_needed() {
            return Ok(());
        }
        let target = slots.max(self.slots * 2).min(limit.max(slots));
        let added = (target - self.slots) as i64;
        let mut old = self.pools.take().into_iter();
        let mut pools = Vec::with_capacity(self.layers.len());
        for states in &self.layers {
            let mut previous = old.next().unwrap_or_default().into_iter();
            let mut layer = Vec::with_capacity(states.len());
            for state in states {
                let mut shape = vec![added];
                shape.extend(state.shape.iter().map(|n| *n as i64));
                let zeros = self.backend.full(0.0, DType::F32, &shape)?;
                layer.push(Some(match previous.next().flatten() {
                    None => zeros,
                    Some(held) => self.backend.concat(&[held.handle(), zeros.handle()], 0)?,
                }));
            }
            pools.push(layer);
        }
        self.pools = RefCell::new(pools);
        self.slots = target;
        self.backend.eval(&self.handles())?;
        self.backend.clear_cache()
    }

    /// Lets all memory go. After a failed step the states may never be computable.
    pub fn reset(&mut self) {
        self.pools.take();
        self.slots = 0;
    }

    /// Handles of all states, to be evaluated with a step.
    pub fn handles(&self) -> Vec<Tensor> {
        let pools = self.pools.borrow();
        let states = pools.iter().flatten().flatten();
        states.map(DeviceTensor::handle).collect()
    }

    /// Dimensions of one sequence's state.
    pub fn shape(&self, layer: u32, state: u32) -> Result<&[usize], AbiError> {
        self.layers
            .get(layer as usize)
            .and_then(|states| states.get(state as usize))
            .map(|state| state.shape.as_slice())
            .ok_or_else(|| {
                AbiError::invalid(format!(
                    "layer {layer} has no state {state} in the model's description"
                ))
            })
    }

    /// Runs a call that takes a state's pool and gives a result and the new pool. The old pool is gone
    /// before the step is evaluated, so that the backend may write in place.
    pub fn exchange<T>(
        &self,
        layer: u32,
        state: u32,
        call: impl FnOnce(&DeviceTensor) -> Result<(T, Option<DeviceTensor>), AbiError>,
    ) -> Result<T, AbiError> {
        self.shape(layer, state)?;
        let place = |put: Option<DeviceTensor>| -> Option<DeviceTensor> {
            let mut pools = self.pools.borrow_mut();
            let slot = pools.get_mut(layer as usize)?.get_mut(state as usize)?;
            match put {
                None => slot.take(),
                Some(pool) => slot.replace(pool),
            }
        };
        let pool = place(None).ok_or_else(|| {
            AbiError::internal(format!("state {state} of layer {layer} is in use"))
        })?;
        match call(&pool) {
            Ok((result, new)) => {
                place(Some(new.unwrap_or(pool)));
                Ok(result)
            }
            Err(error) => {
                place(Some(pool));
                Err(error)
            }
        }
    }
}
