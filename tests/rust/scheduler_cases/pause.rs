//! Requests whose reader is behind.

use miniinfer_core::{Command, EngineConfig};

use crate::world::{World, ask, config, prompt};

fn tight() -> EngineConfig {
    EngineConfig {
        num_blocks: 16,
        max_model_len: 64,
        max_num_seqs: 2,
        ..config()
    }
}

#[test]
fn a_paused_request_keeps_its_blocks_and_gets_nothing() {
    let mut world = World::new(config());
    let id = world.submit(ask(prompt(1, 10), 10));
    let other = world.submit(ask(prompt(2, 10), 20));
    world.steps(3);
    world.send(Command::Pause(id));
    let (before, used) = (world.got[&id].tokens.len(), world.stats().blocks_used);
    world.steps(5);
    assert_eq!(world.got[&id].tokens.len(), before);
    assert!(world.stats().blocks_used >= used);
    assert_eq!(world.stats().num_paused, 1);
    world.send(Command::Resume(id));
    world.step();
    assert_eq!(world.got[&id].tokens.len(), before + 1);
    world.run(30);
    for id in [id, other] {
        world.assert_complete(id);
    }
    world.assert_empty();
}

#[test]
fn nothing_but_paused_requests_is_no_work() {
    let mut world = World::new(config());
    let id = world.submit(ask(prompt(1, 10), 10));
    world.steps(2);
    world.send(Command::Pause(id));
    assert!(!world.sim.engine.has_work());
    assert_eq!(world.step(), 0);
    world.send(Command::Resume(id));
    world.run(10);
    world.assert_all_complete();
}

#[test]
fn a_pause_at_any_step_costs_no_token() {
    for moment in 0..12 {
        for twice in [false, true] {
            let mut world = World::new(config());
            let id = world.submit(ask(prompt(1, 70), 8));
            world.steps(moment);
            world.send(Command::Pause(id));
            if twice {
                world.send(Command::Pause(id));
            }
            world.steps(5);
            world.send(Command::Resume(id));
            world.send(Command::Resume(id));
            world.run(12);
            world.assert_all_complete();
        }
    }
}

/// They hold a row and blocks for nobody: whoever needs those takes them, of any priority.
#[test]
fn a_paused_request_gives_way_to_anyone() {
    for (blocks, rows) in [(64, 1), (16, 4)] {
        let mut world = World::new(EngineConfig {
            num_blocks: blocks,
            max_num_seqs: rows,
            ..tight()
        });
        let mut important = ask(prompt(1, 20), 10);
        important.priority = -5;
        let important = world.submit(important);
        world.steps(2);
        world.send(Command::Pause(important));
        let other = world.submit(ask(prompt(2, 50), 3));
        world.run(8);
        world.assert_complete(other);
        assert_eq!(world.stats().counters.preemptions, 1);
        world.send(Command::Resume(important));
        world.run(20);
        world.assert_all_complete();
    }
}

#[test]
fn waiting_requests_are_told_apart_by_whether_room_would_help_them() {
    let waiting = |world: &World| (world.stats().num_waiting, world.stats().num_deferred);
    // Two choices follow their first, which takes the only row; another request would take one too.
    let mut world = World::new(EngineConfig {
        max_num_seqs: 1,
        ..config()
    });
    let mut choices = ask(prompt(1, 70), 3);
    choices.n = 3;
    world.submit(choices);
    world.submit(ask(prompt(2, 70), 3));
    world.step();
    assert_eq!(waiting(&world), (3, 2));
    world.run(60);
    assert_eq!(waiting(&world), (0, 0));
    // Preempted while its reader is behind, a request wants no room until that changes.
    let mut world = World::new(tight());
    let slow = world.submit(ask(prompt(3, 8), 24));
    world.steps(2);
    world.send(Command::Pause(slow));
    let big = world.submit(ask(prompt(4, 60), 1));
    world.run(5);
    world.assert_complete(big);
    assert_eq!(waiting(&world), (1, 1));
    world.send(Command::Resume(slow));
    world.run(40);
    assert_eq!(waiting(&world), (0, 0));
    world.assert_all_complete();
}

#[test]
fn paused_requests_give_way_before_running_ones() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 3,
        ..tight()
    });
    let paused = world.submit(ask(prompt(1, 20), 20));
    let ids = [2, 3].map(|kind| world.submit(ask(prompt(kind, 10), 20)));
    world.steps(3);
    world.send(Command::Pause(paused));
    while !ids.iter().all(|&id| world.has_ended(id)) {
        world.step();
        assert!(world.stats().counters.preemptions <= 1);
    }
    world.send(Command::Resume(paused));
    world.run(30);
    world.assert_all_complete();
}

/// Each time it was preempted while its reader was behind, a request had to wait for more free blocks.
#[test]
fn a_slow_reader_is_not_punished_twice() {
    let mut world = World::new(tight());
    let slow = world.submit(ask(prompt(1, 8), 24));
    world.steps(2);
    for kind in 10..16 {
        world.send(Command::Pause(slow));
        let big = world.submit(ask(prompt(kind, 60), 1));
        world.run(5);
        world.assert_complete(big);
        let before = world.got[&slow].tokens.len();
        let other = world.submit(ask(prompt(kind + 10, 4), 40));
        world.steps(2);
        world.send(Command::Resume(slow));
        world.steps(3);
        assert!(world.got[&slow].tokens.len() > before + 1, "round {kind}");
        world.cancel(other);
    }
    world.run(40);
    world.assert_complete(slow);
    world.assert_empty();
}

#[test]
fn a_request_that_is_resumed_while_others_stream_in_is_served() {
    let mut world = World::new(tight());
    let id = world.submit(ask(prompt(1, 20), 10));
    world.steps(2);
    world.send(Command::Pause(id));
    let mut kind = 10;
    let mut more = |world: &mut World| {
        world.submit(ask(prompt(kind, 30), 4));
        kind += 1;
    };
    for _ in 0..10 {
        more(&mut world);
        world.step();
    }
    assert!(world.stats().counters.preemptions > 0);
    world.send(Command::Resume(id));
    let mut steps = 0;
    while !world.has_ended(id) {
        more(&mut world);
        world.step();
        steps += 1;
        // Two rows of at most six steps, its own recomputation, ten tokens.
        assert!(steps <= 6 + 2 + 10, "not served");
    }
    world.run(500);
    world.assert_all_complete();
}

#[test]
fn paused_before_its_first_token_it_computes_the_prompt_and_stops() {
    let mut world = World::new(config());
    let id = world.submit(ask(prompt(1, 70), 8));
    world.step();
    world.send(Command::Pause(id));
    world.run(5);
    assert_eq!(world.got[&id].tokens.len(), 1);
    world.send(Command::Resume(id));
    world.run(10);
    world.assert_all_complete();
}
