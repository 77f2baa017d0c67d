//! The encoder of a request, before the request's first step.

use crate::engine::cross::EncodeKv;
use crate::engine::encoder::Features;
use crate::engine::error::EngineError;
use crate::engine::sequence::Sequence;
use crate::plugin::{CallError, DType};

use super::Runner;

/// What became of an encoder's run.
pub enum EncodeError {
    /// It failed, and nothing but its own request has to do with that.
    Own(EngineError),
    /// Caches were half written.
    Everybody(EngineError),
}

impl Runner {
    /// Has the family run its encoder and puts the result into pages of the sequence.
    pub fn encode(
        &mut self,
        sequence: &mut Sequence,
        features: &Features,
    ) -> Result<(), EncodeError> {
        let positions = self
            .desc
            .encoder
            .map_or(0, |encoder| encoder.positions(features.rows()));
        let own = |error: CallError| EncodeError::Own(error.into());
        let backend = self.model.backend().clone();
        let words = features.values().iter().flat_map(|v| v.to_ne_bytes());
        let bytes: Vec<u8> = words.collect();
        let shape = [features.rows() as i64, features.width() as i64];
        let plain = backend.from_host(&bytes, DType::F32, &shape).map_err(own)?;
        let tensor = backend.cast(&plain, self.compute_dtype).map_err(own)?;
        let kv = EncodeKv::new(&self.cross, positions);
        self.model
            .encode(&tensor, features.rows() as u32, &kv)
            .map_err(own)?;
        let handles = kv.finish().map_err(|error| {
            let subject = format!("family {}: encode", self.model.family().name());
            own(CallError::new(subject, error))
        })?;
        backend.eval(&handles).map_err(own)?;
        let encoded = kv.into_encoded();
        sequence.cross = self.cross.write(encoded).map_err(EncodeError::Everybody)?;
        Ok(())
    }
}
