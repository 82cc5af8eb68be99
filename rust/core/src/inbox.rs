//! Messages to one thread: any thread sends, without locks and without bound; one receives all that is there.
#![expect(unsafe_code, reason = "the messages are nodes of a lock-free stack")]

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crate::stack::{Linked, Stack};
use crate::sync::{Arc, AtomicBool, AtomicPtr, AtomicUsize, Ordering, Parker};

struct Envelope<M> {
    link: AtomicPtr<Self>,
    message: M,
}

// SAFETY: `link` is always the same field, which only the stack writes.
unsafe impl<M> Linked for Envelope<M> {
    #[inline]
    fn link(&self) -> &AtomicPtr<Self> {
        &self.link
    }
}

struct Shared<M> {
    messages: Stack<Box<Envelope<M>>>,
    /// Set by `wake`, cleared by the `wait` that it ends.
    wake: AtomicBool,
    senders: AtomicUsize,
    parker: Parker,
}

/// Makes an inbox: the handle to send with, and the one receiver.
pub fn inbox<M: Send>() -> (Inbox<M>, Receiver<M>) {
    let shared = Arc::new(Shared {
        messages: Stack::new(),
        wake: AtomicBool::new(false),
        senders: AtomicUsize::new(1),
        parker: Parker::new(),
    });
    let inbox = Inbox {
        shared: Arc::clone(&shared),
    };
    let receiver = Receiver {
        shared,
        not_sync: PhantomData,
    };
    (inbox, receiver)
}

/// The sending side. Clone it freely; any thread may use any clone.
pub struct Inbox<M: Send> {
    shared: Arc<Shared<M>>,
}

impl<M: Send> Inbox<M> {
    /// Sends a message and wakes the receiver if it sleeps. Messages of one thread arrive in the order sent.
    /// Hands the message back when the receiver is gone.
    #[inline]
    pub fn push(&self, message: M) -> Result<(), M> {
        let envelope = Box::new(Envelope {
            link: AtomicPtr::new(std::ptr::null_mut()),
            message,
        });
        // SAFETY: the envelope is new, so it is in no stack.
        match unsafe { self.shared.messages.push(envelope) } {
            Ok(()) => {
                self.shared.parker.unpark();
                Ok(())
            }
            Err(envelope) => Err(envelope.message),
        }
    }

    /// Ends the receiver's `wait`, the present or the next, without a message.
    pub fn wake(&self) {
        self.shared.wake.swap(true, Ordering::AcqRel);
        self.shared.parker.unpark();
    }

    /// True once the receiver is gone.
    pub fn is_closed(&self) -> bool {
        self.shared.messages.is_closed()
    }
}

impl<M: Send> Clone for Inbox<M> {
    fn clone(&self) -> Self {
        // Relaxed: the clone is made from a live sender, so the count is above zero throughout.
        self.shared.senders.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<M: Send> Drop for Inbox<M> {
    fn drop(&mut self) {
        if self.shared.senders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.parker.unpark();
        }
    }
}

/// The receiving side: one thread at a time.
pub struct Receiver<M: Send> {
    shared: Arc<Shared<M>>,
    /// Sends but is not shared.
    not_sync: PhantomData<std::cell::Cell<()>>,
}

impl<M: Send> Receiver<M> {
    /// Appends all messages that are there, in the order sent, and returns how many.
    pub fn drain(&mut self, into: &mut Vec<M>) -> usize {
        let before = into.len();
        into.extend(self.shared.messages.take().map(|envelope| envelope.message));
        into.len() - before
    }

    /// True when `drain` would find nothing.
    pub fn is_empty(&self) -> bool {
        self.shared.messages.is_empty()
    }

    /// True once every sender is gone; what they sent is still there to drain.
    pub fn is_closed(&self) -> bool {
        self.shared.senders.load(Ordering::Acquire) == 0
    }

    /// Sleeps until there is a message, a [`Inbox::wake`] or no sender left; returns false if the timeout came first.
    ///
    /// Without a timeout an idle thread is never woken. A wake-up sent before the call ends it at once, and ends only
    /// one call.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        // A timeout beyond the clock's range is no timeout.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if self.something_to_see() {
                return true;
            }
            self.shared.parker.announce();
            if self.something_to_see() {
                self.shared.parker.retract();
                return true;
            }
            if !self.shared.parker.park(deadline) {
                return self.something_to_see();
            }
        }
    }

    fn something_to_see(&self) -> bool {
        // Relaxed suffices to find no flag: only a flag that is set must be taken, and that is a swap.
        let woken = self.shared.wake.load(Ordering::Relaxed)
            && self.shared.wake.swap(false, Ordering::Acquire);
        woken || !self.is_empty() || self.is_closed()
    }
}

impl<M: Send> Drop for Receiver<M> {
    fn drop(&mut self) {
        drop(self.shared.messages.close());
    }
}

#[cfg(all(test, loom))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod loom_tests {
    use super::*;
    use crate::sync::UnsafeCell;
    use loom::thread;

    /// Explores with at most `preemptions` forced switches per execution.
    fn explore(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(test);
    }

    #[test]
    fn wait_misses_no_push_of_two_senders() {
        explore(2, || {
            let (inbox, mut receiver) = inbox::<u32>();
            let senders = [vec![10, 11], vec![20]].map(|messages| {
                let inbox = inbox.clone();
                thread::spawn(move || {
                    for message in messages {
                        inbox.push(message).unwrap();
                    }
                })
            });
            let mut seen = Vec::new();
            // A lost wake-up is a deadlock here, which loom reports.
            while seen.len() < 3 {
                assert!(receiver.wait(None));
                receiver.drain(&mut seen);
            }
            seen.retain(|message| *message != 20);
            assert_eq!(seen, [10, 11]);
            for sender in senders {
                sender.join().unwrap();
            }
        });
    }

    #[test]
    fn wake_without_a_message_ends_one_wait() {
        explore(3, || {
            let (inbox, mut receiver) = inbox::<u32>();
            let other = inbox.clone();
            let waker = thread::spawn(move || other.wake());
            assert!(receiver.wait(None));
            assert!(receiver.is_empty() && !receiver.is_closed());
            waker.join().unwrap();
            drop(inbox);
        });
    }

    #[test]
    fn wait_ends_when_the_last_sender_goes() {
        explore(3, || {
            let (inbox, mut receiver) = inbox::<u32>();
            let sender = thread::spawn(move || {
                inbox.clone().push(1).unwrap();
            });
            let mut seen = Vec::new();
            loop {
                assert!(receiver.wait(None));
                let closed = receiver.is_closed();
                receiver.drain(&mut seen);
                if closed {
                    break;
                }
            }
            assert_eq!(seen, [1]);
            sender.join().unwrap();
        });
    }

    #[test]
    fn a_message_arrives_with_all_that_was_written_before() {
        explore(3, || {
            let (inbox, mut receiver) = inbox::<Box<UnsafeCell<u32>>>();
            let sender = thread::spawn(move || {
                for value in [1, 2] {
                    let message = Box::new(UnsafeCell::new(0));
                    // SAFETY: nobody else has the cell yet.
                    message.with_mut(|cell| unsafe { *cell = value });
                    inbox.push(message).unwrap();
                }
            });
            let mut seen = Vec::new();
            while seen.len() < 2 {
                receiver.wait(None);
                receiver.drain(&mut seen);
            }
            // SAFETY: the cells came by value; loom reports a read that is not ordered after its write.
            let values: Vec<_> = seen
                .iter()
                .map(|cell| cell.with(|cell| unsafe { *cell }))
                .collect();
            assert_eq!(values, [1, 2]);
            sender.join().unwrap();
        });
    }

    #[test]
    fn a_message_is_received_or_handed_back() {
        explore(3, || {
            let (inbox, mut receiver) = inbox::<Arc<()>>();
            let message = Arc::new(());
            let kept = Arc::clone(&message);
            let sender = thread::spawn(move || inbox.push(message).is_ok());
            let mut seen = Vec::new();
            receiver.drain(&mut seen);
            drop(receiver);
            let sent = sender.join().unwrap();
            assert!(sent || seen.is_empty());
            drop(seen);
            // Neither leaked nor dropped twice.
            assert_eq!(Arc::strong_count(&kept), 1);
        });
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn keeps_order_and_drains_all() {
        let (inbox, mut receiver) = inbox();
        let mut seen = vec![99];
        assert_eq!(receiver.drain(&mut seen), 0);
        for value in 0..5 {
            inbox.clone().push(value).unwrap();
        }
        assert!(!receiver.is_empty());
        assert_eq!(receiver.drain(&mut seen), 5);
        assert_eq!(seen, [99, 0, 1, 2, 3, 4]);
        assert!(receiver.is_empty());
    }

    #[test]
    fn wait_tells_a_timeout_from_a_wake() {
        let (inbox, mut receiver) = inbox::<u32>();
        assert!(!receiver.wait(Some(Duration::ZERO)));
        assert!(!receiver.wait(Some(Duration::from_millis(1))));
        inbox.wake();
        inbox.wake();
        assert!(receiver.wait(None));
        assert!(!receiver.wait(Some(Duration::ZERO)), "a wake ends one wait");
        inbox.push(1).unwrap();
        assert!(receiver.wait(Some(Duration::MAX)));
        assert!(receiver.wait(None), "the message is still there");
    }

    #[test]
    fn a_message_to_nobody_comes_back() {
        let (inbox, receiver) = inbox();
        let other = inbox.clone();
        other.push("read by nobody".to_owned()).unwrap();
        assert!(!inbox.is_closed());
        drop(receiver);
        assert!(inbox.is_closed());
        assert_eq!(inbox.push("back".to_owned()), Err("back".to_owned()));
    }

    #[test]
    fn the_last_sender_closes() {
        let (inbox, mut receiver) = inbox();
        let other = inbox.clone();
        drop(inbox);
        assert!(!receiver.is_closed());
        other.push(1).unwrap();
        drop(other);
        assert!(receiver.is_closed());
        assert!(receiver.wait(None));
        let mut seen = Vec::new();
        receiver.drain(&mut seen);
        assert_eq!(seen, [1]);
    }

    #[test]
    fn what_is_left_is_dropped_once() {
        let message = Arc::new(());
        let (inbox, mut receiver) = inbox();
        inbox.push(Arc::clone(&message)).unwrap();
        inbox.push(Arc::clone(&message)).unwrap();
        let mut seen = Vec::new();
        receiver.drain(&mut seen);
        inbox.push(Arc::clone(&message)).unwrap();
        drop((seen, receiver, inbox));
        assert_eq!(Arc::strong_count(&message), 1);
    }
}
