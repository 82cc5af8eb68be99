//! What the way out costs per token, and a message to an inbox.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use miniinfer_core::inbox::inbox;
use miniinfer_core::output::{Delta, Wake, hub};

/// About what a text delta is: some text, and a count of tokens.
#[derive(Default)]
struct Text {
    text: String,
    tokens: usize,
}

impl Delta for Text {
    fn merge_from(&mut self, later: &mut Self) {
        self.text.push_str(&later.text);
        self.tokens += later.tokens;
    }

    fn clear(&mut self) {
        self.text.clear();
        self.tokens = 0;
    }

    fn weight(&self) -> usize {
        self.tokens
    }
}

const STREAMS: u64 = 256;
const RING: usize = 8;

/// One step of 256 streams: a token each, one notify, one clear, one drain.
fn hub_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hub");
    group.throughput(Throughput::Elements(STREAMS));
    let (producer, mut consumer) = hub::<Text>(RING, Arc::new(Wake::new().expect("fd")), || {});
    let mut streams: Vec<_> = (0..STREAMS).map(|key| producer.open(key)).collect();
    let mut delta = Text::default();
    group.bench_function("push_notify_drain_256", |bencher| {
        bencher.iter(|| {
            for (stream, _) in &mut streams {
                delta.text.push_str(" token");
                delta.tokens = 1;
                stream.push(&mut delta);
            }
            producer.notify();
            consumer.wake().clear();
            let mut total = 0;
            consumer.drain(|_, delta| total += delta.text.len());
            black_box(total)
        });
    });
    group.throughput(Throughput::Elements(64 * STREAMS));
    group.bench_function("push_256_reader_away", |bencher| {
        // The reader comes by once in 64 steps: rings are full and deltas merge into tails.
        bencher.iter(|| {
            for _ in 0..64 {
                for (stream, _) in &mut streams {
                    delta.text.push_str(" token");
                    delta.tokens = 1;
                    stream.push(&mut delta);
                }
            }
            consumer.drain(|_, delta| {
                black_box(delta.weight());
            });
        });
    });
    group.finish();
}

/// The text thread's part alone, with a reader on another thread that sleeps on the descriptor.
fn hub_two_threads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hub_two_threads");
    group.throughput(Throughput::Elements(STREAMS));
    let (producer, mut consumer) = hub::<Text>(RING, Arc::new(Wake::new().expect("fd")), || {});
    let mut streams: Vec<_> = (0..STREAMS).map(|key| producer.open(key)).collect();
    let reader = std::thread::spawn(move || {
        while !consumer.is_closed() {
            consumer.wake().wait(None).expect("poll");
            consumer.wake().clear();
            consumer.drain(|_, delta| {
                black_box(delta.weight());
            });
        }
    });
    let mut delta = Text::default();
    group.bench_function("push_notify_256", |bencher| {
        bencher.iter(|| {
            for (stream, _) in &mut streams {
                delta.text.push_str(" token");
                delta.tokens = 1;
                stream.push(&mut delta);
            }
            producer.notify();
        });
    });
    group.finish();
    drop(streams);
    drop(producer);
    reader.join().expect("the reader");
}

fn inbox_push(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("inbox");
    let (sender, mut receiver) = inbox::<[u64; 4]>();
    let mut messages = Vec::with_capacity(1 << 10);
    group.throughput(Throughput::Elements(1 << 10));
    group.bench_function("push_1024", |bencher| {
        bencher.iter_batched(
            || {
                receiver.drain(&mut messages);
                messages.clear();
            },
            |()| {
                for value in 0..1 << 10 {
                    sender.push([value; 4]).expect("the receiver lives");
                }
            },
            criterion::BatchSize::PerIteration,
        );
    });
    group.bench_function("push_and_drain_1024", |bencher| {
        bencher.iter(|| {
            for value in 0..1 << 10 {
                sender.push([value; 4]).expect("the receiver lives");
            }
            receiver.drain(&mut messages);
            black_box(&messages);
            messages.clear();
        });
    });
    group.finish();
}

criterion_group!(benches, hub_step, hub_two_threads, inbox_push);
criterion_main!(benches);
