"""Pooling of token pairs into one latent (spec/model.md 2.6)."""

import math

import numpy as np
import torch
from torch import Tensor

from ._numba import compiled

_ONE = np.float32(1)


@compiled
def _pool_pairs(
    projected: np.ndarray,
    pending: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    first_row: np.ndarray,
    out: np.ndarray,
) -> None:
    ring, width = pending.shape[1], pending.shape[3]
    done = 0
    for s in range(slots.shape[0]):
        held = pending[slots[s]]
        begin, end = first_row[s], first_row[s + 1]
        for t in range(begin, end):
            position = starts[s] + t - begin
            if position % 2 == 0:
                continue
            before = held[(position - 1) % ring]
            for c in range(width):
                if t == begin:
                    value, gate = before[0, c], before[1, c]
                else:
                    value, gate = projected[t - 1, c], projected[t - 1, width + c]
                first = _ONE / (_ONE + np.float32(math.exp(projected[t, width + c] - gate)))
                out[done, c] = first * value + (_ONE - first) * projected[t, c]
            done += 1
        for t in range(max(begin, end - ring), end):
            place = held[(starts[s] + t - begin) % ring]
            for c in range(width):
                place[0, c] = projected[t, c]
                place[1, c] = projected[t, width + c]


def pool_pairs(
    projected: Tensor,
    pending: Tensor,
    slots: Tensor,
    starts: Tensor,
    first_row: Tensor,
    num_pairs: int,
) -> Tensor:
    """Latents [num_pairs, d] of the pairs that end in ``projected`` [T, 2 d] (values, gates), in row order.

    Per channel, a softmax over the two gates weights the two values. Span s has the rows ``first_row[s]`` to
    ``first_row[s + 1]`` at positions from ``starts[s]`` (int64 [S]); a pair ends at an odd position. The even
    half may be older: ``pending`` [slots, ring, 2, d] holds the last rows by position, and is brought up to
    date.
    """
    out = torch.empty((num_pairs, pending.shape[3]))
    _pool_pairs(
        projected.numpy(),
        pending.numpy(),
        slots.numpy(),
        starts.numpy(),
        first_row.numpy(),
        out.numpy(),
    )
    return out
