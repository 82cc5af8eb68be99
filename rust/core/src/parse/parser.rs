//! The machines of a stream, put together.

use super::channels::Channels;
use super::deepseek_v3::DeepSeekV3;
use super::hermes::Hermes;
use super::llama3_json::Llama3Json;
use super::machine::{Machine, Plain};
use super::mistral::Mistral;
use super::part::Part;
use super::pythonic::Pythonic;
use super::qwen3_coder::Qwen3Coder;
use super::spec::{ParseSpec, ReasoningFormat, ToolFormat};
use super::think::Think;
use super::writer::Writer;

/// Tells reasoning, content and tool calls apart in a text that comes in pieces.
///
/// The parts, joined with [`Part::push`], do not depend on how the text is cut. No text is an
/// error: what looks like a call and turns out to be none before its name and the opening of its
/// arguments are certain comes back as content, as it was written; after that its arguments are
/// what the model wrote. Calls are looked for outside of reasoning only.
///
/// White space between text and a block, which is a call or the reasoning, goes; inside of text and at
/// the ends of the answer it stays. Text that a block interrupts goes on on a new line.
///
/// Held back is what may be a tag, white space before a possible tag, and a call that is not certain
/// yet: a few [`UNDECIDED_LIMIT`](super::UNDECIDED_LIMIT) at most. Constant time a character.
pub struct Parser {
    machine: Box<dyn Machine>,
    writer: Writer,
}

impl Parser {
    /// A parser at the start of an answer.
    pub fn new(spec: &ParseSpec) -> Self {
        let content: Box<dyn Machine> = match spec.tools {
            None | Some(ToolFormat::GptOss) => Box::new(Plain),
            Some(ToolFormat::Hermes) => Box::new(Hermes::new()),
            Some(ToolFormat::Qwen3Coder) => Box::new(Qwen3Coder::new(spec.tool_types.clone())),
            Some(ToolFormat::Llama3Json) => Box::new(Llama3Json::new()),
            Some(ToolFormat::Mistral) => Box::new(Mistral::new()),
            Some(ToolFormat::Pythonic) => Box::new(Pythonic::new()),
            Some(ToolFormat::DeepSeekV3) => Box::new(DeepSeekV3::new()),
        };
        let channel_calls = spec.tools == Some(ToolFormat::GptOss);
        let channel_reasoning = spec.reasoning == Some(ReasoningFormat::GptOss);
        let in_reasoning = |usually| spec.in_reasoning.unwrap_or(usually);
        let content = if channel_calls || channel_reasoning {
            let inside = channel_reasoning && in_reasoning(false);
            Box::new(Channels::new(
                channel_reasoning,
                channel_calls,
                inside,
                content,
            ))
        } else {
            content
        };
        let machine = match spec.reasoning {
            Some(ReasoningFormat::DeepSeekR1) => Box::new(Think::new(in_reasoning(true), content)),
            Some(ReasoningFormat::Qwen3) => Box::new(Think::new(in_reasoning(false), content)),
            Some(ReasoningFormat::GptOss) | None => content,
        };
        Self {
            machine,
            writer: Writer::new(spec.calls_only),
        }
    }

    /// Takes the next text and appends what became certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        self.write(out, |machine, writer| machine.push(text, writer));
    }

    /// Takes a special token that says `marker`: where it has a meaning it works as that text does,
    /// where it has none it is no text.
    pub fn push_marker(&mut self, marker: &str, out: &mut Vec<Part>) {
        self.write(out, |machine, writer| {
            machine.settle(writer);
            writer.hidden = true;
            machine.push(marker, writer);
            writer.hidden = false;
        });
    }

    /// The answer ends: appends what was held back.
    pub fn finish(&mut self, out: &mut Vec<Part>) {
        self.write(out, |machine, writer| {
            machine.finish(writer);
            writer.end();
        });
    }

    /// Bytes held back.
    pub fn held(&self) -> usize {
        self.machine.held() + self.writer.held()
    }

    fn write(&mut self, out: &mut Vec<Part>, work: impl FnOnce(&mut dyn Machine, &mut Writer)) {
        std::mem::swap(out, &mut self.writer.parts);
        work(self.machine.as_mut(), &mut self.writer);
        std::mem::swap(out, &mut self.writer.parts);
    }
}

/// The parts of a whole text.
pub fn parse(spec: &ParseSpec, text: &str) -> Vec<Part> {
    let (mut parser, mut parts) = (Parser::new(spec), Vec::new());
    parser.push(text, &mut parts);
    parser.finish(&mut parts);
    parts
}
