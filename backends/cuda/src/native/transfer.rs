//! Elements in and out of the device, evaluation, and figures of memory.

use core::ffi::c_void;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{FromHostArgs, MemoryInfo, MemoryLimits};
use mlxcel_abi::{AbiError, DType, ErrorObj, Result, Status, Tensor, status};
use mlxcel_backend_mlx::stream::Device;

use super::{Outcome, State, attempt, slot};

/// Results that are read while the next step is under way are tokens: of so many bytes and dimensions at most.
const MARKED_BYTES: usize = 1 << 16;
const MARKED_DIMS: usize = 2;

pub(super) fn install(table: &mut BackendOps) {
    table.from_host = from_host;
    table.read = read;
    table.eval = eval;
    table.async_eval = async_eval;
    table.memory = memory;
    table.set_memory_limits = set_memory_limits;
    table.clear_cache = clear_cache;
}

slot!(from_host(args: *const FromHostArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    upload(device, state, &unsafe { FromHostArgs::read(args) }?)
});

/// MLX would put host memory into managed memory, which moves to the device when it is first used.
fn upload(device: Device<'_>, state: &mut State, args: &FromHostArgs) -> Result<Option<Tensor>> {
    let known = (DType::BOOL.0..=DType::F32.0).contains(&args.dtype.0);
    if args.data.is_null() || args.byte_len == 0 || args.dims.is_null() || args.ndim > 8 || !known {
        return Ok(None);
    }
    // SAFETY: the slot's contract: `ndim` dimensions.
    let shape = unsafe { core::slice::from_raw_parts(args.dims, args.ndim as usize) };
    let bytes = shape.iter().try_fold(args.dtype.size_bytes(), |n, &dim| {
        n.checked_mul(usize::try_from(dim).ok()?)
    });
    let fits_mlx = shape.iter().all(|&dim| dim <= i64::from(i32::MAX));
    if bytes != Some(args.byte_len) || !fits_mlx {
        return Ok(None);
    }
    let (t, address) = state.output(&device, args.dtype, shape)?;
    // SAFETY: the slot's contract: `byte_len` readable bytes; the block has as many.
    unsafe { state.queue.upload(address, args.data, args.byte_len) }?;
    state.pool.set_constant(address, args.byte_len);
    if let Some(release) = args.release {
        // SAFETY: the slot's contract: called once, since this succeeds.
        unsafe { release(args.owner) };
    }
    Ok(Some(t))
}

unsafe extern "C" fn read(
    ctx: *mut c_void,
    t: Tensor,
    dst: *mut u8,
    byte_len: usize,
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        let (view, _) = device.view(t)?;
        let bytes = view.len() * view.dtype.size_bytes();
        if dst.is_null() || !view.is_contiguous || bytes == 0 || bytes != byte_len {
            return Ok(Outcome::Pass);
        }
        let from = view.data as usize;
        let may_be_marked = bytes <= MARKED_BYTES && view.shape().len() <= MARKED_DIMS;
        // SAFETY: the slot's contract: `byte_len` writable bytes; the tensor has as many. No pool is that small in so few dimensions,
        // and nothing else is written to once it is computed.
        unsafe {
            if !(may_be_marked && state.queue.download_marked(t, dst, from, bytes)?) {
                state.queue.download(dst, from, bytes)?;
            }
        }
        state.check_ranks()?;
        Ok(Outcome::Done)
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, false, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.read)(ctx, t, dst, byte_len, err),
        }
    }
}

/// Submits what is left to compute, and lets go of what the kernels of this step needed once they are done.
fn submit(device: &Device<'_>, state: &State, ts: *const Tensor, n: usize) -> Result<Outcome> {
    if ts.is_null() || n == 0 {
        return Ok(Outcome::Pass);
    }
    state.queue.submit()?;
    let mut evaluated = evaluate(state, ts, n);
    if is_exhausted(&evaluated) {
        // MLX leaves what it could not compute as it was, so it may be tried again with what this pool kept.
        state.pool.make_room(state.driver);
        evaluated = evaluate(state, ts, n);
    }
    if is_exhausted(&evaluated) {
        return evaluated.map(|()| Outcome::Done);
    }
    if evaluated.is_err() {
        // It fails again where the error is told by the name of the slot.
        return Ok(Outcome::Pass);
    }
    device.let_go_when_done()?;
    Ok(Outcome::Done)
}

fn evaluate(state: &State, ts: *const Tensor, n: usize) -> Result<()> {
    let mut error = core::ptr::null_mut();
    // SAFETY: a slot of this backend's own table, called on its thread, with the caller's handles.
    let code = unsafe { (state.mlx.async_eval)(state.ctx as *mut c_void, ts, n, &raw mut error) };
    if code == status::OK {
        return Ok(());
    }
    // SAFETY: what the slot left.
    Err(unsafe { AbiError::from_raw(code, error) })
}

fn is_exhausted(done: &Result<()>) -> bool {
    matches!(done, Err(error) if error.code == status::RESOURCE_EXHAUSTED)
}

unsafe extern "C" fn eval(
    ctx: *mut c_void,
    ts: *const Tensor,
    n: usize,
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        let outcome = submit(&device, state, ts, n)?;
        if matches!(outcome, Outcome::Done) {
            state.queue.synchronize()?;
            state.check_ranks()?;
        }
        Ok(outcome)
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, false, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.eval)(ctx, ts, n, err),
        }
    }
}

unsafe extern "C" fn async_eval(
    ctx: *mut c_void,
    ts: *const Tensor,
    n: usize,
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        let outcome = submit(&device, state, ts, n)?;
        if matches!(outcome, Outcome::Done) {
            // SAFETY: the slot's contract: `n` handles; null was passed on above.
            let results = unsafe { core::slice::from_raw_parts(ts, n) };
            state.queue.mark(results)?;
        }
        Ok(outcome)
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, false, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.async_eval)(ctx, ts, n, err),
        }
    }
}

/// The state's part in a slot that MLX's answers first.
fn with_state(ctx: *mut c_void, body: impl FnOnce(&mut State)) {
    super::STATES.with_borrow_mut(|states| {
        if let Some(state) = states.iter_mut().find(|state| state.ctx == ctx as usize) {
            body(state);
        }
    });
}

fn replaced(ctx: *mut c_void) -> BackendOps {
    let mut found = None;
    with_state(ctx, |state| found = Some(*state.mlx));
    found.unwrap_or_else(mlxcel_backend_mlx::plain_table)
}

unsafe extern "C" fn memory(
    ctx: *mut c_void,
    out: *mut MemoryInfo,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    let answer = unsafe { (replaced(ctx).memory)(ctx, out, err) };
    if answer != status::OK {
        return answer;
    }
    with_state(ctx, |state| {
        let figures = state.pool.figures();
        // SAFETY: the call before succeeded, so `out` is writable; what the caller's build of the struct does not have is left.
        unsafe {
            if (*out).struct_size >= core::mem::offset_of!(MemoryInfo, limit_bytes) {
                (*out).active_bytes += figures.used;
                (*out).peak_bytes += figures.peak;
                (*out).cache_bytes += figures.kept + state.queue.program_bytes();
            }
        }
    });
    answer
}

unsafe extern "C" fn set_memory_limits(
    ctx: *mut c_void,
    args: *const MemoryLimits,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    let answer = unsafe { (replaced(ctx).set_memory_limits)(ctx, args, err) };
    if answer == status::OK {
        // SAFETY: the call before succeeded, so `args` is a live argument struct.
        let resets = unsafe { MemoryLimits::read(args) }.is_ok_and(|args| args.reset_peak == 1);
        with_state(ctx, |state| {
            if resets {
                state.pool.reset_peak();
            }
        });
    }
    answer
}

unsafe extern "C" fn clear_cache(ctx: *mut c_void, err: *mut *mut ErrorObj) -> Status {
    with_state(ctx, |state| {
        // Whoever clears what is kept has moved memory, which programs know by address.
        state.queue.forget_programs();
        state.pool.clear(state.driver);
    });
    // SAFETY: forwarded to the caller.
    unsafe { (replaced(ctx).clear_cache)(ctx, err) }
}
