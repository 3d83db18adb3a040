"""Logarithms of probabilities, and the likeliest ids, of rows of logits."""

import math

import numpy as np
from torch import Tensor

from ._numba import compiled, contiguous
from ._order import NUM_DIGITS, peak_of, prefix_end
from .reference.logprobs import TokenLogprobs
from .reference.sample import Ints


@compiled
def _token_logprobs(
    logits: np.ndarray,
    ids: np.ndarray,
    logprobs: np.ndarray,
    ranks: np.ndarray,
    log_masses: np.ndarray,
    top: np.ndarray,
) -> None:
    vocabulary, most = logits.shape[1], top.shape[1]
    keys, masses = np.empty(vocabulary, np.int32), np.zeros(vocabulary, np.int64)
    digits = np.empty((2, NUM_DIGITS), np.int64)
    for r in range(logits.shape[0]):
        row = contiguous(logits[r])
        at = peak_of(row, keys)
        peak, mass, larger = np.float64(row[at]), 0.0, 0
        for x in range(vocabulary):
            mass += math.exp(np.float64(row[x]) - peak)
            larger += row[x] > row[ids[r]]
        log_masses[r] = peak + math.log(mass)
        logprobs[r] = np.float64(row[ids[r]]) - log_masses[r]
        ranks[r] = larger + 1
        if most:
            last, _ = prefix_end(
                keys, masses, most, np.int64(1), contiguous(digits[0]), contiguous(digits[1])
            )
            held = 0
            for x in range(vocabulary):
                if keys[x] > last:
                    top[r, held] = x
                    held += 1
            for x in range(vocabulary):
                if keys[x] == last and held < most:
                    top[r, held] = x
                    held += 1


def token_logprobs(logits: Tensor, ids: Ints, k: int) -> TokenLogprobs:
    """Of every row of ``logits`` (fp32 [R, V]), normalised in float64; ``ids`` int64 [R]."""
    num_rows, k = len(logits), min(k, logits.shape[1])
    logprobs, log_masses = np.empty(num_rows), np.empty(num_rows)
    ranks, top = np.empty(num_rows, np.int64), np.zeros((num_rows, k), np.int64)
    rows = logits.contiguous().numpy()
    _token_logprobs(rows, ids, logprobs, ranks, log_masses, top)
    values = np.take_along_axis(rows, top, 1)
    order = np.argsort(-values, axis=1, kind="stable")
    top_logprobs = np.take_along_axis(values, order, 1) - log_masses[:, None]
    return TokenLogprobs(logprobs, ranks, np.take_along_axis(top, order, 1), top_logprobs)
