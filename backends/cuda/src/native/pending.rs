//! Operations that wait for the next one, to be submitted with it as one kernel.
//!
//! A launch has its price, and the same few sequences come in every layer: products of one input (queries, keys, values; gate
//! and up), the gated activation after them, a sum and the norm of it, two rotations and the append of their keys. Whatever else
//! is called first submits what waits, so the order of effects is that of the calls. Inputs and outputs are held meanwhile:
//! their memory must not be given out again before the kernel is submitted.

use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_backend_mlx::stream::Device;

use super::State;
use super::plan::Way;
use super::products::Weight;
use super::ranks::RankSum;
use super::rotations::Rotations;
use super::routing::Norm;
use super::rows::pairs;
use super::submit::Around;
use crate::driver::Arguments;
use crate::kernels::Text;

/// Products that go together at most.
pub(super) const MOST_PRODUCTS: usize = 3;
/// What waits.
#[derive(Debug, Default)]
pub(super) enum Pending {
    /// Nothing.
    #[default]
    Nothing,
    /// Products of one input.
    Products(Products),
    /// A sum of two tensors.
    Sum(Sum),
    /// Rotary embeddings at the same positions.
    Rotations(Rotations),
    /// A sum over ranks.
    RankSum(RankSum),
    /// A norm of few rows.
    Norm(Norm),
}

#[derive(Debug)]
pub(super) struct Products {
    pub(super) x: usize,
    pub(super) way: Way,
    pub(super) rows: usize,
    pub(super) dtype: DType,
    pub(super) items: Vec<(Weight, usize)>,
    /// What makes x, if that waits too.
    pub(super) norm: Option<Norm>,
    pub(super) held: Vec<Tensor>,
}

/// `out = a + b`.
#[derive(Debug)]
pub(super) struct Sum {
    pub(super) a: usize,
    pub(super) b: usize,
    pub(super) out: usize,
    pub(super) pairs: usize,
    pub(super) dtype: DType,
    pub(super) held: Vec<Tensor>,
}

/// Takes references to tensors, to all or to none.
pub(super) fn hold(device: &Device<'_>, ts: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut held = Vec::with_capacity(ts.len() + 1);
    for t in ts.iter().filter(|t| !t.is_none()) {
        match device.retain(*t) {
            Ok(t) => held.push(t),
            Err(error) => return let_go(device, &held).and(Err(error)),
        }
    }
    Ok(held)
}

/// Gives references back, all of them: the first error is told.
pub(super) fn let_go(device: &Device<'_>, held: &[Tensor]) -> Result<()> {
    let mut done = Ok(());
    for t in held {
        done = done.and(device.release(*t));
    }
    done
}

impl State {
    /// Submits what waits if one of `inputs` is not computed: MLX's operations on what waits must come after it.
    pub(super) fn settle(&mut self, device: &Device<'_>, inputs: &[Tensor]) -> Result<()> {
        if matches!(self.pending, Pending::Nothing) {
            return Ok(());
        }
        // SAFETY: the context of this backend, which is open while its slots are called.
        let native = unsafe { Native::from_raw(self.ctx as *mut core::ffi::c_void) }?;
        for t in inputs.iter().filter(|t| !t.is_none()) {
            if !native.is_computed(*t)? {
                return self.flush(device);
            }
        }
        Ok(())
    }

    /// Submits what waits.
    pub(super) fn flush(&mut self, device: &Device<'_>) -> Result<()> {
        let (submitted, held) = match core::mem::take(&mut self.pending) {
            Pending::Nothing => return Ok(()),
            Pending::Products(mut products) => {
                let submitted = self.submit_norm_of(&mut products);
                let submitted = submitted.and_then(|()| self.submit_products(&products));
                (submitted, products.held)
            }
            Pending::Sum(sum) => {
                let arguments = Arguments::new()
                    .wide(sum.a)
                    .wide(sum.b)
                    .wide(sum.out)
                    .wide(sum.pairs)
                    .wide(sum.pairs)
                    .int(0);
                let shape = pairs(sum.pairs);
                // SAFETY: three arrays of so many pairs, which are held.
                let submitted =
                    unsafe { self.launch(Text::Rows, sum.dtype, "combine", &shape, 0, arguments) };
                (submitted, sum.held)
            }
            Pending::Rotations(rotations) => {
                (self.submit_each_rotation(&rotations), rotations.held)
            }
            Pending::RankSum(sum) => return self.flush_rank_sum(device, &sum),
            Pending::Norm(norm) => (self.submit_norm(&norm), norm.held),
        };
        // References go back whatever happened.
        let_go(device, &held).and(submitted)
    }

    /// Puts a product off; `made` is the result and its memory.
    pub(super) fn defer_product(
        &mut self,
        device: &Device<'_>,
        x: &View,
        w: &Weight,
        (way, rows): (Way, usize),
        made: (Tensor, usize),
        inputs: &[Tensor],
    ) -> Result<()> {
        let address = x.data as usize;
        let joins = matches!(&self.pending, Pending::Products(products)
        if products.x == address
            && products.way == way
            && products.rows == rows
            && products.dtype == x.dtype
            && products.items.len() < MOST_PRODUCTS
            && products.items.iter().all(|(other, _)| {
                (other.bits, other.group_size, other.columns)
                    == (w.bits, w.group_size, w.columns)
            }));
        // Before anything is held: what waits may fail to be submitted.
        let norm = match joins {
            true => None,
            false => self.take_norm(device, address)?,
        };
        let mut held = hold(device, inputs)?;
        held.push(device.retain(made.0)?);
        match &mut self.pending {
            Pending::Products(products) if joins => {
                products.items.push((*w, made.1));
                products.held.extend(held);
            }
            pending => {
                *pending = Pending::Products(Products {
                    x: address,
                    way,
                    rows,
                    dtype: x.dtype,
                    items: vec![(*w, made.1)],
                    norm,
                    held,
                });
            }
        }
        Ok(())
    }

    fn submit_products(&mut self, products: &Products) -> Result<()> {
        match products.way {
            Way::Tiles => self.submit_tiles(products),
            way => {
                let x = (products.x, products.rows, products.dtype);
                self.submit_around(way, x, &products.items, None, Around::default())
            }
        }
    }

    /// Makes a gated activation together with the two products that wait, if they are its inputs.
    pub(super) fn take_gated(
        &mut self,
        device: &Device<'_>,
        inputs: [usize; 2],
        out: usize,
        kind: i32,
    ) -> Result<bool> {
        let Pending::Products(products) = &self.pending else {
            return Ok(false);
        };
        let [(gate, gate_out), (up, up_out)] = products.items.as_slice() else {
            return Ok(false);
        };
        let can_gate = !matches!(products.way, Way::Tiles | Way::Clusters);
        if [*gate_out, *up_out] != inputs || gate.rows != up.rows || !can_gate {
            return Ok(false);
        }
        let Pending::Products(mut products) = core::mem::take(&mut self.pending) else {
            return Ok(false);
        };
        let x = (products.x, products.rows, products.dtype);
        let gated = Some((out, kind));
        let submitted = self.submit_norm_of(&mut products).and_then(|()| {
            self.submit_around(products.way, x, &products.items, gated, Around::default())
        });
        let_go(device, &products.held).and(submitted)?;
        Ok(true)
    }

    /// The sum that waits, if `x` is its result; everything else that waits is submitted.
    pub(super) fn take_sum(&mut self, device: &Device<'_>, x: usize) -> Result<Option<Sum>> {
        if !matches!(&self.pending, Pending::Sum(sum) if sum.out == x) {
            self.flush(device)?;
            return Ok(None);
        }
        match core::mem::take(&mut self.pending) {
            Pending::Sum(sum) => Ok(Some(sum)),
            _ => Ok(None),
        }
    }
}
