//! The block manager at the sizes a server works at: blocks of 16 tokens, prompts of 8192.
//!
//! `small` is a pool that fits the processor's caches; `large` has 65536 blocks, most of them cached, handed out in an
//! order that has nothing to do with their numbers.

use std::hash::{BuildHasher, BuildHasherDefault};
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use miniinfer_core::block::{BlockId, BlockManager, ChainKey, ExtraKey, FoldedHash, TokenHash};
use rustc_hash::FxHasher;

const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 8192;
const BLOCKS: usize = PROMPT / BLOCK_SIZE;

/// The alternative to [`FoldedHash`] that is at hand.
struct Fx;

impl TokenHash for Fx {
    fn hash(&self, parent: u64, tokens: &[u32]) -> u64 {
        BuildHasherDefault::<FxHasher>::default().hash_one((parent, tokens))
    }
}

/// A prompt of its own for each number.
fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT as u32)
        .map(|position| (position ^ number << 16).wrapping_mul(0x9E37_79B1) >> 12)
        .collect()
}

/// Computes and registers a prompt, whatever is cached of it.
fn fill<H: TokenHash>(
    manager: &mut BlockManager<H>,
    root: ChainKey,
    tokens: &[u32],
) -> Vec<BlockId> {
    let mut table = Vec::new();
    manager
        .allocate(tokens.len() / BLOCK_SIZE, &mut table)
        .expect("enough blocks");
    let mut key = root;
    for (block, content) in table.iter_mut().zip(tokens.chunks_exact(BLOCK_SIZE)) {
        (key, *block) = manager.register(key, *block, content);
    }
    table
}

/// A manager that has `prompt(0)` cached and free, and its root.
fn small<H: TokenHash>(hash: H) -> (BlockManager<H>, ChainKey) {
    let mut manager = BlockManager::with_hash(4096, BLOCK_SIZE as u32, true, hash);
    let root = manager.root(&[]);
    let table = fill(&mut manager, root, &prompt(0));
    manager.release(&table);
    (manager, root)
}

/// The same with 127 other prompts, all blocks scattered over the pool.
fn large<H: TokenHash>(hash: H) -> (BlockManager<H>, ChainKey) {
    let num_blocks = 65536;
    let mut manager = BlockManager::with_hash(num_blocks, BLOCK_SIZE as u32, true, hash);
    let mut all = Vec::new();
    manager
        .allocate(num_blocks as usize, &mut all)
        .expect("all are free");
    for index in 0..num_blocks {
        // An odd factor visits each block once.
        manager.release(&[all[(index.wrapping_mul(40503) % num_blocks) as usize]]);
    }
    let root = manager.root(&[]);
    for number in (0..num_blocks / BLOCKS as u32).rev() {
        let table = fill(&mut manager, root, &prompt(number));
        manager.release(&table);
    }
    (manager, root)
}

fn hit<H: TokenHash>(
    criterion: &mut Criterion,
    name: &str,
    (mut manager, root): (BlockManager<H>, ChainKey),
) {
    let tokens = prompt(0);
    let mut table = Vec::with_capacity(BLOCKS);
    let mut group = criterion.benchmark_group("full hit of 512 blocks");
    group.bench_function(BenchmarkId::new("lookup", name), |bencher| {
        bencher.iter(|| manager.lookup(root, black_box(&tokens), BLOCKS));
    });
    group.bench_function(BenchmarkId::new("acquire and release", name), |bencher| {
        bencher.iter(|| {
            table.clear();
            let (_, blocks) = manager.acquire(root, black_box(&tokens), BLOCKS, &mut table);
            assert_eq!(blocks, BLOCKS);
            manager.release(&table);
        });
    });
    // A table holds the blocks already: acquiring touches counts alone, never the free list.
    manager.acquire(root, &tokens, BLOCKS, &mut Vec::new());
    group.bench_function(
        BenchmarkId::new("share by acquire and release", name),
        |bencher| {
            bencher.iter(|| {
                table.clear();
                manager.acquire(root, black_box(&tokens), BLOCKS, &mut table);
                manager.release(&table);
            });
        },
    );
}

fn hits(criterion: &mut Criterion) {
    hit(criterion, "small", small(FoldedHash::default()));
    hit(criterion, "small, Fx", small(Fx));
    hit(criterion, "large", large(FoldedHash::default()));
    hit(criterion, "large, Fx", large(Fx));
}

fn miss(criterion: &mut Criterion) {
    let (manager, root) = large(FoldedHash::default());
    let tokens = prompt(1 << 12);
    criterion.bench_function("cold lookup of 8192 tokens", |bencher| {
        bencher.iter(|| manager.lookup(root, black_box(&tokens), BLOCKS));
    });
}

fn turnover(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocate and release, per block");
    for count in [1, 16, 512] {
        group.throughput(Throughput::Elements(count));
        let mut manager = BlockManager::new(65536, BLOCK_SIZE as u32, true);
        let mut table = Vec::with_capacity(512);
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter(|| {
                table.clear();
                manager
                    .allocate(count as usize, &mut table)
                    .expect("enough blocks");
                manager.release(black_box(&table));
            });
        });
    }
}

/// Registers the table's blocks as `tokens`; only this is timed.
fn timed(
    manager: &mut BlockManager,
    root: ChainKey,
    tokens: &[u32],
    table: &mut [BlockId],
) -> Duration {
    let start = Instant::now();
    let mut key = root;
    for (block, content) in table.iter_mut().zip(tokens.chunks_exact(BLOCK_SIZE)) {
        (key, *block) = manager.register(key, *block, content);
    }
    black_box(key);
    start.elapsed()
}

fn register(criterion: &mut Criterion) {
    let tokens = prompt(0);
    let mut group = criterion.benchmark_group("register, per block");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    for (name, fresh) in [("new", true), ("merged", false)] {
        let (mut manager, plain) = large(FoldedHash::default());
        let mut table = Vec::with_capacity(BLOCKS);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for number in 0..iterations {
                    table.clear();
                    // Taken first, so that the blocks to merge with are not the ones evicted.
                    manager.acquire(plain, &tokens, BLOCKS, &mut table);
                    manager.release(&table);
                    table.clear();
                    manager.allocate(BLOCKS, &mut table).expect("enough blocks");
                    // The same tokens are new content below a root of their own.
                    let own = manager.root(&[ExtraKey::Salt(number.to_string())]);
                    let root = if fresh { own } else { plain };
                    spent += timed(&mut manager, root, &tokens, &mut table);
                    manager.release(&table);
                    manager.release_root(own);
                }
                spent
            });
        });
    }
}

fn roots(criterion: &mut Criterion) {
    let (mut manager, _) = small(FoldedHash::default());
    let extra = [ExtraKey::Salt("a client's salt of usual length".to_owned())];
    criterion.bench_function("root of a salted request, and its release", |bencher| {
        bencher.iter(|| {
            let root = manager.root(black_box(&extra));
            manager.release_root(root);
        });
    });
}

criterion_group!(benches, hits, miss, turnover, register, roots);
criterion_main!(benches);
