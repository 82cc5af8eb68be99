//! Every kind of vector does what plain code does.
#![expect(unsafe_code, reason = "vectors are called for")]

use super::*;
use crate::isa::Isa;
use portable::Portable;

#[inline(always)]
unsafe fn many_and_one<V: Vector>(rows: &[[f32; LANES]; LANES], out: &mut [[f32; LANES]; 2]) {
    // SAFETY: the caller enabled the instructions.
    unsafe {
        let mut vectors = [V::splat(0.0); LANES];
        for (vector, row) in vectors.iter_mut().zip(rows) {
            *vector = V::load(row.as_ptr());
        }
        out[0] = V::sums(vectors).to_array();
        for (sum, vector) in out[1].iter_mut().zip(vectors) {
            *sum = vector.sum();
        }
    }
}

#[test]
fn sums_of_many_are_the_sums_of_each_bit_for_bit() {
    let number = |place: usize| ((place * 7919 % 1009) as f32 - 500.0) / 7.0;
    let rows = std::array::from_fn(|row| std::array::from_fn(|lane| number(row * LANES + lane)));
    for isa in Isa::available() {
        let mut out = [[0.0; LANES]; 2];
        let run = dispatch!(
            isa,
            many_and_one(rows: &[[f32; LANES]; LANES], out: &mut [[f32; LANES]; 2])
        );
        // SAFETY: the instructions of `isa` are there.
        unsafe { run(&rows, &mut out) };
        assert_eq!(
            out[0].map(f32::to_bits),
            out[1].map(f32::to_bits),
            "{isa:?}"
        );
    }
}

/// Numbers that kinds of instructions could see differently, and many others.
fn numbers(seed: u32) -> [f32; LANES] {
    const SPECIAL: [f32; 12] = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        f32::MIN_POSITIVE,
        65519.996,
        65520.0,
        -6.103_515_6e-5,
        5.960_464_5e-8,
        2.5,
        -87.3,
    ];
    std::array::from_fn(|lane| {
        let mixed = (seed * 16 + lane as u32 + 1).wrapping_mul(0x9e37_79b9);
        let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b);
        let mixed = mixed ^ mixed >> 13;
        match mixed % 4 {
            0 => SPECIAL[(mixed >> 8) as usize % SPECIAL.len()],
            1 => f32::from_bits(mixed),
            // Within what 16 bits hold, subnormals among them.
            2 => f32::from_bits(mixed % (48 << 23) + (96 << 23)),
            _ => (mixed >> 8) as f32 / 1e5 - 80.0,
        }
    })
}

fn is_same(one: f32, other: f32) -> bool {
    one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan()
}

/// Whether lanes agree, and where not.
fn compare(isa: Isa, what: &str, got: &[f32], expected: &[f32]) {
    for (lane, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            is_same(*got, *expected),
            "{isa:?}, {what}, lane {lane}: {got} instead of {expected}"
        );
    }
}

const OPERATIONS: [&str; 13] = [
    "add",
    "sub",
    "mul",
    "div",
    "max",
    "min",
    "abs",
    "round",
    "zero_below",
    "keep",
    "f16",
    "bf16",
    "above",
];

#[inline(always)]
unsafe fn operations<V: Vector>(
    one: &[f32; LANES],
    other: &[f32; LANES],
    out: &mut [[f32; LANES]; OPERATIONS.len()],
) {
    // SAFETY: the caller enabled the instructions.
    unsafe {
        let (a, b) = (V::load(one.as_ptr()), V::load(other.as_ptr()));
        let mut halves = [[0_u16; LANES]; 2];
        a.store_f16(halves[0].as_mut_ptr());
        a.store_bf16(halves[1].as_mut_ptr());
        let above = V::splat(f32::from(a.above(other[3])));
        let results = [
            a.add(b),
            a.sub(b),
            a.mul(b),
            a.div(b),
            a.max(b),
            a.min(b),
            a.abs(),
            a.round(),
            a.zero_below(b, one[5]),
            a.keep(one[7].to_bits() as u16),
            V::load_f16(halves[0].as_ptr()),
            V::load_bf16(halves[1].as_ptr()),
            above,
        ];
        for (out, result) in out.iter_mut().zip(results) {
            *out = result.to_array();
        }
    }
}

#[test]
fn operations_are_those_of_plain_code() {
    for isa in Isa::available() {
        let run = dispatch!(
            isa,
            operations(
                one: &[f32; LANES],
                other: &[f32; LANES],
                out: &mut [[f32; LANES]; OPERATIONS.len()],
            )
        );
        for seed in 0..2000 {
            let (one, other) = (numbers(seed), numbers(seed + 10_000));
            let mut results = [[[0.0; LANES]; OPERATIONS.len()]; 2];
            // SAFETY: the instructions of `isa` are there, and plain code needs none.
            unsafe {
                run(&one, &other, &mut results[0]);
                operations::<Portable>(&one, &other, &mut results[1]);
            }
            for (index, what) in OPERATIONS.iter().enumerate() {
                compare(isa, what, &results[0][index], &results[1][index]);
            }
        }
    }
}

#[inline(always)]
unsafe fn from_bits<V: Vector>(bits: &[u16; 2 * LANES], out: &mut [[f32; LANES]; 4]) {
    // SAFETY: the caller enabled the instructions.
    unsafe {
        out[0] = V::load_f16(bits.as_ptr()).to_array();
        out[1] = V::load_bf16(bits.as_ptr()).to_array();
        let pairs = V::load_bf16_pairs(bits.as_ptr());
        out[2] = pairs.0.to_array();
        out[3] = pairs.1.to_array();
    }
}

#[test]
fn every_number_of_16_bits_is_read_alike() {
    for isa in Isa::available() {
        let run = dispatch!(
            isa,
            from_bits(bits: &[u16; 2 * LANES], out: &mut [[f32; LANES]; 4])
        );
        for first in (0..=u16::MAX).step_by(2 * LANES) {
            let bits = std::array::from_fn(|lane| first + lane as u16);
            let mut results = [[[0.0; LANES]; 4]; 2];
            // SAFETY: the instructions of `isa` are there, and plain code needs none.
            unsafe {
                run(&bits, &mut results[0]);
                from_bits::<Portable>(&bits, &mut results[1]);
            }
            let names = ["load_f16", "load_bf16", "first of pairs", "second of pairs"];
            for (index, what) in names.into_iter().enumerate() {
                compare(isa, what, &results[0][index], &results[1][index]);
            }
        }
    }
}

#[inline(always)]
unsafe fn integers<V: Vector>(first: f32, out: &mut [[f32; LANES]; 2], ends: &mut [f32; 2]) {
    let lanes: [f32; LANES] = std::array::from_fn(|lane| first + lane as f32);
    // SAFETY: the caller enabled the instructions.
    unsafe {
        let vector = V::load(lanes.as_ptr());
        let mut bytes = [0_i8; LANES];
        vector.store_i8(bytes.as_mut_ptr());
        out[0] = V::load_i8(bytes.as_ptr()).to_array();
        out[1] = V::splat(126.0).min(vector).exp2_integer().to_array();
        *ends = [vector.largest(), vector.sum()];
    }
}

#[test]
fn integers_become_bytes_and_powers() {
    for isa in Isa::available() {
        let run = dispatch!(
            isa,
            integers(first: f32, out: &mut [[f32; LANES]; 2], ends: &mut [f32; 2])
        );
        for first in (-128..=112).step_by(8) {
            let (first, mut out, mut ends) = (first as f32, [[0.0; LANES]; 2], [0.0; 2]);
            // SAFETY: the instructions of `isa` are there.
            unsafe { run(first, &mut out, &mut ends) };
            for (lane, (byte, power)) in out[0].into_iter().zip(out[1]).enumerate() {
                let number = first + lane as f32;
                assert!(is_same(byte, number), "{isa:?}: {byte}, not {number}");
                if number >= -126.0 {
                    assert!(
                        is_same(power, number.min(126.0).exp2()),
                        "{isa:?}: 2^{number}"
                    );
                }
            }
            let expected = [first + 15.0, 16.0 * first + 120.0];
            compare(isa, "largest and sum", &ends, &expected);
        }
    }
}

#[inline(always)]
unsafe fn exponentials<V: Vector>(powers: &[f32; LANES], out: &mut [f32; LANES]) {
    // SAFETY: the caller enabled the instructions.
    unsafe { V::load(powers.as_ptr()).exp().store(out.as_mut_ptr()) };
}

#[test]
fn exponentials_are_as_exact_as_promised() {
    for isa in Isa::available() {
        let run = dispatch!(isa, exponentials(powers: &[f32; LANES], out: &mut [f32; LANES]));
        let check = |powers: [f32; LANES], is_right: &dyn Fn(f32, f32) -> bool| {
            let mut out = [0.0; LANES];
            // SAFETY: the instructions of `isa` are there.
            unsafe { run(&powers, &mut out) };
            for (power, got) in powers.into_iter().zip(out) {
                assert!(is_right(power, got), "{isa:?}: e^{power} is not {got}");
            }
        };
        for step in 0..1000 {
            let powers = std::array::from_fn(|lane| {
                (step * LANES + lane) as f32 * (175.5 / 16_000.0) - 87.25
            });
            check(powers, &|power, got| {
                let exact = f64::from(power).exp();
                (f64::from(got) - exact).abs() <= 2e-7 * exact
            });
        }
        check([-87.4; LANES], &|_, got| got == 0.0);
        check([f32::NEG_INFINITY; LANES], &|_, got| got == 0.0);
        check([f32::INFINITY; LANES], &|_, got| {
            got.is_finite() && got > 1e38
        });
        check([f32::NAN; LANES], &|_, got| got.is_nan());
    }
}
