"""The forward pass of a step: model, KV cache, sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import Backend, attach_attention, backend_of
from .execution.graphs import DecodeGraphs, GraphLimits, graph_backend
from .execution.launched import LaunchedStep
from .execution.queue import on_device, queue_for
from .model.kv_cache import KVCache
from .model.llama import LlamaModel
from .prompt_logprobs import PromptScores
from .step import StepBuffers

__all__ = ["ModelRunner", "attach_attention"]


class ModelRunner:
    """Runs planned steps over one model and its KV cache of `num_blocks` blocks.

    `kv_dtype`: of the cache; by default the model's. `backend`: what computes; by default what
    needs torch and this package alone. `graph_limits`: of steps that may be
    captured as CUDA graphs; None for none.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        kv_dtype: torch.dtype | None = None,
        backend: Backend | None = None,
        graph_limits: GraphLimits | None = None,
    ) -> None:
        config = model.config
        backend = backend_of(model) if backend is None else backend
        self.model = model
        self.vocab_size = vocab_size
        self.cache = KVCache(
            config.num_layers,
            # Rows that pad a graph need a block of their own to write to.
            num_blocks + (graph_limits is not None),
            block_size,
            config.num_kv_heads,
            config.head_dim,
            model.dtype if kv_dtype is None else kv_dtype,
            model.device,
            model.kv_scales,
        )
        backend.attach(model, self.cache)
        self._sample = backend.sample
        self.queue = queue_for(model.device)
        self.graphs: DecodeGraphs | None = None
        if graph_limits is not None:
            graphs = graph_backend(model.device, model.attention)
            if graphs is not None:
                self.graphs = DecodeGraphs(
                    graphs,
                    model.forward,
                    graph_limits,
                    block_size=block_size,
                    scratch_block=num_blocks,
                    device=model.device,
                )

    def run(self, buffers: StepBuffers) -> None:
        """Compute a planned step and leave what was sampled in its buffers."""
        self.launch(buffers).finish()

    def launch(self, buffers: StepBuffers, before: LaunchedStep | None = None) -> LaunchedStep:
        """Have a planned step computed behind `before`, the source of its pending tokens."""
        with torch.inference_mode(), on_device(self.model.device):
            return self._launch(buffers, before)

    def _launch(self, buffers: StepBuffers, before: LaunchedStep | None) -> LaunchedStep:
        queue, header = self.queue, buffers.header()
        step = LaunchedStep(buffers)
        batch = queue.upload(lambda: buffers.forward_batch(header))
        source = queue.upload(lambda: buffers.source(header))
        step.inputs += [batch, source]
        if header.num_prompt_rows:
            step.scores = queue.upload(lambda: PromptScores(buffers, header))
        logits: list[Tensor] = []

        def forward() -> None:
            if before is not None:
                put_pending(batch.token_ids, source, before.sampled)
            if self.graphs is not None and self.graphs.takes(header):
                hidden = self.graphs.run(batch)
            else:
                hidden = self.model.forward(batch)
            if step.scores is not None:
                step.scores.compute(lambda index: self.model.logits(hidden, index), self.vocab_size)
            if header.num_samples:
                logits.append(self.model.logits(hidden, batch.logits_index))

        queue.run(forward)
        if header.num_samples:
            # What waits for masks waits beside the forward pass.
            sampling = queue.upload(lambda: buffers.sampling_batch(header))
            step.inputs.append(sampling)

            def choose() -> None:
                step.output = self._sample(logits.pop(), sampling, self.vocab_size)

            queue.run(choose)
        step.wait = queue.fetch(step.fetch)
        return step


def put_pending(token_ids: Tensor, source: Tensor, sampled: Tensor | None) -> None:
    """Put tokens that the step before sampled, int32 [N], at the front of `token_ids`.

    `source`: which of them, int32 [pending]. Where there is none, as the step failed or its logits
    were not finite, the row is for a request that has ended: it may hold any token.
    """
    if sampled is not None and len(source):
        token_ids[: len(source)] = sampled.index_select(0, source).clamp_(min=0)
