"""RMSNorm and rotary embedding, one pass a row (spec/model.md 2.2, 2.3)."""

import math

import numpy as np
import torch
from torch import Tensor

from ._numba import Scalar, compiled, inner


@inner("float32(float32[::1])")
def mean_square(x: np.ndarray) -> Scalar:
    """Mean of the squares of ``x`` [n], in eight interleaved sums."""
    n = x.shape[0]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    whole = n // 8 * 8
    for i in range(0, whole, 8):
        s0 += x[i] * x[i]
        s1 += x[i + 1] * x[i + 1]
        s2 += x[i + 2] * x[i + 2]
        s3 += x[i + 3] * x[i + 3]
        s4 += x[i + 4] * x[i + 4]
        s5 += x[i + 5] * x[i + 5]
        s6 += x[i + 6] * x[i + 6]
        s7 += x[i + 7] * x[i + 7]
    for i in range(whole, n):
        s0 += x[i] * x[i]
    return (((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))) / np.float32(n)


@inner("float32(float32[::1], float32)")
def inverse_root(x: np.ndarray, eps: Scalar) -> Scalar:
    """1 / sqrt(mean(x^2) + eps) of one row."""
    return np.float32(1) / np.float32(math.sqrt(mean_square(x) + eps))


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
