//! What the prefix cache finds, and what it must not.

use miniinfer_core::block::ExtraKey;
use miniinfer_core::{Command, EngineConfig};

use crate::world::{World, ask, config, prompt};

fn blocks_of_16() -> EngineConfig {
    EngineConfig {
        block_size: 16,
        num_blocks: 64,
        max_num_batched_tokens: 64,
        ..config()
    }
}

/// The number of cached tokens of a prompt that is computed now.
fn cached(world: &mut World, prompt: Vec<u32>) -> u32 {
    let id = world.submit(ask(prompt, 3));
    world.run(10);
    world.assert_complete(id);
    world.got[&id].cached
}

/// A prompt that was cached whole left nothing to compute elsewhere, or broke the chain.
#[test]
fn a_prompt_that_is_cached_whole_computes_its_last_block() {
    let mut world = World::new(blocks_of_16());
    assert_eq!(cached(&mut world, prompt(1, 32)), 0);
    assert_eq!(cached(&mut world, prompt(1, 32)), 16);
    assert_eq!(cached(&mut world, prompt(1, 33)), 32);
    assert_eq!(cached(&mut world, prompt(1, 48)), 32);
    assert_eq!(cached(&mut world, prompt(1, 64)), 48);
    world.assert_all_complete();
}

#[test]
fn a_hit_ends_with_the_first_block_that_differs() {
    let mut world = World::new(config());
    cached(&mut world, prompt(1, 40));
    for at in [0, 3, 4, 15, 16, 39] {
        let mut other = prompt(1, 40);
        other[at] += 5_000;
        let expected = (at / 4 * 4).min(36) as u32;
        assert_eq!(cached(&mut world, other), expected);
    }
}

#[test]
fn generated_tokens_are_cached_too() {
    let mut world = World::new(config());
    let first = world.submit(ask(prompt(1, 10), 15));
    world.run(20);
    let mut next = prompt(1, 10);
    next.extend(&world.got[&first].tokens);
    next.extend(prompt(2, 3));
    // 24 of the 25 tokens have KV: the last was sampled and never computed.
    assert_eq!(cached(&mut world, next), 24);
    world.assert_all_complete();
}

#[test]
fn extra_keys_keep_prompts_apart_by_kind_and_value() {
    let mut world = World::new(config());
    let keys = [
        vec![],
        vec![ExtraKey::Salt("a".into())],
        vec![ExtraKey::Salt("b".into())],
        vec![ExtraKey::Adapter("a".into())],
        vec![ExtraKey::Adapter("a".into()), ExtraKey::Salt("a".into())],
    ];
    for round in 0..2 {
        for extra_keys in &keys {
            let mut request = ask(prompt(1, 20), 3);
            request.extra_keys.clone_from(extra_keys);
            let id = world.submit(request);
            world.run(10);
            assert_eq!(world.got[&id].cached, 16 * round, "{extra_keys:?}");
        }
    }
    world.assert_all_complete();
}

#[test]
fn equal_prompts_of_one_step_come_to_share_their_blocks() {
    let mut world = World::new(EngineConfig {
        num_blocks: 200,
        max_num_batched_tokens: 128,
        ..config()
    });
    for _ in 0..3 {
        world.submit(ask(prompt(1, 40), 8));
    }
    assert_eq!(world.step(), 120);
    assert_eq!(world.stats().blocks_used, 10);
    world.step();
    assert_eq!(world.stats().blocks_used, 13);
    // The outputs are equal as well: their blocks merge when they are full.
    world.steps(4);
    assert!(world.stats().blocks_used <= 14);
    world.run(10);
    world.assert_all_complete();
}

#[test]
fn a_reset_while_requests_run_forgets_and_disturbs_nothing() {
    for moment in 0..8 {
        let mut world = World::new(config());
        let decoding = world.submit(ask(prompt(1, 10), 12));
        let prefilling = world.submit(ask(prompt(2, 90), 4));
        world.steps(moment);
        world.send(Command::ResetPrefixCache);
        assert_eq!(world.stats().blocks_cached, 0);
        world.run(30);
        for id in [decoding, prefilling] {
            world.assert_complete(id);
        }
        // What began before the reset is never found after it.
        let again = world.submit(ask(prompt(2, 90), 4));
        world.step();
        if moment > 0 {
            world.until_token(again, 5);
            assert_eq!(world.got[&again].cached, 0, "moment {moment}");
        }
        world.run(10);
        assert_eq!(cached(&mut world, prompt(2, 90)), 88);
        world.assert_empty();
    }
}

#[test]
fn preemption_after_a_reset_computes_anew() {
    let mut world = World::new(EngineConfig {
        num_blocks: 32,
        ..config()
    });
    let mut low = ask(prompt(1, 40), 20);
    low.priority = 1;
    world.submit(low);
    world.steps(4);
    world.send(Command::ResetPrefixCache);
    world.submit(ask(prompt(2, 100), 4));
    world.run(60);
    assert_eq!(world.stats().counters.preemptions, 1);
    world.assert_all_complete();
}

#[test]
fn salts_that_nobody_uses_any_more_leave_nothing_behind() {
    let mut world = World::new(config());
    for salt in 0..300 {
        let mut request = ask(prompt(1, 20), 2);
        request.extra_keys = vec![ExtraKey::Salt(format!("{salt}"))];
        world.submit(request);
        world.run(5);
    }
    world.assert_all_complete();
    assert!(world.stats().blocks_cached <= 64);
}
