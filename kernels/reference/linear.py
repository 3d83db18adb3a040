"""Products of rows with a weight.

BLAS picks another summation order for another number of rows, so here the same row may come out with other last
bits beside other neighbours. The kernels fix the order; where that is not asked for, these serve many rows
faster.
"""

import torch
from torch import Tensor

PANEL = 256
"""Columns of a weight that lie together, so that a stretch of its rows fits the first cache."""


def pack_weight(weight: Tensor) -> Tensor:
    """``weight`` [N, K] to panels [ceil(N / PANEL), K, PANEL], or [1, K, N] when N is at most PANEL; zeros fill up."""
    outer = weight.shape[0]
    width = min(outer, PANEL)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outer % width))
    return padded.unflatten(0, (-1, width)).transpose(1, 2).contiguous()


def matmul_rows(x: Tensor, panels: Tensor, outer: int) -> Tensor:
    """``x`` [T, K] times a weight of ``outer`` outputs, packed by ``pack_weight``: [T, outer]."""
    if panels.shape[0] == 1:
        return x @ panels[0]
    return torch.matmul(x, panels).transpose(0, 1).flatten(1)[:, :outer].contiguous()


def matmul_groups(x: Tensor, weights: Tensor) -> Tensor:
    """Slices of ``x`` [T, G * K], each times its own weight of ``weights`` [G, K, N]: [T, G * N]."""
    groups = x.unflatten(1, (weights.shape[0], -1)).transpose(0, 1)
    return torch.bmm(groups, weights).transpose(0, 1).flatten(1)
