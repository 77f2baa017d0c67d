//! Dense products of many rows, by NVIDIA's library on the backend's own stream.

use std::collections::HashMap;
use std::rc::Rc;

use mlxcel_abi::{AbiError, DType, Result, Tensor, status};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::State;
use super::products::{Weight, with_last};
use crate::blas::{Blas, Form, Operands, Way};

/// Forms that are remembered: prompts come in any number of rows.
const MOST_FORMS: usize = 1024;
/// A device with less than this left has no room for what the library loads when it is first used.
const LEAST_FREE_BYTES: usize = 64 << 20;

/// The library, once it was asked for, and how it makes products.
#[derive(Debug, Default)]
pub(super) struct Dense {
    library: Option<Option<Rc<Blas>>>,
    ways: HashMap<Form, Option<Rc<Way>>>,
}

impl State {
    /// `x @ w.T` for a plain weight, with a residual of the result's form added where there is one (its address, else 0). None where
    /// there is no way, and then nothing was done.
    pub(super) fn multiply_dense(
        &mut self,
        device: &Device<'_>,
        x: &View,
        w: &Weight,
        residual: usize,
    ) -> Result<Option<Tensor>> {
        let Some(library) = self.library(device) else {
            return Ok(None);
        };
        let (t, out) = self.output(device, x.dtype, &with_last(x.shape(), w.rows))?;
        let operands = Operands {
            x: x.data as usize,
            w: w.words,
            residual,
            out,
        };
        let form = Form {
            rows: x.len() / w.columns,
            outputs: w.rows,
            inputs: w.columns,
            is_bf16: x.dtype == DType::BF16,
            alignment: Form::alignment_of(&[operands.x, operands.w, residual, out]),
        };
        let Some(way) = self.dense_way(&library, form)? else {
            self.take_back(device, t)?;
            return Ok(None);
        };
        self.flush(device)?;
        let workspace = match way.workspace_bytes {
            0 => 0,
            bytes => self.scratch(bytes)?,
        };
        // What is held back comes first, and an error of it is not one of this product.
        self.queue.submit()?;
        let multiply = |state: &Self| {
            // SAFETY: the operands are of the form and have its alignment; the scratch is as large as the way says, and used by one
            // launch after another.
            unsafe { library.multiply(&way, &operands, workspace, state.queue.stream()) }
        };
        let Err(error) = multiply(self) else {
            return Ok(Some(t));
        };
        // Its kernels are loaded when they are first used, for which there may have been no memory.
        if self.for_want_of_memory(error).code == status::RESOURCE_EXHAUSTED {
            self.pool.make_room(self.driver);
            multiply(self).map_err(|error| self.for_want_of_memory(error))?;
            return Ok(Some(t));
        }
        // A way that does not go is none. What is wrong with more than this product, MLX's says.
        self.dense.ways.insert(form, None);
        self.take_back(device, t)?;
        Ok(None)
    }

    /// Releases what this call made and does not give after all.
    fn take_back(&mut self, device: &Device<'_>, t: Tensor) -> Result<()> {
        self.made.get_mut().retain(|made| *made != t);
        device.release(t)
    }

    /// Whether the library is there.
    pub(super) fn has_dense(&mut self, device: &Device<'_>) -> bool {
        self.library(device).is_some()
    }

    /// The library, or none where it is not there, which is said once.
    fn library(&mut self, device: &Device<'_>) -> Option<Rc<Blas>> {
        if let Some(known) = &self.dense.library {
            return known.clone();
        }
        let found = match Blas::open(self.driver) {
            Ok(library) => Some(Rc::new(library)),
            // There may be room for it the next time.
            Err(error) if error.code == status::RESOURCE_EXHAUSTED => return None,
            Err(error) => {
                let without = "MLX makes dense products of many rows";
                device.note(&format!("{}: {without}", error.message));
                None
            }
        };
        self.dense.library = Some(found.clone());
        found
    }

    fn dense_way(&mut self, library: &Blas, form: Form) -> Result<Option<Rc<Way>>> {
        let ways = &mut self.dense.ways;
        if let Some(known) = ways.get(&form) {
            return Ok(known.clone());
        }
        if ways.len() >= MOST_FORMS {
            ways.clear();
        }
        let way = library.way(&form)?.map(Rc::new);
        ways.insert(form, way.clone());
        Ok(way)
    }

    /// The library does not tell a device that is full from other things that went wrong.
    fn for_want_of_memory(&self, error: AbiError) -> AbiError {
        match self.driver.free_bytes() {
            Ok(free) if free < LEAST_FREE_BYTES => {
                let message = format!("{} with {free} bytes left on the device", error.message);
                AbiError::new(status::RESOURCE_EXHAUSTED, message)
            }
            _ => error,
        }
    }
}
