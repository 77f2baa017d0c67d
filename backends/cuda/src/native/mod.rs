//! Our kernels in place of MLX's, slot by slot.
//!
//! A node of MLX's graph costs the host some 8 microseconds; a launch costs two. So these slots submit at once to MLX's own
//! stream, into memory of our own pool, and give arrays that are ready in stream order (docs/adr/0010). Whatever a kernel does not
//! take (other dtypes, strided inputs, odd forms) goes to the slot it replaced, with the same result.

mod apart;
mod attention;
mod clustered;
mod decode;
mod dense;
mod expansion;
mod flow;
mod fused;
mod grouped;
mod maps;
mod mixture;
mod movement;
mod paged;
mod pairs;
mod pending;
mod plan;
mod products;
pub(crate) mod ranks;
mod rotations;
mod routing;
mod rows;
mod sample;
mod slot;
mod submit;
mod transfer;

use core::cell::RefCell;
use core::ffi::c_void;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, DType, Result, Tensor, status};
use mlxcel_backend_mlx::Kernels as Hooks;
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::{self, Device};

use crate::collectives::Peers;
use crate::driver::{Arguments, BLOCK_SHARED_BYTES, Driver, Shape, Stream};
use crate::kernels::{Kernels, Text};
use crate::memory::{self, Library, Pool};
use crate::queue::{self, Queue};
use pending::Pending;
use slot::{Outcome, attempt, slot};

/// Hooks for the backend's description.
pub(crate) const KERNELS: Hooks = Hooks { install, remove };

/// First generation with bf16 on tensor cores and copies that do not wait.
const LEAST_ARCHITECTURE: i32 = 80;
/// Generation on which a kernel may start before the one before it ends.
const EARLY_START_ARCHITECTURE: i32 = 90;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and the two parts of the compute capability.
const ATTRIBUTE_PROCESSORS: i32 = 16;
/// Left for what such kernels have in shared memory besides.
const FIXED_SHARED_BYTES: i32 = 2048;
const ATTRIBUTE_MAJOR: i32 = 75;
const ATTRIBUTE_MINOR: i32 = 76;
/// Blocks of one launch that can add their parts together.
const COUNTERS: usize = 1 << 16;

/// What the kernels of one open backend keep between calls.
pub(crate) struct State {
    ctx: usize,
    /// The slots that were replaced.
    mlx: Rc<BackendOps>,
    driver: &'static Driver,
    queue: Arc<Queue>,
    pool: Arc<Pool>,
    kernels: Kernels,
    maps: maps::Maps,
    /// Compute capability, 90 for 9.0.
    architecture: i32,
    /// Multiprocessors.
    processors: u32,
    starts_early: bool,
    /// Whether no row's result may depend on how many others there are.
    keeps_rows_apart: bool,
    /// Shared memory that a block can be given.
    most_shared_bytes: u32,
    /// Partial sums of a launch: address and size.
    scratch: (usize, usize),
    /// Expanded weights of the product under way: address and size.
    expanded: (usize, usize),
    /// Blocks that last as long as the backend: addresses and sizes.
    kept: Vec<(usize, usize)>,
    /// `COUNTERS` zeros; whoever counts leaves zeros behind.
    counters: usize,
    /// Operations that wait for the next one, to be submitted with it.
    pending: Pending,
    /// NVIDIA's product of dense matrices.
    dense: dense::Dense,
    /// Frequencies of rotary embeddings by dimensions and base.
    frequencies: HashMap<(u32, u32), usize>,
    /// The other ranks, where sums over them are launches.
    ranks: Option<Arc<Peers>>,
    /// Tensors that the call under way has made: where it fails nobody else has them.
    made: RefCell<Vec<Tensor>>,
}

thread_local! {
    /// States of the backends opened on this thread.
    static STATES: RefCell<Vec<State>> = const { RefCell::new(Vec::new()) };
}

fn install(table: &mut BackendOps, settings: &mlxcel_backend_mlx::KernelSettings) -> Result<()> {
    let driver = Driver::get()?;
    let device = stream::device_index();
    let architecture = 10 * driver.attribute(ATTRIBUTE_MAJOR, device)?
        + driver.attribute(ATTRIBUTE_MINOR, device)?;
    if architecture < LEAST_ARCHITECTURE {
        // Without kernels of ours, `deterministic` leaves MLX's row by row.
        return Ok(());
    }
    driver.use_device(device)?;
    let processors = driver.attribute(ATTRIBUTE_PROCESSORS, device)?.max(1) as u32;
    let shared_bytes = driver.attribute(BLOCK_SHARED_BYTES, device)?;
    let queue = Queue::open(driver, stream::stream()? as Stream)?;
    let library = Library {
        ctx: table.ctx as usize,
        clear_cache: table.clear_cache,
    };
    let pool = Pool::new(Arc::clone(&queue), library, device);
    let (counters, bytes) = pool.take(driver, COUNTERS * size_of::<u32>())?;
    // SAFETY: memory of that size.
    if let Err(error) = unsafe { queue.zero(counters, bytes) } {
        pool.put(counters, bytes);
        pool.close(driver);
        return Err(error);
    }
    // Nothing fails from here on.
    stream::set_held(Some(queue::submit_held));
    stream::set_lent(Some(memory::bytes_in_use));
    queue::register(&queue);
    let state = State {
        ctx: table.ctx as usize,
        mlx: Rc::new(*table),
        driver,
        queue,
        pool,
        kernels: Kernels::new(architecture),
        maps: maps::Maps::default(),
        architecture,
        processors,
        starts_early: architecture >= EARLY_START_ARCHITECTURE,
        keeps_rows_apart: settings.deterministic,
        most_shared_bytes: (shared_bytes - FIXED_SHARED_BYTES).max(0) as u32,
        scratch: (0, 0),
        expanded: (0, 0),
        kept: vec![(counters, bytes)],
        counters,
        pending: Pending::Nothing,
        dense: dense::Dense::default(),
        frequencies: HashMap::new(),
        ranks: None,
        made: RefCell::default(),
    };
    STATES.with_borrow_mut(|states| states.push(state));
    transfer::install(table);
    movement::install(table);
    products::install(table);
    expansion::install(table);
    rows::install(table);
    attention::install(table);
    sample::install(table);
    fused::install(table);
    mixture::install(table);
    routing::install(table);
    Ok(())
}

fn remove(ctx: *mut c_void) {
    log_summary(ctx);
    STATES.with_borrow_mut(|states| {
        for state in states.iter().filter(|state| state.ctx == ctx as usize) {
            // An error here has nobody to be told to: the backend is being closed.
            let _ = state.queue.close();
            let last = [state.scratch, state.expanded];
            let all = state.kept.iter().chain(state.maps.blocks()).chain(&last);
            for (address, size) in all.filter(|block| block.1 > 0) {
                state.pool.put(*address, *size);
            }
            state.pool.close(state.driver);
        }
        states.retain(|state| state.ctx != ctx as usize);
    });
}

/// Says how many launches programs took over.
fn log_summary(ctx: *mut c_void) {
    let summary = STATES.with_borrow(|states| {
        let state = states.iter().find(|state| state.ctx == ctx as usize);
        state.map(|state| state.queue.summary())
    });
    // SAFETY: the context of a backend that is being closed on its thread.
    if let (Some(summary), Ok(device)) = (summary, unsafe { Device::from_raw(ctx) }) {
        device.log(&summary);
    }
}

impl State {
    /// Where an input is. Memory of MLX's is kept until the kernels of this step are done.
    fn input(&self, device: &Device<'_>, t: Tensor) -> Result<View> {
        let (view, is_foreign) = match device.view(t) {
            Err(error) if error.code == status::RESOURCE_EXHAUSTED => {
                // MLX leaves what it could not compute as it was, so it may be tried again with what this pool kept.
                self.pool.make_room(self.driver);
                device.view(t)?
            }
            seen => seen?,
        };
        if is_foreign {
            device.hold(t)?;
        }
        Ok(view)
    }

    /// A new tensor that a kernel fills. It is the caller's once the call under way is done.
    fn output(&self, device: &Device<'_>, dtype: DType, shape: &[i64]) -> Result<(Tensor, usize)> {
        let elements = shape
            .iter()
            .try_fold(1_usize, |n, &dim| n.checked_mul(usize::try_from(dim).ok()?));
        let bytes = elements.and_then(|n| n.checked_mul(dtype.size_bytes()));
        let bytes = bytes.ok_or_else(|| {
            AbiError::invalid(format!("a tensor of shape {shape:?} is not possible"))
        })?;
        let block = self.pool.lend(self.driver, bytes)?;
        let t = device.wrap(&block, dtype, shape)?;
        self.made.borrow_mut().push(t);
        Ok((t, block.address))
    }

    /// Leaves nothing of a call that failed: neither what it made nor what was to go with it.
    fn abandon(&mut self, device: &Device<'_>, error: &AbiError) {
        // What waits is of calls that succeeded. An error of it comes after that of this call, which is told of.
        let _ = self.flush(device);
        for t in self.made.take() {
            // Those that the kernel gave back itself are stale by now.
            let _ = device.release(t);
        }
        if error.code == status::RESOURCE_EXHAUSTED {
            // Arrays of MLX that kernels of the failed step were to read.
            let _ = device.let_go_when_done();
            self.pool.make_room(self.driver);
        }
    }

    /// Memory for partial sums, used by one launch after another.
    fn scratch(&mut self, bytes: usize) -> Result<usize> {
        let State {
            pool,
            driver,
            scratch,
            ..
        } = self;
        larger(pool, driver, scratch, bytes)
    }

    /// Memory for an expanded weight, used by one product after another.
    fn expanded(&mut self, bytes: usize) -> Result<usize> {
        let State {
            pool,
            driver,
            expanded,
            ..
        } = self;
        larger(pool, driver, expanded, bytes)
    }

    /// Submits a kernel of a text for elements of `dtype`.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch(
        &mut self,
        text: Text,
        dtype: DType,
        name: &'static str,
        shape: &Shape,
        most_shared_bytes: u32,
        arguments: Arguments,
    ) -> Result<()> {
        // A plain weight may be the result of the launch before, which its kernels do not wait for by themselves.
        let early = self.starts_early && !matches!(text, Text::Product { bits: 16, .. });
        let function = self
            .kernels
            .get(self.driver, text, dtype, name, most_shared_bytes)?;
        // SAFETY: forwarded to the caller.
        unsafe { self.queue.launch(function, shape, &arguments, early) }
    }
}

/// A block of at least `bytes` in place of the one held, which goes back: what uses it was submitted before.
fn larger(
    pool: &Arc<Pool>,
    driver: &Driver,
    held: &mut (usize, usize),
    bytes: usize,
) -> Result<usize> {
    if held.1 < bytes {
        if held.1 > 0 {
            pool.put(held.0, held.1);
            *held = (0, 0);
        }
        *held = pool.take(driver, bytes)?;
    }
    Ok(held.0)
}

/// Whether elements are of a half type.
fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Whether a view is of contiguous elements that start at a multiple of `alignment` bytes.
fn is_plain(view: &View, alignment: usize) -> bool {
    view.is_contiguous && !view.is_empty() && (view.data as usize).is_multiple_of(alignment)
}

/// Of several rows there may be gaps where of one there are none, which must not decide who computes a row.
fn refuse_gaps(state: &State, views: &[&View]) -> Result<()> {
    let has_gaps = |view: &&View| is_half(view.dtype) && !view.is_empty() && !is_plain(view, 2);
    if state.keeps_rows_apart && views.iter().any(has_gaps) {
        return Err(AbiError::new(
            status::UNAVAILABLE,
            "option deterministic: backend cuda has no kernel for rows with gaps between them; leave the option out for this model",
        ));
    }
    Ok(())
}

/// A number that kernels take in 32 bits, or none.
fn small(value: i64) -> Option<i32> {
    i32::try_from(value).ok()
}
