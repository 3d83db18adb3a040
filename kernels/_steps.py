"""Steps over all rows of an array, from which the kernels of several files are put together."""

import numpy as np

from ._formats import round_row
from ._gemm import multiply
from ._numba import Scalar, inner
from ._reduce import inverse_root
from .reference.storage import FLOAT32


@inner()
def round_all(x: np.ndarray, kind: int, out: np.ndarray) -> None:
    """Every row of ``x`` [T, n] as stored."""
    for t in range(x.shape[0]):
        round_row(x, t, out, kind)


@inner()
def product(x: np.ndarray, panels: np.ndarray, outer: int, kind: int, y: np.ndarray) -> None:
    """Slices of ``x`` [T, G * K], rounded as ``kind`` says, each times its ``outer`` columns of ``panels`` [G, ...]."""
    if kind != FLOAT32:
        rounded = np.empty(x.shape, np.float32)
        round_all(x, kind, rounded)
        x = rounded
    depth, width = panels.shape[2], panels.shape[3]
    for g in range(panels.shape[0]):
        for p in range(panels.shape[1]):
            columns = min(width, outer - p * width)
            multiply(x, g * depth, panels[g, p], y, g * outer + p * width, columns)


@inner("void(float32[:,::1], float32[::1], float32, float32[:,::1])")
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: Scalar, out: np.ndarray) -> None:
    """RMSNorm of every row of ``x`` [T, n]; ``out`` may be ``x``."""
    for t in range(x.shape[0]):
        factor = inverse_root(x[t], eps)
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] * factor * weight[i]


@inner("void(float32[:,:,::1], float32[:,:,::1], float32, float32[:,:,::1])")
def rotate_last(x: np.ndarray, turn: np.ndarray, sign: Scalar, out: np.ndarray) -> None:
    """``x`` [T, h, n] turned by ``turn`` [T, r, 2] (cosine, sine); ``out`` may be ``x``."""
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
