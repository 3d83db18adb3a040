"""RMSNorm and rotary embedding, one pass a row (spec/model.md 2.2, 2.3)."""

import math

import numpy as np
import torch
from torch import Tensor

from . import _steps
from ._numba import Scalar, compiled


@compiled
def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: Scalar, out: np.ndarray) -> None:
    _steps.rms_norm(x, weight, eps, out)


@compiled
def _rotate_last(x: np.ndarray, turn: np.ndarray, sign: Scalar, out: np.ndarray) -> None:
    _steps.rotate_last(x, turn, sign, out)


def turn_parts(turn: Tensor) -> np.ndarray:
    """Complex64 [T, r] as compiled code reads it: float32 [T, r, 2]."""
    return turn.numpy().view(np.float32).reshape(*turn.shape, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis of ``x`` [T, n]."""
    out = torch.empty_like(x)
    _rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out


def rotate_last(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """``x`` [T, ..., n] with its last 2 * turn.shape[-1] channels, paired as neighbours, turned by ``turn`` [T, .]."""
    out = torch.empty_like(x)
    shape = (x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    sign = np.float32(-1 if inverse else 1)
    _rotate_last(x.numpy().reshape(shape), turn_parts(turn), sign, out.numpy().reshape(shape))
    return out
