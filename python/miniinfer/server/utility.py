"""The routes that generate nothing: models, tokenize, health, version, load and metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from miniinfer import __version__

from .chat_prompt import tokenize_chat
from .chat_tools import tool_definitions
from .engine_api import Tokenizer
from .errors import RETRY_AFTER_SECONDS, ApiError, invalid
from .json_body import read_body
from .metrics import CONTENT_TYPE
from .prompts import check_token_ids, run_sized
from .protocol import DetokenizeRequest, TokenizeRequest
from .responses import encode
from .state import STATE, ServerState
from .utility_shapes import Health, HealthDetails, Load, Model, ModelList, Prompt, Tokens, Version

_STARTED = int(time.time())


def json_response(answer: Any, status: int = 200) -> web.Response:
    """Return an answer as a JSON response."""
    return web.Response(status=status, body=encode(answer), content_type="application/json")


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    state = request.app[STATE]
    return json_response(ModelList(data=[_model(state, name) for name in state.served_names()]))


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; the id may hold slashes."""
    state = request.app[STATE]
    return json_response(_model(state, state.check_model(request.match_info["id"])))


def _model(state: ServerState, name: str) -> Model:
    engine = state.engine()
    return Model(
        id=name, created=_STARTED, root=engine.model_name, max_model_len=engine.max_model_len
    )


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the ids of a prompt or of a conversation."""
    state = request.app[STATE]
    body = await read_body(request, TokenizeRequest)
    engine = state.engine()
    state.check_model(body.model)
    tokenizer = engine.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "send either prompt or messages")
    if body.messages is not None:
        ids = await tokenize_chat(
            body.messages,
            body,
            config=state.config,
            tokenizer=tokenizer,
            executor=state.executor,
            tools=tool_definitions(body.tools or []) or None,
        )
    else:
        ids = await _encode(state, tokenizer, body.prompt or "", body.add_special_tokens)
    pieces = None
    if body.return_token_strs:
        pieces = await run_sized(
            state.executor,
            len(ids),
            lambda: [tokenizer.decode([token], False) for token in ids],
        )
    return json_response(
        Tokens(count=len(ids), max_model_len=engine.max_model_len, tokens=ids, token_strs=pieces)
    )


async def _encode(
    state: ServerState, tokenizer: Tokenizer, text: str, add_special_tokens: bool | None
) -> list[int]:
    special = add_special_tokens is not False
    return await run_sized(state.executor, len(text), lambda: tokenizer.encode(text, special))


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of ids."""
    state = request.app[STATE]
    body = await read_body(request, DetokenizeRequest)
    tokenizer = state.engine().tokenizer
    state.check_model(body.model)

    def decode() -> str:
        check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
        return tokenizer.decode(body.tokens, False)

    text = await run_sized(state.executor, len(body.tokens), decode)
    return json_response(Prompt(text))


async def health(request: web.Request) -> web.Response:
    """GET /health and /ping: 200 while requests are taken, 503 with the reason otherwise."""
    return _health_response(Health(request.app[STATE].status))


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 503 also while the limits leave no room for another request."""
    return _health_response(Health(request.app[STATE].readiness))


async def health_details(request: web.Request) -> web.Response:
    """GET /healthz: the health and the engine's counters."""
    state = request.app[STATE]
    engine = state.loaded_engine
    answer = HealthDetails(state.status)
    if engine is not None:
        answer.stats = dict(engine.stats())
        if engine.error is not None:
            answer.error = engine.error
    return _health_response(answer)


def _health_response(answer: Health | HealthDetails) -> web.Response:
    response = json_response(answer, 200 if answer.status == "ok" else 503)
    if answer.status == "loading":
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return response


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response(Version(__version__))


async def load(request: web.Request) -> web.Response:
    """GET /load: generating requests in flight, and those of them without a first token."""
    state = request.app[STATE]
    return json_response(
        Load(
            server_load=state.num_active,
            queued_requests=state.queue.num_requests,
            queued_tokens=state.queue.num_tokens,
        )
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics in Prometheus' text format."""
    state = request.app[STATE]
    body = state.metrics.render(state.engine().stats(), state.served_names()[0], state.queue)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache: forget cached prefixes that no request uses."""
    state = request.app[STATE]
    engine = state.engine()
    done = await asyncio.get_running_loop().run_in_executor(
        state.executor, engine.reset_prefix_cache
    )
    if not done:
        raise ApiError(409, "the prefix cache is in use", code="prefix_cache_busy")
    return web.Response(status=200)
