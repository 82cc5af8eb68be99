//! Steps that are planned while the one before is in flight.

use miniinfer_core::arrays::{OwnedArrays, header};
use miniinfer_core::error::StepError;
use miniinfer_core::request::{NewRequest, SamplingSpec};
use miniinfer_core::sim::continuation;
use miniinfer_core::step::{EndReason, StepOutput};
use miniinfer_core::{Command, Engine, EngineConfig};

use crate::world::{VOCAB, World, ask, config, prompt};

/// Two slots, and a model that samples one token, always the same.
struct Two {
    engine: Engine,
    arrays: [OwnedArrays; 2],
    output: StepOutput,
}

const TOKEN: i32 = 9;

impl Two {
    fn new(config: EngineConfig, eos: Vec<u32>) -> Self {
        let arrays = [OwnedArrays::new(&config), OwnedArrays::new(&config)];
        let engine = Engine::new(config, eos).expect("a valid configuration");
        Self {
            engine,
            arrays,
            output: StepOutput::default(),
        }
    }

    fn add(&mut self, id: u64, request: NewRequest) {
        let request = Box::new(request);
        let arrival = miniinfer_core::request::Arrival::default();
        self.engine.apply([Command::Add {
            first: id,
            request,
            arrival,
        }]);
    }

    /// Tokens planned, and how many of them are pending.
    fn plan(&mut self, slot: usize) -> (u32, i32) {
        let arrays = self.arrays[slot].view();
        let tokens = self.engine.plan(slot, &arrays).expect("the slot is free");
        self.engine.check().expect("consistent");
        (
            tokens,
            if tokens > 0 {
                arrays.header[header::NUM_PENDING].get()
            } else {
                0
            },
        )
    }

    fn commit(&mut self, slot: usize) -> Result<(), StepError> {
        let arrays = self.arrays[slot].view();
        let samples = arrays.header[header::NUM_SAMPLES].get() as usize;
        arrays.sampled[..samples]
            .iter()
            .for_each(|cell| cell.set(TOKEN));
        let committed = self.engine.commit(slot, &arrays);
        self.engine.check().expect("consistent");
        self.engine.take_output(&mut self.output);
        committed
    }

    fn blocks_used(&self) -> u32 {
        self.engine.stats().blocks_used
    }
}

fn overlapped(config: EngineConfig) -> World {
    let mut world = World::new(config);
    world.sim.overlapped = true;
    world
}

#[test]
fn a_pending_token_is_placed_behind_the_known_ones_and_named_by_its_sample() {
    let mut two = Two::new(config(), vec![]);
    two.add(0, ask(prompt(1, 3), 9));
    two.add(1, ask(prompt(2, 7), 9));
    assert_eq!(two.plan(0), (10, 0));
    assert_eq!(two.plan(1), (2, 2));
    let arrays = two.arrays[1].view();
    let taken = |cells: &[std::cell::Cell<i32>]| [cells[0].get(), cells[1].get()];
    assert_eq!(taken(arrays.source), [0, 1]);
    assert_eq!(taken(arrays.positions), [3, 7]);
    assert_eq!(taken(arrays.seq_lens), [4, 8]);
    assert_eq!(arrays.header[header::NUM_DECODES].get(), 2);
    two.commit(0).expect("first in, first out");
    assert_eq!(two.output.tokens, [TOKEN as u32; 2]);
    // The next one is pending in its turn, in the block behind.
    assert_eq!(two.plan(0), (2, 2));
    let arrays = two.arrays[0].view();
    assert_eq!(taken(arrays.positions), [4, 8]);
    let block = arrays.block_table
        [config().max_blocks_per_seq() as usize * arrays.rows[0].get() as usize + 1]
        .get();
    assert_eq!(arrays.slot_mapping[0].get(), i64::from(block) * 4);
}

#[test]
fn steps_end_in_the_order_of_their_plans() {
    let mut two = Two::new(config(), vec![]);
    two.add(0, ask(prompt(1, 3), 9));
    two.plan(1);
    two.plan(0);
    let error = StepError::OutOfOrder {
        slot: 0,
        call: "commit",
        first: 1,
    };
    assert_eq!(two.commit(0), Err(error));
    assert!(two.engine.fail_step(0, "no").is_err());
    two.commit(1).expect("first in, first out");
    two.commit(0).expect("then the second");
}

#[test]
fn nothing_is_planned_behind_what_must_be_the_last_token() {
    let mut two = Two::new(config(), vec![]);
    two.add(0, ask(prompt(1, 3), 2));
    assert_eq!(two.plan(0), (3, 0));
    assert_eq!(two.plan(1), (1, 1));
    two.commit(0).expect("planned");
    assert_eq!(two.plan(0), (0, 0));
    two.commit(1).expect("planned");
    assert_eq!(two.output.entries[0].end, Some(EndReason::Length));
    assert_eq!(two.blocks_used(), 0);
}

#[test]
fn what_a_step_computes_for_a_request_that_ended_before_is_dropped_and_then_its_blocks_are_free() {
    let mut two = Two::new(config(), vec![TOKEN as u32]);
    two.add(0, ask(prompt(1, 3), 9));
    two.plan(0);
    assert_eq!(two.plan(1), (1, 1));
    two.commit(0).expect("planned");
    assert_eq!(
        two.output.entries[0].end,
        Some(EndReason::Eos(TOKEN as u32))
    );
    let stats = two.engine.stats();
    assert_eq!(
        (stats.num_running, stats.num_waiting, stats.blocks_used),
        (0, 0, 1)
    );
    // Its row is not given away either.
    two.add(1, ask(prompt(2, 5), 9));
    assert_eq!(two.plan(0), (5, 0));
    assert_eq!(two.arrays[0].view().rows[0].get(), 1);
    two.commit(1).expect("planned");
    assert!(two.output.is_empty());
    assert_eq!(two.blocks_used(), 2);
    two.commit(0).expect("planned");
    assert_eq!(two.output.entries[0].id, 1);
}

#[test]
fn a_cancelled_request_leaves_its_reader_with_the_next_plan_and_its_blocks_with_the_last_commit() {
    let mut two = Two::new(config(), vec![]);
    two.add(0, ask(prompt(1, 3), 9));
    two.plan(0);
    two.plan(1);
    two.commit(0).expect("planned");
    two.engine.apply([Command::Cancel(0)]);
    assert_eq!(two.plan(0), (0, 0));
    two.engine.take_output(&mut two.output);
    assert_eq!(two.output.entries[0].end, Some(EndReason::Abort));
    assert_eq!((two.engine.num_requests(), two.blocks_used()), (0, 1));
    two.commit(1).expect("planned");
    assert!(two.output.is_empty());
    assert_eq!(two.blocks_used(), 0);
}

#[test]
fn a_failed_step_takes_its_requests_out_of_the_one_behind_it() {
    let mut two = Two::new(config(), vec![]);
    two.add(0, ask(prompt(1, 3), 9));
    two.plan(0);
    two.add(1, ask(prompt(2, 5), 2));
    assert_eq!(two.plan(1), (6, 1));
    two.engine.fail_step(0, "broken").expect("planned");
    two.engine.check().expect("consistent");
    two.engine.take_output(&mut two.output);
    assert_eq!(two.output.entries.len(), 1);
    assert_eq!(
        two.output.entries[0].end,
        Some(EndReason::Error("broken".into()))
    );
    two.commit(1).expect("planned");
    assert_eq!(two.output.entries[0].id, 1);
    two.plan(0);
    two.plan(1);
    two.engine.fail_all("gone");
    two.engine.check().expect("consistent");
    assert_eq!((two.engine.in_flight(), two.blocks_used()), (false, 0));
}

#[test]
fn who_needs_to_know_the_token_runs_every_second_step_beside_others_and_else_every_step() {
    let mut two = Two::new(config(), vec![]);
    let mut knowing = ask(prompt(1, 3), 9);
    knowing.sampling.frequency_penalty = 1.0;
    two.add(0, knowing);
    assert_eq!(two.plan(0), (3, 0));
    assert_eq!(two.plan(1), (0, 0));
    two.commit(0).expect("planned");
    for id in 1..3 {
        two.add(id, ask(prompt(1 + id as u32, 5), 9));
    }
    assert_eq!(two.plan(0), (11, 0));
    assert_eq!(two.plan(1), (2, 2));
    two.commit(0).expect("planned");
    assert_eq!(two.plan(0), (3, 2));
}

#[test]
fn edits_that_depend_on_the_number_of_tokens_alone_count_the_pending_one() {
    let mut two = Two::new(config(), vec![5]);
    let mut request = ask(prompt(1, 3), 9);
    request.sampling.min_tokens = 2;
    two.add(0, request);
    let edits = |two: &Two, slot: usize| {
        let (ids, floats) = (vec![0.into(); 4], vec![0.0.into(); 4]);
        two.engine
            .logit_edits(slot, &ids, &ids, &floats, &floats)
            .expect("room")
    };
    two.plan(0);
    assert_eq!(edits(&two, 0), 1);
    two.plan(1);
    assert_eq!((edits(&two, 0), edits(&two, 1)), (1, 1));
    two.commit(0).expect("planned");
    assert_eq!(edits(&two, 1), 1);
    two.plan(0);
    assert_eq!((edits(&two, 1), edits(&two, 0)), (1, 0));
}

#[test]
fn draws_are_those_of_the_plain_mode() {
    let draws = |second: usize| {
        let mut two = Two::new(config(), vec![]);
        let mut request = ask(prompt(1, 3), 6);
        request.sampling = SamplingSpec {
            temperature: 1.0,
            seed: 7,
            ..request.sampling
        };
        two.add(0, request);
        let mut draws = Vec::new();
        let mut slot = 0;
        two.plan(0);
        loop {
            draws.push(two.arrays[slot].view().uniform[0].get());
            let next = slot ^ second;
            let ahead = second == 1 && two.plan(next).0 > 0;
            two.commit(slot).expect("planned");
            slot = next;
            if !ahead && two.plan(slot).0 == 0 {
                return draws;
            }
        }
    };
    assert_eq!(draws(1), draws(0));
    assert_eq!(draws(0).len(), 6);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_without_a_pause_between_them() {
    let mut world = overlapped(config());
    let id = world.submit(ask(prompt(1, 120), 4));
    // Four chunks of 32, three more tokens, and the step that is planned first.
    assert!(world.run(8) <= 8);
    world.assert_all_complete();
    assert_eq!(world.got[&id].tokens.len(), 4);
}

#[test]
fn a_cache_too_small_for_all_preempts_between_steps_and_all_complete() {
    let mut world = overlapped(EngineConfig {
        num_blocks: 12,
        max_model_len: 40,
        ..config()
    });
    for kind in 0..6 {
        world.submit(ask(prompt(kind, 6), 30));
    }
    world.run(400);
    world.assert_all_complete();
    assert!(world.stats().counters.preemptions > 0);
}

#[test]
fn the_urgent_take_the_place_of_others_once_no_step_is_in_flight() {
    let mut world = overlapped(EngineConfig {
        max_num_seqs: 2,
        ..config()
    });
    for kind in 0..2 {
        world.submit(ask(prompt(kind, 6), 60));
    }
    world.steps(4);
    let mut urgent = ask(prompt(7, 6), 3);
    urgent.priority = -1;
    let urgent = world.submit(urgent);
    world.until_token(urgent, 4);
    world.run(300);
    world.assert_all_complete();
}

/// Both get the same blocks registered: the second to commit gives its own up while a step still reads them.
#[test]
fn equal_blocks_are_merged_under_a_step_in_flight() {
    let mut world = overlapped(config());
    for _ in 0..3 {
        world.submit(ask(prompt(1, 9), 20));
    }
    world.run(60);
    world.assert_all_complete();
    let tokens: Vec<u32> = continuation(&prompt(1, 9), VOCAB).take(20).collect();
    assert!(world.got.values().all(|got| got.tokens == tokens));
}
