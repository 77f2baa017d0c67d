//! Rules of every slot: handles, lifetimes of host memory, errors, sizes of argument structs,
//! threads, memory figures.

use core::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlxcel_abi::kinds::unary;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{FromHostArgs, MemoryLimits, SliceArgs};
use mlxcel_abi::{DType, Status, Tensor as Handle, TensorInfo, status};

use super::array::Array;
use super::suite::Suite;
use crate::{Backend, Result, Tensor};

type Checked = core::result::Result<(), String>;

pub(super) fn run(suite: &mut Suite<'_>) {
    handles(suite);
    suite.holds(
        "from_host",
        "copied memory may change afterwards",
        copied_memory,
    );
    suite.holds(
        "from_host",
        "borrowed memory is released once, and not while it is used",
        borrowed_memory,
    );
    suite.holds("from_host", "a failed call releases nothing", failed_borrow);
    suite.holds("from_host", "argument structs of other sizes", struct_sizes);
    suite.holds("read", "a destination of another size", read_sizes);
    suite.holds(
        "unary",
        "errors write no result and need no place for a text",
        errors,
    );
    suite.holds("full", "an unknown dtype", unknown_dtype);
    suite.holds("release", "from another thread", foreign_release);
    suite.holds("memory", "figures follow what is alive", figures);
    suite.holds("set_memory_limits", "a limit is kept", limits);
    suite.holds("eval", "evaluation and submission", evaluation);
}

fn words<T>(result: Result<T>) -> core::result::Result<T, String> {
    result.map_err(|error| error.to_string())
}

fn expect(what: &str, found: Status, wanted: Status) -> Checked {
    if found == wanted {
        return Ok(());
    }
    Err(format!(
        "{what}: \"{}\" instead of \"{}\"",
        status::name(found),
        status::name(wanted)
    ))
}

/// Statuses of raw calls on handles.
struct Raw<'a>(&'a BackendOps);

impl Raw<'_> {
    fn retain(&self, handle: Handle) -> Status {
        // SAFETY: the table is imported and open; any handle may be given.
        unsafe { (self.0.retain)(self.0.ctx, handle, core::ptr::null_mut()) }
    }

    fn release(&self, handle: Handle) -> Status {
        // SAFETY: as above.
        unsafe { (self.0.release)(self.0.ctx, handle, core::ptr::null_mut()) }
    }

    fn info(&self, handle: Handle) -> Status {
        let mut info = TensorInfo::ZERO;
        // SAFETY: as above, and the place is live.
        unsafe { (self.0.info)(self.0.ctx, handle, &mut info, core::ptr::null_mut()) }
    }

    fn negate(&self, handle: Handle, out: &mut Handle) -> Status {
        // SAFETY: as above.
        unsafe { (self.0.unary)(self.0.ctx, unary::NEG, handle, out, core::ptr::null_mut()) }
    }

    fn host_tensor(&self, args: *const FromHostArgs, out: &mut Handle) -> Status {
        // SAFETY: the caller gives live arguments.
        unsafe { (self.0.from_host)(self.0.ctx, args, out, core::ptr::null_mut()) }
    }
}

fn handles(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    let negated =
        |b: &Backend, handle: Handle| -> Result<Tensor> { op!(b, unary, unary::NEG, handle) };
    suite.refuses("unary", "no tensor", bad, |b| negated(b, Handle::NONE));
    suite.refuses("unary", "a handle that was never given", bad, |b| {
        negated(b, Handle(0x7777_0000_1234))
    });
    suite.refuses("unary", "a handle that was released", bad, |b| {
        let handle = Tensor::zeros(b, DType::F32, &[2])?.handle();
        negated(b, handle)
    });
    suite.refuses(
        "unary",
        "a released handle whose place is taken again",
        bad,
        |b| {
            let handle = Tensor::zeros(b, DType::F32, &[2])?.handle();
            let _others = [
                Tensor::zeros(b, DType::F32, &[2])?,
                Tensor::zeros(b, DType::F32, &[2])?,
            ];
            negated(b, handle)
        },
    );
    suite.holds("retain", "references are counted", |b| {
        let raw = Raw(b.table());
        let handle = words(Tensor::zeros(b, DType::F32, &[2]).and_then(Tensor::into_handle))?;
        expect("retain", raw.retain(handle), status::OK)?;
        expect("the first release", raw.release(handle), status::OK)?;
        expect(
            "info of a tensor with a reference",
            raw.info(handle),
            status::OK,
        )?;
        expect("the last release", raw.release(handle), status::OK)?;
        expect("info after it", raw.info(handle), bad)?;
        expect("one release more", raw.release(handle), bad)?;
        expect("retain after it", raw.retain(handle), bad)
    });
}

fn copied_memory(b: &Backend) -> Checked {
    let mut data = [1.0f32, 2.0, 3.0];
    let tensor = words(Tensor::from_slice(b, &data, &[3]))?;
    data.fill(9.0);
    // The compiler must not drop a write that nobody reads.
    core::hint::black_box(&data);
    let found = words(tensor.to_vec::<f32>())?;
    if found == [1.0, 2.0, 3.0] {
        Ok(())
    } else {
        Err(format!("the tensor reads {found:?}"))
    }
}

/// Memory that is lent to a backend.
struct Lent {
    data: Vec<f32>,
    released: AtomicUsize,
}

unsafe extern "C" fn give_back(owner: *mut c_void) {
    // SAFETY: the owner is the `Lent` that came with the function, which outlives the backend's use.
    let lent = unsafe { &mut *owner.cast::<Lent>() };
    // Whoever reads it later shall notice.
    lent.data.fill(f32::NAN);
    lent.released.fetch_add(1, Ordering::SeqCst);
}

fn lend(b: &Backend, lent: &mut Lent, byte_len: usize, out: &mut Handle) -> Status {
    let dims = [lent.data.len() as i64];
    let data = lent.data.as_ptr();
    let args = FromHostArgs {
        data: data.cast(),
        byte_len,
        dtype: DType::F32,
        ndim: 1,
        dims: dims.as_ptr(),
        release: Some(give_back),
        owner: core::ptr::from_mut(lent).cast(),
        ..FromHostArgs::default()
    };
    Raw(b.table()).host_tensor(&args, out)
}

fn borrowed_memory(b: &Backend) -> Checked {
    // Leaked on purpose: a backend that keeps the memory too long must not read a freed page.
    let lent = Box::leak(Box::new(Lent {
        data: (0..4096).map(|i| i as f32).collect(),
        released: AtomicUsize::new(0),
    }));
    let lent: *mut Lent = lent;
    let mut handle = Handle::NONE;
    // SAFETY: never freed, and not borrowed elsewhere at this point.
    let code = lend(b, unsafe { &mut *lent }, 4096 * 4, &mut handle);
    expect("from_host", code, status::OK)?;
    // SAFETY: never freed; only the counter is read.
    let released = || unsafe { (*lent).released.load(Ordering::SeqCst) };
    {
        // SAFETY: `from_host` gave this reference to the caller.
        let tensor = unsafe { Tensor::from_raw(b, handle) };
        let tail = words(tensor.narrow(0, 4000, 96).and_then(|t| t.reshape(&[8, 12])))?;
        let sum = words(tensor.sum(&[0], false))?;
        drop(tensor);
        // Views and lazy results still need the memory, unless the backend made copies.
        let last = words(tail.to_vec::<f32>())?.pop();
        let sum = words(sum.to_vec::<f32>())?;
        if last != Some(4095.0) || sum != [4095.0 * 2048.0] {
            return Err(format!(
                "the tensors read {last:?} and {sum:?} after the first handle was released"
            ));
        }
    }
    words(b.synchronize())?;
    match released() {
        1 => Ok(()),
        times => Err(format!(
            "the memory was released {times} time(s) after the last handle"
        )),
    }
}

fn failed_borrow(b: &Backend) -> Checked {
    let lent: *mut Lent = Box::leak(Box::new(Lent {
        data: vec![1.0; 4],
        released: AtomicUsize::new(0),
    }));
    let mut handle = Handle::NONE;
    // SAFETY: never freed, and not borrowed elsewhere.
    let code = lend(b, unsafe { &mut *lent }, 15, &mut handle);
    expect(
        "from_host with 15 bytes for 4 floats",
        code,
        status::INVALID_ARGUMENT,
    )?;
    // SAFETY: never freed.
    match unsafe { (*lent).released.load(Ordering::SeqCst) } {
        0 => Ok(()),
        times => Err(format!(
            "the memory was released {times} time(s) though the call failed"
        )),
    }
}

/// A caller of a later build: known fields, then others.
#[repr(C)]
struct Newer<T> {
    known: T,
    unknown: [u64; 4],
}

fn struct_sizes(b: &Backend) -> Checked {
    let raw = Raw(b.table());
    let (data, dims) = ([1.0f32, 2.0], [2i64]);
    let args = FromHostArgs {
        data: data.as_ptr().cast(),
        byte_len: 8,
        dtype: DType::F32,
        ndim: 1,
        dims: dims.as_ptr(),
        ..FromHostArgs::default()
    };
    let mut newer = Newer {
        known: args,
        unknown: [u64::MAX; 4],
    };
    newer.known.struct_size = size_of::<Newer<FromHostArgs>>();
    core::hint::black_box(&newer.unknown);
    let mut handle = Handle::NONE;
    expect(
        "a longer struct",
        raw.host_tensor((&raw const newer).cast(), &mut handle),
        status::OK,
    )?;
    expect("release", raw.release(handle), status::OK)?;
    // An older caller did not know `release` and `owner`: what lies there is not an argument.
    let older = FromHostArgs {
        struct_size: core::mem::offset_of!(FromHostArgs, release),
        release: Some(give_back),
        owner: core::ptr::null_mut(),
        ..args
    };
    expect(
        "a shorter struct",
        raw.host_tensor(&older, &mut handle),
        status::OK,
    )?;
    expect("release", raw.release(handle), status::OK)?;
    expect(
        "no struct",
        raw.host_tensor(core::ptr::null(), &mut handle),
        status::INVALID_ARGUMENT,
    )?;
    let tensor = words(Tensor::zeros(b, DType::F32, &[2]))?;
    let sliced: Result<Tensor> = op!(b, slice, tensor.handle(), core::ptr::null::<SliceArgs>());
    match sliced {
        Err(error) => expect("no slice arguments", error.code(), status::INVALID_ARGUMENT),
        Ok(_) => Err("a slice without arguments was accepted".to_owned()),
    }
}

fn read_sizes(b: &Backend) -> Checked {
    let tensor = words(Tensor::zeros(b, DType::F32, &[2]))?;
    let mut bytes = [7u8; 12];
    for len in [0usize, 7, 9, 12] {
        let table = b.table();
        // SAFETY: the destination has at least `len` bytes.
        let code = unsafe {
            (table.read)(
                table.ctx,
                tensor.handle(),
                bytes.as_mut_ptr(),
                len,
                core::ptr::null_mut(),
            )
        };
        expect(
            &format!("{len} bytes for a tensor of 8"),
            code,
            status::INVALID_ARGUMENT,
        )?;
    }
    if bytes == [7; 12] {
        Ok(())
    } else {
        Err("a refused read wrote to the destination".to_owned())
    }
}

fn errors(b: &Backend) -> Checked {
    let raw = Raw(b.table());
    let mut out = Handle(0x5555);
    expect(
        "no error slot",
        raw.negate(Handle::NONE, &mut out),
        status::INVALID_ARGUMENT,
    )?;
    if out != Handle(0x5555) {
        return Err("a failed call wrote its result".to_owned());
    }
    let (a, c) = (
        words(Array::usual(DType::F32, &[2, 3], 1).on(b))?,
        words(Array::usual(DType::F32, &[4], 1).on(b))?,
    );
    match a.add(&c) {
        Ok(_) => Err("shapes that do not fit were accepted".to_owned()),
        Err(error) => {
            let text = error.to_string();
            // A message that names what was found is worth more than a code.
            if text.contains('2') && text.contains('4') {
                Ok(())
            } else {
                Err(format!("the text names no shape: {text}"))
            }
        }
    }
}

fn unknown_dtype(b: &Backend) -> Checked {
    match Tensor::zeros(b, DType(9999), &[2]) {
        Err(error) if [status::INVALID_ARGUMENT, status::UNIMPLEMENTED].contains(&error.code()) => {
            Ok(())
        }
        Err(error) => Err(format!(
            "answered \"{}\": {error}",
            status::name(error.code())
        )),
        Ok(_) => Err("dtype 9999 was accepted".to_owned()),
    }
}

struct Sent(BackendOps);
// SAFETY: `release` is the one slot that is used, and it may be called from any thread.
unsafe impl Send for Sent {}

fn foreign_release(b: &Backend) -> Checked {
    let before = words(b.memory())?.live_tensors;
    let handle = words(Tensor::zeros(b, DType::F32, &[2]).and_then(Tensor::into_handle))?;
    let sent = Sent(*b.table());
    let code = std::thread::spawn(move || {
        let sent = sent;
        Raw(&sent.0).release(handle)
    })
    .join()
    .map_err(|_| "the releasing thread panicked".to_owned())?;
    expect("release", code, status::OK)?;
    // The backend may defer it to its own next call.
    words(b.synchronize())?;
    let after = words(b.memory())?.live_tensors;
    if after == before {
        Ok(())
    } else {
        Err(format!("live handles went from {before} to {after}"))
    }
}

const MIB: u64 = 1 << 20;

fn figures(b: &Backend) -> Checked {
    words(b.synchronize())?;
    let before = words(b.memory())?;
    let reset = MemoryLimits {
        reset_peak: 1,
        ..MemoryLimits::default()
    };
    words(command!(b.table(), set_memory_limits, &reset))?;
    let ones = words(
        Tensor::full(b, 1.0, DType::F32, &[MIB as i64 / 2])
            .and_then(|t| t.contiguous()?.add_scalar(1.0)),
    )?;
    words(b.eval(&[&ones]))?;
    let during = words(b.memory())?;
    if during.active_bytes < before.active_bytes + 2 * MIB {
        return Err(format!(
            "active bytes went from {} to {} with 2 MiB more alive",
            before.active_bytes, during.active_bytes
        ));
    }
    if during.live_tensors != before.live_tensors + 1 {
        return Err(format!(
            "live handles went from {} to {}",
            before.live_tensors, during.live_tensors
        ));
    }
    drop(ones);
    words(b.synchronize())?;
    words(command!(b.table(), clear_cache))?;
    let after = words(b.memory())?;
    if after.active_bytes > before.active_bytes + MIB / 2 || after.peak_bytes < during.active_bytes
    {
        return Err(format!(
            "after the release {} bytes are active (before: {}), the peak is {} (during: {})",
            after.active_bytes, before.active_bytes, after.peak_bytes, during.active_bytes
        ));
    }
    Ok(())
}

fn limits(b: &Backend) -> Checked {
    let old = words(b.memory())?.limit_bytes;
    let set = |limit_bytes: u64| {
        let limits = MemoryLimits {
            limit_bytes,
            ..MemoryLimits::default()
        };
        words(command!(b.table(), set_memory_limits, &limits))?;
        Ok::<u64, String>(words(b.memory())?.limit_bytes)
    };
    let wanted = 48 << 30;
    let found = set(wanted)?;
    let unchanged = set(u64::MAX)?;
    set(old)?;
    if found == wanted && unchanged == wanted {
        return Ok(());
    }
    Err(format!(
        "a limit of {wanted} reads {found}, and {unchanged} when it is left as it is"
    ))
}

fn evaluation(b: &Backend) -> Checked {
    let a = words(Array::of(DType::F32, &[2], [1.0, 2.0]).on(b))?;
    let (sum, product) = (words(a.add(&a))?, words(a.mul(&a))?);
    words(b.eval(&[]))?;
    words(b.async_eval(&[&sum]))?;
    words(b.eval(&[&product, &sum, &a]))?;
    words(b.synchronize())?;
    let stale = words(Tensor::zeros(b, DType::F32, &[1]))?.handle();
    let list = [sum.handle(), stale];
    match command!(b.table(), eval, list.as_ptr(), list.len()) {
        Ok(()) => return Err("a released handle was evaluated".to_owned()),
        Err(error) => expect(
            "eval of a released handle",
            error.code(),
            status::INVALID_ARGUMENT,
        )?,
    }
    let found = (words(sum.to_vec::<f32>())?, words(product.to_vec::<f32>())?);
    if found == (vec![2.0, 4.0], vec![1.0, 4.0]) {
        Ok(())
    } else {
        Err(format!("results are {found:?}"))
    }
}
