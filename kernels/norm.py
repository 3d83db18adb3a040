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


@compiled
def _rotation(positions: np.ndarray, frequencies: np.ndarray, out: np.ndarray) -> None:
    for t in range(positions.shape[0]):
        for i in range(frequencies.shape[0]):
            angle = np.float64(positions[t]) * frequencies[i]
            out[t, i, 0] = math.cos(angle)
            out[t, i, 1] = math.sin(angle)


def rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Complex rotations exp(i p f): complex64 [T, r] for int64 ``positions`` [T] and float64 ``frequencies`` [r].

    Angles are taken in float64, so that a position of a million loses nothing.
    """
    out = torch.empty((positions.shape[0], frequencies.shape[0]), dtype=torch.complex64)
    _rotation(positions.numpy(), frequencies.numpy(), turn_parts(out))
    return out


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
