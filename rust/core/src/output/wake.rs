//! One file descriptor that tells a reader "look again", at one write however often it is told.

use std::io;
use std::time::Duration;

use super::descriptor::Descriptor;
use crate::sync::{AtomicBool, Ordering};

/// A descriptor for an event loop or a waiting thread, and a flag that spares the writes nobody needs.
///
/// The writers publish, then [`notify`](Wake::notify). The reader, when the descriptor is readable, first
/// [`clear`](Wake::clear)s and then looks at everything that is published through this wake. Several writers may share
/// one wake (its reader then looks at all of them); there is one reader.
///
/// No wake-up is lost: both sides swap the same flag. If the writer's swap finds the flag set, the reader's swap is
/// still to come and makes what was published visible; if it finds the flag clear, it writes to the descriptor.
pub struct Wake {
    /// Set: the descriptor is readable or about to be.
    armed: AtomicBool,
    descriptor: Descriptor,
}

impl Wake {
    /// Opens the descriptor; it closes on drop. Fails when the process may open no more.
    pub fn new() -> io::Result<Self> {
        let descriptor = Descriptor::new().map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("cannot open a wake-up descriptor: {error}"),
            )
        })?;
        Ok(Self {
            armed: AtomicBool::new(false),
            descriptor,
        })
    }

    /// The descriptor to watch for reading. Only this object reads, writes and closes it: stop watching before the
    /// object goes.
    pub fn fd(&self) -> i32 {
        self.descriptor.fd()
    }

    /// Makes the descriptor readable. Between two clears only the first call writes.
    #[inline]
    pub fn notify(&self) {
        if !self.armed.swap(true, Ordering::AcqRel) {
            self.descriptor.raise();
        }
    }

    /// Makes the descriptor unreadable. Look at what is published after this call, never before it.
    ///
    /// The descriptor goes first: were the flag cleared first, a `notify` between the two would have its write taken
    /// away with the flag left set, and no later `notify` would write again.
    pub fn clear(&self) {
        self.descriptor.lower();
        self.armed.swap(false, Ordering::AcqRel);
    }

    /// Sleeps until the descriptor is readable, and returns true; false when the timeout came first or a signal
    /// handler ran. Does not clear.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        self.descriptor.wait(timeout)
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn readable(wake: &Wake) -> bool {
        wake.wait(Some(Duration::ZERO)).unwrap()
    }

    /// Both forms: the pipe is what other systems than Linux use.
    fn each_form(test: impl Fn(&Wake)) {
        for descriptor in [Descriptor::new(), Descriptor::pipe()] {
            test(&Wake {
                armed: AtomicBool::new(false),
                descriptor: descriptor.unwrap(),
            });
        }
    }

    #[test]
    fn readable_from_notify_to_clear() {
        each_form(|wake| {
            for _ in 0..3 {
                assert!(!readable(wake));
                wake.notify();
                wake.notify();
                assert!(readable(wake) && readable(wake));
                wake.clear();
            }
            wake.clear();
            assert!(!readable(wake));
        });
    }

    #[test]
    fn between_two_clears_only_the_first_notify_writes() {
        each_form(|wake| {
            wake.notify();
            // Empty the descriptor behind the flag's back: only a second write could make it readable again.
            wake.descriptor.lower();
            for _ in 0..100 {
                wake.notify();
            }
            assert!(!readable(wake));
            wake.clear();
            wake.notify();
            assert!(readable(wake));
        });
    }

    #[test]
    fn a_full_descriptor_neither_blocks_nor_stays_readable() {
        each_form(|wake| {
            // 64 KiB is what a pipe holds.
            for _ in 0..20_000 {
                wake.descriptor.raise();
            }
            assert!(readable(wake));
            wake.clear();
            assert!(!readable(wake));
        });
    }

    #[test]
    fn a_waiting_thread_is_woken() {
        each_form(|wake| {
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| wake.wait(None).unwrap());
                wake.notify();
                assert!(waiter.join().unwrap());
            });
        });
    }
}
