//! The hub on one thread: what each call does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::test_delta::Tokens;
use super::{HubConsumer, HubProducer, StreamProducer, Wake, hub};

pub(super) struct Rig {
    pub(super) producer: HubProducer<Tokens>,
    consumer: HubConsumer<Tokens>,
    /// Calls of `on_flush`.
    rings: Arc<AtomicUsize>,
}

impl Rig {
    pub(super) fn new(capacity: usize) -> Self {
        let rings = Arc::new(AtomicUsize::new(0));
        let bell = Arc::clone(&rings);
        let wake = Arc::new(Wake::new().unwrap());
        let (producer, consumer) = hub(capacity, wake, move || {
            bell.fetch_add(1, Ordering::Relaxed);
        });
        Self {
            producer,
            consumer,
            rings,
        }
    }

    /// What one drain delivers, in its order.
    pub(super) fn drain(&mut self) -> Vec<(u64, Vec<u32>)> {
        let mut seen = Vec::new();
        self.consumer
            .drain(|key, delta| seen.push((key, std::mem::take(&mut delta.0))));
        seen
    }

    fn woken(&self) -> bool {
        self.consumer.wake().wait(Some(Duration::ZERO)).unwrap()
    }

    pub(super) fn requests(&mut self) -> Vec<u64> {
        let mut keys = Vec::new();
        self.producer.take_flush_requests(&mut keys);
        keys
    }
}

pub(super) fn push(stream: &mut StreamProducer<Tokens>, tokens: &[u32]) {
    let mut delta = Tokens(tokens.to_vec());
    stream.push(&mut delta);
    assert_eq!(delta, Tokens::default(), "push takes the contents");
}

#[test]
fn one_drain_delivers_each_ready_stream_once_and_merged() {
    let mut rig = Rig::new(4);
    let (mut first, _first_guard) = rig.producer.open(1);
    let (mut second, _second_guard) = rig.producer.open(2);
    let (_idle, _idle_guard) = rig.producer.open(3);
    assert_eq!(rig.drain(), []);
    push(&mut first, &[10]);
    push(&mut second, &[20, 21]);
    push(&mut first, &[11, 12]);
    assert_eq!(rig.drain(), [(1, vec![10, 11, 12]), (2, vec![20, 21])]);
    assert_eq!(rig.drain(), []);
    push(&mut second, &[22]);
    assert_eq!(rig.drain(), [(2, vec![22])]);
    assert_eq!((first.key(), second.key()), (1, 2));
}

#[test]
fn notify_wakes_only_for_ready_streams() {
    let mut rig = Rig::new(4);
    let (mut stream, _guard) = rig.producer.open(1);
    rig.producer.notify();
    assert!(!rig.woken());
    push(&mut stream, &[1]);
    assert!(!rig.woken(), "a push alone wakes nobody");
    rig.producer.notify();
    assert!(rig.woken());
    rig.consumer.wake().clear();
    assert_eq!(rig.drain().len(), 1);
    rig.producer.notify();
    assert!(!rig.woken());
}

#[test]
fn a_full_ring_turns_into_a_tail_and_one_flush_request() {
    let mut rig = Rig::new(2);
    let (mut stream, _guard) = rig.producer.open(5);
    for token in 0..6 {
        push(&mut stream, &[token]);
    }
    assert_eq!(stream.backlog(), 4);
    assert!(!stream.flush());
    assert!(rig.requests().is_empty(), "no room yet");
    assert_eq!(rig.drain(), [(5, vec![0, 1])]);
    assert_eq!(rig.rings.load(Ordering::Relaxed), 1);
    assert_eq!(rig.requests(), [5]);
    assert!(stream.flush());
    assert_eq!(stream.backlog(), 0);
    assert_eq!(rig.drain(), [(5, vec![2, 3, 4, 5])]);
    assert!(rig.requests().is_empty());
    assert!(stream.flush(), "nothing to flush is no failure");
}

#[test]
fn a_push_moves_the_tail_when_there_is_room() {
    let mut rig = Rig::new(1);
    let (mut stream, _guard) = rig.producer.open(5);
    push(&mut stream, &[0]);
    push(&mut stream, &[1]);
    assert_eq!(rig.drain(), [(5, vec![0])]);
    push(&mut stream, &[2]);
    assert_eq!(stream.backlog(), 0);
    assert_eq!(rig.drain(), [(5, vec![1, 2])]);
    assert_eq!(
        rig.requests(),
        [5],
        "the request of the first drain, now moot"
    );
    assert!(stream.flush());
}

#[test]
fn requests_are_bounded_when_nobody_takes_them() {
    let mut rig = Rig::new(1);
    let (mut stream, _guard) = rig.producer.open(5);
    for round in 0..50 {
        push(&mut stream, &[2 * round]);
        push(&mut stream, &[2 * round + 1]);
        rig.drain();
    }
    assert_eq!(rig.requests(), [5]);
    assert_eq!(rig.rings.load(Ordering::Relaxed), 1);
}

#[test]
fn dropping_a_producer_hands_over_its_tail_and_wakes() {
    let mut rig = Rig::new(1);
    let (mut stream, _guard) = rig.producer.open(5);
    for token in 0..4 {
        push(&mut stream, &[token]);
    }
    drop(stream);
    assert!(rig.woken());
    assert_eq!(rig.drain(), [(5, vec![0, 1, 2, 3])]);
    assert_eq!(rig.drain(), []);
}

#[test]
fn a_held_stream_waits_and_the_others_do_not() {
    let mut rig = Rig::new(2);
    let (mut slow, guard) = rig.producer.open(1);
    let (mut fast, _fast_guard) = rig.producer.open(2);
    guard.hold();
    for token in 0..5 {
        push(&mut slow, &[token]);
        push(&mut fast, &[token]);
        assert_eq!(rig.drain(), [(2, vec![token])]);
    }
    assert_eq!(slow.backlog(), 3);
    assert!(rig.requests().is_empty());
    assert!(!rig.woken());
    guard.resume();
    assert!(rig.woken());
    assert_eq!(rig.drain(), [(1, vec![0, 1])]);
    assert_eq!(rig.requests(), [1]);
    assert!(slow.flush());
    assert_eq!(rig.drain(), [(1, vec![2, 3, 4])]);
    guard.resume();
    assert_eq!(rig.drain(), [], "to resume twice does nothing");
}

#[test]
fn a_tail_handed_over_while_held_comes_at_resume() {
    let mut rig = Rig::new(1);
    let (mut stream, guard) = rig.producer.open(1);
    guard.hold();
    for token in 0..3 {
        push(&mut stream, &[token]);
        rig.drain();
    }
    drop(stream);
    assert_eq!(rig.drain(), []);
    guard.resume();
    assert_eq!(rig.drain(), [(1, vec![0, 1, 2])]);
}

#[test]
fn a_closed_stream_drops_everything() {
    let mut rig = Rig::new(1);
    let (mut stream, guard) = rig.producer.open(1);
    for token in 0..3 {
        push(&mut stream, &[token]);
    }
    drop(guard);
    assert!(stream.is_closed());
    assert_eq!(rig.drain(), []);
    assert_eq!(
        rig.requests(),
        [1],
        "so that an idle producer drops its tail"
    );
    assert!(stream.flush());
    assert_eq!(stream.backlog(), 0);
    push(&mut stream, &[3]);
    assert_eq!(rig.drain(), []);
}

#[test]
fn closing_a_held_stream_frees_what_was_held() {
    let mut rig = Rig::new(1);
    let (mut stream, guard) = rig.producer.open(1);
    guard.hold();
    push(&mut stream, &[0]);
    push(&mut stream, &[1]);
    assert_eq!(rig.drain(), []);
    guard.close();
    assert!(guard.is_closed() && rig.woken());
    assert_eq!(rig.drain(), []);
    assert_eq!(rig.requests(), [1]);
    assert!(stream.flush());
    guard.resume();
    assert_eq!(rig.drain(), []);
}

#[test]
fn each_side_sees_the_other_leave() {
    let rig = Rig::new(1);
    let (mut stream, _guard) = rig.producer.open(1);
    push(&mut stream, &[0]);
    let Rig {
        producer,
        mut consumer,
        rings,
    } = rig;
    assert!(!consumer.is_closed());
    drop(producer);
    assert!(consumer.is_closed());
    assert!(consumer.wake().wait(Some(Duration::ZERO)).unwrap());
    let mut seen = 0;
    consumer.drain(|_, delta| seen += delta.0.len());
    assert_eq!(seen, 1);
    drop(consumer);
    assert!(stream.is_closed());
    assert_eq!(rings.load(Ordering::Relaxed), 1);
    push(&mut stream, &[1]);
    assert_eq!(stream.backlog(), 0);
}

#[test]
fn a_panic_in_the_callback_loses_one_delta_only() {
    let mut rig = Rig::new(1);
    let mut streams: Vec<_> = (0..3).map(|key| rig.producer.open(key)).collect();
    for (stream, _) in &mut streams {
        push(stream, &[7]);
    }
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        rig.consumer
            .drain(|key, _| assert_ne!(key, 1, "on purpose"));
    }));
    assert!(unwound.is_err());
    assert_eq!(rig.drain(), [(2, vec![7])]);
    push(&mut streams[1].0, &[8]);
    assert_eq!(rig.drain(), [(1, vec![8])]);
}

#[test]
fn nothing_leaks_when_the_parts_go_in_any_order() {
    #[derive(Default)]
    struct Counted(Option<Arc<()>>);
    impl super::Delta for Counted {
        fn merge_from(&mut self, later: &mut Self) {
            self.0 = later.0.take();
        }
        fn clear(&mut self) {
            self.0 = None;
        }
        fn weight(&self) -> usize {
            usize::from(self.0.is_some())
        }
    }
    let live = Arc::new(());
    for order in 0..24 {
        let (producer, consumer) = hub(1, Arc::new(Wake::new().unwrap()), || {});
        let (mut stream, guard) = producer.open(1);
        for _ in 0..2 {
            stream.push(&mut Counted(Some(Arc::clone(&live))));
        }
        let mut parts: Vec<Box<dyn std::any::Any>> = vec![
            Box::new(producer),
            Box::new(consumer),
            Box::new(stream),
            Box::new(guard),
        ];
        for choices in (1..=4).rev() {
            drop(parts.remove(order % 24 / [1, 1, 2, 6][choices - 1] % choices));
        }
        assert_eq!(Arc::strong_count(&live), 1, "order {order}");
    }
}
