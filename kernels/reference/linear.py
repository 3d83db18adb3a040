"""Row-wise matrix products, optionally independent of how many rows share the call.

BLAS picks another summation order for another number of rows, so the same row can come out with other last bits
beside other neighbours. Cut into tiles of ``ROW_TILE`` rows, every product has one fixed shape and a row's bits no
longer depend on its company; ``tests/kernels/test_row_invariance.py`` holds this for the shapes that matter.
"""

import torch
from torch import Tensor

ROW_TILE = 16


def padded_rows(num_rows: int) -> int:
    """``num_rows`` rounded up to whole tiles."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


def matmul_rows(x: Tensor, weight_t: Tensor, tiled: bool) -> Tensor:
    """``x`` [T, K] times ``weight_t`` [K, N] to [T, N]. ``tiled`` needs T to be a multiple of ROW_TILE."""
    if not tiled:
        return x @ weight_t
    tiles = x.view(-1, ROW_TILE, x.shape[1])
    return torch.bmm(tiles, weight_t.expand(tiles.shape[0], -1, -1)).flatten(0, 1)
