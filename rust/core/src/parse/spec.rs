//! The formats in which models write reasoning and tool calls.

use std::sync::Arc;

use super::tool_types::ToolTypes;

/// How a model marks its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>` ... `</think>`; without an opening tag the answer begins with reasoning.
    DeepSeekR1,
    /// `<think>` ... `</think>`, with the opening tag in the answer or in the prompt.
    Qwen3,
    /// Channels: `<|channel|>analysis<|message|>` ... `<|end|>`.
    GptOss,
}

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also Qwen 2.5 and 3.
    Hermes,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
    Qwen3Coder,
    /// `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>`.
    Llama3Json,
    /// `[TOOL_CALLS]` with a JSON array, or with `name[ARGS]{...}`.
    Mistral,
    /// `[name(key=value, ...), ...]` in Python's syntax.
    Pythonic,
    /// `<｜tool▁call▁begin｜>` ... of DeepSeek-V3.
    DeepSeekV3,
    /// Channels: `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.
    GptOss,
}

/// What a stream's text is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParseSpec {
    /// How reasoning is marked, if it is to be told apart.
    pub reasoning: Option<ReasoningFormat>,
    /// How tool calls are written, if they are to be found.
    pub tools: Option<ToolFormat>,
    /// Whether the answer begins inside of reasoning, as when the prompt has opened it. `None`: as
    /// is usual for the format, which is yes for [`ReasoningFormat::DeepSeekR1`] alone.
    pub in_reasoning: Option<bool>,
    /// Beside its reasoning the answer is tool calls, as where a grammar makes the model call: what is
    /// none, such as a call that the end cuts before its name is known, is left out.
    pub calls_only: bool,
    /// Types of the tools' parameters, for formats that write values without quotes.
    pub tool_types: Arc<ToolTypes>,
}

impl ReasoningFormat {
    /// Every format with its name.
    pub const ALL: [(&'static str, Self); 3] = [
        ("deepseek_r1", Self::DeepSeekR1),
        ("qwen3", Self::Qwen3),
        ("gpt_oss", Self::GptOss),
    ];

    /// The format of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find_map(|(known, format)| (known == name).then_some(format))
    }

    /// The tags it is marked with.
    pub(crate) fn markers(self) -> &'static [&'static str] {
        match self {
            Self::DeepSeekR1 | Self::Qwen3 => super::think::MARKERS,
            Self::GptOss => super::channels::MARKERS,
        }
    }
}

impl ToolFormat {
    /// Every format with its name.
    pub const ALL: [(&'static str, Self); 7] = [
        ("hermes", Self::Hermes),
        ("qwen3_coder", Self::Qwen3Coder),
        ("llama3_json", Self::Llama3Json),
        ("mistral", Self::Mistral),
        ("pythonic", Self::Pythonic),
        ("deepseek_v3", Self::DeepSeekV3),
        ("gpt_oss", Self::GptOss),
    ];

    /// The format of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find_map(|(known, format)| (known == name).then_some(format))
    }

    /// The tags that calls are marked with.
    pub(crate) fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => super::hermes::MARKERS,
            Self::Qwen3Coder => super::qwen3_coder::MARKERS,
            Self::Llama3Json => super::llama3_json::MARKERS,
            Self::Mistral => super::mistral::MARKERS,
            Self::Pythonic => super::pythonic::MARKERS,
            Self::DeepSeekV3 => super::deepseek_v3::MARKERS,
            Self::GptOss => super::channels::MARKERS,
        }
    }
}

impl ParseSpec {
    /// The tag, of the formats chosen, that a token says, if it says one and nothing else.
    pub(crate) fn marker(&self, token: &[u8]) -> Option<&'static str> {
        let reasoning = self.reasoning.map_or(&[][..], ReasoningFormat::markers);
        let tools = self.tools.map_or(&[][..], ToolFormat::markers);
        let mut markers = reasoning.iter().chain(tools);
        markers.find(|marker| marker.as_bytes() == token).copied()
    }
}
