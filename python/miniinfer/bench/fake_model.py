"""The compiled core driven without a model: the tokens that it is given are scripted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miniinfer._core import Delta, Submission
from miniinfer._core import Engine as Core

__all__ = ["FakeModel", "tokenizer_json"]

# Fields of the core's `header` array.
_NUM_SAMPLES = 3


def tokenizer_json(vocab_size: int) -> bytes:
    """Return a `tokenizer.json` in which token i reads `<i>`."""
    vocab = {f"<{token}>": token for token in range(vocab_size)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"model": model, "decoder": {"type": "Fuse"}}).encode()


class FakeModel:
    """A core and a stand-in for the model: what follows a token at position p is `script[p + 1]`.

    The script starts over where it ends, so the tokens of a request depend on its positions alone,
    however it is scheduled. One thread drives `plan`, `sample` and `commit`.

    Args:
        script: Token ids, at least one, each below `vocab_size`.
        vocab_size: Token ids below this may be given and sampled.
        tokenizer: A `tokenizer.json` of at least as many tokens; without it token i reads `<i>`.
        eos_token_ids: Ids that end a request which does not ignore them.
        limits: The limits of `_core.Engine` by name; what is not given has a default.
    """

    def __init__(
        self,
        script: Sequence[int],
        *,
        vocab_size: int = 4096,
        tokenizer: bytes | None = None,
        eos_token_ids: Sequence[int] = (),
        **limits: Any,
    ) -> None:
        if not script:
            raise ValueError("script must hold at least one token, got none")
        wrong = next((token for token in script if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"script must hold ids from 0 to {vocab_size - 1}, got {wrong}")
        defaults = {
            "block_size": 16,
            "num_blocks": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "max_model_len": 2048,
        }
        self.core = Core(
            tokenizer_json=tokenizer or tokenizer_json(vocab_size),
            vocab_size=vocab_size,
            eos_token_ids=list(eos_token_ids),
            **(defaults | limits),
        )
        self._script = np.asarray(script, dtype=np.int32)
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(length, dtype=dtype) for name, dtype, length in self.core.array_specs()
        }
        self.core.register_slot(0, self.arrays)

    def submit(self, prompt: list[int], **params: Any) -> Submission:
        """Queue a prompt. `params` are those of `_core.Engine.submit`; greedy if not told."""
        return self.core.submit(prompt, {"temperature": 0.0, **params})  # type: ignore[typeddict-item]

    def plan(self) -> int:
        """Plan a step; return its tokens. With 0 there is nothing to commit."""
        return self.core.plan(0)

    def sample(self) -> int:
        """Fill in the tokens of the planned step; return how many."""
        arrays = self.arrays
        count = int(arrays["header"][_NUM_SAMPLES])
        positions = arrays["positions"][arrays["logits_index"][:count]]
        arrays["sampled"][:count] = self._script[(positions + 1) % len(self._script)]
        return count

    def commit(self) -> None:
        """Hand the step's tokens to the core."""
        self.core.commit(0)

    def step(self) -> int:
        """Plan, sample, commit. Return the tokens computed; 0 if there was nothing to do."""
        tokens = self.plan()
        if tokens:
            self.sample()
            self.commit()
        return tokens

    def drain(self) -> list[tuple[int, Delta]]:
        """Return what became ready: pairs of a choice's id and its delta."""
        return self.core.drain()

    def expected(self, prompt_len: int, count: int) -> list[int]:
        """Return the first `count` tokens that follow a prompt of `prompt_len` tokens."""
        positions = np.arange(prompt_len, prompt_len + count)
        return [int(token) for token in self._script[positions % len(self._script)]]
