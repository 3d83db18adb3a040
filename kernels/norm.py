"""RMSNorm and rotary embedding, one pass a row (spec/model.md 2.2, 2.3)."""

import math

import numpy as np
import torch
from torch import Tensor

from ._numba import Scalar, compiled
from ._reduce import inverse_root


@compiled
def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: Scalar, out: np.ndarray) -> None:
    for t in range(x.shape[0]):
        factor = inverse_root(x[t], eps)
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] * factor * weight[i]


@compiled
def _rotate_last(x: np.ndarray, turn: np.ndarray, sign: Scalar, out: np.ndarray) -> None:
    """``x`` [T, h, n]; ``turn`` [T, r, 2] (cosine, sine)."""
    first = x.shape[2] - 2 * turn.shape[1]
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(first):
                out[t, h, i] = x[t, h, i]
            for pair in range(turn.shape[1]):
                c, s = turn[t, pair, 0], turn[t, pair, 1] * sign
                a, b = x[t, h, first + 2 * pair], x[t, h, first + 2 * pair + 1]
                out[t, h, first + 2 * pair] = a * c - b * s
                out[t, h, first + 2 * pair + 1] = a * s + b * c


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
    parts = turn.numpy().view(np.float32).reshape(*turn.shape, 2)
    _rotate_last(x.numpy().reshape(shape), parts, sign, out.numpy().reshape(shape))
    return out
