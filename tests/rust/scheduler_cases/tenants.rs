//! Tenants share the prefill budget.

use miniinfer_core::EngineConfig;
use miniinfer_core::request::NewRequest;

use crate::world::{World, ask, config, prompt, tagged};

fn of(tenant: &str, request: NewRequest) -> NewRequest {
    NewRequest {
        tenant: tenant.into(),
        ..request
    }
}

fn uncached() -> EngineConfig {
    EngineConfig {
        enable_prefix_caching: false,
        ..config()
    }
}

/// Once admission closed, only tenants with active requests took turns, but turns without work that were
/// counted before went on counting: a tenant with a half-computed prompt was not served, and the step was
/// empty.
#[test]
fn a_half_computed_prompt_goes_on_although_nothing_more_is_admitted() {
    let mut world = World::new(EngineConfig {
        block_size: 1,
        num_blocks: 4,
        max_num_seqs: 1,
        max_num_batched_tokens: 2,
        max_model_len: 4,
        ..uncached()
    });
    world.submit(of("a", ask(vec![0], 3)));
    world.submit(of("a", ask(vec![0], 3)));
    world.steps(2);
    world.submit(of("b", ask(vec![0, 1], 2)));
    world.submit(of("c", ask(vec![0], 3)));
    world.run(50);
    world.assert_all_complete();
}

/// A tenant whose turn the end of the budget cut short was given a new quantum at each step: when the
/// decodes left less than a quantum, its turn never ended.
#[test]
fn a_turn_ends_even_if_each_step_leaves_less_than_a_quantum() {
    let mut world = World::new(EngineConfig {
        num_blocks: 1000,
        max_num_seqs: 24,
        max_num_batched_tokens: 32,
        max_model_len: 800,
        ..uncached()
    });
    for kind in 0..22 {
        world.submit(ask(prompt(kind, 1), 400));
    }
    world.steps(3);
    world.submit(of("a", ask(tagged(1, 700), 1)));
    world.submit(of("b", ask(tagged(2, 700), 1)));
    let mut shares = [0, 0];
    for _ in 0..40 {
        world.step();
        shares[0] += world.computed(1);
        shares[1] += world.computed(2);
        // A quantum is half of what the decodes leave of 32, or a block.
        assert!(shares[0].abs_diff(shares[1]) <= 2 * 5, "{shares:?}");
    }
    assert_eq!(shares[0] + shares[1], 400);
}

#[test]
fn one_prompt_is_not_behind_the_hundred_of_another_tenant() {
    let mut world = World::new(EngineConfig {
        num_blocks: 1000,
        max_num_seqs: 4,
        ..uncached()
    });
    for kind in 0..100 {
        world.submit(of("many", ask(prompt(kind, 40), 2)));
    }
    world.steps(5);
    let one = world.submit(of("one", ask(prompt(200, 40), 2)));
    // Rows: four of the others hold one for at most 2 x 40 tokens and 2 outputs at 32 tokens a step, and
    // then it is this tenant's turn; its own prompt takes at most half of each step.
    let steps = world.until_token(one, 12);
    assert!(steps <= 12);
    world.run(400);
    world.assert_all_complete();
}

/// Three tenants of different appetites, saturated: none is ahead by more than a quantum.
#[test]
fn shares_stay_within_a_quantum() {
    let mut world = World::new(EngineConfig {
        num_blocks: 4000,
        max_num_seqs: 32,
        max_num_batched_tokens: 48,
        max_model_len: 4000,
        ..uncached()
    });
    // One long prompt, many of middle size, very many short ones.
    for (tag, prompts, len) in [(1, 1, 3000), (2, 10, 300), (3, 300, 10)] {
        for _ in 0..prompts {
            world.submit(of(&tag.to_string(), ask(tagged(tag, len), 1)));
        }
    }
    let mut shares = [0usize; 3];
    for step in 0..100 {
        world.step();
        for (tag, share) in (1..).zip(&mut shares) {
            *share += world.computed(tag);
        }
        let (least, most) = (shares.iter().min(), shares.iter().max());
        let apart = most.expect("three") - least.expect("three");
        assert!(apart <= 2 * 16, "step {step}: {shares:?}");
    }
}

/// The guard against being passed over was only looked at in the request's own tenant's turn: requests of
/// tenants whose turn came before took each block that came free.
#[test]
fn a_big_request_is_not_passed_over_for_ever_by_another_tenant() {
    let mut world = World::new(EngineConfig {
        num_blocks: 16,
        max_model_len: 64,
        max_skipped_steps: 6,
        ..uncached()
    });
    let mut kind = 0;
    let mut small = |world: &mut World| {
        kind += 1;
        world.submit(of("small", ask(prompt(kind, 8), 8)))
    };
    for _ in 0..6 {
        small(&mut world);
        world.step();
    }
    let big = world.submit(of("big", ask(prompt(900, 50), 4)));
    let mut steps = 0;
    while world.got[&big].tokens.is_empty() {
        small(&mut world);
        world.step();
        steps += 1;
        // Six steps passed over, ten until the running ones ended, two chunks.
        assert!(steps <= 6 + 12 + 3, "still waiting");
    }
    world.run(2000);
    world.assert_all_complete();
}

/// Requests of one tenant that were passed over together went one after the other before all other tenants,
/// and a tenant alone with what ran kept its turn.
#[test]
fn tenants_take_turns_also_when_one_request_at_a_time_fits() {
    for max_skips in [0, 1, 4] {
        for guard in [0, 4] {
            let mut world = World::new(EngineConfig {
                num_blocks: 16,
                max_model_len: 64,
                max_skips,
                max_skipped_steps: guard,
                ..uncached()
            });
            // Each needs more than half of the cache.
            let mut order = Vec::new();
            for kind in 0..24u32 {
                let tenant = if kind < 18 { kind / 6 } else { 3 };
                let id = world.submit(of(&tenant.to_string(), ask(prompt(kind, 40), 2)));
                order.push((id, tenant));
            }
            let mut ends = Vec::new();
            while world.sim.engine.has_work() {
                world.step();
                for &(id, tenant) in &order {
                    if world.has_ended(id) && !ends.contains(&(id, tenant)) {
                        ends.push((id, tenant));
                    }
                }
            }
            // The guard against being passed over may put one forward by a turn or two.
            let mut turns = [0u32; 4];
            for (_, tenant) in ends {
                turns[tenant as usize] += 1;
                let (least, most) = (turns.iter().min(), turns.iter().max());
                let apart = most.expect("four") - least.expect("four");
                assert!(apart <= 1 + u32::from(guard > 0), "{turns:?}");
            }
        }
    }
}
