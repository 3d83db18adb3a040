"""Manifold-constrained hyper-connections, one pass a row (spec/model.md 3).

Shapes: T rows, K streams, H hidden.
"""

import math

import numpy as np
import torch
from torch import Tensor

from . import _steps
from ._numba import Scalar, compiled, inner
from ._reduce import inverse_root
from .reference.storage import FLOAT32

_ONE = np.float32(1)


@inner()
def _sigmoid(x: Scalar) -> Scalar:
    return _ONE / (_ONE + np.float32(math.exp(-x)))


@inner("void(float32[:,::1], int64, float32)")
def _sinkhorn(mixed: np.ndarray, iterations: int, eps: Scalar) -> None:
    """Softmax over columns of ``mixed`` [K, K], then ``iterations`` alternating normalisations, in place."""
    k = mixed.shape[0]
    for step in range(iterations):
        for row in range(k):
            if step == 0:
                peak = mixed[row, 0]
                for column in range(1, k):
                    peak = max(peak, mixed[row, column])
                for column in range(k):
                    mixed[row, column] = np.float32(math.exp(mixed[row, column] - peak))
            total = mixed[row, 0]
            for column in range(1, k):
                total += mixed[row, column]
            if step == 0:
                for column in range(k):
                    mixed[row, column] = mixed[row, column] / total + eps
            else:
                total += eps
                for column in range(k):
                    mixed[row, column] /= total
        for column in range(k):
            total = mixed[0, column]
            for row in range(1, k):
                total += mixed[row, column]
            total += eps
            for row in range(k):
                mixed[row, column] /= total


@inner()
def _split(
    flat: np.ndarray,
    mixes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray,
    iterations: int,
    eps: Scalar,
    norm_eps: Scalar,
    pre: np.ndarray,
    post: np.ndarray,
    comb: np.ndarray,
) -> None:
    k = pre.shape[1]
    for t in range(flat.shape[0]):
        root = inverse_root(flat[t], norm_eps)
        for n in range(k):
            pre[t, n] = _sigmoid(mixes[t, n] * root * scale[0] + base[n]) + eps
            post[t, n] = np.float32(2) * _sigmoid(mixes[t, k + n] * root * scale[1] + base[k + n])
        for row in range(k):
            for column in range(k):
                i = (2 + row) * k + column
                comb[t, row, column] = mixes[t, i] * root * scale[2] + base[i]
        _sinkhorn(comb[t], iterations, eps)


@compiled
def _mix(
    flat: np.ndarray,
    mixes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray,
    iterations: int,
    eps: Scalar,
    norm_eps: Scalar,
    pre: np.ndarray,
    post: np.ndarray,
    comb: np.ndarray,
) -> None:
    _split(flat, mixes, scale, base, iterations, eps, norm_eps, pre, post, comb)


@compiled
def _mix_streams(
    flat: np.ndarray,
    panels: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray,
    iterations: int,
    eps: Scalar,
    norm_eps: Scalar,
    pre: np.ndarray,
    post: np.ndarray,
    comb: np.ndarray,
) -> None:
    mixes = np.empty((flat.shape[0], base.shape[0]), np.float32)
    _steps.product(flat, panels, base.shape[0], FLOAT32, mixes)
    _split(flat, mixes, scale, base, iterations, eps, norm_eps, pre, post, comb)


@compiled
def _collapse_norm(
    streams: np.ndarray, weights: np.ndarray, norm_weight: np.ndarray, eps: Scalar, out: np.ndarray
) -> None:
    for t in range(streams.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = streams[t, 0, i] * weights[t, 0]
        for k in range(1, streams.shape[1]):
            for i in range(out.shape[1]):
                out[t, i] += streams[t, k, i] * weights[t, k]
        factor = inverse_root(out[t], eps)
        for i in range(out.shape[1]):
            out[t, i] = out[t, i] * factor * norm_weight[i]


@compiled
def _collapse(streams: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    for t in range(streams.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = streams[t, 0, i] * weights[t, 0]
        for k in range(1, streams.shape[1]):
            for i in range(out.shape[1]):
                out[t, i] += streams[t, k, i] * weights[t, k]


@compiled
def _combine(
    streams: np.ndarray, output: np.ndarray, post: np.ndarray, comb: np.ndarray, out: np.ndarray
) -> None:
    for t in range(streams.shape[0]):
        for n in range(streams.shape[1]):
            for i in range(streams.shape[2]):
                out[t, n, i] = post[t, n] * output[t, i]
            for m in range(streams.shape[1]):
                weight = comb[t, m, n]
                for i in range(streams.shape[2]):
                    out[t, n, i] += weight * streams[t, m, i]


def mix_weights(
    streams: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale ``mixes`` [T, K * (K + 2)] by the norm of ``streams`` [T, K, H] and split them:
    pre [T, K], post [T, K] and comb [T, K, K] (row, column)."""
    rows, k, _ = streams.shape
    pre, post, comb = torch.empty((rows, k)), torch.empty((rows, k)), torch.empty((rows, k, k))
    _mix(
        streams.flatten(1).numpy(),
        mixes.numpy(),
        scale.numpy(),
        base.numpy(),
        iterations,
        np.float32(eps),
        np.float32(norm_eps),
        pre.numpy(),
        post.numpy(),
        comb.numpy(),
    )
    return pre, post, comb


def mix_streams(
    streams: Tensor,
    panels: np.ndarray,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mix_weights`` of the product of ``streams`` [T, K, H] with ``panel_bits`` [1, ...], in one call."""
    rows, k, _ = streams.shape
    pre, post, comb = torch.empty((rows, k)), torch.empty((rows, k)), torch.empty((rows, k, k))
    _mix_streams(
        streams.flatten(1).numpy(),
        panels,
        scale.numpy(),
        base.numpy(),
        iterations,
        np.float32(eps),
        np.float32(norm_eps),
        pre.numpy(),
        post.numpy(),
        comb.numpy(),
    )
    return pre, post, comb


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum over k of ``weights`` [T, K] times ``streams`` [T, K, H]: [T, H]."""
    out = torch.empty((streams.shape[0], streams.shape[2]))
    _collapse(streams.numpy(), weights.numpy(), out.numpy())
    return out


def collapse_norm(streams: Tensor, weights: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the sum over k of ``weights`` [T, K] times ``streams`` [T, K, H]: [T, H]."""
    out = torch.empty((streams.shape[0], streams.shape[2]))
    _collapse_norm(
        streams.numpy(), weights.numpy(), norm_weight.numpy(), np.float32(eps), out.numpy()
    )
    return out


def combine(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``post[n] * output + sum over m of comb[m, n] * streams[m]``: [T, K, H]."""
    out = torch.empty_like(streams)
    _combine(streams.numpy(), output.numpy(), post.numpy(), comb.numpy(), out.numpy())
    return out
