"""From the body of a chat to work for the engine; other routes that chat convert to that body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .answer_form import AnswerForm, answer_form
from .chat_parser import form_begins_after, parser_of
from .chat_parts import PartRules
from .chat_prompt import tokenize_chat
from .chat_tools import ToolPlan, plan_tools
from .engine_api import Engine
from .errors import invalid
from .field_types import EFFORTS
from .generation import Work
from .params import check_logprobs, sampling_params, token_limit, truncated
from .protocol import ChatRequest
from .refusals import refuse_unsupported_chat
from .state import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that has been checked and tokenised."""

    work: Work
    rules: PartRules
    """How to read its answers; see `ChoiceParts`."""
    top_logprobs: int
    """Alternatives to each token that the request asked for."""
    echo: str = ""
    """What the content of each answer begins with."""


async def prepare_chat(state: ServerState, engine: Engine, body: ChatRequest) -> PreparedChat:
    """Check a chat and turn it into ids and parameters; raises `ApiError` 400."""
    refuse_unsupported_chat(body)
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    parsers = state.parsers()
    plan = plan_tools(body, parsers, engine.tokenizer)
    form = _form(body, plan)
    token_ids = await chat_token_ids(state, engine, body, plan)
    param, requested = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        param, requested = "max_completion_tokens", body.max_completion_tokens
    token_ids = truncated(
        token_ids, body.truncate_prompt_tokens, engine.max_model_len, room=requested
    )
    limit = token_limit(len(token_ids), engine.max_model_len, requested=requested, param=param)
    parser = parser_of(parsers, plan, token_ids, engine.tokenizer)
    if form is not None:
        form = form.after(form_begins_after(parser, plan, engine.tokenizer))
    params = sampling_params(
        body,
        engine.default_sampling_params,
        max_tokens=limit,
        vocab_size=engine.tokenizer.vocab_size,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        form=form,
    )
    if form is not None:
        params.structured_outputs = await form.compiled(engine, state.executor)
    return PreparedChat(
        work=Work(
            token_ids=token_ids,
            params=params,
            parser=parser,
            form_param="structured_outputs" if form is None else form.param,
        ),
        rules=PartRules(
            parsed=parser is not None,
            include_reasoning=body.include_reasoning is not False,
            single_call=body.parallel_tool_calls is False,
            named_call=plan.named,
        ),
        top_logprobs=body.top_logprobs or 0,
        echo=_echo(body),
    )


async def chat_token_ids(
    state: ServerState, engine: Engine, body: ChatRequest, plan: ToolPlan | None = None
) -> list[int]:
    """Return the prompt of a chat; raises `ApiError` 400 if it cannot be rendered."""
    if plan is None:
        plan = plan_tools(body, state.parsers(), engine.tokenizer)
    return await tokenize_chat(
        body.messages,
        body,
        config=state.config,
        tokenizer=engine.tokenizer,
        executor=state.executor,
        tools=plan.definitions,
        extra_kwargs=_effort_kwargs(body.reasoning_effort),
        max_tokens=None if body.truncate_prompt_tokens is not None else engine.max_model_len,
    )


def _form(body: ChatRequest, plan: ToolPlan) -> AnswerForm | None:
    """Return what the answer is held to; raises `ApiError` 400 if that rules its tools out."""
    form = answer_form(body)
    if form is not None and plan.parser is not None:
        raise invalid(
            form.param,
            f"{form.param} would keep the model from calling its tools: "
            "leave it out, or set tool_choice to 'none'",
        )
    return form if plan.grammar is None else AnswerForm(plan.grammar, "tools")


def _effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Return what tells the template how much to reason."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise invalid(
            "reasoning_effort", f"reasoning_effort must be one of {list(EFFORTS)}, got {effort!r}"
        )
    if effort == "none":
        # Templates that know no effort know this switch.
        return {"reasoning_effort": effort, "enable_thinking": False}
    return {"reasoning_effort": effort}


def _echo(body: ChatRequest) -> str:
    """Return the text of the last message, if it is the assistant's and is to be repeated."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.text or "" for part in last.content)
