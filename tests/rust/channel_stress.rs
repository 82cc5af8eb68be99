//! Threads against the inbox and the hub for a second or two: every message and every token is seen exactly once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use miniinfer_core::inbox::{Receiver, inbox};
use miniinfer_core::output::{
    Delta, HubConsumer, HubProducer, StreamGuard, StreamProducer, Wake, hub,
};

/// A small generator (xorshift64), seeded, so that a failure can be run again.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn eight_senders_one_sleeping_receiver() {
    const SENDERS: u64 = 8;
    const MESSAGES: u64 = 50_000;
    let (sender, mut receiver) = inbox::<(u64, u64)>();
    thread::scope(|scope| {
        for identity in 0..SENDERS {
            let sender = sender.clone();
            scope.spawn(move || {
                let mut random = Random(identity + 1);
                for count in 0..MESSAGES {
                    sender.push((identity, count)).expect("the receiver lives");
                    if random.below(64) == 0 {
                        thread::yield_now();
                    }
                }
            });
        }
        drop(sender);
        let mut next = [0; SENDERS as usize];
        let mut batch = Vec::new();
        loop {
            assert!(receiver.wait(None));
            let closed = receiver.is_closed();
            receiver.drain(&mut batch);
            for (identity, count) in batch.drain(..) {
                assert_eq!(count, next[identity as usize], "sender {identity}");
                next[identity as usize] += 1;
            }
            if closed {
                break;
            }
        }
        assert_eq!(next, [MESSAGES; SENDERS as usize]);
    });
}

#[test]
fn senders_race_with_the_end_of_the_receiver() {
    for round in 0..50 {
        let message = Arc::new(());
        let (sender, mut receiver) = inbox::<Arc<()>>();
        thread::scope(|scope| {
            for _ in 0..3 {
                let (sender, message) = (sender.clone(), &message);
                scope.spawn(move || {
                    while sender.push(Arc::clone(message)).is_ok() {
                        // Leaves the receiver its turn: the inbox has no bound.
                        thread::yield_now();
                    }
                });
            }
            let mut batch = Vec::new();
            for _ in 0..round % 5 {
                receiver.wait(None);
                receiver.drain(&mut batch);
            }
            drop(receiver);
        });
        drop(sender);
        assert_eq!(Arc::strong_count(&message), 1, "round {round}");
    }
}

#[derive(Default)]
struct Tokens(Vec<u32>);

impl Delta for Tokens {
    fn merge_from(&mut self, later: &mut Self) {
        self.0.append(&mut later.0);
    }

    fn clear(&mut self) {
        self.0.clear();
    }

    fn weight(&self) -> usize {
        self.0.len()
    }
}

const STREAMS: u64 = 256;
const STEPS: u32 = 2_000;
const RING: usize = 4;

/// The text thread: a token or two for random streams each step, one notify, then the flush requests. A finished
/// stream goes at once, with or without a tail, or stays to be flushed.
fn produce(
    mut hub: HubProducer<Tokens>,
    mut streams: Vec<StreamProducer<Tokens>>,
    mut bell: Receiver<()>,
) -> HashMap<u64, u32> {
    let mut random = Random(42);
    let mut pushed = HashMap::new();
    let mut delta = Tokens::default();
    let mut keys = Vec::new();
    for step in 0..STEPS {
        for stream in &mut streams {
            let count = random.below(3) as u32;
            let total = pushed.entry(stream.key()).or_insert(0);
            delta.0.extend(*total..*total + count);
            *total += count;
            stream.push(&mut delta);
            assert!(delta.0.is_empty());
        }
        hub.notify();
        if step % 50 == 49 {
            streams.swap_remove(random.below(streams.len() as u64) as usize);
        }
        hub.take_flush_requests(&mut keys);
        flush(&mut streams, &mut keys);
        hub.notify();
    }
    while streams.iter().any(|stream| stream.backlog() > 0) {
        bell.wait(None);
        hub.take_flush_requests(&mut keys);
        flush(&mut streams, &mut keys);
        hub.notify();
    }
    pushed
}

fn flush(streams: &mut [StreamProducer<Tokens>], keys: &mut Vec<u64>) {
    for key in keys.drain(..) {
        // A stream that is gone may be asked for.
        if let Some(stream) = streams.iter_mut().find(|stream| stream.key() == key) {
            stream.flush();
        }
    }
}

/// Clients: hold, resume and close streams at random from their own thread, and leave all of them flowing.
fn disturb(guards: &[StreamGuard<Tokens>], end: &AtomicBool) {
    let mut random = Random(7);
    // However little this thread gets to run, one is closed.
    guards[0].close();
    while !end.load(Ordering::Relaxed) {
        let guard = &guards[random.below(STREAMS) as usize];
        match random.below(100) {
            0..50 => guard.hold(),
            50..98 => guard.resume(),
            // At most a quarter of the streams are ever closed.
            _ if guard.key().is_multiple_of(4) => guard.close(),
            _ => {}
        }
        thread::yield_now();
    }
    for guard in guards {
        guard.resume();
    }
}

fn read(mut hub: HubConsumer<Tokens>) -> (HashMap<u64, u32>, HubConsumer<Tokens>) {
    let mut delivered = HashMap::new();
    loop {
        hub.wake().wait(None).expect("poll works");
        hub.wake().clear();
        let closed = hub.is_closed();
        hub.drain(|key, delta| {
            let next = delivered.entry(key).or_insert(0);
            for token in &delta.0 {
                assert_eq!(token, next, "stream {key}");
                *next += 1;
            }
        });
        if closed {
            return (delivered, hub);
        }
    }
}

#[test]
fn tokens_are_conserved_over_slow_and_closing_readers() {
    let (ring_bell, bell) = inbox::<()>();
    let wake = Arc::new(Wake::new().expect("a descriptor"));
    let (producer, consumer) = hub::<Tokens>(RING, wake, move || ring_bell.wake());
    let (streams, guards): (Vec<_>, Vec<_>) = (0..STREAMS).map(|key| producer.open(key)).unzip();
    let end = AtomicBool::new(false);
    let (pushed, delivered) = thread::scope(|scope| {
        let reader = scope.spawn(|| read(consumer));
        let clients = scope.spawn(|| disturb(&guards, &end));
        // The clients must let go before the text thread can wait for its last flushes.
        let timer = scope.spawn(|| {
            thread::sleep(std::time::Duration::from_secs(1));
            end.store(true, Ordering::Relaxed);
        });
        let pushed = produce(producer, streams, bell);
        timer.join().expect("the timer");
        clients.join().expect("the clients");
        let (mut delivered, mut hub) = reader.join().expect("the reader");
        // What was still held when the producer went.
        hub.drain(|key, delta| {
            let next = delivered.entry(key).or_insert(0);
            for token in &delta.0 {
                assert_eq!(token, next, "stream {key}");
                *next += 1;
            }
        });
        (pushed, delivered)
    });
    let mut open = 0;
    for guard in &guards {
        let key = guard.key();
        let (sent, seen) = (pushed[&key], delivered.get(&key).copied().unwrap_or(0));
        if guard.is_closed() {
            assert!(seen <= sent, "stream {key}");
        } else {
            open += 1;
            assert_eq!(seen, sent, "stream {key}");
        }
    }
    assert!(
        (STREAMS / 2..STREAMS).contains(&open),
        "{open} streams stayed open"
    );
}
