//! Which experts of a mixture rows go to.
//!
//! With few rows, a norm and the product with the router's weight wait for the choice, and one kernel makes all three.

use core::ffi::c_void;

use mlxcel_abi::fused_args::RouteArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::pending::{Pending, Products, let_go};
use super::submit::Around;
use super::{Outcome, State, attempt, is_half, is_plain, small};
use crate::driver::{Arguments, Shape};
use crate::kernels::{ENGINE_ARCHITECTURE, Text};

/// What the kernels have room for: experts, and how many of them are chosen.
pub(super) const MOST_EXPERTS: i64 = 1024;
const MOST_CHOSEN: u32 = 32;
/// Rows up to which norm, router and choice are one kernel.
const MOST_ROUTED: usize = 64;
/// Columns of them: a cluster's rows lie in the shared memory of each of its blocks.
const MOST_COLUMNS: i32 = 8192;

pub(super) fn install(table: &mut BackendOps) {
    table.route = route;
}

unsafe extern "C" fn route(
    ctx: *mut c_void,
    args: *const RouteArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        // SAFETY: the slot's contract: a live argument struct.
        let read = unsafe { RouteArgs::read(args) }?;
        match routed(device, state, &read)? {
            Some(made) if !out.is_null() => {
                // SAFETY: not null, and the caller's to write.
                unsafe { out.write(made) };
                Ok(Outcome::Done)
            }
            _ => Ok(Outcome::Pass),
        }
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, true, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.route)(ctx, args, out, err),
        }
    }
}

/// A norm of few rows that waits; addresses on the device.
#[derive(Debug)]
pub(super) struct Norm {
    pub(super) x: usize,
    /// Added to x first, and where the sum goes; 0 for none.
    pub(super) added: usize,
    pub(super) total: usize,
    /// 0 for none.
    pub(super) weight: usize,
    pub(super) eps: f32,
    pub(super) out: usize,
    pub(super) rows: usize,
    pub(super) columns: i32,
    pub(super) dtype: DType,
    pub(super) held: Vec<Tensor>,
}

impl State {
    /// Whether the kernel for norm, router and choice could take the norm.
    pub(super) fn may_route(&self, norm: &Norm) -> bool {
        self.architecture >= ENGINE_ARCHITECTURE
            && !self.keeps_rows_apart
            && norm.rows <= MOST_ROUTED
            && norm.columns % 8 == 0
            && norm.columns <= MOST_COLUMNS
            && (norm.x | norm.added | norm.total | norm.weight | norm.out).is_multiple_of(16)
    }

    pub(super) fn submit_norm(&mut self, norm: &Norm) -> Result<()> {
        let arguments = Arguments::new()
            .wide(norm.x)
            .wide(norm.added)
            .wide(norm.weight)
            .wide(norm.total)
            .wide(norm.out)
            .int(norm.columns)
            .float(norm.eps);
        let shape = Shape::line(norm.rows as u32, 256);
        // SAFETY: a block a row of so many columns; the weight is as long or null, and so are the parts of the sum.
        unsafe { self.launch(Text::Rows, norm.dtype, "rms_norm", &shape, 0, arguments) }
    }

    /// Submits the norm that waits with products.
    pub(super) fn submit_norm_of(&mut self, products: &mut Products) -> Result<()> {
        let Some(norm) = products.norm.take() else {
            return Ok(());
        };
        let submitted = self.submit_norm(&norm);
        products.held.extend(norm.held);
        submitted
    }

    /// The norm that waits, if `x` is its result; everything else that waits is submitted.
    pub(super) fn take_norm(&mut self, device: &Device<'_>, x: usize) -> Result<Option<Norm>> {
        if !matches!(&self.pending, Pending::Norm(norm) if norm.out == x) {
            self.flush(device)?;
            return Ok(None);
        }
        match core::mem::take(&mut self.pending) {
            Pending::Norm(norm) => Ok(Some(norm)),
            _ => Ok(None),
        }
    }

    /// The product that waits, if the logits are its result and it can be made with their choice; everything else that waits is
    /// submitted.
    fn take_router(&mut self, device: &Device<'_>, logits: &View) -> Result<Option<Products>> {
        let can = |products: &Products| {
            let &[(w, out)] = products.items.as_slice() else {
                return false;
            };
            out == logits.data as usize
                && products.dtype == logits.dtype
                && products.rows <= MOST_ROUTED
                && w.columns <= MOST_COLUMNS as usize
                && w.columns.is_multiple_of(8)
                && logits.shape() == [products.rows as i64, w.rows as i64]
        };
        let takes = self.architecture >= ENGINE_ARCHITECTURE
            && matches!(&self.pending, Pending::Products(products) if can(products));
        if !takes {
            self.flush(device)?;
            return Ok(None);
        }
        match core::mem::take(&mut self.pending) {
            Pending::Products(products) => Ok(Some(products)),
            _ => Ok(None),
        }
    }

    fn submit_router(&mut self, router: &Products, choice: &Choice) -> Result<()> {
        /// Blocks of a cluster, which have as many rows.
        const CLUSTER: usize = 8;
        let Some((w, logits)) = router.items.first().copied() else {
            return Ok(());
        };
        let (x, [added, total, normed], around) = match &router.norm {
            None => (router.x, [0; 3], Around::default()),
            Some(norm) => {
                let around = Around {
                    is_normed: true,
                    eps: norm.eps,
                    norm: norm.weight,
                    residual: 0,
                };
                (norm.x, [norm.added, norm.total, norm.out], around)
            }
        };
        // A quantised weight comes from the host; a plain one may have been made by the kernel before.
        let waits = w.bits == 16 && !self.pool.is_constant(w.words);
        let [norm, residual, last] = around.words();
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let record = [
            w.words as u64,
            w.scales as u64,
            w.biases as u64,
            x as u64,
            added as u64,
            total as u64,
            normed as u64,
            logits as u64,
            choice.experts as u64,
            choice.weights as u64,
            norm,
            residual,
            last,
            pair(router.rows, w.rows),
            pair(w.columns, choice.chosen),
            pair(choice.renormalised, usize::from(waits)),
        ];
        let shape = Shape {
            grid: [CLUSTER as u32, router.rows.div_ceil(CLUSTER) as u32, 1],
            threads: 256,
            // Rows, apart from each other by 16 bytes.
            shared_bytes: (router.rows.min(CLUSTER) * (2 * w.columns + 16)) as u32,
        };
        // Beside what the kernel has fixed, which is more than others have.
        let most = (CLUSTER * (2 * MOST_COLUMNS as usize + 16)) as u32;
        let text = Text::Router {
            bits: w.bits,
            group_size: w.group_size,
        };
        let name = match w.rows {
            ..=128 => "router_4",
            129..=256 => "router_8",
            _ => "router_32",
        };
        let arguments = Arguments::new().record(&record);
        // SAFETY: the weight has a row for every logit, x `rows` of as many columns, as has what it becomes; results were made for
        // as many.
        unsafe { self.launch(text, router.dtype, name, &shape, most, arguments) }
    }
}

/// Where a choice goes, and how it is made.
struct Choice {
    experts: usize,
    weights: usize,
    chosen: usize,
    renormalised: usize,
}

fn routed(device: Device<'_>, state: &mut State, args: &RouteArgs) -> Result<Option<[Tensor; 2]>> {
    /// Rows of a block.
    const ROWS: u32 = 8;
    state.settle(&device, &[args.logits])?;
    let logits = state.input(&device, args.logits)?;
    let is_full = logits.dtype == DType::F32;
    let &[rows, n] = logits.shape() else {
        state.flush(&device)?;
        return Ok(None);
    };
    let fits = (is_full || is_half(logits.dtype))
        && is_plain(&logits, logits.dtype.size_bytes())
        && n <= MOST_EXPERTS
        && (1..=MOST_CHOSEN.min(n as u32)).contains(&args.top_k)
        && args.renormalised <= 1;
    let (Some(count), true) = (small(rows), fits) else {
        state.flush(&device)?;
        return Ok(None);
    };
    let shape = [rows, i64::from(args.top_k)];
    let (experts, ids) = state.output(&device, DType::U32, &shape)?;
    let (weights, shares) = state.output(&device, logits.dtype, &shape)?;
    if let Some(mut router) = state.take_router(&device, &logits)? {
        let choice = Choice {
            experts: ids,
            weights: shares,
            chosen: args.top_k as usize,
            renormalised: args.renormalised as usize,
        };
        let submitted = state.submit_router(&router, &choice);
        router
            .held
            .extend(router.norm.take().into_iter().flat_map(|norm| norm.held));
        let_go(&device, &router.held).and(submitted)?;
        return Ok(Some([experts, weights]));
    }
    let arguments = Arguments::new()
        .wide(logits.data as usize)
        .wide(ids)
        .wide(shares)
        .int(count)
        .int(n as i32)
        .int(args.top_k as i32)
        .int(args.renormalised as i32);
    let launch = Shape::line((count as u32).div_ceil(ROWS), 32 * ROWS);
    // The text for f32 has no half type in it.
    let dtype = if is_full { DType::BF16 } else { logits.dtype };
    let text = Text::Choice { is_full };
    // As few values a thread as it takes.
    let name = match n {
        ..=128 => "route_4",
        129..=256 => "route_8",
        _ => "route_32",
    };
    // SAFETY: `rows` rows of `n` logits, and results of as many rows of `top_k`.
    unsafe { state.launch(text, dtype, name, &launch, 0, arguments) }?;
    Ok(Some([experts, weights]))
}
