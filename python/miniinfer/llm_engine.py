"""The step loop, for those who drive it themselves."""

from __future__ import annotations

from typing import Any

from ._core import Submission
from .config import EngineArgs
from .engine import Engine
from .outputs import RequestOutput, RequestState
from .parameters import ParameterError
from .prompts import Prompt, encode_prompt
from .sampling_params import SamplingParams

__all__ = ["LLMEngine"]


class LLMEngine:
    """Requests in, steps, outputs. Everything happens in the thread that calls.

    engine = LLMEngine(EngineArgs())
    engine.add_request("a", "The capital of France is", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text)
    """

    def __init__(self, args: EngineArgs) -> None:
        self.engine = Engine(args, text_thread=False)
        self.tokenizer = self.engine.tokenizer
        self._states: dict[str, RequestState] = {}
        self._submissions: dict[str, Submission] = {}
        self._by_choice: dict[int, RequestState] = {}
        self._next_id = 0

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Load the model that `args` name."""
        return cls(args)

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request and return its id; None for one of the engine's choosing.

        Raises `RequestError` for a request that can never run, `ParameterError` for a bad parameter
        or an id that is in use.
        """
        if request_id is None:
            request_id = self._unused_id()
        if request_id in self._states:
            raise ParameterError("request_id", f"request id {request_id!r} is already in use")
        text, token_ids = encode_prompt(prompt, self.tokenizer)
        params = self.default_params() if params is None else params
        submission = self.engine.submit(
            token_ids, params, priority=priority, tenant=tenant, cache_salt=cache_salt
        )
        state = RequestState(
            request_id, text, token_ids, params.n, params.output_kind, params.logprobs is not None
        )
        self._states[request_id] = state
        self._submissions[request_id] = submission
        first, n = submission.ids()
        self._by_choice.update(dict.fromkeys(range(first, first + n), state))
        return request_id

    def default_params(self) -> SamplingParams:
        """The sampling parameters that the model's files recommend."""
        return SamplingParams(**self.engine.default_sampling_params())

    def _unused_id(self) -> str:
        while True:
            self._next_id += 1
            request_id = f"request-{self._next_id}"
            if request_id not in self._states:
                return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step; return the outputs of the requests that have news.

        Raises what the forward pass raises when it fails too often in a row. The engine has then
        stopped: the next step returns the last outputs of all requests, and no new ones are taken.
        """
        try:
            self.engine.step()
        except KeyboardInterrupt:
            # The requests of this step are lost, the engine is not.
            raise
        except BaseException as error:
            self.engine.core.fail(f"{type(error).__name__}: {error}")
            self.engine.close()
            raise
        return self._collect()

    def _collect(self) -> list[RequestOutput]:
        fresh: dict[str, RequestState] = {}
        for choice, delta in self.engine.core.drain():
            state = self._by_choice.get(choice)
            if state is not None:
                state.add(delta)
                fresh[state.request_id] = state
        outputs = []
        for request_id, state in fresh.items():
            output = state.take_output()
            if output is not None:
                outputs.append(output)
            if state.finished:
                self._forget(request_id)
        self._rest()
        return outputs

    def _rest(self) -> None:
        """With nobody left to step for, a step under way keeps nothing."""
        if not self._states:
            self.engine.drain()

    def _forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        submission = self._submissions.pop(request_id, None)
        if submission is not None:
            first, n = submission.ids()
            for choice in range(first, first + n):
                self._by_choice.pop(choice, None)
            submission.close()

    def abort_request(self, request_id: str) -> bool:
        """End a request; its last output, with what it has, comes with the next step.

        False if there is no such request: it ended, or never was.
        """
        submission = self._submissions.get(request_id)
        if submission is None:
            return False
        submission.cancel()
        return True

    def discard_request(self, request_id: str) -> None:
        """End a request and hear no more of it."""
        self._forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not yielded its last output."""
        return bool(self._states)

    def is_finished(self, request_id: str) -> bool:
        """Whether the request has yielded its last output, or is unknown."""
        return request_id not in self._states

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self.engine.core.reset_prefix_cache()
        return True

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the core, by name."""
        return self.engine.core.stats()
