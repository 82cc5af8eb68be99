//! What the control plane costs: steps, admission, cancels. The model is a stand-in that fills `sampled`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use miniinfer_core::inbox::inbox;
use miniinfer_core::{Command, EngineConfig};

mod load;

use load::{Decoding, Load, PROMPT, long_prompt};

/// Requests that are alive when all of them are cancelled.
const CANCELS: u32 = 10_000;

/// Plan, commit and the output taken. The stand-in for the model is in the time.
fn plan_commit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan_commit");
    for (running, waiting, drafting) in [
        (256, 0, false),
        (1024, 0, false),
        (4096, 0, false),
        (256, 10_000, false),
        (256, 0, true),
        (1024, 0, true),
    ] {
        let name = match (waiting, drafting) {
            (0, false) => format!("{running}"),
            (0, true) => format!("{running}_drafting"),
            _ => format!("{running}_waiting_{waiting}"),
        };
        group.throughput(Throughput::Elements(u64::from(running)));
        let mut decoding = Decoding::new(running, waiting, drafting);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let (mut left, mut elapsed) = (iterations, Duration::ZERO);
                while left > 0 {
                    let (steps, load) = decoding.take(left);
                    let start = Instant::now();
                    for _ in 0..steps {
                        assert_eq!(load.step(), running as usize);
                    }
                    elapsed += start.elapsed();
                    left -= u64::from(steps);
                }
                elapsed
            });
        });
        // A step that preempts is not the one to be measured.
        assert_eq!(decoding.preemptions(), 0);
    }
    group.finish();
}

/// An engine that has `long_prompt` cached, if `cached`, and nothing to do.
fn idle(cached: bool, budget: u32) -> Load {
    let mut load = Load::new(EngineConfig {
        num_blocks: 8192,
        max_num_batched_tokens: budget,
        max_model_len: PROMPT + 64,
        ..EngineConfig::default()
    });
    if cached {
        let id = load.submit_tokens(long_prompt());
        while load.step() == 0 {}
        load.engine.apply([Command::Cancel(id)]);
    } else {
        load.engine.apply([Command::ResetPrefixCache]);
    }
    load
}

/// From the message that carries the prompt to the plan that admits it, and to the commit that makes its
/// blocks findable.
fn admit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("admit");
    let prompt = long_prompt();
    for (cached, name) in [(false, "cold"), (true, "hit")] {
        for register in [false, true] {
            let mut load = idle(cached, PROMPT);
            let what = if register { "plan_and_commit" } else { "plan" };
            group.bench_function(BenchmarkId::new(what, name), |bencher| {
                bencher.iter_custom(|iterations| {
                    let mut elapsed = Duration::ZERO;
                    for _ in 0..iterations {
                        let prompt = prompt.clone();
                        let start = Instant::now();
                        let id = load.submit_tokens(prompt);
                        black_box(load.plan());
                        if register {
                            load.commit();
                        }
                        elapsed += start.elapsed();
                        if !register {
                            load.commit();
                        }
                        load.engine.apply([Command::Cancel(id)]);
                        if !cached {
                            load.engine.apply([Command::ResetPrefixCache]);
                        }
                    }
                    elapsed
                });
            });
        }
    }
    group.finish();
}

/// All of 10,000 requests cancelled, in an order of no use to anyone: messages sent, taken in, acted upon.
fn cancel(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("cancel");
    group.throughput(Throughput::Elements(u64::from(CANCELS)));
    group.sample_size(20);
    for running in [256, 4096] {
        let (sender, mut receiver) = inbox();
        let mut commands = Vec::new();
        group.bench_function(format!("{CANCELS}_{running}_running"), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut elapsed = Duration::ZERO;
                for _ in 0..iterations {
                    let mut load = Load::decoding(running, CANCELS - running, false);
                    let start = Instant::now();
                    for number in 0..u64::from(CANCELS) {
                        // A factor without a divisor in common with the count visits each once.
                        let id = 1 + number * 7919 % u64::from(CANCELS);
                        sender
                            .push(Command::Cancel(id))
                            .expect("the receiver lives");
                    }
                    receiver.drain(&mut commands);
                    load.engine.apply(commands.drain(..));
                    black_box(load.plan());
                    load.engine.take_output(&mut load.output);
                    elapsed += start.elapsed();
                    assert_eq!(load.engine.num_requests(), 0);
                    assert_eq!(load.output.entries.len(), CANCELS as usize);
                }
                elapsed
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = plan_commit, admit, cancel
}
criterion_main!(benches);
