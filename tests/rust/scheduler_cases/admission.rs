//! Who is admitted when, and what may pass by.

use miniinfer_core::EngineConfig;
use miniinfer_core::request::RequestId;

use crate::world::{World, ask, config, prompt, tagged};

/// Two running requests of 6 blocks each out of 16, for 40 steps, so that 50 tokens do not fit.
fn crowded(config: EngineConfig) -> World {
    let mut world = World::new(EngineConfig {
        num_blocks: 16,
        max_model_len: 64,
        ..config
    });
    for kind in 0..2 {
        world.submit(ask(prompt(900 + kind, 4), 20));
    }
    world.steps(2);
    world
}

#[test]
fn small_requests_pass_a_big_one_that_does_not_fit() {
    let mut world = crowded(config());
    let big = world.submit(ask(prompt(1, 50), 2));
    let small = world.submit(ask(prompt(2, 6), 2));
    world.steps(2);
    assert!(world.has_ended(small) && world.got[&big].tokens.is_empty());
    world.run(60);
    world.assert_all_complete();
}

#[test]
fn a_step_passes_over_so_many_and_no_more() {
    for max_skips in 0..6 {
        let mut world = crowded(EngineConfig {
            max_skips,
            ..config()
        });
        for kind in 0..3 {
            world.submit(ask(prompt(kind, 50), 2));
        }
        let mut behind = ask(prompt(6, 4), 1);
        behind.priority = 1;
        let behind = world.submit(behind);
        world.step();
        assert_eq!(world.has_ended(behind), max_skips > 3, "{max_skips} skips");
        world.run(100);
        world.assert_all_complete();
    }
}

/// A tenant that had several turns in one step was counted as passed over in each.
#[test]
fn a_request_is_passed_over_once_a_step() {
    let mut world = crowded(EngineConfig {
        max_skips: 2,
        max_num_batched_tokens: 64,
        ..config()
    });
    let mut big = ask(prompt(1, 50), 2);
    big.tenant = "big".into();
    world.submit(big);
    let mut ids: Vec<RequestId> = Vec::new();
    for kind in 0..4 {
        let mut small = ask(prompt(10 + kind, 3), 1);
        small.tenant = format!("small {}", kind % 2).into();
        ids.push(world.submit(small));
    }
    world.step();
    assert!(ids.iter().all(|&id| world.has_ended(id)));
}

#[test]
fn after_so_many_steps_nothing_is_admitted_before_it() {
    let mut world = crowded(EngineConfig {
        max_skipped_steps: 3,
        ..config()
    });
    let big = world.submit(ask(prompt(1, 50), 2));
    let mut passed = Vec::new();
    let mut kind = 10;
    while world.got[&big].tokens.is_empty() {
        let small = world.submit(ask(prompt(kind, 4), 1));
        kind += 1;
        world.step();
        if world.has_ended(small) {
            passed.push(small);
        }
        assert!(kind < 60, "still waiting");
    }
    assert_eq!(passed.len(), 3);
    world.run(100);
    world.assert_all_complete();
}

/// Waiting for a row is no being passed over: nobody goes ahead.
#[test]
fn waiting_for_a_row_does_not_age() {
    let mut world = World::new(EngineConfig {
        num_blocks: 32,
        max_num_seqs: 2,
        max_skipped_steps: 2,
        ..config()
    });
    let first = world.submit(ask(prompt(1, 4), 10));
    world.submit(ask(prompt(2, 4), 60));
    world.step();
    let big = world.submit(ask(prompt(3, 110), 2));
    while !world.has_ended(first) {
        world.step();
    }
    let small = world.submit(ask(prompt(4, 4), 1));
    world.steps(2);
    assert!(world.got[&big].tokens.is_empty() && world.has_ended(small));
    world.run(100);
    world.assert_all_complete();
}

/// A request was looked at again only every sixteenth step unless as many blocks were free as it had needed,
/// the reserve for the decodes of then included.
#[test]
fn a_request_is_admitted_in_the_step_in_which_it_fits() {
    for offset in 0..16 {
        let mut world = World::new(EngineConfig {
            num_blocks: 24,
            max_model_len: 96,
            ..config()
        });
        world.steps(offset);
        let mut ids = Vec::new();
        for kind in 0..6 {
            ids.push(world.submit(ask(prompt(kind, 5), 60)));
        }
        world.steps(2 + offset);
        let big = world.submit(ask(prompt(9, 44), 2));
        world.steps(2);
        assert!(world.got[&big].tokens.is_empty());
        // Eleven blocks and one beside the decode that is left: there with room to spare.
        for id in &ids[1..] {
            world.cancel(*id);
        }
        assert!(world.stats().blocks_used <= 6);
        world.step();
        assert_eq!(world.stats().num_running, 2, "offset {offset}");
        world.run(100);
    }
}

/// Nothing that comes after its tenant was given as many tokens as it lacks goes before it: under full load,
/// that is no more than its length.
#[test]
fn a_long_prompt_is_overtaken_by_no_more_than_what_comes_while_its_length_is_computed() {
    for arrivals in [3, 4, 9] {
        let mut world = World::new(EngineConfig {
            num_blocks: 1000,
            max_num_seqs: 64,
            max_num_batched_tokens: 64,
            max_model_len: 800,
            enable_prefix_caching: false,
            ..config()
        });
        let long = world.submit(ask(tagged(1, 600), 1));
        let (mut given, mut came, mut overtaken) = (0, 0, 0);
        while world.got[&long].tokens.is_empty() {
            for _ in 0..arrivals {
                world.submit(ask(tagged(2, 20), 1));
            }
            came += if given < 600 { arrivals * 20 } else { 0 };
            given += world.step();
            overtaken += world.computed(2);
            assert!(overtaken <= came + 64, "{overtaken} of {came} tokens");
        }
        assert!(arrivals > 3 || came <= 600 + 64);
        world.run(2000);
        world.assert_all_complete();
    }
}

/// Slots of requests that ended without running stayed counted elsewhere.
#[test]
fn rows_of_aborted_requests_are_free_at_once() {
    let mut world = World::new(EngineConfig {
        num_blocks: 40,
        max_num_seqs: 4,
        ..config()
    });
    let mut ids = Vec::new();
    // Decoding, then preempted by the urgent ones; prefilling; waiting.
    for kind in 0..4 {
        let mut low = ask(prompt(kind, 6), 30);
        low.priority = 1;
        ids.push(world.submit(low));
    }
    world.steps(3);
    for kind in 10..14 {
        ids.push(world.submit(ask(prompt(kind, 60), 30)));
    }
    world.steps(1);
    for kind in 20..24 {
        ids.push(world.submit(ask(prompt(kind, 6), 30)));
    }
    world.step();
    assert!(world.stats().counters.preemptions > 0);
    for id in ids {
        world.cancel(id);
    }
    world.assert_empty();
    let next = world.submit(ask(prompt(30, 6), 3));
    world.step();
    assert_eq!(world.got[&next].tokens.len(), 1);
    world.run(5);
    world.assert_complete(next);
}
