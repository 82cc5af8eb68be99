"""A step on its way through the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..prompt_logprobs import PromptScores
from ..sampling import SampleOutput
from ..step import StepBuffers

__all__ = ["LaunchedStep"]


class LaunchedStep:
    """What was queued for a step, and what becomes of it. `finish` comes before its commit."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.scores: PromptScores | None = None
        self.output: SampleOutput | None = None
        """Set by the device, which does so before what is queued later."""
        self.inputs: list[Any] = []
        """Kept until the device has done with them."""
        self.wait: Callable[[], None] | None = None

    @property
    def sampled(self) -> Tensor | None:
        """The step's tokens on the device, int32 [N]; None if it failed before it had any."""
        return None if self.output is None else self.output.sampled

    def fetch(self) -> None:
        """Copy the results to the host: work for the device."""
        if self.scores is not None:
            self.scores.fetch()
        if self.output is not None:
            self.buffers.write_samples(self.output)

    def finish(self) -> None:
        """Wait until the results are where the core reads them. Raises what the device raised."""
        assert self.wait is not None, "the step was launched whole"
        self.wait()
        self.inputs.clear()
        if self.scores is not None:
            self.scores.report()
