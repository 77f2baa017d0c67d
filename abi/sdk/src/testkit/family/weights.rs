//! A checkpoint in memory: tensors by name, as the host would serve them to a family.

use core::ffi::c_void;
use std::collections::BTreeMap;

use mlxcel_abi::guard::guard;
use mlxcel_abi::host::WeightsApi;
use mlxcel_abi::kinds::{code_of, quant as mode_of};
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::status::{self, Status};
use mlxcel_abi::{AbiError, DType, ErrorObj, Str, Table, Tensor as Handle, TensorInfo};
use serde_json::Value as Json;

use crate::testkit::conformance::array::{Array, tensor_of_bytes};
use crate::testkit::reference::quant;
use crate::testkit::reference::value::{Mode, Value, decode, encode};
use crate::{Backend, Error, Result, Tensor};

const MODE: Mode = Mode { shapes_only: false };

/// One tensor. Without bytes it reads as zeros, which is enough for checks of shapes.
#[derive(Debug, Clone)]
struct Entry {
    dtype: DType,
    shape: Vec<i64>,
    bytes: Option<Vec<u8>>,
}

/// Tensors by name, and how modules are quantised.
#[derive(Clone, Default)]
pub struct MapWeights {
    entries: BTreeMap<String, Entry>,
    default_quant: Option<QuantSpec>,
    quants: BTreeMap<String, Option<QuantSpec>>,
}

impl core::fmt::Debug for MapWeights {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "MapWeights({} tensors)", self.entries.len())
    }
}

fn count(shape: &[i64]) -> usize {
    shape.iter().map(|&dim| dim.max(0) as usize).product()
}

impl MapWeights {
    /// An empty checkpoint.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a tensor.
    pub fn insert(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[i64],
        bytes: Vec<u8>,
    ) -> Result<()> {
        let expected = count(shape) * dtype.size_bytes();
        if expected != bytes.len() {
            return Err(Error::Other(format!(
                "tensor \"{name}\" of {} {shape:?} takes {expected} bytes, found {}",
                dtype.name(),
                bytes.len()
            )));
        }
        let entry = Entry {
            dtype,
            shape: shape.to_vec(),
            bytes: Some(bytes),
        };
        self.entries.insert(name.to_owned(), entry);
        Ok(())
    }

    /// Adds or replaces an f32 tensor.
    pub fn insert_f32(&mut self, name: &str, shape: &[i64], numbers: &[f32]) -> Result<()> {
        let bytes = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
        self.insert(name, DType::F32, shape, bytes)
    }

    pub(in crate::testkit) fn insert_array(&mut self, name: &str, array: &Array) -> Result<()> {
        self.insert(name, array.0.dtype, &array.dims(), encode(&array.0))
    }

    /// Adds or replaces a tensor that has a shape and no data.
    pub fn declare(&mut self, name: &str, dtype: DType, shape: &[i64]) {
        let entry = Entry {
            dtype,
            shape: shape.to_vec(),
            bytes: None,
        };
        self.entries.insert(name.to_owned(), entry);
    }

    /// Takes a tensor out; whether it was there.
    pub fn remove(&mut self, name: &str) -> bool {
        self.entries.remove(name).is_some()
    }

    /// Names in sorted order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Dtype and shape of a tensor.
    pub fn info(&self, name: &str) -> Option<(DType, &[i64])> {
        self.entries
            .get(name)
            .map(|entry| (entry.dtype, entry.shape.as_slice()))
    }

    /// Dtype and shape of a tensor that has no data yet.
    pub(super) fn undecided(&self, name: &str) -> Option<(DType, Vec<i64>)> {
        let entry = self
            .entries
            .get(name)
            .filter(|entry| entry.bytes.is_none())?;
        Some((entry.dtype, entry.shape.clone()))
    }

    /// How modules are quantised unless something else is said of one.
    pub fn set_default_quant(&mut self, spec: QuantSpec) {
        self.default_quant = Some(spec);
    }

    /// How the module at `path` is quantised; none when it is not.
    pub fn set_quant(&mut self, path: &str, spec: Option<QuantSpec>) {
        self.quants.insert(path.to_owned(), spec);
    }

    fn quant(&self, path: &str) -> Option<QuantSpec> {
        self.quants.get(path).copied().unwrap_or(self.default_quant)
    }

    /// Reads `quantization` of an MLX configuration: a default and overrides by module.
    pub fn read_quantization(&mut self, config: &Json) -> Result<()> {
        let Some(table) = config.get("quantization").and_then(Json::as_object) else {
            return Ok(());
        };
        if table.contains_key("bits") {
            self.default_quant = Some(spec_of(&Json::Object(table.clone()))?);
        }
        for (path, given) in table {
            match given {
                Json::Object(_) => self.set_quant(path, Some(spec_of(given)?)),
                Json::Bool(false) => self.set_quant(path, None),
                _ => {}
            }
        }
        Ok(())
    }

    /// The tensor's elements.
    fn value(&self, name: &str) -> Result<Value> {
        let missing = || Error::MissingTensor {
            name: name.to_owned(),
            expected: "any".to_owned(),
        };
        let entry = self.entries.get(name).ok_or_else(missing)?;
        let bytes = entry
            .bytes
            .clone()
            .unwrap_or_else(|| vec![0; count(&entry.shape) * entry.dtype.size_bytes()]);
        let data = decode(entry.dtype, &bytes).map_err(refused)?;
        let shape = entry.shape.iter().map(|&dim| dim as usize).collect();
        Ok(Value {
            dtype: entry.dtype,
            shape,
            data,
        })
    }

    /// Quantises the weight at `path`: packed words, scales and, when affine, biases.
    pub fn quantize(&mut self, path: &str, spec: QuantSpec) -> Result<()> {
        let (weight, scales, biases) =
            quant::quantize(MODE, &self.value(&format!("{path}.weight"))?, &spec)
                .map_err(refused)?;
        self.insert_array(&format!("{path}.weight"), &Array(weight))?;
        self.insert_array(&format!("{path}.scales"), &Array(scales))?;
        if let Some(biases) = biases {
            self.insert_array(&format!("{path}.biases"), &Array(biases))?;
        }
        self.set_quant(path, Some(spec));
        Ok(())
    }

    /// The same checkpoint with its floats stored in `dtype`.
    pub fn stored_as(&self, dtype: DType) -> Result<Self> {
        let mut stored = self.clone();
        for (name, entry) in &mut stored.entries {
            if entry.dtype.is_float() && entry.bytes.is_some() {
                let value = self.value(name)?.cast(MODE, dtype).map_err(refused)?;
                entry.bytes = Some(encode(&value));
            }
            if entry.dtype.is_float() {
                entry.dtype = dtype;
            }
        }
        Ok(stored)
    }
}

fn refused(source: AbiError) -> Error {
    Error::Backend {
        op: "weights".to_owned(),
        source,
    }
}

fn spec_of(table: &Json) -> Result<QuantSpec> {
    let number = |key: &str| {
        table
            .get(key)
            .and_then(Json::as_u64)
            .and_then(|n| u32::try_from(n).ok())
    };
    let mode = table.get("mode").and_then(Json::as_str).unwrap_or("affine");
    match (
        code_of(mode_of::ALL, mode),
        number("bits"),
        number("group_size"),
    ) {
        (Some(mode), Some(bits), Some(group_size)) => Ok(QuantSpec {
            mode,
            bits,
            group_size,
            ..QuantSpec::default()
        }),
        _ => Err(Error::Other(format!("not a quantisation: {table}"))),
    }
}

/// The table that a family reads a [`MapWeights`] through.
pub(super) struct Server<'a> {
    weights: &'a MapWeights,
    names: Vec<&'a str>,
    backend: &'a Backend,
}

impl<'a> Server<'a> {
    pub(super) fn new(weights: &'a MapWeights, backend: &'a Backend) -> Self {
        Self {
            weights,
            names: weights.names().collect(),
            backend,
        }
    }

    /// The table; valid as long as the value stays where it is.
    pub(super) fn table(&self) -> WeightsApi {
        WeightsApi {
            ctx: core::ptr::from_ref(self).cast_mut().cast(),
            count: count_slot,
            name: name_slot,
            info: info_slot,
            load: load_slot,
            quant: quant_slot,
            ..WeightsApi::stubs()
        }
    }

    fn entry(&self, name: Str) -> mlxcel_abi::Result<(&'a str, &'a Entry)> {
        // SAFETY: texts are valid during the call that carries them.
        let name =
            unsafe { name.as_str() }.map_err(|_| AbiError::invalid("the name is not UTF-8"))?;
        let found = self.weights.entries.get_key_value(name);
        found
            .map(|(name, entry)| (name.as_str(), entry))
            .ok_or_else(|| {
                AbiError::new(status::NOT_FOUND, format!("there is no tensor \"{name}\""))
            })
    }
}

/// Body of a slot: `ctx` is a [`Server`].
///
/// # Safety
/// `ctx` must come from [`Server::table`], `err` must be null or writable.
unsafe fn serve(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    body: impl FnOnce(&Server<'_>) -> mlxcel_abi::Result<()>,
) -> Status {
    // SAFETY: the caller vouches for both.
    unsafe { guard(err, || body(&*ctx.cast::<Server<'_>>())) }
}

unsafe extern "C" fn count_slot(
    ctx: *mut c_void,
    out: *mut u64,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: a family keeps the table's contract: places are writable.
    unsafe {
        serve(ctx, err, |server| {
            out.write(server.names.len() as u64);
            Ok(())
        })
    }
}

unsafe extern "C" fn name_slot(
    ctx: *mut c_void,
    index: u64,
    out: *mut Str,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: as above.
    unsafe {
        serve(ctx, err, |server| {
            let name = server.names.get(index as usize);
            let name =
                name.ok_or_else(|| AbiError::invalid(format!("there is no tensor {index}")))?;
            out.write(Str::new(name));
            Ok(())
        })
    }
}

unsafe extern "C" fn info_slot(
    ctx: *mut c_void,
    name: Str,
    out: *mut TensorInfo,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: as above.
    unsafe {
        serve(ctx, err, |server| {
            let (name, entry) = server.entry(name)?;
            let info = TensorInfo::new(entry.dtype, &entry.shape);
            out.write(
                info.ok_or_else(|| {
                    AbiError::invalid(format!("\"{name}\" has too many dimensions"))
                })?,
            );
            Ok(())
        })
    }
}

unsafe extern "C" fn load_slot(
    ctx: *mut c_void,
    name: Str,
    out: *mut Handle,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: as above.
    unsafe {
        serve(ctx, err, |server| {
            let (_, entry) = server.entry(name)?;
            let tensor = match &entry.bytes {
                Some(bytes) => tensor_of_bytes(server.backend, entry.dtype, &entry.shape, bytes),
                None => Tensor::zeros(server.backend, entry.dtype, &entry.shape),
            };
            out.write(tensor?.into_handle()?);
            Ok(())
        })
    }
}

unsafe extern "C" fn quant_slot(
    ctx: *mut c_void,
    path: Str,
    out: *mut QuantSpec,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: as above.
    unsafe {
        serve(ctx, err, |server| {
            let path = path
                .as_str()
                .map_err(|_| AbiError::invalid("the path is not UTF-8"))?;
            out.write(server.weights.quant(path).unwrap_or_default());
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantisation_of_a_config_has_defaults_and_overrides() {
        let mut weights = MapWeights::new();
        let config = serde_json::json!({"quantization": {
            "group_size": 32, "bits": 4, "a": {"bits": 8, "group_size": 64, "mode": "affine"}, "b": false,
        }});
        weights.read_quantization(&config).unwrap();
        let bits = |path| weights.quant(path).map(|spec| (spec.bits, spec.group_size));
        assert_eq!(
            (bits("x"), bits("a"), bits("b")),
            (Some((4, 32)), Some((8, 64)), None)
        );
        let wrong = serde_json::json!({"quantization": {"bits": 4, "group_size": 32, "mode": "?"}});
        assert!(weights.read_quantization(&wrong).is_err());
    }

    #[test]
    fn sizes_are_checked_and_types_changed() {
        let mut weights = MapWeights::new();
        assert!(
            weights
                .insert("w", DType::F32, &[2, 2], vec![0; 15])
                .is_err()
        );
        weights.insert_f32("w", &[1, 64], &[0.5; 64]).unwrap();
        let half = weights.stored_as(DType::F16).unwrap();
        assert_eq!(half.info("w"), Some((DType::F16, [1, 64].as_slice())));
        let spec = QuantSpec {
            bits: 4,
            group_size: 32,
            ..QuantSpec::default()
        };
        weights
            .insert_f32("m.weight", &[2, 64], &[0.25; 128])
            .unwrap();
        weights.quantize("m", spec).unwrap();
        assert_eq!(
            weights.info("m.weight"),
            Some((DType::U32, [2, 8].as_slice()))
        );
        assert_eq!(
            weights.info("m.biases"),
            Some((DType::F32, [2, 2].as_slice()))
        );
    }
}
