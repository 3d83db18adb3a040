"""Matrix product whose every element is one sum in the order of k, whatever the number of rows.

That order makes a row's bits independent of its neighbours. Columns lie innermost, so the loops vectorise
without touching the order; two rows share each load of the weights, and a block of k is reused by all rows
while it lies in cache.
"""

import numpy as np

from ._numba import inner

_BLOCK_K = 64


@inner("void(float32[::1], float32[::1], float32[:,::1], float32[::1], float32[::1], int64)")
def _two_rows(
    x0: np.ndarray, x1: np.ndarray, w: np.ndarray, y0: np.ndarray, y1: np.ndarray, columns: int
) -> None:
    depth = x0.shape[0]
    whole = depth // 4 * 4
    for k in range(0, whole, 4):
        a0, a1, a2, a3 = x0[k], x0[k + 1], x0[k + 2], x0[k + 3]
        b0, b1, b2, b3 = x1[k], x1[k + 1], x1[k + 2], x1[k + 3]
        w0, w1, w2, w3 = w[k], w[k + 1], w[k + 2], w[k + 3]
        for n in range(columns):
            y0[n] = (((y0[n] + a0 * w0[n]) + a1 * w1[n]) + a2 * w2[n]) + a3 * w3[n]
            y1[n] = (((y1[n] + b0 * w0[n]) + b1 * w1[n]) + b2 * w2[n]) + b3 * w3[n]
    for k in range(whole, depth):
        a0, b0, w0 = x0[k], x1[k], w[k]
        for n in range(columns):
            y0[n] += a0 * w0[n]
            y1[n] += b0 * w0[n]


@inner("void(float32[::1], float32[:,::1], float32[::1], int64)")
def _one_row(x: np.ndarray, w: np.ndarray, y: np.ndarray, columns: int) -> None:
    depth = x.shape[0]
    whole = depth // 8 * 8
    for k in range(0, whole, 8):
        a0, a1, a2, a3 = x[k], x[k + 1], x[k + 2], x[k + 3]
        a4, a5, a6, a7 = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        w0, w1, w2, w3 = w[k], w[k + 1], w[k + 2], w[k + 3]
        w4, w5, w6, w7 = w[k + 4], w[k + 5], w[k + 6], w[k + 7]
        for n in range(columns):
            near = (((y[n] + a0 * w0[n]) + a1 * w1[n]) + a2 * w2[n]) + a3 * w3[n]
            y[n] = (((near + a4 * w4[n]) + a5 * w5[n]) + a6 * w6[n]) + a7 * w7[n]
    for k in range(whole, depth):
        a0, w0 = x[k], w[k]
        for n in range(columns):
            y[n] += a0 * w0[n]


@inner("void(float32[:,::1], int64, float32[:,::1], float32[:,::1], int64, int64)")
def multiply(
    x: np.ndarray, from_column: int, w: np.ndarray, y: np.ndarray, to_column: int, columns: int
) -> None:
    """``x[:, from_column :][:, : K]`` times the first ``columns`` of ``w`` [K, N] into ``y[:, to_column :]``."""
    rows = x.shape[0]
    inner = w.shape[0]
    stop = to_column + columns
    for m in range(rows):
        for n in range(to_column, stop):
            y[m, n] = np.float32(0)
    for begin in range(0, inner, _BLOCK_K):
        end = min(inner, begin + _BLOCK_K)
        left, right = from_column + begin, from_column + end
        block = w[begin:end]
        for m in range(0, rows - 1, 2):
            _two_rows(
                x[m, left:right],
                x[m + 1, left:right],
                block,
                y[m, to_column:stop],
                y[m + 1, to_column:stop],
                columns,
            )
        if rows % 2:
            _one_row(x[rows - 1, left:right], block, y[rows - 1, to_column:stop], columns)
