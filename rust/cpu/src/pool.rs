//! Threads that share out one call's work.
//!
//! A job is a number of tasks; the caller and the threads take them one by one. A thread that sleeps,
//! or that the system runs somewhere else, is never waited for: the caller closes the job when no task
//! is left, and waits only for those that had joined it.
#![expect(
    unsafe_code,
    reason = "threads borrow a job that lives on the caller's stack"
)]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Items in the shares that tasks take, for items that follow each other in memory: large shares first,
/// and single items in the end, so that no thread waits long for another.
pub(crate) fn shares(items: usize, threads: usize) -> Vec<Range<usize>> {
    let mut shares = Vec::new();
    let mut first = 0;
    while first < items {
        let count = (items - first).div_ceil(2 * threads);
        shares.push(first..first + count);
        first += count;
    }
    shares
}

/// How long a thread looks for the next job before it sleeps. The calls of one forward pass follow
/// each other within 20 µs; waking a thread costs 50.
const SPIN: Duration = Duration::from_micros(100);

/// Bits of the state word: how many have joined, whether more may, and the job's number.
const JOINED: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const JOB: u64 = 1 << 17;

#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    /// Written by the caller while no job is open and nobody has joined; read by those who have.
    job: UnsafeCell<Option<Job>>,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `job` is written only where `state` says that nobody reads it, and the functions it points to
// are `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// A fixed number of threads, the caller's included.
pub struct Pool {
    shared: Arc<Shared>,
    caller: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, of which the caller of `run` is one. Where the system refuses more,
    /// those that it granted do the work.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let spawn = |index: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("miniinfer-cpu-{index}"))
                .spawn(move || shared.work())
        };
        let threads = (1..threads).map_while(|index| spawn(index).ok()).collect();
        Self {
            caller: Mutex::new(()),
            threads,
            shared,
        }
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `run` with 0 to `tasks` - 1, each once, and returns when all have returned. While another
    /// thread has the pool, or from within a task, the caller does all of them itself.
    ///
    /// Panics if a task did.
    pub fn run(&self, tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        let caller = match self.caller.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        };
        if tasks <= 1 || self.threads.is_empty() || caller.is_none() {
            (0..tasks).for_each(run);
            return;
        }
        let close = self.open(tasks, run);
        self.shared.take_tasks(tasks, run);
        drop(close);
        if self.shared.panicked.swap(false, Ordering::AcqRel) {
            drop(caller);
            panic!("a task of the CPU kernels panicked on another thread");
        }
    }

    fn open(&self, tasks: usize, run: &(dyn Fn(usize) + Sync)) -> Close<'_> {
        let shared = &*self.shared;
        // SAFETY: no job is open and nobody has joined, for the last `Close` waited for that; the lifetime
        // is only hidden, since this call's `Close` waits for all who join before `run` ends.
        unsafe {
            let run = std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(
                run,
            );
            *shared.job.get() = Some(Job { run, tasks });
        }
        shared.panicked.store(false, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        let number = shared.state.load(Ordering::Relaxed) / JOB + 1;
        // Sequentially consistent, as is the sleepers' look at it: one of the two sees the other.
        shared.state.store((number * JOB) | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.guard());
            shared.wake.notify_all();
        }
        Close(shared)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.guard());
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so to `run`.
            let _ = thread.join();
        }
    }
}

/// Ends a job: nobody joins any more, and all who did have left. Also when the caller's own task panics.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0_u32;
        while self.0.state.load(Ordering::Acquire) & JOINED != 0 {
            spins += 1;
            // Where threads outnumber cores, the one that is waited for needs this one.
            if spins.is_multiple_of(1024) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

impl Shared {
    fn guard(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_tasks(&self, tasks: usize, run: &(dyn Fn(usize) + Sync)) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            run(task);
        }
    }

    /// A thread's life. A task that panics is reported to the caller and leaves the thread alive.
    fn work(&self) {
        let mut last = 0;
        while let Some(number) = self.next_job(last) {
            last = number;
            let joined = self.state.load(Ordering::Acquire);
            if joined / JOB != number || !self.join(joined) {
                continue;
            }
            // SAFETY: this thread has joined: the job is not written before it leaves.
            let job = unsafe { (*self.job.get()).expect("invariant: an open job is written") };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // SAFETY: the caller waits for this thread before its function ends.
                self.take_tasks(job.tasks, unsafe { &*job.run });
            }));
            if outcome.is_err() {
                self.panicked.store(true, Ordering::Release);
            }
            self.state.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Counts this thread in, if the job is still open.
    fn join(&self, mut state: u64) -> bool {
        let number = state / JOB;
        while state & OPEN != 0 && state / JOB == number {
            match self.state.compare_exchange_weak(
                state,
                state + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// The number of an open job after `last`: looked for in a loop at first, then asleep. None to stop.
    fn next_job(&self, last: u64) -> Option<u64> {
        let ready = || {
            let state = self.state.load(Ordering::SeqCst);
            (state & OPEN != 0 && state / JOB != last).then_some(state / JOB)
        };
        let start = Instant::now();
        while start.elapsed() < SPIN {
            for _ in 0..64 {
                if let Some(number) = ready() {
                    return Some(number);
                }
                std::hint::spin_loop();
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
        }
        let mut guard = self.guard();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(number) = ready() {
                break Some(number);
            }
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once_whatever_the_sizes() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for round in 0..300 {
                let tasks = round % 23;
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
                if round % 100 == 0 {
                    std::thread::sleep(2 * SPIN);
                }
            }
        }
    }

    #[test]
    fn shares_are_all_items_in_order() {
        for threads in [1, 2, 3, 64] {
            for items in [0, 1, 2, 5, 18, 1536] {
                let shares = shares(items, threads);
                assert!(shares.into_iter().flatten().eq(0..items));
            }
        }
    }

    #[test]
    fn several_callers_and_calls_from_tasks_share_a_pool() {
        let pool = Pool::new(3);
        let total = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(5, &|_| {
                            pool.run(2, &|_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 3 * 100 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        for _ in 0..20 {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.run(8, &|task| assert_ne!(task, 3));
            }));
            assert!(outcome.is_err());
            let count = AtomicU32::new(0);
            pool.run(8, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 8);
        }
    }
}
