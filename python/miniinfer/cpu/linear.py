"""Linear layers whose weights are packed for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .._core import PackedLinear, kernel_isa, profile_kernels, set_kernel_threads

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Part", "QuantLinear", "kernel_isa", "profile_kernels", "set_kernel_threads"]

Bytes = npt.NDArray[np.uint8]

Part = tuple[int, int, Bytes, int, int]
"""Number of a ggml type, bits to quantise it to if it is F32 (0: as it is), the raw bytes, rows,
columns."""


class QuantLinear:
    """`y = prepare(x) W^T + b` over packed weights, quantised ones or plain ones.

    `parts`: the weights, one below the other. `bias`: [rows]. Where weights are quantised, so are
    inputs, to 8 bits with a scale for each row and group of weights; sums are float32. A row's
    result does not depend on the other rows of a call, bit for bit. Needs no torch until it is
    called. Raises `ValueError` for weights that have no kernel, whose rows are not whole groups, or
    whose bytes do not fit their shape.
    """

    def __init__(self, parts: Sequence[Part], bias: Sequence[float] | None = None) -> None:
        self.kernel = PackedLinear(list(parts), None if bias is None else list(bias))
        self.rows = self.kernel.rows
        self.columns = self.kernel.columns
        self.num_bytes = self.kernel.num_bytes

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weights."""
        return self.rows, self.columns

    def forward(
        self, x: Tensor, out: Tensor, *, norm: Tensor | None = None, epsilon: float = 0.0
    ) -> Tensor:
        """`out` [T, rows] = the product with x [T, columns]; with `norm`, RMSNorm of x comes first.

        All float32 and contiguous; `norm` [columns].
        """
        inputs, results = self._addresses(x, self.columns, out)
        weight = 0 if norm is None else _address("norm", norm, (self.columns,))
        self.kernel.forward(inputs, results, x.shape[0], weight, epsilon, False, False)
        return out

    def add_to(self, x: Tensor, out: Tensor, *, silu: bool = False) -> Tensor:
        """Add the product with x [T, columns] to `out` [T, rows]: a residual connection.

        `silu`: x is [T, 2 * columns]; SiLU of its first half times its second is multiplied.
        """
        inputs, results = self._addresses(x, 2 * self.columns if silu else self.columns, out)
        self.kernel.forward(inputs, results, x.shape[0], 0, 0.0, silu, True)
        return out

    def gather(self, indices: Tensor, out: Tensor) -> Tensor:
        """`out` [T, columns] = the rows of the weights at `indices`, int32 [T]: an embedding.

        Raises `IndexError` for an index that is not a row.
        """
        import torch

        from .tensors import address

        count = len(indices)
        where = address("indices", indices, (count,), torch.int32)
        self.kernel.gather(where, count, address("out", out, (count, self.columns)))
        return out

    def _addresses(self, x: Tensor, columns: int, out: Tensor) -> tuple[int, int]:
        rows = x.shape[0]
        return _address("x", x, (rows, columns)), _address("out", out, (rows, self.rows))


def _address(name: str, tensor: Tensor, shape: tuple[int, ...]) -> int:
    # Not before it is called: it imports torch, which loading weights does without.
    from .tensors import address

    return address(name, tensor, shape)
