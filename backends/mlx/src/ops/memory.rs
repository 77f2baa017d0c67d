//! Figures and limits of memory.
//!
//! MLX takes its own limit as a guideline: above it, it waits for work to end and then allocates
//! all the same. Here a call that would allocate above the limit is refused instead.

use mlxcel_abi::ops_args::{MemoryInfo, MemoryLimits};
use mlxcel_abi::{AbiError, status};

use crate::args::Result;
use crate::backend::Description;
use crate::blocks::MOST_IDLE_BYTES;
use crate::bridge::{self, MemoryFigures};
use crate::context::Context;
use crate::device::DeviceKind;
use crate::fault::Fault;
use crate::slot::{check_out, plain_slots};
use crate::stream::lent_bytes;

/// Value of a limit that stays as it is.
const KEEP: u64 = u64::MAX;

plain_slots! {
    fn memory(context; out: *mut MemoryInfo) {
        check_out(out)?;
        // SAFETY: the caller fills `struct_size` before the call, as for every argument struct.
        let room = unsafe { (*out).struct_size }.min(size_of::<MemoryInfo>());
        if room < size_of::<usize>() {
            return Err(Fault::invalid(format!("the result struct says it has {room} bytes")));
        }
        let figures = figures_of(context)?;
        let info = MemoryInfo {
            struct_size: room,
            active_bytes: figures.active,
            peak_bytes: figures.peak,
            cache_bytes: figures.cache,
            limit_bytes: figures.limit,
            total_bytes: context.total_bytes,
            live_tensors: context.tensors.borrow().live() as u64,
        };
        // SAFETY: at most the bytes that the caller's build of the struct has are written.
        unsafe { core::ptr::copy_nonoverlapping((&raw const info).cast::<u8>(), out.cast::<u8>(), room) };
        Ok(())
    }

    fn set_memory_limits(context; args: *const MemoryLimits) {
        // SAFETY: the slot's contract.
        let limits = unsafe { MemoryLimits::read(args) }?;
        let reset_peak = crate::args::flag(limits.reset_peak, "reset_peak")?;
        let can_wire = context.description.device == DeviceKind::Gpu && cfg!(target_vendor = "apple");
        if limits.wired_limit_bytes != KEEP && !can_wire {
            let name = context.description.name;
            return Err(AbiError::unimplemented(format!("wired_limit_bytes: {name} cannot wire memory down")).into());
        }
        apply(context.description, context.total_bytes, limits.limit_bytes, limits.cache_limit_bytes)?;
        // Idle blocks are taken without a look at limits.
        context.blocks.borrow_mut().clear();
        if limits.cache_limit_bytes != KEEP {
            context.blocks.borrow_mut().set_most(idle_bytes(context.description, limits.cache_limit_bytes));
        }
        if limits.wired_limit_bytes != KEEP {
            bridge::set_wired_limit(limits.wired_limit_bytes)?;
        }
        if reset_peak {
            bridge::reset_peak_memory()?;
        }
        Ok(())
    }

    fn clear_cache(context;) {
        // What the memo holds belongs to steps that are over; it is made again when needed.
        if let Some(memo) = context.memo.borrow_mut().as_mut() {
            bridge::forget(memo);
        }
        context.blocks.borrow_mut().clear();
        Ok(bridge::clear_cache()?)
    }
}

/// Sets the two limits that every device has; 0 as `limit` takes the limit away.
pub(crate) fn apply(
    description: &Description,
    total: u64,
    limit: u64,
    cache_limit: u64,
) -> Result<()> {
    if limit != KEEP {
        bridge::set_memory_limit(if limit == 0 { u64::MAX } else { limit })?;
        bridge::set_tensor_limit(if limit == 0 { total } else { limit });
    }
    if cache_limit != KEEP {
        bridge::set_cache_limit(cache_limit - idle_bytes(description, cache_limit))?;
    }
    Ok(())
}

/// What a cache's limit leaves to idle blocks (see [`crate::blocks`]); the rest is MLX's own.
pub(crate) fn idle_bytes(description: &Description, cache_limit: u64) -> u64 {
    match (description.device, cache_limit) {
        (DeviceKind::Gpu, _) => 0,
        (DeviceKind::Cpu, KEEP) => MOST_IDLE_BYTES,
        (DeviceKind::Cpu, limit) => MOST_IDLE_BYTES.min(limit / 4),
    }
}

/// MLX's figures, where idle blocks are cache.
fn figures_of(context: &Context) -> Result<MemoryFigures> {
    let mut figures = bridge::memory_figures()?;
    let idle = context.blocks.borrow().idle_bytes();
    figures.active = figures.active.saturating_sub(idle);
    figures.cache = figures.cache.saturating_add(idle);
    Ok(figures)
}

/// Refuses work that would allocate `wanted` more bytes than the limit leaves. Buffers kept for
/// reuse go first; idle blocks count as used until then, since they are taken without a look.
pub(crate) fn check_room(context: &Context, wanted: u64) -> Result<()> {
    let over = |figures: &MemoryFigures| {
        figures.limit > 0 && used_bytes(figures).saturating_add(wanted) > figures.limit
    };
    if !over(&bridge::memory_figures()?) {
        return Ok(());
    }
    context.blocks.borrow_mut().clear();
    bridge::clear_cache()?;
    let figures = bridge::memory_figures()?;
    if !over(&figures) {
        return Ok(());
    }
    let live = context.tensors.borrow().live();
    Err(AbiError::new(
        status::RESOURCE_EXHAUSTED,
        format!(
            "{} bytes are in use by {live} tensors and {wanted} more are needed, the limit is {}: release tensors or raise the limit",
            used_bytes(&figures),
            figures.limit
        ),
    )
    .into())
}

/// MLX's own figure, and what a backend lends to its arrays.
fn used_bytes(figures: &MemoryFigures) -> u64 {
    figures.active.saturating_add(lent_bytes())
}
