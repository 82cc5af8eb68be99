//! The formats in which models write reasoning and tool calls.

/// How a model marks its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>` ... `</think>`; the opening tag may be missing, as when the prompt ends with it.
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
    /// `<|tool▁call▁begin|>` ... of DeepSeek-V3.
    DeepSeekV3,
    /// Channels: `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.
    GptOss,
}

/// What a stream's text is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParseSpec {
    /// How reasoning is marked, if it is to be told apart.
    pub reasoning: Option<ReasoningFormat>,
    /// How tool calls are written, if they are to be found.
    pub tools: Option<ToolFormat>,
    /// The prompt has opened the reasoning: the answer begins inside of it.
    pub in_reasoning: bool,
}

impl ReasoningFormat {
    /// Every format with its name.
    pub const ALL: [(&'static str, Self); 3] = [
        ("deepseek_r1", Self::DeepSeekR1),
        ("qwen3", Self::Qwen3),
        ("gpt_oss", Self::GptOss),
    ];
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
}
