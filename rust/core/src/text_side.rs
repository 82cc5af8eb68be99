//! Where text is made and read: the pipeline, on a thread of its own or not, and the reader's end of the hub.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::commands::Commands;
use crate::driver::lock;
use crate::inbox::{self, Inbox};
use crate::output::{self, HubConsumer, HubOpener, Wake};
use crate::pipeline::{Pipeline, StreamDelta, TextMessage};
use crate::stall::{StallCounters, StallPolicy};
use crate::step::{SpareOutputs, StepOutput};
use crate::sync::Arc as HubArc;

/// Deltas that a stream holds one by one before they merge.
const RING: usize = 8;

/// Where the pipeline runs.
#[derive(Clone)]
enum Place {
    Thread,
    /// On the thread that brings the steps, and on the reader's when it makes room.
    Inline(Arc<Mutex<Pipeline>>),
}

/// The sending end: what the engine says goes in here.
#[derive(Clone)]
pub(crate) struct TextSender {
    inbox: Inbox<TextMessage>,
    place: Place,
    spares: SpareOutputs,
}

impl TextSender {
    /// Where streams are opened.
    pub fn inbox(&self) -> &Inbox<TextMessage> {
        &self.inbox
    }

    /// Sends a step, if it has anything to say, and leaves an empty one in its place.
    pub fn send(&self, output: &mut StepOutput) {
        if !output.is_empty() {
            let step = std::mem::replace(output, self.spares.take());
            let _ = self.inbox.push(TextMessage::Step(step));
        }
    }

    /// An output to fill, of those that were read.
    pub fn spare(&self) -> StepOutput {
        self.spares.take()
    }

    /// Works, where the pipeline has no thread. True if there was anything to do.
    pub fn turn(&self) -> bool {
        match &self.place {
            Place::Thread => false,
            Place::Inline(pipeline) => lock(pipeline).turn(),
        }
    }

    /// Time until a pipeline without a thread must be given a turn again, if it must.
    pub fn patience(&self) -> Option<Duration> {
        match &self.place {
            Place::Thread => None,
            Place::Inline(pipeline) => lock(pipeline).patience(),
        }
    }
}

/// The pipeline and its reader.
pub(crate) struct TextSide {
    sender: TextSender,
    thread: Option<JoinHandle<()>>,
    opener: HubOpener<StreamDelta>,
    consumer: Mutex<HubConsumer<StreamDelta>>,
    /// Shared as the hub shares it: under loom that is loom's `Arc`.
    wake: HubArc<Wake>,
    stall: Arc<StallCounters>,
}

impl TextSide {
    /// Starts it. It tells `commands` what it finds, and `wake` when there is something to read.
    pub fn start(
        commands: Commands,
        wake: HubArc<Wake>,
        policy: StallPolicy,
        own_thread: bool,
    ) -> io::Result<Self> {
        let (inbox, receiver) = inbox::inbox();
        let waker = inbox.clone();
        let (producer, consumer) = output::hub(RING, wake.clone(), move || waker.wake());
        let opener = producer.opener();
        let stall = Arc::new(StallCounters::default());
        let spares = SpareOutputs::default();
        let pipeline = Pipeline::new(
            receiver,
            producer,
            commands,
            policy,
            stall.clone(),
            spares.clone(),
        );
        let (place, thread) = if own_thread {
            let thread = std::thread::Builder::new().name("miniinfer-text".into());
            (Place::Thread, Some(thread.spawn(move || pipeline.run())?))
        } else {
            (Place::Inline(Arc::new(Mutex::new(pipeline))), None)
        };
        Ok(Self {
            sender: TextSender {
                inbox,
                place,
                spares,
            },
            thread,
            opener,
            consumer: Mutex::new(consumer),
            wake,
            stall,
        })
    }

    /// The sending end.
    pub fn sender(&self) -> &TextSender {
        &self.sender
    }

    /// Where streams come from.
    pub fn opener(&self) -> &HubOpener<StreamDelta> {
        &self.opener
    }

    /// Gives `deliver` all that is ready, one delta a stream.
    pub fn drain(&self, mut deliver: impl FnMut(u64, &mut StreamDelta)) {
        let mut consumer = lock(&self.consumer);
        loop {
            consumer.drain(&mut deliver);
            // What was held back for want of room comes at once where the pipeline is ours to run.
            if !self.sender.turn() {
                return;
            }
        }
    }

    /// The descriptor that is readable when there is something to drain.
    pub fn wake(&self) -> &Wake {
        &self.wake
    }

    /// How often readers had to be paused or given up.
    pub fn stall_counters(&self) -> &StallCounters {
        &self.stall
    }
}

impl Drop for TextSide {
    fn drop(&mut self) {
        let _ = self.sender.inbox.push(TextMessage::Close);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
