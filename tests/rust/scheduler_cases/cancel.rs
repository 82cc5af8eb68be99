//! The end of a request from outside, in every state and at every moment.

use miniinfer_core::request::{Arrival, RequestId};
use miniinfer_core::step::EndReason;
use miniinfer_core::{Command, EngineConfig};

use crate::world::{World, ask, config, prompt};

fn assert_aborted(world: &World, id: RequestId) {
    assert_eq!(world.got[&id].end, Some(EndReason::Abort), "request {id}");
    let got = &world.got[&id].tokens;
    assert_eq!(got[..], world.expected(id)[..got.len()]);
}

#[test]
fn a_waiting_request_is_cancelled_before_it_has_a_block() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 1,
        ..config()
    });
    let running = world.submit(ask(prompt(1, 6), 10));
    world.step();
    let waiting = world.submit(ask(prompt(2, 6), 10));
    world.step();
    world.cancel(waiting);
    world.step();
    assert_aborted(&world, waiting);
    let unseen = world.submit(ask(prompt(3, 6), 10));
    world.cancel(unseen);
    world.run(20);
    assert_aborted(&world, unseen);
    world.assert_complete(running);
    world.assert_empty();
}

#[test]
fn a_request_is_cancelled_at_any_step_of_its_life() {
    // Four chunks of prompt, twelve tokens, and after the end.
    for moment in 0..18 {
        let mut world = World::new(EngineConfig {
            num_blocks: 100,
            ..config()
        });
        let other = world.submit(ask(prompt(1, 6), 30));
        world.step();
        let id = world.submit(ask(prompt(2, 100), 12));
        world.steps(moment);
        let before = world.got[&id].end.clone();
        world.cancel(id);
        world.cancel(id);
        world.step();
        if before.is_none() {
            assert_aborted(&world, id);
        } else {
            world.assert_complete(id);
        }
        assert_eq!(world.stats().num_running, 1);
        world.cancel(id);
        world.run(40);
        world.assert_complete(other);
        world.assert_empty();
    }
}

#[test]
fn a_preempted_request_is_cancelled() {
    let mut world = World::new(EngineConfig {
        num_blocks: 32,
        ..config()
    });
    let mut low = ask(prompt(1, 40), 20);
    low.priority = 1;
    let low = world.submit(low);
    world.steps(4);
    let urgent = world.submit(ask(prompt(2, 100), 4));
    world.step();
    assert_eq!(world.stats().counters.preemptions, 1);
    world.cancel(low);
    world.run(20);
    assert_aborted(&world, low);
    world.assert_complete(urgent);
    world.assert_empty();
}

#[test]
fn paused_and_parked_requests_are_cancelled() {
    for parked in [false, true] {
        let mut world = World::new(EngineConfig {
            num_blocks: 32,
            ..config()
        });
        let id = world.submit(ask(prompt(1, 40), 20));
        world.steps(3);
        world.send(Command::Pause(id));
        if parked {
            world.submit(ask(prompt(2, 100), 4));
            world.run(20);
            assert_eq!(world.stats().counters.preemptions, 1);
        }
        world.cancel(id);
        world.step();
        assert_aborted(&world, id);
        world.assert_empty();
    }
}

#[test]
fn ids_that_mean_nothing_are_ignored() {
    let mut world = World::new(config());
    let id = world.submit(ask(prompt(1, 6), 3));
    for unknown in [id + 1, 1 << 40, u64::MAX] {
        world.send(Command::Cancel(unknown));
        world.send(Command::Stop(unknown));
        world.send(Command::Pause(unknown));
        world.send(Command::Resume(unknown));
        world.send(Command::Draft(unknown, vec![1]));
    }
    world.run(5);
    world.assert_all_complete();
}

/// The place of an ended request in the table is used again; its id is not.
#[test]
fn a_late_message_does_not_reach_a_successor() {
    let mut world = World::new(config());
    let first = world.submit(ask(prompt(1, 6), 3));
    world.run(5);
    let second = world.submit(ask(prompt(2, 6), 9));
    world.step();
    for late in [
        Command::Pause(first),
        Command::Draft(first, vec![1]),
        Command::Stop(first),
        Command::Cancel(first),
    ] {
        world.send(late);
    }
    world.run(10);
    world.assert_complete(second);
    world.assert_empty();
}

#[test]
fn the_first_of_several_ends_counts() {
    let mut world = World::new(config());
    let ids = [1, 2, 3].map(|kind| world.submit(ask(prompt(kind, 6), 30)));
    world.steps(2);
    world.sim.engine.apply([
        Command::Stop(ids[0]),
        Command::Cancel(ids[0]),
        Command::Cancel(ids[1]),
        Command::Stop(ids[1]),
        Command::Pause(ids[2]),
        Command::Pause(ids[2]),
        Command::Cancel(ids[2]),
        Command::Resume(ids[2]),
        Command::Cancel(ids[2]),
    ]);
    world.step();
    assert_eq!(world.got[&ids[0]].end, None, "stopped without a word");
    assert_aborted(&world, ids[1]);
    assert_aborted(&world, ids[2]);
    let counters = world.stats().counters;
    assert_eq!((counters.finished_stop, counters.finished_abort), (1, 2));
    world.assert_empty();
}

#[test]
fn added_and_cancelled_in_one_batch() {
    let mut world = World::new(config());
    let mut request = ask(prompt(1, 6), 3);
    request.n = 3;
    for id in 40..43 {
        world.know(id, &request);
    }
    world.sim.engine.apply([
        Command::Add {
            first: 40,
            request: Box::new(request),
            arrival: Arrival::default(),
        },
        Command::Cancel(40),
        Command::Cancel(42),
    ]);
    world.run(10);
    assert_aborted(&world, 40);
    assert_aborted(&world, 42);
    world.assert_complete(41);
    world.assert_empty();
}

#[test]
fn ten_thousand_waiting_requests_are_cancelled_one_by_one() {
    let mut world = World::new(config());
    let running = world.submit(ask(prompt(1, 6), 30));
    world.step();
    let ids: Vec<_> = (0..10_000)
        .map(|kind| {
            let mut request = ask(vec![kind], 3);
            request.tenant = format!("tenant {}", kind % 300).into();
            request.priority = (kind % 7) as i32;
            world.submit(request)
        })
        .collect();
    world
        .sim
        .engine
        .apply(ids.iter().map(|&id| Command::Cancel(id)));
    world.run(40);
    for id in ids {
        assert_aborted(&world, id);
    }
    world.assert_complete(running);
    world.assert_empty();
}
