//! Steps that fail, logits that are not finite, messages at the wrong moment.

use miniinfer_core::step::EndReason;
use miniinfer_core::{Command, Engine, EngineConfig};

use crate::world::{World, ask, config, prompt};

const NOT_FINITE: &str = "the model produced logits that are not finite";

fn poison(sample: usize) -> impl FnOnce(&mut Engine, &miniinfer_core::arrays::StepArrays<'_>) {
    move |_, arrays| arrays.sampled[sample].set(-1)
}

#[test]
fn a_failed_step_ends_the_requests_in_it_and_no_other() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 2,
        ..config()
    });
    let first = world.submit(ask(prompt(1, 8), 10));
    world.steps(3);
    let second = world.submit(ask(prompt(2, 60), 10));
    world.step();
    let waiting = world.submit(ask(prompt(3, 8), 10));
    world.fail_step("out of memory");
    for id in [first, second] {
        let end = world.got[&id].end.clone();
        assert_eq!(
            end,
            Some(EndReason::Error("out of memory".into())),
            "request {id}"
        );
    }
    let expected = world.expected(first);
    assert_eq!(
        world.got[&first].tokens,
        expected[..world.got[&first].tokens.len()]
    );
    world.run(50);
    world.assert_complete(waiting);
    world.assert_empty();
    // What was computed before is right, and was kept; what failed is not.
    let again = world.submit(ask(prompt(2, 60), 10));
    world.run(50);
    world.assert_complete(again);
    assert_eq!(world.got[&again].cached, 28);
}

#[test]
fn fail_all_ends_everything_in_every_state() {
    let mut world = World::new(EngineConfig {
        max_num_seqs: 3,
        ..config()
    });
    let decoding = world.submit(ask(prompt(1, 4), 30));
    let paused = world.submit(ask(prompt(2, 4), 30));
    world.steps(2);
    world.send(Command::Pause(paused));
    let mut choices = ask(prompt(3, 100), 4);
    choices.n = 3;
    let prefilling = world.submit(choices);
    let waiting = world.submit(ask(prompt(4, 4), 30));
    world.step();
    world.sim.engine.fail_all("gone");
    world.step();
    for id in [
        decoding,
        paused,
        prefilling,
        prefilling + 1,
        prefilling + 2,
        waiting,
    ] {
        let end = world.got[&id].end.clone();
        assert_eq!(end, Some(EndReason::Error("gone".into())), "request {id}");
    }
    world.assert_empty();
    let next = world.submit(ask(prompt(1, 4), 5));
    world.run(10);
    world.assert_complete(next);
}

#[test]
fn fail_all_between_plan_and_commit_leaves_nothing_to_commit() {
    let mut world = World::new(config());
    world.submit(ask(prompt(1, 4), 30));
    let mut arrays = miniinfer_core::arrays::OwnedArrays::new(world.sim.engine.config());
    let arrays = arrays.view();
    assert_eq!(world.sim.engine.plan(0, &arrays), Ok(4));
    world.sim.engine.fail_all("gone");
    assert!(world.sim.engine.commit(0, &arrays).is_err());
    world.step();
    world.assert_empty();
}

/// What a forward pass with such an outcome put into the cache was offered to later requests, which would
/// then fail as well.
#[test]
fn logits_that_are_not_finite_end_one_request_and_leave_nothing_in_the_cache() {
    let mut world = World::new(config());
    let other = world.submit(ask(prompt(1, 20), 10));
    world.step();
    // Chunks of 31, 31 and 8 beside the other's decodes.
    let bad = world.submit(ask(prompt(2, 70), 10));
    world.steps(2);
    world.step_with(poison(1));
    assert_eq!(
        world.got[&bad].end,
        Some(EndReason::Error(NOT_FINITE.into()))
    );
    assert!(world.got[&bad].tokens.is_empty());
    let again = world.submit(ask(prompt(2, 70), 10));
    world.run(50);
    assert_eq!(world.got[&again].cached, 0);
    world.assert_complete(other);
    world.assert_complete(again);
    world.assert_empty();
}

#[test]
fn a_decode_with_such_logits_keeps_what_came_before() {
    let mut world = World::new(config());
    let bad = world.submit(ask(prompt(1, 10), 20));
    world.steps(4);
    world.step_with(poison(0));
    assert_eq!(
        world.got[&bad].end,
        Some(EndReason::Error(NOT_FINITE.into()))
    );
    assert_eq!(world.got[&bad].tokens, world.expected(bad)[..4]);
    world.assert_empty();
}

/// Those that others hold served them well.
#[test]
fn blocks_that_a_failed_request_shares_are_kept() {
    let mut world = World::new(config());
    let good = world.submit(ask(prompt(1, 20), 12));
    world.step();
    let bad = world.submit(ask(prompt(1, 20), 12));
    world.step_with(poison(1));
    assert!(matches!(world.got[&bad].end, Some(EndReason::Error(_))));
    let next = world.submit(ask(prompt(1, 20), 12));
    world.run(30);
    assert_eq!(world.got[&next].cached, 16);
    world.assert_complete(good);
    world.assert_complete(next);
    world.assert_empty();
}

/// A request that ended between plan and commit left its place in the table, perhaps to a newcomer, which
/// then got the other's tokens.
#[test]
fn messages_between_plan_and_commit_wait_for_the_commit() {
    let mut world = World::new(config());
    let first = world.submit(ask(prompt(1, 6), 8));
    let second = world.submit(ask(prompt(2, 6), 8));
    world.steps(2);
    let newcomer = ask(prompt(3, 6), 8);
    let request = Box::new(newcomer.clone());
    world.step_with(|engine, _| {
        engine.apply([
            Command::Cancel(first),
            Command::Pause(second),
            Command::Add {
                first: 77,
                request,
                arrival: miniinfer_core::request::Arrival::default(),
            },
        ]);
        engine.check().expect("consistent");
    });
    assert_eq!(world.got[&first].tokens.len(), 3);
    world.know(77, &newcomer);
    world.step();
    assert_eq!(world.got[&first].end, Some(EndReason::Abort));
    assert_eq!(world.got[&second].tokens.len(), 3);
    world.send(Command::Resume(second));
    world.run(30);
    world.assert_complete(second);
    world.assert_complete(77);
    world.assert_empty();
}

#[test]
fn plan_and_commit_out_of_turn_are_errors_that_change_nothing() {
    let mut world = World::new(config());
    let id = world.submit(ask(prompt(1, 6), 8));
    let mut arrays = miniinfer_core::arrays::OwnedArrays::new(world.sim.engine.config());
    let arrays = arrays.view();
    assert!(world.sim.engine.commit(0, &arrays).is_err());
    assert!(world.sim.engine.fail_step(1, "no").is_err());
    assert!(world.sim.engine.plan(2, &arrays).is_err());
    world.sim.engine.check().expect("consistent");
    world.run(20);
    world.assert_complete(id);
}

#[test]
fn sizes_that_would_overflow_are_refused() {
    for config in [
        EngineConfig {
            max_draft_tokens: u32::MAX,
            ..config()
        },
        EngineConfig {
            max_draft_tokens: 1 << 29,
            ..config()
        },
        EngineConfig {
            max_logprobs: 1 << 29,
            ..config()
        },
    ] {
        let error = Engine::new(config, vec![]).err().expect("too large");
        assert!(error.to_string().contains("2147483647"), "{error}");
    }
}
