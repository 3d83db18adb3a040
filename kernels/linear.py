"""Products of rows with a weight, each row's bits independent of the others (spec/model.md 2.4)."""

import numpy as np
import torch
from torch import Tensor

from . import _steps
from ._numba import compiled
from .reference.linear import pack_weight
from .reference.storage import FLOAT32

__all__ = ["matmul_groups", "matmul_rows", "pack_weight", "panel_bits", "product"]


@compiled
def _product(x: np.ndarray, panels: np.ndarray, outer: int, kind: int, y: np.ndarray) -> None:
    _steps.product(x, panels, outer, kind, y)


def panel_bits(panels: Tensor) -> np.ndarray:
    """Panels as compiled code reads them: bfloat16 as int16."""
    return (panels.view(torch.int16) if panels.dtype == torch.bfloat16 else panels).numpy()


def product(x: Tensor, bits: np.ndarray, outer: int, kind: int = FLOAT32) -> Tensor:
    """As ``matmul_groups``, of ``x`` rounded as ``kind`` says, with ``panel_bits`` that were made before."""
    y = torch.empty((x.shape[0], bits.shape[0] * outer))
    _product(x.numpy(), bits, outer, kind, y.numpy())
    return y


def matmul_rows(x: Tensor, panels: Tensor, outer: int) -> Tensor:
    """``x`` [T, K] times a weight of ``outer`` outputs, packed by ``pack_weight``: [T, outer]."""
    return product(x, panel_bits(panels)[None], outer)


def matmul_groups(x: Tensor, panels: Tensor, outer: int) -> Tensor:
    """Slices of ``x`` [T, G * K], each times its own weight of ``outer`` outputs in ``panels`` [G, ...]: [T, G * N]."""
    return product(x, panel_bits(panels), outer)
