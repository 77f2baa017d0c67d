//! Pools of layers whose keys hold their values, and of the index keys beside them.

use crate::plugin::{AbiError, Attended, Backend, CallError, DeviceTensor, Tensor};

use super::super::desc::CacheDesc;
use super::super::kv_types::KvType;

/// What one latent layer keeps.
pub(in crate::engine) struct LatentPool {
    /// `[pages, page_size, 1, k_dim]`.
    pub keys: Option<DeviceTensor>,
    /// `[pages, page_size, index_dim]`, where the layer has index keys. Out during a call.
    pub index: Option<DeviceTensor>,
}

impl LatentPool {
    /// The pool of a layer with `added` pages behind those of `previous`; none for other layers.
    pub(super) fn grown(
        backend: &Backend,
        layer: &CacheDesc,
        previous: Option<Self>,
        [added, page_size]: [usize; 2],
        kv_type: KvType,
    ) -> Result<Option<Self>, CallError> {
        let Some((k_dim, _, index_dim)) = layer.latent() else {
            return Ok(None);
        };
        let (old_keys, old_index) = previous.map_or((None, None), |pool| (pool.keys, pool.index));
        let grow = |old: Option<DeviceTensor>, shape: &[usize]| {
            let shape: Vec<i64> = shape.iter().map(|n| *n as i64).collect();
            let zeros = backend.full(0.0, kv_type.storage(), &shape)?;
            match old {
                None => Ok(zeros),
                Some(old) => backend.concat(&[old.handle(), zeros.handle()], 0),
            }
        };
        let keys = grow(
            old_keys,
            &[added, page_size, 1, kv_type.stored_width(k_dim)],
        )?;
        let index = index_dim
            .map(|width| grow(old_index, &[added, page_size, kv_type.stored_width(width)]))
            .transpose()?;
        Ok(Some(Self {
            keys: Some(keys),
            index,
        }))
    }

    /// Handles of what is kept.
    pub(super) fn handles(&self) -> impl Iterator<Item = Tensor> + '_ {
        [&self.keys, &self.index]
            .into_iter()
            .flatten()
            .map(DeviceTensor::handle)
    }

    /// Takes the keys out, runs an attention call over them and puts the new ones in their place.
    /// Without the old handle alive, the backend may write in place.
    pub(in crate::engine) fn attend(
        &mut self,
        call: impl FnOnce(&DeviceTensor) -> Result<Attended, CallError>,
    ) -> Result<DeviceTensor, AbiError> {
        let keys = self.keys.take().ok_or_else(|| busy("keys"))?;
        let outcome = call(&keys);
        match outcome {
            Ok(attended) => {
                self.keys = Some(attended.keys);
                Ok(attended.result)
            }
            Err(error) => {
                self.keys = Some(keys);
                Err(error.into())
            }
        }
    }

    /// The same for a call over the index keys that gives a result and the new ones.
    pub(in crate::engine) fn over_index(
        &mut self,
        call: impl FnOnce(&DeviceTensor) -> Result<[DeviceTensor; 2], CallError>,
    ) -> Result<DeviceTensor, AbiError> {
        let keys = self.index.take().ok_or_else(|| busy("index keys"))?;
        match call(&keys) {
            Ok([result, keys]) => {
                self.index = Some(keys);
                Ok(result)
            }
            Err(error) => {
                self.index = Some(keys);
                Err(error.into())
            }
        }
    }
}

fn busy(what: &str) -> AbiError {
    AbiError::invalid(format!("the layer has no {what}"))
}
