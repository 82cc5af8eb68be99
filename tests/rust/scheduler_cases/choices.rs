//! Several choices of one request.

use miniinfer_core::request::NewRequest;
use miniinfer_core::{Command, EngineConfig};

use crate::world::{World, ask, config, prompt, tagged};

fn choices(n: u32, request: NewRequest) -> NewRequest {
    NewRequest { n, ..request }
}

fn caching(enable_prefix_caching: bool) -> EngineConfig {
    EngineConfig {
        enable_prefix_caching,
        ..config()
    }
}

#[test]
fn more_choices_than_rows_all_finish() {
    for n in [5, 13] {
        for on in [false, true] {
            let mut world = World::new(EngineConfig {
                max_num_seqs: 4,
                ..caching(on)
            });
            world.submit(choices(n, ask(prompt(1, 10), 8)));
            world.run(80);
            world.assert_all_complete();
        }
    }
    let mut world = World::new(EngineConfig {
        max_num_seqs: 4,
        ..config()
    });
    for kind in 0..3 {
        world.submit(choices(3, ask(prompt(kind, 10), 8)));
    }
    world.run(80);
    world.assert_all_complete();
}

#[test]
fn choices_share_the_blocks_of_their_prompt() {
    for on in [false, true] {
        let mut world = World::new(caching(on));
        // Ten full blocks of prompt and one begun, shared by six.
        world.submit(choices(6, ask(prompt(1, 42), 6)));
        let mut most = 0;
        while world.sim.engine.has_work() {
            world.step();
            most = most.max(world.stats().blocks_used);
        }
        world.step();
        assert!(most <= 10 + 6 * 2, "{most} blocks with the cache {on}");
        assert!(world.stats().counters.prefill_tokens <= 42 + 5 * 2);
        world.assert_all_complete();
    }
}

/// The choices that waited for a leader that went before the prompt was computed all began to compute it.
#[test]
fn one_choice_at_a_time_computes_the_prompt_whoever_goes() {
    for on in [false, true] {
        let mut world = World::new(caching(on));
        let first = world.submit(choices(5, ask(tagged(1, 100), 4)));
        world.step();
        let mut computed = world.computed(1);
        world.cancel(first);
        // The next leader was cancelled while it followed.
        world.cancel(first + 1);
        world.step();
        computed += world.computed(1);
        world.cancel(first + 2);
        for _ in 0..40 {
            if world.step() > 0 {
                computed += world.computed(1);
            }
        }
        let limit = 3 * 100 + 4;
        assert!(
            computed <= limit,
            "{computed} prompt tokens computed, cache {on}"
        );
        for id in [first + 3, first + 4] {
            world.assert_complete(id);
        }
        world.assert_empty();
    }
}

#[test]
fn choices_survive_the_end_of_their_leader_at_each_step() {
    for on in [false, true] {
        for moment in 0..12 {
            let mut world = World::new(caching(on));
            let first = world.submit(choices(3, ask(prompt(1, 70), 6)));
            world.steps(moment);
            world.cancel(first);
            world.run(60);
            for id in [first + 1, first + 2] {
                world.assert_complete(id);
            }
            world.assert_empty();
        }
    }
}

#[test]
fn choices_survive_the_failure_of_their_leader_at_each_step() {
    for moment in 0..4 {
        let mut world = World::new(config());
        let first = world.submit(choices(3, ask(prompt(1, 70), 6)));
        world.steps(moment);
        world.fail_step("lost");
        world.run(60);
        let alive = (first..first + 3).filter(|id| world.got[id].tokens == world.expected(*id));
        assert!(alive.count() >= if moment < 3 { 2 } else { 0 });
        for id in first..first + 3 {
            assert!(world.has_ended(id));
        }
        world.assert_empty();
    }
}

#[test]
fn choices_survive_the_preemption_of_their_leader_at_each_step() {
    for on in [false, true] {
        for moment in 0..14 {
            let mut world = World::new(EngineConfig {
                num_blocks: 40,
                ..caching(on)
            });
            let mut low = choices(3, ask(prompt(1, 70), 6));
            low.priority = 1;
            world.submit(low);
            world.steps(moment);
            world.submit(ask(prompt(2, 100), 8));
            world.run(100);
            world.assert_all_complete();
        }
    }
}

/// A leader that was preempted while its reader was behind took the other choices' turn with it.
#[test]
fn choices_do_not_wait_for_a_leader_whose_reader_is_behind() {
    for on in [false, true] {
        let mut world = World::new(EngineConfig {
            num_blocks: 32,
            ..caching(on)
        });
        let mut low = choices(3, ask(prompt(1, 70), 6));
        low.priority = 1;
        let first = world.submit(low);
        world.step();
        world.send(Command::Pause(first));
        let urgent = world.submit(ask(prompt(2, 100), 8));
        world.run(60);
        world.assert_complete(urgent);
        assert_eq!(world.stats().counters.preemptions, 1);
        for id in [first + 1, first + 2] {
            world.assert_complete(id);
        }
        assert!(world.got[&first].tokens.is_empty());
        world.send(Command::Resume(first));
        world.run(30);
        world.assert_all_complete();
    }
}

#[test]
fn choices_with_one_token_each_end_with_their_leader_gone() {
    for on in [false, true] {
        let mut world = World::new(caching(on));
        world.submit(choices(7, ask(prompt(1, 17), 1)));
        world.run(30);
        world.assert_all_complete();
    }
}
