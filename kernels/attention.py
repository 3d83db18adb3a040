"""Sparse attention over window keys and selected entries with one sink per head (spec/model.md 2.5)."""

import math

import numpy as np
import torch
from torch import Tensor

from ._gemm import multiply
from ._lanes import LANES, exp_16
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
    across = np.empty((width, heads), np.float32)
    products = np.empty((most, heads), np.float32)
    scores = np.zeros((heads, (most + LANES - 1) // LANES * LANES), np.float32)
    totals, peaks = np.empty(heads, np.float32), np.empty(heads, np.float32)
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
        for h in range(heads):
            for c in range(width):
                across[c, h] = queries[t, h, c] * scale
        multiply(keys[:n], 0, across, products, 0, heads)
        for h in range(heads):
            peaks[h] = sink[h]
        for i in range(n):
            for h in range(heads):
                scores[h, i] = products[i, h]
                peaks[h] = max(peaks[h], products[i, h])
        for h in range(heads):
            totals[h] = np.float32(0)
            for i in range(0, n, LANES):
                exp_16(scores, h, i, peaks[h])
        for i in range(n):
            for h in range(heads):
                totals[h] += scores[h, i]
        for h in range(heads):
            totals[h] += np.float32(math.exp(sink[h] - peaks[h]))
        multiply(scores, 0, keys[:n], out[t], 0, width)
        for h in range(heads):
            share = np.float32(1) / totals[h]
            for c in range(width):
                out[t, h, c] *= share


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
