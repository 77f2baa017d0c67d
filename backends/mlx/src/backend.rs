//! The entry table of a backend plugin: probe, open, close.

use core::ffi::c_void;
use std::sync::{Mutex, MutexGuard, OnceLock};

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::guard::guard;
use mlxcel_abi::host::HostApi;
use mlxcel_abi::kinds::log;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, ErrorObj, OwnedBytes, Result, Status, Str, Table, status};

use crate::apart;
use crate::bridge;
use crate::context::Context;
use crate::device::{DeviceKind, Probe};
use crate::fault::Fault;
use crate::ops;
use crate::options::Options;

/// What tells one backend from another.
#[derive(Debug, Clone, Copy)]
pub struct Description {
    /// Name, as `--backend` has it.
    pub name: &'static str,
    /// Sort of device.
    pub device: DeviceKind,
    /// Threads that compute one operation, at most.
    pub most_threads: u32,
    /// Whether its kernels round activations for `precision: high` and `fast`; without, those are
    /// refused.
    pub rounds_activations: bool,
    /// Whether its kernels can give a row the same bits whatever else is in the call; without,
    /// `deterministic: true` is refused.
    pub keeps_rows_apart: bool,
    /// Finds out whether it can run here.
    pub probe: fn() -> Result<Probe>,
    /// The device's own kernels, in place of MLX's.
    pub kernels: Option<Kernels>,
}

/// How a device brings kernels of its own (see [`crate::native`]). Both run on the backend thread.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    /// Replaces slots of a table whose `ctx` is set.
    pub install: fn(table: &mut BackendOps, settings: &KernelSettings) -> Result<()>,
    /// Lets go of what `install` made for this `ctx`.
    pub remove: fn(ctx: *mut c_void),
}

/// What `open`'s options say about a device's own kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KernelSettings {
    /// Compute threads; 0 leaves the choice to the backend.
    pub threads: usize,
    /// How products with quantised weights may round activations.
    pub precision: KernelPrecision,
    /// Whether a row's result may depend on nothing but the row.
    pub deterministic: bool,
}

/// Rounding of activations in products with quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelPrecision {
    /// What the device's kernels think best.
    #[default]
    Auto,
    /// None.
    Exact,
    /// To 16 bits.
    High,
    /// To 8 bits.
    Fast,
}

/// A backend over MLX: put one in a `static` and hand its [`Backend::table`] to the host.
pub struct Backend {
    description: Description,
    table: OnceLock<SharedTable>,
}

impl core::fmt::Debug for Backend {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.description.fmt(f)
    }
}

struct SharedTable(BackendTable);

// SAFETY: the table is written once and only read afterwards; its context is a `&'static Backend`,
// which is `Sync` by its fields.
unsafe impl Send for SharedTable {}
// SAFETY: as above.
unsafe impl Sync for SharedTable {}

/// Addresses of the contexts that are open, so that closing twice is an error and nothing worse.
static OPEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn open_contexts() -> MutexGuard<'static, Vec<usize>> {
    OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Backend {
    /// A backend that was not used yet.
    pub const fn new(description: Description) -> Self {
        Self {
            description,
            table: OnceLock::new(),
        }
    }

    /// The entry table; lives as long as the process.
    pub fn table(&'static self) -> *const BackendTable {
        let shared = self.table.get_or_init(|| {
            SharedTable(BackendTable {
                ctx: core::ptr::from_ref(self).cast_mut().cast(),
                probe,
                open,
                close,
                ..BackendTable::stubs()
            })
        });
        &raw const shared.0
    }

    /// # Safety
    /// `ctx` must be null or come from [`Backend::table`].
    unsafe fn from_raw(ctx: *mut c_void) -> Result<&'static Self> {
        // SAFETY: the caller vouches for the pointer.
        unsafe { ctx.cast::<Self>().as_ref() }
            .ok_or_else(|| AbiError::invalid("the table has no context"))
    }

    fn open(
        &'static self,
        device: &str,
        options: &str,
        host: Option<HostApi>,
    ) -> Result<*const BackendOps> {
        let description = &self.description;
        let options = Options::parse(options, description)?;
        let probe = (description.probe)()?;
        if probe.score == 0 {
            return Err(AbiError::new(
                status::UNAVAILABLE,
                format!("{}: {}", description.name, probe.reason),
            ));
        }
        let index = index_of(&probe, device)?;
        let total_bytes = probe
            .devices
            .get(index)
            .map_or(0, |device| device.total_bytes);
        check_version()?;
        let memo =
            start(description, index, total_bytes, options).map_err(|fault| fault.named("open"))?;
        let mut table = ops::table();
        if options.deterministic {
            apart::install(&mut table);
        }
        let idle = ops::memory::idle_bytes(description, options.cache_limit_bytes);
        let context = Context::new(description, table, memo, host, total_bytes, idle);
        let context = Box::new(context);
        context.log(
            log::INFO,
            &format!("MLX {} on device {index}", crate::mlx_version()),
        );
        let raw = Box::into_raw(context);
        // SAFETY: made on the line above, and known to no one else yet.
        let (table, installed) = unsafe {
            (*raw).table.ctx = raw.cast();
            let install = description.kernels.map(|kernels| kernels.install);
            let installed = install.map_or(Ok(()), |install| {
                install(&mut (*raw).table, &options.kernel_settings())
            });
            (&raw const (*raw).table, installed)
        };
        if let Err(error) = installed {
            // SAFETY: as above; it ends here.
            drop(unsafe { Box::from_raw(raw) });
            return Err(error);
        }
        open_contexts().push(raw as usize);
        Ok(table)
    }
}

fn index_of(probe: &Probe, device: &str) -> Result<usize> {
    if device.is_empty() {
        return Ok(0);
    }
    probe
        .devices
        .iter()
        .position(|found| found.name == device)
        .ok_or_else(|| {
            let names: Vec<&str> = probe
                .devices
                .iter()
                .map(|device| device.name.as_str())
                .collect();
            AbiError::new(
                status::NOT_FOUND,
                format!(
                    "device {device} is not there, there are: {}",
                    names.join(", ")
                ),
            )
        })
}

/// Headers and library must be of one version: MLX promises no stable binary interface.
fn check_version() -> Result<()> {
    let expected = bridge::header_version();
    let found = bridge::library_version().map_err(|error| Fault::from(error).named("open"))?;
    let same = found
        .strip_prefix(&expected)
        .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()));
    if same {
        return Ok(());
    }
    Err(AbiError::new(
        status::FAILED_PRECONDITION,
        format!(
            "built for MLX {expected}, loaded with MLX {found}: install the backend's package again"
        ),
    ))
}

fn start(
    description: &Description,
    index: usize,
    total_bytes: u64,
    options: Options,
) -> crate::args::Result<cxx::UniquePtr<bridge::Memo>> {
    let index =
        i32::try_from(index).map_err(|_| Fault::invalid(format!("device number {index}")))?;
    bridge::open_device(description.device.code(), index)?;
    let bounds = [total_bytes, bridge::memory_figures()?.limit];
    let least = bounds.into_iter().filter(|&bytes| bytes > 0).min();
    bridge::set_tensor_limit(least.unwrap_or(0));
    ops::memory::apply(
        description,
        total_bytes,
        options.memory_limit_bytes,
        options.cache_limit_bytes,
    )?;
    Ok(bridge::new_memo()?)
}

/// # Safety
/// The slot's contract: `ctx` of this plugin's table, pointers valid for the call.
unsafe extern "C" fn probe(
    ctx: *mut c_void,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let run = || {
        // SAFETY: the slot's contract.
        let backend = unsafe { Backend::from_raw(ctx) }?;
        if out.is_null() {
            return Err(AbiError::invalid("probe: the result pointer is null"));
        }
        let mut probe = (backend.description.probe)()?;
        if !backend.description.rounds_activations {
            let word = "preferred_precision".to_owned();
            probe.details.entry(word).or_insert_with(|| "exact".into());
        }
        let text = probe.to_json().to_string();
        // SAFETY: not null, and the caller vouches for it.
        unsafe { out.write(OwnedBytes::from_vec(text.into_bytes())) };
        Ok(())
    };
    // SAFETY: the slot's contract.
    unsafe { guard(err, run) }
}

/// # Safety
/// The slot's contract: `ctx` of this plugin's table, pointers valid for the call.
unsafe extern "C" fn open(
    ctx: *mut c_void,
    args: *const OpenArgs,
    out: *mut *const BackendOps,
    err: *mut *mut ErrorObj,
) -> Status {
    let run = || {
        // SAFETY: the slot's contract.
        let (backend, args) = unsafe { (Backend::from_raw(ctx)?, OpenArgs::read(args)?) };
        if out.is_null() {
            return Err(AbiError::invalid("open: the result pointer is null"));
        }
        // SAFETY: the slot's contract: both texts are valid for the call.
        let (device, options) = unsafe {
            (
                text_of(args.device, "device")?,
                text_of(args.options, "options")?,
            )
        };
        // SAFETY: the host's table outlives the backend.
        let host = (!args.host.is_null()).then(|| unsafe { HostApi::import(args.host) });
        let table = backend.open(device, options, host)?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { out.write(table) };
        Ok(())
    };
    // SAFETY: the slot's contract.
    unsafe { guard(err, run) }
}

/// # Safety
/// `text` must be valid for `'a`.
unsafe fn text_of<'a>(text: Str, what: &str) -> Result<&'a str> {
    // SAFETY: forwarded to the caller.
    unsafe { text.as_str() }
        .map_err(|error| AbiError::invalid(format!("open: {what} is not UTF-8: {error}")))
}

/// # Safety
/// The slot's contract: `ops` is any pointer, compared before it is used.
unsafe extern "C" fn close(
    _ctx: *mut c_void,
    table: *const BackendOps,
    err: *mut *mut ErrorObj,
) -> Status {
    let run = || {
        let context = take_open(table)?;
        if let Some(kernels) = context.description.kernels {
            (kernels.remove)(context.table.ctx);
        }
        // Arrays end here, on the thread that made them; then nothing of them can be under way.
        drop(context);
        bridge::close_device().map_err(|error| Fault::from(error).named("close"))
    };
    // SAFETY: the slot's contract.
    unsafe { guard(err, run) }
}

fn take_open(table: *const BackendOps) -> Result<Box<Context>> {
    let mut open = open_contexts();
    let raw = (table as usize).wrapping_sub(core::mem::offset_of!(Context, table));
    let position = open
        .iter()
        .position(|&address| address == raw)
        .ok_or_else(|| AbiError::invalid("close: this backend is not open"))?;
    let raw = raw as *mut Context;
    // SAFETY: the address is that of a context made by `open`, and `close` removes it first.
    unsafe { (*raw).check_thread() }.map_err(|error| Fault::from(error).named("close"))?;
    open.swap_remove(position);
    // SAFETY: as above; it is in the list no more, so this happens once.
    Ok(unsafe { Box::from_raw(raw) })
}
