"""The loop around a step: plan, launch, wait, commit; one step at a time or two."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from .._core import Driver
from ..runner import ModelRunner
from ..safe_logging import safe_logger
from ..step import StepBuffers
from .launched import LaunchedStep

__all__ = ["MAX_FAILURES", "Steps"]

logger = safe_logger("miniinfer.engine")

MAX_FAILURES = 3
"""Steps that may fail one after the other before the engine gives up."""


class _Step:
    """A step that is planned and not committed."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.slot = buffers.slot
        self.launched: LaunchedStep | None = None
        """None if it has been computed, or could not be launched."""
        self.error: Exception | None = None


class Steps:
    """Runs steps of a core over one slot's buffers, or overlapped over those of two.

    Overlapped, the next step is planned and its inputs are copied while one runs, and tokens go
    from step to step on the device. Each call of `step` still commits one step.
    """

    def __init__(
        self,
        core: Driver,
        runner: ModelRunner,
        buffers: Sequence[StepBuffers],
        *,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self._core = core
        self._runner = runner
        self._buffers = buffers
        self._overlapped = len(buffers) > 1
        self._next = 0
        self._steps: deque[_Step] = deque()
        self._failures = 0
        self._max_failures = max_failures

    def step(self) -> bool:
        """Commit a step. False if there was nothing to compute.

        A forward that fails ends the requests of its step; after `max_failures` in a row
        the exception is raised.
        """
        try:
            if not self._steps and not self._start():
                return False
            if self._overlapped and len(self._steps) == 1:
                self._start()
            self._end()
        except BaseException as error:
            self._abandon(error)
            raise
        return True

    def drain(self) -> None:
        """Commit what is under way, and plan nothing."""
        try:
            while self._steps:
                self._end()
        except BaseException as error:
            self._abandon(error)
            raise

    def _start(self) -> bool:
        """Plan a step and launch it behind the one under way. False if there is none to plan."""
        buffers = self._buffers[self._next]
        if not self._core.plan(buffers.slot):
            return False
        before = self._steps[-1].launched if self._steps else None
        step = _Step(buffers)
        self._steps.append(step)
        self._next = (self._next + 1) % len(self._buffers)
        try:
            if self._overlapped:
                step.launched = self._runner.launch(buffers, before)
            else:
                self._runner.run(buffers)
        except Exception as error:
            # Its turn to fail comes when the step before it has ended.
            step.error = error
        return True

    def _end(self) -> None:
        """Commit the oldest step under way, or end its requests if its forward failed."""
        step = self._steps[0]
        try:
            if step.error is not None:
                raise step.error
            if step.launched is not None:
                step.launched.finish()
        except Exception as error:
            self._steps.popleft()
            # The engine may have been given up, and then there is no step to end.
            with contextlib.suppress(RuntimeError):
                self._core.fail_step(step.slot, _reason(error))
            self._failures += 1
            if self._failures >= self._max_failures:
                raise
            logger.exception("the forward pass failed; the requests of this step are lost")
            return
        self._core.commit(step.slot)
        self._steps.popleft()
        self._failures = 0

    def _abandon(self, error: BaseException) -> None:
        """End all that is under way, when an interrupt may have come anywhere."""
        for step in self._steps:
            # The device must have done with the buffers before they are used again.
            if step.launched is not None:
                with contextlib.suppress(Exception):
                    step.launched.finish()
        self._steps.clear()
        # Steps end in order; which of them is the older one may not have been noted.
        for buffers in (*self._buffers, *self._buffers):
            with contextlib.suppress(RuntimeError):
                self._core.fail_step(buffers.slot, _reason(error))


def _reason(error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    return f"the forward pass failed: {type(error).__name__}: {first_line}"
