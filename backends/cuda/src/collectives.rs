//! The extension `mlxcel.ext.collectives/1`: sums over ranks as launches of our own (`native/ranks.rs`), everything else and every
//! rank that cannot reach the others' memory through MLX's NCCL layer.
//!
//! `join` has MLX join first, which waits for all ranks. Then they meet once more ([`meeting`]) to exchange where their windows are
//! ([`peers`]), and decide together: all use them, or none does.

mod layout;
mod meeting;
mod peers;

use core::ffi::c_void;
use std::sync::{Arc, OnceLock};

use mlxcel_abi::collectives::{Collectives, JoinArgs};
use mlxcel_abi::{AbiError, ErrorObj, Result, Status, Table, Tensor, status};
use mlxcel_backend_mlx::collectives::{self, Transport};
use mlxcel_backend_mlx::serde_json;

use crate::native::ranks;
pub(crate) use layout::{Layout, SMALL_THREADS, Way};
pub(crate) use peers::Peers;

/// Has sums go through MLX where it is `mlx`: for comparison.
const VARIABLE: &str = "MLXCEL_CUDA_RANKS";

/// MLX's table, and ours over it. Neither is written after it was made.
struct Tables {
    mlx: Collectives,
    ours: Collectives,
}

// SAFETY: tables hold function pointers and null contexts.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

static TABLES: OnceLock<Tables> = OnceLock::new();

/// Address of the extension table called `name`, 0 where there is none.
pub(crate) fn query(name: &str) -> usize {
    let address = collectives::query(name, Transport::Nccl);
    if address == 0 {
        return 0;
    }
    let tables = TABLES.get_or_init(|| {
        // SAFETY: a table of this name, which lives as long as the process.
        let mlx = unsafe { Collectives::import(address as *const Collectives) };
        let ours = Collectives {
            join,
            all_sum,
            ..mlx
        };
        Tables { mlx, ours }
    });
    &raw const tables.ours as usize
}

fn mlx() -> Collectives {
    TABLES.get().map_or_else(Collectives::stubs, |t| t.mlx)
}

/// The other ranks of this process's group. MLX has no way out of a group, and nor have we: others may be in the middle of a sum.
static GROUP: OnceLock<core::result::Result<Arc<Peers>, String>> = OnceLock::new();

/// # Safety
/// The slot's contract: `backend` of an open backend, `args` valid for the call.
unsafe extern "C" fn join(
    _: *mut c_void,
    backend: *mut c_void,
    args: *const JoinArgs,
    err: *mut *mut ErrorObj,
) -> Status {
    let mlx = mlx();
    // SAFETY: forwarded to the caller.
    let joined = unsafe { (mlx.join)(mlx.ctx, backend, args, err) };
    if joined != status::OK {
        return joined;
    }
    // SAFETY: forwarded to the caller.
    unsafe {
        ranks::join(backend, err, |driver, device| {
            // MLX has read them and found nothing wrong.
            let args = JoinArgs::read(args)?;
            let addresses = addresses(&args)?;
            if let Some(found) = GROUP.get() {
                return Ok(found.clone());
            }
            let made = gather(driver, device, args.rank, &addresses)?;
            Ok(GROUP.get_or_init(|| made).clone())
        })
    }
}

/// # Safety
/// The text of `args` is valid.
unsafe fn addresses(args: &JoinArgs) -> Result<Vec<String>> {
    // SAFETY: forwarded to the caller.
    let text = unsafe { args.addresses.as_str() };
    let text = text.map_err(|_| AbiError::invalid("addresses are not UTF-8"))?;
    serde_json::from_str(text)
        .map_err(|error| AbiError::invalid(format!("addresses are no list of texts: {error}")))
}

/// Meets the other ranks and opens their windows, or says why sums go through MLX: the same on all ranks.
fn gather(
    driver: &'static crate::driver::Driver,
    device: i32,
    rank: u32,
    addresses: &[String],
) -> Result<core::result::Result<Arc<Peers>, String>> {
    if addresses.len() < 2 {
        return Ok(Err("there is one rank".to_owned()));
    }
    let mut meeting = match meeting::Meeting::attend(rank as usize, addresses) {
        Ok(meeting) => meeting,
        // Nobody met anybody, so that all come to this.
        Err(meeting::Absent(reason)) => return Ok(Err(reason)),
    };
    let own = wish().and_then(|()| peers::Own::new(driver, device, addresses.len()));
    let offers = meeting.exchange(&peers::offer(&own))?;
    let opened = own.and_then(|own| own.open(rank as usize, &offers));
    let state = opened.as_ref().err().cloned().unwrap_or_default();
    let states = meeting.exchange(&state)?;
    let reasons = states.iter().enumerate();
    let reasons: Vec<String> = reasons
        .filter(|(_, state)| !state.is_empty())
        .map(|(rank, state)| format!("rank {rank}: {state}"))
        .collect();
    if !reasons.is_empty() {
        return Ok(Err(reasons.join("; ")));
    }
    let Ok(peers) = opened else {
        return Ok(Err(state));
    };
    meeting.watch(peers.gone())?;
    Ok(Ok(Arc::new(peers)))
}

/// What the variable says.
fn wish() -> core::result::Result<(), String> {
    match std::env::var(VARIABLE).as_deref() {
        Err(_) | Ok("" | "peers") => Ok(()),
        Ok("mlx") => Err(format!("{VARIABLE} is mlx")),
        Ok(other) => Err(format!(
            "{VARIABLE} is {other:?}, expected \"peers\" or \"mlx\""
        )),
    }
}

/// # Safety
/// The slot's contract: `backend` of an open backend, `out` writable.
unsafe extern "C" fn all_sum(
    _: *mut c_void,
    backend: *mut c_void,
    t: Tensor,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        match ranks::all_sum(backend, t, out, err) {
            Some(status) => status,
            None => {
                let mlx = mlx();
                (mlx.all_sum)(mlx.ctx, backend, t, out, err)
            }
        }
    }
}
