//! What an engine says, packed for each of its clients, until somebody carries it off.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::frame;
use super::stats::pack_stats;
use super::step::pack_step;
use crate::driver::Listener;
use crate::request::RequestId;
use crate::stats::Stats;
use crate::step::StepOutput;

/// Time between frames of counters while there is work.
const STATS_INTERVAL: Duration = Duration::from_millis(100);

/// A frame and the client it is for.
pub type Addressed = (u16, Vec<u8>);

struct State {
    /// The first id that each client has not used.
    clients: BTreeMap<u16, RequestId>,
    frames: Vec<Addressed>,
    counted: Instant,
    /// The counters that clients were last sent.
    sent: Option<Stats>,
}

/// Frames that wait, and the clients they are for.
pub(super) struct Outbox(Mutex<State>);

impl Outbox {
    pub fn new() -> Self {
        Self(Mutex::new(State {
            clients: BTreeMap::new(),
            frames: Vec::new(),
            counted: Instant::now(),
            sent: None,
        }))
    }

    /// From now on there are frames for this client.
    pub fn connect(&self, client: u16) {
        let mut state = self.lock();
        state.clients.insert(client, 0);
        state.sent = None;
    }

    /// From now on there are none. False if there were none before.
    pub fn disconnect(&self, client: u16) -> bool {
        let mut state = self.lock();
        state.frames.retain(|(whose, _)| *whose != client);
        state.clients.remove(&client).is_some()
    }

    /// Notes that a client uses these ids, if it has not used any of them before.
    pub fn use_ids(&self, client: u16, ids: std::ops::Range<RequestId>) -> bool {
        let mut state = self.lock();
        match state.clients.get_mut(&client) {
            Some(next) if *next <= ids.start => {
                *next = ids.end;
                true
            }
            _ => false,
        }
    }

    /// All frames that wait. Counters are among them if they have changed and either `idle` says that there is
    /// nothing more to come or it is time.
    pub fn take(&self, idle: bool, count: impl FnOnce() -> Stats) -> Vec<Addressed> {
        let mut state = self.lock();
        let mut frames = std::mem::take(&mut state.frames);
        if idle || state.counted.elapsed() >= STATS_INTERVAL {
            state.counted = Instant::now();
            let counters = count();
            if state.sent.as_ref() != Some(&counters) {
                let mut bytes = vec![frame::STATS];
                pack_stats(&counters, &mut bytes);
                let clients = state.clients.keys();
                frames.extend(clients.map(|client| (*client, bytes.clone())));
                state.sent = Some(counters);
            }
        }
        frames
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener for Arc<Outbox> {
    fn hear(&self, output: &mut StepOutput) {
        if output.is_empty() {
            return;
        }
        let mut state = self.lock();
        let State {
            clients, frames, ..
        } = &mut *state;
        for client in clients.keys() {
            let mut bytes = vec![frame::STEP];
            if pack_step(output, *client, &mut bytes) {
                frames.push((*client, bytes));
            }
        }
    }
}
