//! More urgent requests go first, and take rows and blocks from less urgent ones.

use miniinfer_core::EngineConfig;
use miniinfer_core::request::NewRequest;

use crate::world::{World, ask, config, prompt};

fn at(priority: i32, request: NewRequest) -> NewRequest {
    NewRequest {
        priority,
        ..request
    }
}

fn rows(max_num_seqs: u32) -> EngineConfig {
    EngineConfig {
        max_num_seqs,
        ..config()
    }
}

#[test]
fn an_urgent_request_takes_the_row_of_a_less_urgent_one() {
    let mut world = World::new(rows(2));
    let first = world.submit(at(1, ask(prompt(1, 8), 20)));
    let latest = world.submit(at(1, ask(prompt(2, 8), 20)));
    world.steps(4);
    let urgent = world.submit(at(0, ask(prompt(3, 8), 5)));
    world.step();
    assert_eq!(world.got[&urgent].tokens.len(), 1);
    assert_eq!(world.stats().counters.preemptions, 1);
    let before = world.got[&latest].tokens.len();
    world.steps(4);
    assert_eq!(
        world.got[&latest].tokens.len(),
        before,
        "the latest gave way"
    );
    assert!(world.got[&first].tokens.len() > before);
    world.run(100);
    world.assert_all_complete();
}

#[test]
fn neither_an_equal_nor_a_less_urgent_request_takes_anything() {
    for priority in [0, 1] {
        let mut world = World::new(EngineConfig {
            num_blocks: 10,
            max_model_len: 40,
            ..rows(2)
        });
        world.submit(at(0, ask(prompt(1, 8), 12)));
        world.submit(at(0, ask(prompt(2, 8), 12)));
        world.steps(2);
        let later = world.submit(at(priority, ask(prompt(3, 30), 2)));
        world.run(100);
        assert_eq!(world.stats().counters.preemptions, 0);
        world.assert_complete(later);
        world.assert_all_complete();
    }
}

/// When the decodes of less urgent requests use the whole budget, nothing was left to admit with.
#[test]
fn an_urgent_request_starts_although_decodes_use_the_whole_budget() {
    let mut world = World::new(EngineConfig {
        max_num_batched_tokens: 2,
        ..rows(2)
    });
    world.submit(at(1, ask(prompt(1, 2), 40)));
    world.submit(at(1, ask(prompt(2, 2), 40)));
    world.steps(4);
    let urgent = world.submit(at(0, ask(prompt(3, 3), 2)));
    let steps = world.until_token(urgent, 3);
    assert!(steps <= 3);
    world.run(200);
    world.assert_all_complete();
}

/// A row or blocks were taken from less urgent requests although the urgent one did not fit even then.
#[test]
fn nothing_is_preempted_in_vain() {
    let mut world = World::new(EngineConfig {
        num_blocks: 16,
        max_model_len: 64,
        ..rows(2)
    });
    // Ten blocks of the sixteen at the end, as urgent as the newcomer.
    let peer = world.submit(at(0, ask(prompt(1, 20), 20)));
    let victim = world.submit(at(1, ask(prompt(2, 4), 12)));
    world.steps(2);
    let urgent = world.submit(at(0, ask(prompt(3, 44), 2)));
    while !world.has_ended(peer) && !world.has_ended(victim) {
        world.step();
    }
    assert_eq!(world.stats().counters.preemptions, 0);
    world.run(100);
    world.assert_complete(urgent);
    world.assert_all_complete();
}

/// Blocks that victims share with each other or with others were counted as if each came free.
#[test]
fn shared_blocks_of_victims_are_counted_once() {
    let mut world = World::new(EngineConfig {
        block_size: 16,
        num_blocks: 16,
        max_num_batched_tokens: 128,
        max_model_len: 256,
        ..rows(5)
    });
    let peer = world.submit(at(0, ask(prompt(1, 80), 20)));
    world.step();
    // Five blocks each, four of them shared: seven in all, and four are free.
    let common = prompt(2, 65);
    for _ in 0..3 {
        world.submit(at(1, ask(common.clone(), 12)));
        world.step();
    }
    let urgent = world.submit(at(0, ask(prompt(3, 176), 2)));
    while !world.has_ended(peer) {
        world.step();
        assert_eq!(world.stats().counters.preemptions, 0);
    }
    world.run(100);
    world.assert_complete(urgent);
    world.assert_all_complete();
}

/// The urgent request hits blocks that only its victims hold: they are no gain once those are gone.
#[test]
fn blocks_shared_with_victims_do_not_count_twice() {
    let mut world = World::new(EngineConfig {
        num_blocks: 12,
        max_model_len: 48,
        ..rows(4)
    });
    let peer = world.submit(at(0, ask(prompt(1, 16), 8)));
    world.step();
    // Five blocks, four of which the urgent request would hit.
    world.submit(at(1, ask(prompt(2, 17), 3)));
    world.step();
    let mut longer = prompt(2, 16);
    longer.extend(prompt(3, 16));
    let urgent = world.submit(at(0, ask(longer, 2)));
    while !world.has_ended(peer) {
        world.step();
        assert!(world.stats().counters.preemptions <= 1);
    }
    world.run(100);
    world.assert_complete(urgent);
    world.assert_all_complete();
}

#[test]
fn the_least_urgent_and_then_the_latest_gives_way() {
    let mut world = World::new(rows(4));
    let mut ids = Vec::new();
    for priority in [2, 1, 2, 1] {
        ids.push(world.submit(at(priority, ask(prompt(ids.len() as u32, 4), 20))));
    }
    world.steps(3);
    let mut order = Vec::new();
    for urgent in 0..4 {
        world.submit(at(0, ask(prompt(10 + urgent, 4), 30)));
        world.steps(2);
        let silent = ids
            .iter()
            .filter(|&id| world.spoke.iter().all(|(s, _)| s != id));
        let gone: Vec<_> = silent.copied().filter(|id| !order.contains(id)).collect();
        order.extend(gone);
    }
    assert_eq!(order, [ids[2], ids[0], ids[3], ids[1]]);
    world.run(200);
    world.assert_all_complete();
}

#[test]
fn classes_without_number_cost_no_order() {
    let mut world = World::new(rows(2));
    for priority in (0..200).rev() {
        world.submit(at(priority * 1_000_003, ask(prompt(priority as u32, 3), 2)));
    }
    let mut last = None;
    while world.sim.engine.has_work() {
        world.step();
        for &(id, _) in &world.spoke {
            // Ids count up from the least urgent: they finish from the last to the first, two at a time.
            assert!(
                last.is_none_or(|last| id <= last + 1),
                "{id} after {last:?}"
            );
            last = Some(id);
        }
    }
    world.step();
    world.assert_all_complete();
}
