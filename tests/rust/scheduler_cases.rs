//! Named cases: what broke others, and what broke here.

use miniinfer_core::EngineConfig;
use miniinfer_core::request::NewRequest;
use miniinfer_core::sim::Simulation;

const VOCAB: u32 = 97;

fn ask(prompt: &[u32], tenant: &str) -> NewRequest {
    let prompt = prompt.to_vec();
    NewRequest {
        prompt,
        n: 1,
        tenant: tenant.into(),
        ..NewRequest::default()
    }
}

/// Once admission closed, only tenants with active requests took turns, but turns without work that were
/// counted before went on counting: a tenant with a half-computed prompt was not served, and the step was
/// empty.
#[test]
fn a_half_computed_prompt_goes_on_although_nothing_more_is_admitted() {
    let config = EngineConfig {
        block_size: 1,
        num_blocks: 4,
        max_num_seqs: 1,
        max_num_batched_tokens: 2,
        max_model_len: 4,
        enable_prefix_caching: false,
        ..EngineConfig::default()
    };
    let mut sim = Simulation::new(config, vec![], VOCAB).expect("a valid configuration");
    sim.submit(ask(&[0], "a"));
    sim.submit(ask(&[0], "a"));
    sim.step().expect("step");
    sim.step().expect("step");
    sim.submit(ask(&[0, 1], "b"));
    sim.submit(ask(&[0], "c"));
    while sim.engine.has_work() {
        assert!(sim.step().expect("step") > 0);
    }
}
