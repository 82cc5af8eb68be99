//! The sampler against one that sorts and walks in float64, for every set of instructions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::Random;
use miniinfer_cpu::isa::Isa;
use miniinfer_cpu::pool::Pool;
use miniinfer_cpu::sample::{Batch, Edits, Logprobs, Masks, Parameters, SampleError, sample};

const GREEDY: f32 = 1e-5;

/// Rows and what is asked of them.
struct Setting {
    vocabulary: usize,
    stride: usize,
    logits: Vec<f32>,
    temperature: Vec<f32>,
    top_k: Vec<i32>,
    top_p: Vec<f32>,
    min_p: Vec<f32>,
    uniform: Vec<f32>,
    mask_rows: Vec<i32>,
    mask_bits: Vec<i32>,
}

/// What came out.
#[derive(Debug, PartialEq)]
struct Outcome {
    sampled: Vec<i32>,
    logprob: Vec<f32>,
    rank: Vec<i32>,
    top_ids: Vec<i32>,
    top_logprobs: Vec<f32>,
}

impl Setting {
    fn random(rows: usize, vocabulary: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let stride = vocabulary + 5;
        let spread = [0.1, 1.0, 4.0][random.below(3)];
        let mut pick = |values: &[f32]| -> Vec<f32> {
            (0..rows)
                .map(|_| values[random.below(values.len())])
                .collect()
        };
        let (temperature, top_p) = (pick(&[0.0, 0.4, 1.0, 2.0]), pick(&[1.0, 0.9, 0.3]));
        let (min_p, top_k) = (pick(&[0.0, 0.0, 0.05]), pick(&[0.0, 1.0, 5.0, 90.0]));
        let words = vocabulary.div_ceil(32);
        let mask_rows: Vec<i32> = (0..rows as i32).filter(|row| row % 3 == 1).collect();
        // A token in four, and always the first.
        let mask_bits = (0..mask_rows.len() * words).map(|word| {
            let bits = random.next() & random.next();
            bits as u32 as i32 | i32::from(word % words == 0)
        });
        let mask_bits = mask_bits.collect();
        let logits = (0..rows * stride)
            .map(|_| spread * random.normal())
            .collect();
        Self {
            vocabulary,
            stride,
            logits,
            temperature,
            top_k: top_k.into_iter().map(|k| k as i32).collect(),
            top_p,
            min_p,
            uniform: (0..rows)
                .map(|_| (random.next() >> 40) as f32 / (1 << 24) as f32)
                .collect(),
            mask_rows,
            mask_bits,
        }
    }

    fn rows(&self) -> usize {
        self.temperature.len()
    }

    fn run(&self, isa: Isa, pool: &Pool, edits: Edits<'_>) -> Result<Outcome, SampleError> {
        let (rows, count) = (self.rows(), 4.min(self.vocabulary));
        let mut logits = self.logits.clone();
        let mut outcome = Outcome {
            sampled: vec![7; rows],
            logprob: vec![0.0; rows],
            rank: vec![0; rows],
            top_ids: vec![0; rows * count],
            top_logprobs: vec![0.0; rows * count],
        };
        let mut batch = Batch {
            logits: &mut logits,
            stride: self.stride,
            vocabulary: self.vocabulary,
            parameters: Parameters {
                temperature: &self.temperature,
                top_k: &self.top_k,
                top_p: &self.top_p,
                min_p: &self.min_p,
                uniform: &self.uniform,
                greedy: GREEDY,
            },
            edits,
            masks: Masks {
                rows: &self.mask_rows,
                bits: &self.mask_bits,
                words: self.vocabulary.div_ceil(32),
            },
        };
        let mut logprobs = Logprobs {
            logprob: &mut outcome.logprob,
            rank: &mut outcome.rank,
            top_ids: &mut outcome.top_ids,
            top_logprobs: &mut outcome.top_logprobs,
            count,
        };
        sample(
            isa,
            pool,
            &mut batch,
            &mut outcome.sampled,
            Some(&mut logprobs),
        )?;
        assert!(
            logits
                .iter()
                .zip(&self.logits)
                .all(|(a, b)| a.to_bits() == b.to_bits()),
            "edits were not undone"
        );
        Ok(outcome)
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.logits[row * self.stride..][..self.vocabulary]
    }

    fn is_allowed(&self, row: usize, token: usize) -> bool {
        let words = self.vocabulary.div_ceil(32);
        let Some(place) = self.mask_rows.iter().position(|r| *r as usize == row) else {
            return true;
        };
        self.mask_bits[place * words + token / 32] >> (token % 32) & 1 == 1
    }

    /// The allowed tokens, likeliest first, with their weights.
    fn sorted(&self, row: usize) -> Vec<(usize, f64)> {
        let logits = self.row(row);
        let mut tokens: Vec<usize> = (0..self.vocabulary)
            .filter(|token| self.is_allowed(row, *token))
            .collect();
        tokens.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let (peak, temperature) = (logits[tokens[0]], self.temperature[row].max(GREEDY));
        let weight = |token: usize| f64::from((logits[token] - peak) / temperature).exp();
        tokens
            .into_iter()
            .map(|token| (token, weight(token)))
            .collect()
    }

    /// The tokens between which rounding may decide.
    fn expected(&self, row: usize) -> Vec<usize> {
        let mut kept = self.sorted(row);
        if self.temperature[row] <= GREEDY {
            return vec![kept[0].0];
        }
        let (mut top_k, top_p) = (self.top_k[row] as usize, f64::from(self.top_p[row]));
        if top_k >= self.vocabulary {
            top_k = 0; // as good as off, and the tokens' order is that of their ids
        }
        let min_p = f64::from(self.min_p[row]);
        kept.retain(|(_, weight)| *weight >= min_p);
        if top_k > 0 {
            kept.truncate(top_k);
        }
        let mass: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let mut before = 0.0;
        kept.retain(|(_, weight)| {
            let is_within = before < top_p * mass;
            before += weight;
            is_within
        });
        if top_k == 0 && top_p >= 1.0 && min_p == 0.0 {
            kept.sort_unstable_by_key(|(token, _)| *token);
        }
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let at = |share: f64| {
            let mut sum = 0.0;
            let passes = |(_, weight): &&(usize, f64)| {
                sum += weight;
                sum > share * total
            };
            kept.iter().find(passes).unwrap_or(kept.last().unwrap()).0
        };
        let share = f64::from(self.uniform[row]) + 1.0 / f64::from(1 << 25);
        vec![at(share - 1e-6), at(share), at(share + 1e-6)]
    }
}

#[test]
fn tokens_and_logprobs_are_those_of_a_sampler_that_sorts() {
    for isa in Isa::available() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for (seed, vocabulary) in [1, 15, 16, 64, 65, 130, 1000, 6000, 20_001]
                .into_iter()
                .enumerate()
            {
                let setting = Setting::random(17, vocabulary, seed as u64);
                let outcome = setting.run(isa, &pool, Edits::default()).unwrap();
                for row in 0..setting.rows() {
                    let (token, logits) = (outcome.sampled[row] as usize, setting.row(row));
                    assert!(
                        setting.expected(row).contains(&token),
                        "{isa:?} {vocabulary} row {row}: {token} of {:?}",
                        setting.expected(row)
                    );
                    let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
                    let logprob = f64::from(logits[token]) - total.ln();
                    assert!((f64::from(outcome.logprob[row]) - logprob).abs() < 1e-5);
                    let above = logits
                        .iter()
                        .filter(|logit| **logit > logits[token])
                        .count();
                    assert_eq!(outcome.rank[row] as usize, above + 1);
                    let mut best: Vec<usize> = (0..vocabulary).collect();
                    best.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
                    let count = 4.min(vocabulary);
                    for (index, token) in best[..count].iter().enumerate() {
                        let place = row * count + index;
                        assert_eq!(outcome.top_ids[place] as usize, *token);
                        let expected = f64::from(logits[*token]) - total.ln();
                        assert!((f64::from(outcome.top_logprobs[place]) - expected).abs() < 1e-5);
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_alone_is_the_row_in_a_batch() {
    let setting = Setting::random(9, 777, 40);
    for isa in Isa::available() {
        let together = setting.run(isa, &Pool::new(2), Edits::default()).unwrap();
        for row in 0..setting.rows() {
            let words = setting.vocabulary.div_ceil(32);
            let masked = setting.mask_rows.iter().position(|r| *r as usize == row);
            let alone = Setting {
                logits: setting.logits[row * setting.stride..][..setting.stride].to_vec(),
                temperature: vec![setting.temperature[row]],
                top_k: vec![setting.top_k[row]],
                top_p: vec![setting.top_p[row]],
                min_p: vec![setting.min_p[row]],
                uniform: vec![setting.uniform[row]],
                mask_rows: masked.map(|_| 0).into_iter().collect(),
                mask_bits: masked.map_or(vec![], |place| {
                    setting.mask_bits[place * words..][..words].to_vec()
                }),
                ..setting
            };
            let outcome = alone.run(isa, &Pool::new(1), Edits::default()).unwrap();
            assert_eq!(outcome.sampled[0], together.sampled[row]);
            assert_eq!(
                outcome.logprob[0].to_bits(),
                together.logprob[row].to_bits()
            );
        }
    }
}

#[test]
fn rows_without_a_distribution_get_no_token() {
    for isa in Isa::available() {
        for (value, place) in [(f32::NAN, 0), (f32::INFINITY, 63), (f32::NAN, 69)] {
            let mut setting = Setting::random(4, 70, 3);
            setting.logits[setting.stride + place] = value;
            setting.logits[2 * setting.stride..][..70].fill(f32::NEG_INFINITY);
            let outcome = setting.run(isa, &Pool::new(1), Edits::default()).unwrap();
            assert_eq!(outcome.sampled[1], -1);
            assert_eq!((outcome.sampled[2], outcome.rank[2]), (0, 1));
            assert!(outcome.logprob[2].is_infinite());
            assert!(outcome.sampled[0] >= 0 && outcome.sampled[3] >= 0);
        }
    }
}

#[test]
fn edits_decide_and_those_that_do_not_exist_are_refused() {
    let setting = Setting::random(3, 50, 8);
    let edit = |sample: i32, token: i32| {
        let arrays = ([sample], [token], [1.0], [1e4]);
        let edits = Edits {
            sample: &arrays.0,
            token: &arrays.1,
            repetition: &arrays.2,
            bias: &arrays.3,
        };
        setting.run(Isa::best(), &Pool::new(1), edits)
    };
    assert_eq!(edit(2, 31).unwrap().sampled[2], 31);
    for (sample, token, what) in [
        (3, 0, "row"),
        (-1, 0, "row"),
        (0, 55, "token"),
        (0, -2, "token"),
    ] {
        let error = edit(sample, token).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("the {what} of an edit")),
            "{error}"
        );
    }
}
