//! A bounded queue from one thread to one other, without locks, whose slots are reused in place.
//!
//! A slot is never moved or emptied by the ring: the producer writes into the value that the consumer left there, so
//! that a `String` or `Vec` inside keeps its capacity.
#![expect(
    unsafe_code,
    reason = "the two ends write the slots they own through shared cells"
)]

use std::cell::Cell;
use std::marker::PhantomData;

use crate::sync::{Arc, AtomicBool, AtomicUsize, CachePadded, Ordering, UnsafeCell};

/// `head` and `tail` count slots ever freed and ever filled; they wrap, and their difference is the length.
struct Ring<T> {
    slots: Box<[UnsafeCell<T>]>,
    /// Written by the consumer.
    head: CachePadded<AtomicUsize>,
    /// Written by the producer.
    tail: CachePadded<AtomicUsize>,
    producer_gone: AtomicBool,
    consumer_gone: AtomicBool,
}

// SAFETY: each slot is used by one end at a time, handed over by the release of `tail` or `head`, so its value only
// moves between threads.
unsafe impl<T: Send> Sync for Ring<T> {}
// SAFETY: the ring owns its values.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T> Ring<T> {
    #[inline]
    fn slot(&self, position: usize) -> &UnsafeCell<T> {
        &self.slots[position & (self.slots.len() - 1)]
    }
}

/// Makes a ring of at least `capacity` slots (rounded up to a power of two, at least one), filled with defaults.
pub fn ring<T: Default + Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let slots = capacity.next_power_of_two();
    let ring = Arc::new(Ring {
        slots: (0..slots).map(|_| UnsafeCell::new(T::default())).collect(),
        head: CachePadded(AtomicUsize::new(0)),
        tail: CachePadded(AtomicUsize::new(0)),
        producer_gone: AtomicBool::new(false),
        consumer_gone: AtomicBool::new(false),
    });
    let producer = Producer {
        ring: Arc::clone(&ring),
        tail: 0,
        head_seen: 0,
        not_sync: PhantomData,
    };
    let consumer = Consumer {
        ring,
        head: 0,
        tail_seen: 0,
        not_sync: PhantomData,
    };
    (producer, consumer)
}

/// The filling end.
pub struct Producer<T> {
    ring: Arc<Ring<T>>,
    tail: usize,
    /// The last `head` read: read again only when the ring looks full.
    head_seen: usize,
    not_sync: PhantomData<Cell<()>>,
}

impl<T> Producer<T> {
    /// Lets `fill` write into the next free slot, which holds what the consumer left there, and passes the slot on.
    /// Returns false, without a call, when the ring is full. If `fill` panics, the slot stays free.
    #[inline]
    pub fn with_slot(&mut self, fill: impl FnOnce(&mut T)) -> bool {
        if !self.has_room() {
            return false;
        }
        self.ring.slot(self.tail).with_mut(|slot| {
            // SAFETY: the slot is between `tail` and `head` + capacity, which is the producer's, and `self` is
            // borrowed mutably.
            fill(unsafe { &mut *slot });
        });
        self.tail = self.tail.wrapping_add(1);
        // Release: the consumer that sees this count sees the slot's contents.
        self.ring.tail.store(self.tail, Ordering::Release);
        true
    }

    #[inline]
    fn has_room(&mut self) -> bool {
        let capacity = self.ring.slots.len();
        if self.tail.wrapping_sub(self.head_seen) < capacity {
            return true;
        }
        // Acquire: the consumer is done with the slots below this count.
        self.head_seen = self.ring.head.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head_seen) < capacity
    }

    /// Slots in all.
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }

    /// True once the consumer is gone.
    pub fn is_closed(&self) -> bool {
        self.ring.consumer_gone.load(Ordering::Acquire)
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.ring.producer_gone.store(true, Ordering::Release);
    }
}

/// The emptying end.
pub struct Consumer<T> {
    ring: Arc<Ring<T>>,
    head: usize,
    /// The last `tail` read: read again only when the ring looks empty.
    tail_seen: usize,
    not_sync: PhantomData<Cell<()>>,
}

impl<T> Consumer<T> {
    /// Lets `take` use the oldest filled slot and frees the slot. What `take` leaves in it is what the producer gets.
    /// Returns false, without a call, when the ring is empty. If `take` panics, the slot stays filled.
    #[inline]
    pub fn with_front(&mut self, take: impl FnOnce(&mut T)) -> bool {
        if self.head == self.tail_seen {
            // Acquire: the slots below this count are filled.
            self.tail_seen = self.ring.tail.load(Ordering::Acquire);
            if self.head == self.tail_seen {
                return false;
            }
        }
        self.ring.slot(self.head).with_mut(|slot| {
            // SAFETY: the slot is between `head` and `tail`, which is the consumer's, and `self` is borrowed mutably.
            take(unsafe { &mut *slot });
        });
        self.head = self.head.wrapping_add(1);
        // Release: the producer that sees this count sees that the slot is done with.
        self.ring.head.store(self.head, Ordering::Release);
        true
    }

    /// True once the producer is gone. What it filled before is still there: ask this first, then empty the ring.
    pub fn is_closed(&self) -> bool {
        self.ring.producer_gone.load(Ordering::Acquire)
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        self.ring.consumer_gone.store(true, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn take<T: Clone>(consumer: &mut Consumer<T>) -> Option<T> {
        let mut taken = None;
        consumer.with_front(|slot| taken = Some(slot.clone()));
        taken
    }

    #[test]
    fn capacity_is_a_power_of_two_and_at_least_one() {
        for (asked, got) in [(0, 1), (1, 1), (2, 2), (3, 4), (8, 8), (9, 16)] {
            assert_eq!(ring::<u8>(asked).0.capacity(), got);
        }
    }

    #[test]
    fn keeps_order_and_refuses_when_full() {
        let (mut producer, mut consumer) = ring::<u32>(3);
        for round in 0..100 {
            for value in 0..4 {
                assert!(producer.with_slot(|slot| *slot = round * 4 + value));
            }
            assert!(!producer.with_slot(|_| panic!("there is no slot")));
            for value in 0..4 {
                assert_eq!(take(&mut consumer), Some(round * 4 + value));
            }
            assert_eq!(take(&mut consumer), None);
        }
    }

    #[test]
    fn counts_may_wrap() {
        let (mut producer, mut consumer) = ring::<u32>(2);
        let start = usize::MAX - 2;
        producer.ring.head.store(start, Ordering::Relaxed);
        producer.ring.tail.store(start, Ordering::Relaxed);
        (producer.tail, producer.head_seen) = (start, start);
        (consumer.head, consumer.tail_seen) = (start, start);
        for value in 0..8 {
            assert!(producer.with_slot(|slot| *slot = value));
            assert!(producer.with_slot(|slot| *slot = value + 100));
            assert!(!producer.with_slot(|_| ()));
            assert_eq!(take(&mut consumer), Some(value));
            assert_eq!(take(&mut consumer), Some(value + 100));
        }
    }

    #[test]
    fn a_slot_keeps_its_memory() {
        let (mut producer, mut consumer) = ring::<String>(1);
        let mut address = None;
        for _ in 0..10 {
            producer.with_slot(|slot| slot.push_str("a text that needs an allocation"));
            consumer.with_front(|slot| {
                assert_eq!(*address.get_or_insert(slot.as_ptr()), slot.as_ptr());
                slot.clear();
            });
        }
    }

    #[test]
    fn a_panic_inside_leaves_the_ring_as_it_was() {
        let (mut producer, mut consumer) = ring::<u32>(2);
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            producer.with_slot(|_| panic!("fill"));
        }));
        assert!(unwound.is_err());
        assert_eq!(take(&mut consumer), None);
        producer.with_slot(|slot| *slot = 7);
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            consumer.with_front(|_| panic!("take"));
        }));
        assert!(unwound.is_err());
        assert_eq!(take(&mut consumer), Some(7));
    }

    #[test]
    fn each_end_sees_the_other_leave() {
        let (producer, consumer) = ring::<u32>(1);
        assert!(!producer.is_closed() && !consumer.is_closed());
        drop(consumer);
        assert!(producer.is_closed());
        let (mut producer, mut consumer) = ring::<u32>(1);
        producer.with_slot(|slot| *slot = 3);
        drop(producer);
        assert!(consumer.is_closed());
        assert_eq!(take(&mut consumer), Some(3));
    }
}
