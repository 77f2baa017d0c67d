//! A persistent pool of threads that spins briefly between jobs.
//!
//! A decode step has hundreds of jobs a few microseconds apart; sleeping between them would cost
//! more than the jobs. Workers spin for a bounded time and then sleep until the next job.

use core::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Rounds of spinning before a worker sleeps: roughly a tenth of a millisecond.
const SPIN_ROUNDS: usize = 30_000;

type Job = dyn Fn(usize) + Sync;

/// What the workers look at. Who writes a field decides whose line of a cache it is in: a hand-over moves two lines from one core to
/// another, one there and one back.
struct Shared {
    posted: Posted,
    running: Running,
    sleep: Sleep,
}

/// Written by the pool's owner, between jobs.
#[repr(align(128))]
struct Posted {
    /// Number of the current job; a change means that there is one.
    epoch: AtomicUsize,
    /// The job of the current epoch.
    job: UnsafeCell<Option<JobPointer>>,
    stop: AtomicBool,
}

// SAFETY: `job` is written while `running` is 0, when no worker reads it: a worker reads it after it saw a new epoch, which is
// stored after the job, and before it counts itself out of `running`.
unsafe impl Sync for Posted {}

/// Written by workers.
#[repr(align(128))]
struct Running {
    /// Workers that have not finished the current job.
    workers: AtomicUsize,
    panicked: AtomicBool,
}

/// Written by workers that have nothing to do for long.
#[repr(align(128))]
struct Sleep {
    /// Workers that sleep.
    sleepers: AtomicUsize,
    wake: Condvar,
    gate: Mutex<()>,
}

#[derive(Clone, Copy)]
struct JobPointer(*const Job);

// SAFETY: `run` keeps the job alive until every worker is done with it, and the job is `Sync`.
unsafe impl Send for JobPointer {}

/// The pool. The thread that calls [`Pool::run`] works too.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads in all, the caller's included; at least one.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            posted: Posted {
                epoch: AtomicUsize::new(0),
                job: UnsafeCell::new(None),
                stop: AtomicBool::new(false),
            },
            running: Running {
                workers: AtomicUsize::new(0),
                panicked: AtomicBool::new(false),
            },
            sleep: Sleep {
                sleepers: AtomicUsize::new(0),
                wake: Condvar::new(),
                gate: Mutex::new(()),
            },
        });
        let workers = (1..threads.max(1))
            .map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("mlxcel-cpu-{index}"))
                    .spawn(move || work(&shared, index))
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok(Self { shared, workers })
    }

    /// Threads in all.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job(thread)` once on every thread, `thread` from 0 to `threads() - 1`, and waits.
    /// Returns false when the job panicked somewhere.
    #[must_use]
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) -> bool {
        if self.workers.is_empty() {
            return catch_unwind(AssertUnwindSafe(|| job(0))).is_ok();
        }
        let Shared {
            posted,
            running,
            sleep,
        } = &*self.shared;
        // SAFETY: only the lifetime is erased; the wait below outlasts every use.
        let pointer = JobPointer(unsafe {
            core::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job)
        });
        // SAFETY: the last job's wait has seen that no worker runs, so none reads this before the epoch changes.
        unsafe { *posted.job.get() = Some(pointer) };
        if running.panicked.load(Ordering::Relaxed) {
            running.panicked.store(false, Ordering::Relaxed);
        }
        running.workers.store(self.workers.len(), Ordering::Relaxed);
        posted.epoch.fetch_add(1, Ordering::SeqCst);
        if sleep.sleepers.load(Ordering::SeqCst) > 0 {
            let _gate = sleep.gate.lock().unwrap_or_else(PoisonError::into_inner);
            sleep.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0))).is_ok();
        let mut rounds = 0usize;
        while running.workers.load(Ordering::Acquire) > 0 {
            rounds += 1;
            if rounds.is_multiple_of(4096) {
                std::thread::yield_now();
            }
            core::hint::spin_loop();
        }
        own && !running.panicked.load(Ordering::Relaxed)
    }

    /// Splits `[0, items)` over the threads in ranges whose starts are multiples of `step`, and
    /// calls `job(range)` on each. Small loads run on the caller's thread alone.
    #[must_use]
    pub fn split(
        &mut self,
        items: usize,
        step: usize,
        serial_below: usize,
        job: &(dyn Fn(core::ops::Range<usize>) + Sync),
    ) -> bool {
        let threads = self.threads();
        if threads == 1 || items < serial_below {
            return catch_unwind(AssertUnwindSafe(|| job(0..items))).is_ok();
        }
        let per_thread = items.div_ceil(threads).next_multiple_of(step.max(1));
        self.run(&|thread| {
            let start = (thread * per_thread).min(items);
            let end = (start + per_thread).min(items);
            if start < end {
                job(start..end);
            }
        })
    }

    /// Hands out `[0, chunks)` one by one, for chunks of unequal cost.
    #[must_use]
    pub fn share(&mut self, chunks: usize, job: &(dyn Fn(usize, usize) + Sync)) -> bool {
        let next = AtomicUsize::new(0);
        let body = |thread: usize| {
            loop {
                let chunk = next.fetch_add(1, Ordering::Relaxed);
                if chunk >= chunks {
                    break;
                }
                job(thread, chunk);
            }
        };
        if chunks <= 1 {
            catch_unwind(AssertUnwindSafe(|| body(0))).is_ok()
        } else {
            self.run(&body)
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let Shared { posted, sleep, .. } = &*self.shared;
        posted.stop.store(true, Ordering::SeqCst);
        posted.epoch.fetch_add(1, Ordering::SeqCst);
        {
            let _gate = sleep.gate.lock().unwrap_or_else(PoisonError::into_inner);
            sleep.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // Jobs' panics are caught in the worker.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        seen = wait(shared, seen);
        if shared.posted.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the epoch was seen, and this worker still counts as running: nobody writes the job meanwhile.
        let job = unsafe { *shared.posted.job.get() };
        if let Some(JobPointer(job)) = job {
            // SAFETY: `run` waits for `running` to reach 0 before the job ends its life.
            let call = AssertUnwindSafe(|| unsafe { (*job)(index) });
            if catch_unwind(call).is_err() {
                shared.running.panicked.store(true, Ordering::Relaxed);
            }
        }
        shared.running.workers.fetch_sub(1, Ordering::Release);
    }
}

/// Waits until the epoch is not `seen` and gives the new one.
fn wait(Shared { posted, sleep, .. }: &Shared, seen: usize) -> usize {
    for _ in 0..SPIN_ROUNDS {
        let epoch = posted.epoch.load(Ordering::Acquire);
        if epoch != seen {
            return epoch;
        }
        core::hint::spin_loop();
    }
    let mut gate = sleep.gate.lock().unwrap_or_else(PoisonError::into_inner);
    sleep.sleepers.fetch_add(1, Ordering::SeqCst);
    let epoch = loop {
        let epoch = posted.epoch.load(Ordering::SeqCst);
        if epoch != seen {
            break epoch;
        }
        gate = sleep
            .wake
            .wait(gate)
            .unwrap_or_else(PoisonError::into_inner);
    };
    sleep.sleepers.fetch_sub(1, Ordering::SeqCst);
    epoch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_by_any_number_of_threads() {
        for threads in 1..5 {
            let mut pool = Pool::new(threads).unwrap();
            for items in [0usize, 1, 7, 64, 1000] {
                let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                let add = |i: usize| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                };
                assert!(pool.split(items, 8, 0, &|range| range.for_each(add)));
                assert!(pool.share(items, &|_, i| add(i)));
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2));
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..3 {
            while pool.shared.sleep.sleepers.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            let ran = AtomicUsize::new(0);
            assert!(pool.run(&|_| {
                ran.fetch_add(1, Ordering::Relaxed);
            }));
            assert_eq!(ran.into_inner(), 3);
        }
    }

    #[test]
    fn a_panic_is_reported_and_the_pool_lives() {
        let mut pool = Pool::new(2).unwrap();
        assert!(!pool.run(&|thread| assert_ne!(thread, 1, "on purpose")));
        assert!(!pool.run(&|thread| assert_ne!(thread, 0, "on purpose")));
        assert!(pool.run(&|_| {}));
    }
}
