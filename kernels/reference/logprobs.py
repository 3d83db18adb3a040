"""Logarithms of probabilities, and the likeliest ids, of rows of logits (kernels/logprobs.py)."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from .sample import Doubles, Ints


class TokenLogprobs(NamedTuple):
    """Of R rows: logprob (float64 [R]) and rank from 1 (int64 [R]) of the asked ids; the k likeliest ids, ties by
    smaller id (int64 [R, k]), and their logprobs (float64 [R, k])."""

    logprobs: Doubles
    ranks: Ints
    top_ids: Ints
    top_logprobs: Doubles


def token_logprobs(logits: Tensor, ids: Ints, k: int) -> TokenLogprobs:
    """Of every row of ``logits`` (fp32 [R, V]), normalised in float64; ``ids`` int64 [R]."""
    rows = logits.numpy().astype(np.float64)
    peak = rows.max(axis=1, keepdims=True)
    logprobs = rows - peak - np.log(np.exp(rows - peak).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(logprobs, ids[:, None], 1)
    ranks = 1 + (logprobs > chosen).sum(axis=1)
    top = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    return TokenLogprobs(chosen[:, 0], ranks, top, np.take_along_axis(logprobs, top, 1))
