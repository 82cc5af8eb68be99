//! Nobody waits for ever: a request among a stream of others without end, within a bound.

use miniinfer_core::request::{NewRequest, SamplingSpec};
use miniinfer_core::sim::{Simulation, continuation};
use miniinfer_core::{Command, EngineConfig};
use proptest::prelude::*;

use crate::{VOCAB, cases, config};

/// One of the others: by whom, how long, how urgent, and whether its reader stops reading.
#[derive(Clone, Debug)]
struct Other {
    tenant: u8,
    prompt: u32,
    output: u32,
    less_urgent: bool,
    paused: bool,
}

fn other(max_len: u32) -> impl Strategy<Value = Other> {
    (0..4u8, 1..max_len, 1..max_len, any::<bool>(), 0..10u8).prop_map(
        move |(tenant, prompt, output, less_urgent, paused)| Other {
            tenant,
            prompt,
            output: output.min(max_len - prompt),
            less_urgent,
            paused: paused == 0,
        },
    )
}

fn request(prompt: Vec<u32>, output: u32, tenant: &str, priority: i32) -> NewRequest {
    NewRequest {
        prompt,
        sampling: SamplingSpec {
            max_tokens: Some(output),
            ..SamplingSpec::default()
        },
        n: 1,
        priority,
        tenant: tenant.into(),
        ..NewRequest::default()
    }
}

struct Stream<'a> {
    others: std::iter::Cycle<std::slice::Iter<'a, Other>>,
    sent: u32,
    /// Tenant "0" is that of the request at hand; its prompt is no longer than those that come after it.
    shortest: u32,
}

impl Stream<'_> {
    fn send(&mut self, sim: &mut Simulation, count: usize, first_tenant: u8) {
        let max_len = sim.engine.config().max_model_len;
        for other in self.others.by_ref().take(count) {
            let mut prompt = other.prompt;
            if other.tenant == 0 {
                prompt = prompt.max(self.shortest);
            }
            self.sent += 1;
            let output = other.output.min(max_len - prompt);
            let prompt = (0..prompt).map(|at| at * self.sent % VOCAB).collect();
            let tenant = other.tenant.max(first_tenant).to_string();
            let id = sim.submit(request(prompt, output, &tenant, other.less_urgent.into()));
            if other.paused {
                sim.send(Command::Pause(id));
            }
        }
    }
}

/// In steps, with all that can go against a request:
///
/// * Each other tenant has a turn before it, four at most, and then comes its own. In a turn a request is
///   passed over for the allowed number of steps, and then waits until those that run have ended, one after
///   the other if they preempt each other, each in no more steps than it has tokens to compute and to output.
/// * It runs, and gives way to each of those that came before it and still run.
fn bound(config: &EngineConfig) -> usize {
    let longest = 2 * config.max_model_len as usize;
    let rows = config.max_num_seqs as usize;
    let turn = config.max_skipped_steps as usize + (rows + 1) * longest;
    5 * turn + rows * longest
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases() / 5, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nobody_starves(
        (config, others, prompt, output) in config().prop_flat_map(|config| {
            let max_len = config.max_model_len;
            let others = prop::collection::vec(other(max_len), 1..40);
            (Just(config), others, 1..max_len, 1..max_len)
        }),
        before in 0..20usize,
        rate in 1..4usize,
    ) {
        let bound = bound(&config);
        let output = output.min(config.max_model_len - prompt);
        let mut sim = Simulation::new(config, vec![], VOCAB).expect("a valid configuration");
        let mut stream = Stream { others: others.iter().cycle(), sent: 0, shortest: prompt };
        for _ in 0..before {
            // Its own tenant's earlier requests would go first, however many they are.
            stream.send(&mut sim, 1, 1);
            sim.step().expect("the protocol is kept");
        }
        let prompt: Vec<u32> = (0..prompt).map(|at| at * 13 % VOCAB).collect();
        let id = sim.submit(request(prompt.clone(), output, "0", 0));
        let (mut got, mut steps) = (Vec::new(), 0);
        while got.len() < output as usize {
            stream.send(&mut sim, rate, 0);
            sim.step().expect("the protocol is kept");
            let mut tokens = sim.output.tokens.iter().copied();
            for entry in &sim.output.entries {
                let own = tokens.by_ref().take(entry.num_tokens as usize);
                if entry.id == id {
                    got.extend(own);
                } else {
                    own.for_each(drop);
                }
            }
            steps += 1;
            prop_assert!(steps <= bound, "{} of {output} tokens after {bound} steps", got.len());
        }
        let expected: Vec<u32> = continuation(&prompt, VOCAB).take(output as usize).collect();
        prop_assert_eq!(got, expected);
        sim.engine.check().expect("consistent");
    }
}
