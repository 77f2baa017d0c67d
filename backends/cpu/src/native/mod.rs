//! Our kernels in place of MLX's, slot by slot.
//!
//! MLX builds a graph and evaluates it on another thread, which costs several microseconds a node;
//! a decode step of a small model has hundreds of nodes. A processor gains nothing from waiting, so
//! these slots compute at once on the arrays' memory. Whatever a kernel does not take (other
//! dtypes, strided inputs, odd forms) goes to the slot it replaced, with the same result.

mod attention;
mod centred;
mod conv;
mod experts;
mod fused;
mod layers;
mod made;
mod mixture;
mod movement;
mod operands;
mod ordering;
mod products;
mod recurrent;
mod remembered;
mod rotated;
mod routing;
mod rows;
mod sample;
mod sparse;
mod stacks;

use core::cell::RefCell;
use core::ffi::c_void;
use std::rc::Rc;
use std::sync::Mutex;

use mlxcel_abi::error::report;
use mlxcel_abi::guard::catch;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, ErrorObj, Result, Status, status};
use mlxcel_backend_mlx::native::Native;
use mlxcel_backend_mlx::{KernelSettings, Kernels};
use mlxcel_cpu_kernels::{
    Isa, Pool, attention as attention_kernel, conv as conv_kernel, gemm, gemm_integers, qmatmul,
    row,
};

pub(crate) use centred::centred_forms;
pub(crate) use products::preferred_precision;

/// Hooks for the backend's description.
pub(crate) const KERNELS: Kernels = Kernels { install, remove };

/// What the kernels of one open backend keep between calls.
pub(crate) struct State {
    ctx: usize,
    /// The slots that were replaced.
    mlx: Rc<BackendOps>,
    isa: Isa,
    pool: Pool,
    panels: Vec<Mutex<gemm::Scratch>>,
    patches: conv_kernel::Scratch,
    rounded: Vec<Mutex<gemm_integers::Scratch>>,
    attention: Vec<Mutex<attention_kernel::Scratch>>,
    precision: qmatmul::Precision,
    /// Whether no row's result may depend on how many others there are.
    keeps_rows_apart: bool,
    prepared: qmatmul::Prepared,
    /// Of several inputs at a time.
    grouped: Vec<qmatmul::Prepared>,
    rope: row::RopeTable,
}

thread_local! {
    /// States of the backends opened on this thread.
    static STATES: RefCell<Vec<State>> = const { RefCell::new(Vec::new()) };
}

fn install(table: &mut BackendOps, settings: &KernelSettings) -> Result<()> {
    let threads = if settings.threads == 0 {
        crate::processor::cores().physical.max(1)
    } else {
        settings.threads
    };
    let pool = Pool::new(threads).map_err(|error| {
        AbiError::new(
            status::RESOURCE_EXHAUSTED,
            format!("{threads} compute threads cannot be started: {error}"),
        )
    })?;
    let state = State {
        ctx: table.ctx as usize,
        mlx: Rc::new(*table),
        isa: Isa::best(),
        pool,
        panels: (0..threads).map(|_| Mutex::default()).collect(),
        patches: conv_kernel::Scratch::default(),
        rounded: (0..threads).map(|_| Mutex::default()).collect(),
        attention: (0..threads).map(|_| Mutex::default()).collect(),
        precision: products::precision(settings.precision, Isa::best()),
        keeps_rows_apart: settings.deterministic,
        prepared: qmatmul::Prepared::default(),
        grouped: Vec::new(),
        rope: row::RopeTable::default(),
    };
    STATES.with_borrow_mut(|states| states.push(state));
    attention::install(table);
    conv::install(table);
    experts::install(table);
    fused::install(table);
    mixture::install(table);
    movement::install(table);
    ordering::install(table);
    products::install(table);
    recurrent::install(table);
    rotated::install(table);
    routing::install(table);
    rows::install(table);
    sample::install(table);
    sparse::install(table);
    Ok(())
}

fn remove(ctx: *mut c_void) {
    STATES.with_borrow_mut(|states| states.retain(|state| state.ctx != ctx as usize));
    remembered::forget();
}

/// What a kernel made of a call.
enum Outcome {
    /// It computed the result.
    Done,
    /// The call is not for it.
    Pass,
}

/// Runs `kernel`; gives the replaced slot's table when the call is not for it, or its status.
///
/// # Safety
/// `ctx` and `err` as for every slot of the table.
unsafe fn attempt(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    kernel: impl FnOnce(Native<'_>, &mut State) -> Result<Outcome>,
) -> core::result::Result<Status, Rc<BackendOps>> {
    // Where there is no state, this is not the backend's thread; any table's slot says so.
    let mut fallback = None;
    let outcome = catch(|| {
        STATES.with(|states| {
            let mut states = states
                .try_borrow_mut()
                .map_err(|_| AbiError::internal("a kernel was called from within a kernel"))?;
            let Some(state) = states.iter_mut().find(|state| state.ctx == ctx as usize) else {
                return Ok(Outcome::Pass);
            };
            fallback = Some(Rc::clone(&state.mlx));
            // SAFETY: the slot's contract.
            let native = unsafe { Native::from_raw(ctx) }?;
            let _call = operands::Call::begin(native, state.keeps_rows_apart);
            kernel(native, state)
        })
    });
    match (outcome, fallback) {
        (Ok(Outcome::Done), _) => Ok(status::OK),
        // SAFETY: the slot's contract.
        (Err(error), _) if error.code == status::INTERNAL => Ok(unsafe { report(err, error) }),
        // Anything else that is wrong with a call is for the replaced slot to say.
        (_, Some(mlx)) => Err(mlx),
        (_, None) => Err(Rc::new(mlxcel_backend_mlx::plain_table())),
    }
}

/// A slot that tries a kernel with one result and falls back to the slot it replaces.
macro_rules! slot {
    ($name:ident($($arg:ident : $ty:ty),* $(,)?) |$native:ident, $state:ident| $body:expr) => {
        unsafe extern "C" fn $name(
            ctx: *mut core::ffi::c_void,
            $($arg: $ty,)*
            out: *mut mlxcel_abi::Tensor,
            err: *mut *mut mlxcel_abi::ErrorObj,
        ) -> mlxcel_abi::Status {
            let kernel = |$native: mlxcel_backend_mlx::native::Native<'_>, $state: &mut $crate::native::State| {
                let made: mlxcel_abi::Result<Option<mlxcel_abi::Tensor>> = $body;
                match made? {
                    Some(t) if !out.is_null() => {
                        // SAFETY: not null, and the caller's to write.
                        unsafe { out.write(t) };
                        Ok($crate::native::Outcome::Done)
                    }
                    _ => Ok($crate::native::Outcome::Pass),
                }
            };
            // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
            unsafe {
                match $crate::native::attempt(ctx, err, kernel) {
                    Ok(status) => status,
                    Err(mlx) => (mlx.$name)(ctx, $($arg,)* out, err),
                }
            }
        }
    };
}
use made::filled;
use operands::{floats, joint};
use slot;
