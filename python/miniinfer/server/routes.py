"""Every route of the server."""

from __future__ import annotations

from . import openapi, utility
from .chat import chat_completions
from .chat_shapes import ChatChunk, ChatCompletion
from .completion_shapes import Completion
from .completions import completions
from .generate import generate
from .messages_api import count_tokens, create_message
from .messages_errors import MessagesError
from .messages_objects import Message, MessageEvent, Ping, TokenCount
from .messages_protocol import CountTokensRequest, MessagesRequest
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from .responses_api import create_response, delete_response, get_response
from .responses_events import ResponseEvent
from .responses_objects import DeletedResponse, ResponseObject
from .responses_protocol import ResponsesRequest
from .route import Route
from .utility_shapes import (
    GenerateAnswer,
    GenerateEvent,
    Health,
    HealthDetails,
    Load,
    Model,
    ModelList,
    Prompt,
    Tokens,
    Version,
)

_BODY_ERRORS = (400, 404, 408, 413)
_WORK_ERRORS = (*_BODY_ERRORS, 429)

ROUTES = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a conversation",
        body=ChatRequest,
        answers={200: ChatCompletion},
        events=ChatChunk,
        errors=_WORK_ERRORS,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        summary="Continue one or more prompts",
        body=CompletionRequest,
        answers={200: Completion},
        events=Completion,
        errors=_WORK_ERRORS,
    ),
    Route(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        summary="Answer the items of a conversation",
        body=ResponsesRequest,
        answers={200: ResponseObject},
        events=ResponseEvent,
        errors=_WORK_ERRORS,
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}",
        handler=get_response,
        summary="A stored response",
        answers={200: ResponseObject},
        errors=(400, 404),
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{id}",
        handler=delete_response,
        summary="Forget a stored response",
        answers={200: DeletedResponse},
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/v1/messages",
        handler=create_message,
        summary="Answer a conversation, in Anthropic's form",
        body=MessagesRequest,
        answers={200: Message},
        events=MessageEvent | MessagesError | Ping,
        errors=_WORK_ERRORS,
        error=MessagesError,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        summary="How many tokens a conversation has",
        body=CountTokensRequest,
        answers={200: TokenCount},
        errors=_BODY_ERRORS,
        error=MessagesError,
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=utility.list_models,
        summary="The model, under each of its served names",
        answers={200: ModelList},
    ),
    Route(
        method="GET",
        path="/v1/models/{id:.+}",
        handler=utility.get_model,
        summary="The model, under one of its served names",
        answers={200: Model},
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/generate",
        handler=generate,
        summary="Continue one prompt",
        body=GenerateRequest,
        answers={200: GenerateAnswer},
        events=GenerateEvent,
        errors=_WORK_ERRORS,
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=utility.tokenize,
        summary="The ids of a prompt or of messages",
        body=TokenizeRequest,
        answers={200: Tokens},
        errors=_BODY_ERRORS,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=utility.detokenize,
        summary="The text of ids",
        body=DetokenizeRequest,
        answers={200: Prompt},
        errors=_BODY_ERRORS,
    ),
    Route(
        method="POST",
        path="/reset_prefix_cache",
        handler=utility.reset_prefix_cache,
        summary="Forget cached prefixes",
        answers={200: None},
        errors=(409,),
    ),
    Route(
        method="GET",
        path="/health",
        handler=utility.health,
        summary="Whether requests are taken",
        answers={200: Health, 503: Health},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ping",
        handler=utility.health,
        summary="Whether requests are taken",
        answers={200: Health, 503: Health},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=utility.ready,
        summary="Whether another request would be taken now",
        answers={200: Health, 503: Health},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/healthz",
        handler=utility.health_details,
        summary="The health with the engine's counters",
        answers={200: HealthDetails, 503: HealthDetails},
    ),
    Route(
        method="GET",
        path="/version",
        handler=utility.version,
        summary="The server's version",
        answers={200: Version},
    ),
    Route(
        method="GET",
        path="/load",
        handler=utility.load,
        summary="Generating requests in flight",
        answers={200: Load},
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=utility.metrics,
        summary="Metrics in Prometheus' text format",
        answers={200: str},
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi.openapi_document,
        summary="This description",
        answers={200: dict},
    ),
)
