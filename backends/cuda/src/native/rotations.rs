//! Rotary embeddings of queries and keys, which wait for the append of the keys.

use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::State;
use super::pending::{Pending, hold, let_go};
use crate::driver::{Arguments, Shape, pair};
use crate::kernels::Text;

/// Rotations that go together.
const MOST_ROTATIONS: usize = 2;

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
    pub(super) held: Vec<Tensor>,
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

/// Blocks for so many elements of a row.
fn across(elements: i32) -> u32 {
    (elements as u32).div_ceil(256).clamp(1, 64)
}

impl State {
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

    /// Submits rotations that waited for nothing.
    pub(super) fn submit_each_rotation(&mut self, rotations: &Rotations) -> Result<()> {
        let mut items = rotations.items.iter();
        items.try_for_each(|item| self.submit_rotation(&rotations.turn, item))
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
            // A sine and a cosine for each pair of a head.
            shared_bytes: 4 * turn.dims as u32,
        };
        let most = self.most_shared_bytes;
        // SAFETY: shapes were checked, those of the pools by the caller; slots outside are skipped.
        unsafe {
            self.launch(
                Text::Rows,
                turn.dtype,
                "rope_append",
                &shape,
                most,
                arguments,
            )
        }
    }
}
