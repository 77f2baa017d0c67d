//! State of an opened reference backend: handles, borrowed memory, counts, faults.

use core::ffi::c_void;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use mlxcel_abi::arena::Arena;
use mlxcel_abi::ops_args::{MemoryInfo, MemoryLimits};
use mlxcel_abi::types::ReleaseFn;
use mlxcel_abi::{AbiError, Result, Tensor, status};

use super::value::{Mode, Value};
use super::{Fault, FaultKind, ReferenceOptions, Statistics};

/// Host memory that is given back when its tensor dies.
pub(super) struct Borrow {
    pub release: ReleaseFn,
    pub owner: *mut c_void,
}

// SAFETY: the contract of `from_host` lets `release` be called from any thread.
unsafe impl Send for Borrow {}

impl Drop for Borrow {
    fn drop(&mut self) {
        // SAFETY: called once, with the owner that came with the function.
        unsafe { (self.release)(self.owner) };
    }
}

#[derive(Default)]
struct State {
    arena: Arena<Arc<Value>>,
    closed: bool,
    owner: Option<ThreadId>,
    threads: Vec<ThreadId>,
    calls: BTreeMap<&'static str, u64>,
    /// Calls that faults count, by slot and in all, since the faults were set.
    since_faults: BTreeMap<&'static str, u64>,
    operations: u64,
    faults: Vec<Fault>,
    /// By handle, which is never reused.
    borrows: HashMap<u64, Borrow>,
    active_bytes: u64,
    peak_bytes: u64,
    limit_bytes: u64,
}

/// What `ctx` of the table points to.
pub(super) struct Inner {
    pub mode: Mode,
    any_thread: bool,
    state: Mutex<State>,
}

impl Inner {
    pub(super) fn new(options: ReferenceOptions) -> Self {
        Self {
            mode: Mode {
                shapes_only: options.shapes_only,
            },
            any_thread: options.any_thread,
            state: Mutex::new(State {
                faults: options.faults,
                limit_bytes: options.memory_limit_bytes,
                ..State::default()
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic never leaves the state half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call, checks its thread, and runs the fault that is due.
    pub(super) fn begin(&self, slot: &'static str) -> Result<()> {
        let fault = {
            let mut state = self.lock();
            if state.closed {
                return Err(AbiError::new(
                    status::FAILED_PRECONDITION,
                    "the backend is closed",
                ));
            }
            let thread = std::thread::current().id();
            if !state.threads.contains(&thread) {
                state.threads.push(thread);
            }
            *state.calls.entry(slot).or_default() += 1;
            if slot != "release" && !self.any_thread && *state.owner.get_or_insert(thread) != thread
            {
                return Err(AbiError::new(
                    status::FAILED_PRECONDITION,
                    format!("{slot} was called on another thread than the backend's"),
                ));
            }
            state.due_fault(slot)
        };
        match fault {
            None => Ok(()),
            Some(FaultKind::Status(code)) => Err(AbiError::new(
                code,
                format!("{slot} was told to fail by the test"),
            )),
            Some(FaultKind::Panic) => panic_on_purpose(slot),
        }
    }

    /// The tensor behind a handle.
    pub(super) fn get(&self, handle: Tensor) -> Result<Arc<Value>> {
        self.lock().arena.get(handle).cloned()
    }

    /// The tensor behind an optional handle.
    pub(super) fn get_optional(&self, handle: Tensor) -> Result<Option<Arc<Value>>> {
        if handle.is_none() {
            Ok(None)
        } else {
            self.get(handle).map(Some)
        }
    }

    /// Stores a tensor; gives its handle.
    pub(super) fn keep(&self, value: Value) -> Result<Tensor> {
        let bytes = value.byte_len() as u64;
        let mut state = self.lock();
        let active = state.active_bytes + bytes;
        if state.limit_bytes > 0 && active > state.limit_bytes {
            return Err(AbiError::new(
                status::RESOURCE_EXHAUSTED,
                format!(
                    "{bytes} bytes more than the {} in use exceed the limit of {}",
                    state.active_bytes, state.limit_bytes
                ),
            ));
        }
        let handle = state.arena.insert(Arc::new(value))?;
        state.active_bytes = active;
        state.peak_bytes = state.peak_bytes.max(active);
        Ok(handle)
    }

    /// Ties borrowed memory to a tensor that was just stored.
    pub(super) fn lend(&self, handle: Tensor, borrow: Borrow) {
        let mut state = self.lock();
        state.borrows.insert(handle.0, borrow);
    }

    /// Stores a tensor and writes its handle.
    ///
    /// # Safety
    /// `out` must be null or writable.
    pub(super) unsafe fn give(&self, out: *mut Tensor, value: Value) -> Result<()> {
        if out.is_null() {
            return Err(AbiError::invalid("there is no place for the result"));
        }
        let handle = self.keep(value)?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { *out = handle };
        Ok(())
    }

    /// Stores several tensors and writes their handles, all or none.
    ///
    /// # Safety
    /// `out` must be null or writable.
    pub(super) unsafe fn give_all<const N: usize>(
        &self,
        out: *mut [Tensor; N],
        values: [Option<Value>; N],
    ) -> Result<()> {
        if out.is_null() {
            return Err(AbiError::invalid("there is no place for the results"));
        }
        let mut handles = [Tensor::NONE; N];
        for (i, value) in values.into_iter().enumerate() {
            let Some(value) = value else { continue };
            match self.keep(value) {
                Ok(handle) => handles[i] = handle,
                Err(error) => {
                    for handle in handles.iter().filter(|handle| !handle.is_none()) {
                        self.release(*handle)?;
                    }
                    return Err(error);
                }
            }
        }
        // SAFETY: not null, and the caller vouches for it.
        unsafe { *out = handles };
        Ok(())
    }

    pub(super) fn retain(&self, handle: Tensor) -> Result<()> {
        self.lock().arena.retain(handle)
    }

    pub(super) fn release(&self, handle: Tensor) -> Result<()> {
        let mut state = self.lock();
        let Some(value) = state.arena.release(handle)? else {
            return Ok(());
        };
        state.active_bytes -= value.byte_len() as u64;
        let borrow = state.borrows.remove(&handle.0);
        // Given back without the lock: the owner's function may call in again.
        drop(state);
        drop(borrow);
        Ok(())
    }

    pub(super) fn memory(&self) -> MemoryInfo {
        let state = self.lock();
        MemoryInfo {
            active_bytes: state.active_bytes,
            peak_bytes: state.peak_bytes,
            limit_bytes: state.limit_bytes,
            live_tensors: state.arena.live() as u64,
            ..MemoryInfo::default()
        }
    }

    pub(super) fn set_limits(&self, limits: &MemoryLimits) {
        let mut state = self.lock();
        if limits.limit_bytes != u64::MAX {
            state.limit_bytes = limits.limit_bytes;
        }
        if limits.reset_peak == 1 {
            state.peak_bytes = state.active_bytes;
        }
    }

    pub(super) fn statistics(&self) -> Statistics {
        let state = self.lock();
        Statistics {
            calls: state.calls.clone(),
            live_tensors: state.arena.live(),
            live_borrows: state.borrows.len(),
            active_bytes: state.active_bytes,
            peak_bytes: state.peak_bytes,
            threads: state.threads.clone(),
        }
    }

    pub(super) fn reset_statistics(&self) {
        let mut state = self.lock();
        state.calls.clear();
        state.threads.clear();
        state.peak_bytes = state.active_bytes;
    }

    pub(super) fn set_faults(&self, faults: Vec<Fault>) {
        let mut state = self.lock();
        state.faults = faults;
        state.since_faults.clear();
        state.operations = 0;
    }

    pub(super) fn close(&self) {
        let closed = State {
            closed: true,
            ..State::default()
        };
        let state = core::mem::replace(&mut *self.lock(), closed);
        drop(state);
    }
}

#[expect(
    clippy::panic,
    reason = "a fault that a test asked for, caught by the slot's guard"
)]
fn panic_on_purpose(slot: &str) -> ! {
    panic!("{slot} was told to panic by the test")
}

impl State {
    fn due_fault(&mut self, slot: &'static str) -> Option<FaultKind> {
        if self.faults.is_empty() {
            return None;
        }
        let counted = !matches!(slot, "retain" | "release" | "info");
        self.operations += u64::from(counted);
        let of_slot = self.since_faults.entry(slot).or_default();
        *of_slot += 1;
        let (of_slot, of_all) = (*of_slot, self.operations);
        self.faults
            .iter()
            .find(|fault| match &fault.slot {
                Some(name) => name == slot && fault.nth == of_slot,
                None => counted && fault.nth == of_all,
            })
            .map(|fault| fault.kind)
    }
}
