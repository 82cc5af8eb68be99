"""The bodies that requests may send; unknown fields are ignored.

Types are checked while decoding, ranges by `params` and `miniinfer.SamplingParams`, and what is
refused by `refusals`. Names follow OpenAI's API reference, and vLLM where OpenAI has none.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .field_types import (
    Alternatives,
    ChoiceCount,
    Effort,
    FormType,
    FunctionType,
    KeptTokens,
    LogitBias,
    MinP,
    Modality,
    NonEmpty,
    PartType,
    Penalty,
    Priority,
    Prompts,
    RepetitionPenalty,
    Role,
    Seed,
    Temperature,
    TokenCount,
    TokenId,
    TokenIds,
    TokenLimit,
    TokenLimitOrZero,
    ToolChoiceName,
    ToolName,
    ToolParameters,
    TopK,
    TopP,
    Unoffered,
)


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream reports about its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """The schema that an answer must follow; `strict` is always kept."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What an answer must look like."""

    type: FormType
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """Exactly one of the forms that an answer can be held to."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that every generating route shares."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    n: ChoiceCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: NonEmpty | list[NonEmpty] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: TokenCount | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[NonEmpty] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Alternatives | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Priority = 0
    user: str | None = None
    cache_salt: NonEmpty | None = None
    request_id: str | None = None
    # Refused when set to anything but their neutral value: ignoring them would change the answer.
    use_beam_search: bool | None = None
    guided_json: Unoffered = None
    guided_regex: Unoffered = None
    guided_choice: Unoffered = None
    guided_grammar: Unoffered = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content."""

    type: PartType
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of an earlier tool call; `arguments` is JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call that an earlier answer made."""

    function: FunctionCall
    id: str | UnsetType | None = UNSET
    type: FunctionType = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType | None = UNSET
    function_call: FunctionCall | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: ToolName
    description: str | UnsetType | None = UNSET
    parameters: ToolParameters | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the model may use."""

    type: FunctionType = "function"
    function: FunctionDefinition


class FunctionName(msgspec.Struct, kw_only=True):
    """The function that must be called."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """The one tool that must be called."""

    type: FunctionType = "function"
    function: FunctionName


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage],
        Meta(examples=[[{"role": "user", "content": "Hello"}]], extra_json_schema={"minItems": 1}),
    ]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceName | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    # Refused when set, like the last ones of `GenerationRequest`.
    functions: Unoffered = None
    function_call: Unoffered = None
    prediction: Unoffered = None
    modalities: list[Modality] | None = None
    audio: Unoffered = None
    web_search_options: Unoffered = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    max_tokens: TokenLimitOrZero | None = None
    prompt: Prompts
    echo: bool | None = None
    logprobs: Alternatives | None = None
    best_of: int | None = None
    suffix: str | None = None


class GenerateRequest(GenerationRequest, kw_only=True):
    """POST /generate."""

    prompt: Prompts


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None
