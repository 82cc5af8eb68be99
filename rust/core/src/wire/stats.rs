//! Counters on the wire: one list, histograms as lists within it.

use super::error::WireError;
use super::pack::Packer;
use super::unpack::Unpacker;
use crate::stats::{Counters, Histogram, Stats, StepTokens};

/// Numbers before the histograms.
const NUMBERS: usize = 24;
/// Those of times, and the one of steps' tokens.
const HISTOGRAMS: usize = 9;

/// Appends the counters.
pub fn pack_stats(stats: &Stats, into: &mut Vec<u8>) {
    let mut packer = Packer(into);
    packer.array(NUMBERS + HISTOGRAMS);
    let c = &stats.counters;
    let numbers: [u64; NUMBERS] = [
        c.steps,
        c.requests,
        c.prompt_tokens,
        c.prefill_tokens,
        c.generation_tokens,
        c.preemptions,
        c.finished_stop,
        c.finished_length,
        c.finished_abort,
        c.finished_error,
        c.corrupted,
        c.drafts,
        c.draft_tokens,
        c.accepted_tokens,
        stats.num_running as u64,
        stats.num_waiting as u64,
        stats.num_deferred as u64,
        stats.num_paused as u64,
        stats.blocks_used.into(),
        stats.blocks_cached.into(),
        stats.blocks_total.into(),
        stats.prefix_queries,
        stats.prefix_hits,
        stats.prefix_evictions,
    ];
    for number in numbers {
        packer.uint(number);
    }
    for histogram in [
        &c.time_to_first_token,
        &c.inter_token_latency,
        &c.e2e_request_latency,
        &c.request_queue_time,
        &c.request_prefill_time,
        &c.request_decode_time,
        &c.request_inference_time,
        &c.request_time_per_output_token,
    ] {
        packer.array(histogram.counts.len() + 1);
        packer.f64(histogram.sum);
        for count in histogram.counts {
            packer.uint(count);
        }
    }
    packer.array(c.step_tokens.counts.len() + 1);
    packer.uint(c.step_tokens.sum);
    for count in c.step_tokens.counts {
        packer.uint(count);
    }
}

/// Reads counters.
pub fn unpack_stats(bytes: &[u8]) -> Result<Stats, WireError> {
    let mut unpacker = Unpacker::new(bytes);
    unpacker.fields("counters", NUMBERS + HISTOGRAMS)?;
    let u = &mut unpacker;
    let mut counters = Counters {
        steps: u.uint()?,
        requests: u.uint()?,
        prompt_tokens: u.uint()?,
        prefill_tokens: u.uint()?,
        generation_tokens: u.uint()?,
        preemptions: u.uint()?,
        finished_stop: u.uint()?,
        finished_length: u.uint()?,
        finished_abort: u.uint()?,
        finished_error: u.uint()?,
        corrupted: u.uint()?,
        drafts: u.uint()?,
        draft_tokens: u.uint()?,
        accepted_tokens: u.uint()?,
        ..Counters::default()
    };
    let mut stats = Stats {
        num_running: u.u32("num_running")? as usize,
        num_waiting: u.u32("num_waiting")? as usize,
        num_deferred: u.u32("num_deferred")? as usize,
        num_paused: u.u32("num_paused")? as usize,
        blocks_used: u.u32("blocks_used")?,
        blocks_cached: u.u32("blocks_cached")?,
        blocks_total: u.u32("blocks_total")?,
        prefix_queries: u.uint()?,
        prefix_hits: u.uint()?,
        prefix_evictions: u.uint()?,
        counters: Counters::default(),
    };
    counters.time_to_first_token = histogram(u)?;
    counters.inter_token_latency = histogram(u)?;
    counters.e2e_request_latency = histogram(u)?;
    counters.request_queue_time = histogram(u)?;
    counters.request_prefill_time = histogram(u)?;
    counters.request_decode_time = histogram(u)?;
    counters.request_inference_time = histogram(u)?;
    counters.request_time_per_output_token = histogram(u)?;
    counters.step_tokens = step_tokens(u)?;
    stats.counters = counters;
    unpacker.end()?;
    Ok(stats)
}

fn step_tokens(unpacker: &mut Unpacker<'_>) -> Result<StepTokens, WireError> {
    let mut steps = StepTokens::default();
    unpacker.fields("buckets", steps.counts.len() + 1)?;
    steps.sum = unpacker.uint()?;
    for count in &mut steps.counts {
        *count = unpacker.uint()?;
    }
    Ok(steps)
}

fn histogram(unpacker: &mut Unpacker<'_>) -> Result<Histogram, WireError> {
    let mut histogram = Histogram::default();
    unpacker.fields("buckets", histogram.counts.len() + 1)?;
    histogram.sum = unpacker.f64()?;
    for count in &mut histogram.counts {
        *count = unpacker.uint()?;
    }
    Ok(histogram)
}
