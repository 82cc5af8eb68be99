//! The atomics, cells and locks of the lock-free code: those of `std`, or those of loom in its model runs.
//!
//! Loom does not model `SeqCst` loads and stores, so nothing here depends on them: two flags that face each other are
//! ordered by read-modify-writes of one word, or by `fence(SeqCst)`.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Instant;

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence},
    },
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Condvar, Mutex,
    atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence},
};

/// The cell of `std` with the accessors of loom's, which check each access in a model run.
#[cfg(not(loom))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(crate) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
        access(self.0.get())
    }
}

/// A value alone on its cache lines (two of 64 bytes, which x86 fetches as a pair), so that two threads writing
/// neighbouring fields do not slow each other.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);

impl<T> Deref for CachePadded<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for CachePadded<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Lets one thread sleep until another has published something.
///
/// The sleeper: [`Parker::announce`], look once more at what is published, then [`Parker::retract`] or
/// [`Parker::park`]. The others: publish, then [`Parker::unpark`]. Both sides write, then pass a `SeqCst` fence, then
/// read what the other wrote; so at least one of them sees the other and no wake-up is lost.
pub(crate) struct Parker {
    asleep: AtomicBool,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Parker {
    pub(crate) fn new() -> Self {
        Self {
            asleep: AtomicBool::new(false),
            lock: Mutex::new(()),
            woken: Condvar::new(),
        }
    }

    /// Says that this thread is about to sleep.
    pub(crate) fn announce(&self) {
        // Swaps throughout: a plain store beside the swap in `unpark` has no sure place in loom's order of writes.
        self.asleep.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Takes the announcement back: there is work after all.
    pub(crate) fn retract(&self) {
        self.asleep.swap(false, Ordering::AcqRel);
    }

    /// Sleeps until another thread calls [`Parker::unpark`], or until the deadline. Returns false at the deadline.
    pub(crate) fn park(&self, deadline: Option<Instant>) -> bool {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.asleep.load(Ordering::Acquire) {
            let Some(deadline) = deadline else {
                guard = self
                    .woken
                    .wait(guard)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.retract();
                return false;
            }
            guard = self
                .woken
                .wait_timeout(guard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    /// Wakes the sleeper, if there is one. Costs a fence and a load when there is none.
    #[inline]
    pub(crate) fn unpark(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            // The sleeper holds the lock from its last look at the flag until it waits: taking the lock here means
            // that it either waits already or has not looked yet.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.woken.notify_one();
        }
    }
}
