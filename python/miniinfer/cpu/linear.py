"""Linear layers whose weights are packed for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._core import PackedLinear, kernel_isa, set_kernel_threads

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Part", "QuantLinear", "kernel_isa", "set_kernel_threads"]

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
        self._check(x, self.columns, out)
        if norm is not None:
            _check_tensor("norm", norm, (self.columns,))
        weight = 0 if norm is None else norm.data_ptr()
        self.kernel.forward(x.data_ptr(), out.data_ptr(), x.shape[0], weight, epsilon, False, False)
        return out

    def add_to(self, x: Tensor, out: Tensor, *, silu: bool = False) -> Tensor:
        """Add the product with x [T, columns] to `out` [T, rows]: a residual connection.

        `silu`: x is [T, 2 * columns]; SiLU of its first half times its second is multiplied.
        """
        self._check(x, 2 * self.columns if silu else self.columns, out)
        self.kernel.forward(x.data_ptr(), out.data_ptr(), x.shape[0], 0, 0.0, silu, True)
        return out

    def gather(self, indices: Tensor, out: Tensor) -> Tensor:
        """`out` [T, columns] = the rows of the weights at `indices`, int32 [T]: an embedding.

        Raises `IndexError` for an index that is not a row.
        """
        _check_tensor("indices", indices, (len(indices),), "int32")
        _check_tensor("out", out, (len(indices), self.columns))
        self.kernel.gather(indices.data_ptr(), len(indices), out.data_ptr())
        return out

    def _check(self, x: Tensor, columns: int, out: Tensor) -> None:
        _check_tensor("x", x, (x.shape[0], columns))
        _check_tensor("out", out, (x.shape[0], self.rows))


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: str = "float32"
) -> None:
    import torch

    expected: Any = torch.float32 if dtype == "float32" else torch.int32
    if tensor.dtype is expected and tensor.shape == shape and tensor.is_contiguous():
        return
    raise ValueError(
        f"{name} must be {dtype} {list(shape)} and contiguous, "
        f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    )
