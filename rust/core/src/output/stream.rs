//! One request's way from the text thread to the reader: a ring of deltas, and a tail into which the text thread
//! merges what the ring cannot take. So the memory of a stream is bounded by its ring and one delta, and a slow
//! reader gets few, large deltas.
//!
//! Everything the two sides tell each other is a bit of one word, changed only by read-modify-writes. These are
//! totally ordered, so "did the other side see my change?" has one answer and no wake-up falls between two flags.
#![expect(
    unsafe_code,
    reason = "the reader's half lives in the shared node, which the ready list hands to it"
)]

use std::mem;

use super::hub::Shared;
use super::ring::{Consumer, Producer, ring};
use crate::stack::Linked;
use crate::sync::{Arc, AtomicPtr, AtomicU32, Ordering, UnsafeCell};

/// What a stream carries. Two deltas of one stream can be made one, as if they had been produced together.
pub trait Delta: Default + Send {
    /// Appends what came after this delta. `later` may be left in any state; it is cleared next.
    fn merge_from(&mut self, later: &mut Self);
    /// Makes the delta equal to `default()`, keeping its memory for reuse.
    fn clear(&mut self);
    /// How much is held: the number of tokens, say.
    fn weight(&self) -> usize;
}

/// The stream is in the ready list.
pub(super) const QUEUED: u32 = 1;
/// The producer holds a tail and wants to know when there is room.
pub(super) const STALLED: u32 = 1 << 1;
/// The producer is gone and left its tail in `last`.
const LAST: u32 = 1 << 2;
/// The reader wants nothing for now.
const HELD: u32 = 1 << 3;
/// The reader wants nothing any more.
const CLOSED: u32 = 1 << 4;
/// A flush request of this stream is on its way to the producer.
pub(super) const ASKED: u32 = 1 << 5;

/// What the two sides and the guard share; a node of the ready list.
pub(super) struct Stream<T> {
    pub(super) key: u64,
    state: AtomicU32,
    link: AtomicPtr<Self>,
    /// The reader's alone.
    reader: UnsafeCell<Reader<T>>,
    /// The producer's until it sets LAST, then the reader's.
    last: UnsafeCell<T>,
}

struct Reader<T> {
    ring: Consumer<T>,
    /// STALLED and LAST, taken from the state while the stream was held.
    deferred: u32,
}

// SAFETY: `reader` is used by the one reader only and `last` by one side at a time, as their comments say, so the
// values only move between threads.
unsafe impl<T: Send> Sync for Stream<T> {}
// SAFETY: the stream owns its values.
unsafe impl<T: Send> Send for Stream<T> {}

// SAFETY: `link` is always the same field, which only the stack writes.
unsafe impl<T> Linked for Stream<T> {
    #[inline]
    fn link(&self) -> &AtomicPtr<Self> {
        &self.link
    }
}

/// What a visit of the reader found.
pub(super) struct Visit {
    /// There is a delta for the reader.
    pub(super) some: bool,
    /// The producer waits for the room that this visit made.
    pub(super) stalled: bool,
}

impl<T: Delta> Stream<T> {
    /// Sets `bits` and says whether the caller must put the stream into the ready list.
    #[inline]
    fn mark(&self, bits: u32) -> bool {
        self.state.fetch_or(bits | QUEUED, Ordering::AcqRel) & QUEUED == 0
    }

    #[inline]
    fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Says that a flush request is sent; false if one is on its way already.
    pub(super) fn ask(&self) -> bool {
        self.state.fetch_or(ASKED, Ordering::AcqRel) & ASKED == 0
    }

    /// Says that the flush request has arrived.
    pub(super) fn answer(&self) {
        self.state.fetch_and(!ASKED, Ordering::AcqRel);
    }

    /// Takes all there is of this stream, merged, into `merged`, which must be clear.
    ///
    /// QUEUED goes before the ring is read: what is pushed later puts the stream into the list again.
    ///
    /// # Safety
    /// Only the one reader of the hub may call this, after it took the stream from the ready list.
    pub(super) unsafe fn visit(&self, merged: &mut T) -> Visit {
        let seen = self
            .state
            .fetch_and(HELD | CLOSED | ASKED, Ordering::AcqRel);
        self.reader.with_mut(|reader| {
            // SAFETY: the caller is the one reader.
            let reader = unsafe { &mut *reader };
            let told = reader.deferred | (seen & (STALLED | LAST));
            if seen & (HELD | CLOSED) == HELD {
                reader.deferred = told;
                return Visit {
                    some: false,
                    stalled: false,
                };
            }
            reader.deferred = 0;
            let closed = seen & CLOSED != 0;
            let mut some = false;
            let mut take = |delta: &mut T| {
                if closed {
                    delta.clear();
                } else if some {
                    merged.merge_from(delta);
                    delta.clear();
                } else {
                    mem::swap(merged, delta);
                    some = true;
                }
            };
            while reader.ring.with_front(&mut take) {}
            if told & LAST != 0 {
                // SAFETY: LAST was read from the state, so the producer is done with `last`.
                self.last.with_mut(|last| take(unsafe { &mut *last }));
            }
            Visit {
                some,
                stalled: told & STALLED != 0,
            }
        })
    }
}

/// Makes the two ends of a stream.
pub(super) fn open<T: Delta>(
    hub: &Arc<Shared<T>>,
    key: u64,
) -> (StreamProducer<T>, StreamGuard<T>) {
    let (producer, consumer) = ring(hub.capacity);
    let stream = Arc::new(Stream {
        key,
        state: AtomicU32::new(0),
        link: AtomicPtr::new(std::ptr::null_mut()),
        reader: UnsafeCell::new(Reader {
            ring: consumer,
            deferred: 0,
        }),
        last: UnsafeCell::new(T::default()),
    });
    let guard = StreamGuard {
        stream: Arc::clone(&stream),
        hub: Arc::clone(hub),
    };
    let producer = StreamProducer {
        ring: producer,
        tail: T::default(),
        holds_tail: false,
        stream,
        hub: Arc::clone(hub),
    };
    (producer, guard)
}

/// The text thread's end of one stream.
///
/// Dropping it loses nothing: a tail that found no room goes over to the reader as it is.
pub struct StreamProducer<T: Delta> {
    ring: Producer<T>,
    tail: T,
    holds_tail: bool,
    stream: Arc<Stream<T>>,
    hub: Arc<Shared<T>>,
}

impl<T: Delta> StreamProducer<T> {
    /// Passes on the contents of `delta`, which is clear afterwards (and may hold the memory of another). Never
    /// blocks and never fails: without room it goes into the tail, and for a closed stream it is dropped.
    ///
    /// The reader hears of it at the next [`HubProducer::notify`](super::HubProducer::notify).
    #[inline]
    pub fn push(&mut self, delta: &mut T) {
        if self.is_closed() {
            delta.clear();
            self.drop_tail();
        } else if self.holds_tail {
            self.tail.merge_from(delta);
            delta.clear();
            self.flush();
        } else if self.ring.with_slot(|slot| mem::swap(slot, delta)) {
            self.mark(0);
        } else {
            mem::swap(&mut self.tail, delta);
            self.holds_tail = true;
            // The reader comes by, once more if it is here now, and asks for the flush when it has made room.
            self.mark(STALLED);
        }
    }

    /// Tries to pass on the tail; true when none is left. Call it when the reader asked, and
    /// [`HubProducer::notify`](super::HubProducer::notify) after it.
    pub fn flush(&mut self) -> bool {
        if !self.holds_tail {
            return true;
        }
        if self.is_closed() {
            self.drop_tail();
            return true;
        }
        let tail = &mut self.tail;
        if !self.ring.with_slot(|slot| mem::swap(slot, tail)) {
            return false;
        }
        self.holds_tail = false;
        self.mark(0);
        true
    }

    /// The weight of the tail: how far the reader is behind what the ring holds.
    pub fn backlog(&self) -> usize {
        if self.holds_tail {
            self.tail.weight()
        } else {
            0
        }
    }

    /// True once the reader wants no more: its guard is closed or the hub's consumer is gone.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.stream.is_closed() || self.hub.ready.is_closed()
    }

    /// The key that the stream was opened with.
    pub fn key(&self) -> u64 {
        self.stream.key
    }

    fn drop_tail(&mut self) {
        if mem::take(&mut self.holds_tail) {
            self.tail.clear();
        }
    }

    #[inline]
    fn mark(&self, bits: u32) {
        if self.stream.mark(bits) {
            // SAFETY: this call set QUEUED, so the stream is not in the list.
            unsafe { self.hub.enqueue(Arc::clone(&self.stream)) };
        }
    }
}

impl<T: Delta> Drop for StreamProducer<T> {
    fn drop(&mut self) {
        if !self.holds_tail {
            return;
        }
        if !self.flush() {
            let tail = mem::take(&mut self.tail);
            self.stream.last.with_mut(|last| {
                // SAFETY: LAST is not set yet, so `last` is the producer's.
                unsafe { *last = tail };
            });
            self.mark(LAST);
        }
        self.hub.notify();
    }
}

/// The reader's hold on one stream, for any thread. Dropping it closes the stream.
pub struct StreamGuard<T: Delta> {
    stream: Arc<Stream<T>>,
    hub: Arc<Shared<T>>,
}

impl<T: Delta> StreamGuard<T> {
    /// The reader wants no more. What is queued is dropped, and what is pushed from now on as well.
    pub fn close(&self) {
        let before = self.stream.state.fetch_or(CLOSED, Ordering::AcqRel);
        // Whoever filled a stream put it into the ready list, so the reader comes by and empties it; but of a held
        // stream it may have come by already.
        if before & (HELD | CLOSED) == HELD {
            self.visit_soon();
        }
    }

    /// True once closed.
    pub fn is_closed(&self) -> bool {
        self.stream.is_closed()
    }

    /// The reader's client is slow: leave this stream's deltas in the ring until [`resume`](Self::resume). Takes
    /// effect at the drain that starts after it.
    pub fn hold(&self) {
        self.stream.state.fetch_or(HELD, Ordering::AcqRel);
    }

    /// Ends a [`hold`](Self::hold) and wakes the reader for what was left.
    pub fn resume(&self) {
        let before = self.stream.state.fetch_and(!HELD, Ordering::AcqRel);
        if before & (HELD | CLOSED) == HELD {
            self.visit_soon();
        }
    }

    /// The key that the stream was opened with.
    pub fn key(&self) -> u64 {
        self.stream.key
    }

    fn visit_soon(&self) {
        if self.stream.mark(0) {
            // SAFETY: `mark` set QUEUED, so the stream is not in the list.
            unsafe { self.hub.enqueue(Arc::clone(&self.stream)) };
        }
        self.hub.notify();
    }
}

impl<T: Delta> Drop for StreamGuard<T> {
    fn drop(&mut self) {
        self.close();
    }
}
