//! What a step costs: a running estimate that sizes prefill chunks to a target time.

use std::time::Duration;

/// Weight that an observation keeps at the next one: about fifty steps of memory.
const MEMORY: f64 = 0.98;

/// Exponentially weighted least squares of step time over tokens: `seconds = base + slope * tokens`.
#[derive(Default)]
pub(crate) struct StepCost {
    weight: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    product: f64,
}

impl StepCost {
    pub fn observe(&mut self, tokens: u32, elapsed: Duration) {
        let (x, y) = (f64::from(tokens), elapsed.as_secs_f64());
        self.weight = self.weight * MEMORY + 1.0;
        self.tokens = self.tokens * MEMORY + x;
        self.seconds = self.seconds * MEMORY + y;
        self.tokens_squared = self.tokens_squared * MEMORY + x * x;
        self.product = self.product * MEMORY + x * y;
    }

    /// Base and slope in seconds, once there is anything to go by. Steps of one size say nothing about
    /// the base: then all of the time is put down to the tokens.
    fn fit(&self) -> Option<(f64, f64)> {
        if self.weight == 0.0 || self.tokens == 0.0 {
            return None;
        }
        let spread = self.weight * self.tokens_squared - self.tokens * self.tokens;
        if spread > 1e-6 * self.tokens * self.tokens {
            let slope = (self.weight * self.product - self.tokens * self.seconds) / spread;
            let base = (self.seconds - slope * self.tokens) / self.weight;
            if slope > 0.0 && base >= 0.0 {
                return Some((base, slope));
            }
        }
        Some((0.0, self.seconds / self.tokens))
    }

    /// Tokens that a step may hold to end within `target`; `None` while nothing is known.
    pub fn tokens_within(&self, target: Duration) -> Option<u32> {
        let (base, slope) = self.fit()?;
        Some(((target.as_secs_f64() - base) / slope).clamp(0.0, f64::from(u32::MAX)) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_behind_the_observations_is_found() {
        let mut cost = StepCost::default();
        assert_eq!(cost.tokens_within(Duration::from_millis(5)), None);
        for step in 0..200u32 {
            let tokens = 1 + step % 64;
            cost.observe(tokens, Duration::from_micros(1000 + 20 * u64::from(tokens)));
        }
        let fits = cost
            .tokens_within(Duration::from_millis(5))
            .expect("observed");
        assert!((195..=205).contains(&fits), "{fits}");
    }

    #[test]
    fn steps_of_one_size_are_all_slope() {
        let mut cost = StepCost::default();
        cost.observe(10, Duration::from_millis(10));
        cost.observe(10, Duration::from_millis(10));
        assert_eq!(cost.tokens_within(Duration::from_millis(5)), Some(5));
    }
}
