//! The arithmetic that this machine's cores reach together: `peaks THREADS` prints operations a
//! second, a multiplication and an addition counted as two, of float32, of int8 and of bfloat16 (0
//! without VNNI or `AVX512_BF16`).
//!
//! Compiled alone with `rustc -C opt-level=3 -C target-cpu=native`, as what it is to measure is this
//! machine's best.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Sums that do not wait for each other: enough to cover an instruction's latency on both ports.
const SUMS: usize = 12;
const LANES: usize = 16;
const STEPS: usize = 200_000;
const ROUNDS: usize = 20;

#[cfg(all(target_arch = "x86_64", target_feature = "avx512vnni"))]
mod kernels {
    use super::{black_box, LANES, STEPS, SUMS};
    use std::arch::x86_64::{
        _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_set1_epi8, _mm512_set1_ps,
        _mm512_setzero_si512,
    };

    pub fn float32() -> f64 {
        // SAFETY: this is compiled only for processors that have the instructions.
        unsafe {
            let (a, b) = (
                black_box(_mm512_set1_ps(0.5)),
                black_box(_mm512_set1_ps(0.25)),
            );
            let mut sums = [a; SUMS];
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, a, b);
                }
            }
            black_box(sums);
        }
        (2 * STEPS * SUMS * LANES) as f64
    }

    pub fn int8() -> f64 {
        // SAFETY: this is compiled only for processors that have the instructions.
        unsafe {
            let (a, b) = (
                black_box(_mm512_set1_epi8(3)),
                black_box(_mm512_set1_epi8(1)),
            );
            let mut sums = [_mm512_setzero_si512(); SUMS];
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, a, b);
                }
            }
            black_box(sums);
        }
        // Four products and four sums in each lane.
        (8 * STEPS * SUMS * LANES) as f64
    }
}

#[cfg(all(target_arch = "x86_64", target_feature = "avx512bf16"))]
fn bfloat16() -> f64 {
    use std::arch::x86_64::{_mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_set1_ps};
    // SAFETY: this is compiled only for processors that have the instructions.
    unsafe {
        let (a, b) = (
            black_box(_mm512_set1_ps(0.5)),
            black_box(_mm512_set1_ps(0.25)),
        );
        let (a, b) = (_mm512_cvtne2ps_pbh(a, a), _mm512_cvtne2ps_pbh(b, b));
        let mut sums = [_mm512_set1_ps(0.0); SUMS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }
    // Two products and two sums in each lane.
    (4 * STEPS * SUMS * LANES) as f64
}

#[cfg(not(all(target_arch = "x86_64", target_feature = "avx512bf16")))]
fn bfloat16() -> f64 {
    0.0
}

#[cfg(not(all(target_arch = "x86_64", target_feature = "avx512vnni")))]
mod kernels {
    use super::{black_box, LANES, STEPS, SUMS};

    pub fn float32() -> f64 {
        let (a, b) = (black_box([0.5f32; LANES]), black_box([0.25f32; LANES]));
        let mut sums = [[0f32; LANES]; SUMS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                for lane in 0..LANES {
                    sum[lane] = a[lane].mul_add(sum[lane], b[lane]);
                }
            }
        }
        black_box(sums);
        (2 * STEPS * SUMS * LANES) as f64
    }

    pub fn int8() -> f64 {
        0.0
    }
}

/// The best of several rounds: what other processes do to it only takes away.
fn peak(threads: usize, work: fn() -> f64) -> f64 {
    let mut best = 0f64;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let operations: f64 = std::thread::scope(|scope| {
            let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            running
                .into_iter()
                .map(|thread| thread.join().expect("invariant: the work does not panic"))
                .sum()
        });
        let elapsed = began.elapsed().max(Duration::from_nanos(1));
        best = best.max(operations / elapsed.as_secs_f64());
    }
    best
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let Some(threads) = threads.filter(|&count| count > 0) else {
        eprintln!("usage: peaks THREADS");
        std::process::exit(2);
    };
    let peaks =
        [kernels::float32, kernels::int8, bfloat16].map(|work| peak(threads, work).to_string());
    println!("{}", peaks.join(" "));
}
