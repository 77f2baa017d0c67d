//! Which experts of a mixture rows go to.
//!
//! With few rows, a norm and the product with the router's weight wait for the choice, and one kernel makes all three.

use mlxcel_abi::fused_args::RouteArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::pending::{Pending, Products, let_go};
use super::submit::Around;
use super::{State, is_half, is_plain, slot, small};
use crate::driver::{Arguments, Shape, pair};
use crate::kernels::{ENGINE_ARCHITECTURE, Text};

/// What the kernels have room for: experts, and how many of them are chosen.
pub(super) const MOST_EXPERTS: i64 = 1024;
const MOST_CHOSEN: u32 = 32;
/// Rows up to which norm, router and choice are one kernel.
const MOST_ROUTED: usize = 64;
/// Columns of them: a cluster's rows lie in the shared memory of each of its blocks.
const MOST_COLUMNS: usize = 8192;
/// Blocks of a cluster, which have as many rows.
const CLUSTER: usize = 8;
/// Shared memory that the kernel has fixed beyond what is left for others.
const OWN_BYTES: u32 = 8 << 10;

/// Shared memory of a block for its rows, which lie apart by 16 bytes.
fn shared_bytes(rows: usize, columns: usize) -> u32 {
    (rows.min(CLUSTER) * (2 * columns + 16)) as u32
}

pub(super) fn install(table: &mut BackendOps) {
    table.route = route;
}

slot!(join route(args: *const RouteArgs) -> [Tensor; 2] |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    routed(device, state, &unsafe { RouteArgs::read(args) }?)
});

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
    /// Whether the kernel for norm, router and choice has room for so many rows.
    fn routes(&self, rows: usize, columns: usize) -> bool {
        self.architecture >= ENGINE_ARCHITECTURE
            && rows <= MOST_ROUTED
            && columns.is_multiple_of(8)
            && columns <= MOST_COLUMNS
            && shared_bytes(rows, columns) + OWN_BYTES <= self.most_shared_bytes
    }

    /// Whether that kernel could take the norm.
    pub(super) fn may_route(&self, norm: &Norm) -> bool {
        !self.keeps_rows_apart
            && self.routes(norm.rows, norm.columns as usize)
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
                && self.routes(products.rows, w.columns)
                && logits.shape() == [products.rows as i64, w.rows as i64]
        };
        if !matches!(&self.pending, Pending::Products(products) if can(products)) {
            self.flush(device)?;
            return Ok(None);
        }
        match core::mem::take(&mut self.pending) {
            Pending::Products(products) => Ok(Some(products)),
            _ => Ok(None),
        }
    }

    fn submit_router(&mut self, router: &Products, choice: &Choice) -> Result<()> {
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
        let numbers = |first: usize, second: usize| pair(first as u32, second as u32);
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
            numbers(router.rows, w.rows),
            numbers(w.columns, choice.chosen),
            numbers(choice.renormalised, usize::from(waits)),
        ];
        let shape = Shape {
            grid: [CLUSTER as u32, router.rows.div_ceil(CLUSTER) as u32, 1],
            threads: 256,
            shared_bytes: shared_bytes(router.rows, w.columns),
        };
        // What the kernel has fixed beside it is more than others have.
        let most = shared_bytes(CLUSTER, MOST_COLUMNS);
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
