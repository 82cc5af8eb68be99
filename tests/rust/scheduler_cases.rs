//! Named cases: what broke others, and what broke here.

use miniinfer_core::EngineConfig;
use miniinfer_core::request::{NewRequest, SamplingSpec};
use miniinfer_core::sim::Simulation;

fn ask(prompt: &[u32], tenant: &str) -> NewRequest {
    NewRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingSpec::default(),
        n: 1,
        tenant: tenant.into(),
        ..NewRequest::default()
    }
}

#[test]
fn dbg() {
    let config = EngineConfig {
        block_size: 1,
        num_blocks: 4,
        max_num_seqs: 1,
        max_num_batched_tokens: 2,
        max_model_len: 4,
        enable_prefix_caching: false,
        max_skips: 3,
        max_skipped_steps: 5,
        ..EngineConfig::default()
    };
    let mut sim = Simulation::new(config, vec![], 23).unwrap();
    sim.submit(ask(&[0], "0"));
    sim.submit(ask(&[0], "0"));
    sim.step().unwrap();
    sim.step().unwrap();
    sim.submit(ask(&[0, 1], "2"));
    sim.submit(ask(&[0], "1"));
    for _ in 0..20 {
        let n = sim.step().unwrap();
        println!(
            "{n} {:?} work {} {:?}",
            sim.output.entries,
            sim.engine.has_work(),
            sim.engine.stats().num_running
        );
    }
}
