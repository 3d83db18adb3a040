"""Products of rows with a weight, each row's bits independent of the others (spec/model.md 2.4)."""

import numpy as np
import torch
from torch import Tensor

from ._gemm import multiply
from ._numba import compiled
from .reference.linear import pack_weight

__all__ = ["matmul_groups", "matmul_rows", "pack_weight"]


@compiled
def _panels(x: np.ndarray, panels: np.ndarray, y: np.ndarray) -> None:
    width = panels.shape[2]
    for p in range(panels.shape[0]):
        multiply(x, 0, panels[p], y, p * width, min(width, y.shape[1] - p * width))


@compiled
def _groups(x: np.ndarray, weights: np.ndarray, y: np.ndarray) -> None:
    for g in range(weights.shape[0]):
        inner, outer = weights.shape[1], weights.shape[2]
        multiply(x, g * inner, weights[g], y, g * outer, outer)


def matmul_rows(x: Tensor, panels: Tensor, outer: int) -> Tensor:
    """``x`` [T, K] times a weight of ``outer`` outputs, packed by ``pack_weight``: [T, outer]."""
    y = torch.empty((x.shape[0], outer))
    _panels(x.numpy(), panels.numpy(), y.numpy())
    return y


def matmul_groups(x: Tensor, weights: Tensor) -> Tensor:
    """Slices of ``x`` [T, G * K], each times its own weight of ``weights`` [G, K, N]: [T, G * N]."""
    y = torch.empty((x.shape[0], weights.shape[0] * weights.shape[2]))
    _groups(x.numpy(), weights.numpy(), y.numpy())
    return y
