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
use super::routing::Norm;
use super::rows::pairs;
use super::submit::Around;
use crate::driver::{Arguments, Shape, pair};
use crate::kernels::Text;

/// Products that go together at most.
pub(super) const MOST_PRODUCTS: usize = 3;
/// Rotations that go together.
const MOST_ROTATIONS: usize = 2;

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

/// What a rotary embedding is made with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Turn {
    pub(super) positions: usize,
    pub(super) table: usize,
    pub(super) dims: i32,
    pub(super) interleaved: i32,
    /// The table holds periods instead of frequencies.
    pub(super) is_inverse: i32,
    pub(super) scale: f32,
    pub(super) rows: i32,
    pub(super) width: i32,
    pub(super) dtype: DType,
    pub(super) norms: HeadNorms,
}

/// Norms of heads before they turn; addresses of their weights, 0 for none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct HeadNorms {
    pub(super) q: usize,
    pub(super) k: usize,
    pub(super) eps: f32,
    pub(super) is_normed: bool,
}

impl HeadNorms {
    /// As the kernels' struct of that name lies in memory.
    fn words(&self) -> [u64; 3] {
        let last = pair(self.eps.to_bits(), u32::from(self.is_normed));
        [self.q as u64, self.k as u64, last]
    }
}

#[derive(Debug, Clone, Copy)]
struct Rotation {
    x: usize,
    out: usize,
    heads: i32,
}

#[derive(Debug)]
pub(super) struct Rotations {
    turn: Turn,
    items: Vec<Rotation>,
    held: Vec<Tensor>,
}

/// Where keys and values of a step go; addresses on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Append {
    pub(super) q: usize,
    pub(super) k: usize,
    pub(super) v: usize,
    pub(super) key_pool: usize,
    pub(super) value_pool: usize,
    pub(super) slots: usize,
    pub(super) pool_rows: i32,
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
    held.iter()
        .fold(Ok(()), |done, t| done.and(device.release(*t)))
}

/// Blocks for so many elements of a row.
fn across(elements: i32) -> u32 {
    (elements as u32).div_ceil(256).clamp(1, 64)
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
                let mut items = rotations.items.iter();
                let submitted =
                    items.try_for_each(|item| self.submit_rotation(&rotations.turn, item));
                (submitted, rotations.held)
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
        let mut held = hold(device, inputs)?;
        held.push(device.retain(made.0)?);
        let address = x.data as usize;
        if let Pending::Products(products) = &mut self.pending {
            let joins = products.x == address
                && products.way == way
                && products.rows == rows
                && products.dtype == x.dtype
                && products.items.len() < MOST_PRODUCTS
                && products.items.iter().all(|(other, _)| {
                    (other.bits, other.group_size, other.columns)
                        == (w.bits, w.group_size, w.columns)
                });
            if joins {
                products.items.push((*w, made.1));
                products.held.extend(held);
                return Ok(());
            }
        }
        let norm = self.take_norm(device, address)?;
        self.pending = Pending::Products(Products {
            x: address,
            way,
            rows,
            dtype: x.dtype,
            items: vec![(*w, made.1)],
            norm,
            held,
        });
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

    /// Puts a rotation off.
    pub(super) fn defer_rotation(
        &mut self,
        device: &Device<'_>,
        turn: Turn,
        x: &View,
        heads: i32,
        inputs: [Tensor; 3],
    ) -> Result<Tensor> {
        let joins = matches!(&self.pending, Pending::Rotations(waiting)
            if waiting.turn == turn && waiting.items.len() < MOST_ROTATIONS);
        if !joins {
            self.flush(device)?;
        }
        let (t, out) = self.output(device, x.dtype, x.shape())?;
        let item = Rotation {
            x: x.data as usize,
            out,
            heads,
        };
        let mut held = hold(device, &inputs)?;
        held.push(device.retain(t)?);
        match &mut self.pending {
            Pending::Rotations(waiting) => {
                waiting.items.push(item);
                waiting.held.extend(held);
            }
            pending => {
                *pending = Pending::Rotations(Rotations {
                    turn,
                    items: vec![item],
                    held,
                });
            }
        }
        Ok(t)
    }

    fn submit_rotation(&mut self, turn: &Turn, item: &Rotation) -> Result<()> {
        let arguments = Arguments::new()
            .wide(item.x)
            .wide(turn.positions)
            .wide(turn.table)
            .wide(item.out)
            .int(item.heads)
            .int(turn.width)
            .int(turn.dims)
            .int(turn.interleaved)
            .int(turn.is_inverse)
            .float(turn.scale);
        let shape = Shape {
            grid: [
                turn.rows as u32,
                across(item.heads * (turn.width - turn.dims / 2)),
                1,
            ],
            threads: 256,
            shared_bytes: 0,
        };
        // SAFETY: shapes were checked when it was put off.
        unsafe { self.launch(Text::Rows, turn.dtype, "rope", &shape, 0, arguments) }
    }

    /// Rotates and appends in one kernel, if rotations of just these queries and keys wait. Says whether it did; everything else
    /// that waits is submitted.
    pub(super) fn rotate_and_append(&mut self, device: &Device<'_>, to: &Append) -> Result<bool> {
        let (turn, q, k) = match &self.pending {
            Pending::Rotations(waiting) => match waiting.items.as_slice() {
                [q, k] if q.out == to.q && k.out == to.k => (waiting.turn, *q, *k),
                _ => return self.flush(device).map(|()| false),
            },
            _ => return self.flush(device).map(|()| false),
        };
        let Pending::Rotations(waiting) = core::mem::take(&mut self.pending) else {
            return Ok(false);
        };
        let to = Append {
            q: q.x,
            k: k.x,
            ..*to
        };
        let submitted = self.submit_rotations(&turn, [q.heads, k.heads], [q.out, k.out], &to);
        let_go(device, &waiting.held).and(submitted)?;
        Ok(true)
    }

    /// Norms and rotates the queries and keys that `to` names, writes them to `outs`, and appends keys and values.
    pub(super) fn submit_rotations(
        &mut self,
        turn: &Turn,
        [heads, kv_heads]: [i32; 2],
        outs: [usize; 2],
        to: &Append,
    ) -> Result<()> {
        let arguments = Arguments::new()
            .wide(to.q)
            .wide(to.k)
            .wide(to.v)
            .wide(turn.positions)
            .wide(turn.table)
            .wide(outs[0])
            .wide(outs[1])
            .wide(to.key_pool)
            .wide(to.value_pool)
            .wide(to.slots)
            .int(heads)
            .int(kv_heads)
            .int(turn.width)
            .int(turn.dims)
            .int(turn.interleaved)
            .int(turn.is_inverse)
            .float(turn.scale)
            .int(to.pool_rows)
            .record(&turn.norms.words());
        // A warp for every head of queries, keys and values.
        let shape = Shape {
            grid: [
                turn.rows as u32,
                ((heads + 2 * kv_heads) as u32).div_ceil(8),
                1,
            ],
            threads: 256,
            shared_bytes: 0,
        };
        // SAFETY: shapes were checked, those of the pools by the caller; slots outside are skipped.
        unsafe { self.launch(Text::Rows, turn.dtype, "rope_append", &shape, 0, arguments) }
    }
}
