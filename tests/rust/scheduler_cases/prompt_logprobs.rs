//! Log-probabilities of prompts: whole, once, however the prompt was computed.

use std::cell::Cell;

use miniinfer_core::EngineConfig;
use miniinfer_core::prompt_logprobs::PromptRows;
use miniinfer_core::request::{NewRequest, RequestId};
use miniinfer_core::sim::prompt_logprobs;

use crate::world::{World, ask, config, prompt};

fn wanting(prompt: Vec<u32>, max_tokens: u32) -> NewRequest {
    NewRequest {
        num_prompt_logprobs: Some(2),
        ..ask(prompt, max_tokens)
    }
}

/// Steps until the request's prompt is reported; panics if it has a token before.
fn reported(world: &mut World, id: RequestId) -> Vec<f32> {
    for _ in 0..200 {
        world.step();
        if let [prompt] = &world.sim.output.prompt_logprobs[..] {
            assert_eq!(prompt.id, id);
            assert_eq!(prompt.top_ids.len(), 2 * prompt.tokens.len());
            return prompt.logprobs.clone();
        }
        assert!(world.got[&id].tokens.is_empty(), "a token came first");
    }
    panic!("the prompt was never reported");
}

#[test]
fn a_prompt_preempted_between_its_chunks_is_reported_whole() {
    for on in [false, true] {
        let mut world = World::new(EngineConfig {
            enable_prefix_caching: on,
            max_num_batched_tokens: 16,
            max_num_seqs: 1,
            ..config()
        });
        let mut request = wanting(prompt(1, 40), 4);
        request.priority = 1;
        let id = world.submit(request);
        world.steps(2);
        world.submit(ask(prompt(2, 5), 2));
        assert_eq!(reported(&mut world, id), prompt_logprobs(&prompt(1, 40)));
        assert_eq!(world.stats().counters.preemptions, 1);
        world.run(50);
        world.assert_all_complete();
    }
}

#[test]
fn a_cached_prompt_is_computed_again_for_them() {
    let mut world = World::new(config());
    world.submit(ask(prompt(1, 40), 2));
    world.run(50);
    let id = world.submit(wanting(prompt(1, 40), 2));
    assert_eq!(reported(&mut world, id), prompt_logprobs(&prompt(1, 40)));
    assert_eq!(world.got[&id].cached, 0);
    world.run(50);
    // What it computed is there for others.
    let after = world.submit(ask(prompt(1, 40), 2));
    world.until_token(after, 10);
    assert_eq!(world.got[&after].cached, 36);
}

#[test]
fn a_prompt_of_one_token_has_none_and_says_so() {
    let mut world = World::new(config());
    let id = world.submit(wanting(vec![3], 1));
    assert!(reported(&mut world, id).is_empty());
}

#[test]
fn arrays_that_are_too_short_are_named_and_nothing_is_lost() {
    let mut world = World::new(config());
    let id = world.submit(wanting(prompt(1, 9), 1));
    world.step_with(|engine, _| {
        // The step's own report has been taken: there is nothing left to ask for.
        assert_eq!(engine.prompt_rows(0, &[], &[]), Ok(0));
    });
    world.run(10);
    world.assert_complete(id);
    let id = world.submit(wanting(prompt(2, 9), 1));
    let arrays = world.sim.arrays.view();
    world.sim.engine.plan(0, &arrays).expect("planned");
    let short = vec![Cell::new(0); 7];
    let error = world.sim.engine.prompt_rows(0, &short, &short);
    let error = error.expect_err("seven of eight").to_string();
    assert!(
        error.contains("prompt rows") && error.contains('8'),
        "{error}"
    );
    let found = PromptRows {
        logprob: &vec![Cell::new(0.0); 7],
        rank: &short,
        top_ids: &vec![Cell::new(0); 14],
        top_logprobs: &vec![Cell::new(0.0); 14],
    };
    let error = world.sim.engine.take_prompt_logprobs(0, &found);
    assert!(error.is_err());
    world
        .sim
        .engine
        .commit(0, &world.sim.arrays.view())
        .expect("committed");
    world.sim.engine.check().expect("consistent");
    assert!(world.got[&id].tokens.is_empty());
}
