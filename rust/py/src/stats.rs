//! Counters as a dict.

use std::sync::atomic::Ordering;

use miniinfer_core::stall::StallCounters;
use miniinfer_core::stats::{Histogram, STEP_TOKEN_BUCKETS, Stats, StepTokens, TIME_BUCKETS};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Counters and gauges by name; histograms are (bounds, counts, sum), times in seconds.
pub fn as_dict<'py>(
    py: Python<'py>,
    stats: &Stats,
    stall: &StallCounters,
) -> PyResult<Bound<'py, PyDict>> {
    let c = &stats.counters;
    let dict = PyDict::new(py);
    for (name, value) in [
        ("num_requests_running", stats.num_running as u64),
        ("num_requests_waiting", stats.num_waiting as u64),
        ("num_requests_deferred", stats.num_deferred as u64),
        ("num_requests_paused", stats.num_paused as u64),
        ("kv_blocks_used", u64::from(stats.blocks_used)),
        ("kv_blocks_cached", u64::from(stats.blocks_cached)),
        ("kv_blocks_total", u64::from(stats.blocks_total)),
        ("prefix_cache_queries", stats.prefix_queries),
        ("prefix_cache_hits", stats.prefix_hits),
        ("prefix_cache_evictions", stats.prefix_evictions),
        ("num_steps", c.steps),
        ("num_requests", c.requests),
        ("num_preemptions", c.preemptions),
        ("prompt_tokens", c.prompt_tokens),
        ("prefill_tokens", c.prefill_tokens),
        ("generation_tokens", c.generation_tokens),
        ("spec_decode_num_drafts", c.drafts),
        ("spec_decode_num_draft_tokens", c.draft_tokens),
        ("spec_decode_num_accepted_tokens", c.accepted_tokens),
        ("finished_stop", c.finished_stop),
        ("finished_length", c.finished_length),
        ("finished_abort", c.finished_abort),
        ("finished_error", c.finished_error),
        ("corrupted_requests", c.corrupted),
        ("deltas_merged", stall.merged.load(Ordering::Relaxed)),
        ("readers_paused", stall.paused.load(Ordering::Relaxed)),
        ("readers_cancelled", stall.cancelled.load(Ordering::Relaxed)),
    ] {
        dict.set_item(name, value)?;
    }
    for (name, histogram) in [
        ("time_to_first_token_seconds", &c.time_to_first_token),
        ("inter_token_latency_seconds", &c.inter_token_latency),
        ("e2e_request_latency_seconds", &c.e2e_request_latency),
        ("request_queue_time_seconds", &c.request_queue_time),
        ("request_prefill_time_seconds", &c.request_prefill_time),
        ("request_decode_time_seconds", &c.request_decode_time),
        ("request_inference_time_seconds", &c.request_inference_time),
        (
            "request_time_per_output_token_seconds",
            &c.request_time_per_output_token,
        ),
    ] {
        let Histogram { counts, sum } = histogram;
        dict.set_item(name, (TIME_BUCKETS.as_slice(), counts.as_slice(), sum))?;
    }
    let StepTokens { counts, sum } = &c.step_tokens;
    let steps = (STEP_TOKEN_BUCKETS.as_slice(), counts.as_slice(), sum);
    dict.set_item("iteration_tokens_total", steps)?;
    Ok(dict)
}
