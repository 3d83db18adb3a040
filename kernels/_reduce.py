"""Sums over a row, in one order whatever else is computed."""

import math

import numpy as np

from ._numba import Scalar, inner


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
