"""Decode steps as CUDA graphs: what is launched is recorded once and then repeated as a whole.

A graph has fixed shapes, so a step is padded to the next of a few sizes. It has fixed launches
too, which may depend on the longest context: that is rounded up to one of a few lengths.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..model.batch import ForwardBatch
from ..safe_logging import safe_logger
from ..step import StepHeader
from .device_buffers import DecodeInputs

__all__ = [
    "CudaGraphs",
    "DecodeGraphs",
    "GraphBackend",
    "GraphLimits",
    "context_limits",
    "graph_backend",
    "graph_sizes",
]

logger = safe_logger(__name__)

_SHORTEST_LIMIT = 1024
"""Contexts up to this long are launched alike: they take a small share of a decode's time."""
_LIMIT_RATIO = 8
_MOST_DECODES = 512
"""Larger steps compute far longer than they are launched, and each graph takes memory."""


class GraphBackend(Protocol):
    """Records work and repeats it."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record what `run` launches. The result launches it again, over the same memory.

        What it returns is good until the next graph of this backend is launched.
        """


class CudaGraphs:
    """CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._pool: Any = None

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `GraphBackend`."""
        # Once without recording: kernels are compiled and libraries set up at their first call.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What an engine's steps may come to."""

    max_num_seqs: int
    max_model_len: int


def graph_backend(device: torch.device, attention: Any) -> GraphBackend | None:
    """What records decode steps on a device, or None where that cannot be done.

    `attention` says so by `is_capturable`: that its launches follow from the shapes and scalars of
    a batch alone.
    """
    if device.type != "cuda" or not getattr(attention, "is_capturable", False):
        return None
    return CudaGraphs(device)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of requests that there are graphs for, ascending."""
    most = min(max_num_seqs, _MOST_DECODES)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most, 64)]
    return [*(size for size in sizes if size < most), most]


def context_limits(max_model_len: int) -> list[int]:
    """The longest contexts that there are graphs for, ascending."""
    limits = [max_model_len]
    while limits[0] > _SHORTEST_LIMIT:
        limits.insert(0, max(limits[0] // _LIMIT_RATIO, _SHORTEST_LIMIT))
    return limits


class DecodeGraphs:
    """The forward pass of steps that only decode, captured size by size when first needed.

    `forward` maps a batch to one row for each of its tokens, [T, H]. `scratch_block`: a block of
    the cache that the engine does not know of. All graphs leave their rows in one place, and share
    the rest of their memory: what one returned would otherwise be kept for as long as it is there.
    """

    def __init__(
        self,
        backend: GraphBackend,
        forward: Callable[[ForwardBatch], Tensor],
        limits: GraphLimits,
        *,
        block_size: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self._forward = forward
        self._sizes = graph_sizes(limits.max_num_seqs)
        self._limits = context_limits(limits.max_model_len)
        self._inputs = DecodeInputs(
            self._sizes[-1],
            limits.max_num_seqs,
            -(-limits.max_model_len // block_size),
            block_size,
            scratch_block,
            device,
        )
        self._captured: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._output: Tensor | None = None
        self._has_failed = False

    @property
    def captured(self) -> list[tuple[int, int]]:
        """Requests and longest context of each graph there is."""
        return sorted(self._captured)

    def takes(self, header: StepHeader) -> bool:
        """Whether a step has a token for each of its sequences and samples for all."""
        if header.num_decodes > self._sizes[-1]:
            return False
        return header.num_decodes == header.num_tokens == header.num_samples

    def run(self, batch: ForwardBatch) -> Tensor:
        """What `forward` makes of a step that `takes` accepts: [N, H], good until the next call.

        Once a graph could not be captured, for want of memory as a rule, no other is tried.
        """
        count = batch.num_decodes
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        limit = self._limits[bisect.bisect_left(self._limits, batch.max_seq_len)]
        replay = self._captured.get((size, limit))
        if replay is None and self._has_failed:
            return self._forward(batch)
        self._inputs.fill(batch)
        if replay is None:
            logger.debug("capturing a graph of %d decodes in contexts up to %d", size, limit)
            try:
                replay = self._backend.capture(lambda: self._record(size, limit))
            except RuntimeError as error:
                self._has_failed = True
                reason = str(error).partition("\n")[0]
                logger.warning(
                    "no graph of %d decodes can be captured, and no others are tried (%s): steps "
                    "without one are slower. A lower gpu_memory_utilization leaves more room",
                    size,
                    reason,
                )
                return self._forward(batch)
            self._captured[size, limit] = replay
        return replay()[:count]

    def _record(self, size: int, limit: int) -> Tensor:
        rows = self._forward(self._inputs.batch(size, limit))
        if self._output is None:
            self._output = rows.new_empty(self._sizes[-1], *rows.shape[1:])
        return self._output[:size].copy_(rows)
