//! Speculation: several tokens of a request in one step.

use miniinfer_core::request::RequestId;
use miniinfer_core::sim::continuation;
use miniinfer_core::step::EndReason;
use miniinfer_core::{Command, EngineConfig};

use crate::world::{VOCAB, World, ask, config, prompt, tagged};

fn drafting(max_draft_tokens: u32) -> EngineConfig {
    EngineConfig {
        max_draft_tokens,
        ..config()
    }
}

/// Drafts the next tokens of a request: `right` right ones, then wrong ones up to `count`.
fn draft(world: &mut World, id: RequestId, right: usize, count: usize) {
    let known = world.got[&id].tokens.len();
    let expected: Vec<u32> = continuation(&prompt(id as u32, 10), VOCAB)
        .skip(known)
        .take(count)
        .collect();
    let drafts = (0..count).map(|at| expected[at] ^ u32::from(at >= right));
    world.send(Command::Draft(id, drafts.collect()));
}

#[test]
fn what_is_right_is_kept_and_the_token_after_it() {
    // Prompts of ten tokens in blocks of four: drafts end before, at and after the border of a block.
    for count in 1..=6 {
        for right in 0..=count {
            let mut world = World::new(drafting(6));
            let id = world.submit(ask(prompt(0, 10), 40));
            world.step();
            for round in 0..3 {
                draft(&mut world, id, right, count);
                assert_eq!(world.step() as usize, 1 + count);
                assert_eq!(world.spoke, [(id, right as u32 + 1)], "round {round}");
                let len = 10 + world.got[&id].tokens.len() as u32;
                let used = world.stats().blocks_used;
                assert!((len - 1).div_ceil(4) <= used && used <= len.div_ceil(4));
            }
            let counters = world.stats().counters;
            assert_eq!(counters.draft_tokens as usize, 3 * count);
            assert_eq!(counters.accepted_tokens as usize, 3 * right);
            world.run(60);
            world.assert_all_complete();
        }
    }
}

#[test]
fn drafts_beyond_the_length_are_cut() {
    for max_tokens in 2..8 {
        let mut world = World::new(drafting(6));
        let id = world.submit(ask(prompt(0, 10), max_tokens));
        world.step();
        draft(&mut world, id, 6, 6);
        let scheduled = world.step();
        assert_eq!(scheduled, (max_tokens - 1).min(7));
        world.run(10);
        world.assert_all_complete();
    }
    let mut world = World::new(EngineConfig {
        max_model_len: 13,
        ..drafting(6)
    });
    let id = world.submit(ask(prompt(0, 10), 3));
    world.step();
    draft(&mut world, id, 6, 6);
    assert_eq!(world.step(), 2);
    world.run(10);
    world.assert_all_complete();
}

#[test]
fn a_stop_inside_the_drafts_ends_the_request_there() {
    let tokens: Vec<u32> = continuation(&prompt(0, 10), VOCAB).take(8).collect();
    for at in 1..6 {
        let eos = tokens[at];
        let first = tokens
            .iter()
            .position(|&token| token == eos)
            .expect("there");
        let mut world = World::with_eos(drafting(6), vec![eos]);
        let id = world.submit(ask(prompt(0, 10), 40));
        world.step();
        draft(&mut world, id, 6, 6);
        world.step();
        assert_eq!(world.got[&id].end, Some(EndReason::Eos(eos)));
        assert_eq!(world.got[&id].tokens, tokens[..=first]);
        world.assert_empty();
    }
}

/// Blocks were allotted for drafts that the budget then dropped, and stayed.
#[test]
fn drafts_beyond_the_budget_are_dropped_and_take_no_blocks() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 3,
        max_num_batched_tokens: 12,
        ..drafting(8)
    });
    for kind in 0..3 {
        world.submit(ask(prompt(kind, 10), 40));
    }
    while world.got.values().any(|got| got.tokens.is_empty()) {
        world.step();
    }
    for round in 0..4 {
        for id in 0..3 {
            draft(&mut world, id, 0, 8);
        }
        // 12 less 3: nine drafts are verified in all.
        assert_eq!(world.step(), 12, "round {round} {:?}", world.spoke);
        let lens = world.got.values().map(|got| 10 + got.tokens.len() as u32);
        let enough: u32 = lens.map(|len| len.div_ceil(4)).sum();
        assert!(world.stats().blocks_used <= enough, "round {round}");
    }
    world.run(100);
    world.assert_all_complete();
}

/// Drafts came before prefills: as long as they used up the budget, no prompt was computed.
#[test]
fn drafts_leave_a_chunk_to_prefills() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 3,
        max_num_batched_tokens: 16,
        ..drafting(8)
    });
    for kind in 0..2 {
        world.submit(ask(prompt(kind, 10), 100));
    }
    world.steps(3);
    let late = world.submit(ask(tagged(1, 20), 2));
    for _ in 0..5 {
        for id in 0..2 {
            draft(&mut world, id, 0, 8);
        }
        world.step();
        assert!(world.computed(1) >= 4);
    }
    assert_eq!(world.got[&late].tokens.len(), 1);
    world.run(200);
    world.assert_all_complete();
}

#[test]
fn drafts_give_way_before_anyone_is_preempted() {
    let mut world = World::new(EngineConfig {
        num_blocks: 8,
        max_model_len: 32,
        ..drafting(8)
    });
    for kind in 0..2 {
        world.submit(ask(prompt(kind, 10), 6));
    }
    while world.got.values().any(|got| got.tokens.is_empty()) {
        world.step();
    }
    for id in 0..2 {
        draft(&mut world, id, 5, 5);
    }
    world.run(20);
    assert_eq!(world.stats().counters.preemptions, 0);
    world.assert_all_complete();
}

#[test]
fn drafts_for_requests_that_do_not_decode_are_ignored() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 1,
        ..drafting(2)
    });
    let running = world.submit(ask(prompt(0, 40), 6));
    world.step();
    let waiting = world.submit(ask(prompt(1, 10), 6));
    for id in [running, waiting, 99] {
        world.send(Command::Draft(id, vec![1, 2, 3, 4, 5]));
    }
    world.run(40);
    assert_eq!(world.stats().counters.draft_tokens, 0);
    world.assert_all_complete();
}

#[test]
fn drafts_of_paused_requests_are_still_verified_after() {
    let mut world = World::new(drafting(3));
    let id = world.submit(ask(prompt(0, 10), 12));
    world.step();
    draft(&mut world, id, 1, 3);
    world.send(Command::Pause(id));
    assert_eq!(world.step(), 0);
    world.send(Command::Resume(id));
    world.step();
    assert_eq!(world.spoke, [(id, 2)]);
    world.run(20);
    world.assert_all_complete();
}
