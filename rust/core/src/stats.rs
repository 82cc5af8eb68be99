//! Counters and histograms, kept where the events happen and read as a snapshot.

use std::time::Duration;

/// Upper bounds, in seconds, of the buckets of the time histograms. The last bucket has no bound.
pub const TIME_BUCKETS: [f64; 21] = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0, 120.0, 480.0,
];

/// Counts by bucket, with the sum of what was observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Observations per bucket (not cumulative); one more than there are bounds.
    pub counts: [u64; TIME_BUCKETS.len() + 1],
    /// Sum of the observations in seconds.
    pub sum: f64,
}

impl Histogram {
    pub(crate) fn observe(&mut self, elapsed: Duration) {
        self.observe_many(elapsed, 1);
    }

    pub(crate) fn observe_many(&mut self, elapsed: Duration, times: u64) {
        let seconds = elapsed.as_secs_f64();
        let bucket = TIME_BUCKETS.partition_point(|&bound| bound < seconds);
        self.counts[bucket] += times;
        self.sum += seconds * times as f64;
    }

    /// Number of observations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// Upper bounds of the buckets of [`StepTokens`]. The last bucket has no bound.
pub const STEP_TOKEN_BUCKETS: [f64; 15] = [
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    32768.0, 65536.0,
];

/// Steps by the number of their tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTokens {
    /// Steps per bucket (not cumulative); one more than there are bounds.
    pub counts: [u64; STEP_TOKEN_BUCKETS.len() + 1],
    /// Tokens of all steps.
    pub sum: u64,
}

impl StepTokens {
    pub(crate) fn observe(&mut self, tokens: u32) {
        let bucket = STEP_TOKEN_BUCKETS.partition_point(|&bound| bound < f64::from(tokens));
        self.counts[bucket] += 1;
        self.sum += u64::from(tokens);
    }
}

/// Totals since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    /// Steps planned with at least one token.
    pub steps: u64,
    /// Those by their tokens, drafts included.
    pub step_tokens: StepTokens,
    /// Requests that entered.
    pub requests: u64,
    /// Prompt tokens of admitted requests, the cached ones included.
    pub prompt_tokens: u64,
    /// Prompt tokens whose KV was computed; recomputation after preemption counts again.
    pub prefill_tokens: u64,
    /// Tokens sampled and kept.
    pub generation_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Requests ended by an end-of-sequence or stop token, or by a stop string.
    pub finished_stop: u64,
    /// Requests ended by their length.
    pub finished_length: u64,
    /// Requests cancelled.
    pub finished_abort: u64,
    /// Requests ended by a failure.
    pub finished_error: u64,
    /// Those of them whose logits were not finite.
    pub corrupted: u64,
    /// Times that drafts of a request were verified.
    pub drafts: u64,
    /// Draft tokens offered for verification.
    pub draft_tokens: u64,
    /// Draft tokens accepted.
    pub accepted_tokens: u64,
    /// Submission to first token.
    pub time_to_first_token: Histogram,
    /// Between tokens of one request.
    pub inter_token_latency: Histogram,
    /// Submission to the end.
    pub e2e_request_latency: Histogram,
    /// Submission to first admission.
    pub request_queue_time: Histogram,
    /// Admission to first token.
    pub request_prefill_time: Histogram,
    /// First token to the end.
    pub request_decode_time: Histogram,
    /// First admission to the end.
    pub request_inference_time: Histogram,
    /// Decode time for each token after the first, of requests that have more than one.
    pub request_time_per_output_token: Histogram,
}

/// Counters and the state of the moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Totals.
    pub counters: Counters,
    /// Requests with a row.
    pub num_running: usize,
    /// Requests without one.
    pub num_waiting: usize,
    /// Those of them that no room would help: choices that follow their request's first, and requests
    /// that lost their blocks while their reader was behind.
    pub num_deferred: usize,
    /// Decoding requests whose reader is behind.
    pub num_paused: usize,
    /// Blocks in use.
    pub blocks_used: u32,
    /// Free blocks whose contents can still be hit.
    pub blocks_cached: u32,
    /// Blocks in the pool.
    pub blocks_total: u32,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Cached blocks whose contents were given up for new ones.
    pub prefix_evictions: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_lands_in_the_first_bucket_that_holds_it() {
        let mut steps = StepTokens::default();
        for tokens in [1, 2, 8, 9, 100_000] {
            steps.observe(tokens);
        }
        assert_eq!(steps.counts[..3], [1, 2, 1]);
        assert_eq!(steps.counts[STEP_TOKEN_BUCKETS.len()], 1);
        assert_eq!(steps.sum, 100_020);
    }

    #[test]
    fn an_observation_lands_in_the_first_bucket_that_holds_it() {
        let mut histogram = Histogram::default();
        histogram.observe(Duration::from_millis(1));
        histogram.observe(Duration::from_micros(1001));
        histogram.observe(Duration::from_secs(1000));
        assert_eq!(histogram.counts[..2], [1, 1]);
        assert_eq!(histogram.counts[TIME_BUCKETS.len()], 1);
        assert_eq!(histogram.count(), 3);
    }
}
