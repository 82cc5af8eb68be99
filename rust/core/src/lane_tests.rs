//! Streams over a text side that writes to a socket itself: what passes the reader, what does not, and in what order.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::commands::Commands;
use crate::event::EventFrame;
use crate::inbox::{self, Inbox};
use crate::lane::{Lane, LaneText, Route, Written};
use crate::output::{HubConsumer, StreamGuard, Wake, hub};
use crate::pipeline::{Pipeline, StreamDelta, TextMessage};
use crate::stall::StallPolicy;
use crate::step::{EndReason, OutputEntry, SpareOutputs, StepOutput};
use crate::sync::Arc as HubArc;
use crate::text::{StreamSpec, TextModel, TextStream};

const ID: u64 = 7;

struct House {
    inbox: Inbox<TextMessage>,
    pipeline: Pipeline,
    reader: HubConsumer<StreamDelta>,
    lane: Arc<Lane>,
    far: UnixStream,
    near: UnixStream,
    _guard: StreamGuard<StreamDelta>,
}

impl House {
    fn new() -> Self {
        let (inbox, receiver) = inbox::inbox();
        let wake = HubArc::new(Wake::new().unwrap());
        let (producer, reader) = hub(8, wake, || ());
        let (commands, _) = inbox::inbox();
        let (stream, guard) = producer.open(ID);
        let pipeline = Pipeline::new(
            receiver,
            producer,
            Commands::new(commands),
            StallPolicy::default(),
            Arc::default(),
            SpareOutputs::default(),
        );
        let tokens: Vec<String> = (b'a'..=b'z').map(|c| char::from(c).into()).collect();
        let model = TextModel::from_parts(&tokens, &[]).unwrap();
        let text = TextStream::new(model, StreamSpec::default()).unwrap();
        let lane = Arc::<Lane>::default();
        let open = TextMessage::Open {
            id: ID,
            stream: Box::new(text),
            producer: stream,
            index: 0,
            num_prompt_tokens: 1,
            lane: Some(lane.clone()),
        };
        assert!(inbox.push(open).is_ok());
        let (far, near) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        Self {
            inbox,
            pipeline,
            reader,
            lane,
            far,
            near,
            _guard: guard,
        }
    }

    fn open(&self, told: u32) {
        self.lane.open(Route {
            socket: self.near.as_raw_fd(),
            frame: EventFrame {
                before: b"<".to_vec(),
                after: b">".to_vec(),
                chunked: false,
            },
            text: LaneText::Whole,
            told,
        });
    }

    fn push(&self, tokens: &str, end: Option<EndReason>) {
        let tokens: Vec<u32> = tokens.bytes().map(|c| u32::from(c - b'a')).collect();
        let entry = OutputEntry {
            id: ID,
            num_tokens: tokens.len() as u32,
            num_logprobs: None,
            cached_tokens: 0,
            end,
        };
        let step = StepOutput {
            entries: vec![entry],
            tokens,
            ..StepOutput::default()
        };
        assert!(self.inbox.push(TextMessage::Step(step)).is_ok());
    }

    fn step(&mut self, tokens: &str) {
        self.push(tokens, None);
        self.pipeline.turn();
    }

    /// What the reader gets: texts, and the tokens so far.
    fn read(&mut self) -> Vec<(String, u32)> {
        let mut read = Vec::new();
        self.reader.drain(|id, delta| {
            assert_eq!(id, ID);
            read.push((delta.text.text.clone(), delta.text.num_output_tokens));
        });
        read
    }

    /// What has come out of the socket.
    fn received(&mut self) -> String {
        let mut bytes = Vec::new();
        // Ends with "would block", or with the end of the socket.
        let _ = self.far.read_to_end(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }
}

fn texts(expected: &[(&str, u32)]) -> Vec<(String, u32)> {
    let owned = |&(text, told): &(&str, u32)| (text.to_owned(), told);
    expected.iter().map(owned).collect()
}

#[test]
fn text_alone_passes_the_reader_and_the_end_does_not() {
    let mut house = House::new();
    house.step("a");
    assert_eq!(house.read(), texts(&[("a", 1)]));
    house.open(1);
    house.step("b");
    house.step("cd");
    assert!(house.read().is_empty());
    assert_eq!(house.received(), "<\"b\"><\"cd\">");
    assert_eq!(house.lane.num_output_tokens(), 4);
    assert!(house.lane.silence().is_some());
    house.push("e", Some(EndReason::Length));
    house.pipeline.turn();
    assert_eq!(house.read(), texts(&[("e", 5)]));
    assert_eq!(house.received(), "");
    let written = Written {
        rest: Vec::new(),
        bytes: 11,
    };
    assert_eq!(house.lane.close(), written);
    assert_eq!(house.lane.close(), Written::default());
}

#[test]
fn nothing_passes_what_the_reader_has_not_read() {
    let mut house = House::new();
    house.step("a");
    assert_eq!(house.read(), texts(&[("a", 1)]));
    // Taken from the stream, but by a reader that has not come to it yet.
    house.step("b");
    let taken = house.read();
    house.open(1);
    house.step("c");
    assert_eq!(house.received(), "");
    assert_eq!(taken, texts(&[("b", 2)]));
    assert_eq!(house.read(), texts(&[("c", 3)]));
    house.open(3);
    house.step("d");
    assert_eq!(house.received(), "<\"d\">");
}

#[test]
fn a_closed_lane_writes_nothing() {
    let mut house = House::new();
    house.step("a");
    house.read();
    house.open(1);
    house.lane.close();
    house.step("b");
    assert_eq!(house.received(), "");
    assert_eq!(house.read(), texts(&[("b", 2)]));
}

#[test]
fn what_the_socket_does_not_take_is_the_readers() {
    let mut house = House::new();
    house.step("a");
    house.read();
    house.open(1);
    let text = "xyz".repeat(1 << 12);
    let event = format!("<\"{text}\">");
    let mut sent = 0;
    let rest = loop {
        house.step(&text);
        sent += 1;
        let told = 1 + sent * text.len() as u32;
        let woken = house.read();
        if !woken.is_empty() {
            // An empty delta: the reader comes, and finds the rest.
            assert_eq!(woken, texts(&[("", told)]));
            break house.lane.close().rest;
        }
    };
    house.step("b");
    let told = 2 + sent * text.len() as u32;
    assert_eq!(house.read(), texts(&[("b", told)]));
    let received = house.received() + std::str::from_utf8(&rest).unwrap();
    assert!(!rest.is_empty());
    assert_eq!(received, event.repeat(sent as usize));
}

#[test]
fn a_client_that_has_gone_is_the_readers() {
    let mut house = House::new();
    house.step("a");
    house.read();
    house.open(1);
    house.far = UnixStream::pair().unwrap().0;
    house.step("b");
    assert_eq!(house.read(), texts(&[("", 2)]));
    assert_eq!(house.lane.close().rest, b"<\"b\">");
}

#[test]
fn a_text_side_that_is_behind_leaves_its_reader_to_merge() {
    let mut house = House::new();
    house.step("a");
    house.read();
    house.open(1);
    house.push("b", None);
    house.push("c", None);
    house.push("d", None);
    house.pipeline.turn();
    assert_eq!(house.received(), "");
    assert_eq!(house.read(), texts(&[("bcd", 4)]));
}
