//! The extension `mlxcel.ext.collectives/1` of a backend: joining a group of processes, and lending it to a family.

use mlxcel_abi::collectives::{COLLECTIVES, Collectives, JoinArgs};
use mlxcel_abi::{AbiError, Str};
use serde_json::Value;

use super::device::Backend;
use super::envelope::import_table;
use super::error::CallError;
use super::host_api::{Lent, lend};

/// A group that this process has joined.
#[derive(Debug)]
pub struct RankGroup {
    /// The plugin's table; it lives as long as the process.
    address: usize,
}

impl RankGroup {
    /// Joins as `rank` of as many ranks as there are addresses, and waits for the others.
    pub fn join(backend: &Backend, rank: usize, addresses: &[String]) -> Result<Self, CallError> {
        let subject = || backend.subject("join");
        let address = backend.plugin().extension(COLLECTIVES);
        if address == 0 {
            let error = AbiError::unimplemented("the backend has no operations over ranks");
            return Err(CallError::new(subject(), error));
        }
        // SAFETY: a plugin that answers under this name has such a table, which lives as long as the process.
        let table = unsafe { import_table(address as *const Collectives) }
            .map_err(|error| CallError::new(subject(), error))?;
        let text = Value::from(addresses.to_vec()).to_string();
        let args = JoinArgs {
            rank: rank as u32,
            size: addresses.len() as u32,
            addresses: Str::new(&text),
            ..JoinArgs::default()
        };
        let ctx = backend.ops().ctx;
        // SAFETY: on the backend thread, since `Backend` is not `Send`; what `args` points to outlives the call.
        let body = |err| unsafe { (table.join)(table.ctx, ctx, &raw const args, err) };
        backend.call_op("join", body)?;
        Ok(Self { address })
    }

    /// Lends the group to families that this thread calls, until the result is dropped.
    pub fn lend(&self) -> Lent {
        lend(self.address)
    }
}
