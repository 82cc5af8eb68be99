//! What a step holds.

use miniinfer_core::EngineConfig;

use crate::world::{World, ask, config, prompt, tagged};

#[test]
fn decodes_come_first_under_a_full_budget() {
    let mut world = World::new(EngineConfig {
        num_blocks: 200,
        max_num_batched_tokens: 16,
        ..config()
    });
    let mut decoding = Vec::new();
    for kind in 0..6 {
        decoding.push(world.submit(ask(prompt(kind, 4), 30)));
    }
    world.steps(3);
    for _ in 0..2 {
        world.submit(ask(tagged(1, 80), 1));
    }
    for _ in 0..8 {
        assert_eq!(world.step(), 16);
        assert_eq!(world.computed(1), 10);
        for id in &decoding {
            assert!(world.spoke.contains(&(*id, 1)));
        }
    }
    world.run(100);
    world.assert_all_complete();
}

#[test]
fn several_prefills_advance_by_what_they_still_lack() {
    let mut world = World::new(EngineConfig {
        num_blocks: 200,
        enable_prefix_caching: false,
        ..config()
    });
    let lens = [(1, 70), (2, 30), (3, 50)];
    for (tag, len) in lens {
        world.submit(ask(tagged(tag, len), 1));
    }
    let mut steps = Vec::new();
    for _ in 0..5 {
        assert!(world.step() > 0);
        steps.push([1, 2, 3].map(|tag| world.computed(tag)));
    }
    // 30, then 50, then 70, packed into steps of 32 without a gap.
    assert_eq!(
        steps,
        [[0, 30, 2], [0, 0, 32], [16, 0, 16], [32, 0, 0], [22, 0, 0]]
    );
    world.run(1);
    world.assert_all_complete();
}

/// A row without a sample was given token 0 elsewhere.
#[test]
fn prompts_under_way_get_no_token() {
    let mut world = World::new(EngineConfig {
        num_blocks: 200,
        ..config()
    });
    let short = world.submit(ask(prompt(1, 20), 6));
    world.step();
    let long = world.submit(ask(prompt(2, 90), 3));
    for step in 1..=3 {
        world.step();
        assert_eq!(world.got[&short].tokens.len(), 1 + step);
        assert_eq!(world.got[&long].tokens.len(), step / 3);
    }
    world.run(10);
    world.assert_all_complete();
}

#[test]
fn a_budget_of_one_token_a_row_is_enough() {
    for seqs in 1..5 {
        let mut world = World::new(EngineConfig {
            max_num_seqs: seqs,
            max_num_batched_tokens: seqs,
            ..config()
        });
        for kind in 0..7 {
            world.submit(ask(prompt(kind, 3 + 5 * kind), 4));
        }
        let total: u32 = (0..7).map(|kind| 3 + 5 * kind + 4).sum();
        world.run(total as usize);
        world.assert_all_complete();
    }
}

#[test]
fn nothing_to_do_is_no_step() {
    let mut world = World::new(config());
    assert_eq!((world.step(), world.stats().counters.steps), (0, 0));
    let id = world.submit(ask(prompt(1, 3), 2));
    world.run(2);
    world.assert_complete(id);
    assert_eq!((world.step(), world.stats().counters.steps), (0, 2));
}
