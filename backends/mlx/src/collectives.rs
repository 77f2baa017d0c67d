//! The extension `mlxcel.ext.collectives/1` over MLX's distributed layer: `ring` over TCP on processors, `nccl` on NVIDIA devices.
//!
//! MLX has one group for a process and reads where its ranks are from the environment, which `join` sets.

use core::ffi::c_void;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use mlxcel_abi::collectives::{COLLECTIVES, Collectives, JoinArgs};
use mlxcel_abi::{AbiError, ErrorObj, Status, Table, Tensor, status};

use crate::args::Result;
use crate::fault::Fault;
use crate::slot::{check_out, enter, get, make};

#[cxx::bridge(namespace = "mlxcel")]
mod ffi {
    unsafe extern "C++" {
        include!("mlxcel-backend-mlx/cpp/collectives.h");

        type Array = crate::bridge::Array;

        fn has_transport(name: &str) -> Result<bool>;
        fn join_ring(hosts: &str, rank: u32) -> Result<()>;
        fn join_nccl(host: &str, port: &str, rank: u32, size: u32) -> Result<()>;
        fn group_rank() -> Result<u32>;
        fn group_size() -> Result<u32>;
        fn all_sum(a: &Array) -> Result<UniquePtr<Array>>;
        fn all_gather(a: &Array) -> Result<UniquePtr<Array>>;
    }
}

/// By what the ranks of a backend reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP, from each rank to the next.
    Ring,
    /// NVIDIA's library, between devices.
    Nccl,
}

impl Transport {
    /// As MLX calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Nccl => "nccl",
        }
    }
}

/// A table whose `ctx` is null; it is never written after it was made.
struct Fixed(Collectives);

// SAFETY: the table holds function pointers and a null context.
unsafe impl Send for Fixed {}
// SAFETY: as above.
unsafe impl Sync for Fixed {}

/// Address of the extension table called `name`, 0 where there is none: what a plugin over `transport` answers.
pub fn query(name: &str, transport: Transport) -> usize {
    static RING: OnceLock<Fixed> = OnceLock::new();
    static NCCL: OnceLock<Fixed> = OnceLock::new();
    if name != COLLECTIVES || !ffi::has_transport(transport.name()).unwrap_or(false) {
        return 0;
    }
    let (table, join) = match transport {
        Transport::Ring => (&RING, join_ring as JoinSlot),
        Transport::Nccl => (&NCCL, join_nccl as JoinSlot),
    };
    let fixed = table.get_or_init(|| {
        Fixed(Collectives {
            join,
            rank,
            size,
            all_sum,
            all_gather,
            ..Collectives::stubs()
        })
    });
    &raw const fixed.0 as usize
}

type JoinSlot =
    unsafe extern "C" fn(*mut c_void, *mut c_void, *const JoinArgs, *mut *mut ErrorObj) -> Status;

/// What `JoinArgs` came to.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    rank: u32,
    size: u32,
    addresses: Vec<String>,
}

impl Group {
    /// # Safety
    /// `args` must be as the slot's contract has it.
    unsafe fn read(args: *const JoinArgs) -> Result<Self> {
        // SAFETY: forwarded to the caller; the text is valid for the call.
        let (args, text) = unsafe {
            let args = JoinArgs::read(args)?;
            (args, args.addresses.as_str())
        };
        let text = text.map_err(|_| Fault::invalid("addresses are not UTF-8"))?;
        let addresses: Vec<String> = serde_json::from_str(text)
            .map_err(|error| Fault::invalid(format!("addresses are no list of texts: {error}")))?;
        if args.size == 0 || args.rank >= args.size || addresses.len() != args.size as usize {
            return Err(Fault::invalid(format!(
                "rank {} of {} ranks with {} addresses: expected a rank below the size, and an address for each",
                args.rank,
                args.size,
                addresses.len()
            )));
        }
        Ok(Self {
            rank: args.rank,
            size: args.size,
            addresses,
        })
    }

    /// Runs `join` unless the process is in this group already. MLX has no way out of a group.
    fn join(self, join: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        static JOINED: Mutex<Option<Group>> = Mutex::new(None);
        let mut joined = JOINED.lock().unwrap_or_else(PoisonError::into_inner);
        match &*joined {
            None => {}
            Some(group) if *group == self => return Ok(()),
            Some(group) => {
                return Err(Fault::Abi(AbiError::new(
                    status::FAILED_PRECONDITION,
                    format!(
                        "this process is rank {} of {} at {} and stays it: join another group in a process of its own",
                        group.rank,
                        group.size,
                        group.addresses.join(", ")
                    ),
                )));
            }
        }
        join(&self)?;
        let found = ffi::group_size()?;
        if found != self.size {
            return Err(Fault::Abi(AbiError::internal(format!(
                "MLX made a group of {found} ranks, {} were asked for",
                self.size
            ))));
        }
        *joined = Some(self);
        Ok(())
    }
}

/// A file that MLX reads while it joins.
struct HostFile(PathBuf);

impl HostFile {
    fn write(group: &Group) -> std::io::Result<Self> {
        let name = format!("mlxcel-ring-{}-{}.json", std::process::id(), group.rank);
        let file = Self(std::env::temp_dir().join(name));
        let hosts: Vec<[&str; 1]> = group.addresses.iter().map(|at| [at.as_str()]).collect();
        let text = serde_json::to_string(&hosts)?;
        // What is there under this name was left by a process that had the same number, or is not ours to follow.
        let _ = std::fs::remove_file(&file.0);
        let mut options = std::fs::File::options();
        let mut opened = options.write(true).create_new(true).open(&file.0)?;
        opened.write_all(text.as_bytes())?;
        Ok(file)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for HostFile {
    fn drop(&mut self) {
        // It says nothing secret, and the next one of this name removes it.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// # Safety
/// The slot's contract: `backend` of an open backend, `args` valid for the call.
unsafe extern "C" fn join_ring(
    _: *mut c_void,
    backend: *mut c_void,
    args: *const JoinArgs,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = |_: &crate::context::Context| {
        // SAFETY: the slot's contract.
        let group = unsafe { Group::read(args) }?;
        group.join(|group| {
            let file = HostFile::write(group).map_err(|error| {
                Fault::Abi(AbiError::internal(format!(
                    "cannot write the list of hosts: {error}"
                )))
            })?;
            let path = file
                .path()
                .to_str()
                .ok_or_else(|| Fault::invalid("the folder for temporary files is not UTF-8"))?;
            Ok(ffi::join_ring(path, group.rank)?)
        })
    };
    // SAFETY: the slot's contract.
    unsafe { enter(backend, err, "join", body) }
}

/// # Safety
/// The slot's contract: `backend` of an open backend, `args` valid for the call.
unsafe extern "C" fn join_nccl(
    _: *mut c_void,
    backend: *mut c_void,
    args: *const JoinArgs,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = |_: &crate::context::Context| {
        // SAFETY: the slot's contract.
        let group = unsafe { Group::read(args) }?;
        group.join(|group| {
            let first = group.addresses.first().and_then(|at| at.rsplit_once(':'));
            let (host, port) =
                first.ok_or_else(|| Fault::invalid("the first address is not host:port"))?;
            Ok(ffi::join_nccl(host, port, group.rank, group.size)?)
        })
    };
    // SAFETY: the slot's contract.
    unsafe { enter(backend, err, "join", body) }
}

/// # Safety
/// The slot's contract: `backend` of an open backend, `out` writable.
unsafe extern "C" fn rank(
    _: *mut c_void,
    backend: *mut c_void,
    out: *mut u32,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract.
    unsafe { number(backend, out, err, "rank", ffi::group_rank) }
}

/// # Safety
/// The slot's contract: `backend` of an open backend, `out` writable.
unsafe extern "C" fn size(
    _: *mut c_void,
    backend: *mut c_void,
    out: *mut u32,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract.
    unsafe { number(backend, out, err, "size", ffi::group_size) }
}

/// # Safety
/// As for the slots that call it.
unsafe fn number(
    backend: *mut c_void,
    out: *mut u32,
    err: *mut *mut ErrorObj,
    op: &'static str,
    get: impl FnOnce() -> core::result::Result<u32, cxx::Exception>,
) -> Status {
    let body = |_: &crate::context::Context| {
        check_out(out)?;
        if ffi::group_size()? == 0 {
            return Err(Fault::Abi(AbiError::new(
                status::FAILED_PRECONDITION,
                "this process has joined no group",
            )));
        }
        let value = get()?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { out.write(value) };
        Ok(())
    };
    // SAFETY: the slot's contract.
    unsafe { enter(backend, err, op, body) }
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
    // SAFETY: the slot's contract.
    unsafe {
        make(backend, out, err, "all_sum", |_, tensors| {
            Ok(ffi::all_sum(get(tensors, t)?)?)
        })
    }
}

/// # Safety
/// The slot's contract: `backend` of an open backend, `out` writable.
unsafe extern "C" fn all_gather(
    _: *mut c_void,
    backend: *mut c_void,
    t: Tensor,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract.
    unsafe {
        make(backend, out, err, "all_gather", |_, tensors| {
            Ok(ffi::all_gather(get(tensors, t)?)?)
        })
    }
}
