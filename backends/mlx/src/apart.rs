//! MLX's operations where no row may depend on how many others there are.
//!
//! Many of MLX's kernels are chosen by the number of rows, and divide sums by it. Where `deterministic` is asked for, such slots
//! give way: products are made row by row, and so are sums along any axis but the last; the others are refused by name, unless
//! a device's own kernel takes the call before it comes here. What is left computes each element, or each row along its
//! last axis, by itself: element by element, moved, gathered, sorted, normed; sums, norms and softmax along the last axis are one block's (CUDA) or
//! one loop's (CPU) work, whose shape follows the length of the row alone.

use core::ffi::c_void;

use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, SparseIndexArgs};
use mlxcel_abi::kinds::{reduce as reduce_kind, scatter as scatter_kind};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{
    AttentionArgs, ConvArgs, GatherArgs, PagedAttentionArgs, QuantizedMatmulArgs, SliceArgs,
};
use mlxcel_abi::{AbiError, ErrorObj, Status, Tensor, TensorInfo, status};

use crate::fault::Fault;
use crate::ops;
use crate::slot::enter;

/// Replaces the slots that follow the number of rows.
pub(crate) fn install(table: &mut BackendOps) {
    table.matmul = matmul;
    table.quantized_matmul = quantized_matmul;
    table.reduce = reduce;
    table.softmax = softmax;
    table.scatter = scatter;
    table.addmm = addmm;
    table.gather_matmul = gather_matmul;
    table.gather_quantized_matmul = gather_quantized_matmul;
    table.conv = conv;
    table.fft = fft;
    table.attention = attention;
    table.paged_attention = paged_attention;
    table.short_conv = short_conv;
    table.gated_delta = gated_delta;
    table.sparse_index = sparse_index;
}

fn refusal(backend: &str, what: &str) -> AbiError {
    AbiError::unimplemented(format!(
        "option deterministic: {what} of MLX's follows the number of rows, and backend {backend} has no kernel of its own for \
         this call; leave the option out for this model"
    ))
}

/// # Safety
/// `ctx` and `err` as for every slot.
unsafe fn refuse(ctx: *mut c_void, err: *mut *mut ErrorObj, op: &'static str) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        enter(ctx, err, op, |context| {
            Err(Fault::Abi(refusal(context.description.name, op)))
        })
    }
}

macro_rules! refused {
    ($($name:ident($($arg:ident : $ty:ty),*) -> $out:ty;)*) => {$(
        unsafe extern "C" fn $name(
            ctx: *mut c_void,
            $($arg: $ty,)*
            out: *mut $out,
            err: *mut *mut ErrorObj,
        ) -> Status {
            let _ = ($($arg,)* out);
            // SAFETY: the slot's contract.
            unsafe { refuse(ctx, err, stringify!($name)) }
        }
    )*};
}

refused! {
    addmm(c: Tensor, a: Tensor, b: Tensor, alpha: f32, beta: f32) -> Tensor;
    gather_matmul(a: Tensor, b: Tensor, lhs: Tensor, rhs: Tensor, sorted: u32) -> Tensor;
    gather_quantized_matmul(args: *const QuantizedMatmulArgs) -> Tensor;
    conv(args: *const ConvArgs) -> Tensor;
    fft(kind: u32, a: Tensor, n: *const i64, axes: *const i32, n_axes: u32) -> Tensor;
    attention(args: *const AttentionArgs) -> Tensor;
    paged_attention(args: *const PagedAttentionArgs) -> [Tensor; 3];
    short_conv(args: *const ShortConvPoolArgs) -> [Tensor; 2];
    gated_delta(args: *const GatedDeltaPoolArgs) -> [Tensor; 2];
    sparse_index(args: *const SparseIndexArgs) -> [Tensor; 2];
}

/// MLX's slots and the call that they are used for.
struct Call {
    mlx: BackendOps,
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
}

type Made = core::result::Result<Tensor, Status>;

impl Call {
    fn new(ctx: *mut c_void, err: *mut *mut ErrorObj) -> Self {
        Self {
            mlx: ops::table(),
            ctx,
            err,
        }
    }

    /// What a slot gives.
    fn made(&self, slot: impl FnOnce(*mut Tensor) -> Status) -> Made {
        let mut out = Tensor::NONE;
        match slot(&raw mut out) {
            status::OK => Ok(out),
            code => Err(code),
        }
    }

    /// # Safety
    /// The context is that of the slot under way; so for all of these.
    unsafe fn dims(&self, t: Tensor) -> core::result::Result<Vec<i64>, Status> {
        let mut info = TensorInfo::ZERO;
        // SAFETY: forwarded to the caller; the place is live.
        match unsafe { (self.mlx.info)(self.ctx, t, &raw mut info, self.err) } {
            status::OK => Ok(info.shape().to_vec()),
            code => Err(code),
        }
    }

    unsafe fn release(&self, t: Tensor) {
        // SAFETY: forwarded to the caller; a handle of our own.
        unsafe { (self.mlx.release)(self.ctx, t, core::ptr::null_mut()) };
    }

    unsafe fn reshaped(&self, t: Tensor, dims: &[i64]) -> Made {
        // SAFETY: forwarded to the caller; the shape is live.
        self.made(|out| unsafe {
            (self.mlx.reshape)(self.ctx, t, dims.as_ptr(), dims.len() as u32, out, self.err)
        })
    }

    /// Entry `at` along an axis, which stays.
    unsafe fn entry(&self, t: Tensor, dims: &[i64], axis: usize, at: i64) -> Made {
        let (mut starts, mut stops) = (vec![0; dims.len()], dims.to_vec());
        if let (Some(start), Some(stop)) = (starts.get_mut(axis), stops.get_mut(axis)) {
            (*start, *stop) = (at, at + 1);
        }
        let strides = vec![1; dims.len()];
        let args = SliceArgs {
            ndim: dims.len() as u32,
            starts: starts.as_ptr(),
            stops: stops.as_ptr(),
            strides: strides.as_ptr(),
            ..SliceArgs::default()
        };
        // SAFETY: forwarded to the caller; the arguments are live.
        self.made(|out| unsafe { (self.mlx.slice)(self.ctx, t, &raw const args, out, self.err) })
    }

    /// `each` for every entry along an axis and its place, put together again.
    unsafe fn one_by_one(
        &self,
        t: Tensor,
        dims: &[i64],
        axis: usize,
        each: impl Fn(Tensor, i64) -> Made,
    ) -> Made {
        let count = dims.get(axis).copied().unwrap_or(1);
        if count <= 1 {
            return each(t, 0);
        }
        let mut made = Vec::new();
        let mut failed = None;
        for at in 0..count {
            // SAFETY: forwarded to the caller.
            let result = unsafe { self.entry(t, dims, axis, at) }.and_then(|entry| {
                let result = each(entry, at);
                // SAFETY: as above.
                unsafe { self.release(entry) };
                result
            });
            match result {
                Ok(result) => made.push(result),
                Err(code) => {
                    failed = Some(code);
                    break;
                }
            }
        }
        let result = match failed {
            Some(code) => Err(code),
            // SAFETY: as above; the list is live.
            None => self.made(|out| unsafe {
                (self.mlx.concat)(
                    self.ctx,
                    made.as_ptr(),
                    made.len(),
                    axis as i32,
                    out,
                    self.err,
                )
            }),
        };
        for t in made {
            // SAFETY: as above.
            unsafe { self.release(t) };
        }
        result
    }

    /// `each` for every row along the last axis of `x`, whose results are rows too.
    unsafe fn row_by_row(&self, x: Tensor, each: impl Fn(Tensor) -> Made) -> Made {
        // SAFETY: forwarded to the caller, here and below.
        let dims = unsafe { self.dims(x) }?;
        let [leading @ .., width] = dims.as_slice() else {
            return each(x);
        };
        match leading.len() {
            0 => each(x),
            // SAFETY: as above.
            1 => unsafe { self.one_by_one(x, &dims, 0, |row, _| each(row)) },
            // SAFETY: as above.
            _ => unsafe {
                let flat = [leading.iter().product::<i64>(), *width];
                let rows = self.reshaped(x, &flat)?;
                let made = self.one_by_one(rows, &flat, 0, |row, _| each(row));
                self.release(rows);
                let made = made?;
                let last = self
                    .dims(made)
                    .map(|dims| dims.last().copied().unwrap_or(0));
                let whole = last.and_then(|last| self.reshaped(made, &[leading, &[last]].concat()));
                self.release(made);
                whole
            },
        }
    }
}

/// Gives a result away.
///
/// # Safety
/// `out` is null or writable.
unsafe fn give(made: Made, out: *mut Tensor) -> Status {
    match made {
        Ok(t) => {
            // SAFETY: the slots that made it refuse null.
            unsafe { out.write(t) };
            status::OK
        }
        Err(code) => code,
    }
}

/// # Safety
/// As for every slot.
unsafe fn checked(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    op: &'static str,
    out: *mut Tensor,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        enter(ctx, err, op, |_| match out.is_null() {
            true => Err(Fault::invalid("the result pointer is null")),
            false => Ok(()),
        })
    }
}

unsafe extern "C" fn matmul(
    ctx: *mut c_void,
    a: Tensor,
    b: Tensor,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract; MLX's slots are called in the context of this one.
    unsafe {
        let code = checked(ctx, err, "matmul", out);
        if code != status::OK {
            return code;
        }
        let call = Call::new(ctx, err);
        match call.dims(b) {
            Ok(dims) if dims.len() <= 2 => {}
            Ok(dims) => return stacks(&call, [a, b], &dims, out),
            Err(code) => return code,
        }
        let each = |row| call.made(|out| (call.mlx.matmul)(ctx, row, b, out, err));
        give(call.row_by_row(a, each), out)
    }
}

/// Products of stacks: rows may be entries of the first axis or rows of its matrices, so that each row goes with each matrix by
/// itself.
///
/// # Safety
/// As for every slot.
unsafe fn stacks(call: &Call, [a, b]: [Tensor; 2], of_b: &[i64], out: *mut Tensor) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        let of_a = match call.dims(a) {
            Ok(dims) => dims,
            Err(code) => return code,
        };
        let (count, rank) = (of_b.first().copied().unwrap_or(1), of_b.len());
        if of_a.len() != rank || (count != 1 && of_a.first() != Some(&count)) {
            return refuse(call.ctx, call.err, "matmul of unequal stacks");
        }
        let rows = |a, b| {
            let of_a = call.dims(a)?;
            call.one_by_one(a, &of_a, rank - 2, |row, _| {
                call.made(|out| (call.mlx.matmul)(call.ctx, row, b, out, call.err))
            })
        };
        let each = |a, at| {
            if count == 1 {
                return rows(a, b);
            }
            let matrix = call.entry(b, of_b, 0, at)?;
            let made = rows(a, matrix);
            call.release(matrix);
            made
        };
        give(call.one_by_one(a, &of_a, 0, each), out)
    }
}

unsafe extern "C" fn quantized_matmul(
    ctx: *mut c_void,
    args: *const QuantizedMatmulArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract; MLX's slots are called in the context of this one.
    unsafe {
        let code = checked(ctx, err, "quantized_matmul", out);
        if code != status::OK {
            return code;
        }
        let call = Call::new(ctx, err);
        let Ok(read) = QuantizedMatmulArgs::read(args) else {
            return (call.mlx.quantized_matmul)(ctx, args, out, err);
        };
        match call.dims(read.w.weight) {
            Ok(dims) if dims.len() <= 2 => {}
            Ok(_) => return refuse(ctx, err, "quantized_matmul of a stack"),
            Err(code) => return code,
        }
        let each = |row| {
            let args = QuantizedMatmulArgs { x: row, ..read };
            call.made(|out| (call.mlx.quantized_matmul)(ctx, &raw const args, out, err))
        };
        give(call.row_by_row(read.x, each), out)
    }
}

/// Whether entries along the first axis of `dims` can be worked on one by one: none of these axes is the first. None where the last
/// is the only one, so that it makes no difference.
fn crosses(dims: &[i64], axes: &[i32]) -> bool {
    let rank = dims.len() as i32;
    let place = |axis: &i32| if *axis < 0 { axis + rank } else { *axis };
    let is_last = matches!(axes, [axis] if place(axis) == rank - 1);
    !is_last && rank > 1 && !axes.is_empty() && axes.iter().all(|axis| place(axis) > 0)
}

unsafe extern "C" fn reduce(
    ctx: *mut c_void,
    kind: u32,
    a: Tensor,
    axes: *const i32,
    n_axes: u32,
    keep_dims: u32,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract; MLX's slots are called in the context of this one.
    unsafe {
        let code = checked(ctx, err, "reduce", out);
        if code != status::OK {
            return code;
        }
        let call = Call::new(ctx, err);
        let whole = |t, out| (call.mlx.reduce)(ctx, kind, t, axes, n_axes, keep_dims, out, err);
        let is_exact = matches!(
            kind,
            reduce_kind::MAX | reduce_kind::MIN | reduce_kind::ALL_OF | reduce_kind::ANY_OF
        );
        if is_exact || axes.is_null() {
            return whole(a, out);
        }
        let dims = match call.dims(a) {
            Ok(dims) => dims,
            Err(code) => return code,
        };
        let axes = core::slice::from_raw_parts(axes, n_axes as usize);
        match crosses(&dims, axes) {
            false => whole(a, out),
            true => give(
                call.one_by_one(a, &dims, 0, |t, _| call.made(|out| whole(t, out))),
                out,
            ),
        }
    }
}

unsafe extern "C" fn softmax(
    ctx: *mut c_void,
    a: Tensor,
    axis: i32,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract; MLX's slots are called in the context of this one.
    unsafe {
        let code = checked(ctx, err, "softmax", out);
        if code != status::OK {
            return code;
        }
        let call = Call::new(ctx, err);
        let dims = match call.dims(a) {
            Ok(dims) => dims,
            Err(code) => return code,
        };
        let whole = |t, out| (call.mlx.softmax)(ctx, t, axis, out, err);
        match crosses(&dims, &[axis]) {
            false => whole(a, out),
            true => give(
                call.one_by_one(a, &dims, 0, |t, _| call.made(|out| whole(t, out))),
                out,
            ),
        }
    }
}

/// Sums and products of several updates at one place come in any order.
unsafe extern "C" fn scatter(
    ctx: *mut c_void,
    kind: u32,
    a: Tensor,
    updates: Tensor,
    args: *const GatherArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract.
    unsafe {
        match kind {
            scatter_kind::ADD | scatter_kind::MUL => refuse(ctx, err, "scatter of sums"),
            _ => (ops::table().scatter)(ctx, kind, a, updates, args, out, err),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::crosses;

    #[test]
    fn sums_along_the_last_axis_alone_are_left_whole() {
        assert!(!crosses(&[4, 8], &[1]));
        assert!(!crosses(&[4, 8], &[-1]));
        assert!(crosses(&[4, 2, 8], &[1]));
        assert!(crosses(&[4, 2, 8], &[-2, -1]));
        // The rows are what is summed.
        assert!(!crosses(&[4, 8], &[0]));
        assert!(!crosses(&[4, 8], &[0, 1]));
        assert!(!crosses(&[8], &[0]));
    }
}
