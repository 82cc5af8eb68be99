"""The forward pass of a step: model, KV cache, sampler."""

from __future__ import annotations

import torch

from .backends import Backend, attach_attention, backend_of
from .model.kv_cache import KVCache
from .model.llama import LlamaModel
from .prompt_logprobs import report_prompts
from .step import StepBuffers

__all__ = ["ModelRunner", "attach_attention"]


class ModelRunner:
    """Runs planned steps over one model and its KV cache of `num_blocks` blocks.

    `kv_dtype`: of the cache; by default the model's. `backend`: what computes; by default what
    needs torch and this package alone.
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
    ) -> None:
        config = model.config
        backend = backend_of(model) if backend is None else backend
        self.model = model
        self.vocab_size = vocab_size
        self.cache = KVCache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            model.dtype if kv_dtype is None else kv_dtype,
            model.device,
            model.kv_scales,
        )
        backend.attach(model, self.cache)
        self._sample = backend.sample

    @torch.inference_mode()
    def run(self, buffers: StepBuffers) -> None:
        """Compute a planned step and leave what was sampled in its buffers."""
        header = buffers.header()
        batch = buffers.forward_batch(header)
        hidden = self.model.forward(batch)
        report_prompts(
            buffers, header, lambda index: self.model.logits(hidden, index), self.vocab_size
        )
        if header.num_samples == 0:
            return
        logits = self.model.logits(hidden, batch.logits_index)
        output = self._sample(logits, buffers.sampling_batch(header), self.vocab_size)
        buffers.write_samples(output)
