"""A matrix product with the rounding of its input that the stored weight asks for."""

from torch import Tensor

from ...kernels.linear import pack_weight, panel_bits, product


class Linear:
    """``y = x W^T`` with ``x`` rounded as ``kind`` says, FP8 for a weight stored in FP8 or FP4.

    ``weight`` [N, K], or [G, N, K] for G weights, each with a slice of the input and of the output of its own.
    """

    def __init__(self, weight: Tensor, kind: int) -> None:
        panels = pack_weight(weight if weight.dim() == 3 else weight.unsqueeze(0))
        self.bits = panel_bits(panels)
        self.outer = weight.shape[-2]
        self._kind = kind

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [T, in] to [T, out]."""
        return product(x, self.bits, self.outer, self._kind)

    def product(self, x: Tensor) -> Tensor:
        """The product alone, for ``x`` that is rounded already."""
        return product(x, self.bits, self.outer)
