//! What the engine counts.

use super::world::{World, ask, config, prompt};

/// The decode time was declared and exported, and nothing ever observed it.
#[test]
fn every_time_of_a_request_is_observed_once() {
    let mut world = World::new(config());
    for (kind, length) in [(1, 3), (2, 40)] {
        world.submit(ask(prompt(kind, length), 5));
    }
    while world.sim.engine.has_work() {
        world.sim.step().expect("step");
    }
    let counters = world.sim.engine.stats().counters;
    for (name, histogram, count) in [
        ("queue", &counters.request_queue_time, 2),
        ("prefill", &counters.request_prefill_time, 2),
        ("decode", &counters.request_decode_time, 2),
        ("first token", &counters.time_to_first_token, 2),
        ("whole", &counters.e2e_request_latency, 2),
        ("between tokens", &counters.inter_token_latency, 8),
    ] {
        assert_eq!(histogram.count(), count, "{name}");
    }
}
