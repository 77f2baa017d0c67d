//! Norms, rotary embedding, gated activations and elementwise sums and products.

use mlxcel_abi::kinds::{binary as binary_kind, glu as glu_kind};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::RopeArgs;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::row::{self, Gate};

use super::operands::half_of;
use super::{State, filled, floats, joint, slot};

/// Elements below which a kernel runs on the calling thread alone.
pub(super) const SERIAL_BELOW: usize = 32_768;

pub(super) fn install(table: &mut BackendOps) {
    table.rms_norm = rms_norm;
    table.rope = rope;
    table.glu = glu;
    table.binary = binary;
    table.binary_scalar = binary_scalar;
}

slot!(rms_norm(x: Tensor, w: Tensor, eps: f32) |native, state| norm(native, state, x, w, eps));
slot!(rope(args: *const RopeArgs) |native, state| {
    // SAFETY: the slot's contract: a live argument struct.
    rotate(native, state, &unsafe { RopeArgs::read(args) }?)
});
slot!(glu(kind: u32, gate: Tensor, up: Tensor) |native, state| gated(native, state, kind, gate, up));
slot!(binary(kind: u32, a: Tensor, b: Tensor) |native, state| pairwise(native, state, kind, a, b));
slot!(binary_scalar(kind: u32, a: Tensor, scalar: f64, scalar_first: u32) |native, _state| {
    let _ = scalar_first;
    scaled(native, kind, a, scalar)
});

/// A result that several threads write, each its own range.
pub(super) struct Shared<'a> {
    first: *mut f32,
    len: usize,
    life: core::marker::PhantomData<&'a mut [f32]>,
}

impl<'a> Shared<'a> {
    pub(super) fn new(out: &'a mut [f32]) -> Self {
        Self {
            first: out.as_mut_ptr(),
            len: out.len(),
            life: core::marker::PhantomData,
        }
    }

    /// The part of a range that one thread writes.
    ///
    /// # Safety
    /// Ranges of different threads must not overlap, and none is asked for twice at a time.
    #[allow(
        clippy::mut_from_ref,
        reason = "exclusiveness is by range, which is the caller's promise"
    )]
    pub(super) unsafe fn part(&self, range: core::ops::Range<usize>) -> &mut [f32] {
        let (start, end) = (range.start.min(self.len), range.end.min(self.len));
        // SAFETY: inside the slice; exclusiveness is the caller's promise.
        unsafe { core::slice::from_raw_parts_mut(self.first.add(start), end.saturating_sub(start)) }
    }
}

// SAFETY: threads write disjoint ranges.
unsafe impl Sync for Shared<'_> {}

fn norm(
    native: Native<'_>,
    state: &mut State,
    x: Tensor,
    w: Tensor,
    eps: f32,
) -> Result<Option<Tensor>> {
    let Some(x) = floats(&native, x)? else {
        return Ok(None);
    };
    let width = x.shape().last().map_or(0, |n| *n as usize);
    let weight = if w.is_none() {
        None
    } else {
        match floats(&native, w)? {
            Some(w) if w.shape().len() == 1 && w.len() == width => Some(w),
            _ => return Ok(None),
        }
    };
    // SAFETY: contiguous f32 views of tensors that the caller holds during the call.
    let (input, weight) = unsafe { (x.as_slice::<f32>(), weight.map(|w| w.as_slice::<f32>())) };
    let isa = state.isa;
    filled(&native, x.given, x.shape(), "rms_norm", |out| {
        let rows = input.len() / width;
        let out = Shared::new(out);
        state
            .pool
            .split(rows, 1, SERIAL_BELOW / width + 1, &|range| {
                let range = range.start * width..range.end * width;
                // SAFETY: the pool's ranges are disjoint.
                row::rms_norm(isa, &input[range.clone()], weight, eps, width, unsafe {
                    out.part(range)
                });
            })
    })
}

fn rotate(native: Native<'_>, state: &mut State, args: &RopeArgs) -> Result<Option<Tensor>> {
    let (Some(x), positions) = (floats(&native, args.x)?, native.view(args.positions)?) else {
        return Ok(None);
    };
    let &[rows, heads, width] = x.shape() else {
        return Ok(None);
    };
    let half = (args.dims / 2) as usize;
    let fits = positions.is_contiguous
        && positions.dtype == DType::I32
        && positions.shape() == [rows]
        && args.dims.is_multiple_of(2)
        && args.dims > 0
        && args.interleaved <= 1
        && (args.base > 0.0 && args.base.is_finite())
        && i64::from(args.dims) <= width;
    if !fits {
        return Ok(None);
    }
    // SAFETY: contiguous views of the checked types, of tensors that the caller holds.
    let (input, positions) = unsafe { (x.as_slice::<f32>(), positions.as_slice::<i32>()) };
    if args.freqs.is_none() {
        (state.rope).prepare_plain(positions, args.base, args.dims, args.scale);
    } else {
        match floats(&native, args.freqs)? {
            Some(freqs) if freqs.len() == half => {
                // SAFETY: a contiguous f32 view of a tensor that the caller holds.
                let periods = unsafe { freqs.as_slice::<f32>() };
                state.rope.prepare(positions, periods, args.scale);
            }
            _ => return Ok(None),
        }
    }
    let (heads, width) = (heads as usize, width as usize);
    let (table, interleaved) = (&state.rope, args.interleaved != 0);
    filled(&native, x.given, x.shape(), "rope", |out| {
        let stride = heads * width;
        let out = Shared::new(out);
        state
            .pool
            .split(rows as usize, 1, SERIAL_BELOW / stride + 1, &|range| {
                let elements = range.start * stride..range.end * stride;
                // SAFETY: the pool's ranges are disjoint.
                let out = unsafe { out.part(elements.clone()) };
                row::rope(
                    table,
                    range.start,
                    &input[elements],
                    heads,
                    width,
                    interleaved,
                    out,
                );
            })
    })
}

/// The kernel of a gated activation, if there is one.
pub(super) fn gate_of(kind: u32) -> Option<Gate> {
    match kind {
        glu_kind::SILU => Some(Gate::Silu),
        glu_kind::GELU_TANH => Some(Gate::GeluTanh),
        glu_kind::RELU => Some(Gate::Relu),
        glu_kind::SIGMOID => Some(Gate::Sigmoid),
        _ => None,
    }
}

fn gated(
    native: Native<'_>,
    state: &mut State,
    kind: u32,
    gate: Tensor,
    up: Tensor,
) -> Result<Option<Tensor>> {
    let Some(kind) = gate_of(kind) else {
        return Ok(None);
    };
    let (Some(gate), Some(up)) = (floats(&native, gate)?, floats(&native, up)?) else {
        return Ok(None);
    };
    if gate.shape() != up.shape() {
        return Ok(None);
    }
    // SAFETY: contiguous f32 views of tensors that the caller holds during the call.
    let (g, u) = unsafe { (gate.as_slice::<f32>(), up.as_slice::<f32>()) };
    let isa = state.isa;
    let dtype = joint(gate.given, up.given);
    filled(&native, dtype, gate.shape(), "glu", |out| {
        let out = Shared::new(out);
        state.pool.split(g.len(), 64, SERIAL_BELOW / 4, &|range| {
            // SAFETY: the pool's ranges are disjoint.
            row::gated(isa, kind, &g[range.clone()], &u[range.clone()], unsafe {
                out.part(range)
            });
        })
    })
}

fn pairwise(
    native: Native<'_>,
    state: &mut State,
    kind: u32,
    a: Tensor,
    b: Tensor,
) -> Result<Option<Tensor>> {
    let kernel = match kind {
        binary_kind::ADD => row::add,
        binary_kind::MUL => row::mul,
        _ => return Ok(None),
    };
    let (Some(a), Some(b)) = (floats(&native, a)?, floats(&native, b)?) else {
        return Ok(None);
    };
    let same = a.shape() == b.shape();
    let width = a.shape().last().map_or(0, |n| *n as usize);
    // A bias: one row for all.
    if !same && (b.shape().len() != 1 || b.len() != width) {
        return Ok(None);
    }
    // SAFETY: contiguous f32 views of tensors that the caller holds during the call.
    let (x, y) = unsafe { (a.as_slice::<f32>(), b.as_slice::<f32>()) };
    let isa = state.isa;
    let dtype = joint(a.given, b.given);
    filled(&native, dtype, a.shape(), "binary", |out| {
        if !same {
            x.chunks_exact(width)
                .zip(out.chunks_exact_mut(width))
                .for_each(|(x, out)| kernel(isa, x, y, out));
            return true;
        }
        let out = Shared::new(out);
        state.pool.split(x.len(), 64, SERIAL_BELOW, &|range| {
            // SAFETY: the pool's ranges are disjoint.
            kernel(isa, &x[range.clone()], &y[range.clone()], unsafe {
                out.part(range)
            });
        })
    })
}

/// Product with a constant, which both orders share.
fn scaled(native: Native<'_>, kind: u32, a: Tensor, scalar: f64) -> Result<Option<Tensor>> {
    if kind != binary_kind::MUL {
        return Ok(None);
    }
    let Some(a) = floats(&native, a)? else {
        return Ok(None);
    };
    // SAFETY: a contiguous f32 view of a tensor that the caller holds during the call.
    let x = unsafe { a.as_slice::<f32>() };
    // A constant of the tensor's type. One that the type does not hold is for MLX to say.
    let scalar = match half_of(a.given) {
        Some(half) => half.rounded(scalar as f32),
        None => scalar as f32,
    };
    if !scalar.is_finite() {
        return Ok(None);
    }
    filled(&native, a.given, a.shape(), "binary_scalar", |out| {
        x.iter().zip(out).for_each(|(x, out)| *out = x * scalar);
        true
    })
}
