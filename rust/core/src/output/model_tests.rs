//! The hub on one thread: random calls against a naive model of each stream.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::test_delta::Tokens;
use super::tests::{Rig, push};
use super::{StreamGuard, StreamProducer};

#[derive(Clone, Debug)]
enum Operation {
    Push(usize, u32),
    Drain,
    Flush,
    Hold(usize),
    Resume(usize),
    Close(usize),
    Finish(usize),
}

const STREAMS: usize = 3;

fn operation() -> impl Strategy<Value = Operation> {
    let stream = 0..STREAMS;
    prop_oneof![
        10 => (stream.clone(), 0..4_u32).prop_map(|(stream, count)| Operation::Push(stream, count)),
        4 => Just(Operation::Drain),
        3 => Just(Operation::Flush),
        1 => stream.clone().prop_map(Operation::Hold),
        2 => stream.clone().prop_map(Operation::Resume),
        1 => stream.clone().prop_map(Operation::Close),
        1 => stream.prop_map(Operation::Finish),
    ]
}

/// One stream and what a naive queue would hold of it.
struct Tracked {
    producer: Option<StreamProducer<Tokens>>,
    guard: StreamGuard<Tokens>,
    held: bool,
    pushed: u32,
    delivered: u32,
}

struct Model {
    rig: Rig,
    streams: BTreeMap<u64, Tracked>,
}

impl Model {
    fn new(capacity: usize) -> Self {
        let rig = Rig::new(capacity);
        let streams = (0..STREAMS as u64)
            .map(|key| {
                let (producer, guard) = rig.producer.open(key);
                let tracked = Tracked {
                    producer: Some(producer),
                    guard,
                    held: false,
                    pushed: 0,
                    delivered: 0,
                };
                (key, tracked)
            })
            .collect();
        Self { rig, streams }
    }

    fn drain(&mut self) {
        for (key, tokens) in self.rig.drain() {
            let stream = self.streams.get_mut(&key).unwrap();
            assert!(!stream.held && !stream.guard.is_closed());
            for token in tokens {
                assert_eq!(token, stream.delivered, "stream {key}");
                stream.delivered += 1;
            }
        }
        for stream in self.streams.values() {
            let tail = stream.producer.as_ref().map_or(0, StreamProducer::backlog);
            if !stream.held && !stream.guard.is_closed() {
                assert_eq!(stream.delivered + tail as u32, stream.pushed);
            }
        }
    }

    fn flush(&mut self) {
        for key in self.rig.requests() {
            if let Some(producer) = &mut self.streams.get_mut(&key).unwrap().producer {
                producer.flush();
            }
        }
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Push(key, count) => {
                let stream = self.streams.get_mut(&(key as u64)).unwrap();
                if let Some(producer) = &mut stream.producer {
                    let tokens: Vec<_> = (stream.pushed..stream.pushed + count).collect();
                    push(producer, &tokens);
                    stream.pushed += count;
                }
            }
            Operation::Drain => self.drain(),
            Operation::Flush => self.flush(),
            Operation::Hold(key) => self.set_held(key, true),
            Operation::Resume(key) => self.set_held(key, false),
            Operation::Close(key) => self.streams[&(key as u64)].guard.close(),
            Operation::Finish(key) => {
                self.streams.get_mut(&(key as u64)).unwrap().producer = None;
            }
        }
    }

    fn set_held(&mut self, key: usize, held: bool) {
        let stream = self.streams.get_mut(&(key as u64)).unwrap();
        stream.held = held;
        if held {
            stream.guard.hold();
        } else {
            stream.guard.resume();
        }
    }

    /// Lets every reader catch up: requests alone must bring all that is left.
    fn settle(&mut self) {
        for key in 0..STREAMS {
            self.set_held(key, false);
        }
        for _ in 0..3 {
            self.drain();
            self.flush();
        }
        for (key, stream) in &self.streams {
            let backlog = stream.producer.as_ref().map_or(0, StreamProducer::backlog);
            assert_eq!(backlog, 0, "stream {key}");
            if !stream.guard.is_closed() {
                assert_eq!(stream.delivered, stream.pushed, "stream {key}");
            }
        }
    }
}

proptest! {
    #[test]
    fn random_calls_lose_double_and_reorder_nothing(
        capacity in 1..5_usize,
        operations in prop::collection::vec(operation(), 0..120),
    ) {
        let mut model = Model::new(capacity);
        for operation in &operations {
            model.apply(operation);
        }
        model.settle();
    }
}
