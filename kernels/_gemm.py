"""Matrix product whose every element is one sum in the order of k, whatever the number of rows.

That order makes a row's bits independent of its neighbours. Columns lie innermost, so that vectors run over them
without touching the order; up to six rows share each load of the weights.
"""

import numpy as np

from ._numba import inner
from ._tile import LANES, WIDE, edge_1, edge_4, edge_12, tile_1, tile_2, tile_4, tile_6


@inner(
    "void(float32[:,::1], int64, float32[:,::1], float32[:,::1], int64, int64)",
    "void(float32[:,::1], int64, int16[:,::1], float32[:,::1], int64, int64)",
)
def multiply(
    x: np.ndarray, from_column: int, w: np.ndarray, y: np.ndarray, to_column: int, columns: int
) -> None:
    """``x[:, from_column :][:, : K]`` times the first ``columns`` of ``w`` [K, N] into ``y[:, to_column :]``.

    ``w`` is float32, or bfloat16 as int16.
    """
    rows = x.shape[0]
    n = 0
    while n + WIDE <= columns:
        to = to_column + n
        m = 0
        while m + 6 <= rows:
            tile_6(x, m, from_column, w, n, y, to, WIDE)
            m += 6
        if m + 4 <= rows:
            tile_4(x, m, from_column, w, n, y, to, WIDE)
            m += 4
        if m + 2 <= rows:
            tile_2(x, m, from_column, w, n, y, to, WIDE)
            m += 2
        if m < rows:
            tile_1(x, m, from_column, w, n, y, to, WIDE)
        n += WIDE
    while n < columns:
        to = to_column + n
        m = 0
        while m + 12 <= rows:
            edge_12(x, m, from_column, w, n, y, to, columns - n)
            m += 12
        while m + 4 <= rows:
            edge_4(x, m, from_column, w, n, y, to, columns - n)
            m += 4
        while m < rows:
            edge_1(x, m, from_column, w, n, y, to, columns - n)
            m += 1
        n += LANES
