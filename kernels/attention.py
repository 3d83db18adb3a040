"""Sparse attention over window keys and selected entries with one sink per head (spec/model.md 2.5)."""

import math

import numpy as np
import torch
from torch import Tensor

from ._gemm import multiply
from ._numba import compiled


@compiled
def _sink_attention(
    queries: np.ndarray,
    window: np.ndarray,
    window_index: np.ndarray,
    entries: np.ndarray,
    chosen: np.ndarray,
    sink: np.ndarray,
    out: np.ndarray,
) -> None:
    heads, width = queries.shape[1], queries.shape[2]
    most = window_index.shape[1] + chosen.shape[1]
    scale = np.float32(1) / np.float32(math.sqrt(width))
    keys = np.empty((most, width), np.float32)
    across = np.empty((width, most), np.float32)
    scores = np.empty((heads, most), np.float32)
    totals = np.empty(heads, np.float32)
    for t in range(queries.shape[0]):
        n = 0
        for i in range(window_index.shape[1]):
            place = window_index[t, i]
            if place >= 0:
                for c in range(width):
                    keys[n, c] = window[place, c]
                n += 1
        for i in range(chosen.shape[1]):
            if chosen[t, i] >= 0:
                for c in range(width):
                    keys[n, c] = entries[t, i, c]
                n += 1
        for c in range(width):
            for i in range(n):
                across[c, i] = keys[i, c]
        multiply(queries[t], 0, across, scores, 0, n)
        for h in range(heads):
            peak = sink[h]
            for i in range(n):
                scores[h, i] *= scale
                peak = max(peak, scores[h, i])
            total = np.float32(0)
            for i in range(n):
                scores[h, i] = np.float32(math.exp(scores[h, i] - peak))
                total += scores[h, i]
            total += np.float32(math.exp(sink[h] - peak))
            totals[h] = total
        multiply(scores, 0, keys[:n], out[t], 0, width)
        for h in range(heads):
            for c in range(width):
                out[t, h, c] /= totals[h]


def sink_attention(
    queries: Tensor,
    window: Tensor,
    window_index: Tensor,
    entries: Tensor,
    chosen: Tensor,
    sink: Tensor,
) -> Tensor:
    """One softmax over all keys of a row and the head's sink; a key is also its value.

    ``queries`` [T, h, d]. A row's keys are ``window`` [N, d] at ``window_index`` int64 [T, W] and its own
    ``entries`` [T, k, d] where ``chosen`` int64 [T, k]; a negative index or choice is no key. ``sink`` [h]: [T,
    h, d]. A row without keys gives 0, and what lies behind no key does not matter.
    """
    out = torch.empty_like(queries)
    _sink_attention(
        queries.numpy(),
        window.numpy(),
        window_index.numpy(),
        entries.numpy(),
        chosen.numpy(),
        sink.numpy(),
        out.numpy(),
    )
    return out
