"""A matrix product with the rounding of its input that the stored weight asks for."""

from collections.abc import Callable

from torch import Tensor

from ...kernels import linear
from ...kernels.reference import linear as blas

_BLAS_ROWS = 24
"""From here on BLAS outruns the kernel; its bits depend on the number of rows."""


class Linear:
    """``y = x W^T``. A weight stored in FP8 or FP4 rounds its input by ``activation`` first; None leaves it alone."""

    def __init__(
        self, weight: Tensor, activation: Callable[[Tensor], Tensor] | None, deterministic: bool
    ) -> None:
        self._panels = linear.pack_weight(weight)
        self._outer = weight.shape[0]
        self._activation = activation
        self._deterministic = deterministic

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [T, in] to [T, out]."""
        return self.product(x if self._activation is None else self._activation(x))

    def product(self, x: Tensor) -> Tensor:
        """The product alone, for ``x`` that is rounded already."""
        if self._deterministic or x.shape[0] < _BLAS_ROWS:
            return linear.matmul_rows(x, self._panels, self._outer)
        return blas.matmul_rows(x, self._panels, self._outer)
