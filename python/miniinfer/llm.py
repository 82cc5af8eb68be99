"""Offline generation."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Self

import msgspec

from .config import EngineArgs
from .llm_engine import LLMEngine
from .outputs import RequestOutput
from .prompts import Prompt
from .sampling_params import ParameterError, RequestOutputKind, SamplingParams

__all__ = ["LLM"]


class LLM:
    """A model to generate with, for programs without an event loop.

    `model` and the keyword arguments are those of `EngineArgs`. Any thread may call;
    a call waits for that of another thread to end. A stream waits only while it has no output.

        llm = LLM()
        outputs = llm.generate(["Hello,", "Once upon a time"], SamplingParams(max_tokens=32))
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        self.llm_engine = LLMEngine(EngineArgs(model=model, **engine_args))
        self._mail: dict[str, deque[RequestOutput]] = {}
        """Outputs for each stream that is open."""
        self._turn = threading.RLock()
        """Held by the thread that drives the engine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every request that is still open, and take no more."""
        for request_id in list(self._mail):
            self._drop(request_id)
        self.llm_engine.engine.core.fail("it was closed")
        self.llm_engine.engine.close()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's `generation_config.json` recommends."""
        return self.llm_engine.default_params()

    def get_metrics(self) -> dict[str, Any]:
        """Counters and gauges of the engine, by name."""
        return self.llm_engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self.llm_engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; the outputs are in the order of the prompts.

        `prompts`: texts, lists of token ids, or mappings (see `Prompt`). `sampling_params`: one for
        all, or one for each prompt. `use_tqdm`: a progress bar; by default if stderr is a terminal.
        Raises `ValueError` naming the prompt before anything is computed.
        """
        many = _as_list(prompts)
        params = self._params_for(sampling_params, len(many))
        if priority is not None and len(priority) != len(many):
            raise ParameterError(
                "priority", f"{len(many)} prompts need as many priorities, got {len(priority)}"
            )
        priorities = [0] * len(many) if priority is None else priority
        ids: list[str] = []
        with self._turn:
            try:
                for at, (prompt, each) in enumerate(zip(many, params, strict=True)):
                    ids.append(self._add(at, prompt, each, priorities[at]))
                return self._run(ids, use_tqdm)
            finally:
                for request_id in ids:
                    self._drop(request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        A conversation is a list of messages with `role` and `content`. `chat_template_kwargs` go to
        the template, as `enable_thinking` does. Raises `ChatTemplateError` where it cannot render.
        """
        prompts = [
            self.llm_engine.tokenizer.encode_chat(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield what is new as it comes; the last one is `finished`.

        Closing the iterator cancels the request.
        """
        params = sampling_params or self.get_default_sampling_params()
        params = msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)
        with self._turn:
            return _Stream(self, self.llm_engine.add_request(None, prompt, params))

    def _params_for(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        params = [given] * count if isinstance(given, SamplingParams) else list(_items(given))
        if len(params) != count:
            raise ParameterError(
                "sampling_params",
                f"{count} prompts need one SamplingParams or as many, got {len(params)}",
            )
        for each in params:
            if not isinstance(each, SamplingParams):
                raise ParameterError(
                    "sampling_params",
                    f"sampling_params must be SamplingParams or a list of them, got {each!r}",
                )
        kind = RequestOutputKind.FINAL_ONLY
        return [msgspec.structs.replace(each, output_kind=kind) for each in params]

    def _add(self, at: int, prompt: Prompt, params: SamplingParams, priority: int) -> str:
        try:
            return self.llm_engine.add_request(None, prompt, params, priority=priority)
        except ValueError as error:
            error.add_note(f"in prompt {at}")
            raise

    def _run(self, ids: list[str], use_tqdm: bool | None) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        missing = set(ids)
        with _Progress(len(ids), use_tqdm) as progress:
            while missing:
                for output in self._step():
                    if output.request_id in missing:
                        missing.remove(output.request_id)
                        outputs[output.request_id] = output
                        progress.add(output)
        return [outputs[request_id] for request_id in ids]

    def _step(self) -> list[RequestOutput]:
        """One step. Streams that are open meanwhile get their outputs; the others are returned."""
        others = []
        for output in self.llm_engine.step():
            mail = self._mail.get(output.request_id)
            if mail is None:
                others.append(output)
            else:
                mail.append(output)
        return others

    def _drop(self, request_id: str) -> None:
        self._mail.pop(request_id, None)
        self.llm_engine.discard_request(request_id)


class _Stream(Iterator[RequestOutput]):
    """One request's outputs as they come. An object, not a generator: it ends its request even if
    nobody ever asked it for an output."""

    def __init__(self, owner: LLM, request_id: str) -> None:
        self._owner = owner
        self._request_id = request_id
        self._mail: deque[RequestOutput] = deque()
        owner._mail[request_id] = self._mail

    def __next__(self) -> RequestOutput:
        while not self._mail:
            with self._owner._turn:
                # The thread that had the turn before may have brought an output, or the end.
                if self._mail:
                    break
                if self._request_id not in self._owner._mail:
                    raise StopIteration
                self._owner._step()
        output = self._mail.popleft()
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """End the request and yield nothing more."""
        self._owner._drop(self._request_id)
        self._mail.clear()

    def __del__(self) -> None:
        self.close()


class _Progress:
    """A bar with tokens per second, or nothing."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        self._bar = None
        if sys.stderr.isatty() if wanted is None else wanted:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="Generating", unit="prompt", dynamic_ncols=True)
        self._started = time.perf_counter()
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> Self:
        return self

    def add(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(choice.token_ids) for choice in output.outputs)
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        rates = f"{self._tokens_in / elapsed:.0f} in, {self._tokens_out / elapsed:.0f} out tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        many = list(prompts)
    except TypeError:
        kind = type(prompts).__name__
        message = f"prompts must be a text, token ids, a mapping or a list of these, got {kind}"
        raise ParameterError("prompts", message) from None
    # Token ids, which may be numpy's; a list of prompts holds no numbers.
    if isinstance(prompts, bytes) or (many and isinstance(many[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _conversations(messages: Sequence[Any]) -> list[list[dict[str, Any]]]:
    several = [messages] if messages and isinstance(messages[0], Mapping) else messages
    for conversation in several:
        for message in [conversation] if isinstance(conversation, str) else conversation:
            if not isinstance(message, Mapping):
                raise ParameterError(
                    "messages",
                    "messages must be a list of mappings with role and content, or a list of such "
                    f"lists; got {message!r} for a message",
                )
    return [[dict(message) for message in conversation] for conversation in several]


def _items(given: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    # Anything else than a list is one wrong item, which is what the error is to name.
    return given if isinstance(given, list | tuple) else [given]  # type: ignore[list-item]
