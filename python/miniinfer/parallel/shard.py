"""What part of a model each process holds.

The split is that of Megatron-LM (Shoeybi et al., 2019): matrices that widen are cut by outputs,
those that narrow by inputs, so that a layer has two sums over all processes and no other exchange.
"""

from __future__ import annotations

import dataclasses

from ..model.config import ModelConfig
from ..model.fill import Part

__all__ = ["Shard", "check_size"]

_ALL = slice(None)


def check_size(config: ModelConfig, size: int) -> None:
    """Raise `ValueError`, which names the sizes there are, for a model that has no `size` parts."""
    demand = _demand(config, size)
    if demand is None:
        return
    # All that divide the attention heads are among these.
    sizes = range(1, config.num_heads + 1)
    *most, largest = [str(each) for each in sizes if _demand(config, each) is None]
    fitting = f"{', '.join(most)} or {largest} would do" if most else f"only {largest} would do"
    raise ValueError(f"tensor_parallel_size must {demand}, got {size}: {fitting}")


def _demand(config: ModelConfig, size: int) -> str | None:
    """What the model demands of the number of its parts and `size` is not; None if it will do."""
    for count, what in (
        (config.num_heads, "attention heads"),
        (config.intermediate_size, "columns of the MLP (intermediate_size)"),
    ):
        if count % size:
            return f"divide the model's {count} {what}"
    heads = config.num_kv_heads
    if heads % size and size % heads:
        return f"divide the model's {heads} key-value heads or be a multiple of them"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a model that `check_size` has let through.

    The embedding and the norms are whole in every part. With more parts than key-value heads,
    several hold the same one. The rows of the last layer may not divide evenly: the last parts then
    have fewer of them.
    """

    rank: int
    size: int

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The part, as the configuration of a model that is complete in itself."""
        return dataclasses.replace(
            whole,
            num_heads=whole.num_heads // self.size,
            num_kv_heads=max(1, whole.num_kv_heads // self.size),
            intermediate_size=whole.intermediate_size // self.size,
        )

    def vocabulary(self, vocab_size: int) -> slice:
        """The tokens whose logits this part computes."""
        width = self.vocabulary_width(vocab_size)
        start = min(self.rank * width, vocab_size)
        return slice(start, min(start + width, vocab_size))

    def vocabulary_width(self, vocab_size: int) -> int:
        """The most tokens that a part has."""
        return -(-vocab_size // self.size)

    def part(self, name: str, whole: ModelConfig) -> Part | None:
        """What of the tensor of that name belongs here; None if all of it."""
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        if module in ("o_proj", "down_proj"):
            if kind == "bias":
                return None
            heads = module == "o_proj"
            return _ALL, self._heads(whole) if heads else self._inner(whole)
        outputs = {
            "q_proj": self._heads,
            "k_proj": self._kv_heads,
            "v_proj": self._kv_heads,
            "gate_proj": self._inner,
            "up_proj": self._inner,
            "lm_head": self._vocabulary,
        }
        if module not in outputs:
            return None
        rows = outputs[module](whole)
        return (rows,) if kind == "bias" else (rows, _ALL)

    def is_summed_bias(self, name: str) -> bool:
        """Whether the tensor is added before a sum over all parts, and so to one of them alone."""
        return name.endswith(("o_proj.bias", "down_proj.bias"))

    def _vocabulary(self, whole: ModelConfig) -> slice:
        return self.vocabulary(whole.vocab_size)

    def _heads(self, whole: ModelConfig) -> slice:
        width = whole.num_heads // self.size * whole.head_dim
        return slice(self.rank * width, (self.rank + 1) * width)

    def _kv_heads(self, whole: ModelConfig) -> slice:
        first = self.rank * whole.num_kv_heads // self.size
        count = max(1, whole.num_kv_heads // self.size)
        return slice(first * whole.head_dim, (first + count) * whole.head_dim)

    def _inner(self, whole: ModelConfig) -> slice:
        width = whole.intermediate_size // self.size
        return slice(self.rank * width, (self.rank + 1) * width)
