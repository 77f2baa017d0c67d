//! Sums over ranks as launches. A sum waits for the next call: where that adds the result to something, one kernel does both.

use core::ffi::c_void;
use std::sync::Arc;

use mlxcel_abi::{AbiError, DType, ErrorObj, Result, Status, Tensor, status};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::pending::{Pending, hold, let_go};
use super::{Outcome, State, attempt, is_half, is_plain};
use crate::collectives::{Peers, SMALL_THREADS, Way};
use crate::driver::{Arguments, Driver, Shape};
use crate::kernels::Text;

/// Bytes that a thread has at a time in either kernel: what a sum is a multiple of.
const UNIT_BYTES: usize = 16;
const LARGE_THREADS: u32 = 512;

/// The ranks that sums are over, or why MLX has to make them.
type Found = core::result::Result<Arc<Peers>, String>;

/// A sum that waits.
#[derive(Debug)]
pub(super) struct RankSum {
    x: usize,
    out: usize,
    bytes: usize,
    dtype: DType,
    held: Vec<Tensor>,
}

/// What is added to a sum, and where the result of that goes; addresses.
#[derive(Debug, Clone, Copy, Default)]
struct Onto {
    residual: usize,
    total: usize,
}

/// Has the backend's sums be over the group that `find` gives, if any.
///
/// # Safety
/// `ctx` and `err` as for every slot.
pub(crate) unsafe fn join(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    find: impl FnOnce(&'static Driver, i32) -> Result<Found>,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        match find(state.driver, mlxcel_backend_mlx::stream::device_index())? {
            Ok(peers) => {
                device.note("sums over ranks: launches of this backend, over peer memory");
                state.ranks = Some(peers);
            }
            Err(reason) => device.note(&format!("sums over ranks: through MLX ({reason})")),
        }
        Ok(Outcome::Done)
    };
    // SAFETY: forwarded to the caller. Without a state this device has no kernels of ours, and MLX's group is all there is.
    let outcome = unsafe { attempt(ctx, err, false, kernel) };
    outcome.unwrap_or(status::OK)
}

/// The slot of that name, or none where the call is MLX's.
///
/// # Safety
/// The slot's contract.
pub(crate) unsafe fn all_sum(
    ctx: *mut c_void,
    t: Tensor,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Option<Status> {
    let kernel = |device: Device<'_>, state: &mut State| {
        if out.is_null() {
            return Ok(Outcome::Pass);
        }
        let Some(made) = summed(&device, state, t)? else {
            return Ok(Outcome::Pass);
        };
        // SAFETY: not null, and the caller's to write.
        unsafe { out.write(made) };
        Ok(Outcome::Done)
    };
    // SAFETY: forwarded to the caller.
    unsafe { attempt(ctx, err, false, kernel) }.ok()
}

/// Which calls this takes depends on what is the same on all ranks alone.
fn summed(device: &Device<'_>, state: &mut State, t: Tensor) -> Result<Option<Tensor>> {
    let Some(peers) = &state.ranks else {
        return Ok(None);
    };
    peers.check()?;
    let x = state.input(device, t)?;
    let bytes = x.len() * x.dtype.size_bytes();
    if !is_half(x.dtype) || !is_plain(&x, UNIT_BYTES) || !bytes.is_multiple_of(UNIT_BYTES) {
        return Ok(None);
    }
    let (made, out) = state.output(device, x.dtype, x.shape())?;
    let sum = RankSum {
        x: x.data as usize,
        out,
        bytes,
        dtype: x.dtype,
        held: hold(device, &[t, made])?,
    };
    state.pending = Pending::RankSum(sum);
    Ok(Some(made))
}

impl State {
    /// An error where the ranks are not all there any more, so that what was computed may be anything.
    pub(super) fn check_ranks(&self) -> Result<()> {
        self.ranks.as_ref().map_or(Ok(()), |peers| peers.check())
    }

    /// Submits a sum that waited.
    pub(super) fn flush_rank_sum(&mut self, device: &Device<'_>, sum: &RankSum) -> Result<()> {
        self.submit_rank_sum(device, sum, Onto::default())
    }

    /// The sum of two tensors, where one of them is a sum over ranks that waits: both sums are submitted as one.
    pub(super) fn take_rank_sum(
        &mut self,
        device: &Device<'_>,
        a: &View,
        b: &View,
    ) -> Result<Option<Tensor>> {
        let Pending::RankSum(sum) = &self.pending else {
            return Ok(None);
        };
        let is_whole = |view: &View| {
            view.dtype == sum.dtype
                && is_plain(view, UNIT_BYTES)
                && view.len() * view.dtype.size_bytes() == sum.bytes
        };
        if a.shape() != b.shape() || !is_whole(a) || !is_whole(b) || a.data == b.data {
            return Ok(None);
        }
        let residual = match sum.out {
            out if out == b.data as usize => a.data as usize,
            out if out == a.data as usize => b.data as usize,
            _ => return Ok(None),
        };
        let (made, total) = self.output(device, a.dtype, a.shape())?;
        let Pending::RankSum(sum) = core::mem::take(&mut self.pending) else {
            return Ok(None);
        };
        self.submit_rank_sum(device, &sum, Onto { residual, total })?;
        Ok(Some(made))
    }

    fn submit_rank_sum(&mut self, device: &Device<'_>, sum: &RankSum, onto: Onto) -> Result<()> {
        let submitted = self.launch_rank_sum(sum, onto);
        // References go back whatever happened.
        let_go(device, &sum.held).and(submitted)
    }

    fn launch_rank_sum(&mut self, sum: &RankSum, onto: Onto) -> Result<()> {
        let Some(peers) = &self.ranks else {
            return Err(AbiError::internal("a sum over ranks without any"));
        };
        let layout = peers.layout();
        let arguments = Arguments::new()
            .record(&peers.record())
            .wide(sum.x)
            .wide(onto.residual)
            .wide(sum.out)
            .wide(onto.total);
        let (name, shape, arguments) = match layout.way(sum.bytes) {
            Way::Small { blocks } => (
                "sum_small",
                Shape::line(blocks, SMALL_THREADS as u32),
                arguments.int((sum.bytes / 8) as i32),
            ),
            Way::Large { blocks } => (
                "sum_large",
                Shape::line(blocks, LARGE_THREADS),
                arguments.wide(sum.bytes / UNIT_BYTES),
            ),
        };
        let text = Text::Ranks { layout };
        // SAFETY: all arrays have so many bytes, or there is nothing to add and null; windows are those of this group, laid out alike.
        unsafe { self.launch(text, sum.dtype, name, &shape, 0, arguments) }
    }
}
