//! Attention against softmax in float64, over shuffled blocks of a poisoned cache.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::Random;
use miniinfer_cpu::arena::WeightBytes;
use miniinfer_cpu::attention::cache::{CacheShape, LayerCache};
use miniinfer_cpu::attention::element::ElementType;
use miniinfer_cpu::attention::write::{NewTokens, write};
use miniinfer_cpu::attention::{AttentionError, Queries, attend};
use miniinfer_cpu::isa::Isa;
use miniinfer_cpu::pool::Pool;

struct Setting {
    query_heads: usize,
    heads: usize,
    head_dim: usize,
    block_size: usize,
    element: ElementType,
    window: usize,
    /// For each request: tokens before, and new ones.
    requests: Vec<(usize, usize)>,
}

/// The memory of a cache, all NaN (or -128 with scales of NaN).
struct Memory {
    keys: WeightBytes,
    values: WeightBytes,
    key_scales: Vec<f32>,
    value_scales: Vec<f32>,
    shape: CacheShape,
}

impl Memory {
    fn new(shape: CacheShape) -> Self {
        let heads = shape.blocks * shape.block_size * shape.heads;
        let mut memory = Self {
            keys: WeightBytes::new(heads * shape.head_dim * shape.element.size())
                .expect("there is memory"),
            values: WeightBytes::new(heads * shape.head_dim * shape.element.size())
                .expect("there is memory"),
            key_scales: vec![f32::NAN; heads],
            value_scales: vec![f32::NAN; heads],
            shape,
        };
        memory.keys.as_mut_slice().fill(0xff);
        memory.values.as_mut_slice().fill(0xff);
        memory
    }

    #[expect(unsafe_code, reason = "the cache lives in memory of the test")]
    fn cache(&mut self) -> LayerCache {
        let scales = (self.key_scales.as_mut_ptr(), self.value_scales.as_mut_ptr());
        let (keys, values) = (&mut self.keys, &mut self.values);
        // SAFETY: the memory is that large and outlives the cache.
        unsafe {
            LayerCache::new(
                self.shape,
                keys.as_mut_slice().as_mut_ptr(),
                values.as_mut_slice().as_mut_ptr(),
                scales,
            )
        }
    }
}

/// One request's tokens: heads as projected, and what the reference makes of them.
struct Sequence {
    heads: Vec<Vec<f32>>,
    row: usize,
    blocks: Vec<i32>,
}

fn turn(position: usize, head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let angle = |i: usize| position as f32 * 10000_f32.powf(-(i as f32) / half as f32);
    let cosines = (0..half).map(|i| angle(i).cos());
    cosines.chain((0..half).map(|i| angle(i).sin())).collect()
}

fn rotated(head: &[f32], position: usize) -> Vec<f64> {
    let (half, turn) = (head.len() / 2, turn(position, head.len()));
    let at = |i: usize| f64::from(head[i]);
    let part = |i: usize| (f64::from(turn[i]), f64::from(turn[half + i]));
    let first = (0..half).map(|i| at(i) * part(i).0 - at(half + i) * part(i).1);
    let second = (0..half).map(|i| at(half + i) * part(i).0 + at(i) * part(i).1);
    first.chain(second).collect()
}

/// The last token's result over all that it sees: [query heads * head size].
fn reference(setting: &Setting, heads: &[Vec<f32>]) -> Vec<f64> {
    let (size, position) = (setting.head_dim, heads.len() - 1);
    let first = if setting.window == 0 {
        0
    } else {
        (position + 1).saturating_sub(setting.window)
    };
    let group = setting.query_heads / setting.heads;
    let mut out = Vec::new();
    for head in 0..setting.query_heads {
        let query = rotated(&heads[position][head * size..][..size], position);
        let key_place = (setting.query_heads + head / group) * size;
        let value_place = key_place + setting.heads * size;
        let scores: Vec<f64> = (first..=position)
            .map(|key| {
                let key = rotated(&heads[key][key_place..][..size], key);
                let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                dot / (size as f64).sqrt()
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        for column in 0..size {
            let values = (first..=position).zip(&weights);
            let sum: f64 = values
                .map(|(key, w)| w * f64::from(heads[key][value_place + column]))
                .sum();
            out.push(sum / total);
        }
    }
    out
}

fn tolerance(element: ElementType) -> f64 {
    match element {
        ElementType::F32 => 2e-5,
        ElementType::F16 => 2e-2,
        ElementType::Bf16 => 1e-1,
        ElementType::I8 => 2e-1,
    }
}

/// A cache, and the sequences whose blocks lie all over it.
struct Scene {
    memory: Memory,
    sequences: Vec<Sequence>,
    table: Vec<i32>,
    table_width: usize,
}

impl Scene {
    fn new(setting: &Setting, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let lengths = setting.requests.iter().map(|(before, new)| before + new);
        let longest = lengths.clone().max().unwrap();
        let table_width = longest.div_ceil(setting.block_size) + 1;
        let blocks: usize = lengths
            .map(|length| length.div_ceil(setting.block_size))
            .sum::<usize>()
            + 2;
        let shape = CacheShape {
            blocks,
            block_size: setting.block_size,
            heads: setting.heads,
            head_dim: setting.head_dim,
            element: setting.element,
        };
        let mut free: Vec<i32> = (0..blocks as i32).collect();
        let width = (setting.query_heads + 2 * setting.heads) * setting.head_dim;
        let rows = setting.requests.len() + 1;
        // What lies past a sequence is never read: nonsense.
        let mut table = vec![i32::MIN; rows * table_width];
        let mut sequences = Vec::new();
        for (index, (before, new)) in setting.requests.iter().enumerate() {
            let length = before + new;
            let row = rows - 1 - index;
            let blocks: Vec<i32> = (0..length.div_ceil(setting.block_size))
                .map(|_| free.swap_remove(random.below(free.len())))
                .collect();
            table[row * table_width..][..blocks.len()].copy_from_slice(&blocks);
            let heads = (0..length)
                .map(|_| (0..width).map(|_| random.normal()).collect())
                .collect();
            sequences.push(Sequence { heads, row, blocks });
        }
        Self {
            memory: Memory::new(shape),
            sequences,
            table,
            table_width,
        }
    }

    /// One step: for each request how many tokens come before, and how many are new.
    fn step(
        &mut self,
        setting: &Setting,
        isa: Isa,
        pool: &Pool,
        counts: &dyn Fn(usize) -> (usize, usize),
    ) -> Vec<f32> {
        let cache = self.memory.cache();
        let (sequences, table, width) = (&self.sequences, &self.table, self.table_width);
        run_step(setting, isa, pool, &cache, sequences, table, width, counts)
    }
}

fn check(setting: &Setting, isa: Isa, pool: &Pool, seed: u64) {
    let mut scene = Scene::new(setting, seed);
    if setting.requests.iter().any(|(before, _)| *before > 0) {
        scene.step(setting, isa, pool, &|index| (0, setting.requests[index].0));
    }
    let out = scene.step(setting, isa, pool, &|index| setting.requests[index]);
    let out_width = setting.query_heads * setting.head_dim;
    let mut results = out.chunks(out_width);
    for (sequence, (before, new)) in scene.sequences.iter().zip(&setting.requests) {
        for token in 0..*new {
            let expected = reference(setting, &sequence.heads[..=before + token]);
            for (got, expected) in results.next().unwrap().iter().zip(expected) {
                let error = (f64::from(*got) - expected).abs();
                assert!(
                    error < tolerance(setting.element),
                    "{isa:?} {:?}: {got} instead of {expected}",
                    setting.element
                );
            }
        }
    }
}

/// Writes and attends new tokens: for each request how many come before, and how many.
#[expect(clippy::too_many_arguments, reason = "a step has that many parts")]
fn run_step(
    setting: &Setting,
    isa: Isa,
    pool: &Pool,
    cache: &LayerCache,
    sequences: &[Sequence],
    table: &[i32],
    table_width: usize,
    counts: &dyn Fn(usize) -> (usize, usize),
) -> Vec<f32> {
    let (mut heads, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
    let (mut query_start, mut seq_lens, mut rows) = (vec![0], Vec::new(), Vec::new());
    // Those at the front that have a single token.
    let mut num_decodes = 0;
    for (index, sequence) in sequences.iter().enumerate() {
        let (before, new) = counts(index);
        if new == 0 {
            continue;
        }
        let is_decode = new == 1 && setting.requests[index].1 == 1;
        if is_decode && num_decodes == rows.len() {
            num_decodes += 1;
        }
        for position in before..before + new {
            heads.extend(&sequence.heads[position]);
            positions.push(position as i32);
            let block = sequence.blocks[position / setting.block_size] as usize;
            slots.push((block * setting.block_size + position % setting.block_size) as i64);
        }
        query_start.push(positions.len() as i32);
        seq_lens.push((before + new) as i32);
        rows.push(sequence.row as i32);
    }
    let longest = *seq_lens.iter().max().unwrap() as usize;
    let rotary: Vec<f32> = (0..longest)
        .flat_map(|p| turn(p, setting.head_dim))
        .collect();
    let mut tokens = NewTokens {
        heads: &mut heads,
        query_heads: setting.query_heads,
        rotary_table: &rotary,
        positions: &positions,
        slots: &slots,
        norm: &[],
        epsilon: 0.0,
    };
    write(isa, pool, cache, &mut tokens).unwrap();
    let mut out = vec![f32::NAN; positions.len() * setting.query_heads * setting.head_dim];
    let queries = Queries {
        query: &heads,
        stride: (setting.query_heads + 2 * setting.heads) * setting.head_dim,
        heads: setting.query_heads,
        query_start: &query_start,
        seq_lens: &seq_lens,
        rows: &rows,
        block_table: table,
        table_width,
        window: setting.window,
        num_decodes,
    };
    attend(isa, pool, cache, &queries, &mut out).unwrap();
    out
}

#[test]
fn decodes_and_chunks_of_every_shape() {
    let pool = Pool::new(3);
    let shapes = [
        (9, 3, 64),
        (1, 1, 16),
        (4, 4, 8),
        (10, 2, 24),
        (7, 1, 128),
        (6, 2, 80),
    ];
    for (index, (query_heads, heads, head_dim)) in shapes.into_iter().enumerate() {
        for (window, block_size) in [(0, 16), (5, 3), (70, 8)] {
            for element in [
                ElementType::F32,
                ElementType::F16,
                ElementType::Bf16,
                ElementType::I8,
            ] {
                let setting = Setting {
                    query_heads,
                    heads,
                    head_dim,
                    block_size,
                    element,
                    window,
                    requests: vec![(0, 1), (13, 1), (31, 2), (0, 37), (66, 3), (63, 65)],
                };
                for isa in Isa::available() {
                    check(&setting, isa, &pool, index as u64);
                }
            }
        }
    }
}

fn one_prompt(element: ElementType, head_dim: usize, tokens: usize) -> Setting {
    Setting {
        query_heads: 6,
        heads: 2,
        head_dim,
        block_size: 16,
        element,
        window: 0,
        requests: vec![(0, tokens)],
    }
}

#[test]
fn a_prompt_in_chunks_gives_the_bits_of_the_whole() {
    let pools = [Pool::new(1), Pool::new(3)];
    for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
        for head_dim in [24, 64] {
            let setting = one_prompt(element, head_dim, 203);
            for isa in Isa::available() {
                let whole = Scene::new(&setting, 1).step(&setting, isa, &pools[1], &|_| (0, 203));
                let mut scene = Scene::new(&setting, 1);
                let mut parts = Vec::new();
                for (before, end) in [
                    (0, 7),
                    (7, 96),
                    (96, 160),
                    (160, 200),
                    (200, 202),
                    (202, 203),
                ] {
                    let counts = |_| (before, end - before);
                    parts.extend(scene.step(&setting, isa, &pools[0], &counts));
                }
                assert_eq!(parts, whole, "{isa:?} {element:?}");
            }
        }
    }
}

#[test]
fn queries_and_weights_in_bfloat16_cost_their_rounding_alone() {
    let pool = Pool::new(2);
    for head_dim in [8, 24, 64, 80, 128] {
        let setting = one_prompt(ElementType::Bf16, head_dim, 150);
        let run = |isa| Scene::new(&setting, 2).step(&setting, isa, &pool, &|_| (0, 150));
        // In float32, over the same cache.
        let exact = run(Isa::Portable);
        for isa in Isa::available() {
            for (got, exact) in run(isa).iter().zip(&exact) {
                // Scores of a few units are off by a 512th of themselves at most, and weights likewise.
                assert!(
                    (got - exact).abs() < 0.02,
                    "{isa:?}: {got} instead of {exact}"
                );
            }
        }
    }
}

#[test]
fn long_contexts_are_merged_from_runs() {
    let pool = Pool::new(2);
    for window in [0, 300] {
        let setting = Setting {
            query_heads: 4,
            heads: 2,
            head_dim: 32,
            block_size: 16,
            element: ElementType::F32,
            window,
            requests: vec![(255, 1), (256, 1), (700, 2), (511, 1)],
        };
        for isa in Isa::available() {
            check(&setting, isa, &pool, 7);
        }
    }
}

const TINY: CacheShape = CacheShape {
    blocks: 4,
    block_size: 2,
    heads: 1,
    head_dim: 4,
    element: ElementType::F32,
};

#[test]
fn arrays_that_make_no_sense_are_refused() {
    let pool = Pool::new(1);
    let mut memory = Memory::new(TINY);
    let cache = memory.cache();
    let good = Queries {
        query: &[0.0; 4],
        stride: 4,
        heads: 1,
        query_start: &[0, 1],
        seq_lens: &[3],
        rows: &[0],
        block_table: &[0, 3, 9],
        table_width: 3,
        window: 0,
        num_decodes: 1,
    };
    let run = |queries: Queries<'_>, out: usize| {
        attend(Isa::Portable, &pool, &cache, &queries, &mut vec![0.0; out])
    };
    assert_eq!(run(good, 4), Ok(()));
    assert!(matches!(
        run(good, 5),
        Err(AttentionError::Length { what: "output", .. })
    ));
    let short = Queries {
        query: &[0.0; 3],
        ..good
    };
    assert!(matches!(
        run(short, 4),
        Err(AttentionError::Length { what: "query", .. })
    ));
    let table = Queries {
        block_table: &[0, 4, 9],
        ..good
    };
    assert_eq!(
        run(table, 4),
        Err(AttentionError::OutOfCache {
            what: "block",
            got: 4,
            limit: 4
        })
    );
    for bad in [
        Queries { rows: &[1], ..good },
        Queries {
            rows: &[-1],
            ..good
        },
        Queries {
            seq_lens: &[0],
            ..good
        },
        Queries {
            seq_lens: &[7],
            ..good
        },
        Queries {
            query_start: &[-1, 1],
            ..good
        },
        Queries {
            query_start: &[1, 1],
            ..good
        },
        Queries {
            num_decodes: 2,
            ..good
        },
    ] {
        assert!(run(bad, 4).is_err());
    }
}

#[test]
fn tokens_without_a_place_are_refused() {
    let pool = Pool::new(1);
    let mut memory = Memory::new(TINY);
    let cache = memory.cache();
    let mut heads = [0.0; 12];
    let mut tokens = NewTokens {
        heads: &mut heads,
        query_heads: 1,
        rotary_table: &[0.0; 8],
        positions: &[2],
        slots: &[0],
        norm: &[],
        epsilon: 0.0,
    };
    let refused = write(Isa::Portable, &pool, &cache, &mut tokens);
    assert_eq!(
        refused.map_err(|error| error.to_string()),
        Err("position 2 is not in the cache of 2".to_owned())
    );
    (tokens.positions, tokens.slots) = (&[1], &[8]);
    let refused = write(Isa::Portable, &pool, &cache, &mut tokens);
    assert!(matches!(
        refused,
        Err(AttentionError::OutOfCache {
            what: "slot",
            got: 8,
            limit: 8
        })
    ));
}
