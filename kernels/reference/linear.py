"""Products of rows with a weight.

BLAS picks another summation order for another number of rows, so here the same row may come out with other last
bits beside other neighbours. The kernels fix the order.
"""

import torch
from torch import Tensor

PANEL = 64
"""Columns of a weight that lie together, so that all of their rows are read in one stretch."""


def pack_weight(weight: Tensor) -> Tensor:
    """``weight`` [..., N, K] to panels [..., ceil(N / PANEL), K, PANEL], or [..., 1, K, N] when N is less.

    Zeros fill up. Panels are bfloat16 where that holds every value, as it does for all that is stored in FP4, FP8 or
    bfloat16, and float32 otherwise.
    """
    outer = weight.shape[-2]
    width = min(outer, PANEL)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outer % width))
    panels = padded.unflatten(-2, (-1, width)).transpose(-1, -2).contiguous()
    halves = panels.to(torch.bfloat16)
    return halves if torch.equal(halves.float(), panels) else panels


def unpack_weight(panels: Tensor, outer: int) -> Tensor:
    """Panels of ``pack_weight`` to float32 [..., K, N]."""
    return panels.float().transpose(-2, -3).flatten(-2)[..., :outer]


def matmul_rows(x: Tensor, panels: Tensor, outer: int) -> Tensor:
    """``x`` [T, K] times a weight of ``outer`` outputs, packed by ``pack_weight``: [T, outer]."""
    return x @ unpack_weight(panels, outer)


def matmul_groups(x: Tensor, panels: Tensor, outer: int) -> Tensor:
    """Slices of ``x`` [T, G * K], each times its own weight of ``outer`` outputs in ``panels`` [G, ...]: [T, G * N]."""
    groups = x.unflatten(1, (panels.shape[0], -1)).transpose(0, 1)
    return torch.bmm(groups, unpack_weight(panels, outer)).transpose(0, 1).flatten(1)
