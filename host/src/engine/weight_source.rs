//! A checkpoint's tensors as a family asks for them: mapped, not copied, where file and backend
//! allow it.

use mlxcel_abi::kinds::quant;
use mlxcel_registry::checkpoint::{self, Checkpoint, QuantMode};

use crate::plugin::{AbiError, Backend, DType, DeviceTensor, QuantSpec, TensorInfo, WeightSource};

/// Tensors of one checkpoint on one backend.
pub struct CheckpointWeights<'a> {
    checkpoint: &'a Checkpoint,
    backend: &'a Backend,
    names: Vec<&'a str>,
    /// What 8-bit floats become.
    float: checkpoint::DType,
    /// Told about every tensor that was loaded.
    progress: &'a dyn Fn(usize, usize),
    loaded: std::cell::Cell<usize>,
}

impl<'a> CheckpointWeights<'a> {
    /// Lists the tensors; `progress` is called with tensors loaded and tensors in all. 8-bit floats are
    /// made `compute_dtype`.
    pub fn new(
        checkpoint: &'a Checkpoint,
        backend: &'a Backend,
        compute_dtype: DType,
        progress: &'a dyn Fn(usize, usize),
    ) -> Self {
        let names = checkpoint.names().collect();
        Self {
            checkpoint,
            backend,
            names,
            float: match compute_dtype {
                DType::F32 => checkpoint::DType::F32,
                DType::F16 => checkpoint::DType::F16,
                _ => checkpoint::DType::BF16,
            },
            progress,
            loaded: std::cell::Cell::new(0),
        }
    }

    fn header(&self, name: &str) -> Result<&checkpoint::TensorInfo, AbiError> {
        self.checkpoint.info(name).ok_or_else(|| {
            AbiError::new(
                mlxcel_abi::status::NOT_FOUND,
                format!("the checkpoint has no tensor \"{name}\""),
            )
        })
    }
}

fn dtype(name: &str, dtype: checkpoint::DType) -> Result<DType, AbiError> {
    DType::from_name(&dtype.name().to_ascii_lowercase()).ok_or_else(|| {
        AbiError::unimplemented(format!(
            "tensor \"{name}\" is stored as {}, which no backend takes",
            dtype.name()
        ))
    })
}

fn dims(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&n| n as i64).collect()
}

impl WeightSource for CheckpointWeights<'_> {
    fn count(&self) -> usize {
        self.names.len()
    }

    fn name(&self, index: usize) -> Option<&str> {
        self.names.get(index).copied()
    }

    fn info(&self, name: &str) -> Result<TensorInfo, AbiError> {
        let header = self.header(name)?;
        TensorInfo::new(dtype(name, header.dtype)?, &dims(&header.shape)).ok_or_else(|| {
            AbiError::invalid(format!(
                "tensor \"{name}\" has {} dimensions, at most 8 are possible",
                header.shape.len()
            ))
        })
    }

    fn load(&self, name: &str) -> Result<DeviceTensor, AbiError> {
        let data = self
            .checkpoint
            .load_float(name, self.float)
            .map_err(|e| AbiError::new(mlxcel_abi::status::DATA_LOSS, e.to_string()))?;
        let tensor = self.backend.from_host_shared(
            data.bytes,
            dtype(name, data.dtype)?,
            &dims(&data.shape),
        )?;
        self.loaded.set(self.loaded.get() + 1);
        (self.progress)(self.loaded.get(), self.names.len());
        Ok(tensor)
    }

    fn quant(&self, path: &str) -> Result<Option<QuantSpec>, AbiError> {
        Ok(self.checkpoint.quant_for(path).map(|spec| QuantSpec {
            mode: match spec.mode {
                QuantMode::Affine => quant::AFFINE,
                QuantMode::Centred => quant::CENTRED,
                QuantMode::Mxfp4 => quant::MXFP4,
                QuantMode::Mxfp8 => quant::MXFP8,
                QuantMode::Nvfp4 => quant::NVFP4,
            },
            bits: spec.bits,
            group_size: spec.group_size,
            ..QuantSpec::default()
        }))
    }
}
