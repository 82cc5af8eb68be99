//! Linear layers against plain sums in float64, for every format, set of instructions and odd shape.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Random, formats, ggml_rows};
use miniinfer_cpu::dense::{DenseMatrix, DenseType};
use miniinfer_cpu::error::PackError;
use miniinfer_cpu::format::Format;
use miniinfer_cpu::half::{bf16_to_f32, f32_to_bf16};
use miniinfer_cpu::isa::Isa;
use miniinfer_cpu::linear::{Before, Call, Linear, LinearError, Part};
use miniinfer_cpu::packed::PackedMatrix;
use miniinfer_cpu::pool::Pool;
use miniinfer_cpu::quantize::Bits;

/// The rows of a layer as it dequantises them.
fn weights(linear: &Linear) -> Vec<f32> {
    let mut all = vec![0.0; linear.rows() * linear.columns()];
    let indices: Vec<i32> = (0..linear.rows() as i32).collect();
    linear.gather(&indices, &mut all);
    all
}

/// What 8-bit inputs give: each group of 16 or 32 rounded to 127ths of its largest.
fn rounded(row: &[f32], group: usize) -> Vec<f64> {
    let mut result = Vec::new();
    for values in row.chunks(group) {
        let largest = values.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        for value in values {
            let code = if largest < 1e-36 {
                0.0
            } else {
                (value * (127.0 / largest)).round_ties_even()
            };
            result.push(f64::from(code) * f64::from(largest / 127.0));
        }
    }
    result
}

fn product(weights: &[f32], input: &[f64], outputs: usize) -> Vec<(f64, f64)> {
    let columns = input.len();
    (0..outputs)
        .map(|output| {
            let row = &weights[output * columns..][..columns];
            let products = row.iter().zip(input).map(|(w, x)| f64::from(*w) * x);
            products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
        })
        .collect()
}

fn run(linear: &Linear, isa: Isa, pool: &Pool, input: &[f32], rows: usize) -> Vec<f32> {
    // Poisoned, so that what is not written shows.
    let mut output = vec![f32::NAN; rows * linear.rows()];
    let mut call = Call {
        input,
        output: &mut output,
        before: Before::Nothing,
        accumulate: false,
    };
    linear.forward(isa, pool, &mut call);
    output
}

/// What kernels do to inputs before they multiply them.
#[derive(Clone, Copy)]
enum Rounding {
    /// To 8 bits, in groups of so many.
    Groups(usize),
    /// Nothing: products are float32.
    Exact,
    /// To bfloat16 where the instructions multiply it.
    Bf16,
}

impl Rounding {
    fn apply(self, isa: Isa, row: &[f32]) -> Vec<f64> {
        match self {
            Self::Groups(group) => rounded(row, group),
            Self::Bf16 if isa.multiplies_bf16() => row
                .iter()
                .map(|x| f64::from(bf16_to_f32(f32_to_bf16(*x))))
                .collect(),
            Self::Exact | Self::Bf16 => row.iter().map(|x| f64::from(*x)).collect(),
        }
    }
}

/// Compares with sums in float64 of the very codes: what remains is float32's rounding.
fn check(linear: &Linear, rounding: Rounding, pool: &Pool, input: &[f32], rows: usize) {
    let weights = weights(linear);
    for isa in Isa::available() {
        let output = run(linear, isa, pool, input, rows);
        for (row, output) in output.chunks(linear.rows()).enumerate() {
            let row = &input[row * linear.columns()..][..linear.columns()];
            let row = rounding.apply(isa, row);
            for (got, (sum, size)) in output.iter().zip(product(&weights, &row, linear.rows())) {
                // Sums pass through large terms of minima that cancel: hence not epsilon alone.
                let error = (f64::from(*got) - sum).abs();
                assert!(
                    error <= 4e-6 * size + 1e-30,
                    "{isa:?}: {got} instead of {sum} of {size}"
                );
            }
        }
    }
}

fn quantized(format: Format, data: &[u8], rows: usize, columns: usize, pool: &Pool) -> Linear {
    let matrix = PackedMatrix::from_ggml(format, data, rows, columns, pool).unwrap();
    Linear::new(vec![Part::Quantized(matrix)], None).unwrap()
}

#[test]
fn every_format_and_number_of_rows() {
    let pool = Pool::new(3);
    let mut random = Random::new(1);
    for format in formats() {
        let columns = format.block_elements() * 3;
        for outputs in [1, 15, 16, 17, 50] {
            let data = ggml_rows(format, outputs, columns, &mut random);
            let linear = quantized(format, &data, outputs, columns, &pool);
            for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33] {
                let input: Vec<f32> = (0..rows * columns).map(|_| random.normal()).collect();
                check(
                    &linear,
                    Rounding::Groups(format.layout().group()),
                    &pool,
                    &input,
                    rows,
                );
            }
        }
    }
}

#[test]
fn extreme_inputs() {
    let pool = Pool::new(2);
    let mut random = Random::new(2);
    for format in formats() {
        let columns = format.block_elements();
        let data = ggml_rows(format, 19, columns, &mut random);
        let linear = quantized(format, &data, 19, columns, &pool);
        for size in [0.0, f32::from_bits(1), 1e-37, 1e-20, 1e30] {
            let mut input: Vec<f32> = (0..2 * columns).map(|_| random.normal() * size).collect();
            check(
                &linear,
                Rounding::Groups(format.layout().group()),
                &pool,
                &input,
                2,
            );
            // One outlier among nothing.
            input.fill(0.0);
            input[columns / 2] = -size;
            check(
                &linear,
                Rounding::Groups(format.layout().group()),
                &pool,
                &input,
                2,
            );
        }
    }
}

#[test]
fn inputs_that_are_not_finite_spoil_their_own_row_alone() {
    let pool = Pool::new(2);
    let mut random = Random::new(3);
    let data = ggml_rows(Format::Q4_1, 20, 64, &mut random);
    let linear = quantized(Format::Q4_1, &data, 20, 64, &pool);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in [64, 79, 80, 127] {
            let mut input = vec![1.0; 3 * 64];
            input[place] = bad;
            for isa in Isa::available() {
                let output = run(&linear, isa, &pool, &input, 3);
                assert!(output[20..40].iter().all(|x| x.is_nan()));
                assert!(
                    output[..20]
                        .iter()
                        .chain(&output[40..])
                        .all(|x| x.is_finite())
                );
            }
        }
    }
}

#[test]
fn a_row_alone_and_in_a_batch_gives_the_same_bits() {
    let pools = [Pool::new(1), Pool::new(3)];
    let mut random = Random::new(4);
    for format in [Format::Q4_1, Format::Q8_0, Format::Q6K] {
        let columns = 768;
        let data = ggml_rows(format, 37, columns, &mut random);
        let linear = quantized(format, &data, 37, columns, &pools[0]);
        let input: Vec<f32> = (0..29 * columns).map(|_| random.normal()).collect();
        for isa in Isa::available() {
            let batch = run(&linear, isa, &pools[1], &input, 29);
            for row in 0..29 {
                let alone = run(
                    &linear,
                    isa,
                    &pools[0],
                    &input[row * columns..][..columns],
                    1,
                );
                assert_eq!(alone, batch[row * 37..][..37]);
            }
        }
    }
}

#[test]
fn norm_activation_bias_and_residual() {
    let pool = Pool::new(2);
    let mut random = Random::new(5);
    let (outputs, columns, rows) = (35, 96, 5);
    let data = ggml_rows(Format::Q8_0, outputs, columns, &mut random);
    let bias: Vec<f32> = (0..outputs).map(|_| random.normal()).collect();
    let part = || {
        let matrix = PackedMatrix::from_ggml(Format::Q8_0, &data, outputs, columns, &pool);
        vec![Part::Quantized(matrix.unwrap())]
    };
    let (plain, with_bias) = (
        Linear::new(part(), None).unwrap(),
        Linear::new(part(), Some(&bias)).unwrap(),
    );
    let weight: Vec<f32> = (0..columns).map(|_| random.normal()).collect();
    let before: Vec<f32> = (0..rows * outputs).map(|_| random.normal()).collect();
    let input: Vec<f32> = (0..2 * rows * columns).map(|_| random.normal()).collect();
    for isa in Isa::available() {
        for (before_kind, silu) in [
            (
                Before::RmsNorm {
                    weight: &weight,
                    epsilon: 1e-5,
                },
                false,
            ),
            (Before::SiluMul, true),
        ] {
            let width = if silu { 2 * columns } else { columns };
            let prepared: Vec<f32> = input[..rows * width]
                .chunks(width)
                .flat_map(|row| {
                    if silu {
                        silu_mul(row)
                    } else {
                        rms_norm(row, &weight)
                    }
                })
                .collect();
            let expected = run(&plain, isa, &pool, &prepared, rows);
            let mut output = before.clone();
            let mut call = Call {
                input: &input[..rows * width],
                output: &mut output,
                before: before_kind,
                accumulate: true,
            };
            with_bias.forward(isa, &pool, &mut call);
            for (index, got) in output.iter().enumerate() {
                let expected = expected[index] + bias[index % outputs] + before[index];
                // An input on the edge between two codes may fall to either side.
                assert!((got - expected).abs() < 0.1, "{got} instead of {expected}");
            }
            let off = output
                .iter()
                .zip(&expected)
                .enumerate()
                .filter(|(index, (got, plain))| {
                    let expected = *plain + bias[index % outputs] + before[*index];
                    (*got - expected).abs() > 1e-3
                });
            assert!(off.count() < rows * outputs / 5);
        }
    }
}

fn rms_norm(row: &[f32], weight: &[f32]) -> Vec<f32> {
    let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
    let factor = 1.0 / (squares / row.len() as f64 + 1e-5).sqrt();
    row.iter()
        .zip(weight)
        .map(|(x, w)| (f64::from(*x) * factor * f64::from(*w)) as f32)
        .collect()
}

fn silu_mul(row: &[f32]) -> Vec<f32> {
    let (gate, up) = row.split_at(row.len() / 2);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    gate.iter()
        .zip(up)
        .map(|(g, u)| (silu(f64::from(*g)) * f64::from(*u)) as f32)
        .collect()
}

#[test]
fn plain_weights_and_parts_of_several_kinds() {
    let pool = Pool::new(2);
    let mut random = Random::new(6);
    let columns = 64;
    let floats: Vec<f32> = (0..21 * columns).map(|_| random.normal()).collect();
    let f32_bytes: Vec<u8> = floats.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let bf16_bytes: Vec<u8> = floats
        .iter()
        .flat_map(|x| f32_to_bf16(*x).to_ne_bytes())
        .collect();
    let f32_part = || DenseMatrix::new(DenseType::F32, &f32_bytes, 21, columns, &pool).unwrap();
    let bf16_part = || DenseMatrix::new(DenseType::Bf16, &bf16_bytes, 21, columns, &pool).unwrap();
    for rows in [1, 2, 3, 5, 8, 11, 33] {
        let input: Vec<f32> = (0..rows * columns).map(|_| random.normal()).collect();
        for (part, rounding) in [(f32_part(), Rounding::Exact), (bf16_part(), Rounding::Bf16)] {
            let linear = Linear::new(vec![Part::Dense(part)], None).unwrap();
            check(&linear, rounding, &pool, &input, rows);
        }
        let data = ggml_rows(Format::Q4_0, 9, columns, &mut random);
        let packed = || PackedMatrix::from_ggml(Format::Q4_0, &data, 9, columns, &pool).unwrap();
        let (dense, small) = (Part::Dense(f32_part()), Part::Quantized(packed()));
        let mixed = Linear::new(vec![small, dense], None).unwrap();
        let alone = quantized(Format::Q4_0, &data, 9, columns, &pool);
        for isa in Isa::available() {
            let expected = run(&alone, isa, &pool, &input, rows);
            let output = run(&mixed, isa, &pool, &input, rows);
            for row in 0..rows {
                assert_eq!(output[row * 30..][..9], expected[row * 9..][..9]);
            }
            assert!(output.iter().all(|x| x.is_finite()));
        }
    }
}

/// A layer of random weights as float32 or bfloat16, and how its kernels round inputs.
fn plain(
    kind: DenseType,
    outputs: usize,
    columns: usize,
    random: &mut Random,
) -> (Linear, Rounding) {
    let floats = (0..outputs * columns).map(|_| random.normal());
    let (bytes, rounding): (Vec<u8>, _) = match kind {
        DenseType::F32 => (floats.flat_map(f32::to_ne_bytes).collect(), Rounding::Exact),
        DenseType::Bf16 => {
            let halves = floats.map(f32_to_bf16);
            (halves.flat_map(u16::to_ne_bytes).collect(), Rounding::Bf16)
        }
    };
    let matrix = DenseMatrix::new(kind, &bytes, outputs, columns, &Pool::new(1)).unwrap();
    let linear = Linear::new(vec![Part::Dense(matrix)], None).unwrap();
    (linear, rounding)
}

#[test]
fn plain_weights_of_every_odd_shape() {
    let pool = Pool::new(3);
    let mut random = Random::new(8);
    for kind in [DenseType::F32, DenseType::Bf16] {
        for columns in [1, 2, 3, 16, 65, 97] {
            for outputs in [1, 15, 16, 17, 32, 33, 50, 97] {
                let (linear, rounding) = plain(kind, outputs, columns, &mut random);
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31] {
                    let input: Vec<f32> = (0..rows * columns).map(|_| random.normal()).collect();
                    check(&linear, rounding, &pool, &input, rows);
                }
            }
        }
    }
}

#[test]
fn a_row_of_plain_weights_alone_and_in_a_batch_gives_the_same_bits() {
    let pools = [Pool::new(1), Pool::new(3)];
    let mut random = Random::new(9);
    let (outputs, columns) = (81, 515);
    for kind in [DenseType::F32, DenseType::Bf16] {
        let (linear, _) = plain(kind, outputs, columns, &mut random);
        let input: Vec<f32> = (0..37 * columns).map(|_| random.normal()).collect();
        for isa in Isa::available() {
            let rows = |first: usize, count: usize| {
                let input = &input[first * columns..][..count * columns];
                run(&linear, isa, &pools[count % 2], input, count)
            };
            let batch = rows(0, 37);
            for count in [1, 2, 7, 8, 9, 12, 20] {
                for first in (0..=37 - count).step_by(count) {
                    let part = rows(first, count);
                    assert_eq!(part, batch[first * outputs..][..count * outputs]);
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_spoils_its_own_row_of_a_plain_product_alone() {
    let pool = Pool::new(2);
    let mut random = Random::new(10);
    for kind in [DenseType::F32, DenseType::Bf16] {
        let (linear, _) = plain(kind, 35, 33, &mut random);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [33, 48, 65] {
                let mut input = vec![1.0; 3 * 33];
                input[place] = bad;
                for isa in Isa::available() {
                    let output = run(&linear, isa, &pool, &input, 3);
                    for (row, results) in output.chunks(35).enumerate() {
                        assert!(results.iter().all(|x| x.is_finite() == (row != 1)));
                    }
                }
            }
        }
    }
}

#[test]
fn floats_are_quantised_to_within_half_a_step() {
    let pool = Pool::new(2);
    let mut random = Random::new(7);
    for (bits, steps) in [(Bits::Four, 15.0), (Bits::Eight, 254.0)] {
        for size in [0.0, 1e-30, 1.0, 1e30] {
            let data: Vec<f32> = (0..18 * 96).map(|_| random.normal() * size).collect();
            let matrix = PackedMatrix::from_floats(bits, &data, 18, 96, &pool).unwrap();
            let linear = Linear::new(vec![Part::Quantized(matrix)], None).unwrap();
            for (group, got) in data.chunks(32).zip(weights(&linear).chunks(32)) {
                let low = group.iter().copied().fold(f32::INFINITY, f32::min);
                let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let range = if bits == Bits::Four {
                    high - low
                } else {
                    2.0 * high.max(-low)
                };
                for (value, got) in group.iter().zip(got) {
                    assert!(
                        (value - got).abs() <= range / steps * 0.5001,
                        "{value} {got}"
                    );
                }
            }
        }
    }
    let equal = vec![-3.25; 32];
    let matrix = PackedMatrix::from_floats(Bits::Four, &equal, 1, 32, &pool).unwrap();
    let mut row = vec![0.0; 32];
    matrix.row(0, &mut row);
    assert_eq!(row, equal);
}

#[test]
fn what_cannot_be_packed_is_named() {
    let pool = Pool::new(1);
    let error = PackedMatrix::from_ggml(Format::Q4_1, &[0; 40], 2, 48, &pool).err();
    assert_eq!(
        error,
        Some(PackError::Columns {
            columns: 48,
            group: 32
        })
    );
    let error = PackedMatrix::from_ggml(Format::Q4_1, &[0; 39], 2, 32, &pool).err();
    assert_eq!(
        error.map(|error| error.to_string()),
        Some("a matrix of 2 x 32 needs 40 bytes, got 39".to_owned())
    );
    let error = PackedMatrix::from_ggml(Format::Q4_1, &[], usize::MAX, 32, &pool).err();
    assert_eq!(
        error,
        Some(PackError::Shape {
            rows: usize::MAX,
            columns: 32
        })
    );
    let error = PackedMatrix::from_floats(Bits::Four, &[f32::NAN; 64], 2, 32, &pool).err();
    assert_eq!(error, Some(PackError::NotFinite { row: 0 }));
    assert_eq!(Format::from_ggml(10), Err(PackError::Format(10)));
    let part = || Part::Dense(DenseMatrix::new(DenseType::F32, &[0; 8], 1, 2, &pool).unwrap());
    assert_eq!(
        Linear::new(vec![], None).err(),
        Some(LinearError::Columns(vec![]))
    );
    let error = Linear::new(vec![part()], Some(&[1.0, 2.0])).err();
    assert_eq!(error, Some(LinearError::Bias { rows: 1, got: 2 }));
}
