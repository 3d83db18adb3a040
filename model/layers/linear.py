"""A matrix product with the rounding of its input that the stored weight asks for."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.reference.linear import matmul_rows, padded_rows


class Linear:
    """``y = x W^T``. A weight stored in FP8 or FP4 rounds its input by ``activation`` first; None leaves it alone."""

    def __init__(self, weight: Tensor, activation: Callable[[Tensor], Tensor] | None, tiled: bool) -> None:
        self._weight_t = weight.t().contiguous()
        self._activation = activation
        self._tiled = tiled

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [T, in] to [T, out]; T is whole tiles when tiled."""
        if self._activation is not None:
            x = self._activation(x)
        return matmul_rows(x, self._weight_t, self._tiled)


def pad_to_tile(x: Tensor) -> Tensor:
    """``x`` [T, n] with zero rows up to whole tiles."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


