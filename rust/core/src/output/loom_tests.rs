//! The ring, the wake and the hub under loom: every interleaving of two or three threads, at the smallest sizes.

use super::test_delta::Tokens;
use super::{Delta, HubConsumer, HubProducer, StreamProducer, Wake, hub, ring::ring};
use crate::inbox::{Receiver, inbox};
use crate::sync::Arc;
use loom::thread;

/// Explores with at most `preemptions` forced switches per execution: three find almost all that is to be found.
fn explore(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

#[test]
fn ring_loses_and_reorders_nothing() {
    explore(3, || {
        let (mut producer, mut consumer) = ring::<u32>(1);
        let filler = thread::spawn(move || {
            let mut value = 0;
            while value < 2 {
                if producer.with_slot(|slot| *slot = value + 1) {
                    value += 1;
                } else {
                    thread::yield_now();
                }
            }
        });
        let mut seen = Vec::new();
        loop {
            let closed = consumer.is_closed();
            let mut any = false;
            while consumer.with_front(|slot| seen.push(*slot)) {
                any = true;
            }
            if closed {
                break;
            }
            if !any {
                thread::yield_now();
            }
        }
        filler.join().unwrap();
        assert_eq!(seen, [1, 2]);
    });
}

#[test]
fn ring_consumer_may_leave_at_any_moment() {
    explore(3, || {
        let (mut producer, mut consumer) = ring::<u32>(2);
        let emptier = thread::spawn(move || {
            consumer.with_front(|slot| assert_eq!(*slot, 1));
        });
        for value in 1..3 {
            if !producer.is_closed() {
                producer.with_slot(|slot| *slot = value);
            }
        }
        emptier.join().unwrap();
        assert!(producer.is_closed());
    });
}

#[test]
fn wake_is_never_lost() {
    explore(3, || {
        let wake = Arc::new(Wake::new().unwrap());
        let published = Arc::new(loom::sync::atomic::AtomicU32::new(0));
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let (wake, published) = (Arc::clone(&wake), Arc::clone(&published));
                thread::spawn(move || {
                    published.fetch_add(1, loom::sync::atomic::Ordering::Relaxed);
                    wake.notify();
                })
            })
            .collect();
        // A lost wake-up is a deadlock here, which loom reports.
        while published.load(loom::sync::atomic::Ordering::Relaxed) < 2 {
            wake.wait(None).unwrap();
            wake.clear();
        }
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

fn new_hub() -> (HubProducer<Tokens>, HubConsumer<Tokens>, Receiver<()>) {
    let (bell, ears) = inbox();
    let wake = Arc::new(Wake::new().unwrap());
    let (producer, consumer) = hub(1, wake, move || bell.wake());
    (producer, consumer, ears)
}

fn push(stream: &mut StreamProducer<Tokens>, token: u32) {
    stream.push(&mut Tokens(vec![token]));
}

/// Reads until `enough` tokens came, sleeping on the wake in between.
fn read_until(consumer: &mut HubConsumer<Tokens>, enough: usize) -> Vec<u32> {
    let mut seen = Vec::new();
    while seen.len() < enough {
        consumer.wake().wait(None).unwrap();
        consumer.wake().clear();
        consumer.drain(|_, delta| seen.append(&mut delta.0));
    }
    seen
}

#[test]
fn hub_wakes_for_each_step() {
    explore(3, || {
        let (producer, mut consumer, _ears) = new_hub();
        let (mut stream, _guard) = producer.open(7);
        let text = thread::spawn(move || {
            for token in 1..3 {
                push(&mut stream, token);
                producer.notify();
            }
            // Hands over what did not fit.
            drop(stream);
        });
        assert_eq!(read_until(&mut consumer, 2), [1, 2]);
        text.join().unwrap();
    });
}

#[test]
fn hub_asks_for_the_flush_of_a_tail() {
    explore(3, || {
        let (mut producer, mut consumer, mut ears) = new_hub();
        let (mut stream, _guard) = producer.open(7);
        let text = thread::spawn(move || {
            for token in 1..4 {
                push(&mut stream, token);
            }
            producer.notify();
            // No more pushes: only the reader's request brings the tail on its way. Losing it is a deadlock.
            let mut keys = Vec::new();
            while stream.backlog() > 0 {
                ears.wait(None);
                producer.take_flush_requests(&mut keys);
                if keys.pop().is_some() {
                    assert!(stream.flush());
                    producer.notify();
                }
            }
        });
        assert_eq!(read_until(&mut consumer, 3), [1, 2, 3]);
        text.join().unwrap();
    });
}

#[test]
fn hub_serves_two_streams_of_two_threads() {
    explore(2, || {
        let (producer, mut consumer, _ears) = new_hub();
        let (mut first, _first_guard) = producer.open(1);
        let (mut second, _second_guard) = producer.open(2);
        let other = thread::spawn(move || {
            push(&mut second, 20);
            push(&mut second, 21);
            drop(second);
        });
        push(&mut first, 10);
        let mut seen = Vec::new();
        consumer.drain(|_, delta| seen.append(&mut delta.0));
        other.join().unwrap();
        producer.notify();
        let missing = 3 - seen.len();
        seen.append(&mut read_until(&mut consumer, missing));
        seen.retain(|token| *token != 10);
        assert_eq!(seen, [20, 21]);
    });
}

#[test]
fn hub_guard_may_close_at_any_moment() {
    explore(3, || {
        let (mut producer, mut consumer, _ears) = new_hub();
        let (mut stream, guard) = producer.open(7);
        let reader = thread::spawn(move || {
            let mut seen = Vec::new();
            consumer.drain(|_, delta| seen.append(&mut delta.0));
            drop(guard);
            consumer.drain(|_, _| panic!("the stream is closed"));
            assert!(seen.is_empty() || seen == [1] || seen == [1, 2], "{seen:?}");
            consumer
        });
        push(&mut stream, 1);
        push(&mut stream, 2);
        producer.notify();
        let mut consumer = reader.join().unwrap();
        consumer.drain(|_, _| panic!("the stream is closed"));
        // A tail of a closed stream goes as soon as the producer looks.
        let mut keys = Vec::new();
        producer.take_flush_requests(&mut keys);
        assert!(stream.flush() && stream.backlog() == 0);
    });
}

#[test]
fn hub_consumer_may_leave_at_any_moment() {
    explore(3, || {
        let (producer, mut consumer, mut ears) = new_hub();
        let (mut stream, guard) = producer.open(7);
        let reader = thread::spawn(move || {
            consumer.drain(|_, delta| assert!(delta.weight() > 0));
        });
        push(&mut stream, 1);
        push(&mut stream, 2);
        producer.notify();
        // The consumer's end rings the text thread.
        while !producer.is_closed() {
            ears.wait(None);
        }
        assert!(stream.is_closed() && stream.flush());
        reader.join().unwrap();
        drop(guard);
    });
}

#[test]
fn hub_resume_brings_what_was_held() {
    explore(2, || {
        let (producer, mut consumer, _ears) = new_hub();
        let (mut stream, guard) = producer.open(7);
        guard.hold();
        let client = thread::spawn(move || {
            guard.resume();
            guard
        });
        let text = thread::spawn(move || {
            push(&mut stream, 1);
            push(&mut stream, 2);
            producer.notify();
            drop(stream);
        });
        assert_eq!(read_until(&mut consumer, 2), [1, 2]);
        text.join().unwrap();
        client.join().unwrap();
    });
}

#[test]
fn hub_producer_end_is_noticed() {
    explore(3, || {
        let (producer, mut consumer, _ears) = new_hub();
        let (mut stream, _guard) = producer.open(7);
        let text = thread::spawn(move || {
            push(&mut stream, 1);
            push(&mut stream, 2);
            drop(stream);
            drop(producer);
        });
        let mut seen = Vec::new();
        loop {
            consumer.wake().wait(None).unwrap();
            consumer.wake().clear();
            let closed = consumer.is_closed();
            consumer.drain(|_, delta| seen.append(&mut delta.0));
            if closed {
                break;
            }
        }
        assert_eq!(seen, [1, 2]);
        text.join().unwrap();
    });
}
