//! Blocks run out: someone is computed again, nobody notices, and it ends.

use miniinfer_core::EngineConfig;

use crate::world::{World, ask, config, prompt};

/// KV for so many tokens.
fn room(tokens: u32) -> EngineConfig {
    EngineConfig {
        num_blocks: tokens / 4,
        max_model_len: tokens.min(128),
        ..config()
    }
}

/// After preemption only the prompt was computed again elsewhere, or a token appeared twice.
#[test]
fn preempted_requests_get_the_same_tokens() {
    for on in [false, true] {
        for tokens in [60, 80, 120] {
            let mut world = World::new(EngineConfig {
                enable_prefix_caching: on,
                ..room(tokens)
            });
            for kind in 0..3 {
                world.submit(ask(prompt(kind, 20), 40));
            }
            world.run(40 * 3 + 60);
            assert!(world.stats().counters.preemptions > 0);
            assert_eq!(world.stats().counters.generation_tokens, 120);
            world.assert_all_complete();
        }
    }
}

#[test]
fn one_request_survives_many_preemptions() {
    for on in [false, true] {
        let mut world = World::new(EngineConfig {
            enable_prefix_caching: on,
            max_num_seqs: 1,
            ..config()
        });
        let mut low = ask(prompt(1, 20), 30);
        low.priority = 1;
        let low = world.submit(low);
        for kind in 0..7 {
            world.steps(4);
            world.submit(ask(prompt(10 + kind, 5), 2));
        }
        world.run(60);
        assert_eq!(world.stats().counters.preemptions, 7);
        world.assert_complete(low);
        world.assert_all_complete();
    }
}

#[test]
fn two_requests_that_need_more_than_half_each_both_finish() {
    for on in [false, true] {
        for budget in [8, 32] {
            let mut world = World::new(EngineConfig {
                enable_prefix_caching: on,
                max_num_batched_tokens: budget,
                ..room(64)
            });
            for kind in 0..2 {
                world.submit(ask(prompt(kind, 24), 24));
            }
            let steps = world.run(2 * (24 / 8 + 24) + 20);
            assert!(steps > 0);
            // Doubling what must be free beside it bounds how often one goes through this.
            assert!(world.stats().counters.preemptions <= 4);
            world.assert_all_complete();
        }
    }
}

/// Prompts beyond the chunk budget, KV for little more than one: no step may pass with nobody running.
#[test]
fn long_prompts_do_not_thrash() {
    let mut world = World::new(EngineConfig {
        max_num_batched_tokens: 8,
        ..room(72)
    });
    for kind in 0..4 {
        world.submit(ask(prompt(kind, 60), 8));
    }
    let mut steps = 0;
    while world.sim.engine.has_work() {
        assert!(world.step() > 0);
        let stats = world.stats();
        assert!(
            stats.num_running > 0
                || stats.num_waiting == 0
                || world.spoke.iter().any(|(id, _)| world.has_ended(*id))
        );
        steps += 1;
        assert!(steps <= 4 * (60 / 8 + 1 + 8) + 10);
    }
    assert!(world.stats().counters.preemptions <= 4);
    world.step();
    world.assert_all_complete();
}

/// A victim before or behind the request at hand must not make the loop skip a third one.
#[test]
fn everyone_who_is_not_preempted_gets_a_token_in_the_step() {
    for worst in 0..4 {
        let mut world = World::new(room(64));
        let mut ids = Vec::new();
        for kind in 0..4u32 {
            let mut request = ask(prompt(kind, 12), 16);
            request.priority = i32::from(kind == worst);
            ids.push(world.submit(request));
        }
        let mut running = Vec::new();
        while world.stats().counters.preemptions == 0 {
            world.step();
            if world.stats().counters.preemptions == 0 {
                running.clone_from(&world.spoke);
            }
        }
        assert_eq!(running.len(), 4);
        let served: Vec<_> = world.spoke.iter().map(|(id, _)| *id).collect();
        let expected: Vec<_> = ids
            .iter()
            .copied()
            .filter(|&id| id != ids[worst as usize])
            .collect();
        assert_eq!(served, expected);
        world.run(100);
        world.assert_all_complete();
    }
}

#[test]
fn what_was_computed_is_found_again() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 1,
        ..config()
    });
    let mut low = ask(prompt(1, 60), 8);
    low.priority = 1;
    world.submit(low);
    world.steps(4);
    world.submit(ask(prompt(2, 5), 1));
    world.step();
    let before = world.stats().counters.prefill_tokens;
    world.step();
    assert!(world.stats().counters.prefill_tokens - before <= 4 + 1);
    world.run(20);
    world.assert_all_complete();
}
