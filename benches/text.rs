//! Text for one engine step: 256 streams, 8 tokens each, with and without stop strings; loading a tokenizer.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use miniinfer_core::text::{Delta, StreamSpec, TextModel, TextStream, TokenInput};

const STREAMS: usize = 256;
const TOKENS_A_STEP: usize = 8;

/// Tokens of one to seven bytes; every eighth ends in the middle of a character.
fn model() -> Arc<TextModel> {
    let tokens: Vec<Vec<u8>> = (0..4096usize)
        .map(|id| match id % 8 {
            0 => vec![0xE6, 0x97],
            1 => vec![0xA5],
            _ => format!(" {:x}", id * 7919 % 65536 * 31).into_bytes(),
        })
        .collect();
    TextModel::from_parts(&tokens, &[]).expect("a valid model")
}

fn streams(model: &Arc<TextModel>, stop: &[&str]) -> Vec<(TextStream, Delta)> {
    let stop: Vec<String> = stop.iter().map(|stop| (*stop).to_owned()).collect();
    (0..STREAMS)
        .map(|_| {
            let spec = StreamSpec {
                stop: stop.clone(),
                continuation: true,
                ..StreamSpec::default()
            };
            (
                TextStream::new(model.clone(), spec).expect("no empty stop"),
                Delta::default(),
            )
        })
        .collect()
}

fn step(streams: &mut [(TextStream, Delta)], at: usize) {
    for (place, (stream, delta)) in streams.iter_mut().enumerate() {
        delta.clear();
        for token in 0..TOKENS_A_STEP {
            let id = (at * TOKENS_A_STEP + token + place * 8) % 4096;
            stream.push(&TokenInput::new(id as u32), delta);
        }
        black_box(&delta.text);
    }
}

fn text(criterion: &mut Criterion) {
    let model = model();
    let mut group = criterion.benchmark_group("text");
    group.throughput(Throughput::Elements((STREAMS * TOKENS_A_STEP) as u64));
    for (name, stop) in [
        ("no_stop", &[][..]),
        ("stop", &["\nUser:", "</answer>", " 7b5zz", "日x"][..]),
    ] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|steps| {
                let mut streams = streams(&model, stop);
                let start = Instant::now();
                (0..steps as usize).for_each(|at| step(&mut streams, at));
                start.elapsed()
            });
        });
    }
    group.finish();
}

/// Loads each tokenizer of the folder named by `MINIINFER_TOKENIZERS`.
fn load(criterion: &mut Criterion) {
    let Some(folder) = std::env::var_os("MINIINFER_TOKENIZERS") else {
        return;
    };
    let mut group = criterion.benchmark_group("text_load");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(1));
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        let Ok(bytes) = std::fs::read(&path) else {
            continue;
        };
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                TextModel::from_json(black_box(&bytes))
                    .expect("a tokenizer")
                    .vocabulary_size()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, text, load);
criterion_main!(benches);
