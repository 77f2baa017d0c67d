//! The checkpoint's tensors by path. A missing, extra or wrongly shaped tensor is named in full.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeSet, HashSet};
use std::rc::Rc;

use mlxcel_abi::host::WeightsApi;
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::{DType, Str, Tensor as Handle, TensorInfo};

use crate::ranks::{Ranks, Share};
use crate::{Backend, Error, Result, Tensor};

struct Inner {
    api: WeightsApi,
    backend: Backend,
    compute_dtype: DType,
    context_length: usize,
    names: BTreeSet<String>,
    used: RefCell<HashSet<String>>,
    /// Converted tensors, evaluated together at the end so that their sources are let go.
    pending: RefCell<Vec<Tensor>>,
    /// The ranks over which the model is split, if it is.
    ranks: OnceCell<Ranks>,
}

/// The part of every tensor of a view that is loaded: along which axis, from the end, and which.
#[derive(Debug, Clone, Copy)]
struct Cut {
    axis: i32,
    share: Share,
}

/// View of the checkpoint at one path. Cheap to clone.
#[derive(Clone)]
pub struct Weights {
    inner: Rc<Inner>,
    path: String,
    cut: Option<Cut>,
}

impl core::fmt::Debug for Weights {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "Weights(at {:?} of {} tensors)",
            self.path,
            self.inner.names.len()
        )
    }
}

fn shape_text(shape: &[i64]) -> String {
    format!("{shape:?}")
}

impl Weights {
    /// Lists the checkpoint behind `api`.
    ///
    /// # Safety
    /// `api` must point to a live table and stay valid as long as the value and its clones.
    pub unsafe fn from_raw(
        api: *const WeightsApi,
        backend: &Backend,
        compute_dtype: DType,
        context_length: usize,
    ) -> Result<Self> {
        // SAFETY: forwarded to the caller.
        let api = unsafe { <WeightsApi as mlxcel_abi::Table>::import(api) };
        let mut count = 0u64;
        command!(&api, count, &mut count)?;
        let mut names = BTreeSet::new();
        for index in 0..count {
            let mut name = Str::EMPTY;
            command!(&api, name, index, &mut name)?;
            // SAFETY: the host keeps the name valid during `load`; it is copied at once.
            let text = unsafe { name.as_str() }
                .map_err(|_| Error::Other(format!("tensor name {index} is not UTF-8")))?;
            names.insert(text.to_owned());
        }
        let inner = Inner {
            api,
            backend: backend.clone(),
            compute_dtype,
            context_length,
            names,
            used: RefCell::default(),
            pending: RefCell::default(),
            ranks: OnceCell::new(),
        };
        Ok(Self {
            inner: Rc::new(inner),
            path: String::new(),
            cut: None,
        })
    }

    /// With the ranks over which the model is split.
    pub(crate) fn split_over(&self, ranks: Ranks) {
        // Set once, before anything is loaded.
        let _ = self.inner.ranks.set(ranks);
    }

    /// The ranks over which the model is split; none where it is whole.
    pub fn ranks(&self) -> Option<&Ranks> {
        self.inner.ranks.get()
    }

    /// The same view, of whose tensors a part is loaded: of `axis`, counted from the end. Shapes that are asked
    /// for stay those of the whole.
    #[must_use]
    pub(crate) fn cut(&self, axis: i32, share: Share) -> Self {
        Self {
            inner: Rc::clone(&self.inner),
            path: self.path.clone(),
            cut: Some(Cut { axis, share }),
        }
    }

    /// The backend the tensors go to.
    pub fn backend(&self) -> &Backend {
        &self.inner.backend
    }

    /// Float type of activations.
    pub fn compute_dtype(&self) -> DType {
        self.inner.compute_dtype
    }

    /// Longest sequence the host will run; 0 is the model's own limit.
    pub fn context_length(&self) -> usize {
        self.inner.context_length
    }

    /// Path of this view.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// View one level down.
    #[must_use]
    pub fn at(&self, part: &str) -> Self {
        let path = self.full(part);
        Self {
            inner: Rc::clone(&self.inner),
            path,
            cut: self.cut,
        }
    }

    /// View at a numbered child.
    #[must_use]
    pub fn at_index(&self, index: usize) -> Self {
        self.at(&index.to_string())
    }

    fn full(&self, name: &str) -> String {
        match (self.path.is_empty(), name.is_empty()) {
            (true, _) => name.to_owned(),
            (_, true) => self.path.clone(),
            _ => format!("{}.{name}", self.path),
        }
    }

    /// Whether the checkpoint has a tensor here.
    pub fn contains(&self, name: &str) -> bool {
        self.inner.names.contains(&self.full(name))
    }

    /// Whether anything lies under this path.
    pub fn exists(&self) -> bool {
        let prefix = format!("{}.", self.path);
        self.inner
            .names
            .range(prefix.clone()..)
            .next()
            .is_some_and(|name| name.starts_with(&prefix))
    }

    /// Marks a tensor as known and not needed.
    pub fn ignore(&self, name: &str) {
        self.inner.used.borrow_mut().insert(self.full(name));
    }

    /// Marks every tensor whose name ends with `suffix` as known and not needed.
    pub fn ignore_suffix(&self, suffix: &str) {
        let mut used = self.inner.used.borrow_mut();
        used.extend(
            self.inner
                .names
                .iter()
                .filter(|name| name.ends_with(suffix))
                .cloned(),
        );
    }

    /// Marks every tensor under this path as known and not needed.
    pub fn ignore_all(&self) {
        let prefix = format!("{}.", self.path);
        let mut used = self.inner.used.borrow_mut();
        let under = self.inner.names.range(prefix.clone()..);
        used.extend(under.take_while(|name| name.starts_with(&prefix)).cloned());
    }

    fn info_of(&self, full: &str) -> Result<TensorInfo> {
        let mut info = TensorInfo::ZERO;
        command!(&self.inner.api, info, Str::new(full), &mut info).map_err(|e| e.at(full))?;
        Ok(info)
    }

    /// Shape and stored dtype.
    pub fn info(&self, name: &str) -> Result<TensorInfo> {
        let full = self.full(name);
        if !self.inner.names.contains(&full) {
            return Err(Error::MissingTensor {
                name: full,
                expected: "any".to_owned(),
            });
        }
        self.info_of(&full)
    }

    /// A tensor in its stored dtype; `shape` has -1 where any size will do.
    pub fn stored(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let full = self.full(name);
        if !self.inner.names.contains(&full) {
            return Err(Error::MissingTensor {
                name: full,
                expected: shape_text(shape),
            });
        }
        let info = self.info_of(&full)?;
        let fits = info.shape().len() == shape.len()
            && info
                .shape()
                .iter()
                .zip(shape)
                .all(|(found, wanted)| *wanted < 0 || found == wanted);
        if !fits {
            return Err(Error::TensorShape {
                name: full,
                found: shape_text(info.shape()),
                expected: shape_text(shape),
            });
        }
        let mut out = Handle::NONE;
        command!(&self.inner.api, load, Str::new(&full), &mut out).map_err(|e| e.at(&full))?;
        let whole = Tensor::from_handle(&self.inner.backend, out);
        let part = match self.cut {
            None => Ok(whole),
            Some(cut) => self.part(whole, &full, cut),
        };
        self.inner.used.borrow_mut().insert(full);
        part
    }

    /// A part of a tensor, computed at once so that the whole is let go.
    fn part(&self, whole: Tensor, full: &str, Cut { axis, share }: Cut) -> Result<Tensor> {
        let size = whole.dim(axis)?;
        let (index, count) = (share.index as i64, share.count as i64);
        if count == 0 || size % count != 0 {
            return Err(Error::Unsupported {
                what: format!("splitting \"{full}\" into {count} parts"),
                supported: format!("its {size} elements along axis {axis} have to divide by them"),
            });
        }
        let len = size / count;
        let part = whole.narrow(axis, index * len, len)?.contiguous()?;
        self.inner.backend.eval(&[&part])?;
        Ok(part)
    }

    /// A parameter in the compute dtype.
    pub fn tensor(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let stored = self.stored(name, shape)?;
        self.converted(&stored, name)
    }

    /// The weight of a product: in the compute dtype, or in the half type it is stored in where the
    /// compute dtype is f32. A product widens it on its way, with the same result and half the memory.
    pub fn product_weight(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let stored = self.stored(name, shape)?;
        let is_half = matches!(stored.dtype()?, DType::F16 | DType::BF16);
        if is_half && self.inner.compute_dtype == DType::F32 {
            return Ok(stored);
        }
        self.converted(&stored, name)
    }

    /// A parameter in f32, whatever float type it is stored in.
    pub fn single(&self, name: &str, shape: &[i64]) -> Result<Tensor> {
        let stored = self.stored(name, shape)?;
        self.widened(&stored, name, DType::F32)
    }

    /// A parameter that may be absent.
    pub fn optional(&self, name: &str, shape: &[i64]) -> Result<Option<Tensor>> {
        if self.contains(name) {
            self.tensor(name, shape).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Keeps a derived tensor for the evaluation at the end of loading.
    pub fn keep(&self, tensor: &Tensor) {
        self.inner.pending.borrow_mut().push(tensor.clone());
    }

    fn converted(&self, stored: &Tensor, name: &str) -> Result<Tensor> {
        self.widened(stored, name, self.inner.compute_dtype)
    }

    fn widened(&self, stored: &Tensor, name: &str, wanted: DType) -> Result<Tensor> {
        let dtype = stored.dtype()?;
        if !dtype.is_float() {
            return Err(Error::Quantization {
                name: self.full(name),
                message: format!("stored as {}, a float type is needed here", dtype.name()),
            });
        }
        if dtype == wanted {
            return Ok(stored.clone());
        }
        let tensor = stored.cast(wanted)?;
        self.keep(&tensor);
        Ok(tensor)
    }

    /// How the module at this path is quantised: the host's word, and scales must be there.
    pub fn quant(&self) -> Result<Option<QuantSpec>> {
        if !self.contains("scales") {
            return Ok(None);
        }
        let mut spec = QuantSpec::default();
        command!(&self.inner.api, quant, Str::new(&self.path), &mut spec)
            .map_err(|e| e.at(&self.path))?;
        if spec.bits == 0 {
            return Err(Error::Quantization {
                name: self.full("scales"),
                message: "scales are there but the config gives no quantization for this module"
                    .to_owned(),
            });
        }
        Ok(Some(spec))
    }

    /// Ends loading: every tensor must have been asked for or ignored. Evaluates conversions.
    pub fn finish(&self) -> Result<()> {
        let used = self.inner.used.borrow();
        let extra: Vec<&str> = self
            .inner
            .names
            .iter()
            .map(String::as_str)
            .filter(|name| !used.contains(*name))
            .collect();
        if !extra.is_empty() {
            let mut names = extra.iter().take(8).copied().collect::<Vec<_>>().join(", ");
            if extra.len() > 8 {
                names.push_str(", ...");
            }
            return Err(Error::ExtraTensors {
                count: extra.len(),
                names,
            });
        }
        let pending = self.inner.pending.take();
        if pending.is_empty() {
            return Ok(());
        }
        self.inner.backend.eval(&pending.iter().collect::<Vec<_>>())
    }
}
