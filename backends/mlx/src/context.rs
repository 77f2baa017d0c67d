//! One opened backend: its thread, its tensors and what it was opened with.

use core::cell::{Cell, RefCell};
use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Mutex;

use cxx::UniquePtr;
use mlxcel_abi::arena::Arena;
use mlxcel_abi::host::HostApi;
use mlxcel_abi::kinds::log;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, Str, Tensor, status};

use crate::backend::Description;
use crate::blocks::Blocks;
use crate::bridge::{Array, Memo};
use crate::entry::Entry;

/// What the handles of one backend stand for.
pub(crate) type Tensors = Arena<Entry>;

/// What `BackendOps::ctx` points to. Lives from `open` to `close`.
pub(crate) struct Context {
    /// The table handed out; its address is the backend's identity.
    pub(crate) table: BackendOps,
    pub(crate) description: &'static Description,
    /// Memory of the device, 0 when unknown.
    pub(crate) total_bytes: u64,
    pub(crate) tensors: RefCell<Tensors>,
    pub(crate) blocks: RefCell<Blocks>,
    /// How many entries that somebody watches have ended.
    pub(crate) watched_ends: Cell<u64>,
    pub(crate) memo: RefCell<UniquePtr<Memo>>,
    host: Option<HostApi>,
    owner: u64,
    owner_name: String,
    deferred: Mutex<Vec<Tensor>>,
    has_deferred: AtomicBool,
}

/// A number per thread that is never reused; unlike `ThreadId` it costs one thread-local read.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static ID: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    ID.with(|id| *id)
}

fn name_of_this_thread() -> String {
    let thread = std::thread::current();
    match thread.name() {
        Some(name) => format!("'{name}' (number {})", this_thread()),
        None => format!("number {}", this_thread()),
    }
}

impl Context {
    /// A backend owned by the calling thread, which keeps blocks of `most_idle_bytes`.
    pub(crate) fn new(
        description: &'static Description,
        table: BackendOps,
        memo: UniquePtr<Memo>,
        host: Option<HostApi>,
        total_bytes: u64,
        most_idle_bytes: u64,
    ) -> Self {
        Self {
            table,
            description,
            total_bytes,
            tensors: RefCell::default(),
            blocks: RefCell::new(Blocks::new(most_idle_bytes)),
            watched_ends: Cell::new(0),
            memo: RefCell::new(memo),
            host,
            owner: this_thread(),
            owner_name: name_of_this_thread(),
            deferred: Mutex::default(),
            has_deferred: AtomicBool::new(false),
        }
    }

    /// The backend behind a slot's first argument.
    ///
    /// # Safety
    /// `ctx` must be null or the `ctx` of a table that `open` gave and `close` has not taken.
    pub(crate) unsafe fn from_raw<'a>(ctx: *mut c_void) -> Result<&'a Self, AbiError> {
        // SAFETY: the caller vouches for the pointer.
        unsafe { ctx.cast::<Self>().as_ref() }
            .ok_or_else(|| AbiError::invalid("the table has no context"))
    }

    /// Whether the caller is on the thread that opened the backend.
    pub(crate) fn is_owner(&self) -> bool {
        this_thread() == self.owner
    }

    /// Refuses calls from other threads: MLX's streams belong to the thread that made them.
    pub(crate) fn check_thread(&self) -> Result<(), AbiError> {
        if self.is_owner() {
            return Ok(());
        }
        Err(AbiError::new(
            status::FAILED_PRECONDITION,
            format!(
                "called on thread {}, the backend was opened on thread {}: every operation but release belongs to that one",
                name_of_this_thread(),
                self.owner_name
            ),
        ))
    }

    /// Keeps a handle for release on the backend thread.
    pub(crate) fn defer_release(&self, t: Tensor) {
        let mut deferred = self
            .deferred
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        deferred.push(t);
        self.has_deferred.store(true, Ordering::Release);
    }

    /// Releases what other threads left. Stale handles among them have no one to be reported to.
    pub(crate) fn drain_deferred(&self) {
        if !self.has_deferred.load(Ordering::Acquire) {
            return;
        }
        let handles = {
            let mut deferred = self
                .deferred
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            self.has_deferred.store(false, Ordering::Release);
            core::mem::take(&mut *deferred)
        };
        for t in handles {
            if let Err(error) = self.release(t) {
                self.log(
                    log::WARN,
                    &format!("a release from another thread failed: {error}"),
                );
            }
        }
    }

    /// Drops a reference. An array's end can run a release function of the host, which may release
    /// another tensor: the array must not die while the arena is borrowed.
    pub(crate) fn release(&self, t: Tensor) -> Result<(), AbiError> {
        let Ok(mut tensors) = self.tensors.try_borrow_mut() else {
            self.defer_release(t);
            return Ok(());
        };
        let ended = tensors.release(t)?;
        drop(tensors);
        if ended.as_ref().is_some_and(Entry::is_watched) {
            self.watched_ends.set(self.watched_ends.get() + 1);
        }
        if let Some(block) = ended.and_then(Entry::into_block) {
            self.blocks.borrow_mut().put_back(block);
        }
        Ok(())
    }

    /// Stores a result.
    pub(crate) fn insert(&self, array: UniquePtr<Array>) -> Result<Tensor, AbiError> {
        self.insert_entry(Entry::of(array)?)
    }

    /// Stores what a handle stands for.
    pub(crate) fn insert_entry(&self, entry: Entry) -> Result<Tensor, AbiError> {
        self.tensors.borrow_mut().insert(entry)
    }

    /// Writes to the host's log, if it gave one.
    pub(crate) fn log(&self, level: u32, message: &str) {
        if let Some(host) = &self.host {
            let target = Str::new(self.description.name);
            // SAFETY: the host's table outlives the backend (contract of OpenArgs::host); no error
            // text is asked for, so nothing has to be freed.
            let _ = unsafe {
                (host.log)(
                    host.ctx,
                    level,
                    target,
                    Str::new(message),
                    core::ptr::null_mut(),
                )
            };
        }
    }
}
