//! The meeting point of the text thread and one reader (an event loop or a waiting thread).
//!
//! A push makes its stream ready; ready streams stand in a lock-free list, each at most once. One `notify` per step
//! wakes the reader for all of them, and one `drain` takes all there is. A stream whose reader is slow fills its ring
//! and then its tail; once there is room the reader asks the text thread to flush it. No stream waits for another.
#![expect(
    unsafe_code,
    reason = "the ready list holds each stream at most once, which the types cannot say"
)]

use std::cell::Cell;
use std::marker::PhantomData;

use super::stream::{self, Delta, Stream, StreamGuard, StreamProducer};
use super::wake::Wake;
use crate::stack::{Linked, Stack, Taken};
use crate::sync::{Arc, AtomicBool, AtomicPtr, Ordering};

/// What both sides of a hub share.
pub(super) struct Shared<T: Delta> {
    pub(super) ready: Stack<Arc<Stream<T>>>,
    requests: Stack<Box<FlushRequest<T>>>,
    wake: Arc<Wake>,
    on_flush: Box<dyn Fn() + Send + Sync>,
    pub(super) capacity: usize,
    producer_gone: AtomicBool,
}

/// At most one per stream is on its way, so they are bounded by the streams.
struct FlushRequest<T> {
    link: AtomicPtr<Self>,
    stream: Arc<Stream<T>>,
}

// SAFETY: `link` is always the same field, which only the stack writes.
unsafe impl<T> Linked for FlushRequest<T> {
    fn link(&self) -> &AtomicPtr<Self> {
        &self.link
    }
}

impl<T: Delta> Shared<T> {
    /// Puts a stream into the ready list.
    ///
    /// # Safety
    /// The caller has just set the stream's QUEUED bit, which was clear.
    #[inline]
    pub(super) unsafe fn enqueue(&self, stream: Arc<Stream<T>>) {
        // SAFETY: QUEUED says whether the stream is in the list, and it was not. A closed list hands the stream back:
        // nobody reads any more.
        drop(unsafe { self.ready.push(stream) });
    }

    /// Wakes the reader if a stream is ready. If the list is empty, the reader has just taken it.
    #[inline]
    pub(super) fn notify(&self) {
        if !self.ready.is_empty() {
            self.wake.notify();
        }
    }

    fn request_flush(&self, stream: Arc<Stream<T>>) {
        if !stream.ask() {
            return;
        }
        let request = Box::new(FlushRequest {
            link: AtomicPtr::new(std::ptr::null_mut()),
            stream,
        });
        // SAFETY: the request is new. A closed list hands it back: nobody flushes any more.
        if unsafe { self.requests.push(request) }.is_ok() {
            (self.on_flush)();
        }
    }
}

/// Makes a hub whose streams each have a ring of `capacity_per_stream` deltas (rounded up to a power of two).
///
/// `wake` tells the reader that streams are ready; several hubs with one reader may share it. `on_flush` tells the
/// text thread that there are flush requests to take, or that the consumer is gone: it is called from the reader's
/// thread and must be quick.
pub fn hub<T: Delta>(
    capacity_per_stream: usize,
    wake: Arc<Wake>,
    on_flush: impl Fn() + Send + Sync + 'static,
) -> (HubProducer<T>, HubConsumer<T>) {
    let shared = Arc::new(Shared {
        ready: Stack::new(),
        requests: Stack::new(),
        wake,
        on_flush: Box::new(on_flush),
        capacity: capacity_per_stream,
        producer_gone: AtomicBool::new(false),
    });
    let producer = HubProducer {
        shared: Arc::clone(&shared),
        not_sync: PhantomData,
    };
    let consumer = HubConsumer {
        taken: shared.ready.take(),
        merged: T::default(),
        shared,
        not_sync: PhantomData,
    };
    (producer, consumer)
}

/// Opens streams, from any thread: the one that submits a request keeps the guard and sends the producer along.
pub struct HubOpener<T: Delta> {
    shared: Arc<Shared<T>>,
}

impl<T: Delta> HubOpener<T> {
    /// Opens a stream. The key is what `drain` calls it; the hub does not interpret it.
    pub fn open(&self, key: u64) -> (StreamProducer<T>, StreamGuard<T>) {
        stream::open(&self.shared, key)
    }
}

impl<T: Delta> Clone for HubOpener<T> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

/// The text thread's side. Its streams live on without it, but nobody is woken for them then.
pub struct HubProducer<T: Delta> {
    shared: Arc<Shared<T>>,
    not_sync: PhantomData<Cell<()>>,
}

impl<T: Delta> HubProducer<T> {
    /// Opens a stream. The key is what `drain` calls it; the hub does not interpret it.
    pub fn open(&self, key: u64) -> (StreamProducer<T>, StreamGuard<T>) {
        stream::open(&self.shared, key)
    }

    /// A handle that opens streams on other threads.
    pub fn opener(&self) -> HubOpener<T> {
        HubOpener {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Wakes the reader if a stream became ready; call it once per step, and after flushes. At most one write to the
    /// descriptor until the reader clears the wake.
    #[inline]
    pub fn notify(&self) {
        self.shared.notify();
    }

    /// Appends the keys of the streams whose reader made room while they held a tail, each once. Flush these. A
    /// stream that is gone or has no tail any more may be among them.
    pub fn take_flush_requests(&mut self, keys: &mut Vec<u64>) {
        keys.extend(self.shared.requests.take().map(|request| {
            request.stream.answer();
            request.stream.key
        }));
    }

    /// True once the consumer is gone.
    pub fn is_closed(&self) -> bool {
        self.shared.ready.is_closed()
    }
}

impl<T: Delta> Drop for HubProducer<T> {
    /// Wakes the reader, so that it notices.
    fn drop(&mut self) {
        drop(self.shared.requests.close());
        self.shared.producer_gone.store(true, Ordering::Release);
        self.shared.wake.notify();
    }
}

/// The reader's side. Dropping it closes all streams.
pub struct HubConsumer<T: Delta> {
    shared: Arc<Shared<T>>,
    /// Streams that a drain took and did not come to, because its callback panicked.
    taken: Taken<Arc<Stream<T>>>,
    merged: T,
    not_sync: PhantomData<Cell<()>>,
}

impl<T: Delta> HubConsumer<T> {
    /// Calls `deliver` once for each stream that has something, with its key and all it has, merged. What `deliver`
    /// leaves in the delta is cleared and its memory reused.
    ///
    /// After a wake-up: [`Wake::clear`] first, then this. If `deliver` panics, the delta it had is lost; the streams
    /// after it are the next drain's.
    pub fn drain(&mut self, mut deliver: impl FnMut(u64, &mut T)) {
        self.visit_taken(&mut deliver);
        self.taken = self.shared.ready.take();
        self.visit_taken(&mut deliver);
    }

    fn visit_taken(&mut self, deliver: &mut impl FnMut(u64, &mut T)) {
        for stream in self.taken.by_ref() {
            self.merged.clear();
            // SAFETY: this is the hub's one consumer, and the stream came from the ready list.
            let visit = unsafe { stream.visit(&mut self.merged) };
            let key = stream.key;
            if visit.stalled {
                self.shared.request_flush(stream);
            }
            if visit.some {
                deliver(key, &mut self.merged);
            }
        }
    }

    /// The wake that says when to drain.
    pub fn wake(&self) -> &Arc<Wake> {
        &self.shared.wake
    }

    /// True once the producer is gone. What it left is still there: ask this first, then drain.
    pub fn is_closed(&self) -> bool {
        self.shared.producer_gone.load(Ordering::Acquire)
    }
}

impl<T: Delta> Drop for HubConsumer<T> {
    /// Calls `on_flush`, so that the text thread notices.
    fn drop(&mut self) {
        drop(self.shared.ready.close());
        (self.shared.on_flush)();
    }
}
