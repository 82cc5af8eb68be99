"""The same loads for the compiled core and for the scheduler in plain Python."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, Protocol

from .fake_model import FakeModel
from .python_scheduler import PythonScheduler

__all__ = ["CoreLoad", "Load", "LoadSize", "PythonLoad"]

VOCAB = 4096
BLOCK_SIZE = 16

# Prompts of decoding requests: 64 to 191 tokens, so that blocks fill up at different steps.
_SHORTEST, _SPREAD = 64, 128


@dataclass(frozen=True, slots=True)
class LoadSize:
    """How many requests a load has, and how far they may go."""

    running: int
    """Requests that decode; 0 for an engine that has yet to be given any."""
    waiting: int = 0
    """Requests behind them, for which there is no row."""
    steps: int = 256
    """Decode steps there is room for."""
    max_num_batched_tokens: int = 8192
    max_model_len: int = 2048

    def limits(self) -> dict[str, Any]:
        """Return the limits of an engine for this load: no row beyond the running requests'."""
        prompt = _SHORTEST + _SPREAD
        # The first to decode do so while the prompts of the others are computed.
        prefill_steps = 2 * self.running * prompt // self.max_num_batched_tokens + 2
        longest = -(-(prompt + prefill_steps + self.steps) // BLOCK_SIZE)
        # One more for each: admission keeps as many free.
        blocks = max(self.running * (longest + 1), 8192)
        return {
            "block_size": BLOCK_SIZE,
            "num_blocks": blocks,
            "max_num_seqs": self.running or 256,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
        }


class Load(Protocol):
    """What is measured: seconds per step, and requests coming and going."""

    def step(self) -> float:
        """Make one step; return the seconds that plan and commit took."""

    def submit(self, prompt: list[int]) -> int:
        """Queue a prompt and return the request's number."""

    def plan(self) -> int:
        """Plan a step; return its tokens."""

    def finish_step(self) -> None:
        """Sample for a planned step and commit it."""

    def cancel(self, number: int) -> None:
        """Cancel a request."""

    def forget(self) -> None:
        """Make the next prompt a cold one."""

    def num_sampled(self) -> int:
        """Return the tokens that the last step sampled."""


def random_prompt(generator: random.Random, length: int) -> list[int]:
    """Return a prompt that shares no block with another one."""
    return generator.choices(range(VOCAB), k=length)


def start(load: Load, size: LoadSize, seed: int) -> None:
    """Bring a load to where all its running requests decode."""
    generator = random.Random(seed)
    for number in range(size.running):
        load.submit(random_prompt(generator, _SHORTEST + number % _SPREAD))
    while size.running and load.num_sampled() < size.running:
        load.step()
    for _ in range(size.waiting):
        load.submit(random_prompt(generator, _SHORTEST))
    if size.waiting:
        load.step()


class CoreLoad:
    """The compiled core as Python drives it, its text thread included."""

    def __init__(self, size: LoadSize, seed: int = 0) -> None:
        script = random_prompt(random.Random(seed), 1021)
        self.model = FakeModel(script, vocab_size=VOCAB, **size.limits())
        self.submissions: list[Any] = []
        self.drained: list[float] = []
        self._sampled = 0
        start(self, size, seed)

    def step(self) -> float:
        """Make one step; return the seconds that plan and commit took."""
        model, clock = self.model, time.perf_counter
        begun = clock()
        tokens = model.plan()
        planned = clock()
        if tokens:
            self._sampled = model.sample()
            resumed = clock()
            model.commit()
            committed = clock()
        else:
            resumed = committed = planned
        self.drain()
        return planned - begun + committed - resumed

    def drain(self) -> None:
        """Take what is ready; note the seconds per token."""
        begun = time.perf_counter()
        deltas = self.model.drain()
        elapsed = time.perf_counter() - begun
        tokens = sum(len(delta.token_ids) for _, delta in deltas)
        if tokens:
            self.drained.append(elapsed / tokens)

    def submit(self, prompt: list[int]) -> int:
        """Queue a prompt and return the request's number."""
        submission = self.model.submit(prompt, temperature=0.7, top_p=0.9)
        self.submissions.append(submission)
        return len(self.submissions) - 1

    def plan(self) -> int:
        """Plan a step; return its tokens."""
        return self.model.plan()

    def finish_step(self) -> None:
        """Sample for a planned step and commit it."""
        self._sampled = self.model.sample()
        self.model.commit()
        self.model.drain()

    def cancel(self, number: int) -> None:
        """Cancel a request."""
        self.submissions[number].cancel()

    def forget(self) -> None:
        """Make the next prompt a cold one."""
        self.model.core.reset_prefix_cache()
        self.model.plan()

    def num_sampled(self) -> int:
        """Return the tokens that the last step sampled."""
        return self._sampled


class PythonLoad:
    """The scheduler in plain Python."""

    def __init__(self, size: LoadSize, seed: int = 0) -> None:
        self.scheduler = PythonScheduler(**size.limits())
        self._size = size
        self._generator = random.Random(seed)
        self._sampled = 0
        start(self, size, seed)

    def step(self) -> float:
        """Make one step; return the seconds that plan and commit took."""
        clock = time.perf_counter
        begun = clock()
        tokens = self.scheduler.plan()
        planned = clock()
        if not tokens:
            return planned - begun
        sampled = self._sample()
        resumed = clock()
        output = self.scheduler.commit(sampled)
        committed = clock()
        self._sampled = len(output)
        return planned - begun + committed - resumed

    def _sample(self) -> list[int]:
        return self._generator.choices(range(VOCAB), k=len(self.scheduler.planned))

    def submit(self, prompt: list[int]) -> int:
        """Queue a prompt and return the request's number."""
        return self.scheduler.submit(prompt, max_tokens=2**31, temperature=0.7, top_p=0.9) - 1

    def plan(self) -> int:
        """Plan a step; return its tokens."""
        return self.scheduler.plan()

    def finish_step(self) -> None:
        """Sample for a planned step and commit it."""
        self._sampled = len(self.scheduler.commit(self._sample()))

    def cancel(self, number: int) -> None:
        """Cancel a request."""
        self.scheduler.cancel(number + 1)

    def forget(self) -> None:
        """Make the next prompt a cold one."""
        self.scheduler = PythonScheduler(**self._size.limits())

    def num_sampled(self) -> int:
        """Return the tokens that the last step sampled."""
        return self._sampled
