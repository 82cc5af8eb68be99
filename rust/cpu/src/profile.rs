//! Where the time of a forward pass goes, for whoever asks.
//!
//! The clock belongs to the process and is off at first: then a part costs one look at a flag.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// What a forward pass consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What comes before a product: norm, activation, rounding of the inputs.
    Inputs,
    /// Products with weights, the head's included.
    Products,
    /// Head norms, rotary embedding, new keys and values.
    Heads,
    /// Attention.
    Attention,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Inputs, Self::Products, Self::Heads, Self::Attention];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inputs => "inputs",
            Self::Products => "products",
            Self::Heads => "heads",
            Self::Attention => "attention",
        }
    }
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static SPENT: [AtomicU64; Part::ALL.len()] = [const { AtomicU64::new(0) }; Part::ALL.len()];

/// Turns the clock on, at zero, or off.
pub fn set(on: bool) {
    if on {
        for spent in &SPENT {
            spent.store(0, Ordering::Relaxed);
        }
    }
    IS_ON.store(on, Ordering::Relaxed);
}

/// Seconds that each part has taken while the clock was on.
pub fn seconds() -> [(Part, f64); Part::ALL.len()] {
    Part::ALL.map(|part| {
        let spent = SPENT[part as usize].load(Ordering::Relaxed);
        (part, spent as f64 / 1e9)
    })
}

/// Runs a part.
pub fn clock<R>(part: Part, run: impl FnOnce() -> R) -> R {
    if !IS_ON.load(Ordering::Relaxed) {
        return run();
    }
    let start = Instant::now();
    let result = run();
    let spent = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    SPENT[part as usize].fetch_add(spent, Ordering::Relaxed);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn it_counts_while_it_is_on_and_starts_at_zero() {
        let spent = |part: Part| seconds()[part as usize].1;
        let nap = || std::thread::sleep(Duration::from_millis(2));
        clock(Part::Heads, nap);
        assert!(spent(Part::Heads) == 0.0);
        set(true);
        assert_eq!(clock(Part::Heads, || 7), 7);
        clock(Part::Heads, nap);
        assert!(spent(Part::Heads) >= 0.002 && spent(Part::Inputs) == 0.0);
        set(false);
        let before = spent(Part::Heads);
        clock(Part::Heads, nap);
        assert!(spent(Part::Heads).to_bits() == before.to_bits());
        set(true);
        assert!(spent(Part::Heads) == 0.0);
        set(false);
    }
}
